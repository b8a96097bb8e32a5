# SPDX-License-Identifier: Apache-2.0
"""The operators torch.ops.flashmask.{plan, forward, arriving_forward, backward, partial_backward}: called, traced and
differentiated.

The operators and their schemas come from libflashmask_torch.so (bindings/torch/ops.cpp). This module adds what torch
needs to trace them (shapes without data) and to differentiate them.

Tensors are BSHD here: q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim], v [batch,
seqlen_k, heads_kv, head_dim_v] with any strides whose last is 1; nothing is copied. out is contiguous, in q's dtype;
lse [batch, heads_q, seqlen_q], natural logarithm, float32 (float64 for float64). dq, dk and dv are dense, with their
dimensions in memory in the order of q's, k's and v's. dout and dlse have any strides: autograd hands over what it has,
an expanded tensor for one. Where CUDA's kernel cannot read dout (rows that are not contiguous, expanded, or off
boundaries of 16 bytes) the backward makes one contiguous copy of it.
"""

import torch
from torch.autograd import forward_ad

from .._core import arguments, capi
from .._core.arguments import LAYOUTS
from .._core.call_options import DROPOUT_TENSORS, TENSORS, AttentionOptions
from .._core.errors import UnrepresentableMaskError, UnsupportedError
from . import library, tensor_arguments
from ._torch_internals import apply_of, are_transforms_active, below_autograd, is_dual_level_active

library.load()
_ops = torch.ops.flashmask
_forward_operator, _arriving_forward_operator = (
    below_autograd(operator.default) for operator in (_ops.forward, _ops.arriving_forward)
)
_backward_operator, _partial_backward_operator, _early_backward_operator = (
    below_autograd(operator.default) for operator in (_ops.backward, _ops.partial_backward, _ops.early_backward)
)

# Looked up once: every call asks them all.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

# Places of the tensors among an operator's options. Calls take options as plain tuples, which cost less than
# AttentionOptions.
_Q_POS, _SINK = (AttentionOptions._fields.index(name) for name in ("q_pos", "sink"))
_END = AttentionOptions._fields.index("dropout_state") + len((*DROPOUT_TENSORS, *TENSORS))
_TENSORS = AttentionOptions._fields[_Q_POS:_END]
_COUNTED = 13  # the plan operator's `counted`

_NO_FUNCTIONAL_DERIVATIVE = (
    "torch.func cannot differentiate flashmask attention; torch.autograd.grad and backward() can"
)

# How the operators begin the messages of what is more than a RuntimeError: a type does not come through torch.
_MEANT = {
    "UnsupportedError: ": UnsupportedError,
    "UnrepresentableMaskError: ": lambda text: UnrepresentableMaskError(text, capi.load().fm_last_error_column()),
    "OutOfMemoryError: ": torch.OutOfMemoryError,
}


# --- Calls --------------------------------------------------------------------------------------------


def mask_arguments(mask):
    """A Mask as the operators take it: bounds, block_mask, causal, q_offset, window_left, window_right."""
    left, right = mask.window or (-1, -1)
    return mask.bounds, mask.block_mask, mask.causal, mask.q_offset, left, right


def make_plan(mask, device=None, *, counted=False, max_mask_bytes=None):
    """The plan of a Mask, as ops.plan describes it."""
    bounds, block_mask, *band = mask_arguments(mask)
    given = mask.q_pos, mask.k_pos, mask.column_ptr, mask.intervals
    limit = arguments.bytes_at_most("max_mask_bytes", max_mask_bytes)
    others = (*given, counted, limit) if counted or any(x is not None for x in given) else ()
    place = torch.device(device or "cpu")
    # Without tensors there is nothing that says `meta` to the dispatcher.
    plan_ = _plan_fake if place.type == "meta" else _ops.plan
    return call(plan_, bounds, block_mask, mask.seqlen_q, mask.seqlen_k, *band, place, *others)


def call_forward(q, k, v, bounds, block_mask, plan_, *options):
    """(out, lse), differentiable, outside of graphs. options: AttentionOptions, the last of which may be left out."""
    try:
        # The kernel itself saves a way through the dispatcher, which torch.func needs.
        kernel = _transformed if are_transforms_active() else _forward
        return kernel(q, k, v, bounds, block_mask, plan_, *options)
    except RuntimeError as error:
        _raise_as_meant(error)
        tensor_arguments.check_tensors(LAYOUTS["bshd"], query=q, key=k, value=v)
        raise


def call_arriving_forward(*inputs):
    """(out, lse), without a gradient, of a call whose keys arrive while it runs; the schema is in schemas.h."""
    return call(_arriving_forward_operator, *inputs)


