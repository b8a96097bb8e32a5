# SPDX-License-Identifier: Apache-2.0
"""Attention of a rank's rows, to which the keys and values travel that they see.

gather: one call over all keys, when they have arrived. overlap: tiles of the rank's own keys, and of each piece, while
the next piece is on its way; partial results are merged in float32.
"""

import functools
from typing import Any, NamedTuple

import torch

from ..torch import merge, ops
from .local_mask import Origins
from .messages import send


class Options(NamedTuple):
    """return_lse: whether lse is wanted, on all ranks. given: features that have no gradient and are no tensors of
    heads, fields of AttentionOptions. arrival_timeout: seconds that a call waits for keys that arrive while it runs."""

    of_kernel: ops.KernelOptions
    return_lse: bool
    given: dict[str, Any]
    arrival_timeout: float

    @property
    def drops(self):
        return "dropout_p" in self.given

    def features(self, sink, alibi_slopes):
        """Fields of AttentionOptions of a call; none that says nothing."""
        every = {"sink": sink, "alibi_slopes": alibi_slopes}
        return {name: x for name, x in every.items() if x is not None} | self.given

    def origins(self, local, device):
        """More of them, of calls under the masks of a LocalMask."""
        return local.origins(device) if self.drops else Origins({}, {}, ({},) * len(local.pieces))


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, alibi_slopes, local, group, options):
        whole_k, whole_v = all_keys(k, v, local, group)
        mask = local.masks(alibi_slopes is not None, q.device).gathered
        features = options.features(sink, alibi_slopes) | options.origins(local, q.device).gathered
        out, lse = ops.forward(q, whole_k, whole_v, mask, *options.of_kernel, **features)
        if local.keeps_keys:
            k, v = whole_k, whole_v
        return save(ctx, q, k, v, out, lse, sink, alibi_slopes, local, group, options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        return gathered_backward(dout, dlse, ctx.saved_tensors, *ctx.call)


class Overlap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, alibi_slopes, local, group, options):
        arrivals = _send_pieces(k, v, local, group)
        masks, origins = local.masks(alibi_slopes is not None, q.device), options.origins(local, q.device)
        is_exact = has_partial_results(q, options.features(sink, alibi_slopes))
        given = options.features(None, alibi_slopes) | {"partial_out": is_exact}
        # The sink joins one of the parts.
        parts = [ops.forward(q, k, v, masks.own, *options.of_kernel, sink=sink, **given, **origins.own)]
        for piece, mask, origin, received in zip(local.pieces, masks.of_pieces, origins.of_pieces, arrivals):
            keys = received()
            if piece.receives:
                parts.append(ops.forward(q, *keys, mask, *options.of_kernel, **given, **origin))
        # Deterministic: the parts have a fixed order.
        out, lse = parts[0] if len(parts) == 1 else _merged(parts)
        # The backward of a call without partial results takes out in q's dtype.
        out = out if is_exact else out.to(q.dtype)
        return save(ctx, q, k, v, out, lse, sink, alibi_slopes, local, group, options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, sink, alibi_slopes = ctx.saved_tensors
        local, group, options = ctx.call
        dout = zero_if_unused(dout, out, q)
        arrivals = _send_pieces(k, v, local, group)
        masks, origins = local.masks(alibi_slopes is not None, q.device), options.origins(local, q.device)
        features = options.features(None, alibi_slopes)
        dsink = None if sink is None else _sink_gradient(sink, dout, dlse, out, lse)
        dq, gradients, _ = _backward(dout, dlse, q, k, v, masks.own, out, lse, options, features | origins.own)
        dq = dq.to(lse.dtype)
        returns = [_Returns(stack, local, group) for stack in gradients]
        pieces = zip(local.pieces, masks.of_pieces, origins.of_pieces, arrivals)
        for n, (piece, mask, origin, received) in enumerate(pieces):
            keys = received()
            if piece.receives:
                more, of_piece, _ = _backward(dout, dlse, q, *keys, mask, out, lse, options, features | origin)
                dq += more
            else:  # no rows, of the gradients' dtype
                of_piece = [x.to(lse.dtype) for x in _stacked(*keys)]
            for each, stack in zip(returns, of_piece):
                each.send(n, stack)
        own = [x for each in returns for x in each.own(k.dtype)]
        return dq.to(q.dtype), *own, dsink, None, None, None, None


class _Returns:
    """The gradients of the keys of all pieces, on their way back to those of a rank's own, `stack`."""

    def __init__(self, stack, local, group):
        self._stack, self._group = stack, group
        self._routes, self._arrivals = None, []
        if local.pieces:
            self._routes = local.piece_routes(stack.shape[1], len(stack), stack.device)
            sizes = [sum(route.rows_out) for route in self._routes.of_pieces]
            self._returned = stack.new_empty((sum(sizes), *stack.shape[3:]))
            self._of_pieces = self._returned.split(sizes)

    def send(self, n, gradients):
        """Sends the gradients of piece n back."""
        route, into = self._routes.of_pieces[n], self._of_pieces[n]
        self._arrivals.append(_return_gradients(gradients, route, self._group, into))

    def own(self, dtype):
        """The rank's own gradients, with all that come back."""
        return with_returned(self._stack, self._stack, dtype, self._routes, self._wait)

    def _wait(self):
        for arrival in self._arrivals:
            arrival.wait()
        return self._returned


# --- The calls --------------------------------------------------------------------------------------


def gathered_backward(dout, dlse, saved, local, group, options):
    """The gradients of Gather's inputs; saved: what save() has kept."""
    q, k, v, out, lse, sink, alibi_slopes = saved
    dout = zero_if_unused(dout, out, q)
    if not local.keeps_keys:
        k, v = all_keys(k, v, local, group)
    mask = local.masks(alibi_slopes is not None, q.device).gathered
    # dq is rounded once, here; dk and dv have yet to be added up.
    features = options.features(sink, alibi_slopes) | options.origins(local, q.device).gathered
    dq, gradients, dsink = _backward(dout, dlse, q, k, v, mask, out, lse, options, features)
    own = _own_gradients(gradients, k.dtype, local, group)
    return dq.to(q.dtype), *own, dsink, None, None, None, None


def save(ctx, q, k, v, out, lse, sink, alibi_slopes, local, group, options):
    ctx.save_for_backward(q, k, v, out, lse, sink, alibi_slopes)
    ctx.call = local, group, options
    ctx.set_materialize_grads(False)
    return out.to(q.dtype), lse


def zero_if_unused(dout, out, q):
    """A rank whose result is not used takes part all the same: others wait for its keys."""
    return torch.zeros_like(out, dtype=q.dtype) if dout is None else dout


def has_partial_results(q, features):
    """Tells if kernels have float32 results for such a call; those for GPUs have them under a sink alone."""
    return not q.is_cuda or features.keys() <= {"sink"}


def _backward(dout, dlse, q, k, v, mask, out, lse, options, features):
    """Returns these keys' part of dq, in out's dtype, their dk and dv in float32, stacked as by _stacked, and the
    sink's gradient or None; out and lse are of all keys."""
    call = dout, dlse, q, k, v, out, lse, mask, *options.of_kernel
    if features:
        dq, dk, dv, dsink = ops.backward_with_features(*call, partial_out=has_partial_results(q, features), **features)
        stacks = [x.to(lse.dtype).contiguous() for x in _stacked(dk, dv)]
        return dq, stacks, dsink if "sink" in features else None
    dq, dkv = ops.joined_partial_backward(*call)
    if k.shape == v.shape:
        return dq, [dkv.view(2, *k.shape)], None
    dk, dv = dkv.split((k.numel(), v.numel()))
    return dq, [dk.view(1, *k.shape), dv.view(1, *v.shape)], None


def _merged(parts):
    """(out, lse) of all keys, in float32, from those of each part, whose out may be in q's dtype."""
    return merge.merge_into_first([out.to(lse.dtype) for out, lse in parts], [lse for _, lse in parts])


def _sink_gradient(sink, dout, dlse, out, lse):
    """Computes what no part's call can, as it leaves out rows that see none of its keys."""
    delta = (dout.to(lse.dtype) * out).sum(3, dtype=torch.float64).transpose(1, 2)
    delta = delta if dlse is None else delta - dlse
    weights = torch.exp(sink.to(lse.dtype)[:, None] - lse.masked_fill(lse == -torch.inf, 0))  # -inf if the sink is
    return -(weights * delta).sum((0, 2)).to(sink.dtype)


# --- What travels -----------------------------------------------------------------------------------


def _stacked(k, v):
    """k and v as stacks [tensors, batch, keys, heads, head_dim], each of which travels at once."""
    return [torch.stack((k, v))] if k.shape == v.shape else [k.unsqueeze(0), v.unsqueeze(0)]


def all_keys(k, v, local, group):
    """k and v of the rank's own keys and all that travel to it, in the order of local.gathered."""
    if not local.pieces:
        return k, v
    return unstacked([_gathered(tensors, local, group) for tensors in of_one_shape(k, v)])


def of_one_shape(k, v):
    """The tensors of each stack that travels."""
    return [(k, v)] if k.shape == v.shape else [(k,), (v,)]


def unstacked(stacks):
    """(k, v) of the stacks of of_one_shape."""
    return tuple(x for stack in stacks for x in stack.unbind())


def _gathered(tensors, local, group):
    """A stack of what tensors of one shape have of these keys."""
    whole, moved, route = with_own_keys(tensors, local)
    rows = whole.flatten(0, 2)
    into = None if route.places is not None else rows.narrow(0, route.begin, sum(route.rows_in))
    received = send(rows.index_select(0, route.sent), route.rows_out, route.rows_in, group, into).wait()
    if route.places is not None or route.padding is not None:
        _place(received.view(moved.dtype), moved.flatten(0, 2), route)
    return whole


def with_own_keys(tensors, local):
    """(stack, the same in units for moving, Route) of tensors of one shape: own keys, and room for those that travel to
    the rank."""
    first = tensors[0]
    (route,) = local.gathered_routes(first.shape[0], len(tensors), first.device).of_pieces
    whole = first.new_empty((len(tensors), first.shape[0], route.seqlen_k, *first.shape[2:]))
    moved, *own = _in_units(whole, *tensors)
    begin, end = local.own_keys
    for to, x in zip(moved.narrow(2, begin, end - begin), own):
        to.copy_(x)
    return whole, moved, route


def _place(received, rows, route):
    """Puts the rows that arrived where they belong, if they are not there."""
    if route.places is not None:
        rows.index_copy_(0, route.places, received)
    if route.padding is not None:
        rows.index_fill_(0, route.padding, 0)


def _in_units(*tensors):
    """Views of 16-byte elements, if the layouts of all tensors allow them; for moving alone. torch copies strided
    tensors at so many elements a second, whatever their size."""
    if any(x.data_ptr() % torch.complex128.itemsize for x in tensors):
        return tensors
    try:
        return [x.view(torch.complex128) for x in tensors]
    except RuntimeError:  # units do not fill the rows, or the gaps between them
        return tensors


def _own_gradients(gradients, dtype, local, group):
    """dk and dv of the rank's own keys from `gradients`, as _backward has them, of all that local.gathered has."""
    begin, end = local.own_keys
    own = []
    for stack in gradients:
        routes = wait = None
        if local.pieces:
            routes = local.gathered_routes(stack.shape[1], len(stack), stack.device)
            wait = _return_gradients(stack, routes.of_pieces[0], group).wait
        own += with_returned(stack, stack.narrow(2, begin, end - begin), dtype, routes, wait)
    return own


def with_returned(stack, own, dtype, routes, wait):
    """The tensors of `own`, a part of `stack`, with the gradients that come back, in another dtype.

    wait: waits for those and returns them, in the order in which their keys were sent. All that does not depend on them
    is enqueued first.
    """
    result = own.new_empty(own.shape, dtype=dtype)
    for to, entry in zip(result.flatten(0, 1), own.flatten(0, 1)):  # each of which is contiguous
        to.copy_(entry)
    if routes is None:
        return result.unbind()
    sums = stack.flatten(0, 2).index_select(0, routes.rows)
    returned = wait()
    if routes.rounds:
        to, sums = _in_units(result.flatten(0, 2), _sums(sums, returned, dtype, routes.rounds))
        to.index_copy_(0, routes.own, sums)
    return result.unbind()


def _sums(sums, returned, dtype, rounds):
    """`sums` of Routes.rows, and what comes back, in another dtype."""
    parts = (returned if which is None else returned.index_select(0, which) for which, _ in rounds)
    if len(rounds) == 1:
        return torch.add(sums, next(parts), out=sums.new_empty(sums.shape, dtype=dtype))
    for (_, rows), part in zip(rounds, parts):
        sums = sums.add_(part) if rows is None else sums.index_add_(0, rows, part)
    return sums.to(dtype)


def _send_pieces(k, v, local, group):
    """Sends the keys of all pieces: for each a function that waits for what the rank receives, and returns k and v."""
    if not local.pieces:
        return []
    of_stacks = [_send_stack(stack, local, group) for stack in _stacked(k, v)]

    def received(arrivals):
        return [x for arrival in arrivals for x in arrival()]

    return [functools.partial(received, arrivals) for arrivals in zip(*of_stacks)]


def _send_stack(stack, local, group):
    """Returns, for each piece, a function that waits for the tensors of a stack."""
    routes = local.piece_routes(stack.shape[1], len(stack), stack.device)
    sent = stack.flatten(0, 2).index_select(0, routes.sent)
    sent = sent.split([sum(route.rows_out) for route in routes.of_pieces])
    return [_piece_arrival(x, stack, route, group) for x, route in zip(sent, routes.of_pieces)]


def _piece_arrival(sent, stack, route, group):
    arrival = send(sent, route.rows_out, route.rows_in, group, wait=False)

    def received():
        rows = arrival.wait()
        if route.places is not None or route.padding is not None:
            fitting = rows.new_empty((len(stack) * stack.shape[1] * route.seqlen_k, *rows.shape[1:]))
            if route.places is None:
                fitting.narrow(0, route.begin, len(rows)).copy_(rows)
            _place(rows, fitting, route)
            rows = fitting
        return rows.view(len(stack), stack.shape[1], route.seqlen_k, *rows.shape[1:]).unbind()

    return received


def _return_gradients(stack, route, group, into=None):
    """The other way round: gradients of the keys that arrived leave, those of the keys that were sent arrive.

    stack: of the keys among which the route's have their places.
    """
    rows = stack.flatten(0, 2)
    if route.places is not None:
        leaving = rows.index_select(0, route.places)
    else:
        leaving = rows.narrow(0, route.begin, sum(route.rows_in))
    return send(leaving, route.rows_in, route.rows_out, group, into, wait=False)
