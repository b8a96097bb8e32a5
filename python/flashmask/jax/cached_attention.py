# SPDX-License-Identifier: Apache-2.0
"""attention_with_cache and append_kv: attention over a KV cache. For inference."""

from __future__ import annotations

import ctypes as C
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from .._core import arguments, call_options, capi
from .._core.annotations import Backend
from .._core.docstrings import composed
from .._core.errors import UnsupportedError
from . import library
from .kv_cache import KvCache, SequenceMask
from .xla_calls import described, workspaces

SPLIT_SIZE = 1024


class _Options(NamedTuple):
    """Options of a call that are no arrays."""

    names: tuple[str, ...]  # of its arrays
    flags: int
    split_size: int
    mask_flags: int
    window: Any  # (left, right)
    softmax_scale: float | None
    softcap: float
    backend: str


@composed
def attention_with_cache(
    q: ArrayLike,
    cache: KvCache,
    mask: SequenceMask | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    batch_invariant: bool = False,
    split_size: int = SPLIT_SIZE,
    return_softmax_lse: bool = False,
    backend: Backend = "auto",
) -> Any:
    """Attention of the last rows of sequences over their keys in a cache: out, or (out, lse).

    q: [batch, m, heads_q, head_dim], or with cu_seqlens_q [rows, heads_q, head_dim]; float32, float16 or bfloat16;
        float64 with backend="reference". heads_q is a multiple of the cache's heads_kv. A request's row i of m is its
        sequence's row n - m + i, n being its number in cache.seqlens; a row below 0 sees nothing.
    {cached_rows}
    {softmax_scale}
    {softcap}
    {sink}
    {cached_alibi_slopes}
    batch_invariant: gives a request's rows the same bits whatever else is in the batch; CPUs always do.
    {cached_split_size}
    backend: "auto", "cpu", "cuda" or "reference".

    {cached_results}
    A row that sees no key gets 0, and lse -inf (with a sink, the sink); rows of no request are undefined.

    {raises}
    vmap is an UnsupportedError, as requests are the batch; a gradient is an error of JAX's.
    """
    q = jnp.asarray(q)
    is_packed = cu_seqlens_q is not None
    arguments.check_dimensions(
        "q", q.shape, "[rows, heads_q, head_dim]" if is_packed else "[batch, m, heads_q, head_dim]"
    )
    mask = SequenceMask() if mask is None else mask
    _check_kind("cache", cache, KvCache)
    _check_kind("mask", mask, SequenceMask)
    given = {"q": q, "cu_seqlens_q": cu_seqlens_q, "sink": sink, "alibi_slopes": alibi_slopes}
    given = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    batch = given["cu_seqlens_q"].shape[0] - 1 if is_packed else q.shape[0]
    tensors = {**given, **cache.tensors(), **mask.tensors()}
    in_pages = mask.layout_for(cache, batch) == "pages"
    options = _Options(
        names=tuple(tensors),
        flags=capi.BATCH_INVARIANT if arguments.flag("batch_invariant", batch_invariant) else 0,
        split_size=arguments.integer("split_size", split_size, 1),
        mask_flags=capi.HAS_WINDOW | (capi.CAUSAL if mask.causal else 0) | (capi.KEYS_IN_PAGES if in_pages else 0),
        window=mask.window_size,
        softmax_scale=None if softmax_scale is None else float(arguments.number("softmax_scale", softmax_scale)),
        softcap=float(arguments.number("softcap", softcap)),
        backend=arguments.string("backend", backend),
    )
    out, lse = _forward(options, *tensors.values())
    return (out, lse) if arguments.flag("return_softmax_lse", return_softmax_lse) else out


@composed
def append_kv(
    k: ArrayLike,
    v: ArrayLike,
    cache: KvCache,
    *,
    cu_seqlens: ArrayLike | None = None,
    slots: ArrayLike | None = None,
    write_scales: bool = False,
) -> KvCache:
    """Returns the cache with new tokens in it, in its dtype; float8 after division by its scales.

    k, v: [batch, m, heads_kv, ..], or [rows, heads_kv, ..] with cu_seqlens or slots; the cache's dtype, or for a float8
        cache any that q may have. A request's m rows become its tokens n - m to n - 1: cache.seqlens is advanced
        already.
    cu_seqlens: int32 [batch + 1]; request b has the rows cu_seqlens[b] to cu_seqlens[b + 1].
    slots: int32, [rows] or [batch, m]: page * page_size + slot of each row, in place of seqlens; -1, and what is no
        slot, is skipped.
    {write_scales}

    Within jit, a cache that is donated is written in place; one that is not is copied.

    Raises TypeError if cache is no KvCache, ValueError if it has no scales to write, and UnsupportedError for vmap.
    Wrong shapes and dtypes are an error of JAX's when the program runs.
    """
    _check_kind("cache", cache, KvCache)
    given = {"k": k, "v": v, "cu_seqlens": cu_seqlens, "slots": slots}
    given = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    tensors = {**cache.tensors(), **given}
    written = {"cache.k": "k", "cache.v": "v"}
    if arguments.flag("write_scales", write_scales):
        written |= {name: name for name in ("k_scale", "v_scale")}
    for name in written:
        if name not in tensors:
            raise ValueError(f"write_scales is set and {name} is absent; it must be there, to be written")
    made = _append((tuple(tensors), tuple(written)), *tensors.values())
    return cache.replace(**dict(zip(written.values(), made)))


