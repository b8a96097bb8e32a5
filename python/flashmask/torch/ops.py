# SPDX-License-Identifier: Apache-2.0
"""Attention under a Mask by the operators (operators.py, which says how tensors lie), and the checks of its arguments.

Every frontend function for PyTorch comes here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._core import arguments
from .._core.annotations import Backend, Layout
from .._core.arguments import LAYOUTS
from .._core.call_options import DROPOUT_TENSORS, NUMBERS, TENSORS, AttentionOptions
from .._core.errors import UnsupportedError
from . import operators, tensor_arguments
from ._torch_internals import is_any_autocast_enabled
from .dropout import check_state, draw_state
from .mask import Mask

# Looked up once: every call asks them all.
_is_compiling, _is_deterministic = torch.compiler.is_compiling, torch.are_deterministic_algorithms_enabled

_NO_ORIGINS = (None,) * (len(DROPOUT_TENSORS) - 1)
_NO_FEATURES = None, *_NO_ORIGINS, *(option.default for option in (*TENSORS, *NUMBERS))


class KernelOptions(NamedTuple):
    """Options that the calls over parts of the keys take over from the whole call."""

    softmax_scale: float | None
    deterministic: bool
    backend: str
    max_ctas: int


def plan(mask: Mask, device: Any = None, *, counted: bool = False, max_mask_bytes: int | None = None) -> torch.Tensor:
    """The plan of a Mask: uint8 [bytes], where the mask's tensors are; if it has none, on `device` (default: the CPU).

    It says which tiles are empty, full or partial, and is the same for every head, layer, forward and backward of the
    mask. On a GPU the plan of interval lists also has the bits of partial tiles: room for as many as there can be, or,
    if counted, for those that there are, for which it waits; a graph that is captured cannot. A long plan is in runs of
    tiles only if counted. Traceable; otherwise it never waits for the device. Mask.plan keeps one, and says what
    max_mask_bytes is.
    """
    return operators.make_plan(mask, device, counted=counted, max_mask_bytes=max_mask_bytes)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask | None = None,
    *,
    softmax_scale: float | None = None,
    layout: Layout = "bshd",
    deterministic: bool | None = None,
    backend: Backend = "auto",
    max_ctas: int = 0,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    dropout: float = 0.0,
    dropout_state: torch.Tensor | None = None,
    split_size: int | None = 0,
    partial_out: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked attention: (out, lse), both differentiable with respect to q, k, v and the sink.

    mask: a Mask, or None: every row sees every key. softmax_scale: default 1 / sqrt(head_dim). layout "bhsd": q, k and
    v are [batch, heads, seqlen, head_dim], and so is out; all are views. deterministic: gradients with the same bits in
    every run; None follows torch.use_deterministic_algorithms. backend: "auto", "cpu", "cuda" or "reference" (slow, the
    only one for float64). max_ctas, softcap, sink, alibi_slopes, dropout, dropout_state, split_size: as in
    flashmask_attention.
    partial_out: out is float32 (float64 for float64) whatever q's dtype, to be merged with that over other keys
    (merge_attention); out's gradient is rounded to q's dtype. CUDA refuses it together with softcap or dropout.

    Under torch.autocast q, k and v are cast to its dtype. Raises ValueError if an argument is wrong, and
    UnsupportedError if no backend takes the call.
    """
    check_dimensions(q, k, v, layout)
    if mask is not None:
        check_lengths(mask, q, k, layout)
    given = dict(softcap=softcap, sink=sink, alibi_slopes=alibi_slopes, split_size=split_size)
    features = read_features(q.device, dropout, dropout_state, **given)
    if arguments.flag("partial_out", partial_out):
        features = (*(features or _NO_FEATURES), True)
    return checked_attention(q, k, v, mask, softmax_scale, layout, deterministic, backend, max_ctas, features)


class Arrivals(NamedTuple):
    """Keys that a stream brings in pieces while a forward runs.

    needed: int32 [1 or batch, ceil(seqlen_k / 128)], how many pieces have to have arrived before each 128 keys and
    values are read. state: int32 [2], how many have arrived, and 0 or the piece that did not come within `timeout`
    seconds; out and lse are then numbers without meaning.
    """

    needed: torch.Tensor
    state: torch.Tensor
    timeout: float


def forward(q, k, v, mask, softmax_scale, deterministic, backend, max_ctas, **features):
    """(out, lse) as attention() has them, of a call with these fields of AttentionOptions, and without checks."""
    tensors, options = _arguments(mask, q.device, softmax_scale, deterministic, backend, max_ctas, features)
    return operators.call_forward(q, k, v, *tensors, *options)


