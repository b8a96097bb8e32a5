# SPDX-License-Identifier: Apache-2.0
"""Attention of a rank's rows, to which the keys and values travel that they see.

gather: one call over all keys, when they have arrived. overlap: tiles of the rank's own keys, and of each piece, while
the next piece is on its way; partial results are merged in float32.
"""

import torch

from .. import merge, ops
from .messages import Exchange


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, local, group, options):
        whole_k, whole_v = _all_keys(k, v, local, group)
        out, lse = ops.attention(q, whole_k, whole_v, local.gathered, **_named(options))
        return _save(ctx, q, k, v, out, lse, local, group, options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        local, group, options = ctx.call
        dout = _dout(dout, out, q)
        whole_k, whole_v = _all_keys(k, v, local, group)
        # dq is rounded once, here; dk and dv have yet to be added up.
        dq, *dkv = _backward(dout, dlse, q, whole_k, whole_v, local.gathered, out, lse, options)
        begin, end = local.own_keys
        dk, dv = (x[:, begin:end] for x in dkv)
        returns = [
            _return_gradients(dkv, piece.gathered_places, k, v, piece, group, lse.dtype) for piece in local.pieces
        ]
        _add_returned(dk, dv, local, returns)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


class Overlap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, local, group, options):
        arrivals = [_exchange_piece(k, v, piece, group) for piece in local.pieces]
        parts = [ops.attention(q, k, v, local.own, partial_out=True, **_named(options))]
        for piece, arrival in zip(local.pieces, arrivals):
            received = arrival.wait()
            if received:
                parts.append(ops.attention(q, *received, piece.mask, partial_out=True, **_named(options)))
        # The same in every run, as the order of the parts is.
        out, lse = parts[0] if len(parts) == 1 else merge.merge_attention(*zip(*parts))
        return _save(ctx, q, k, v, out, lse, local, group, options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        local, group, options = ctx.call
        dout = _dout(dout, out, q)
        arrivals = [_exchange_piece(k, v, piece, group) for piece in local.pieces]
        dq, dk, dv = _backward(dout, dlse, q, k, v, local.own, out, lse, options)
        returns = []
        for piece, arrival in zip(local.pieces, arrivals):
            received, dkv = arrival.wait(), None
            if received:
                more, *dkv = _backward(dout, dlse, q, *received, piece.mask, out, lse, options)
                dq += more
            returns.append(_return_gradients(dkv, piece.places, k, v, piece, group, lse.dtype))
        _add_returned(dk, dv, local, returns)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


# --- The calls --------------------------------------------------------------------------------------


def _named(options):
    softmax_scale, deterministic, backend, max_ctas = options
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
    return ops.partial_backward(dout, dlse, q, k, v, out, lse, mask, *options)


# --- What travels -----------------------------------------------------------------------------------


def _beside(k, v):
    """k and v side by side, so that a key is one message's part."""
    return torch.cat([k, v], -1)


def _packed(k, v, segments):
    """The same of the keys in these segments, copied once."""
    keys = sum(end - begin for begin, end in segments)
    message = k.new_empty((k.shape[0], keys, k.shape[2], k.shape[3] + v.shape[3]))
    for x, part in zip((k, v), _apart(message, k)):
        at = 0
        for begin, end in segments:
            part[:, at : at + end - begin].copy_(x[:, begin:end])
            at += end - begin
    return message


def _apart(kv, k):
    return kv[..., : k.shape[3]], kv[..., k.shape[3] :]


def _of(x, entry):
    """One batch entry, or, for None, all."""
    return x if entry is None else x[entry : entry + 1]


class _Arrival:
    """k and v of `seqlen_k` keys, [batch, seqlen_k, ...], of which messages fill the places of some."""

    def __init__(self, k, v, seqlen_k, pieces, places, group):
        """places: of the messages of each piece."""
        self.k, self.whole, self.copies = k, None, []
        outgoing = [
            (peer, _packed(_of(k, entry), _of(v, entry), segments))
            for piece in pieces
            for peer, entry, segments in piece.sends
        ]
        receives = [(*what, at) for piece, of in zip(pieces, places) for what, at in zip(piece.receives, of)]
        if receives:
            shape = k.shape[0], seqlen_k, k.shape[2], k.shape[3] + v.shape[3]
            # Keys that fill up an entry that has fewer than others are seen by no row, but are numbers.
            padded = any(entry is not None for _, entry, *_ in receives)
            self.whole = k.new_zeros(shape) if padded else k.new_empty(shape)
        incoming = []
        for peer, entry, _, (begin, end) in receives:
            place = _of(self.whole, entry)[:, begin:end]
            message = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            incoming.append((peer, message))
            if message is not place:
                self.copies.append((place, message))
        self.exchange = Exchange(outgoing, incoming, group)

    def wait(self):
        """(k, v), views of what is there; () if nothing has arrived."""
        self.exchange.wait()
        for place, message in self.copies:
            place.copy_(message)
        return () if self.whole is None else _apart(self.whole, self.k)


def _exchange_piece(k, v, piece, group):
    return _Arrival(k, v, piece.mask.seqlen_k, [piece], [piece.places], group)


def _all_keys(k, v, local, group):
    """k and v of the rank's own keys and all that travel to it, in the order of local.gathered."""
    if not local.pieces:
        return k, v
    places = [piece.gathered_places for piece in local.pieces]
    arrival = _Arrival(k, v, local.gathered.seqlen_k, local.pieces, places, group)
    if arrival.whole is not None:
        begin, end = local.own_keys
        for own, x in zip(_apart(arrival.whole[:, begin:end], k), (k, v)):
            own.copy_(x)
    return arrival.wait() or (k, v)


def _return_gradients(dkv, places, k, v, piece, group, dtype):
    """The other way round: gradients of the keys that arrived leave, those of the keys that were sent arrive.

    dkv: dk and dv of the keys among which those of the piece are at `places`.
    """
    outgoing = [
        (peer, _beside(*(_of(x, entry)[:, begin:end] for x in dkv)))
        for (peer, entry, _), (begin, end) in zip(piece.receives, places)
    ]
    incoming = []
    for peer, entry, segments in piece.sends:
        keys = sum(end - begin for begin, end in segments)
        shape = _of(k, entry).shape[0], keys, k.shape[2], k.shape[3] + v.shape[3]
        incoming.append((peer, k.new_empty(shape, dtype=dtype)))
    return Exchange(outgoing, incoming, group)


def _add_returned(dk, dv, local, returns):
    """Adds the gradients of keys that were sent to the rank's own, in the order of pieces and messages."""
    for piece, exchange in zip(local.pieces, returns):
        for (_, entry, segments), part in zip(piece.sends, exchange.wait()):
            at = 0
            for begin, end in segments:
                for own, returned in zip((dk, dv), _apart(part[:, at : at + end - begin], dk)):
                    _of(own, entry)[:, begin:end] += returned
                at += end - begin