def _check_kind(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {arguments.describe(value)}; it must be a flashmask.jax.{kind.__name__}")


def _without_vmap(name: str) -> Any:
    """The function of static options and arrays, with a rule that refuses vmap."""

    def refusing(function: Any) -> Any:
        @functools.partial(jax.jit, static_argnums=0, inline=True)
        @functools.wraps(function)
        def call(options: Any, *arrays: Any) -> Any:
            mapped = custom_vmap(functools.partial(function, options))

            @mapped.def_vmap
            def rule(*_: Any) -> Any:
                raise UnsupportedError(f"vmap over {name} is not implemented; requests are its batch")

            return mapped(*arrays)

        return call

    return refusing


# --- Calls ------------------------------------------------------------------------------------------------------------


@_without_vmap("attention_with_cache")
def _forward(options: _Options, *arrays: Any) -> Any:
    tensors = dict(zip(options.names, arrays))
    q, v = tensors["q"], tensors["cache.v"]
    lse = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    lse_dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    results = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype), jax.ShapeDtypeStruct(lse, lse_dtype)
    needs = workspaces(functools.partial(_workspace_bytes, options, tensors, results))
    calls = {
        platform: functools.partial(_forward_on, platform, options, results, workspace_bytes)
        for platform, workspace_bytes in needs.items()
    }
    return next(iter(calls.values()))(*arrays) if len(calls) == 1 else jax.lax.platform_dependent(*arrays, **calls)


def _forward_on(platform: str, options: _Options, results: Any, workspace_bytes: int, *arrays: Any) -> Any:
    # On CUDA the workspace is a result that nobody reads.
    workspace = (jax.ShapeDtypeStruct((max(workspace_bytes, 1),), jnp.uint8),) if platform == "cuda" else ()
    function = jax.ffi.ffi_call("flashmask_cached_forward", (*results, *workspace))
    of_call = call_options.make(softmax_scale=options.softmax_scale)
    made = function(
        *arrays,
        names=_joined(options.names),
        backend=options.backend,
        flags=options.flags,
        split_size=options.split_size,
        mask_flags=options.mask_flags,
        window_left=options.window[0],
        window_right=options.window[1],
        softmax_scale=of_call.softmax_scale,
        option_flags=of_call.flags,
        softcap=options.softcap,
    )
    return tuple(made[:2])


@_without_vmap("append_kv")
def _append(options: tuple[tuple[str, ...], tuple[str, ...]], *arrays: Any) -> Any:
    library.load()
    names, written = options
    aliases = {names.index(name): at for at, name in enumerate(written)}
    results = [jax.ShapeDtypeStruct(arrays[at].shape, arrays[at].dtype) for at in aliases]
    function = jax.ffi.ffi_call("flashmask_append_kv", results, input_output_aliases=aliases)
    return tuple(function(*arrays, names=_joined(names)))


def _joined(names: tuple[str, ...]) -> str:
    return "".join(f"{name}," for name in names)


def _workspace_bytes(options: _Options, tensors: dict[str, Any], results: Any, platform: str) -> int:
    fm = {name: described(name, x) for name, x in tensors.items()}
    cache = capi.make(
        capi.KvCache, **_members(capi.KvCache, {name.removeprefix("cache."): x for name, x in fm.items()})
    )
    left, right = options.window
    band = {"flags": options.mask_flags, "window_left": left, "window_right": right}
    mask = capi.make(capi.SequenceMask, **band, **_members(capi.SequenceMask, fm))
    args = capi.make(
        capi.CachedArgs,
        flags=options.flags,
        split_size=options.split_size,
        **_members(capi.CachedArgs, fm),
        out=described("out", results[0]),
        lse=described("lse", results[1]),
        cache=C.pointer(cache),
        mask=C.pointer(mask),
    )
    features = {option.name: fm[option.name] for option in call_options.TENSORS if option.name in fm}
    of_call = call_options.make(
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        backend=options.backend,
        device=capi.cuda_device() if platform == "cuda" else 0,
        **features,
    )
    return library.workspace_bytes("cached_forward", args, of_call)


def _members(struct: type[C.Structure], tensors: dict[str, Any]) -> dict[str, Any]:
    names = {field[0] for field in struct._fields_}
    return {name: x for name, x in tensors.items() if name in names}