def arriving_attention(q, k, v, mask, arrivals, softmax_scale, deterministic, backend, max_ctas, **features):
    """(out, lse) as attention() has them, without gradients, of keys that arrive while the call runs: on Hopper alone.

    features: fields of AttentionOptions.
    """
    tensors, options = _arguments(mask, q.device, softmax_scale, deterministic, backend, max_ctas, features)
    return operators.call_arriving_forward(q, k, v, *arrivals, *tensors, *options)


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: Mask,
    softmax_scale: float | None,
    deterministic: bool,
    backend: Backend,
    max_ctas: int,
    *,
    partial_out: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of attention()'s results; with partial_out as partial_backward. dlse may be None."""
    options = softmax_scale, deterministic, backend, max_ctas
    return backward_with_features(dout, dlse, q, k, v, out, lse, mask, *options, partial_out=partial_out)[:3]


def backward_with_features(
    dout, dlse, q, k, v, out, lse, mask, softmax_scale, deterministic, backend, max_ctas, **features
):
    """(dq, dk, dv, dsink) of a call with these fields of AttentionOptions; dsink is empty without a sink."""
    tensors, options = _arguments(mask, q.device, softmax_scale, deterministic, backend, max_ctas, features)
    return operators.call_backward(dout, dlse, q, k, v, out, lse, *tensors, *options)


def early_backward(
    dout, dlse, q, k, v, out, lse, mask, early, softmax_scale, deterministic, backend, max_ctas, **features
):
    """(dq, dkv, dsink) of attention() over all keys k, v, whose last have their gradients before the rest: on Hopper.

    early: (dk, dv, event, stream): float32 [batch, early keys, heads_kv, head_dim], which are written; handles of a
    cudaEvent_t, recorded when they are, and of a cudaStream_t of higher priority that computes them. dkv: float32, dk
    and dv of the keys before them, a multiple of 128, as joined_partial_backward has them. dsink: empty without a sink.
    """
    given = {"partial_out": True, **features}
    tensors, options = _arguments(mask, q.device, softmax_scale, deterministic, backend, max_ctas, given)
    return operators.call_early_backward(dout, dlse, q, k, v, out, lse, *tensors, *early, *options)


def _arguments(mask, device, softmax_scale, deterministic, backend, max_ctas, features):
    """((bounds, block_mask, plan), AttentionOptions) of a call, as the operators have them."""
    bounds, block_mask, *band = operators.mask_arguments(mask)
    plain = softmax_scale, *band, deterministic, backend, max_ctas
    others = {name: getattr(mask, name) for name in ("q_pos", "k_pos", "column_ptr", "intervals")}
    return (bounds, block_mask, mask.plan(device)), AttentionOptions(*plain)._replace(**others, **features)


