# SPDX-License-Identifier: Apache-2.0
"""Masks in other forms: dense rows, counts, FlashMask's indices and FlexAttention's blocks.

Forms that torch's calls read are made on the device of the mask's tensors. The C library counts and converts in host
memory, so these functions wait for a device.
"""

import ctypes as C
import dataclasses
from typing import NamedTuple

import torch

from .._core import capi
from . import tensor_arguments
from .host_masks import BLOCK, Vectors, mask_struct, on_host, tensor

TILE = 128
_FARTHEST = (1 << 31) - 1  # a side of a window over positions that is open, as the library has it
_SAMPLE = 1 << 19  # row blocks of all keys that a sample of a block mask looks at


def diagonals(mask):
    """(lo, hi): row i sees key j only if lo <= j - i <= hi; None is unbounded. With positions, those of j and i."""
    offset = mask.seqlen_k - mask.seqlen_q if mask.q_offset is None else mask.q_offset
    left, right = mask.window or (-1, -1)
    if mask.q_pos is not None:
        offset = 0
        left, right = (-1 if side >= _FARTHEST else side for side in (left, right))
    lo = None if left == -1 else offset - left
    # A window's right side is never negative, so causal is the tighter one.
    hi = offset if mask.causal else None if right == -1 else offset + right
    return lo, hi


def intervals(mask):
    """The stored intervals as (begin, end) pairs of [batch, heads, seqlen_k] tensors; None is row 0 or seqlen_q."""
    if mask.bounds is None:
        return []
    vectors = mask.bounds.unbind(-1)
    if len(vectors) == 1:
        return [(vectors[0], None)]
    if len(vectors) == 4:
        return [vectors[:2], vectors[2:]]
    return [vectors] if mask.causal else [(vectors[0], None), (None, vectors[1])]


def visible_rows(mask, begin, end):
    """Rows [begin, end) as a bool tensor [batch, heads, end - begin, seqlen_k]."""

    def places(dimension, first, last):
        return torch.arange(first, last, device=mask.device).view([-1 if d == dimension else 1 for d in range(4)])

    every = places(0, 0, mask.batch), places(1, 0, mask.heads), places(2, begin, end), places(3, 0, mask.seqlen_k)
    return predicate(mask, mask.heads, begin, end)(*every).expand(mask.batch, mask.heads, -1, -1)


def listed_rows(mask, begin, end):
    """The elements of rows [begin, end) that interval lists hide: bool [batch, heads, end - begin, seqlen_k]."""
    first, last = (x.flatten().long() for x in (mask.column_ptr[..., :-1], mask.column_ptr[..., 1:]))
    most = mask.intervals.shape[0]
    if ((first < 0) | (first > last) | (last > most)).any():
        raise ValueError(
            f"column_ptr must ascend within [0, {most}], the number of intervals, in each batch entry and head"
        )
    count, n = last - first, end - begin
    column = torch.arange(count.numel(), device=mask.device).repeat_interleave(count)
    at = torch.arange(column.numel(), device=mask.device) + (first - count.cumsum(0) + count)[column]
    start, stop = (mask.intervals[at].long() - begin).clamp(0, n).unbind(1)
    stop = torch.maximum(start, stop)
    depth = torch.zeros((count.numel(), n + 1), dtype=torch.int32, device=mask.device)  # steps, then their sums
    for places, step in ((start, 1), (stop, -1)):
        depth.index_put_((column, places), depth.new_tensor(step), accumulate=True)
    hidden = depth.cumsum(1, dtype=torch.int32)[:, :n] > 0
    return hidden.view(*mask.column_ptr.shape[:2], mask.seqlen_k, n).transpose(2, 3)


