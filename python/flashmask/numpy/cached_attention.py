# SPDX-License-Identifier: Apache-2.0
"""flashmask_with_kvcache and append_kv, on numpy arrays."""

import ctypes as C
from typing import Any

import numpy as np

from .._core import arguments, call_options, capi, ctypes_calls
from .._core.annotations import Backend
from .._core.docstrings import composed
from .arrays import Array, Numpy, checked_array
from .kv_cache import KvCache, SequenceMask


@composed
def flashmask_with_kvcache(
    q: Array,
    cache: KvCache,
    mask: SequenceMask | None = None,
    cu_seqlens_q: Array | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    split_size: int = 1024,
    return_softmax_lse: bool = False,
    validate: bool = False,
    threads: int = 0,
    backend: Backend = "auto",
) -> Array | tuple[Array, Array]:
    """Attention of the last rows of sequences over their keys in a cache: out, or (out, lse).

    q: [batch, m, heads_q, head_dim], or with cu_seqlens_q [rows, heads_q, head_dim]; float32, float16 or
        ml_dtypes.bfloat16; float64 with backend="reference". heads_q is a multiple of the cache's heads_kv. A request's
        row i of m is its sequence's row n - m + i, n being its number in cache.seqlens; a row below 0 sees nothing.
    {cached_rows}
    {softmax_scale}
    {softcap}
    {sink}
    {cached_alibi_slopes}
    {cached_split_size}
    validate: raises ValueError naming the first request and value that is clamped otherwise, or read as zeros: in
        seqlens, tables, cu_seqlens_q and tail_lens.
    threads: the most threads to use; 0: OpenMP's default. The result does not depend on it.
    backend: "auto", "cpu" or "reference" (slow).

    {cached_results}
    A row that sees no key, or is of no request, gets 0, and lse -inf; one that sees no key and has a sink, the sink.

    {raises}
    """
    q, cache = checked_array("q", q), _checked("cache", cache, KvCache)
    options = call_options.read(softmax_scale=softmax_scale, backend=backend, threads=threads, softcap=softcap)
    for name, x in (("sink", sink), ("alibi_slopes", alibi_slopes)):
        options[name] = None if x is None else checked_array(name, x)
    arrays = _rows(q, cache, cu_seqlens_q)
    args = capi.make(capi.CachedArgs, **_described(arrays), cache=cache.struct())
    args.split_size = arguments.integer("split_size", split_size, 1)
    if mask is not None:
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.size - 1
        args.mask = _checked("mask", mask, SequenceMask).struct(cache, batch)
    if arguments.flag("validate", validate):
        capi.check(capi.load().fm_cached_validate(C.byref(args)))
    ctypes_calls.run(Numpy, "fm_cached_forward", args, q, options)
    wants_lse = arguments.flag("return_softmax_lse", return_softmax_lse)
    return (arrays["out"], arrays["lse"]) if wants_lse else arrays["out"]


@composed
def append_kv(
    k: Array,
    v: Array,
    cache: KvCache,
    *,
    cu_seqlens: Array | None = None,
    slots: Array | None = None,
    bounds: Array | None = None,
    mask: SequenceMask | None = None,
    write_scales: bool = False,
) -> None:
    """Writes new tokens into a cache, in its dtype; float8 after division by its scales.

    k, v: [batch, m, heads_kv, ..], or [rows, heads_kv, ..] with cu_seqlens or slots; float32, float16 or
        ml_dtypes.bfloat16. A request's m rows become its tokens n - m to n - 1: cache.seqlens is advanced already.
    cu_seqlens: int32 [batch + 1]; request b has the rows cu_seqlens[b] to cu_seqlens[b + 1].
    slots: int32 or int64, [rows] or [batch, m]: page * page_size + slot of each row, in place of seqlens; -1, and what
        is no slot, is skipped.
    bounds: int32 [.., 1 or heads_kv, n], of k's first dimensions: each row's vectors, for mask.bounds.
    {write_scales}

    Raises TypeError or ValueError if an argument is wrong.
    """
    cache = _checked("cache", cache, KvCache)
    named = {"k": k, "v": v, "cu_seqlens": cu_seqlens, "slots": slots, "bounds": bounds}
    arrays = {name: checked_array(name, x) for name, x in named.items() if x is not None or name in "kv"}
    args = capi.make(capi.AppendArgs, **_described(arrays), cache=cache.struct())
    if mask is not None:
        batch = k.shape[0] if k.ndim == 4 else None if cu_seqlens is None else cu_seqlens.size - 1
        args.mask = _checked("mask", mask, SequenceMask).struct(cache, batch)
    args.flags = capi.WRITE_SCALES if arguments.flag("write_scales", write_scales) else 0
    _check_writable(cache, mask if bounds is not None else None, write_scales)
    capi.check(capi.load().fm_append_kv(C.byref(args), None))


def _rows(q: Array, cache: KvCache, cu_seqlens_q: Array | None) -> dict[str, Array]:
    """q, cu_seqlens_q and room for the results."""
    dimensions = "[batch, m, heads_q, head_dim]" if cu_seqlens_q is None else "[rows, heads_q, head_dim]"
    arguments.check_dimensions("q", q.shape, dimensions)
    lse_shape = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    out = np.zeros((*q.shape[:-1], cache.v.shape[3]), q.dtype)
    lse = np.full(lse_shape, -np.inf, np.float64 if q.dtype == np.float64 else np.float32)
    arrays = {"q": q, "out": out, "lse": lse}
    if cu_seqlens_q is not None:
        arrays["cu_seqlens_q"] = checked_array("cu_seqlens_q", cu_seqlens_q)
    return arrays


def _described(arrays: dict[str, Array]) -> dict[str, capi.Tensor]:
    return {name: Numpy.array(x).described(name) for name, x in arrays.items()}


def _check_writable(cache: KvCache, mask: SequenceMask | None, scales: bool) -> None:
    """ValueError naming the first array that is written to and must not be."""
    targets: dict[str, Any] = {"cache.k": cache.k, "cache.v": cache.v, "mask.bounds": mask.bounds if mask else None}
    if scales:
        targets |= {"cache.k_scale": cache.k_scale, "cache.v_scale": cache.v_scale}
    for name, x in targets.items():
        if isinstance(x, np.ndarray) and not x.flags.writeable:
            raise ValueError(f"{name} is read-only; append_kv writes to it")


def _checked(name: str, x: Any, kind: type) -> Any:
    if not isinstance(x, kind):
        raise TypeError(f"{name} is {arguments.describe(x)}; it must be a flashmask.numpy.{kind.__name__}")
    return x