def partial_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: Mask,
    softmax_scale: float | None,
    deterministic: bool,
    backend: Backend,
    max_ctas: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv): what the keys k, v add to the gradients of an attention over more keys; dk and dv in lse's dtype.

    out, lse: that attention's, out in lse's dtype or in q's; dq has the same. dlse may be None. mask: a Mask of q's
    rows and these keys. dk and dv are views of one tensor.
    """
    options = softmax_scale, deterministic, backend, max_ctas
    dq, dkv = joined_partial_backward(dout, dlse, q, k, v, out, lse, mask, *options)
    dk, dv = dkv.split((k.numel(), v.numel()))
    return dq, dk.view(k.shape), dv.view(v.shape)


def joined_partial_backward(dout, dlse, q, k, v, out, lse, mask, softmax_scale, deterministic, backend, max_ctas):
    """(dq, dkv) of partial_backward(); dkv is dk and then dv, each contiguous, in one dimension."""
    bounds, block_mask, *band = operators.mask_arguments(mask)
    inputs = (dout, dlse, q, k, v, out, lse, bounds, block_mask, mask.plan(q.device))
    others = mask.q_pos, mask.k_pos, mask.column_ptr, mask.intervals
    options = (softmax_scale, *band, deterministic, backend, max_ctas, *others)
    return operators.call_partial_backward(*inputs, *options)


def read_features(device, dropout, dropout_state, **given):
    """Fields of AttentionOptions from dropout_state on, up to the numbers; () if no feature is asked for.

    given: other features by their names. A state that is not given is drawn, on `device`. TypeError or ValueError if
    one is wrong, as far as Python says so.
    """
    tensors = [given.get(option.name) for option in TENSORS]
    for option, tensor in zip(TENSORS, tensors):
        if tensor is not None:
            tensor_arguments.check_dense(option.name, tensor, option.shape)
            if tensor.requires_grad and not option.has_gradient:
                raise UnsupportedError(f"{option.name} requires a gradient, which is not implemented; detach it")
    if dropout_state is not None:
        check_state(dropout_state)
    p = given["dropout_p"] = arguments.share("dropout", dropout)
    numbers = [option.read(option.name, given[option.name]) for option in NUMBERS]
    if p == 0:
        dropout_state = None
    elif dropout_state is None:
        dropout_state = draw_state(device)
    is_asked = any(numbers) or any(x is not None for x in tensors)
    return (dropout_state, *_NO_ORIGINS, *tensors, *numbers) if is_asked else ()


def checked_attention(q, k, v, mask, softmax_scale, layout, deterministic, backend, max_ctas, features=()):
    """attention() of tensors with 4 dimensions, a mask of their lengths, and features as read_features has them, with
    partial_out last if it is set.

    This is what every call pays for: see benchmarks/measure/torch_overhead.py.
    """
    is_compiling = _is_compiling()
    if is_compiling or is_any_autocast_enabled():
        q, k, v = autocast(q, k, v)
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if softmax_scale is not None or deterministic is not None or max_ctas != 0 or not isinstance(backend, str):
        softmax_scale, deterministic, max_ctas = read_options(softmax_scale, deterministic, backend, max_ctas)
    if deterministic is None:
        deterministic = _is_deterministic()
    if mask is None:
        bounds = block_mask = plan_ = q_pos = k_pos = column_ptr = intervals = None
        options = (softmax_scale, False, None, -1, -1, deterministic, backend)
    else:
        bounds, block_mask, q_pos, k_pos = mask.bounds, mask.block_mask, mask.q_pos, mask.k_pos
        column_ptr, intervals = mask.column_ptr, mask.intervals
        plan_ = mask.plan(q.device) if is_compiling else mask._plan_in_eager_mode(q.device)
        left, right = mask.window or (-1, -1)
        options = (softmax_scale, mask.causal, mask.q_offset, left, right, deterministic, backend)
    if features or q_pos is not None or column_ptr is not None:
        options = (*options, max_ctas, q_pos, k_pos, column_ptr, intervals, *(features or _NO_FEATURES))
    elif max_ctas != 0:
        options = (*options, max_ctas)
    forward = torch.ops.flashmask.forward if is_compiling else operators.call_forward  # a graph needs the operator
    out, lse = forward(q, k, v, bounds, block_mask, plan_, *options)
    return (out.transpose(1, 2) if layout == "bhsd" else out), lse


def read_options(softmax_scale, deterministic, backend, max_ctas):
    """(softmax_scale, deterministic, max_ctas) as the operators take them; the first two may be None.

    TypeError or ValueError if one of the four is wrong.
    """
    if softmax_scale is not None:
        softmax_scale = arguments.number("softmax_scale", softmax_scale)
    if deterministic is not None:
        deterministic = arguments.flag("deterministic", deterministic)
    if type(backend) is not str:
        arguments.string("backend", backend)
    return softmax_scale, deterministic, arguments.count("max_ctas", max_ctas)


def check_dimensions(q, k, v, layout):
    """Raises unless `layout` is known and q, k and v are dense tensors of 4 dimensions on one device."""
    if layout != "bshd" and layout != "bhsd":
        arguments.choice("layout", layout, LAYOUTS)
    tensor = torch.Tensor
    are_tensors = isinstance(q, tensor) and isinstance(k, tensor) and isinstance(v, tensor)
    if (
        not are_tensors
        or not q.ndim == k.ndim == v.ndim == 4
        or not q.device == k.device == v.device
        or q.is_nested
        or k.is_nested
        or v.is_nested
    ):
        tensor_arguments.check_tensors(LAYOUTS[layout], query=q, key=k, value=v)


def check_lengths(mask, q, k, layout):
    """ValueError if a mask is not for the lengths of q and k."""
    length = 1 if layout == "bshd" else 2
    arguments.check_mask_lengths(mask, q.shape[length], k.shape[length])


def autocast(*tensors):
    """The tensors in autocast's dtype, if it is on for their device; float64 stays, as elsewhere in torch."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # meta has no autocast
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
