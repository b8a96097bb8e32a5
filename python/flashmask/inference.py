# SPDX-License-Identifier: Apache-2.0
"""Attention over KV caches, paged or contiguous, in PyTorch: decode, chunked prefill, trees of drafts."""

from .torch.cached_attention import CachePlan, append_kv, explain, flashmask_with_kvcache, scales_of
from .torch.flash_attn_cache import flash_attn_with_kvcache
from .torch.forest import Forest
from .torch.kv_cache import KvCache, SequenceMask

__all__ = [
    "CachePlan",
    "Forest",
    "KvCache",
    "SequenceMask",
    "append_kv",
    "explain",
    "flash_attn_with_kvcache",
    "flashmask_with_kvcache",
    "scales_of",
]
