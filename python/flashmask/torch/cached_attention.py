# SPDX-License-Identifier: Apache-2.0
"""flashmask_with_kvcache, append_kv and CachePlan: attention over a KV cache, in PyTorch."""

from __future__ import annotations

import ctypes as C
from typing import Any, Literal, overload

import torch

from .._core import arguments, call_options, capi
from .._core.annotations import Backend
from .._core.docstrings import composed
from .._core.errors import UnsupportedError
from . import operators, ops, tensor_arguments
from ._torch_internals import entry_of
from .explain import place_of
from .kv_cache import KvCache, SequenceMask, call_struct, check_kind, validate_call

SPLIT_SIZE = 1024
_CAUSAL = SequenceMask()
_forward, _build_plan, _append = (
    getattr(torch.ops.flashmask, name).default for name in ("cached_forward", "cached_plan_build", "append_kv")
)
_enter_forward, _enter_build_plan, _enter_append = (entry_of(x) for x in (_forward, _build_plan, _append))

# Arguments of other libraries' functions, and how to have the same here.
_ELSEWHERE = {
    "rotary_cos": "rotate queries and keys before append_kv",
    "rotary_sin": "rotate queries and keys before append_kv",
    "cache_leftpad": "sequences begin at their first key; leave padding out, or hide it by bounds",
    "leftpad_k": "sequences begin at their first key; leave padding out, or hide it by bounds",
    "dropout_p": "a cache is for inference; train with flashmask_attention",
    "dropout": "a cache is for inference; train with flashmask_attention",
    "attn_mask": "say it as a SequenceMask",
    "custom_mask": "say it as a SequenceMask (masks.tail_from_dense for trees)",
    "q_offset": "rows are the last of their sequences; seqlens says where these end",
    "k": "append_kv(k, v, cache) first",
    "v": "append_kv(k, v, cache) first",
    "cache_seqlens": "KvCache(k, v, seqlens=..), which counts the new tokens, too",
    "page_table": "KvCache(k, v, page_table)",
    "block_table": "KvCache(k, v, page_table)",
    "causal": "SequenceMask(causal=..)",
    "window_size": "SequenceMask(window_size=..)",
    "rotary_seqlens": "rotate queries and keys before append_kv",
    "q_descale": "put it into softmax_scale, or multiply q by it",
    "k_descale": "KvCache(k, v, k_scale=..) and flashmask_with_kvcache",
    "v_descale": "KvCache(k, v, v_scale=..) and flashmask_with_kvcache",
    "cu_seqlens_k_new": "append_kv(k, v, cache, cu_seqlens=..) and flashmask_with_kvcache",
    "attention_chunk": "hide a chunk from the rows after it by SequenceMask(bounds=..)",
    "qv": "concatenate q and qv, and k and v, along the head_dim",
}


def refuse_elsewhere(given: dict[str, Any]) -> None:
    """UnsupportedError naming an argument that other libraries have, and the way to do it; TypeError for any other.
    None and a number 0 ask for nothing.
    """
    for name, value in given.items():
        if name not in _ELSEWHERE:
            raise TypeError(f"unexpected keyword argument '{name}'")
        if value is not None and not (type(value) in (int, float) and value == 0):
            raise UnsupportedError(f"{name} is given; it is not an argument here: {_ELSEWHERE[name]}")


