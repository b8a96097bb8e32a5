# SPDX-License-Identifier: Apache-2.0
"""Attention of a rank's rows, to which the keys and values travel that they see.

gather: one call over all keys, when they have arrived. overlap: tiles of the rank's own keys, and of each piece, while
the next piece is on its way; partial results are merged in float32.
"""

from typing import NamedTuple

import torch

from .. import merge, ops
from .messages import send


class Options(NamedTuple):
    """of_kernel: softmax_scale, deterministic, backend, max_ctas. return_lse: whether lse is wanted, on all ranks."""

    of_kernel: tuple
    return_lse: bool


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, local, group, options):
        whole_k, whole_v = _all_keys(k, v, local, group)
        out, lse = ops.attention(q, whole_k, whole_v, local.gathered, **_named(options))
        if local.keeps_keys:
            k, v = whole_k, whole_v
        return _save(ctx, q, k, v, out, lse, local, group, options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        local, group, options = ctx.call
        dout = _dout(dout, out, q)
        if not local.keeps_keys:
            k, v = _all_keys(k, v, local, group)
        # dq is rounded once, here; dk and dv have yet to be added up.
        dq, dk, dv = _backward(dout, dlse, q, k, v, local.gathered, out, lse, options)
        if not local.pieces:
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None
        routes = local.gathered_routes(k.shape[0], k.device)
        returned = _return_gradients(dk, dv, routes.of_pieces[0], group).wait()
        _add_returned(dk, dv, returned, routes)
        begin, end = local.own_keys
        dk, dv = (_rounded(x.narrow(1, begin, end - begin), k.dtype) for x in (dk, dv))
        return dq.to(q.dtype), dk, dv, None, None, None


class Overlap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, local, group, options):
        arrivals = _send_pieces(k, v, local, group)
        parts = [ops.attention(q, k, v, local.own, partial_out=True, **_named(options))]
        for piece, received in zip(local.pieces, arrivals):
            if piece.receives:
                parts.append(ops.attention(q, *received(), piece.mask, partial_out=True, **_named(options)))
            else:
                received()
        # The same in every run, as the order of the parts is.
        out, lse = parts[0] if len(parts) == 1 else merge.merge_into_first(*zip(*parts))
        return _save(ctx, q, k, v, out, lse, local, group, options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        local, group, options = ctx.call
        dout = _dout(dout, out, q)
        arrivals = _send_pieces(k, v, local, group)
        dq, dk, dv = _backward(dout, dlse, q, k, v, local.own, out, lse, options)
        if local.pieces:
            routes = local.piece_routes(k.shape[0], k.device)
            sizes = [sum(route.rows_out) for route in routes.of_pieces]
            returned = lse.new_empty((sum(sizes), k.shape[2], k.shape[3] + v.shape[3]))
            returns = []
            for piece, route, received, into in zip(local.pieces, routes.of_pieces, arrivals, returned.split(sizes)):
                dkv = received()
                if piece.receives:
                    more, *dkv = _backward(dout, dlse, q, *dkv, piece.mask, out, lse, options)
                    dq += more
                else:  # no rows, of the gradients' dtype
                    dkv = [x.to(lse.dtype) for x in dkv]
                returns.append(_return_gradients(*dkv, route, group, into, wait=False))
            for arrival in returns:
                arrival.wait()
            _add_returned(dk, dv, returned, routes)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


# --- The calls --------------------------------------------------------------------------------------


def _named(options):
    softmax_scale, deterministic, backend, max_ctas = options.of_kernel
    return {"softmax_scale": softmax_scale, "deterministic": deterministic, "backend": backend, "max_ctas": max_ctas}


def _save(ctx, q, k, v, out, lse, local, group, options):
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.call = local, group, options
    ctx.set_materialize_grads(False)
    return out.to(q.dtype), lse


def _dout(dout, out, q):
    """A rank whose result is not used takes part all the same: others wait for its keys."""
    return torch.zeros_like(out, dtype=q.dtype) if dout is None else dout


def _backward(dout, dlse, q, k, v, mask, out, lse, options):
    """What these keys add to dq, in out's dtype, and their dk and dv in float32, given out and lse of all keys."""
    return ops.partial_backward(dout, dlse, q, k, v, out, lse, mask, *options.of_kernel)


# --- What travels -----------------------------------------------------------------------------------


def _apart(kv, k):
    return kv.split((k.shape[3], kv.shape[3] - k.shape[3]), 3)


def _all_keys(k, v, local, group):
    """k and v of the rank's own keys and all that travel to it, in the order of local.gathered."""
    if not local.pieces:
        return k, v
    (route,) = local.gathered_routes(k.shape[0], k.device).of_pieces
    whole = k.new_empty((k.shape[0], route.seqlen_k, k.shape[2], k.shape[3] + v.shape[3]))
    begin, end = local.own_keys
    for part, own in zip(_apart(whole.narrow(1, begin, end - begin), k), (k, v)):
        part, own = _in_units(part, own)
        part.copy_(own)
    rows = whole.view(-1, *whole.shape[2:])
    into = None if route.places is not None else rows.narrow(0, route.begin, sum(route.rows_in))
    received = send(rows.index_select(0, route.sent), route.rows_out, route.rows_in, group, into).wait()
    if route.places is not None or route.padding is not None:
        _place(*_in_units(received, rows), route)
    return _apart(whole, k)


def _place(received, rows, route):
    """Puts the rows that arrived where they belong, if they are not there."""
    if route.places is not None:
        rows.index_copy_(0, route.places, received)
    if route.padding is not None:
        rows.index_fill_(0, route.padding, 0)


def _in_units(*tensors):
    """Views of 16-byte elements, if the layouts of all tensors allow them; for moving alone. torch copies strided
    tensors at so many elements a second, whatever their size."""

    def allows(x):
        of_unit = torch.complex128.itemsize // x.itemsize
        is_whole = all(size % of_unit == 0 for size in (x.shape[-1], *x.stride()[:-1]))
        return is_whole and x.stride(-1) == 1 and x.data_ptr() % torch.complex128.itemsize == 0

    return [x.view(torch.complex128) for x in tensors] if all(map(allows, tensors)) else tensors


def _rounded(x, dtype):
    """x converted to another dtype, one batch entry at a time: each of them is contiguous."""
    result = x.new_empty(x.shape, dtype=dtype)
    for to, entry in zip(result, x):
        to.copy_(entry)
    return result


def _send_pieces(k, v, local, group):
    """Sends the keys of all pieces: for each a function that waits for what the rank receives, and returns k and v."""
    if not local.pieces:
        return []
    routes = local.piece_routes(k.shape[0], k.device)
    sent = torch.cat([k, v], 3).flatten(0, 1).index_select(0, routes.sent)
    sent = sent.split([sum(route.rows_out) for route in routes.of_pieces])
    return [_piece_arrival(x, k, route, group) for x, route in zip(sent, routes.of_pieces)]


def _piece_arrival(sent, k, route, group):
    arrival = send(sent, route.rows_out, route.rows_in, group, wait=False)

    def received():
        rows = arrival.wait()
        if route.places is not None or route.padding is not None:
            fitting = rows.new_empty((k.shape[0] * route.seqlen_k, *rows.shape[1:]))
            if route.places is None:
                fitting.narrow(0, route.begin, len(rows)).copy_(rows)
            _place(rows, fitting, route)
            rows = fitting
        return _apart(rows.view(k.shape[0], route.seqlen_k, *rows.shape[1:]), k)

    return received


def _return_gradients(dk, dv, route, group, into=None, wait=True):
    """The other way round: gradients of the keys that arrived leave, those of the keys that were sent arrive.

    dk, dv: of the keys among which the route's have their places.
    """
    dk, dv = dk.flatten(0, 1), dv.flatten(0, 1)
    if route.places is not None:
        dk, dv = dk.index_select(0, route.places), dv.index_select(0, route.places)
    else:
        keys = sum(route.rows_in)
        dk, dv = dk.narrow(0, route.begin, keys), dv.narrow(0, route.begin, keys)
    return send(torch.cat([dk, dv], 2), route.rows_in, route.rows_out, group, into, wait)


def _add_returned(dk, dv, returned, routes):
    """Adds the gradients of keys that were sent to those of the source, in the order in which they were sent."""
    sizes = dk.shape[3], dv.shape[3]
    dk, dv = dk.view(-1, *dk.shape[2:]), dv.view(-1, *dv.shape[2:])
    for which, rows in routes.rounds:
        of_k, of_v = (returned if which is None else returned.index_select(0, which)).split(sizes, 2)
        dk.index_add_(0, rows, of_k)
        dv.index_add_(0, rows, of_v)
