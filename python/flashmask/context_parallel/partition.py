# SPDX-License-Identifier: Apache-2.0
"""Rows of a sequence, a part for each rank, and what each costs its rank."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._core import arguments
from ..torch import tensor_arguments
from ..torch.annotations import Device
from ..torch.mask import Mask
from . import cost

UNIT = 128  # rows of a unit; fewer in short sequences


class Partition:
    """The part of a Placement that a LocalMask needs: rows of each rank, and what they cost under each mask.

    owner: int32, the rank of each unit. live_tiles, received: int64 [masks, ranks], see loads() and received_rows().
    """

    def __init__(
        self,
        masks: list[Mask],
        world_size: int,
        heads: tuple[int, int] | None,
        head_dim: int | None,
        unit: int,
        owner: torch.Tensor,
        live_tiles: torch.Tensor,
        received: torch.Tensor,
    ) -> None:
        self.masks = masks
        self.seqlen = masks[0].seqlen_q
        self.world_size = world_size
        self.heads, self.head_dim = heads, head_dim
        self.unit = unit
        self._owner = owner
        self._live_tiles, self._received = live_tiles.tolist(), received.tolist()
        self._segments = _segments(owner, unit, self.seqlen, world_size)

    # --- Rows -------------------------------------------------------------------------------------

    def segments(self, rank: int) -> list[tuple[int, int]]:
        """The rows of a rank: [(begin, end), ...], ascending, end exclusive. Its local rows are these in this order."""
        return list(self._segments[self._rank(rank)])

    def rows(self, rank: int) -> int:
        """How many rows a rank has: as many units for each rank, or one more; the last unit may be shorter."""
        return sum(end - begin for begin, end in self.segments(rank))

    @functools.cached_property
    def most_rows(self) -> int:
        return max(self.rows(rank) for rank in range(self.world_size))

    def index(self, rank: int, device: Device | None = None) -> torch.Tensor:
        """int64 [rows(rank)]: the row of the sequence that each local row is.

        These are the position ids of rotary embeddings, if a token's position is its place in the sequence.
        """
        parts = [torch.arange(begin, end, device=device) for begin, end in self.segments(rank)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)

    def owner(self, row: int) -> int:
        """The rank that holds a row."""
        row = arguments.integer("row", row, 0, self.seqlen - 1)
        return int(self._owner[row // self.unit])

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """The rows of `rank` of a tensor with the whole sequence in dimension `dim`: ids, labels, positions,
        hidden states. A copy, and differentiable.
        """
        dim = _dimension(x, dim)
        if x.shape[dim] != self.seqlen:
            raise ValueError(f"x is {list(x.shape)}; its dimension {dim} must be the sequence, {self.seqlen}")
        parts = [x.narrow(dim, begin, end - begin) for begin, end in self.segments(rank)]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()

    def unshard(self, x: torch.Tensor, group: Any = None, dim: int = 1) -> torch.Tensor:
        """The whole sequence on every rank, from each rank's rows in dimension `dim` of x.

        group: the process group, of world_size ranks that hold the rows of rank 0, 1, ... in its order; None: the
        default one. All ranks call it. Differentiable: the gradient is of the sum of all ranks' uses of it.
        """
        dim = _dimension(x, dim)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if size != self.world_size:
            raise ValueError(f"group has {size} ranks; the placement was made for {self.world_size}")
        if x.shape[dim] != self.rows(rank):
            raise ValueError(f"x is {list(x.shape)}; its dimension {dim} must be rank {rank}'s {self.rows(rank)} rows")
        return _Unshard.apply(x, self, group, rank, dim)

    def join(self, shards: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """The whole sequence from the shards of all ranks, a list in their order."""
        if len(shards) != self.world_size:
            raise ValueError(f"shards has {len(shards)} tensors; there are {self.world_size} ranks")
        dim = _dimension(shards[0], dim)
        pieces = []
        for rank, shard in enumerate(shards):
            at = 0
            for begin, end in self._segments[rank]:
                pieces.append((begin, shard.narrow(dim, at, end - begin)))
                at += end - begin
        pieces.sort(key=lambda piece: piece[0])
        return torch.cat([piece for _, piece in pieces], dim) if pieces else shards[0].clone()

    @functools.cached_property
    def digest(self) -> str:
        """A short string that differs if the rows of any rank do; equal on all ranks of a correct program."""
        text = f"{self.seqlen} {self.world_size} {self.unit} {self._owner.tolist()}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    # --- What it is judged by ---------------------------------------------------------------------

    def loads(self, index: int = 0) -> list[int]:
        """Live tiles of each rank under mask `index`: `unit` rows x min(unit, 128) keys, over its batch and heads."""
        return list(self._live_tiles[self._index(index)])

    def imbalance(self, index: int = 0) -> float:
        """The largest load over the mean; 1 if there is nothing to do."""
        loads = self.loads(index)
        return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0

    def received_rows(self, index: int = 0) -> list[int]:
        """Number of other ranks' keys that each rank's rows see under mask `index`, summed over the mask's batch.

        No exchange of keys and values needs fewer. Under a block mask or a band over positions it is an upper bound.
        """
        return list(self._received[self._index(index)])

    def received_bytes(self, index: int = 0, itemsize: int = 2) -> list[int]:
        """received_rows in bytes of k and v, forward. itemsize: bytes of an element. Needs heads and head_dim."""
        row = 2 * self._shape()[1] * self.head_dim * itemsize
        return [rows * row for rows in self.received_rows(index)]

    def costs(self, index: int = 0, machine: cost.Machine | None = None) -> dict[str, cost.Cost]:
        """{"gather": Cost, "arrive": Cost, "overlap": Cost, "all_to_all": Cost}: what a model of the machine
        (cost.Machine) says of the ways to compute the attention; "arrive" is missing across nodes, the last where heads
        do not divide. Needs heads and head_dim.
        """
        return self._costs(index, self._shape(), self.head_dim, machine)

    def way(
        self,
        index: int = 0,
        heads: tuple[int, int] | None = None,
        head_dim: int | None = None,
        machine: cost.Machine | None = None,
    ) -> str:
        """The name of the fastest of costs() but "arrive", of heads (heads_q, heads_kv), or the placement's own."""
        heads = self._shape() if heads is None else heads
        return cost.chosen(self._costs(index, heads, head_dim or self.head_dim, machine))

    def _costs(self, index, heads, head_dim, machine):
        mask = self.masks[self._index(index)]
        return cost.costs(
            tiles=self.loads(index),
            tile_elements=self.unit * min(self.unit, UNIT),
            received=self.received_rows(index),
            rows=self.most_rows * mask.batch,
            mask_heads=mask.heads,
            heads=heads,
            head_dim=head_dim,
            machine=machine or cost.Machine(),
        )

    # --- Arguments --------------------------------------------------------------------------------

    def _rank(self, rank):
        return arguments.integer("rank", rank, 0, self.world_size - 1)

    def _index(self, index):
        return arguments.integer("index", index, 0, len(self.masks) - 1)

    def _shape(self):
        if self.heads is None or self.head_dim is None:
            raise ValueError("heads or head_dim is None; place(..., heads=(heads_q, heads_kv), head_dim=d) says them")
        return self.heads