def call_backward(*inputs):
    """(dq, dk, dv, dsink)."""
    return _undifferentiable(_ops.backward.default, _backward_operator, *inputs)


def call_early_backward(*inputs):
    """(dq, dkv, dsink) of a call that has some keys' gradients early; the schema is in schemas.h."""
    return call(_early_backward_operator, *inputs)


def call_partial_backward(*inputs):
    """(dq, dkv) of a part of the keys; dkv is dk and then dv, each contiguous, in one dimension."""
    return _undifferentiable(_ops.partial_backward.default, _partial_backward_operator, *inputs)


def _undifferentiable(operator, below, *inputs):
    """Calls an operator, without its autograd kernel if no second derivatives can be asked for: that kernel, which
    refuses them, costs 0.1 ms. below: the operator without it."""
    if _is_grad_enabled() or _is_compiling():
        return call(operator, *inputs)
    try:
        return below(*inputs)
    except RuntimeError as error:
        _raise_as_meant(error)
        raise


def call(operator, *arguments, entry=None):
    """operator(*arguments), with the exception that is meant. In compiled code it stays a RuntimeError of that text.

    entry: entry_of(operator), for calls whose host time counts.
    """
    if _is_compiling():
        return operator(*arguments)
    try:
        return (entry or operator)(*arguments)
    except RuntimeError as error:
        _raise_as_meant(error)
        raise


def _raise_as_meant(error):
    """The exception that a RuntimeError of an operator stands for, if it stands for another one."""
    for prefix, meant in _MEANT.items():
        if str(error).startswith(prefix):
            raise meant(str(error).removeprefix(prefix)) from None


# --- Traces: shapes without data ----------------------------------------------------------------------


def plan_bytes(seqlen_q, seqlen_k, batch, heads, bit_tiles=None):
    """Bytes of a mask's plan, as the library lays it out; lengths may be symbolic. bit_tiles: None without bits."""
    masks = batch * heads

    def int_words(count):
        return _blocks(masks * count, 2)

    rows, keys = _blocks(seqlen_q, 64), _blocks(seqlen_k, 128)
    header = 6
    bits = 2 * masks * (rows * _blocks(keys, 64) + keys * _blocks(rows, 64))
    counts_and_orders = int_words(rows) + 2 * (
        int_words(keys) + int_words(_blocks(seqlen_q, 128)) + int_words(_blocks(seqlen_q, 192))
    )
    extents, scratch = batch, masks * keys
    tiles = 0 if bit_tiles is None else 2 * masks * keys + masks * rows * _blocks(keys, 64) + 1 + 128 * bit_tiles
    return 8 * (header + bits + counts_and_orders + extents + scratch + tiles)