def predicate(mask, heads, begin=0, end=None):
    """Makes a broadcasting function of b, h, q, k: row q of batch entry b and head h, of `heads`, sees key k.

    begin, end: the rows that it is asked for, which cost memory where interval lists hide them.
    """
    lo, hi = diagonals(mask)
    pairs = intervals(mask)
    keep = mask.block_mask
    listed = None if mask.column_ptr is None else listed_rows(mask, begin, mask.seqlen_q if end is None else end)

    def pick(x, b, h, *at):
        # Whatever a batch or heads of 1 is broadcast to, b and h are numbers in that.
        return x[(b if x.shape[0] > 1 else b * 0, h // (heads // x.shape[1]) if x.shape[1] > 1 else h * 0, *at)]

    def pick_position(x, b, at):
        return x[(b if x.shape[0] > 1 else b * 0, at)].long()

    def is_visible(b, h, q, k):
        visible, from_, at = (q >= 0) & (k >= 0), q, k
        if mask.q_pos is not None:
            from_, at = pick_position(mask.q_pos, b, q), pick_position(mask.k_pos, b, k)
        if lo is not None:
            visible = visible & (at - lo >= from_)  # compared in the order that makes no dense matrix of integers
        if hi is not None:
            visible = visible & (at - hi <= from_)
        for first, last in pairs:
            outside = q < 0
            if first is not None:
                outside = outside | (q < pick(first, b, h, k))
            if last is not None:
                outside = outside | (q >= pick(last, b, h, k))
            visible = visible & outside
        if listed is not None:
            visible = visible & ~pick(listed, b, h, q - begin, k)
        return visible if keep is None else visible & (pick(keep, b, h, q // BLOCK, k // BLOCK) != 0)

    return is_visible


# --- Counts -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MaskStats:
    """Sums over all batch entries and heads of a mask; tiles are 128 x 128."""

    elements: int
    visible: int
    tiles: int
    full_tiles: int
    partial_tiles: int

    @property
    def empty_tiles(self):
        """Tiles in which nothing is visible: those that are skipped."""
        return self.tiles - self.full_tiles - self.partial_tiles

    @property
    def visible_share(self):
        """Visible elements / elements; 0 for an empty mask."""
        return self.visible / self.elements if self.elements else 0.0

    @property
    def live_share(self):
        """Tiles that are not empty / tiles; 0 for an empty mask."""
        return 1 - self.empty_tiles / self.tiles if self.tiles else 0.0


def statistics(mask):
    sums = capi.make(capi.Statistics)
    _call("fm_mask_statistics", mask_struct(mask := on_host(mask)), sums)
    return MaskStats(sums.elements, sums.visible, sums.tiles, sums.full_tiles, sums.partial_tiles)


def tile_count(mask):
    return mask.batch * mask.heads * _tiles(mask.seqlen_q, TILE) * _tiles(mask.seqlen_k, TILE)


def _tiles(length, side):
    return -(-length // side)


class Raster(NamedTuple):
    """One batch entry and head of a mask in cells, [row cells, key cells] each, in host memory.

    visible and elements are counts. whole and skipped say that the cell's 128 x 128 tile is full or empty, or all tiles
    of a larger cell are.
    """

    visible: torch.Tensor
    elements: torch.Tensor
    whole: torch.Tensor
    skipped: torch.Tensor


def raster(mask, batch, head, side):
    """A Raster in cells of side x side, a power of two."""
    mask = _one(mask, batch, head)
    visible, elements = _cells(mask, side)
    in_cell, cell = (visible, elements) if side >= TILE else _cells(mask, TILE)
    whole, skipped = in_cell == cell, in_cell == 0
    if side < TILE:
        whole, skipped = (
            x.repeat_interleave(TILE // side, 0).repeat_interleave(TILE // side, 1) for x in (whole, skipped)
        )
        whole, skipped = (x[: visible.shape[0], : visible.shape[1]] for x in (whole, skipped))
    return Raster(visible, elements, whole, skipped)


def sampled_cells(mask, batch, head, side, most):
    """(visible, elements) of cells of side x side, as in a Raster, of at most `most` key columns at equal distances.

    Each column is counted exactly. With a block mask there are fewer, the more rows it has; None if that were too few.
    """
    mask = _one(mask, batch, head)
    if mask.block_mask is not None:
        most = min(most, mask.seqlen_k, _SAMPLE // _tiles(mask.seqlen_q, min(side, TILE)))
        if most < 4 * _tiles(mask.seqlen_k, side):
            return None
    return _cells(mask, side, most)


def _one(mask, batch, head):
    """One batch entry and head of a mask, in host memory."""
    for name, at, count in (("batch", batch, mask.batch), ("head", head, mask.heads)):
        if not 0 <= at < count:
            raise IndexError(f"{name} is {at}; the mask has {count}")
    at = lambda x: (min(batch, x.shape[0] - 1), head * x.shape[1] // mask.heads)  # noqa: E731
    pick = lambda x: None if x is None else x[at(x)][None, None]  # noqa: E731
    own = lambda x: None if x is None else x[min(batch, x.shape[0] - 1)][None]  # noqa: E731
    mask = mask.replace(
        bounds=pick(mask.bounds),
        block_mask=pick(mask.block_mask),
        q_pos=own(mask.q_pos),
        k_pos=own(mask.k_pos),
        column_ptr=pick(mask.column_ptr),
    )
    return on_host(mask)


def seen_keys(mask):
    """bool [seqlen_k]: the keys that some row sees, in some batch entry and head. Of a mask in host memory."""
    seen = torch.zeros(mask.seqlen_k, dtype=torch.bool, device="cpu")
    if mask.seqlen_q and mask.seqlen_k:
        for batch in range(mask.batch):
            for head in range(mask.heads):
                seen |= _cells(mask, 1, batch=batch, head=head, row_step=mask.seqlen_q)[0][0] > 0
    return seen


def _cells(mask, side, most_keys=0, batch=0, head=0, row_step=None):
    """Visible and all elements of cells of side x side, or `row_step` rows, of a mask in host memory."""
    row_step = side if row_step is None else row_step
    shape = (_tiles(mask.seqlen_q, row_step), _tiles(mask.seqlen_k, side))
    counts = torch.empty((2, *shape), dtype=torch.int64, device="cpu")
    tensor_arguments.check_holds("the mask", counts)
    visible, elements = counts
    if visible.numel() == 0:  # an empty mask has no entries and heads of its own in C
        return visible, elements
    cells = capi.make(
        capi.Cells,
        batch=batch,
        head=head,
        row_step=row_step,
        key_step=side,
        most_keys=most_keys,
        visible=visible.data_ptr(),
        elements=elements.data_ptr(),
        count=visible.numel(),
    )
    _call("fm_mask_count_cells", mask_struct(mask), cells)
    return visible, elements


# --- FlashMask's indices and dense matrices ---------------------------------------------------------


def to_startend(mask):
    columns = mask.column_ptr if mask.bounds is None else mask.bounds
    shape = (1, 1, mask.seqlen_k) if columns is None else (*columns.shape[:2], mask.seqlen_k)
    out = Vectors(shape, mask.device)
    _call("fm_mask_to_startend", mask_struct(mask := on_host(mask)), out.struct)
    return out.bounds(), bool(out.struct.flags & capi.CAUSAL)


def from_dense(visible):
    """The arguments of the Mask of a bool or uint8 tensor [batch, heads, seqlen_q, seqlen_k]."""
    tensor_arguments.check_holds("visible", visible)
    out = Vectors((visible.shape[0], visible.shape[1], visible.shape[3]), visible.device)
    visible = visible.cpu()
    described = tensor(visible)
    out.write(lambda struct: capi.load().fm_mask_from_dense(C.byref(described), C.byref(struct)))
    return out.fields()


def _call(function, *structs):
    library = capi.load()
    capi.check(getattr(library, function)(*map(C.byref, structs)))


# --- FlexAttention ----------------------------------------------------------------------------------


def to_block_mask(mask, batch, heads):
    from torch.nn.attention.flex_attention import BlockMask

    for name, own, call in (("batch", mask.batch, batch), ("heads", mask.heads, heads)):
        if own > call or call % own or (name == "batch" and own not in (1, call)):
            raise ValueError(f"{name} is {call}; the mask has {own}")
    host_mask, masks = on_host(mask), [(b, h) for b in range(mask.batch) for h in range(mask.heads)]
    counts = torch.stack([_cells(host_mask, TILE, batch=b, head=h)[0] for b, h in masks])
    counts = counts.to(mask.device).unflatten(0, (mask.batch, mask.heads))
    full = counts == TILE * TILE  # a tile that the sequence's end cuts is partial to FlexAttention
    counts, full = (x.repeat_interleave(heads // mask.heads, 1).expand(batch, -1, -1, -1) for x in (counts, full))
    partial = (counts > 0) & ~full
    return BlockMask.from_kv_blocks(
        *_ordered_blocks(partial),
        *_ordered_blocks(full),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=predicate(mask, heads),
        seq_lengths=(mask.seqlen_q, mask.seqlen_k),
    )


def _ordered_blocks(blocks):
    """How many blocks each row has, and their indices first."""
    return blocks.sum(-1, dtype=torch.int32), blocks.int().argsort(dim=-1, descending=True, stable=True).int()
