# SPDX-License-Identifier: Apache-2.0
"""A SequenceMask of the requests of a Forest: which runs of a request's rows see a key."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .._core import arguments
from .._core.errors import UnsupportedError
from . import row_runs, tensor_arguments
from .draft_trees import MOST_DRAFTS
from .kv_cache import FOR_GOOD, SequenceMask
from .row_runs import PlacedRows, Runs

_BLOCK_SIZE = 128  # rows and keys of an element of block_mask


@dataclasses.dataclass(frozen=True)
class Requests:
    """Numbers of a batch's requests, int64, in some order."""

    number: torch.Tensor  # [batch], in the batch itself
    table: torch.Tensor  # [batch, max_pages]
    keys: torch.Tensor  # [batch]; 0 without rows
    rows: torch.Tensor  # [batch], of the call
    first_rows: torch.Tensor  # [batch], the row of its sequence that a request's first row is
    tail_begins: torch.Tensor  # [batch], the first key and row of the tail; `keys` without a tail

    def reordered(self, order: torch.Tensor) -> Requests:
        return Requests(*(getattr(self, field.name)[order] for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Listing:
    """Pages that a forest may list for each request: one for each run of rows that a key of it may need."""

    columns: torch.Tensor  # [batch, pages], of the table
    runs: Runs  # [batch, pages, page_size, heads]
    alike: torch.Tensor  # [batch - 1, columns]: all rows of a request and of the one before see a key, or none does

    def is_seen(self) -> torch.Tensor:
        """[batch, pages]: a row sees a key."""
        return ~self.runs.is_empty().flatten(2).all(2)

    def skipped(self, source: torch.Tensor, rows: torch.Tensor, all_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows before and after the runs of some pages, numbered over all requests, of requests with so many rows:
        [pages, page_size, heads]. An empty run has all_rows before it."""
        begin, end = (x.flatten(0, 1)[source] for x in (self.runs.begin, self.runs.end))
        is_empty = end <= begin
        before, after = begin.masked_fill(is_empty, all_rows), (rows[:, None, None] - end).masked_fill(is_empty, 0)
        return before.to(torch.int32), after.to(torch.int32)


class ForestMask:
    """A SequenceMask as a forest needs it: shapes once, contents in each update.

    A forest hides a key from all rows but one run. So it lists a page as often as a key of it has runs of a request's
    rows that see it, and requests share a page only where every key is seen by all of their rows, or by none.

    rows: the most that a request has.
    """

    def __init__(self, mask: SequenceMask, page_table: torch.Tensor, page_size: int, rows: int):
        self.mask, self._page_size, self._max_keys = mask, page_size, page_table.shape[1] * page_size
        tensor_arguments.check_one_device(page_table=page_table, **mask.tensors())
        _check_tensors(mask, page_table.shape[0], page_size)
        _refuse_combinations(mask)
        self.heads = _heads_of(mask)
        self._row_blocks = _row_blocks_of(mask, rows)
        self.runs = (self._row_blocks + 1) // 2 + (_vectors_between_rows(mask) if rows > 1 else 0)
        drafts = 0 if mask.tail is None else mask.tail.shape[1]
        self._has_tail = drafts > 0
        self._tail_pages = (drafts + page_size - 2) // page_size + 1 if drafts else 0
        self._tail_runs = max(min(self.runs + (drafts + 1) // 2, (rows + 1) // 2), 1)

    @property
    def has_upper_edge_in_runs(self) -> bool:
        """False where the band's upper edge is said by positions, or there is none."""
        return is_causal(self.mask) and self.mask.q_pos is None

    @property
    def has_runs(self) -> bool:
        """False where rows see all keys up to the band's upper edge."""
        return self._has_tail or self._has_intervals

    @property
    def _has_intervals(self) -> bool:
        return self.mask.bounds is not None or self.mask.block_mask is not None

    @property
    def has_key_positions(self) -> bool:
        """True if positions of keys are others than their indices."""
        return self.mask.k_pos is not None or self._has_depth

    @property
    def _tail(self) -> torch.Tensor:
        assert self.mask.tail is not None
        return self.mask.tail

    @property
    def _has_depth(self) -> bool:
        return self._has_tail and self.mask.tail_depth is not None

    @property
    def keeps_places(self) -> bool:
        """True if a row sees its keys in ascending order, as bits that are the plain call's need."""
        return self.runs == 1 and not self._has_tail

    def most_listed(self, columns: int) -> int:
        """The most pages that are listed for a request of so many columns."""
        return self.runs * columns + self._tail_runs * self._tail_pages

    # --- Contents -----------------------------------------------------------------------------------------

    def tail_begins(self, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The first key and row of each request's tail; `keys` without a tail."""
        if not self._has_tail:
            return keys
        lengths = rows if self.mask.tail_lens is None else self.mask.tail_lens.long()
        return keys - torch.minimum(lengths.clamp(0, self._tail.shape[1]), keys)

    def row_places(self, requests: Requests, request: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Places of rows among their requests': drafts of a tree lie so that those that see a key are neighbours.
        Intervals of rows need these in their own order."""
        if not self._has_tail or self._has_intervals:
            return index
        draft = torch.arange(self._tail.shape[1], device=index.device)
        is_key = draft < (requests.keys - requests.tail_begins)[:, None]
        is_row = is_key & (draft >= (requests.first_rows - requests.tail_begins)[:, None])
        bits = self._tail_bits()[requests.number]
        places = row_runs.nested_places(bits & is_row[:, :, None] & is_key[:, None], is_row)
        before = (requests.tail_begins - requests.first_rows)[request]  # rows; below 0: drafts before the call's
        place = before.clamp(min=0) + places[request, (index - before).clamp(0, len(draft) - 1)]
        return torch.where(index >= before, place, index)

    def row_positions(self, requests: Requests, request: torch.Tensor, sequence_row: torch.Tensor) -> torch.Tensor:
        """Positions of rows in their sequences, or those that the mask gives."""
        if self.mask.q_pos is not None:
            return self.mask.q_pos.flatten()
        if self._has_depth:
            return self._with_depth(sequence_row[:, None], requests, request)[:, 0]
        return sequence_row

    def key_positions(self, requests: Requests) -> torch.Tensor:
        """Positions of keys, [batch, keys], where they are others than indices."""
        index = torch.arange(self._max_keys, device=requests.keys.device).expand(len(requests.keys), -1)
        if self.mask.k_pos is None:
            return self._with_depth(index, requests, torch.arange(len(index), device=index.device))
        if self.mask.key_layout == "pages":
            positions, is_there = self._beside_pages(self.mask.k_pos, requests)
            return torch.where(is_there, positions, index)
        given = _for_requests(self.mask.k_pos, requests)[:, : self._max_keys]
        return torch.cat((given, index[:, given.shape[1] :]), 1)

    def listing(self, requests: Requests, rows: PlacedRows) -> Listing:
        """Pages and runs; where has_runs."""
        begin, end = self._hidden(requests)
        runs = self._runs_before_tail(begin, end, requests)
        column = torch.arange(requests.table.shape[1], device=begin.device)
        columns, by_page = column.repeat(self.runs).expand(len(begin), -1), [_by_page(runs, self._page_size)]
        if self._has_tail:
            tail_column = requests.tail_begins[:, None] // self._page_size + torch.arange(
                self._tail_pages, device=begin.device
            )
            columns = torch.cat((columns, tail_column.repeat(1, self._tail_runs)), 1)
            tail_runs = self._tail_runs_of(begin, end, tail_column, requests, rows.in_order())
            by_page.append(_by_page(tail_runs, self._page_size))
        listed = (torch.cat(x, 1) for x in zip(*((x.begin, x.end) for x in by_page)))
        return Listing(columns, Runs(*listed), self._alike(runs, requests))

    def alike_positions(self, requests: Requests) -> torch.Tensor:
        """True where the keys of a page have the positions that they have in the request before."""
        positions = self.key_positions(requests)
        return _all_in_pages(positions[1:] == positions[:-1], self._page_size)

    def _alike(self, runs: Runs, requests: Requests) -> torch.Tensor:
        rows = requests.rows[:, None, None]
        is_none = runs.is_empty()[..., 0]
        is_all = (runs.begin[..., 0] <= 0) & (runs.end[..., 0] >= rows) & ~is_none
        return _all_in_pages((is_all[1:] & is_all[:-1]) | (is_none[1:] & is_none[:-1]), self._page_size)

    def _runs_before_tail(self, begin: torch.Tensor, end: torch.Tensor, requests: Requests) -> Runs:
        """The runs for keys of pages before those of the tail."""
        first, keys, tail = (
            x.to(torch.int32)[:, None] for x in (requests.first_rows, requests.keys, requests.tail_begins)
        )
        key = torch.arange(begin.shape[1], dtype=torch.int32, device=begin.device)
        is_key = key < (tail // self._page_size * self._page_size if self._has_tail else keys)
        first_row = first.clamp(min=0).expand(-1, len(key))
        first_row = torch.maximum(first_row, key) if self.has_upper_edge_in_runs else first_row
        last_row = torch.where(is_key, keys, first_row)
        first_row, last_row = (x[:, :, None, None].expand(*begin.shape[:3], 1) for x in (first_row, last_row))
        return row_runs.complement(begin, end, first_row, last_row, self.runs).shifted(first[..., None, None])

    def _tail_runs_of(
        self, begin: torch.Tensor, end: torch.Tensor, columns: torch.Tensor, requests: Requests, rows: PlacedRows
    ) -> Runs:
        """The runs for keys of the tail's pages, which are these columns: by looking at each row and key."""
        in_page = torch.arange(self._page_size, device=columns.device)
        key = (columns[:, :, None] * self._page_size + in_page).flatten(1)
        at = torch.arange(len(key), device=key.device)[:, None], key.clamp(max=self._max_keys - 1)
        request, row = rows.request, rows.sequence_row[:, None]
        key = key[request]
        begin, end = begin[at][request], end[at][request]
        visible = self._in_tail_band(row, key, requests, request) & (key < requests.keys[request, None]) & (row >= 0)
        row = row[..., None, None]
        hidden = ((begin <= row) & (row < end)).any(-1)
        return row_runs.of_visible(visible[:, :, None] & ~hidden, rows, self._tail_runs)

    def _in_tail_band(
        self, row: torch.Tensor, key: torch.Tensor, requests: Requests, request: torch.Tensor
    ) -> torch.Tensor:
        """True where the tail's bits, or before it the band's upper edge, let rows see keys, [rows, keys]."""
        draft, draft_key = (x - requests.tail_begins[request, None] for x in (row, key))
        bits, last = self._tail_bits(), self._tail.shape[1] - 1
        bit = bits[requests.number[request, None], draft.clamp(0, last), draft_key.clamp(0, last)]
        before = row >= key if is_causal(self.mask) else torch.ones_like(bit)
        return torch.where((draft >= 0) & (draft_key >= 0), bit, before)

    def _tail_bits(self) -> torch.Tensor:
        """[batch, T, T], row and key."""
        tail = self._tail
        bits = tail[..., None] >> torch.arange(32, dtype=torch.int32, device=tail.device) & 1
        return bits.flatten(2)[:, :, : tail.shape[1]] != 0

    def _with_depth(self, index: torch.Tensor, requests: Requests, request: torch.Tensor) -> torch.Tensor:
        """Positions of rows or keys with these indices, each of a request: [n, indices]."""
        begin = requests.tail_begins[request, None]
        assert self.mask.tail_depth is not None
        depth, draft = self.mask.tail_depth.long()[requests.number[request]], index - begin
        return torch.where(draft < 0, index, begin + depth.gather(1, draft.clamp(0, depth.shape[1] - 1)))

    # --- Intervals of hidden rows -------------------------------------------------------------------------

    def _hidden(self, requests: Requests) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin and end of the intervals of the sequence's rows that a key is hidden from: int32 [batch, keys, heads,
        n]."""
        shape = (len(requests.keys), self._max_keys, self.heads)
        nothing = torch.zeros(*shape, 0, dtype=torch.int32, device=requests.keys.device)
        found = [(nothing, nothing)]
        if self.mask.bounds is not None:
            found.append(self._hidden_by_vectors(self.mask.bounds, requests))
        if self.mask.block_mask is not None:
            found.append(self._hidden_by_blocks(self.mask.block_mask, requests))
        begin, end = (torch.cat([x.expand(*shape, x.shape[-1]) for x in of_all], -1) for of_all in zip(*found))
        return begin, end

    def _hidden_by_vectors(self, bounds: torch.Tensor, requests: Requests) -> tuple[torch.Tensor, torch.Tensor]:
        if self.mask.key_layout == "pages":
            vectors, is_there = self._beside_pages(bounds, requests)
            begin, end = _intervals(vectors, self.mask.causal)
            return begin, end * is_there[..., None, None]
        padding = (0, 0, 0, 0, 0, self._max_keys - bounds.shape[2])
        begin, end = _intervals(_for_requests(bounds, requests).transpose(1, 2), self.mask.causal)
        return torch.nn.functional.pad(begin, padding), torch.nn.functional.pad(end, padding)

    def _hidden_by_blocks(self, block_mask: torch.Tensor, requests: Requests) -> tuple[torch.Tensor, torch.Tensor]:
        """One interval for each block that rows of a request may be in."""
        blocks = _for_requests(block_mask, requests) != 0
        row_blocks, key_blocks = blocks.shape[2:]
        key_block = torch.arange(self._max_keys, device=blocks.device) // _BLOCK_SIZE
        row_block = torch.arange(self._row_blocks, device=blocks.device)
        row_block = row_block + requests.first_rows.clamp(min=0)[:, None] // _BLOCK_SIZE
        begin, end = ((row_block + n).to(torch.int32) * _BLOCK_SIZE for n in (0, 1))
        if row_blocks == 1:
            row_block, begin, end = torch.zeros_like(row_block), torch.zeros_like(begin), end.fill_(FOR_GOOD)
        rows = row_block.clamp(max=row_blocks - 1)[:, None, :, None].expand(-1, blocks.shape[1], -1, key_blocks)
        visible = blocks.gather(2, rows)[..., key_block.clamp(max=key_blocks - 1)]
        visible |= (row_block >= row_blocks)[:, None, :, None] | (key_block >= key_blocks)
        hidden = ~visible.permute(0, 3, 1, 2)
        return begin[:, None, None] * hidden, end[:, None, None] * hidden

    def _beside_pages(self, x: torch.Tensor, requests: Requests) -> tuple[torch.Tensor, torch.Tensor]:
        """x, which is [pages, page_size, ..], for each key, and whether the key's page is there: [batch, keys]."""
        is_there = (requests.table >= 0) & (requests.table < len(x))
        found = x[requests.table.clamp(0, len(x) - 1)].flatten(1, 2)
        return found, is_there.repeat_interleave(self._page_size, 1)


def is_causal(mask: SequenceMask) -> bool:
    """True if rows see no key behind their position."""
    return mask.causal or window_of(mask)[1] == 0


def window_of(mask: SequenceMask) -> tuple[int, int]:
    """(left, right), -1 where a side is open."""
    return arguments.window("window_size", mask.window_size) or (-1, -1)


def _for_requests(x: torch.Tensor, requests: Requests) -> torch.Tensor:
    """x, which is [1 or batch, ..], for each request."""
    return x.expand(len(requests.keys), *x.shape[1:]) if len(x) == 1 else x[requests.number]


def _intervals(vectors: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Begin and end of the hidden rows that vectors, [.., n], say: [.., 1 or 2]."""
    if vectors.shape[-1] == (2 if causal else 4):
        return vectors[..., ::2], vectors[..., 1::2]
    start = vectors[..., :1]
    for_good = torch.full_like(start, FOR_GOOD)
    if causal:
        return start, for_good
    return torch.cat((start, torch.zeros_like(start)), -1), torch.cat((for_good, vectors[..., 1:]), -1)


def _all_in_pages(per_key: torch.Tensor, page_size: int) -> torch.Tensor:
    """[n, pages] from [n, keys, ..]."""
    return per_key.unflatten(1, (-1, page_size)).flatten(2).all(2)


def _by_page(runs: Runs, page_size: int) -> Runs:
    """Runs of keys as [batch, runs x pages, page_size, heads]."""
    begin, end = (x.unflatten(1, (-1, page_size)).movedim(-1, 1).flatten(1, 2) for x in (runs.begin, runs.end))
    return Runs(begin, end)


# --- Checks -------------------------------------------------------------------------------------------


def _vectors_between_rows(mask: SequenceMask) -> int:
    """Intervals that may hide a key from rows between others that see it: those of vectors with both ends."""
    return 0 if mask.bounds is None else mask.bounds.shape[3] - (1 if mask.causal else 2)


def _row_blocks_of(mask: SequenceMask, rows: int) -> int:
    """The most blocks that so many rows are in and block_mask tells apart, with one for all rows past its last."""
    if mask.block_mask is None or mask.block_mask.shape[2] == 1:
        return 1
    return min(mask.block_mask.shape[2] + 1, (rows + _BLOCK_SIZE - 2) // _BLOCK_SIZE + 1)


def _heads_of(mask: SequenceMask) -> int:
    """Key heads that the mask tells apart."""
    of_bounds = 1 if mask.bounds is None else mask.bounds.shape[2 if mask.key_layout == "pages" else 1]
    of_blocks = 1 if mask.block_mask is None else mask.block_mask.shape[1]
    if of_bounds != of_blocks and 1 not in (of_bounds, of_blocks):
        raise ValueError(
            f"mask.bounds has {of_bounds} heads and mask.block_mask {of_blocks}; each must have 1 or heads_kv"
        )
    return max(of_bounds, of_blocks)


def _check_tensors(mask: SequenceMask, batch: int, page_size: int) -> None:
    in_pages = mask.key_layout == "pages"
    if mask.key_layout == "auto" and not mask.bounds is mask.k_pos is None:
        raise ValueError(
            "mask.key_layout is 'auto' beside bounds or k_pos; a forest has no cache to tell by, so it must be "
            "'sequences' or 'pages'"
        )
    vectors, drafts = (1, 2) if mask.causal else (2, 4), range(MOST_DRAFTS + 1)
    count = mask.tail.shape[1] if mask.tail is not None and mask.tail.ndim == 3 else -1
    of_batch, any_size, columns = (1, batch), range(1, 2**62), range(2**62)
    accepted: dict[str, tuple[Any, ...]] = {
        "bounds": (any_size, (page_size,), any_size, vectors) if in_pages else (of_batch, any_size, columns, vectors),
        "k_pos": (any_size, (page_size,)) if in_pages else (of_batch, columns),
        "tail": ((batch,), drafts, ((count + 31) // 32,)),
        "tail_lens": ((batch,),),
        "tail_depth": ((batch,), (count,)),
        "block_mask": (of_batch, any_size, any_size, any_size),
    }
    for name, x in mask.tensors().items():
        dtypes = (torch.bool, torch.uint8) if name == "block_mask" else (torch.int32,)
        if x.dtype not in dtypes:
            raise TypeError(f"mask.{name} is {x.dtype}; it must be {' or '.join(map(str, dtypes))}")
        sizes = accepted.get(name)  # q_pos has q's
        if sizes and (x.ndim != len(sizes) or any(n not in few for n, few in zip(x.shape, sizes))):
            raise ValueError(
                f"mask.{name} has shape {list(x.shape)}, which SequenceMask has not for {batch} requests, pages of "
                f"{page_size} keys and causal {mask.causal}"
            )


def refuse_right_side(mask: SequenceMask) -> None:
    """UnsupportedError for a tail under a window whose right side is neither open nor 0."""
    if mask.tail is not None and not is_causal(mask) and window_of(mask)[1] > 0:
        raise UnsupportedError(
            f"mask.window_size is {mask.window_size} beside mask.tail; a forest takes tails with causal or an open "
            "right side"
        )


def _refuse_combinations(mask: SequenceMask) -> None:
    has_tail = mask.tail is not None
    for name in ("tail_lens", "tail_depth"):
        if getattr(mask, name) is not None and not has_tail:
            raise ValueError(f"mask.{name} is given and mask.tail is not; it says something of a tail")
    if mask.k_pos is not None and mask.q_pos is None:
        raise ValueError("mask.k_pos is given and mask.q_pos is not; where keys have positions, rows have them, too")
    if has_tail and mask.q_pos is not None:
        raise UnsupportedError(
            "mask.tail is given beside mask.q_pos; a forest takes tail_depth for positions of drafts"
        )
    refuse_right_side(mask)