def most_bit_tiles(seqlen_q, seqlen_k, batch, heads, causal, window_left, window_right):
    """How many bit tiles a plan of interval lists on a GPU can have; the band is over indices, or open."""
    keys_of_row = _blocks(seqlen_k, 128)
    right = min(window_right, 0) if causal and window_right != -1 else 0 if causal else window_right
    if window_left != -1 and (causal or window_right != -1):
        keys_of_row = torch.sym_min(keys_of_row, (window_left + right + 64) // 128 + 2)
    return batch * heads * _blocks(seqlen_q, 64) * keys_of_row


def _blocks(length, size):
    return (length + size - 1) // size


@torch.library.register_fake("flashmask::plan")
def _plan_fake(
    bounds,
    block_mask,
    seqlen_q,
    seqlen_k,
    causal,
    q_offset,
    window_left,
    window_right,
    device,
    q_pos=None,
    k_pos=None,
    column_ptr=None,
    intervals=None,
    counted=False,
    max_mask_bytes=0,
):
    others = dict(q_pos=q_pos, k_pos=k_pos, column_ptr=column_ptr, intervals=intervals)
    tensor_arguments.check_one_device(startend_row_indices=bounds, block_mask=block_mask, **others)
    device = next((x.device for x in (bounds, block_mask, q_pos, column_ptr) if x is not None), device)
    tensors = [x for x in (bounds, block_mask) if x is not None and x.shape[2] != 0]  # without columns they say nothing
    tensors += [] if column_ptr is None or seqlen_k == 0 else [column_ptr]
    positions = [x for x in (q_pos, k_pos) if x is not None and seqlen_q != 0 and seqlen_k != 0]
    batch = max((x.shape[0] for x in (*tensors, *positions)), default=1)
    heads = max((x.shape[1] for x in tensors), default=1)
    bit_tiles = None
    if column_ptr is not None and seqlen_k != 0 and torch.device(device).type == "cuda":
        band = (causal, window_left, window_right) if not positions else (False, -1, -1)
        bit_tiles = most_bit_tiles(seqlen_q, seqlen_k, batch, heads, *band)
    return torch.empty(plan_bytes(seqlen_q, seqlen_k, batch, heads, bit_tiles), dtype=torch.uint8, device=device)


@torch.library.register_fake("flashmask::forward")
def _forward_fake(q, k, v, bounds, block_mask, plan_, *options):
    options = AttentionOptions(*options)
    tensors = _tensors_of(options)
    arguments = dict(query=q, key=k, value=v, startend_row_indices=bounds, block_mask=block_mask, plan=plan_)
    tensor_arguments.check_one_device(**arguments, **tensors)
    batch, seqlen_q, heads, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((batch, seqlen_q, heads, v.shape[3]), dtype=lse_dtype if options.partial_out else q.dtype)
    return out, q.new_empty((batch, heads, seqlen_q), dtype=lse_dtype)


@torch.library.register_fake("flashmask::backward")
def _backward_fake(dout, dlse, q, k, v, out, lse, bounds, block_mask, plan_, *options):
    options = AttentionOptions(*options)
    _check_one_device(dout, dlse, q, k, v, out, lse, bounds, block_mask, plan_, **_tensors_of(options))
    dsink = q.new_empty(0, dtype=torch.float32) if options.sink is None else _empty_like(options.sink)
    dtype = lse.dtype if options.partial_out else q.dtype
    return _empty_like(q, out.dtype), *(_empty_like(x, dtype) for x in (k, v)), dsink


@torch.library.register_fake("flashmask::partial_backward")
def _partial_backward_fake(dout, dlse, q, k, v, out, lse, bounds, block_mask, plan_, *options):
    others = dict(zip(("q_pos", "k_pos", "column_ptr", "intervals"), options[_Q_POS:]))  # these tensors alone
    _check_one_device(dout, dlse, q, k, v, out, lse, bounds, block_mask, plan_, **others)
    return _empty_like(q, out.dtype), k.new_empty((k.numel() + v.numel(),), dtype=lse.dtype)


def _check_one_device(dout, dlse, q, k, v, out, lse, bounds, block_mask, plan_, **others):
    tensor_arguments.check_one_device(
        query=q,
        key=k,
        value=v,
        out=out,
        lse=lse,
        dout=dout,
        dlse=dlse,
        startend_row_indices=bounds,
        block_mask=block_mask,
        plan=plan_,
        **others,
    )


def _tensors_of(options):
    """Tensors among an operator's options, by name."""
    return {name: getattr(options, name) for name in _TENSORS}


def _empty_like(x, dtype=None):
    """A dense tensor, its dimensions in memory in the order of x's strides, but the last one innermost."""
    outer = sorted(range(x.ndim - 1), key=x.stride, reverse=True)
    return torch.empty_permuted(x.shape, (*outer, x.ndim - 1), dtype=dtype or x.dtype, device=x.device)


# --- torch.func.vmap ------------------------------------------------------------------------------------


@torch.library.register_vmap("flashmask::plan")
def _plan_vmap(info, in_dims, *arguments):
    """The plan of each of the mapped masks, not counted, as they are stacked."""
    pick = lambda x, dim, n: x if dim is None else x.select(dim, n)  # noqa: E731
    arguments = [False if n == _COUNTED else x for n, x in enumerate(arguments)]
    plans = [_ops.plan(*(pick(x, dim, n) for x, dim in zip(arguments, in_dims))) for n in range(info.batch_size)]
    return torch.stack(plans), 0


@torch.library.register_vmap("flashmask::forward")
def _forward_vmap(info, in_dims, q, k, v, bounds, block_mask, plan_, *options):
    """One call in which the mapped dimension is part of the batch."""
    if any(dim is not None for dim in in_dims[len(in_dims) - len(options) :]):
        raise UnsupportedError(
            "vmap over a sink or positions is not implemented; over q, k, v, row intervals and a block mask it is"
        )
    options = AttentionOptions(*options)
    if options.dropout_p != 0:
        raise UnsupportedError("vmap of dropout is not implemented: the mapped dimension is part of the batch")
    size = info.batch_size
    q, k, v = (_folded(x, dim, size) for x, dim in zip((q, k, v), in_dims))
    masks = []
    for x, dim in zip((bounds, block_mask), in_dims[3:5]):
        is_shared = x is None or dim is None and x.shape[0] == 1
        plan_ = plan_ if is_shared else None  # it was made for fewer masks
        masks.append(x if is_shared else _folded(x, dim, size, q.shape[0] // size).contiguous())
    for name in ("q_pos", "k_pos", "column_ptr"):
        x = getattr(options, name)
        if x is not None and x.shape[0] != 1:
            plan_ = None
            options = options._replace(**{name: _folded(x, None, size, q.shape[0] // size)})
    for name in (option.name for option in TENSORS):
        if (tensor := getattr(options, name)) is not None and tensor.ndim > 1:
            options = options._replace(**{name: _folded(tensor, None, size)})
    out, lse = _ops.forward(q, k, v, *masks, plan_, *options)
    return tuple(x.view(size, x.shape[0] // size, *x.shape[1:]) for x in (out, lse)), (0, 0)


def _folded(x, dim, size, batch=-1):
    """x [batch, ...], mapped along `dim` or the same for all, as [size * batch, ...] with contiguous rows."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    x = x.expand(-1, batch, *x.shape[2:]).flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


# --- Derivatives --------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """flashmask::forward with its gradient. `features` are the tensors among the options, which are without them.

    What has no gradient comes as one argument, `mask`: bounds, block_mask and plan. Every argument costs host time.
    """

    @staticmethod
    def forward(ctx, q, k, v, mask, options, *features):
        out, lse = _forward_operator(q, k, v, *mask, *(_joined(options, features) if features else options))
        ctx.options = options
        # Saved like any tensor of the graph: if a mask is changed in place before the backward, autograd says so.
        ctx.save_for_backward(q, k, v, out, lse, *mask, *features)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        saved = ctx.saved_tensors
        q, _, _, out, _, _, _, _, *features = saved
        if dout is None:
            if dlse is None:
                return (None,) * (5 + len(features))
            dout = torch.zeros_like(out)
        if dout.dtype != q.dtype:  # out is partial
            dout = dout.to(q.dtype)
        if not features:
            dq, dk, dv, _ = call_backward(dout, dlse, *saved, *ctx.options)
            return dq, dk, dv, None, None
        inputs = saved[: -len(features)]
        dq, dk, dv, dsink = call_backward(dout, dlse, *inputs, *_joined(ctx.options, features))
        of_features = (dsink if n == _SINK and x is not None else None for n, x in enumerate(features, _Q_POS))
        return dq, dk, dv, None, None, *of_features


_apply_attention = apply_of(_Attention)


def _joined(options, tensors):
    return *options[:_Q_POS], *tensors, *options[_Q_POS:]


def _forward(q, k, v, bounds, block_mask, plan_, *options):
    """The operator's autograd kernel.

    torch.library.register_autograd would make the same, but reads the schema in every call: 0.1 ms.
    """
    sink = options[_SINK] if len(options) > _SINK else None
    if is_dual_level_active():
        _refuse_tangents(q, k, v, *(() if sink is None else (sink,)))
    requires_grad = q.requires_grad or k.requires_grad or v.requires_grad
    if not requires_grad and sink is not None:
        requires_grad = sink.requires_grad
    if requires_grad and _is_grad_enabled():
        if are_transforms_active():
            raise UnsupportedError(_NO_FUNCTIONAL_DERIVATIVE)
        features = options[_Q_POS:_END]
        if features:
            options = options[:_Q_POS] + options[_END:]
        return _apply_attention(q, k, v, (bounds, block_mask, plan_), options, *features)
    return _forward_operator(q, k, v, bounds, block_mask, plan_, *options)


def _transformed(q, k, v, *others):
    """A call within torch.func's transforms. What vmap maps may require gradients, which only the dispatcher sees."""
    tensors = (x for x in (q, k, v, *others) if isinstance(x, torch.Tensor))
    if _is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise UnsupportedError(_NO_FUNCTIONAL_DERIVATIVE)
    return _ops.forward(q, k, v, *others)


def _refuse_tangents(*tensors):
    """Without this a derivative in forward mode would silently be 0."""
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise UnsupportedError(
            "derivatives in forward mode (torch.func.jvp, forward_ad) are not implemented; "
            "torch.autograd.grad and backward() are there"
        )


def _no_second_derivative(ctx, *grads):
    raise arguments.no_second_derivatives()


_autograd = torch.library.Library("flashmask", "IMPL")
_autograd.impl("forward", _forward, "Autograd")
for _name in ("backward", "partial_backward"):
    torch.library.register_autograd(f"flashmask::{_name}", _no_second_derivative)