def _segments(owner, unit, seqlen, world_size):
    ranks, lengths = torch.unique_consecutive(owner, return_counts=True)
    segments = [[] for _ in range(world_size)]
    begin = 0
    for rank, length in zip(ranks.tolist(), lengths.tolist()):
        end = begin + length * unit
        segments[rank].append((begin, min(end, seqlen)))
        begin = end
    return segments


def _dimension(x, dim):
    tensor_arguments.check_dense("x", x)
    dim = arguments.integer("dim", dim, -x.ndim, x.ndim - 1)
    return dim % x.ndim if x.ndim else 0


class _Unshard(torch.autograd.Function):
    """Gathers shards of different lengths, padded to the longest: collectives take one shape."""

    @staticmethod
    def forward(ctx, x, placement, group, rank, dim):
        ctx.placement, ctx.group, ctx.rank, ctx.dim = placement, group, rank, dim
        shape = list(x.shape)
        shape[dim] = placement.most_rows
        padded = x.new_zeros(shape)
        padded.narrow(dim, 0, x.shape[dim]).copy_(x)
        gathered = [torch.empty_like(padded) for _ in range(placement.world_size)]
        dist.all_gather(gathered, padded, group=group)
        return placement.join([g.narrow(dim, 0, placement.rows(r)) for r, g in enumerate(gathered)], dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return ctx.placement.shard(gradient, ctx.rank, ctx.dim), None, None, None, None
