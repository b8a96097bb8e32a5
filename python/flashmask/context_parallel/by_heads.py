# SPDX-License-Identifier: Apache-2.0
"""Attention of all rows and some heads on each rank: an all-to-all over heads before it and one after it.

Ulysses, arXiv:2309.14509. Where there are more ranks than heads of k and v, several have the same.
"""

import torch

from ..torch import ops
from .by_keys import has_partial_results
from .messages import all_to_all


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, alibi_slopes, local, group, options):
        heads = Heads(q.shape[2], k.shape[2], local)
        q, k, v = heads.to_heads([q, k, v], group)
        mask = local.of_heads(heads.q, heads.kv, heads.heads)
        sink, alibi_slopes = (None if x is None else x[..., slice(*heads.q)].contiguous() for x in (sink, alibi_slopes))
        features = options.features(sink, alibi_slopes) | heads.origin(options)
        out, lse = ops.forward(q, k, v, mask, *options.of_kernel, **features)
        ctx.save_for_backward(q, k, v, out, lse, sink, alibi_slopes)
        ctx.call = heads, mask, group, options
        ctx.set_materialize_grads(False)
        (of_rows,) = heads.to_rows([out], group)
        if not options.return_lse:  # on every rank, or none
            return of_rows, None
        (lse_of_rows,) = heads.to_rows([_columns(lse)], group)
        return of_rows, lse_of_rows.squeeze(3).transpose(1, 2).contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, sink, alibi_slopes = ctx.saved_tensors
        heads, mask, group, options = ctx.call
        # Others wait for what this rank has, be it nothing.
        rows = out.shape[0], heads.local.rows, heads.heads[0]
        dout = out.new_zeros((*rows, out.shape[3])) if dout is None else dout
        (dout,) = heads.to_heads([dout], group)
        if options.return_lse:
            dlse = lse.new_zeros((*rows, 1)) if dlse is None else _columns(dlse)
            (dlse,) = heads.to_heads([dlse], group)
            dlse = dlse.squeeze(3).transpose(1, 2)
        features = options.features(sink, alibi_slopes) | heads.origin(options)
        several = heads.copies > 1  # whose gradients have yet to be added up
        dq, dk, dv, dsink = ops.backward_with_features(
            *(dout, dlse, q, k, v, out, lse, mask, *options.of_kernel),
            partial_out=several and has_partial_results(q, features),
            **features,
        )
        dsink = None if sink is None else heads.of_all(dsink)
        if not several:
            return *heads.to_rows([dq, dk, dv], group), dsink, None, None, None, None
        (dq,), dkv = heads.to_rows([dq], group), heads.to_rows([dk, dv], group)
        dk, dv = (heads.sum_copies(x).to(q.dtype) for x in dkv)
        return dq, dk, dv, dsink, None, None, None, None


def _columns(lse):
    """lse [batch, heads, rows] as a tensor [batch, rows, heads, 1]."""
    return lse.transpose(1, 2).unsqueeze(3)


class Heads:
    """Heads of a rank, and the ways there and back.

    heads: (heads_q, heads_kv); q, kv: the rank's own, (begin, end); copies: how many ranks have each head of k and v.
    """

    def __init__(self, heads_q, heads_kv, local):
        self.local, self.heads = local, (heads_q, heads_kv)
        world, rank = local.world_size, local.rank
        self.copies = max(world // heads_kv, 1)
        self.q, self.kv = _share(heads_q, world, rank, 1), _share(heads_kv, world, rank, self.copies)

    def origin(self, options):
        """Fields of AttentionOptions that say which heads these are."""
        return {"dropout_first_head": self.q[0]} if options.drops else {}

    def to_heads(self, tensors, group):
        """Tensors [batch, own rows, all heads, size] to [batch, all rows, own heads, size], rows in the sequence's
        order."""
        world, rows = self.local.world_size, self.local.rows_of_ranks()
        of_ranks, shapes = [], []
        for x in tensors:
            heads, size = x.shape[2:]
            if heads < world:  # ranks next to each other have the same
                x, heads = x.repeat_interleave(world // heads, 2), world
            # [ranks, rows, batch, heads of a rank * size]
            of_ranks.append(x.unflatten(2, (world, heads // world)).permute(2, 1, 0, 3, 4).flatten(3))
            shapes.append((heads // world, size))
        sent = torch.cat(of_ranks, 3) if len(of_ranks) > 1 else of_ranks[0]
        received = all_to_all(sent.flatten(0, 1), [rows[self.local.rank]] * world, rows, group)
        ordered = received.index_select(0, self.local.in_order(received.device))
        parts = ordered.split([heads * size for heads, size in shapes], 2)
        return [x.unflatten(2, shape).transpose(0, 1) for x, shape in zip(parts, shapes)]

    def to_rows(self, tensors, group):
        """Tensors [batch, all rows, own heads, size] to [batch, own rows, heads of all ranks, size]."""
        world, rows = self.local.world_size, self.local.rows_of_ranks()
        flat = [x.transpose(0, 1).flatten(2) for x in tensors]
        flat = torch.cat(flat, 2) if len(flat) > 1 else flat[0]
        sent = flat.index_select(0, self.local.by_ranks(flat.device))
        own = rows[self.local.rank]
        received = all_to_all(sent, rows, [own] * world, group).unflatten(0, (world, own))
        widths, results = [x.shape[2] * x.shape[3] for x in tensors], []
        for part, x in zip(received.split(widths, 3), tensors):
            of_ranks = part.unflatten(3, x.shape[2:]).permute(2, 1, 0, 3, 4)
            results.append(of_ranks.flatten(2, 3))
        return results

    def of_all(self, x):
        """[own query heads] among zeros for the others."""
        every = x.new_zeros(self.heads[0])
        every[slice(*self.q)] = x
        return every

    def sum_copies(self, x):
        """[batch, rows, heads of all ranks, size] to [batch, rows, heads, size], always in the same order."""
        return x.unflatten(2, (self.heads[1], self.copies)).sum(3)


def _count(heads, world):
    return max(heads // world, 1)


def _share(heads, world, rank, copies):
    """The heads of a rank, (begin, end)."""
    count = _count(heads, world)
    begin = rank // copies * count
    return begin, begin + count
