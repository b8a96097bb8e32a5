# SPDX-License-Identifier: Apache-2.0
"""Contenders of benchmarks/context_parallel/speed.py, each a forward and a backward of one layer's attention.

one          the whole sequence on each process, flashmask_attention
gather, arrive, overlap, all_to_all   flashmask.context_parallel.attention in each way that the heads allow
early gradients   arrive with a backward whose gradients of others' keys leave under its rest, which no way takes
kernels      gather's kernels once everything has arrived, forward and backward
exchange     the rest of gather: copies and messages
all gather   all keys and values to everyone, waited for; then flashmask's kernel; a reduce-scatter of their gradients
flex         torch's own version of all gather: flex_cp_allgather and FlexAttention (CUDA only, and 64 heads)
"""

from unittest import mock

import flashmask
import torch
import torch.distributed as dist
from flashmask import context_parallel, ops
from flashmask.context_parallel import by_arrival, by_keys, cost, exchange
from flashmask.context_parallel.attention import WAYS

OURS = (*WAYS, "early gradients")
FLEX_HEADS = 64  # more cells would compile FlexAttention for longer than a run may take


class Layer:
    """A call of q, k and v [batch, rows, heads, d], whose out has a gradient."""

    def __init__(self, call, tensors, dout):
        self.call, self.dout = call, dout
        self.leaves = [x.detach().clone().requires_grad_() for x in tensors]

    def forward(self):
        self.out = self.call(*self.leaves)

    def backward(self):
        self.gradients = torch.autograd.grad(self.out, self.leaves, self.dout)
        del self.out

    def results(self):
        """out, dq, dk and dv."""
        self.forward()
        out = self.out.detach()
        self.backward()
        return out, *self.gradients


class Kernels:
    """Gather's kernels, without messages, copies or autograd nodes."""

    def __init__(self, local, q, k, v, dout):
        n = local.gathered.seqlen_k
        index = torch.arange(n, device=k.device) % max(k.shape[1], 1)  # any keys will do
        self.arguments = q, k.index_select(1, index), v.index_select(1, index)
        self.mask, self.dout = local.gathered, dout

    def forward(self):
        self.out, self.lse = ops.attention(*self.arguments, self.mask)

    def backward(self):
        ops.partial_backward(self.dout, None, *self.arguments, self.out, self.lse, self.mask, None, False, "auto", 0)


class Exchange:
    """Gather's copies and messages, without attention's kernels. No rank waits for another's attention: two GPUs run
    equal tiles at speeds that differ by a few percent, with power and heat."""

    ahead = True  # the host enqueues all of it first, as it does in a step, while kernels of attention run

    def __init__(self, local, k, v):
        self.local, self.k, self.v = local, k, v
        shapes = ((x.shape[0], local.gathered.seqlen_k, *x.shape[2:]) for x in (k, v))
        gradients = [torch.randn(shape, dtype=torch.float32, device=k.device) for shape in shapes]
        self.gradients = [torch.stack(gradients)] if k.shape == v.shape else [x.unsqueeze(0) for x in gradients]

    def forward(self):
        self.keys = by_keys.all_keys(self.k, self.v, self.local, None)

    def backward(self):
        if not self.local.keeps_keys:
            self.keys = by_keys.all_keys(self.k, self.v, self.local, None)
        by_keys._own_gradients(self.gradients, self.k.dtype, self.local, None)


class _AllGather(torch.autograd.Function):
    """k and v [batch, rows, ...] of all ranks, one after the other: [batch, sum of rows, ...]."""

    @staticmethod
    def forward(ctx, k, v, counts):
        ctx.counts, ctx.dims = counts, (k.shape[3], v.shape[3])
        return _of_all(torch.cat([k, v], 3).transpose(0, 1), counts).transpose(0, 1).split(ctx.dims, 3)

    @staticmethod
    def backward(ctx, dk, dv):
        gradients = torch.cat([dk, dv], 3).transpose(0, 1)
        padded = gradients.new_zeros(len(ctx.counts), max(ctx.counts), *gradients.shape[1:])
        for rank, part in enumerate(gradients.split(ctx.counts)):
            padded[rank, : ctx.counts[rank]] = part
        own = torch.empty_like(padded[0])
        dist.reduce_scatter_tensor(own, padded.flatten(0, 1))
        own = own[: ctx.counts[dist.get_rank()]].transpose(0, 1)
        return *own.split(ctx.dims, 3), None


