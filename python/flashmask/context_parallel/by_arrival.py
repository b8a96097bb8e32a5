# SPDX-License-Identifier: Apache-2.0
"""Attention of a rank's rows by one kernel over all keys that they see, which begins before the keys are there.

The rank's own keys come first, and then pieces of others', in the order in which they are copied from their owners'
memory (exchange.py); the kernel waits for a piece when it comes to it. So a result's bits do not depend on when keys
arrive. The backward is gather's, over keys in that order; another, whose gradients of others' keys leave while it
computes the rest, has been measured to be slower.
"""

import math

import torch

from ..torch import ops
from . import exchange
from .by_keys import (
    Gather,
    all_keys,
    gathered_backward,
    has_partial_results,
    of_one_shape,
    save,
    unstacked,
    with_own_keys,
    with_returned,
    zero_if_unused,
)
from .exchange import Copy
from .routes import Entries

_GRADIENT = torch.float32  # dtype of gradients that travel
_ALIGNMENT = 16  # bytes, of each stack in a slot, so that it moves in as large units as the tensors


class Arrive(Gather):
    """Gather with a forward that begins before the keys are there."""

    @staticmethod
    def slot_bytes(k, v, local):
        """Bytes that any rank sends at a time, at most, of tensors like these."""
        return local.once(("slot bytes", k.shape, v.shape, k.dtype), lambda: _key_bytes(k, v, local))

    @staticmethod
    def forward(ctx, q, k, v, sink, alibi_slopes, local, group, options):
        local = local.by_arrival()
        shared = exchange.of(group, q.device)
        shared.begin(local)
        laid = [with_own_keys(tensors, local) for tensors in of_one_shape(k, v)]
        stacks = [stack for stack, _, _ in laid]
        whole_k, whole_v = unstacked(stacks)
        mask = local.masks(alibi_slopes is not None, q.device).gathered
        mask.plan(q.device)
        arrivals = ops.Arrivals(local.needed_pieces(q.device), shared.state, options.arrival_timeout)
        features = options.features(sink, alibi_slopes) | options.origins(local, q.device).gathered
        # Others get what they wait for before anything here waits for others.
        _fill_slot(laid, shared)
        shared.offer()
        shared.pull(_copies(stacks, local), [stack.data_ptr() for stack in stacks])
        out, lse = ops.arriving_attention(q, whole_k, whole_v, mask, arrivals, *options.of_kernel, **features)
        shared.settle(len(local.pieces), out, lse, options.arrival_timeout)
        if local.keeps_keys:
            k, v = whole_k, whole_v
        return save(ctx, q, k, v, out, lse, sink, alibi_slopes, local, group, options)


class ArriveAndLeave(Arrive):
    """Arrive with a backward of its own where the call allows one: gradients of others' keys come first, and their
    owners copy them while it computes the rest.

    No way of attention() takes it: on two H200s it was mostly slower than gather's backward. Put in the place of Arrive
    (attention.WAYS), it is what tests and benchmarks/context_parallel run.
    """

    @staticmethod
    def slot_bytes(k, v, local):
        """Bytes that any rank sends at a time, keys or float32 gradients of others' keys."""
        keys = Arrive.slot_bytes(k, v, local)
        return max(keys, _gradient_bytes(k, local)) if _leaves_early(k, v, local) else keys

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, sink, alibi_slopes = saved = ctx.saved_tensors  # once: checkpoints compute them
        local, group, options = ctx.call
        features = options.features(sink, alibi_slopes) | options.origins(local, q.device).gathered
        if not (_leaves_early(k, v, local) and has_partial_results(q, features)):
            return gathered_backward(dout, dlse, saved, local, group, options)
        if not local.keeps_keys:
            k, v = all_keys(k, v, local, group)
        shared = exchange.of(group, q.device)
        shared.begin(local)
        early = _early_gradients(k, local, shared)
        routes = local.piece_routes(k.shape[0], 2, k.device)
        returned = lse.new_empty((len(routes.sent), *k.shape[2:]))  # before kernels that its memory may have been of
        mask = local.masks(alibi_slopes is not None, q.device).gathered
        call = zero_if_unused(dout, out, q), dlse, q, k, v, out, lse, mask, (*early, *shared.early())
        dq, dkv, dsink = ops.early_backward(*call, *options.of_kernel, **features)
        shared.offer_early_and_pull(_returns(returned, k.shape[0], local), [returned.data_ptr()])

        def wait():
            shared.settle(len(local.pieces), dq, returned, options.arrival_timeout)
            return returned

        own = dkv.view(2, k.shape[0], local.rows, *k.shape[2:])
        dk, dv = with_returned(own, own, k.dtype, routes, wait)
        return dq.to(q.dtype), dk, dv, dsink if sink is not None else None, None, None, None, None


