# SPDX-License-Identifier: Apache-2.0
"""The calls of the C interface as JAX sees them: attention(), with its gradient, under every transformation.

Arrays are BSHD here: q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim] and v [batch,
seqlen_k, heads_kv, head_dim_v]. out has q's dtype; lse is [batch, heads_q, seqlen_q], natural logarithm, float32
(float64 for float64).
"""

import ctypes as C
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from .. import capi
from . import _library

# The arrays in the structs of the C interface, arguments before results; dsink is there if a sink is.
_FORWARD = capi.ForwardArgs, ("q", "k", "v", "out", "lse")
_BACKWARD = capi.BackwardArgs, ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "dsink")


class Options(NamedTuple):
    """What a call says beside its arrays, its mask and its features, as capi.options takes it."""

    softmax_scale: float | None
    deterministic: bool
    backend: str
    softcap: float = 0.0
    dropout_p: float = 0.0


class Features(NamedTuple):
    """The arrays of a call's features, or None: of one call, not of each batch entry."""

    sink: jax.Array | None = None  # [heads_q]
    dropout_state: jax.Array | None = None  # uint32 [2, 2]: a seed and an offset, the low half of each first


@functools.partial(jax.jit, static_argnums=0, inline=True)
def attention(options, q, k, v, mask, features):
    """(out, lse), differentiable with respect to q, k, v and the sink.

    Raises ValueError or UnsupportedError while it is traced.
    """
    leaves, structure = jax.tree.flatten((q, k, v, mask, features))
    return _attention(options, *jax.tree.unflatten(structure, varying_alike(*leaves)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, mask, features):
    return _with_folded_batch(_forward, options)((q, k, v), mask, features)


def _attention_forward(options, q, k, v, mask, features):
    out, lse = _attention(options, q, k, v, mask, features)
    return (out, lse), ((q, k, v, out, lse), mask, features)


def _attention_backward(options, saved, gradients):
    arrays, mask, features = saved
    made = _with_folded_batch(_backward, options)((*arrays, *gradients), mask, features)
    return *made[:3], None, Features(sink=None if features.sink is None else made[3])


_attention.defvjp(_attention_forward, _attention_backward)


def _forward(options, arrays, mask, features):
    q, _, v = arrays
    batch, seqlen_q, heads, _ = q.shape
    lse_dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    results = _shape((batch, seqlen_q, heads, v.shape[3]), q.dtype), _shape((batch, heads, seqlen_q), lse_dtype)
    return _call("forward", options, arrays, mask, features, results)


def _backward(options, arrays, mask, features):
    inputs = arrays[:3] if features.sink is None else (*arrays[:3], features.sink)
    return _call("backward", options, arrays, mask, features, tuple(_shape(x.shape, x.dtype) for x in inputs))


def _shape(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


# --- One call ---------------------------------------------------------------------------------------------------------


def _call(operation, options, arrays, mask, features, results):
    """The operation's results, on whichever platform the program comes to run."""
    calls = {
        platform: functools.partial(_call_on, platform, operation, options, results, workspace_bytes)
        for platform, workspace_bytes in _workspaces(operation, options, arrays, mask, features, results).items()
    }
    if len(calls) == 1:
        made = next(iter(calls.values()))(arrays, mask, features)
    else:
        made = jax.lax.platform_dependent(arrays, mask, features, **calls)
    return varying_alike(*made, *arrays)[: len(made)]


def _call_on(platform, operation, options, results, workspace_bytes, arrays, mask, features):
    # On CUDA the workspace is a result that nobody reads: so XLA plans its memory with that of all others.
    workspace = (_shape((workspace_bytes,), jnp.uint8),) if platform == "cuda" else ()
    function = jax.ffi.ffi_call(f"flashmask_{operation}", (*results, *workspace))
    given = (*arrays, *jax.tree.leaves((mask, features)))
    return tuple(function(*given, **_attributes(options, mask, features)))[: len(results)]


def _attributes(options, mask, features):
    """What bindings/jax/attention.cpp takes beside the arrays, from the structs that this says it in."""
    of_mask, of_call = capi.mask_of(mask, _tensor), capi.options(**options._asdict())
    return dict(
        mask_flags=of_mask.flags,
        q_offset=of_mask.q_offset,
        window_left=of_mask.window_left,
        window_right=of_mask.window_right,
        has_bounds=mask.bounds is not None,
        has_block_mask=mask.block_mask is not None,
        has_sink=features.sink is not None,
        has_dropout_state=features.dropout_state is not None,
        flags=of_call.flags,
        softmax_scale=of_call.softmax_scale,
        softcap=of_call.softcap,
        dropout_p=of_call.dropout_p,
        backend=options.backend,
    )


def _workspaces(operation, options, arrays, mask, features, results):
    """The bytes of workspace by platform. Raises what is wrong with a call that no platform takes.

    One that only some take is traced for all of them, and the others raise when they come to run it.
    """
    needs, errors = {}, []
    for platform in _library.platforms():
        try:
            needs[platform] = _workspace_bytes(operation, options, arrays, mask, features, results, platform)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            needs[platform] = 0
            errors.append(error)
    if len(errors) == len(needs):
        raise errors[0]
    return needs


def _workspace_bytes(operation, options, arrays, mask, features, results, platform):
    struct, names = _FORWARD if operation == "forward" else _BACKWARD
    tensors = {name: _tensor(name, x) for name, x in zip(names, (*arrays, *results))}
    of_mask = capi.mask_of(mask, _tensor)
    of_call = capi.options(**options._asdict(), device=capi.cuda_device() if platform == "cuda" else 0)
    if features.sink is not None:
        of_call.sink = _tensor("sink", features.sink)
    return _library.workspace_bytes(operation, capi.make(struct, **tensors, mask=C.pointer(of_mask)), of_call)


def _tensor(name, x):
    """An array's shape, without its data, as fm_tensor."""
    try:
        dtype = capi.dtype_of(x.dtype)
    except KeyError:
        raise TypeError(f"{name} is {x.dtype}; it must be {', '.join(capi.DTYPES)}") from None
    return capi.device_tensor(None, dtype, x.shape)


# --- Transformations --------------------------------------------------------------------------------------------------


def _with_folded_batch(function, options):
    """function(options, ...) of arrays, a mask and features, with a rule for vmap.

    It makes one call, the mapped dimension in the batch, unless the features differ from entry to entry.
    """
    mapped = custom_vmap(functools.partial(function, options))

    @mapped.def_vmap
    def rule(size, is_mapped, arrays, mask, features):
        # A sink has a gradient for each entry, and a state says what is dropped of a batch as the call counts it.
        has_own_sink = features.sink is not None and (is_mapped[2].sink or function is _backward)
        if has_own_sink or features.dropout_state is not None:
            return _one_by_one(mapped, size, is_mapped, arrays, mask, features)
        batch = arrays[0].shape[1 if is_mapped[0][0] else 0]
        arrays = tuple(_folded(x, here, size, batch) for x, here in zip(arrays, is_mapped[0]))
        # A mask of one entry for all stays one.
        fold = lambda x, here: x if not here and x.shape[0] == 1 else _folded(x, here, size, batch)
        mask = jax.tree.map(fold, mask, is_mapped[1])
        results = mapped(arrays, mask, features)
        return tuple(x.reshape(size, batch, *x.shape[1:]) for x in results), (True,) * len(results)

    return mapped


def _one_by_one(mapped, size, is_mapped, *given):
    """A call for each entry. Those that share a state get states of their own, with the entry folded into the seed."""
    leaves, structure = jax.tree.flatten(given)
    flags = jax.tree.leaves(is_mapped)
    arrays_mapped, _, features_mapped = is_mapped
    # In a backward of one forward for several gradients, out is the same for all, and so is what it dropped.
    is_new = len(arrays_mapped) == 3 or arrays_mapped[3]

    def call(entry):
        n, own = entry[0], iter(entry[1])
        arrays, mask, features = structure.unflatten([next(own) if flag else x for x, flag in zip(leaves, flags)])
        if features.dropout_state is not None and is_new and not features_mapped.dropout_state:
            features = features._replace(dropout_state=_state_of_entry(features.dropout_state, n))
        return mapped(arrays, mask, features)

    entries = jnp.arange(size, dtype=jnp.uint32), [x for x, flag in zip(leaves, flags) if flag]
    results = jax.lax.map(call, entries)
    return results, (True,) * len(results)


def _state_of_entry(state, n):
    seed = jax.random.fold_in(jax.random.wrap_key_data(state[0], impl="threefry2x32"), n)
    return state.at[0].set(jax.random.key_data(seed))


def _folded(x, is_mapped, size, batch):
    """x [size, batch or 1, ...], or [batch or 1, ...], as [size * batch, ...]."""
    x = x if is_mapped else x[None]
    return jnp.broadcast_to(x, (size, batch, *x.shape[2:])).reshape(size * batch, *x.shape[2:])


def varying_alike(*arrays):
    """The arrays, each varying over the mesh axes of a shard_map that any of them varies over.

    The gradient of one that was the same for all shards is then their sum. Results do not inherit it in every JAX.
    """
    axes = [_varying_axes(x) for x in arrays]
    every = frozenset().union(*axes)
    return tuple(x if own == every else _varying(x, tuple(every - own)) for x, own in zip(arrays, axes))


# The names of this changed from one JAX to the next.


def _varying_axes(x):
    kind = jax.typeof(x) if hasattr(jax, "typeof") else None
    axes = kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else getattr(kind, "vma", ())
    return frozenset(axes)


def _varying(x, axes):
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)
