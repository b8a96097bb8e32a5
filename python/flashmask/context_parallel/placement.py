# SPDX-License-Identifier: Apache-2.0
"""Placement of a sequence's rows on the ranks that hold and compute them."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterable

import torch

from .._core import arguments, capi
from ..torch import host_masks
from ..torch.mask import Mask
from . import cost
from .local_mask import LocalMask, local_mask
from .partition import UNIT, Partition

SCHEMES = ("contiguous", "zigzag", "balanced")


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
    room = max(-(-seqlen // UNIT), 4 * world_size)
    owner = torch.zeros(room, dtype=torch.int32, device="cpu")
    tiles, received = torch.zeros(2, len(masks), world_size, dtype=torch.int64, device="cpu")
    on_host = [m.cpu() for m in masks]
    structs = [host_masks.mask_struct(m) for m in on_host]
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


class Placement(Partition):
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
        super().__init__(masks, world_size, heads, head_dim, unit, owner, live_tiles, received)
        self.scheme = scheme

    def mask(self, rank: int, index: int = 0) -> LocalMask:
        """The LocalMask of `rank` under mask `index`: what the rank computes, and who sends what. See local_mask."""
        return local_mask(self, self._rank(rank), self._index(index))

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


_HEADER = "rank     rows  live tiles   load   received  segments"
_MOST_SHOWN = 4


def _short(segments):
    words = [f"[{begin}, {end})" for begin, end in segments[:_MOST_SHOWN]]
    more = len(segments) - len(words)
    return " ".join(words) + (f" and {more} more" if more else "")


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
