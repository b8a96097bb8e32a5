# SPDX-License-Identifier: Apache-2.0
"""Attention of a rank's rows, to which the keys and values travel that they see.

gather: one call over all keys, when they have arrived. overlap: tiles of the rank's own keys, and of each piece, while
the next piece is on its way; partial results are merged in float32.
"""

import torch

from .. import _gather, merge, ops
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
        arrived = [piece.received_at for piece in local.pieces]
        returns = [
            _return_gradients([(x[:, a:b] for x in dkv) for a, b in at], k, v, piece, group, lse.dtype)
            for piece, at in zip(local.pieces, arrived)
        ]
        _add_returned(dk, dv, local, returns)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


class Overlap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, local, group, options):
        exchanges = [_send_keys(k, v, piece, group) for piece in local.pieces]
        parts = [ops.attention(q, k, v, local.own, partial_out=True, **_named(options))]
        for piece, exchange in zip(local.pieces, exchanges):
            received = exchange.wait()
            if received:
                parts.append(ops.attention(q, *_keys_of(received, k), piece.mask, partial_out=True, **_named(options)))
        # The same in every run, as the order of the parts is.
        out, lse = parts[0] if len(parts) == 1 else merge.merge_attention(*zip(*parts))
        return _save(ctx, q, k, v, out, lse, local, group, options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        local, group, options = ctx.call
        dout = _dout(dout, out, q)
        exchanges = [_send_keys(k, v, piece, group) for piece in local.pieces]
        dq, dk, dv = _backward(dout, dlse, q, k, v, local.own, out, lse, options)
        returns = []
        for piece, exchange in zip(local.pieces, exchanges):
            received, parts = exchange.wait(), []
            if received:
                more, *dkv = _backward(dout, dlse, q, *_keys_of(received, k), piece.mask, out, lse, options)
                dq += more
                counts = [keys for _, keys in piece.receives]
                parts = list(zip(*(x.split(counts, 1) for x in dkv)))
            returns.append(_return_gradients(parts, k, v, piece, group, lse.dtype))
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
    return out.to(q.dtype, copy=True), lse.clone()


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


def _apart(kv, k):
    return kv[..., : k.shape[3]], kv[..., k.shape[3] :]


def _send_keys(k, v, piece, group):
    incoming = [(peer, _room_for(keys, k, v)) for peer, keys in piece.receives]
    return Exchange(_outgoing_keys(k, v, piece), incoming, group)


def _outgoing_keys(k, v, piece):
    return [(peer, _beside(*(_gather.take(x, s, 1) for x in (k, v)))) for peer, s in piece.sends]


def _room_for(keys, k, v, dtype=None):
    return k.new_empty((k.shape[0], keys, k.shape[2], k.shape[3] + v.shape[3]), dtype=dtype)


def _keys_of(received, k):
    """k and v of the keys of a piece; views of what arrived."""
    return _apart(received[0] if len(received) == 1 else torch.cat(received, 1), k)


def _all_keys(k, v, local, group):
    """k and v of the rank's own keys and all that travel to it, in the order of local.gathered."""
    if not local.pieces:
        return k, v
    whole = _room_for(local.gathered.seqlen_k, k, v) if local.received_keys else None
    outgoing, incoming, places = [], [], []
    for piece in local.pieces:
        outgoing += _outgoing_keys(k, v, piece)
        for (peer, keys), (begin, end) in zip(piece.receives, piece.received_at):
            place = whole[:, begin:end]
            places.append(place)
            # A message fills one run of memory.
            incoming.append((peer, place if place.is_contiguous() else _room_for(keys, k, v)))
    exchange = Exchange(outgoing, incoming, group)
    if whole is None:
        exchange.wait()
        return k, v
    begin, end = local.own_keys
    for own, x in zip(_apart(whole[:, begin:end], k), (k, v)):
        own.copy_(x)
    for place, received in zip(places, exchange.wait()):
        if received is not place:
            place.copy_(received)
    return _apart(whole, k)


def _return_gradients(parts, k, v, piece, group, dtype):
    """The other way round: gradients of the keys that arrived leave, those of the keys that were sent arrive.

    parts: dk and dv of the keys of each peer of piece.receives.
    """
    outgoing = [(peer, _beside(*part)) for (peer, _), part in zip(piece.receives, parts)]
    incoming = [
        (peer, _room_for(sum(end - begin for begin, end in segments), k, v, dtype)) for peer, segments in piece.sends
    ]
    return Exchange(outgoing, incoming, group)


def _add_returned(dk, dv, local, returns):
    """Adds the gradients of keys that were sent to the rank's own, in the order of pieces and peers."""
    for piece, exchange in zip(local.pieces, returns):
        for (_, segments), part in zip(piece.sends, exchange.wait()):
            at = 0
            for begin, end in segments:
                for own, returned in zip((dk, dv), _apart(part[:, at : at + end - begin], dk)):
                    own[:, begin:end] += returned
                at += end - begin
