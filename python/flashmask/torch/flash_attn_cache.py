# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache: flash-attn's function of that name, over append_kv and flashmask_with_kvcache."""

from __future__ import annotations

from typing import Any

import torch

from .._core import arguments
from .._core.annotations import Window
from .cached_attention import append_kv, flashmask_with_kvcache, refuse_elsewhere, refuse_gradients
from .kv_cache import KvCache, SequenceMask


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    sink: torch.Tensor | None = None,
    scheduler_metadata: Any = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    **elsewhere: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over a KV cache with flash-attn's names and meaning; see flashmask_with_kvcache for masks.

    q: (batch, seqlen_q, heads_q, head_dim), or (rows, heads_q, head_dim) with cu_seqlens_q.
    k_cache, v_cache: (batch_cache, seqlen_cache, heads_kv, head_dim), or with block_table, also called page_table,
        (pages, page_size, heads_kv, head_dim).
    k, v: (batch, seqlen_new, heads_kv, head_dim), written into the cache first, behind cache_seqlens.
    cache_seqlens: int32 (batch,) or an int: keys in the cache, *without* the new ones. None, if there are none: all.
    cache_batch_idx: int32 (batch,): which entry of the cache each request has.
    causal, window_size: aligned at the bottom right, as flash-attn has them.
    num_splits, scheduler_metadata, pack_gqa, sm_margin, max_seqlen_q: hints to flash-attn's scheduler, ignored.
    rotary_cos, rotary_sin, cache_leftpad, and flash-attn's arguments that are not here, as k_descale: None alone;
        UnsupportedError says what to do.

    Returns out, or (out, lse) with return_softmax_lse, lse (batch, heads_q, seqlen_q) or (heads_q, rows).

    Raises as flashmask_with_kvcache. What it refuses after new keys are written may be called again: they are written
    to the same places.
    """
    refuse_elsewhere({"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_leftpad": cache_leftpad, **elsewhere})
    if torch.is_grad_enabled():
        refuse_gradients({"q": q, "k": k, "v": v, "sink": sink, "alibi_slopes": alibi_slopes})
    if block_table is not None and page_table is not None:
        raise ValueError("block_table and page_table are both given; they are one argument by two names")
    table = block_table if page_table is None else page_table
    if cache_batch_idx is not None:
        if table is not None:
            raise ValueError("cache_batch_idx is given beside a page_table, which says where keys are itself")
        table = cache_batch_idx[:, None].to(torch.int32)  # a page for each request
    _check_new_keys(k, v, cache_seqlens)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    seqlens = _lengths(cache_seqlens, k_cache, table, batch)
    new = 0 if k is None else k.shape[1]
    cache = KvCache(k_cache, v_cache, table, seqlens + new)
    if k is not None and v is not None:
        append_kv(k, v, cache)
    return flashmask_with_kvcache(
        q,
        cache,
        SequenceMask(causal=causal, window_size=window_size),
        cu_seqlens_q=cu_seqlens_q,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
        alibi_slopes=alibi_slopes,
        return_softmax_lse=return_softmax_lse,
    )


def _check_new_keys(k: torch.Tensor | None, v: torch.Tensor | None, cache_seqlens: torch.Tensor | int | None) -> None:
    """ValueError unless new keys come with their values, and with the place where they go."""
    if (k is None) != (v is None):
        absent, given = ("v", "k") if v is None else ("k", "v")
        raise ValueError(f"{given} is given and {absent} is not; new keys come with their values")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is None beside k and v; it must say how many keys stand before the new ones")


def _lengths(
    given: torch.Tensor | int | None, k_cache: torch.Tensor, table: torch.Tensor | None, batch: int
) -> torch.Tensor:
    """cache_seqlens as a tensor."""
    if isinstance(given, torch.Tensor):
        return given.to(torch.int32)
    room = k_cache.shape[1] * (1 if table is None else table.shape[1])
    keys = room if given is None else arguments.length("cache_seqlens", given)
    return torch.full((batch,), keys, dtype=torch.int32, device=k_cache.device)
