# SPDX-License-Identifier: Apache-2.0
"""flashmask as an attention backend of vLLM, named CUSTOM there."""


def register() -> None:
    """Names the backend to vLLM, which calls this in each of its processes. Imports nothing of flashmask yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "flashmask_vllm.backend.FlashMaskBackend")