def _leaves_early(k, v, local):
    """Tells if a backward has gradients of others' keys first, which then leave under its rest; alike on all ranks."""
    return k.shape[2:] == v.shape[2:] and local.parts_are_whole_tiles


def _key_bytes(k, v, local):
    batch = k.shape[0] if local.travels_together else 1
    of_key = sum(math.prod(x.shape[2:]) * x.itemsize for x in (k, v))
    return max(map(sum, local.travelling())) * batch * of_key + _ALIGNMENT


def _gradient_bytes(k, local):
    received = max(local.received_by(rank) for rank in range(local.world_size))
    return received * k.shape[0] * 2 * math.prod(k.shape[2:]) * _GRADIENT.itemsize


def _row_bytes(stack):
    return math.prod(stack.shape[3:]) * stack.itemsize


def _aligned(size):
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _fill_slot(laid, shared):
    """Fills the rank's slot with the rows that leave, and the places that nothing fills with zeros."""
    at = 0
    for stack, moved, route in laid:
        rows, size = moved.flatten(0, 2), len(route.sent) * _row_bytes(stack)
        if route.padding is not None:
            rows.index_fill_(0, route.padding, 0)
        to = shared.slot_part(at, size).view(rows.dtype).view(len(route.sent), *rows.shape[1:])
        torch.index_select(rows, 0, route.sent, out=to)
        at = _aligned(at + size)


def _copies(stacks, local):
    """Copies for Exchange.pull: each piece's rows from their owners' slots to their places in the stacks."""
    key = "copies", *((stack.shape, stack.dtype) for stack in stacks)
    return local.once(key, lambda: _make_copies(stacks, local))


def _make_copies(stacks, local):
    pieces = [[] for _ in local.pieces]
    travelling, begins = local.travelling(), [0] * local.world_size
    for number, stack in enumerate(stacks):
        tensors, batch, seqlen_k = stack.shape[:3]
        row, entries = _row_bytes(stack), Entries(batch, tensors)
        of_key = row * len(entries.of(None if local.travels_together else 0))
        # A slot has what goes to rank 0, then to rank 1 and so on, of one stack after the other.
        at = [begin + of_key * sum(to[: local.rank]) for begin, to in zip(begins, travelling)]
        begins = [_aligned(begin + of_key * sum(to)) for begin, to in zip(begins, travelling)]
        for copies, piece in zip(pieces, local.pieces):
            for (peer, entry, keys), (place, _) in zip(piece.receives, piece.gathered_places):
                for n in entries.of(entry):
                    copies.append(Copy(peer, at[peer], number, (n * seqlen_k + place) * row, keys * row))
                    at[peer] += keys * row
    return pieces


def _early_gradients(k, local, shared):
    """dk and dv of others' keys, in the rank's slot."""
    shape = 2, k.shape[0], k.shape[1] - local.rows, *k.shape[2:]
    return shared.slot_part(0, math.prod(shape) * _GRADIENT.itemsize).view(_GRADIENT).view(shape).unbind()


def _returns(returned, batch, local):
    """Copies for Exchange.pull: the gradients of each piece that the rank has sent, to their places in `returned`."""
    key = "returns", batch, returned.shape
    return local.once(key, lambda: _make_returns(returned, batch, local))


def _make_returns(returned, batch, local):
    pieces, row = [], math.prod(returned.shape[1:]) * returned.itemsize
    entries, to = Entries(batch, 2), 0
    for n, piece in enumerate(local.pieces):
        pieces.append([])
        for peer, entry, segments in piece.sends:
            keys, received = sum(end - begin for begin, end in segments), local.received_by(peer)
            for index in entries.of(entry):
                begin = (index * received + local.places_at(peer)[n, entry]) * row
                pieces[n].append(Copy(peer, begin, 0, to, keys * row))
                to += keys * row
    return pieces