def _of_all(x, counts):
    """[own rows, ...] of every rank; sent in equal shares, as a collective wants it."""
    padded = x.new_zeros(max(counts), *x.shape[1:])
    padded[: x.shape[0]] = x
    gathered = x.new_empty(len(counts) * max(counts), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, padded)
    if len(set(counts)) == 1:
        return gathered
    return torch.cat([part[:n] for part, n in zip(gathered.split(max(counts)), counts)])


def all_keys(placement, rank, device):
    """The mask of a rank's rows and the keys of rank 0, 1, ..."""
    segments = [s for r in range(placement.world_size) for s in placement.segments(r)]
    return placement.masks[0].cpu().gather(placement.segments(rank), segments).to(device)


def all_gather(placement, rank, device):
    counts = [placement.rows(r) for r in range(placement.world_size)]
    mask = all_keys(placement, rank, device)

    def call(q, k, v):
        return ops.attention(q, *_AllGather.apply(k, v, counts), mask)[0]

    return call


def flex(placement, rank, device, batch):
    from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
    from torch.nn.attention.flex_attention import flex_attention

    mask = all_keys(placement, rank, device).to_block_mask(batch=batch)
    name = dist.distributed_c10d._get_process_group_name(dist.group.WORLD)
    attend = torch.compile(flex_attention, dynamic=False)

    def call(q, k, v):
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return attend(q, *flex_cp_allgather(k, v, 2, name), block_mask=mask, enable_gqa=True).transpose(1, 2)

    return call


def flex_layer(mask, placement, rank, whole, dout):
    """The Layer of flex, or why there is none. torch hands out a causal sequence's rows as zigzag has them."""
    if whole[0].shape[2] != FLEX_HEADS:
        return f"it is compiled for {FLEX_HEADS} heads alone"
    zigzag = context_parallel.place(mask, placement.world_size, scheme="zigzag")
    try:
        call = flex(zigzag, rank, dout.device, whole[0].shape[0])
        layer = Layer(call, [zigzag.shard(x, rank) for x in whole], zigzag.shard(dout, rank))
        layer.results()
        return layer
    except Exception as error:  # whatever this torch, or its compiler, says
        return f"{type(error).__name__}: {str(error)[:200]}"


def by_way(way, local):
    """The call of one of OURS."""
    if way == "early gradients":

        def with_early_gradients(q, k, v):
            with mock.patch.dict(WAYS, arrive=by_arrival.ArriveAndLeave):
                return context_parallel.attention(q, k, v, local, way="arrive")

        return with_early_gradients
    return lambda q, k, v: context_parallel.attention(q, k, v, local, way=way)


def layers(mask, placement, rank, tensors, peers):
    """The LocalMask, and {name: Layer, Kernels or Exchange, or why there is none}. tensors: q, k, v and dout of the
    whole sequence."""
    whole, dout = tensors[:3], tensors[3]
    device, (heads_q, heads_kv) = dout.device, (whole[0].shape[2], whole[1].shape[2])
    local = placement.mask(rank).to(device)
    shards = [placement.shard(x, rank) for x in whole]
    own_dout = placement.shard(dout, rank)
    on_device = mask.to(device)
    found = {"one": Layer(lambda q, k, v: flashmask.flashmask_attention(q, k, v, on_device), whole, dout)}
    for way in OURS:
        if way == "all_to_all" and not cost.divide(heads_q, heads_kv, placement.world_size):
            found[way] = "the ranks cannot share the heads"
            continue
        if way in ("arrive", "early gradients") and (why := exchange.refusal(device)):
            found[way] = why
            continue
        found[way] = Layer(by_way(way, local), shards, own_dout)
    found["kernels"] = Kernels(local, *shards, own_dout)
    found["exchange"] = Exchange(local, *shards[1:])
    if "all gather" in peers:
        found["all gather"] = Layer(all_gather(placement, rank, device), shards, own_dout)
    if "flex" in peers:
        found["flex"] = flex_layer(mask, placement, rank, whole, dout)
    return local, found