class CachePlan:
    """Work and scratch that calls of one mask and cache share: made once, updated once a step, for all layers.

    max_batch, max_rows, max_keys: the most requests, rows of all requests together, and keys of a request.
    heads_q, heads_kv, head_dim, head_dim_v (None: head_dim): of the calls.
    max_total_keys: keys of all requests together, which bounds the scratch; None: max_batch * max_keys.
    batch_invariant, split_size: of the calls.
    float8: the calls' cache is float8_e4m3fn.
    forest: the calls are those of a Forest of max_batch requests, which makes its plans itself.
    device: where the tensors are; None: torch's default device.

    On Hopper a plan with max_rows * heads_q / heads_kv above 64 * max_batch is for prefill: it serves single rows, too,
    but in tiles made for many. Steps of decode alone have a plan of their own.
    One stream at a time. A call with a plan that was updated for other tensors or options is a ValueError; after the
    contents of lengths, tables or masks change, update it: a call with a stale plan is undefined, though harmless.
    """

    def __init__(
        self,
        max_batch: int,
        max_rows: int,
        max_keys: int,
        heads_q: int,
        heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        max_total_keys: int | None = None,
        batch_invariant: bool = False,
        split_size: int = SPLIT_SIZE,
        device: torch.device | str | None = None,
        float8: bool = False,
        forest: bool = False,
    ):
        counts = {
            "max_batch": max_batch,
            "max_rows": max_rows,
            "max_keys": max_keys,
            "max_total_keys": 0 if max_total_keys is None else max_total_keys,
            "heads_q": heads_q,
            "heads_kv": heads_kv,
            "head_dim": head_dim,
            "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
            "split_size": split_size,
        }
        counts = {name: arguments.integer(name, value) for name, value in counts.items()}
        self.batch_invariant = arguments.flag("batch_invariant", batch_invariant)
        self.split_size = counts["split_size"]
        self.device = torch.empty(0, device=device).device
        flags = capi.BATCH_INVARIANT if self.batch_invariant else 0
        flags |= capi.FLOAT8_CACHE if arguments.flag("float8", float8) else 0
        flags |= capi.FOREST if arguments.flag("forest", forest) else 0
        fm_plan, size = capi.make(capi.CachedPlan, flags=flags, **counts), C.c_size_t()
        options = call_options.make(**place_of(self.device))
        capi.check(capi.load().fm_cached_plan_bytes(C.byref(fm_plan), C.byref(options), C.byref(size)))
        self.state = torch.tensor([flags, *counts.values(), *[0] * 16], device="cpu")
        self.buffer = torch.empty(size.value, dtype=torch.uint8, device=self.device)

    @property
    def bytes(self) -> int:
        """Memory of the plan on its device."""
        return self.buffer.numel()

    def update(
        self, mask: SequenceMask | None, cache: KvCache, cu_seqlens_q: torch.Tensor | None = None, rows: int = 1
    ) -> None:
        """Prepares calls with this mask (None: causal), this cache but for its k, v and scales, and these
        cu_seqlens_q, or without them this many rows of each request. Reads nothing back, so a CUDA graph may hold it.
        Raises ValueError if the plan has no room."""
        _check_call(cache, mask, {}, {"cu_seqlens_q": cu_seqlens_q})
        operators.call(
            _build_plan,
            self.buffer,
            self.state,
            *cache.operands(),
            cu_seqlens_q,
            *(mask or _CAUSAL).operands(cache, cache.batch),
            self.batch_invariant,
            self.split_size,
            arguments.integer("rows", rows, 0),
            entry=_enter_build_plan,
        )

    def __repr__(self) -> str:
        return f"CachePlan({self.bytes} bytes on {self.device})"


