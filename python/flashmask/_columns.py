# SPDX-License-Identifier: Apache-2.0
"""Masks column by column: dense rows, counts per tile, and the conversions from and to runs of hidden rows."""

import dataclasses
import math
from typing import NamedTuple

import torch

from .errors import UnrepresentableMaskError

TILE = 128
_CHUNK = 1 << 22  # elements of the largest temporary
_SAMPLE = 1 << 19  # and of the largest one of a sample


def diagonals(mask):
    """(lo, hi): row i sees key j only if lo <= j - i <= hi; None is unbounded."""
    offset = mask.seqlen_k - mask.seqlen_q if mask.q_offset is None else mask.q_offset
    left, right = mask.window or (-1, -1)
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


def _per_head(x, heads):
    """A mask's tensor [batch, heads or fewer, ...] with an entry for each of the mask's heads, or with 1 for all."""
    return x if x is None or x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], 1)


def visible_rows(mask, begin, end):
    """Rows [begin, end) as a bool tensor [batch, heads, end - begin, seqlen_k]."""
    rows = torch.arange(begin, end, device=mask.device)[:, None]
    keys = torch.arange(mask.seqlen_k, device=mask.device)
    lo, hi = diagonals(mask)
    visible = torch.ones((mask.batch, mask.heads, end - begin, mask.seqlen_k), dtype=torch.bool, device=mask.device)
    if lo is not None:
        visible = visible & (keys - lo >= rows)  # compared in the order that makes no dense matrix of integers
    if hi is not None:
        visible = visible & (keys - hi <= rows)
    for first, last in intervals(mask):
        outside = torch.zeros((), dtype=torch.bool, device=mask.device)
        if first is not None:
            outside = outside | (rows < _per_head(first, mask.heads)[..., None, :])
        if last is not None:
            outside = outside | (rows >= _per_head(last, mask.heads)[..., None, :])
        visible = visible & outside
    if mask.block_mask is not None:
        visible = visible & _per_head(mask.block_mask, mask.heads)[:, :, rows // TILE, keys // TILE].bool()
    return visible


# --- Counts per tile --------------------------------------------------------------------------------


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
    sums = torch.zeros(3, dtype=torch.int64, device=mask.device)
    for first, last in _key_chunks(mask, TILE, TILE):
        visible = _tile_counts(mask, TILE, TILE, first, last)
        full = visible == _areas(mask, TILE, TILE, first, last)
        sums += torch.stack([visible.sum(), full.sum(), (visible > 0).sum()])
    visible, full, live = sums.tolist()
    masks = mask.batch * mask.heads
    return MaskStats(masks * mask.seqlen_q * mask.seqlen_k, visible, tile_count(mask), full, live - full)


def tile_count(mask):
    return mask.batch * mask.heads * _tiles(mask.seqlen_q, TILE) * _tiles(mask.seqlen_k, TILE)


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
    # A block mask is known by tiles: larger cells are put together from them.
    visible, elements = _pooled(mask, side if mask.block_mask is None else min(side, TILE), side)
    whole, skipped = visible == elements, visible == 0
    if side < TILE:
        in_tile, tile = _pooled(mask, TILE, TILE)
        whole, skipped = (
            x.repeat_interleave(TILE // side, 0).repeat_interleave(TILE // side, 1)[
                : visible.shape[0], : visible.shape[1]
            ]
            for x in (in_tile == tile, in_tile == 0)
        )
    return Raster(*(x.cpu() for x in (visible, elements, whole, skipped)))


def _pooled(mask, fine, side):
    """Visible and all elements of cells of side x side, added up from tiles of fine x fine.

    The mask has one batch entry and head.
    """
    elements = _areas(mask, side, side, 0, _tiles(mask.seqlen_k, side))
    visible = torch.zeros_like(elements)
    for first, last in _key_chunks(mask, fine, fine):
        counts = _tile_counts(mask, fine, fine, first, last)[0, 0]
        at_row = torch.arange(counts.shape[0], device=mask.device) * fine // side
        at_key = torch.arange(first, last, device=mask.device) * fine // side
        visible.index_put_((at_row[:, None], at_key[None, :]), counts.long(), accumulate=True)
    return visible, elements


def sampled_cells(mask, batch, head, side, most):
    """(visible, elements) of cells of side x side, as in a Raster, of at most `most` key columns at equal distances.

    Each column is counted exactly. With a block mask there are fewer, the more rows it has; None if that were too few.
    """
    mask = _one(mask, batch, head)
    count = min(most, mask.seqlen_k)
    if mask.block_mask is not None:
        count = min(count, _SAMPLE // _tiles(mask.seqlen_q, min(side, TILE)))
        if count < 4 * _tiles(mask.seqlen_k, side):
            return None
    # In the middle of as many parts.
    columns = (2 * torch.arange(count, device=mask.device) + 1) * mask.seqlen_k // (2 * count)
    columns[-1] = mask.seqlen_k - 1  # so that the last cell, which may be narrow, has one
    cell, cells = columns // side, _tiles(mask.seqlen_k, side)
    rows = side if mask.block_mask is None else min(side, TILE)
    row_sizes = _sizes(mask.seqlen_q, rows, 0, _tiles(mask.seqlen_q, rows), mask.device)
    if mask.block_mask is None:
        elements = row_sizes[:, None] * torch.bincount(cell, minlength=cells)
        visible = elements - _hidden_counts(mask, rows, columns, cell, cells)[0, 0]
    else:
        each = torch.arange(count, device=mask.device)
        own = row_sizes[:, None] - _hidden_counts(mask, rows, columns, each, count)
        own = (own * _kept(mask, rows, len(row_sizes), columns // TILE))[0, 0]
        at = torch.arange(len(row_sizes), device=mask.device)[:, None] * rows // side, cell[None, :]
        visible, elements = (
            own.new_zeros(_tiles(mask.seqlen_q, side), cells).index_put_(at, x, accumulate=True)
            for x in (own, row_sizes[:, None].expand_as(own))
        )
    return visible.cpu(), elements.cpu()


def _one(mask, batch, head):
    """One batch entry and head of a mask."""
    for name, at, count in (("batch", batch, mask.batch), ("head", head, mask.heads)):
        if not 0 <= at < count:
            raise IndexError(f"{name} is {at}; the mask has {count}")
    at = lambda x: (min(batch, x.shape[0] - 1), head * x.shape[1] // mask.heads)  # noqa: E731
    pick = lambda x: None if x is None else x[at(x)][None, None]  # noqa: E731
    return mask.replace(bounds=pick(mask.bounds), block_mask=pick(mask.block_mask))


def _tiles(length, side):
    return -(-length // side)


def _sizes(length, side, first, last, device):
    begin = torch.arange(first, last, device=device) * side
    return (length - begin).clamp(max=side)


def _areas(mask, rows, keys, first, last):
    """Elements of each tile, [row tiles, key tiles first to last]."""
    row_sizes = _sizes(mask.seqlen_q, rows, 0, _tiles(mask.seqlen_q, rows), mask.device)
    return row_sizes[:, None] * _sizes(mask.seqlen_k, keys, first, last, mask.device)


def _key_chunks(mask, rows, keys):
    """Ranges of key tiles that bound the size of temporaries."""
    count = _tiles(mask.seqlen_k, keys)
    column_cost = mask.batch * mask.heads * max(_tiles(mask.seqlen_q, rows), 4 * keys)
    step = max(1, _CHUNK // column_cost)
    return [(first, min(first + step, count)) for first in range(0, count, step)] if mask.seqlen_q else []


def _tile_counts(mask, rows, keys, first, last):
    """Visible elements of each tile, [batch, heads, row tiles, key tiles first to last].

    With a block mask, rows and keys divide 128.
    """
    columns = torch.arange(first * keys, min(last * keys, mask.seqlen_k), device=mask.device)
    hidden = _hidden_counts(mask, rows, columns, columns // keys - first, last - first)
    visible = _areas(mask, rows, keys, first, last) - hidden
    if mask.block_mask is not None:
        at_key = torch.arange(first, last, device=mask.device) * keys // TILE
        visible = visible * _kept(mask, rows, visible.shape[2], at_key)
    return visible


def _kept(mask, rows, row_tiles, at_key):
    """What the block mask keeps of tiles of `rows` rows, which divide 128, [batch, heads, row tiles, len(at_key)]."""
    at_row = torch.arange(row_tiles, device=mask.device) * rows // TILE
    return _per_head(mask.block_mask[:, :, at_row[:, None], at_key], mask.heads).bool()


def _hidden_counts(mask, rows, columns, cell, cells):
    """Elements that the band and the vectors hide of `columns`, [batch, heads, row tiles, cells].

    columns[n] counts in cell[n]. A run of hidden rows takes from each tile after the one it begins in `rows` elements
    per column, and from that one less what lies before it; beyond its end that is taken back. So a histogram of the
    runs' ends and a running sum over the tiles count them in linear time.
    """
    begin, end = disjoint(*_hidden_intervals(mask, columns))
    batch, heads = begin.shape[:2]
    shape = (batch, heads, _tiles(mask.seqlen_q, rows) + 1, cells)
    dtype = torch.int32 if rows * len(columns) <= 1 << 28 else torch.int64
    runs, before = (torch.zeros(math.prod(shape), dtype=dtype, device=mask.device) for _ in range(2))
    masks = torch.arange(batch * heads, device=mask.device).view(batch, heads, 1, 1)
    for edge, sign in ((begin, 1), (end, -1)):
        at = ((masks * shape[2] + edge // rows) * shape[3] + cell[:, None]).flatten()
        runs.index_add_(0, at, torch.full_like(at, sign, dtype=dtype))
        before.index_add_(0, at, (sign * (edge % rows)).to(dtype).flatten())
    return (rows * runs.view(shape).cumsum(2, dtype=dtype) - before.view(shape))[:, :, :-1]


def _hidden_intervals(mask, columns):
    """What the band and the vectors hide of these columns, clamped to the rows.

    Returns (begin, end), int64 [batch, heads, len(columns), n].
    """
    lo, hi = diagonals(mask)
    rows = mask.seqlen_q
    own = lambda x: x if x is None else _per_head(x[..., columns], mask.heads).long()  # noqa: E731
    pairs = [(own(b), own(e)) for b, e in intervals(mask)]
    if hi is not None:
        pairs.append((None, columns - hi))
    if lo is not None:
        pairs.append((columns + 1 - lo, None))
    shape = (mask.batch, mask.heads, len(columns))
    begin, end = (torch.full((*shape, len(pairs) + 1), 0, dtype=torch.int64, device=mask.device) for _ in range(2))
    for n, (b, e) in enumerate(pairs):
        begin[..., n] = 0 if b is None else b.clamp(0, rows)
        end[..., n] = rows if e is None else e.clamp(0, rows)
    return begin, torch.maximum(begin, end)


def disjoint(begin, end):
    """The same rows as intervals [..., n] that ascend and do not overlap; some are empty."""
    begin, order = begin.sort(-1)
    end = end.gather(-1, order)
    reached = torch.cat([begin[..., :1], end.cummax(-1).values[..., :-1]], -1)
    begin = torch.maximum(begin, reached)
    return begin, torch.maximum(begin, end)


# --- Runs of hidden rows ----------------------------------------------------------------------------


class Runs:
    """For each column the runs of rows it is hidden from, ascending, with gaps between them, any number of them.

    column, begin, end: int64 [runs], sorted; column counts over batch, heads and keys.
    """

    def __init__(self, column, begin, end, shape):
        self.column, self.begin, self.end = column, begin, end
        self.batch, self.heads, self.rows, self.keys = shape
        self.columns = self.batch * self.heads * self.keys
        self.device = column.device

    @staticmethod
    def of_mask(mask):
        begin, end = disjoint(*_hidden_intervals(mask, torch.arange(mask.seqlen_k, device=mask.device)))
        begin, end = begin.flatten(0, 2), end.flatten(0, 2)
        column, which = (begin < end).nonzero(as_tuple=True)
        begin, end = begin[column, which], end[column, which]
        # Runs that touch are one.
        joins = (column[1:] == column[:-1]) & (begin[1:] == end[:-1])
        first, last = torch.ones_like(column, dtype=torch.bool), torch.ones_like(column, dtype=torch.bool)
        first[1:], last[:-1] = ~joins, ~joins
        return Runs(column[first], begin[first], end[last], (mask.batch, mask.heads, mask.seqlen_q, mask.seqlen_k))

    @staticmethod
    def of_dense(visible):
        batch, heads, rows, keys = visible.shape
        hidden = torch.nn.functional.pad(~visible.transpose(2, 3).reshape(batch * heads * keys, rows), (1, 1))
        column, begin = (hidden[:, 1:] & ~hidden[:, :-1]).nonzero(as_tuple=True)
        _, end = (hidden[:, :-1] & ~hidden[:, 1:]).nonzero(as_tuple=True)
        return Runs(column, begin, end, (batch, heads, rows, keys))

    def _inside(self, band):
        """(begin, end) of the rows that a band on j - i leaves of each column, [columns]."""
        lo, hi = band
        keys = torch.arange(self.keys, device=self.device).repeat(self.batch * self.heads)
        begin = torch.zeros_like(keys) if hi is None else (keys - hi).clamp(0, self.rows)
        end = torch.full_like(keys, self.rows) if lo is None else (keys + 1 - lo).clamp(0, self.rows)
        return begin, end

    def beside(self, band):
        """The runs that a band does not hide already, and how many each column has, [columns].

        A run that reaches out of the band at its end is kept up to its end, so that [LTS, seqlen_q) stays that.
        """
        inside_begin, inside_end = self._inside(band)
        begin = torch.maximum(self.begin, inside_begin[self.column])
        keep = begin < torch.minimum(self.end, inside_end[self.column])
        runs = Runs(self.column[keep], begin[keep], self.end[keep], (self.batch, self.heads, self.rows, self.keys))
        return runs, torch.bincount(runs.column, minlength=self.columns)

    def _visible_ends(self):
        """First visible row of each column and the one after the last."""
        first = torch.zeros(self.columns, dtype=torch.int64, device=self.device)
        last = torch.full_like(first, self.rows)
        top, bottom = self.begin == 0, self.end == self.rows
        first[self.column[top]] = self.end[top]
        last[self.column[bottom]] = self.begin[bottom]
        return first, last

    def hides_all_outside(self, band):
        begin, end = self._inside(band)
        first, last = self._visible_ends()
        hidden = first >= self.rows  # all of the column
        return bool((hidden | ((first >= begin) & (last <= end))).all())

    def tightest_bands(self):
        """The tightest bands that hide nothing visible: none, upper edge, lower edge, both."""
        first, last = self._visible_ends()
        keys = torch.arange(self.keys, device=self.device).repeat(self.batch * self.heads)
        seen = first < last
        if not bool(seen.any()):
            return [(None, None)]
        lo, hi = int((keys - last + 1)[seen].min()), int((keys - first)[seen].max())
        return [(None, None), (None, hi), (lo, None), (lo, hi)]

    def vectors(self, one_pair):
        """LTS, LTE, UTS, UTE, int32 [batch, heads, keys] each, of at most two runs per column.

        A column's only run goes into (UTS, UTE) if it begins at row 0 and ends before the last row, unless one_pair.
        """
        lts, lte = (torch.full((self.columns,), self.rows, dtype=torch.int64, device=self.device) for _ in range(2))
        uts, ute = (torch.zeros(self.columns, dtype=torch.int64, device=self.device) for _ in range(2))
        follows = torch.zeros_like(self.column, dtype=torch.bool)
        follows[1:] = self.column[1:] == self.column[:-1]
        followed = torch.zeros_like(follows)
        followed[:-1] = follows[1:]
        lower = follows if not one_pair else torch.ones_like(follows)
        lower = lower | (~followed & ((self.begin > 0) | (self.end == self.rows)))
        upper = ~lower
        lts[self.column[lower]], lte[self.column[lower]] = self.begin[lower], self.end[lower]
        uts[self.column[upper]], ute[self.column[upper]] = self.begin[upper], self.end[upper]
        return [x.view(self.batch, self.heads, self.keys).int() for x in (lts, lte, uts, ute)]

    def fitting(self, bands, what):
        """(band, runs beside it, most runs per column): the first of `bands` that leaves the fewest runs.

        Raises UnrepresentableMaskError, saying that `what` does not fit, if that is more than two.
        """
        best = None
        for band in bands:
            runs, need = self.beside(band)
            most = int(need.max()) if self.columns else 0
            if best is None or most < best[2]:
                best = (band, runs, most, need)
        if best[2] > 2:
            at = int((best[3] > 2).int().argmax())
            column, mask = at % self.keys, at // self.keys
            raise UnrepresentableMaskError(
                f"{what} does not fit two row intervals per key column: (batch {mask // self.heads}, head "
                f"{mask % self.heads}, column {column}) needs {int(best[3][at])}",
                column,
            )
        return best[:3]


def to_startend(mask):
    runs = Runs.of_mask(mask)
    causal = (None, mask.seqlen_k - mask.seqlen_q)  # what `causal` means in FlashMask's call
    if runs.hides_all_outside(causal):
        beside, need = runs.beside(causal)
        if not bool((need > 1).any()):
            return _causal_vectors(beside), True
    _, beside, _ = runs.fitting([(None, None)], "the mask without a band")
    return _plain_vectors(beside), False


def _causal_vectors(runs):
    """At most one run per column as LTS or LTS, LTE."""
    lts, lte, _, _ = runs.vectors(one_pair=True)
    return torch.stack([lts] if bool((lte == runs.rows).all()) else [lts, lte], -1)


def _plain_vectors(runs):
    """At most two runs per column as LTS, UTE or all four."""
    lts, lte, uts, ute = runs.vectors(one_pair=False)
    simple = bool((lte == runs.rows).all() & (uts == 0).all())
    return torch.stack([lts, ute] if simple else [lts, lte, uts, ute], -1)


def from_dense(visible):
    """The arguments of the Mask of a bool tensor [batch, heads, seqlen_q, seqlen_k]."""
    runs = Runs.of_dense(visible)
    (lo, hi), beside, most = runs.fitting(runs.tightest_bands(), "the dense mask")
    fields = {"seqlen_q": runs.rows, "seqlen_k": runs.keys, "bounds": None}
    offset = hi if hi is not None else lo  # the row's own position is put on the band's edge, wherever that is
    if offset is not None and offset != runs.keys - runs.rows:
        fields["q_offset"] = offset
    if hi is not None and most <= 1:
        fields["causal"] = True
        fields["window"] = None if lo is None else (hi - lo, 0)
    elif offset is not None:
        fields["window"] = (0, -1) if hi is None else (-1, 0) if lo is None else (hi - lo, 0)
    if most > 0:
        fields["bounds"] = _causal_vectors(beside) if fields.get("causal") else _plain_vectors(beside)
    return fields


# --- FlexAttention ----------------------------------------------------------------------------------


def to_block_mask(mask, batch, heads):
    from torch.nn.attention.flex_attention import BlockMask

    for name, own, call in (("batch", mask.batch, batch), ("heads", mask.heads, heads)):
        if own > call or call % own or (name == "batch" and own not in (1, call)):
            raise ValueError(f"{name} is {call}; the mask has {own}")
    counts = _tile_counts(mask, TILE, TILE, 0, _tiles(mask.seqlen_k, TILE))
    full = counts == TILE * TILE  # a tile that the sequence's end cuts is partial to FlexAttention
    counts, full = (x.repeat_interleave(heads // mask.heads, 1).expand(batch, -1, -1, -1) for x in (counts, full))
    partial = (counts > 0) & ~full
    return BlockMask.from_kv_blocks(
        *_ordered_blocks(partial),
        *_ordered_blocks(full),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=_mask_mod(mask, heads),
        seq_lengths=(mask.seqlen_q, mask.seqlen_k),
    )


def _ordered_blocks(blocks):
    """How many blocks each row has, and their indices first."""
    return blocks.sum(-1, dtype=torch.int32), blocks.int().argsort(dim=-1, descending=True, stable=True).int()


def _mask_mod(mask, heads):
    """The predicate of a mask as FlexAttention calls it."""
    lo, hi = diagonals(mask)
    pairs = intervals(mask)
    keep = mask.block_mask

    def pick(x, b, h, *at):
        # FlexAttention broadcasts a batch or heads of 1 to those of the call, which b and h then are.
        return x[(b if x.shape[0] > 1 else b * 0, h // (heads // x.shape[1]) if x.shape[1] > 1 else h * 0, *at)]

    def mask_mod(b, h, q, k):
        visible = q >= 0
        if lo is not None:
            visible = visible & (k - q >= lo)
        if hi is not None:
            visible = visible & (k - q <= hi)
        for first, last in pairs:
            outside = q < 0
            if first is not None:
                outside = outside | (q < pick(first, b, h, k))
            if last is not None:
                outside = outside | (q >= pick(last, b, h, k))
            visible = visible & outside
        return visible if keep is None else visible & (pick(keep, b, h, q // TILE, k // TILE) != 0)

    return mask_mod
