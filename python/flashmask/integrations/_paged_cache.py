# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache of transformers' continuous batching: generate_batch and `transformers serve`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface

from .._core.errors import UnsupportedError
from ..torch.cached_attention import CachePlan, append_kv, flashmask_with_kvcache
from ..torch.kv_cache import KvCache, SequenceMask
from . import _model_arguments

_paged_names: dict[str, str] = {}  # by the name that other calls have


def register(name: str) -> None:
    """Has continuous batching run models of this implementation by another, for its paged cache.

    The other one has no masks, which transformers then makes none of.
    """
    _paged_names[name] = f"{name}_paged"
    AttentionInterface.register(_paged_names[name], attention)
    _join_continuous_batching()
    _join_settings()
    _join_server()


@functools.cache  # once
def _join_continuous_batching():
    """By itself continuous batching takes a few implementations of its own, and refuses all other names."""
    try:
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    except ImportError:  # of versions without it
        return
    switch = ContinuousBatchingManager.switch_to_cb_friendly_attn

    @functools.wraps(switch)
    def switch_to_paged(manager, model, *arguments, **by_name):
        name = model.config._attn_implementation
        if name in _paged_names:
            model.set_attn_implementation(_paged_names[name])
            manager._original_attn_impl = name  # to which the manager returns when it stops
        elif name not in _paged_names.values():
            switch(manager, model, *arguments, **by_name)

    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch_to_paged


@functools.cache  # once
def _join_settings():
    """transformers tells by its name whether an attention needs masks. One that needs none gets CUDA graphs, and page
    tables in steps of single rows, in place of the index of every token."""
    try:
        from transformers.generation.continuous_batching import cache, initialization
    except ImportError:  # of versions without it
        return
    has_no_masks = initialization.is_flash_attention_requested
    check_tables = initialization.ensure_decode_fast_path_is_available

    def is_ours(config):
        return getattr(config, "_attn_implementation", None) in _paged_names.values()

    @functools.wraps(has_no_masks)
    def maskless(config=None, *arguments, **by_name):
        return is_ours(config) or has_no_masks(config, *arguments, **by_name)

    @functools.wraps(check_tables)
    def refuse_tables(config, *arguments, **by_name):
        kinds = map(initialization.ATTN_TYPE_TO_ALLOCATOR.get, initialization.group_layers_by_attn_type(config))
        if not is_ours(config) or not all(kind.supports_block_table for kind in kinds):
            check_tables(config, *arguments, **by_name)

    initialization.is_flash_attention_requested = cache.is_flash_attention_requested = maskless
    initialization.ensure_decode_fast_path_is_available = refuse_tables


@functools.cache  # once
def _join_server():
    """Nor does `transformers serve` take other names, even those that are registered."""
    try:
        from transformers.cli.serving.model_manager import ModelManager
    except ImportError:  # of versions without it, or without the packages that its modules import
        return
    check = ModelManager._validate_args

    @functools.wraps(check)
    def check_others(manager):
        name = manager.attn_implementation
        if name in _paged_names:
            manager.attn_implementation = None
        check(manager)
        manager.attn_implementation = name

    ModelManager._validate_args = check_others


class _Step(NamedTuple):
    """The places of the keys that a forward's layers of one kind see, as in KvCache."""

    page_table: Any
    seqlens: torch.Tensor | None


class _Served(NamedTuple):
    """Kept for one cache of transformers'."""

    layers: dict[int, KvCache]
    steps: dict[int, _Step]  # by the kind's index
    plans: dict[tuple[int, ...], CachePlan]  # captured steps hold theirs


_served: WeakKeyDictionary[Any, _Served] = WeakKeyDictionary()


