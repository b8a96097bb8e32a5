# SPDX-License-Identifier: Apache-2.0
"""FlashMaskImpl: the attention of one layer."""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from flashmask import append_kv, flashmask_with_kvcache
from flashmask.errors import UnsupportedError
from flashmask.inference import KvCache
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from .metadata import FlashMaskMetadata, SharedBlocks


class FlashMaskImpl(AttentionImpl[FlashMaskMetadata]):
    """Writes a layer's keys and values into vLLM's cache, and attends over it where it lies.

    vLLM's cache of a layer is [blocks, heads_kv, block_size, head_dim + head_dim_v], in whatever order in memory.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ):
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.window = kv_cache_dtype, sliding_window
        self._has_float8 = is_quantized_kv_cache(kv_cache_dtype)
        self._cache: KvCache | None = None
        self._cache_tensor: torch.Tensor | None = None  # of vLLM, that _cache has views of
        self._options = {
            "softmax_scale": scale,
            "softcap": logits_soft_cap or 0.0,
            "sink": sinks,
            "alibi_slopes": None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32),
        }
        self.has_alibi = alibi_slopes is not None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashMaskMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes attention of query [tokens, heads, head_dim] into output [tokens, heads, head_dim_v] and returns it.

        Keys and values of the step are in the cache already. Rows that pad the step stay as they are; without metadata,
        where vLLM measures memory, all are 0. Raises UnsupportedError if the output is to be quantized.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale is given; the backend of flashmask does not quantize its output")
        if attn_metadata is None:
            return output.fill_(0)
        cache = self.cache(layer, kv_cache, attn_metadata)
        mask, plan = attn_metadata.planned_mask(layer, cache)
        tokens = attn_metadata.num_actual_tokens
        rows, out = query[:tokens], output[:tokens]
        if isinstance(attn_metadata.plans, SharedBlocks):
            out.copy_(attn_metadata.plans.forest.attention(rows, cache, mask, plan, **self._options))
        else:
            options = {"batch_invariant": envs.VLLM_BATCH_INVARIANT, **self._options}
            flashmask_with_kvcache(rows, cache, mask, plan, attn_metadata.query_start_loc, out=out, **options)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes key [tokens, heads_kv, head_dim] and value to slots of the cache; tokens past them are padding."""
        tokens = len(slot_mapping)
        append_kv(key[:tokens], value[:tokens], self._layer_cache(layer, kv_cache), slots=slot_mapping)

    def cache(self, layer: Any, kv_cache: torch.Tensor, metadata: FlashMaskMetadata) -> KvCache:
        """The layer's cache, with the tables of a step."""
        cache = self._layer_cache(layer, kv_cache)
        if cache.page_table is not metadata.block_table or cache.seqlens is not metadata.seq_lens:
            cache.page_table, cache.seqlens = metadata.block_table, metadata.seq_lens
        return cache

    def _layer_cache(self, layer, kv_cache):
        if self._cache is None or self._cache_tensor is not kv_cache:
            k, v = kv_cache.transpose(1, 2).tensor_split([self.head_size], dim=-1)
            scales = {}
            if self._has_float8:
                k, v = k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)
                scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
            self._cache, self._cache_tensor = KvCache(k, v, **scales), kv_cache
        return self._cache
