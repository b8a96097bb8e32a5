# SPDX-License-Identifier: Apache-2.0
"""FlashMaskBackend: what it takes, which vLLM asks before it chooses a backend."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from .layer import FlashMaskImpl
from .metadata import FlashMaskMetadataBuilder

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class FlashMaskBackend(AttentionBackend):
    """Decoder attention over vLLM's paged cache. All that is not named here vLLM's base class refuses by name."""

    supported_dtypes = list(_DTYPES.values())
    supported_kv_cache_dtypes = ["auto", *_DTYPES, "fp8", "fp8_e4m3"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The name in AttentionBackendEnum, where vLLM looks it up."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashMaskImpl]:
        return FlashMaskImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMaskMetadataBuilder]:
        return FlashMaskMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= DeviceCapability(8, 0)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        """Reasons why a layer cannot be had, none if it can; vLLM's of what the methods above say, and our own."""
        reasons = super().validate_configuration(**asked)
        dtype, cache = asked["dtype"], asked["kv_cache_dtype"]
        if cache in _DTYPES and _DTYPES[cache] != dtype:
            reasons.append(
                f"kv_cache_dtype {cache} with {dtype} not supported: a cache of 16 bits has the model's dtype"
            )
        if asked.get("use_batch_invariant"):
            if asked["device_capability"].major != 9:
                reasons.append("batch invariance not supported but on compute capability 9.x")
            if cache is not None and is_quantized_kv_cache(cache):
                reasons.append(f"batch invariance with kv_cache_dtype {cache} not supported")
        return reasons