@overload
def flashmask_with_kvcache(
    q: torch.Tensor,
    cache: KvCache,
    mask: SequenceMask | None = None,
    plan: CachePlan | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    return_softmax_lse: Literal[False] = False,
    **options: Any,
) -> torch.Tensor: ...
@overload
def flashmask_with_kvcache(
    q: torch.Tensor,
    cache: KvCache,
    mask: SequenceMask | None = None,
    plan: CachePlan | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    return_softmax_lse: Literal[True],
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flashmask_with_kvcache(
    q: torch.Tensor,
    cache: KvCache,
    mask: SequenceMask | None = None,
    plan: CachePlan | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    return_softmax_lse: bool,
    **options: Any,
) -> Any: ...


@composed
def flashmask_with_kvcache(
    q: torch.Tensor,
    cache: KvCache,
    mask: SequenceMask | None = None,
    plan: CachePlan | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    batch_invariant: bool = False,
    split_size: int = SPLIT_SIZE,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    max_ctas: int = 0,
    validate: bool = False,
    backend: Backend = "auto",
    **elsewhere: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last rows of sequences over their keys in a cache: out, or (out, lse). For inference.

    q: [batch, m, heads_q, head_dim], or with cu_seqlens_q [rows, heads_q, head_dim]; float32, float16 or bfloat16;
        float64 with backend="reference". heads_q is a multiple of the cache's heads_kv. A request's row i of m is its
        sequence's row n - m + i, n being its number in cache.seqlens; a row below 0 sees nothing.
    plan: a CachePlan, updated for this mask, cache and cu_seqlens_q; None: the call makes its own.
    {cached_rows}
    {softmax_scale}
    {softcap}
    {sink}
    {cached_alibi_slopes}
    batch_invariant: gives a request's rows the same bits whatever else is in the batch; CPUs always do.
    {cached_split_size}
    out, lse: tensors for the results; None: new ones. Rows of no request are left as they are.
    max_ctas: as in flashmask_attention.
    validate: raises ValueError naming the first request and value that is clamped otherwise, or read as zeros: in
        seqlens, tables, cu_seqlens_q and tail_lens. Waits for a device.
    backend: "auto", "cpu", "cuda" or "reference".

    {cached_results}
    A row that sees no key gets 0, and lse -inf (with a sink, the sink).

    {raises}
    RuntimeError where gradients are on and q or the cache requires one: there is no backward.
    """
    if elsewhere:
        refuse_elsewhere(elsewhere)
    optional = {"cu_seqlens_q": cu_seqlens_q, "out": out, "lse": lse, "sink": sink, "alibi_slopes": alibi_slopes}
    _check_call(cache, mask, {"q": q}, optional)
    if plan is not None:
        check_kind("plan", plan, CachePlan)
    arguments.check_dimensions("q", q.shape, _dimensions(cu_seqlens_q))
    operands = cache.operands()
    if torch.is_grad_enabled():
        refuse_gradients({"q": q, **_contents(cache), "sink": sink, "alibi_slopes": alibi_slopes})
    is_packed = cu_seqlens_q is not None
    batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    if arguments.flag("validate", validate):
        validate_call(cache, mask, q, cu_seqlens_q)
    softmax_scale, _, max_ctas = ops.read_options(softmax_scale, None, backend, max_ctas)
    wants_lse = arguments.flag("return_softmax_lse", return_softmax_lse)
    written = () if out is lse is None else [x for x in (out, lse) if x is not None]
    if out is None:
        out = _new_out(q, operands[1].shape[3])
    if lse is None and wants_lse:
        shape = (q.shape[1], q.shape[0]) if is_packed else (q.shape[0], q.shape[2], q.shape[1])
        lse = q.new_empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    operators.call(
        _forward,
        out,
        lse,
        q,
        *operands,
        cu_seqlens_q,
        *(mask or _CAUSAL).operands(cache, batch),
        softmax_scale,
        arguments.number("softcap", softcap),
        sink,
        alibi_slopes,
        arguments.flag("batch_invariant", batch_invariant),
        arguments.integer("split_size", split_size, 1),
        None if plan is None else plan.buffer,
        None if plan is None else plan.state,
        backend,
        max_ctas,
        entry=_enter_forward,
    )
    if written:
        _note_writes(written)
    if not wants_lse:
        return out
    assert lse is not None
    return out, lse


@composed
def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KvCache,
    *,
    cu_seqlens: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
    mask: SequenceMask | None = None,
    write_scales: bool = False,
) -> None:
    """Writes new tokens into a cache, in its dtype; float8 after division by its scales.

    k, v: [batch, m, heads_kv, ..], or [rows, heads_kv, ..] with cu_seqlens or slots; the cache's dtype, or for a float8
        cache any that q may have. A request's m rows become its tokens n - m to n - 1: cache.seqlens is advanced
        already.
    cu_seqlens: int32 [batch + 1]; request b has the rows cu_seqlens[b] to cu_seqlens[b + 1].
    slots: int32 or int64, [rows] or [batch, m]: page * page_size + slot of each row, in place of seqlens; -1, and what
        is no slot, is skipped.
    bounds: int32 [.., 1 or heads_kv, n], of k's first dimensions: each row's vectors, written to mask.bounds.
    {write_scales}

    Raises TypeError or ValueError if an argument is wrong, RuntimeError where gradients are on and k, v or the cache
    requires one.
    """
    _check_call(cache, mask, {"k": k, "v": v}, {"cu_seqlens": cu_seqlens, "slots": slots, "bounds": bounds})
    tensor_arguments.check_one_device(k=k, v=v)
    operands = cache.operands()
    if torch.is_grad_enabled():
        refuse_gradients({"k": k, "v": v, **_contents(cache)})
    if bounds is not None and (mask is None or mask.bounds is None):
        raise ValueError("bounds is given and mask has none to write them to; mask=SequenceMask(bounds=..)")
    target, causal, in_pages = None, True, False
    if bounds is not None and mask is not None:
        batch = k.shape[0] if k.ndim == 4 else None if cu_seqlens is None else cu_seqlens.shape[0] - 1
        target, causal, in_pages = mask.bounds, mask.causal, mask.layout_for(cache, batch) == "pages"
    rest = (cu_seqlens, slots, bounds, target, causal, in_pages, arguments.flag("write_scales", write_scales))
    operators.call(_append, k, v, *operands, *rest, entry=_enter_append)
    scales = operands[-2:] if write_scales else ()
    _note_writes([x for x in (cache.k, cache.v, target, *scales) if x is not None])


def scales_of(
    k: torch.Tensor, v: torch.Tensor, per: Literal["tensor", "head"] = "head"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(k_scale, v_scale) for a float8 cache of tokens like these: the largest finite magnitude over 448, 1 for zeros.
    For scales that append_kv does not write: made once, before the first append. Tokens beyond them saturate.

    k, v: tokens of a calibration, [.., heads_kv, head_dim] and [.., heads_kv, head_dim_v], of any floating-point dtype.
    per: "tensor", float32 [], or "head", [heads_kv].

    Of several batches, torch.maximum of the scales is the scale of all. Raises TypeError or ValueError if an argument
    is no such tensor, or per none of these.
    """
    arguments.choice("per", per, ("tensor", "head"))
    return _scale_of("k", k, per), _scale_of("v", v, per)


def _scale_of(name: str, x: torch.Tensor, per: str) -> torch.Tensor:
    tensor_arguments.check_dense(name, x, "[.., heads_kv, dim]")
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"{name} is {arguments.describe(x)}; it must be floating-point [.., heads_kv, dim]")
    largest = x.detach().double().abs().nan_to_num(0, posinf=0)
    dims = tuple(range(x.ndim)) if per == "tensor" else (*range(x.ndim - 2), x.ndim - 1)
    scale = (largest.amax(dims) / 448 if x.numel() else largest.sum(dims)).float()
    return torch.where(scale > 0, scale, 1.0)


def explain(
    q: torch.Tensor,
    cache: KvCache,
    mask: SequenceMask | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
    split_size: int = SPLIT_SIZE,
    backend: Backend = "auto",
) -> str:
    """Says as JSON which backend and kernel a call would take, how it divides sequences and finds keys, and the bytes
    that it will read, null where lengths are on a device. `rejected` says why a backend does not take it.
    """
    _check_call(cache, mask, {"q": q}, {"cu_seqlens_q": cu_seqlens_q})
    args, keep = call_struct(cache, mask, q, cu_seqlens_q, on_host=not q.is_cuda)
    args.flags = capi.BATCH_INVARIANT if arguments.flag("batch_invariant", batch_invariant) else 0
    args.split_size = arguments.integer("split_size", split_size, 1)
    place = place_of(q.device) if q.is_cuda else {"threads": torch.get_num_threads()}
    options = call_options.make(backend=backend, **place)
    library = capi.load()
    status, text = capi.text_of(library.fm_explain_cached, C.byref(args), C.byref(options))
    capi.check(status)
    del keep
    return text


def _dimensions(cu_seqlens_q: torch.Tensor | None) -> str:
    return "[batch, m, heads_q, head_dim]" if cu_seqlens_q is None else "[rows, heads_q, head_dim]"


def _new_out(q: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    """A contiguous out for q."""
    if q.shape[-1] == head_dim_v:  # takes less host time than new_empty
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    return q.new_empty((*q.shape[:-1], head_dim_v))


def _check_call(cache: KvCache, mask: SequenceMask | None, required: dict[str, Any], optional: dict[str, Any]) -> None:
    """TypeError naming the first argument that is of another kind than it must be."""
    check_kind("cache", cache, KvCache)
    if mask is not None:
        check_kind("mask", mask, SequenceMask)
    for name, x in required.items():
        tensor_arguments.check_dense(name, x)
    for name, x in optional.items():
        if x is not None:
            tensor_arguments.check_dense(name, x)


def _contents(cache: KvCache) -> dict[str, Any]:
    """Tensors of the cache that a gradient could be asked for, by their names in errors."""
    return {"cache.k": cache.k, "cache.v": cache.v, "k_scale": cache.k_scale, "v_scale": cache.v_scale}


def refuse_gradients(tensors: dict[str, Any]) -> None:
    """RuntimeError if one of the tensors, by name, requires a gradient; for calls where gradients are on."""
    for name, x in tensors.items():
        if getattr(x, "requires_grad", False):
            raise RuntimeError(
                f"{name} requires a gradient, and attention over a cache has no backward; "
                "call it under torch.no_grad(), or train with flashmask_attention"
            )


def _note_writes(tensors: list[torch.Tensor]) -> None:
    """Lets a backward that saved one of the tensors find out that it was written since."""
    if torch.compiler.is_compiling():  # the schemas tell compiled code
        return
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


@torch.library.register_fake("flashmask::cached_forward")
def _forward_fake(*_: Any) -> None:
    return None


@torch.library.register_fake("flashmask::cached_plan_build")
def _plan_fake(*_: Any) -> None:
    return None


@torch.library.register_fake("flashmask::append_kv")
def _append_fake(*_: Any) -> None:
    return None
