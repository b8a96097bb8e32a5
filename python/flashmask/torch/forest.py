# SPDX-License-Identifier: Apache-2.0
"""Requests whose sequences begin alike, as one sequence: a prefix tree over distinct pages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from .._core import arguments
from .._core.errors import UnsupportedError
from . import tensor_arguments
from .cached_attention import SPLIT_SIZE, CachePlan, flashmask_with_kvcache
from .forest_masks import ForestMask, Listing, Requests, is_causal, refuse_right_side, window_of
from .kv_cache import KvCache, SequenceMask, check_kind, validate_call
from .row_runs import PlacedRows

_MOST_KEYS = 2**31 - 1
_NEVER = 2**31  # beyond every entry of a table
_FEW_ROWS = 32  # packed rows of a request up to which GPUs read what it does not share for its own rows alone


@dataclasses.dataclass(frozen=True)
class _Slots:
    """The pages of a forest's list, each [slots]."""

    source: torch.Tensor  # which it is of those that may be listed
    request: torch.Tensor
    page: torch.Tensor  # column of the request's table
    begin: torch.Tensor  # first row of the one sequence that may see its keys
    end: torch.Tensor  # past the last


class Forest:
    """The batch of a paged cache in which equal prefixes of page tables are read once, for all their requests.

    The requests become one sequence, whose keys are the distinct pages and whose rows are all rows, those of requests
    with a common prefix side by side. Bounds hide a key from the rows that do not see it; windows and ALiBi measure by
    positions in the requests' own sequences. A call over it is one call of the usual kernels, and its results equal the
    plain call's within rounding.

    Pages before all rows of their requests are shared, by their numbers in the table: equal keys in different pages are
    read twice. Where a mask has vectors or blocks, neighbours share a page in which each key is seen by all of their
    rows or by none of them; a page that no row sees is not read. Drafts of a tail are never shared. Slots past a
    request's end in its last page are read with a weight of 0: they must hold finite numbers.
    """

    @classmethod
    def from_page_table(
        cls,
        page_table: torch.Tensor,
        seqlens: torch.Tensor,
        page_size: int,
        *,
        rows: int = 1,
        cu_seqlens_q: torch.Tensor | None = None,
        batch_invariant: bool = False,
        split_size: int = SPLIT_SIZE,
        mask: SequenceMask | None = None,
    ) -> Forest:
        """The forest of a batch, built where the tensors are, without waiting for a device.

        page_table: int32 [batch, max_pages], of the KvCache that calls are given; borrowed, as the next two are.
        seqlens: int32 [batch], likewise: the keys of each request, its new tokens counted.
        page_size: keys of a page.
        rows: rows of each request in a call; with cu_seqlens_q, int32 [batch + 1], all rows of the packed q.
        batch_invariant, split_size: of the calls. Whole splits are shared, and the bits are the plain call's, but with
            kernels of mma.sync, whose bits depend on the number of rows.
        mask: of the calls; None: causal. Its tensors are borrowed, and update() reads them. Beside bounds or k_pos its
            key_layout has to be said.

        It takes 12 bytes for each key that the table has room for; with vectors or blocks by head, 4 and 8 for each
        head. A mask that may hide a key from a row between two that see it (vectors with ends, several blocks of rows)
        takes that for each run of rows that may see a key, and a tail adds a few pages for each request.

        Raises TypeError or ValueError if an argument is wrong, and UnsupportedError for a tail beside q_pos or beside a
        window with a right side, and with batch_invariant for tails and for masks that may need several runs.
        """
        for name, x, shape, more in (
            ("page_table", page_table, "[batch, max_pages]", 0),
            ("seqlens", seqlens, "[batch]", 0),
            ("cu_seqlens_q", cu_seqlens_q, "[batch + 1]", 1),
        ):
            if x is not None:
                _check_integers(name, x, shape, page_table.shape[0] + more)
        tensor_arguments.check_one_device(page_table=page_table, seqlens=seqlens, cu_seqlens_q=cu_seqlens_q)
        page_size, rows = arguments.integer("page_size", page_size, 1), arguments.integer("rows", rows, 0)
        split_size = arguments.integer("split_size", split_size, 1)
        mask = SequenceMask() if mask is None else mask
        check_kind("mask", mask, SequenceMask)
        if not arguments.flag("batch_invariant", batch_invariant):
            return cls(page_table, seqlens, page_size, rows, cu_seqlens_q, mask)
        if split_size % page_size:
            raise ValueError(f"split_size is {split_size}; with batch_invariant it must be whole pages of {page_size}")
        return cls(page_table, seqlens, page_size, rows, cu_seqlens_q, mask, split_size)

    def __init__(
        self,
        page_table: torch.Tensor,
        seqlens: torch.Tensor,
        page_size: int,
        rows: int,
        cu_seqlens_q: torch.Tensor | None,
        mask: SequenceMask,
        split_size: int | None = None,
    ):
        self._table, self._seqlens, self._cu_seqlens_q, self.page_size = page_table, seqlens, cu_seqlens_q, page_size
        self._mask = ForestMask(mask, page_table, page_size, rows)
        self._invariance: dict[str, Any] = {}
        if split_size is not None:
            self._invariance = {"batch_invariant": True, "split_size": split_size}
            _refuse_other_bits(self._mask)
        self._unit = (split_size or page_size) // page_size  # pages that are shared, and begin in the list, together
        batch, max_pages = page_table.shape
        self._shape = (batch, rows) if cu_seqlens_q is None else (rows,)  # of q's rows
        if mask.q_pos is not None and mask.q_pos.shape != self._shape:
            raise ValueError(
                f"mask.q_pos has shape {list(mask.q_pos.shape)}; the forest is for {list(self._shape)} rows"
            )
        self.rows = math.prod(self._shape)
        # Leaves room for a key that nothing sees for each row: a row is the sequence's n - rows + i, and none below 0.
        pages = batch * _rounded_up(self._mask.most_listed(max_pages), self._unit) + -(-self.rows // page_size)
        self.max_keys = pages * page_size
        if not 0 < batch * max_pages or self.max_keys > _MOST_KEYS:
            raise ValueError(
                f"page_table has shape {list(page_table.shape)}, which is room for {self.max_keys} keys, with one more "
                f"for each of {self.rows} rows; it must be from 1 to {_MOST_KEYS}"
            )
        new = page_table.new_empty
        self._places, self._order = (new(self.rows, dtype=torch.int64) for _ in range(2))
        self._q_pos, self._k_pos = new(1, self.rows), new(1, self.max_keys)
        self._bounds, self._pages, self._keys = new(1, self._mask.heads, self.max_keys, 2), new(1, pages), new(1)
        self.update()

    @property
    def bytes(self) -> int:
        """Memory of the forest on its device."""
        tensors = (self._places, self._order, self._q_pos, self._k_pos, self._bounds, self._pages, self._keys)
        return sum(x.numel() * x.element_size() for x in tensors)

    @property
    def order(self) -> torch.Tensor:
        """int64 [rows]: the batch's row that comes n-th in the forest's order, in which requests that share pages lie
        side by side. update() writes it."""
        return self._order

    @property
    def places(self) -> torch.Tensor:
        """int64 [rows]: where each row of the batch comes in the forest's order."""
        return self._places

    def update(self) -> None:
        """Reads the tables, lengths and the mask again: once a step, for all layers. It does not wait for a device, so
        a CUDA graph may hold it."""
        begins = self._row_begins()
        in_batch = self._requests(begins[1:] - begins[:-1])
        entries = self._entries(in_batch)
        order = _lexicographic_order(entries)
        entries, requests = entries[order], in_batch.reordered(order)
        rows = self._place_rows(begins, in_batch, requests)
        listing = self._mask.listing(requests, rows) if self._mask.has_runs else None
        shared = (entries[1:] == entries[:-1]).cumprod(1).bool()
        self._place_pages(requests, rows.begins, self._in_units(self._alike(shared, requests, listing)), listing)

    def plan(
        self, heads_q: int, heads_kv: int, head_dim: int, head_dim_v: int | None = None, float8: bool = False
    ) -> CachePlan:
        """A CachePlan for calls over the forest, one for all layers of one mask; see update_plan."""
        is_forest = self._has_few_rows(heads_q, heads_kv)
        return CachePlan(
            self._table.shape[0] if is_forest else 1,
            self.rows,
            self.max_keys,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v,
            max_total_keys=self.max_keys,
            device=self._table.device,
            float8=float8,
            forest=is_forest,
            **self._invariance,
        )

    def update_plan(
        self, plan: CachePlan, cache: KvCache, mask: SequenceMask | None = None, *, alibi: bool = False
    ) -> None:
        """Prepares the plan for calls with this mask and cache, after update(). alibi: calls have alibi_slopes."""
        check_kind("plan", plan, CachePlan)
        plan.update(self._as_one_mask(mask, alibi), self._as_one_cache(cache), rows=self.rows)

    def attention(
        self,
        q: torch.Tensor,
        cache: KvCache,
        mask: SequenceMask | None = None,
        plan: CachePlan | None = None,
        *,
        in_order: bool = False,
        return_softmax_lse: bool = False,
        validate: bool = False,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """flashmask_with_kvcache over the forest: out, or (out, lse).

        q: [batch, rows, heads_q, head_dim], or with cu_seqlens_q [rows, heads_q, head_dim]; rows of no request get 0.
        cache: with the forest's own page_table and seqlens.
        mask: the forest's, or one that has another window and is the same otherwise; None: the forest's.
        plan: from plan(), updated by update_plan; None: the call makes its own.
        in_order: the rows of q, and so those of the results, come in the forest's order, and are not gathered: where
            hidden states are put in `order` once a step, layers save two copies each.
        validate: as there, of the requests' own lengths and tables.
        options: the others of flashmask_with_kvcache; alibi_slopes are [heads_q].

        Raises as flashmask_with_kvcache does, ValueError if the mask is another, and UnsupportedError for the options
        out and lse and for slopes by batch entry.
        """
        _refuse_options(options)
        one_mask = self._as_one_mask(mask, options.get("alibi_slopes") is not None)
        as_they_are = slice(None), slice(None)
        order, places = as_they_are if arguments.flag("in_order", in_order) else (self.order, self.places)
        rows = self._rows_of(q)[order][None]  # index_select takes long with few rows
        one_cache = self._as_one_cache(cache)
        if arguments.flag("validate", validate):
            validate_call(cache, mask or self._mask.mask, q, self._cu_seqlens_q)
        if plan is None:
            plan = self._plan_of(q, cache)
            plan.update(one_mask, one_cache, rows=self.rows)
        result: Any = flashmask_with_kvcache(
            rows, one_cache, one_mask, plan, return_softmax_lse=return_softmax_lse, **options, **self._invariance
        )
        out, lse = result if return_softmax_lse else (result, None)
        out = out[0][places].view(*q.shape[:-1], out.shape[-1])
        if lse is None:
            return out
        lse = lse[0][:, places]
        return out, lse if q.ndim == 3 else lse.view(-1, *q.shape[:2]).transpose(0, 1).contiguous()

    def __repr__(self) -> str:
        return f"Forest({self._table.shape[0]} requests, {self.rows} rows, {self.bytes} bytes on {self._table.device})"

    # --- The call's arguments -----------------------------------------------------------------------------

    def _rows_of(self, q: torch.Tensor) -> torch.Tensor:
        """q as [rows, heads_q, head_dim]."""
        wanted = "[batch, rows, heads_q, head_dim]" if len(self._shape) == 2 else "[rows, heads_q, head_dim]"
        tensor_arguments.check_dense("q", q, wanted)
        arguments.check_dimensions("q", q.shape, wanted)
        if q.shape[:-2] != self._shape:
            raise ValueError(f"q has shape {list(q.shape)}; the forest is for {list(self._shape)} rows")
        return q.flatten(0, -3)

    def _as_one_mask(self, mask: SequenceMask | None, alibi: bool) -> SequenceMask:
        own = self._mask.mask
        mask = own if mask is None else mask
        check_kind("mask", mask, SequenceMask)
        _check_same(mask, own)
        left, right = window_of(mask)
        if is_causal(mask):
            right = -1 if self._mask.has_upper_edge_in_runs else 0
        if left < 0 and right < 0 and not alibi and own.q_pos is None:
            return SequenceMask(False, bounds=self._bounds, key_layout="sequences")
        positions = {"q_pos": self._q_pos, "k_pos": self._k_pos}
        return SequenceMask(False, (left, right), self._bounds, **positions, key_layout="sequences")

    def _as_one_cache(self, cache: KvCache) -> KvCache:
        check_kind("cache", cache, KvCache)
        for name, own in (("page_table", self._table), ("seqlens", self._seqlens)):
            if getattr(cache, name) is not own:
                raise ValueError(f"cache.{name} is another tensor; it must be the one that the forest was built from")
        if cache.k.shape[1] != self.page_size:
            raise ValueError(f"cache has pages of {cache.k.shape[1]} keys; the forest was built for {self.page_size}")
        return KvCache(cache.k, cache.v, self._pages, self._keys, cache.k_scale, cache.v_scale)

    def _plan_of(self, q: torch.Tensor, cache: KvCache) -> CachePlan:
        """A plan for a call with these tensors."""
        heads_kv, head_dim_v, is_float8 = cache.k.shape[2], cache.v.shape[3], cache.k.element_size() == 1
        return self.plan(q.shape[-2], heads_kv, q.shape[-1], head_dim_v, is_float8)

    def _has_few_rows(self, heads_q: int, heads_kv: int) -> bool:
        """True if GPUs choose for each key how many rows read it at once, as a plan of a forest says. With many rows a
        request fills tiles itself, and with batch_invariant only tall tiles fold in place."""
        packed = self.rows * (heads_q // max(heads_kv, 1))
        return not self._invariance and packed <= _FEW_ROWS * self._table.shape[0]

    # --- Rows and keys in their order ---------------------------------------------------------------------

    def _row_begins(self) -> torch.Tensor:
        """The first row of each request, and the end of the last: they ascend, whatever cu_seqlens_q holds."""
        if self._cu_seqlens_q is not None:
            return self._cu_seqlens_q.long().clamp(0, self.rows).cummax(0).values
        return torch.arange(self._table.shape[0] + 1, device=self._table.device) * self._shape[-1]

    def _requests(self, rows: torch.Tensor) -> Requests:
        """The batch's requests, with so many rows each, in its own order."""
        batch, max_pages = self._table.shape
        keys = self._seqlens.long().clamp(0, max_pages * self.page_size) * (rows > 0)
        number, tail_begins = torch.arange(batch, device=keys.device), self._mask.tail_begins(keys, rows)
        return Requests(number, self._table.long(), keys, rows, keys - rows, tail_begins)

    def _entries(self, requests: Requests) -> torch.Tensor:
        """The page tables, where pages that are not before all rows and drafts of their request are like no other."""
        first = torch.minimum(requests.first_rows, requests.tail_begins)
        column = torch.arange(requests.table.shape[1], device=first.device)
        is_before = column < (first // self.page_size)[:, None]
        return torch.where(is_before, requests.table, _NEVER + requests.number[:, None])

    def _alike(self, shared: torch.Tensor, requests: Requests, listing: Listing | None) -> torch.Tensor:
        """The pages that requests after the first share with the one before, without those that rows see otherwise."""
        if listing is not None:
            shared = shared & listing.alike
        if self._mask.mask.k_pos is not None:
            shared = shared & self._mask.alike_positions(requests)
        return shared

    def _in_units(self, shared: torch.Tensor) -> torch.Tensor:
        """True where a request shares a page with the one before, as whole units: [batch, max_pages]."""
        max_pages = shared.shape[1]
        padded = torch.nn.functional.pad(shared, (0, -max_pages % self._unit, 1, 0))
        if not self._invariance:
            return padded
        # Lists each row's keys in ascending order.
        units = padded.unflatten(1, (-1, self._unit)).all(2).cumprod(1).bool()
        return units.repeat_interleave(self._unit, 1)[:, :max_pages]

    def _place_rows(self, begins: torch.Tensor, in_batch: Requests, requests: Requests) -> PlacedRows:
        """Orders rows as their requests; rows of no request follow, and see nothing."""
        batch, order = len(in_batch.number), requests.number
        row = torch.arange(self.rows, device=order.device)
        request = torch.searchsorted(begins[1:], row, right=True)
        is_row = (row >= begins[0]) & (request < batch)
        request = request.clamp(max=batch - 1)
        index = row - begins[request]
        rank = torch.empty_like(order).scatter_(0, order, in_batch.number)[request]
        begins_in_order, sequence_row = _sums(requests.rows), in_batch.first_rows[request] + index
        of_none = begins_in_order[-1] + (~is_row).cumsum(0) - 1
        index = self._mask.row_places(in_batch, request, index)
        places = torch.where(is_row, begins_in_order[rank] + index, of_none)
        positions = self._mask.row_positions(in_batch, request, sequence_row).to(torch.int32)
        self._places.copy_(places)
        self._order.scatter_(0, places, row)
        self._q_pos[0].scatter_(0, places, positions)
        return PlacedRows(rank, is_row, index, sequence_row, self._order, begins_in_order)

    def _place_pages(
        self, requests: Requests, begins: torch.Tensor, shared: torch.Tensor, listing: Listing | None
    ) -> None:
        """Lists the pages of each request that are not an earlier one's, with the rows that see their keys."""
        column = torch.arange(shared.shape[1], device=begins.device).expand_as(shared)
        is_listed = ~shared
        if listing is not None:
            column = listing.columns
            is_listed = is_listed.gather(1, column.clamp(max=shared.shape[1] - 1)) & listing.is_seen()
        is_listed = is_listed & (column * self.page_size < requests.keys[:, None])
        source, count = self._list(is_listed)
        keys = count * self.page_size
        self._keys.copy_(keys + self.rows)
        is_used, source = source >= 0, source.clamp(min=0)
        request, page = source // column.shape[1], column.flatten()[source] * is_used
        self._pages[0].copy_(requests.table[request, page].masked_fill_(~is_used, -1))
        # Row i of the call is row `keys` + i of the one sequence. Of slots that are not in use no row sees a key.
        begin, end = ((keys + begins[n]) * is_used for n in (request, _ends(shared)[request, page]))
        self._place_keys(requests, _Slots(source, request, page, begin, end), listing)

    def _list(self, is_listed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(source, count): for each slot of the list the one of the given pages, [batch, pages], that it has, -1 if
        none; and how many slots are in use. A unit begins at a multiple of its length."""
        slots, padding = self._pages.shape[1], -is_listed.shape[1] % self._unit
        units = torch.nn.functional.pad(is_listed, (0, padding)).unflatten(1, (-1, self._unit))
        before = _sums(units.any(2).flatten()) * self._unit
        slot = before[:-1].view(len(units), -1, 1) + torch.arange(self._unit, device=is_listed.device)
        slot = torch.where(units, slot, slots).flatten(1)[:, : is_listed.shape[1]].flatten()
        source = torch.full((slots + 1,), -1, device=slot.device)
        source.scatter_(0, slot, torch.arange(len(slot), device=slot.device))
        return source[:slots], before[-1]

    def _place_keys(self, requests: Requests, slots: _Slots, listing: Listing | None) -> None:
        """Writes positions and bounds of all keys."""
        in_page = torch.arange(self.page_size, dtype=torch.int32, device=slots.page.device)
        positions = index = (slots.page * self.page_size).to(torch.int32)[:, None] + in_page
        if self._mask.has_key_positions:
            positions = self._mask.key_positions(requests).unflatten(1, (-1, self.page_size))[slots.request, slots.page]
        self._k_pos.view(index.shape).copy_(positions)
        begin, end = (x.to(torch.int32)[:, None, None] for x in (slots.begin, slots.end))
        hidden_from, hidden_until = self._bounds[0].unflatten(1, index.shape).permute(3, 1, 2, 0)
        if listing is None:
            before = self._skipped_by_band(requests, slots.request, index)
            hidden_from.copy_(end)
        else:
            before, after = listing.skipped(slots.source, requests.rows[slots.request], self.rows)
            torch.sub(end, after, out=hidden_from)
        torch.minimum(before + begin, end, out=hidden_until)

    def _skipped_by_band(self, requests: Requests, request: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Rows of its request before those that see a key, [slots, page_size, 1]; all rows where there is no key."""
        first_row = requests.first_rows.to(torch.int32)[request][:, None]
        if self._mask.has_upper_edge_in_runs:
            return (index - first_row).clamp_(min=0)[..., None]
        is_key = index < requests.keys.to(torch.int32)[request][:, None]
        return torch.where(is_key, (-first_row).clamp(min=0), self.rows)[..., None]


# --- Checks -------------------------------------------------------------------------------------------


def _check_integers(name: str, x: torch.Tensor, shape: str, length: int) -> None:
    tensor_arguments.check_dense(name, x, shape)
    arguments.check_dimensions(name, x.shape, shape)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} is {x.dtype}; it must be torch.int32")
    if x.shape[0] != length:
        raise ValueError(f"{name} has {x.shape[0]} entries; it must have {length}")


def _check_same(mask: SequenceMask, own: SequenceMask) -> None:
    """ValueError unless a call's mask is the forest's but for the window."""
    tensors, own_tensors = mask.tensors(), own.tensors()
    for name in {**own_tensors, **tensors}:
        if tensors.get(name) is not own_tensors.get(name):
            got = "None" if name not in tensors else "given" if name not in own_tensors else "another tensor"
            raise ValueError(f"mask.{name} is {got}; it must be as in Forest.from_page_table(.., mask=)")
    is_other = mask.causal != own.causal if own.bounds is not None else is_causal(mask) != is_causal(own)
    if is_other:
        raise ValueError(
            f"mask.causal is {mask.causal} with window_size {mask.window_size}; it must be as in "
            f"Forest.from_page_table(.., mask=), whose causal is {own.causal} and window_size {own.window_size}"
        )
    refuse_right_side(mask)


def _refuse_other_bits(mask: ForestMask) -> None:
    if mask.keeps_places:
        return
    name = next(x for x in ("tail", "block_mask", "bounds") if getattr(mask.mask, x) is not None)
    raise UnsupportedError(
        f"mask.{name} is given with batch_invariant; rows of a request may see keys of one page at several places, so "
        "bits would not be the plain call's: leave out batch_invariant, or for bounds the vectors' ends"
    )


def _refuse_options(options: dict[str, Any]) -> None:
    for name in ("batch_invariant", "split_size", "cu_seqlens_q"):
        if name in options:
            raise TypeError(f"{name} is given; it is an argument of Forest.from_page_table")
    for name in ("out", "lse"):
        if options.get(name) is not None:
            raise UnsupportedError(f"{name} is given; a call over a forest does not take it")
    slopes = options.get("alibi_slopes")
    if slopes is not None and getattr(slopes, "ndim", 1) != 1:
        raise UnsupportedError(
            f"alibi_slopes has shape {list(slopes.shape)}; a call over a forest takes slopes of [heads_q]"
        )


# --- What requests share ------------------------------------------------------------------------------


def _ends(shared: torch.Tensor) -> torch.Tensor:
    """For each request and page the first request after it that does not share the page, [batch, max_pages]."""
    batch = len(shared)
    # Scans from the last request to the first for the nearest one that shares less with the one before it.
    parts = torch.where(shared[1:], batch, torch.arange(1, batch, device=shared.device)[:, None])
    return torch.nn.functional.pad(parts, (0, 0, 0, 1), value=batch).flip(0).cummin(0).values.flip(0)


def _lexicographic_order(entries: torch.Tensor) -> torch.Tensor:
    """The rows' order. Pairs of neighbouring columns become one column of ranks, until one is left."""
    count, ranks = entries.numel(), _dense_ranks(entries)
    while ranks.shape[1] > 1:
        if ranks.shape[1] % 2:
            ranks = torch.nn.functional.pad(ranks, (0, 1))
        ranks = _dense_ranks(ranks[:, ::2] * count + ranks[:, 1::2])
    return ranks[:, 0].argsort(stable=True)


def _dense_ranks(values: torch.Tensor) -> torch.Tensor:
    """For each element the number of distinct smaller ones."""
    ascending, places = values.flatten().sort()
    ranks = torch.nn.functional.pad((ascending[1:] != ascending[:-1]).cumsum(0), (1, 0))
    return torch.empty_like(ranks).scatter_(0, places, ranks).view_as(values)


def _rounded_up(count: Any, unit: int) -> Any:
    return -(-count // unit) * unit


def _sums(counts: torch.Tensor) -> torch.Tensor:
    """The sums of all counts before each, and of all."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))
