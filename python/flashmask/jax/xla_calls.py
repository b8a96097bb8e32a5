# SPDX-License-Identifier: Apache-2.0
"""The calls of the C interface as JAX sees them: attention(), with its gradient, under every transformation.

Arrays are BSHD here: q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim] and v [batch,
seqlen_k, heads_kv, head_dim_v]. out has q's dtype; lse is [batch, heads_q, seqlen_q], natural logarithm, float32
(float64 for float64).
"""

import ctypes as C
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from .._core import call_options, capi
from .._core.errors import UnsupportedError
from . import library

# Structs of the C interface, and the arrays in them: arguments, of which dlse may be None, and results, of which the
# last may not be there: the backward's plan is the forward's, and without a sink there is no dsink.
_FORWARD = capi.ForwardArgs, ("q", "k", "v"), ("out", "lse", "plan")
_BACKWARD = capi.BackwardArgs, ("q", "k", "v", "out", "lse", "dout", "dlse"), ("dq", "dk", "dv", "dsink")
_SOMEWHERE = 256  # an aligned address that is not read


# The arrays of a call's features, or None: of one call, not of each batch entry. dropout_state: uint32 [2, 2], a seed
# and an offset, the low half of each first; the others: as the library takes them.
_TENSORS = tuple(option.name for option in call_options.TENSORS)
Features = call_options.record("Features", dropout_state=None, **dict.fromkeys(_TENSORS))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def attention(options, q, k, v, mask, features):
    """(out, lse), differentiable with respect to q, k, v and the sink.

    options: a NamedTuple of call_options.make's arguments: numbers, `deterministic` (here in flags) and `backend`.

    Raises ValueError or UnsupportedError while it is traced.
    """
    leaves, structure = jax.tree.flatten((q, k, v, mask, features))
    return _attention(options, *jax.tree.unflatten(structure, varying_alike(*leaves)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, mask, features):
    return _with_folded_batch(_forward, options)((q, k, v), mask, features, None)


def _attention_forward(options, *given):
    for option in call_options.TENSORS:
        primal = getattr(given[4], option.name)
        if primal is not None and primal.perturbed and not option.has_gradient:
            raise UnsupportedError(
                f"the gradient of {option.name} is not implemented; jax.lax.stop_gradient cuts it off"
            )
    q, k, v, mask, features = jax.tree.map(lambda primal: primal.value, given)
    out, lse, plan = _with_folded_batch(_forward_with_plan, options)((q, k, v), mask, features, None)
    return (out, lse), ((q, k, v, out, lse), mask, features, plan)


def _attention_backward(options, saved, gradients):
    arrays, mask, features, plan = saved
    dout, dlse = gradients
    dout = jnp.zeros(dout.shape, dout.dtype) if _is_zero(dout) else dout
    arrays = (*arrays, dout, None if _is_zero(dlse) else dlse)
    made = _with_folded_batch(_backward, options)(arrays, mask, features, plan)
    return *made[:3], None, Features(sink=None if features.sink is None else made[3])


def _is_zero(gradient):
    """Tells a symbolic zero, which has no array: nothing depends on the result."""
    return isinstance(gradient, jax.custom_derivatives.SymbolicZero)


_attention.defvjp(_attention_forward, _attention_backward, symbolic_zeros=True)


def _forward(options, arrays, mask, features, _):
    return _call("forward", options, arrays, mask, features, None, _results(arrays))


def _forward_with_plan(options, arrays, mask, features, _):
    """(out, lse, plan): what the mask hides, as the kernels read it, for the backward too."""
    return _call("forward", options, arrays, mask, features, None, (*_results(arrays), _plan_shape(mask)))


def _plan(mask):
    """The plan that _forward_with_plan would leave."""
    leaves = jax.tree.leaves(mask)
    lengths = dict(seqlen_q=mask.seqlen_q, seqlen_k=mask.seqlen_k)
    function = jax.ffi.ffi_call("flashmask_build_plan", _plan_shape(mask), vmap_method="sequential")
    return varying_alike(function(*leaves, **lengths, **_mask_attributes(mask)), *leaves)[0]


def _plan_shape(mask):
    return _shape((library.plan_bytes(capi.mask_of(mask, described)),), jnp.uint8)


def _results(arrays):
    q, _, v = arrays
    batch, seqlen_q, heads, _ = q.shape
    lse_dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    return _shape((batch, seqlen_q, heads, v.shape[3]), q.dtype), _shape((batch, heads, seqlen_q), lse_dtype)


def _backward(options, arrays, mask, features, plan):
    inputs = arrays[:3] if features.sink is None else (*arrays[:3], features.sink)
    return _call("backward", options, arrays, mask, features, plan, tuple(_shape(x.shape, x.dtype) for x in inputs))


def _shape(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


# --- One call ---------------------------------------------------------------------------------------------------------


def _call(operation, options, arrays, mask, features, plan, results):
    """The operation's results, on whichever platform the program comes to run."""
    given = arrays, mask, features, plan
    calls = {
        platform: functools.partial(_call_on, platform, operation, options, results, workspace_bytes)
        for platform, workspace_bytes in workspaces(
            functools.partial(_workspace_bytes, operation, options, given, results)
        ).items()
    }
    made = next(iter(calls.values()))(*given) if len(calls) == 1 else jax.lax.platform_dependent(*given, **calls)
    return varying_alike(*made, *arrays[:3])[: len(made)]


def _call_on(platform, operation, options, results, workspace_bytes, *given):
    # On CUDA the workspace is a result that nobody reads: so XLA plans its memory with that of all others.
    workspace = (_shape((max(workspace_bytes, 1),), jnp.uint8),) if platform == "cuda" else ()
    function = jax.ffi.ffi_call(f"flashmask_{operation}", (*results, *workspace))
    attributes = _attributes(operation, options, given, results)
    return tuple(function(*jax.tree.leaves(given), **attributes))[: len(results)]


def _attributes(operation, options, given, results):
    """Builds the attributes that bindings/jax/attention.cpp takes beside the arrays."""
    arrays, mask, features, plan = given
    of_call = call_options.make(**options._asdict())
    return dict(
        **_mask_attributes(mask),
        **{f"has_{name}": x is not None for name, x in features._asdict().items()},
        has_plan=plan is not None if operation == "backward" else len(results) == 3,
        has_dlse=operation == "backward" and arrays[6] is not None,
        flags=of_call.flags,
        backend=options.backend,
        **{name: getattr(of_call, name) for name in options._fields if name not in ("deterministic", "backend")},
    )


def _mask_attributes(mask):
    of_mask = capi.mask_of(mask, described)
    return dict(
        mask_flags=of_mask.flags,
        q_offset=of_mask.q_offset,
        window_left=of_mask.window_left,
        window_right=of_mask.window_right,
        has_bounds=mask.bounds is not None,
        has_block_mask=mask.block_mask is not None,
        has_lists=mask.column_ptr is not None,
    )


def workspaces(bytes_on):
    """The bytes of workspace by platform, bytes_on(platform). Raises what is wrong with a call that no platform takes.

    One that only some take is traced for all of them, and the others raise when they come to run it.
    """
    needs, errors = {}, []
    for platform in library.platforms():
        try:
            needs[platform] = bytes_on(platform)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            needs[platform] = 0
            errors.append(error)
    if len(errors) == len(needs):
        raise errors[0]
    return needs


def _workspace_bytes(operation, options, given, results, platform):
    arrays, mask, features, plan = given
    struct, arguments, of_results = _FORWARD if operation == "forward" else _BACKWARD
    named = {**dict(zip(arguments, arrays)), **dict(zip(of_results, results))}
    plan = named.pop("plan", plan)
    tensors = {name: described(name, x) for name, x in named.items() if x is not None}
    of_mask = capi.mask_of(mask, described)
    args = capi.make(struct, **tensors, mask=C.pointer(of_mask))
    if plan is not None and platform == "cuda":  # on the CPU it would be read, and the size is not needed
        args.plan, args.plan_bytes = _SOMEWHERE, plan.shape[0]
    tensors = {name: getattr(features, name) for name in _TENSORS}
    given_options = call_options.described({**options._asdict(), **tensors}, lambda x, name: described(name, x))
    of_call = call_options.make(**given_options, device=capi.cuda_device() if platform == "cuda" else 0)
    return library.workspace_bytes(operation, args, of_call)


def described(name, x):
    """An array's shape, without its data, as fm_tensor."""
    try:
        dtype = capi.dtype_of(x.dtype)
    except KeyError:
        raise TypeError(f"{name} is {x.dtype}; it must be {', '.join(capi.DTYPES)}") from None
    # That a mask has lists is told by their address.
    return capi.device_tensor(_SOMEWHERE if name == "column_ptr" else None, dtype, x.shape)


# --- Transformations --------------------------------------------------------------------------------------------------


def _with_folded_batch(function, options):
    """function(options, ...) of arrays, a mask, features and a plan, with a rule for vmap.

    It makes one call, the mapped dimension in the batch, unless the features differ from entry to entry.
    """
    mapped = custom_vmap(functools.partial(function, options))

    @mapped.def_vmap
    def rule(size, is_mapped, arrays, mask, features, plan):
        arrays_mapped, mask_mapped, features_mapped, plan_mapped = is_mapped
        # A mask of one entry for all stays one. Intervals are of all entries, which column_ptr tells apart.
        is_folded = lambda x, here: here or (x is not mask.intervals and x.shape[0] != 1)
        masks_are_one = not any(jax.tree.leaves(jax.tree.map(is_folded, mask, mask_mapped)))
        # A sink has a gradient for each entry, and a state says what is dropped of a batch as the call counts it.
        tensors = [getattr(features, name) for name in _TENSORS]
        by_batch = any(x is not None and x.ndim > 1 for x in tensors)
        has_own = by_batch or any(getattr(features_mapped, name) for name in _TENSORS)
        has_own_gradient = features.sink is not None and function is _backward
        one_by_one = has_own or has_own_gradient or features.dropout_state is not None or mask_mapped.intervals
        # If a forward's out is not mapped, this is its backward for several gradients.
        has_forward = function is not _backward or arrays_mapped[3]
        if one_by_one:
            is_mapped = arrays_mapped, mask_mapped, features_mapped, plan_mapped
            return _one_by_one(mapped, size, has_forward, is_mapped, arrays, mask, features, plan)
        batch = arrays[0].shape[1 if arrays_mapped[0] else 0]
        fold = lambda x, here: _folded(x, here, size, batch)
        unfold = lambda x: x.reshape(size, batch, *x.shape[1:])
        arrays = jax.tree.map(fold, arrays, arrays_mapped)
        masks = jax.tree.map(lambda x, here: fold(x, here) if is_folded(x, here) else x, mask, mask_mapped)
        if function is not _forward_with_plan:
            # The plan of a mask of one entry is that of the folded call, too.
            is_own = masks_are_one and not plan_mapped
            results = mapped(arrays, masks, features, plan if is_own else None)
            return tuple(map(unfold, results)), (True,) * len(results)
        if masks_are_one:
            out, lse, plan = mapped(arrays, masks, features, None)
            return (unfold(out), unfold(lse), plan), (True, True, False)
        # vmap wants a plan of each entry, of the size that it has without vmap: a later trace holds vmap to that, and
        # the backward of an entry may be taken by itself. The folded backward makes its own, and XLA drops these.
        out, lse = _with_folded_batch(_forward, options)(arrays, masks, features, None)
        plan, has_plans = _plans(mask, mask_mapped)
        return (unfold(out), unfold(lse), plan), (True, True, has_plans)

    return mapped


def _plans(mask, is_mapped):
    """The plan of each entry's mask, or of the one that all entries share, and whether there is one for each."""
    leaves, structure = jax.tree.flatten(mask)
    axes = [0 if here else None for here in jax.tree.leaves(is_mapped)]
    of_leaves = lambda *x: _plan(jax.tree.unflatten(structure, x))
    if all(axis is None for axis in axes):
        return of_leaves(*leaves), False
    return jax.vmap(of_leaves, in_axes=axes)(*leaves), True


def _one_by_one(mapped, size, has_forward, is_mapped, *given):
    """A call for each entry. Those that share a state get states of their own, with the entry folded into the seed.

    has_forward: each has a forward of its own. Gradients of one forward share what that dropped.
    """
    leaves, structure = jax.tree.flatten(given)
    flags = jax.tree.leaves(is_mapped)
    features_mapped = is_mapped[2]

    def call(entry):
        n, own = entry[0], iter(entry[1])
        arrays, mask, features, plan = jax.tree.unflatten(
            structure, [next(own) if flag else x for x, flag in zip(leaves, flags)]
        )
        if features.dropout_state is not None and has_forward and not features_mapped.dropout_state:
            features = features._replace(dropout_state=_entry_state(features.dropout_state, n))
        return mapped(arrays, mask, features, plan)

    entries = jnp.arange(size, dtype=jnp.uint32), [x for x, flag in zip(leaves, flags) if flag]
    results = jax.lax.map(call, entries)
    return results, (True,) * len(results)


def _entry_state(state, n):
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


def _varying_axes(x: Any) -> frozenset[Any]:
    kind: Any = jax.typeof(x) if hasattr(jax, "typeof") else None
    axes = kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else getattr(kind, "vma", ())
    return frozenset(axes)


def _varying(x, axes):
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)