@torch.compiler.disable  # a trace would copy the cache, into which layers write
def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    cache: Any = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    output_attentions: bool | None = False,
    **step: Any,
) -> tuple[torch.Tensor, None]:
    """Writes a step's keys and values into transformers' PagedAttentionCache and attends over it where it lies.

    query, key, value: [1, heads, rows, head_dim], the rows of all requests, one request after the other.
    step: see _step_keys and _table_keys.

    Returns (out [1, rows, heads, head_dim_v], None); rows of no request, which pad a captured step, get zeros. Raises
    UnsupportedError for another cache and for arguments that would change the result and are not implemented.
    """
    _model_arguments.refuse(step, output_attentions)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    asked = {
        "a mask": attention_mask is not None or step.get("mask") is not None,
        "dropout": bool(dropout),
        "is_causal=False": not causal,
    }
    for name in (name for name, given in asked.items() if given):
        raise UnsupportedError(f"{name} is not implemented over the paged cache of continuous batching")
    if not hasattr(cache, "layer_to_allocator"):
        raise UnsupportedError(
            f"cache is a {type(cache).__name__}; it must be a PagedAttentionCache as in transformers 5.23"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    allocator = cache.layer_to_allocator[module.layer_idx]
    window = sliding_window if sliding_window else getattr(allocator, "sliding_window", 0)  # 0: none
    mask, plan = SequenceMask(window_size=(window - 1, 0)), None
    if step.get("block_table") is None:
        keys = _step_keys(cache, allocator, module.layer_idx, k, v, step)
    else:
        keys = _table_keys(cache, allocator, module.layer_idx, k, v, cu_seq_lens_q, step)
        plan = _step_plan(cache, allocator, module.layer_idx, q, keys, mask, cu_seq_lens_q)
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    flashmask_with_kvcache(
        q, keys, mask, plan, cu_seq_lens_q, out=out, **_model_arguments.score_options(scaling, softcap, s_aux)
    )
    return out[None], None


def _step_keys(cache, allocator, layer, k, v, step):
    """The keys of a step's requests, the new ones k and v among them, written to the cache.

    step: cu_seq_lens_k and max_length_k, by kind of layer; max_length_q; read_index and write_index, the cache's tokens
    that the requests read and write, for each kind of layer. None are read where all requests begin.

    A layer with a sliding window keeps its window alone, as a ring. Several new tokens of a request overwrite keys that
    their own rows see, so transformers' code copies the window out first.
    """
    reads, writes = step["read_index"][allocator.index], step["write_index"][allocator.index]
    ends = step["cu_seq_lens_k"][allocator.layer_type]
    if hasattr(allocator, "sliding_window") and (step["max_length_q"] > 1 or len(reads) == 0):
        k, v = allocator.update(k, v, layer, reads, writes)
        every = torch.arange(len(k), dtype=torch.int32, device=k.device)
        return KvCache(k[:, None], v[:, None], (ends, every))
    most_keys = step["max_length_k"][allocator.layer_type]
    keys = _placed(cache, allocator, layer, lambda: _step_table(allocator, reads, writes, ends, most_keys))
    append_kv(k, v, keys, slots=writes)
    return keys


def _table_keys(cache, allocator, layer, k, v, cu_seqlens, step):
    """Likewise for a step of single rows, whose requests' pages stand in step's block_table."""
    ends, table = step["cu_seq_lens_k"][allocator.layer_type], step["block_table"][allocator.index]
    keys = _placed(cache, allocator, layer, lambda: _Step(table, ends.diff()))
    append_kv(k, v, keys, cu_seqlens=cu_seqlens)
    return keys


def _placed(cache, allocator, layer, make_step):
    """A layer's keys with the places of a step, which the first layer of a kind makes."""
    layers, steps, _ = _served_by(cache)
    if layer not in layers:
        layers[layer] = _layer_keys(allocator, layer)
    if layer == allocator.layer_indices[0] or allocator.index not in steps:
        steps[allocator.index] = make_step()
    keys = layers[layer]
    keys.page_table, keys.seqlens = steps[allocator.index]
    return keys


def _step_plan(cache, allocator, layer, q, keys, mask, cu_seqlens):
    """The plan of a step of single rows, updated by the first layer of a kind; few serve all numbers of requests."""
    plans = _served_by(cache).plans
    batch, (_, page_size, heads_kv, _) = 1 << (keys.batch - 1).bit_length(), keys.k.shape
    sizes = (batch, batch, keys.page_table.shape[1] * page_size, q.shape[1], heads_kv, q.shape[2])
    key = (allocator.index, *sizes)
    is_new = key not in plans
    if is_new:
        plans[key] = CachePlan(*sizes, head_dim_v=keys.v.shape[-1], device=q.device)
    if is_new or layer == allocator.layer_indices[0]:
        plans[key].update(mask, keys, cu_seqlens)
    return plans[key]


def _served_by(cache):
    return _served.setdefault(cache, _Served({}, {}, {}))


def _layer_keys(allocator, layer):
    """A layer's keys and values: in the allocator's pages, or as a ring in pages of one token.

    Pages of all layers take turns in one tensor: a layer's keys, then its values. As transformers counts tokens, the
    n-th of a layer is the n-th behind its first page. All layers have as many as the last one, as they share a plan.
    """
    step, layers = allocator.tokens_per_page, allocator.layer_indices
    page_size = 1 if hasattr(allocator, "sliding_window") else step
    tokens, first = allocator.cache_tensor.flatten(0, 1), 2 * layers.index(layer) * step
    there = len(tokens) - (2 * len(layers) - 1) * step
    k, v = (tokens[begin : begin + there].unflatten(0, (-1, page_size)) for begin in (first, first + step))
    return KvCache(k, v)


def _step_table(allocator, reads, writes, ends, most_keys):
    """The table of a step, whose requests have the tokens ends[b] to ends[b + 1] of `reads`, or if empty `writes`."""
    if hasattr(allocator, "sliding_window"):
        # A mark stands for each token that this step writes.
        tokens = reads.masked_scatter(reads == allocator.sentinel_index, writes)
        return _Step((ends, tokens.to(torch.int32)), None)
    tokens = reads if len(reads) else writes
    page_size = allocator.tokens_per_page
    begins = torch.arange(0, most_keys, page_size, device=ends.device) + ends[:-1, None]
    return _Step((tokens[begins.clamp(max=len(tokens) - 1)] // page_size).to(torch.int32), ends.diff())
