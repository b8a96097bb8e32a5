# SPDX-License-Identifier: Apache-2.0
"""Placement of a sequence's rows on the ranks that hold and compute them."""

from __future__ import annotations

import ctypes as C
import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .._core import arguments, capi
from ..torch import mask_forms, tensor_arguments
from ..torch.annotations import Device
from ..torch.mask import Mask
from . import cost

if TYPE_CHECKING:
    from .local_mask import LocalMask

SCHEMES = ("contiguous", "zigzag", "balanced")
_UNIT = 128


def place(
    mask: Mask | Iterable[Mask],
    world_size: int,
    *,
    scheme: str = "balanced",
    heads: int | tuple[int, int] | None = None,
    head_dim: int | None = None,
) -> Placement:
    """Hands out the rows of a sequence to `world_size` ranks: a Placement.

    mask: a Mask with as many keys as rows, or a list of the masks of a model's different layers; one placement serves
        all, and each is balanced by itself. Masks on a GPU are copied to host memory, which waits for them.
    scheme: "contiguous" gives each rank one run of rows; "zigzag" two, one from the beginning and one from the end, in
        equal parts of a causal mask; "balanced" looks at the masks: equally many rows for each rank, the largest load
        (live tiles) within 2 % of the mean, and few keys that have to travel. It keeps documents together if it can.
    heads: (heads_q, heads_kv), or a number for both; head_dim: the size of a head. Bytes and times need both, the
        placement itself neither.

    The same arguments give the same placement on every rank, without communication. Raises TypeError or ValueError
    naming the argument.
    """
    masks = _checked_masks(mask)
    world_size = arguments.integer("world_size", world_size, 1, 65536)
    arguments.choice("scheme", scheme, SCHEMES)
    both = _checked_heads(heads)
    if head_dim is not None:
        head_dim = arguments.integer("head_dim", head_dim, 1)
    seqlen = masks[0].seqlen_q
    room = max(-(-seqlen // _UNIT), 4 * world_size)
    owner = torch.zeros(room, dtype=torch.int32, device="cpu")
    tiles, received = torch.zeros(2, len(masks), world_size, dtype=torch.int64, device="cpu")
    on_host = [m.cpu() for m in masks]
    structs = [mask_forms.mask_struct(m) for m in on_host]
    placed = capi.make(
        capi.Placement,
        scheme=SCHEMES.index(scheme),
        ranks=world_size,
        owner=owner.data_ptr(),
        owner_count=room,
        live_tiles=tiles.data_ptr(),
        received=received.data_ptr(),
    )
    pointers = (C.POINTER(capi.Mask) * len(structs))(*map(C.pointer, structs))
    capi.check(capi.load().fm_place(pointers, len(structs), C.byref(placed)))
    return Placement(masks, world_size, scheme, both, head_dim, placed.unit, owner[: placed.units], tiles, received)


class Placement:
    """Rows of each rank; place() makes one. Immutable; equal on every rank.

    masks: those it was made for. seqlen, world_size, scheme, heads and head_dim: as given.
    unit: rows come in runs of this many, 128 (fewer in short sequences), that begin at multiples of it.
    """

    def __init__(
        self,
        masks: list[Mask],
        world_size: int,
        scheme: str,
        heads: tuple[int, int] | None,
        head_dim: int | None,
        unit: int,
        owner: torch.Tensor,
        live_tiles: torch.Tensor,
        received: torch.Tensor,
    ) -> None:
        self.masks = masks
        self.seqlen = masks[0].seqlen_q
        self.world_size, self.scheme = world_size, scheme
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

    def mask(self, rank: int, index: int = 0) -> LocalMask:
        """The LocalMask of `rank` under mask `index`: what the rank computes, and who sends what. See local_mask."""
        from .local_mask import local_mask

        return local_mask(self, self._rank(rank), self._index(index))

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
        """{"gather": Cost, "overlap": Cost, "all_to_all": Cost}: what a model of the machine (cost.Machine) says of the
        ways to compute the attention; the last is missing where heads do not divide. Needs heads and head_dim.
        """
        return self._costs(index, self._shape(), self.head_dim, machine)

    def way(
        self,
        index: int = 0,
        heads: tuple[int, int] | None = None,
        head_dim: int | None = None,
        machine: cost.Machine | None = None,
    ) -> str:
        """The name of the fastest of costs(), of these heads, (heads_q, heads_kv), or the placement's own."""
        heads = self._shape() if heads is None else heads
        return cost.chosen(self._costs(index, heads, head_dim or self.head_dim, machine))

    def _costs(self, index, heads, head_dim, machine):
        mask = self.masks[self._index(index)]
        return cost.costs(
            tiles=self.loads(index),
            tile_elements=self.unit * min(self.unit, _UNIT),
            received=self.received_rows(index),
            rows=self.most_rows * mask.batch,
            mask_heads=mask.heads,
            heads=heads,
            head_dim=head_dim,
            machine=machine or cost.Machine(),
        )

    def explain(self, index: int = 0, machine: cost.Machine | None = None) -> str:
        """Describes loads and bytes of each rank, the modelled costs of gathering keys and values, first or under the
        tiles, and of an all-to-all over heads, and the model's choice. Without heads and head_dim it stops at rows.
        """
        lines = [str(self)] if index == 0 else [self._table(index)]
        if self.heads is None or self.head_dim is None:
            lines.append("bytes and times need heads and head_dim: place(..., heads=(heads_q, heads_kv), head_dim=d)")
        else:
            lines.append(cost.described(self.costs(index, machine), machine or cost.Machine(), self.world_size))
        return "\n".join(lines)

    @functools.cached_property
    def digest(self) -> str:
        """A short string that differs if the rows of any rank do; equal on all ranks of a correct program."""
        text = f"{self.seqlen} {self.world_size} {self.unit} {self._owner.tolist()}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def __repr__(self):
        return self._table(0)

    def _table(self, index):
        title = f"{self.scheme} placement of {self.seqlen} rows on {self.world_size} ranks"
        if len(self.masks) > 1:
            title += f", mask {index} of {len(self.masks)}"
        mean = sum(self.loads(index)) / self.world_size
        lines = [f"{title}: largest load {self.imbalance(index):.3f} of the mean", _HEADER]
        for rank, (load, received) in enumerate(zip(self.loads(index), self.received_rows(index))):
            share = load / mean if mean else 1.0
            lines.append(
                f"{rank:>4} {self.rows(rank):>8} {load:>11} {share:>6.3f} {received:>10}  {_short(self.segments(rank))}"
            )
        return "\n".join(lines)

    # --- Arguments --------------------------------------------------------------------------------

    def _rank(self, rank):
        return arguments.integer("rank", rank, 0, self.world_size - 1)

    def _index(self, index):
        return arguments.integer("index", index, 0, len(self.masks) - 1)

    def _shape(self):
        if self.heads is None or self.head_dim is None:
            raise ValueError("heads or head_dim is None; place(..., heads=(heads_q, heads_kv), head_dim=d) says them")
        return self.heads


_HEADER = "rank     rows  live tiles   load   received  segments"
_MOST_SHOWN = 4


def _short(segments):
    words = [f"[{begin}, {end})" for begin, end in segments[:_MOST_SHOWN]]
    more = len(segments) - len(words)
    return " ".join(words) + (f" and {more} more" if more else "")


def _segments(owner, unit, seqlen, world_size):
    ranks, lengths = torch.unique_consecutive(owner, return_counts=True)
    segments = [[] for _ in range(world_size)]
    begin = 0
    for rank, length in zip(ranks.tolist(), lengths.tolist()):
        end = begin + length * unit
        segments[rank].append((begin, min(end, seqlen)))
        begin = end
    return segments


def _checked_masks(mask):
    masks = tuple(mask) if isinstance(mask, (list, tuple)) else (mask,)
    if not masks:
        raise ValueError("mask is an empty list; it must be a Mask, or a list of at least one")
    for m in masks:
        if not isinstance(m, Mask):
            raise TypeError(f"mask is {arguments.describe(m)}; it must be a flashmask.Mask, or a list of them")
    return masks


def _checked_heads(heads):
    if heads is None:
        return None
    pair = tuple(heads) if isinstance(heads, (list, tuple)) else (heads, heads)
    if len(pair) != 2:
        raise ValueError(
            f"heads is {arguments.describe(heads)}; it must be (heads_q, heads_kv), or one number for both"
        )
    heads_q, heads_kv = (arguments.integer(name, n, 1) for name, n in zip(("heads_q", "heads_kv"), pair))
    if heads_q % heads_kv:
        raise ValueError(f"heads is {(heads_q, heads_kv)}; heads_kv must divide heads_q")
    return heads_q, heads_kv


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
