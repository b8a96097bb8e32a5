# SPDX-License-Identifier: Apache-2.0
"""Requests whose sequences begin alike, as one sequence: a prefix tree over distinct pages."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._core import arguments
from .._core.errors import UnsupportedError
from . import tensor_arguments
from .cached_attention import SPLIT_SIZE, CachePlan, flashmask_with_kvcache
from .kv_cache import KvCache, SequenceMask, check_kind, validate_call

_MOST_KEYS = 2**31 - 1
_NEVER = 2**31  # beyond every entry of a table
_SHORT_TILE = 32  # packed rows of a GPU's shortest tile


class Forest:
    """The batch of a paged cache in which equal prefixes of page tables are read once, for all their requests.

    The requests become one sequence, whose keys are the distinct pages and whose rows are all rows, those of requests
    with a common prefix side by side. Bounds hide a key from the rows that do not see it; windows and ALiBi measure by
    positions in the requests' own sequences. A call over it is one call of the usual kernels, and its results equal the
    plain call's within rounding.

    Pages before all rows of their requests are shared, by their numbers in the table: equal keys in different pages are
    read twice.
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
    ) -> Forest:
        """The forest of a batch, built where the tensors are, without waiting for a device.

        page_table: int32 [batch, max_pages], of the KvCache that calls are given; borrowed, as the next two are.
        seqlens: int32 [batch], likewise: the keys of each request, its new tokens counted.
        page_size: keys of a page.
        rows: rows of each request in a call; with cu_seqlens_q, int32 [batch + 1], all rows of the packed q.
        batch_invariant, split_size: of the calls. Whole splits are shared, and the bits are the plain call's, but with
            kernels of mma.sync, whose bits depend on the number of rows.

        Its memory is 12 bytes for each key that the table has room for. Raises TypeError or ValueError if an argument
        is wrong.
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
        if arguments.flag("batch_invariant", batch_invariant):
            if split_size % page_size:
                raise ValueError(
                    f"split_size is {split_size}; with batch_invariant it must be whole pages of {page_size}"
                )
            return cls(page_table, seqlens, page_size, rows, cu_seqlens_q, split_size)
        return cls(page_table, seqlens, page_size, rows, cu_seqlens_q)

    def __init__(
        self,
        page_table: torch.Tensor,
        seqlens: torch.Tensor,
        page_size: int,
        rows: int,
        cu_seqlens_q: torch.Tensor | None,
        split_size: int | None = None,
    ):
        self._table, self._seqlens, self._cu_seqlens_q, self.page_size = page_table, seqlens, cu_seqlens_q, page_size
        self._invariance: dict[str, Any] = (
            {} if split_size is None else {"batch_invariant": True, "split_size": split_size}
        )
        self._unit = (split_size or page_size) // page_size  # pages that are shared, and begin in the list, together
        batch, max_pages = page_table.shape
        self._shape = (batch, rows) if cu_seqlens_q is None else (rows,)  # of q's rows
        self.rows = math.prod(self._shape)
        # Leaves room for a key that nothing sees for each row: a row is the sequence's n - rows + i, and none below 0.
        pages = batch * _rounded_up(max_pages, self._unit) + -(-self.rows // page_size)
        self.max_keys = pages * page_size
        if not 0 < batch * max_pages or self.max_keys > _MOST_KEYS:
            raise ValueError(
                f"page_table has shape {list(page_table.shape)}, which is room for {self.max_keys} keys, with one more "
                f"for each of {self.rows} rows; it must be from 1 to {_MOST_KEYS}"
            )
        new = page_table.new_empty
        self._places, self._rows_in_order = (new(self.rows, dtype=torch.int64) for _ in range(2))
        self._q_pos, self._k_pos = new(1, self.rows), new(1, self.max_keys)
        self._bounds, self._pages, self._keys = new(1, 1, self.max_keys, 2), new(1, pages), new(1)
        self.update()

    @property
    def bytes(self) -> int:
        """Memory of the forest on its device."""
        tensors = (self._places, self._rows_in_order, self._q_pos, self._k_pos, self._bounds, self._pages, self._keys)
        return sum(x.numel() * x.element_size() for x in tensors)

    def update(self) -> None:
        """Reads the tables and lengths again: once a step, for all layers. It does not wait for a device, so a CUDA
        graph may hold it."""
        batch, max_pages = self._table.shape
        seqlens = self._seqlens.long().clamp(0, max_pages * self.page_size)
        begins = self._row_begins()
        first_rows = seqlens - (begins[1:] - begins[:-1])
        order, first_pages, ends = _shared_pages(self._table.long(), first_rows // self.page_size, self._unit)
        begins_in_order = _sums((begins[1:] - begins[:-1])[order])
        self._place_rows(begins, begins_in_order, order, first_rows)
        pages = -(-seqlens[order] // self.page_size)
        self._place_pages(begins_in_order, first_rows[order], order, first_pages, pages, ends)

    def plan(
        self, heads_q: int, heads_kv: int, head_dim: int, head_dim_v: int | None = None, float8: bool = False
    ) -> CachePlan:
        """A CachePlan for calls over the forest, one for all layers of one mask; see update_plan."""
        return CachePlan(
            self._most_sequences(heads_q, heads_kv),
            self.rows,
            self.max_keys,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v,
            max_total_keys=self.max_keys,
            device=self._table.device,
            float8=float8,
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
        return_softmax_lse: bool = False,
        validate: bool = False,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """flashmask_with_kvcache over the forest: out, or (out, lse).

        q: [batch, rows, heads_q, head_dim], or with cu_seqlens_q [rows, heads_q, head_dim]; rows of no request get 0.
        cache: with the forest's own page_table and seqlens.
        mask: causal, with a window or without; None: causal.
        plan: from plan(), updated by update_plan; None: the call makes its own.
        validate: as there, of the requests' own lengths and tables.
        options: the others of flashmask_with_kvcache; alibi_slopes are [heads_q].

        Raises as flashmask_with_kvcache does, and UnsupportedError naming what a forest has not: bounds, tails,
        positions and block masks, the options out and lse, and slopes by batch entry.
        """
        _refuse_options(options)
        one_mask = self._as_one_mask(mask, options.get("alibi_slopes") is not None)
        rows = self._rows_of(q).index_select(0, self._rows_in_order)[None]
        one_cache = self._as_one_cache(cache)
        if arguments.flag("validate", validate):
            validate_call(cache, mask, q, self._cu_seqlens_q)
        if plan is None:
            plan = self._plan_of(q, cache)
            plan.update(one_mask, one_cache, rows=self.rows)
        result: Any = flashmask_with_kvcache(
            rows, one_cache, one_mask, plan, return_softmax_lse=return_softmax_lse, **options, **self._invariance
        )
        out, lse = result if return_softmax_lse else (result, None)
        out = out[0].index_select(0, self._places).view(*q.shape[:-1], out.shape[-1])
        if lse is None:
            return out
        lse = lse[0].index_select(1, self._places)
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
        mask = mask or SequenceMask()
        check_kind("mask", mask, SequenceMask)
        for name in mask.tensors():
            raise UnsupportedError(f"mask.{name} is given; a forest takes causal masks and windows")
        left, right = arguments.window("window_size", mask.window_size) or (-1, -1)
        if not mask.causal and right != 0:
            raise UnsupportedError("mask.causal is False; a forest takes causal masks and windows")
        if left < 0 and not alibi:
            return SequenceMask(False, bounds=self._bounds, key_layout="sequences")
        positions = {"q_pos": self._q_pos, "k_pos": self._k_pos}
        return SequenceMask(False, (left, -1), self._bounds, **positions, key_layout="sequences")

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

    def _most_sequences(self, heads_q: int, heads_kv: int) -> int:
        """The max_batch of a plan, though calls have one sequence: GPUs choose tiles by the average rows of requests,
        and few rows of a tall tile see a block of keys. With batch_invariant 1: only tall tiles fold in place."""
        packed = self.rows * (heads_q // max(heads_kv, 1))
        if self._invariance or packed > _SHORT_TILE * self._table.shape[0]:
            return 1
        return max(-(-packed // _SHORT_TILE), 1)

    # --- Rows and keys in their order ---------------------------------------------------------------------

    def _row_begins(self) -> torch.Tensor:
        """The first row of each request, and the end of the last: they ascend, whatever cu_seqlens_q holds."""
        if self._cu_seqlens_q is not None:
            return self._cu_seqlens_q.long().clamp(0, self.rows).cummax(0).values
        return torch.arange(self._table.shape[0] + 1, device=self._table.device) * self._shape[-1]

    def _place_rows(self, begins, begins_in_order, order, first_rows):
        """Orders rows as their requests; rows of no request follow, and see nothing."""
        row = torch.arange(self.rows, device=order.device)
        request = torch.searchsorted(begins[1:], row, right=True)
        is_row = (row >= begins[0]) & (request < len(order))
        request = request.clamp(max=len(order) - 1)
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        of_none = begins_in_order[-1] + (~is_row).cumsum(0) - 1
        places = torch.where(is_row, begins_in_order[rank[request]] + row - begins[request], of_none)
        positions = torch.where(is_row, first_rows[request] + row - begins[request], -1)
        self._places.copy_(places)
        self._rows_in_order.scatter_(0, places, row)
        self._q_pos[0].scatter_(0, places, positions.to(torch.int32))

    def _place_pages(self, begins, first_rows, order, first_pages, pages, ends):
        """Lists the pages of each request that are not an earlier one's, with the rows that see their keys."""
        slots, page_size = self._pages.shape[1], self.page_size
        column = torch.arange(self._table.shape[1], device=order.device)
        listed_before = _sums(_rounded_up(pages - first_pages, self._unit).clamp(min=0))
        slot = listed_before[:-1, None] + column - first_pages[:, None]
        slot = torch.where((column >= first_pages[:, None]) & (column < pages[:, None]), slot, slots).flatten()

        def listed(values: torch.Tensor, elsewhere: int) -> torch.Tensor:
            x = torch.full((slots + 1,), elsewhere, dtype=torch.int32, device=order.device)
            return x.scatter_(0, slot, values.expand(self._table.shape).flatten().to(torch.int32))[:slots]

        keys = listed_before[-1] * page_size
        self._keys.copy_(keys + self.rows)
        self._pages[0].copy_(listed(self._table[order], -1))
        position = self._k_pos.view(slots, page_size)
        in_page = torch.arange(page_size, dtype=torch.int32, device=order.device)
        torch.add(listed(column * page_size, 0)[:, None], in_page, out=position)
        # Row i of the call is row `keys` + i of the one sequence, and a request's i-th is at first_rows + i of its own.
        begin, end, first_row = (
            listed(x, 0)[:, None] for x in (keys + begins[:-1, None], keys + begins[ends], first_rows[:, None])
        )
        hidden_from, hidden_until = self._bounds.view(slots, page_size, 2).unbind(-1)
        hidden_from.copy_(end)
        torch.sub(position, first_row, out=hidden_until).clamp_(min=0).add_(begin).clamp_(max=end)


# --- Checks -------------------------------------------------------------------------------------------


def _check_integers(name: str, x: torch.Tensor, shape: str, length: int) -> None:
    tensor_arguments.check_dense(name, x, shape)
    arguments.check_dimensions(name, x.shape, shape)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} is {x.dtype}; it must be torch.int32")
    if x.shape[0] != length:
        raise ValueError(f"{name} has {x.shape[0]} entries; it must have {length}")


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


def _shared_pages(table, full, unit):
    """(order, first, ends): an order of requests in which those with a common prefix are side by side; for the k-th how
    many pages it shares with the one before, [batch]; and for each of its pages the first request after it that does
    not have it, [batch, max_pages].

    full: how many pages of each request lie before its rows. Others are never shared. unit: pages are shared by so
        many.
    """
    batch, max_pages = table.shape
    request, column = torch.arange(batch, device=table.device), torch.arange(max_pages, device=table.device)
    entries = torch.where(column < full[:, None], table, _NEVER + request[:, None])
    order = _lexicographic_order(entries)
    entries = entries[order]
    first = torch.nn.functional.pad((entries[1:] == entries[:-1]).cumprod(1).sum(1), (1, 0)) // unit * unit
    # Scans from the last request to the first for the nearest one that shares less with the one before it.
    parts = torch.where(first[1:, None] <= column, request[1:, None], batch)
    ends = torch.nn.functional.pad(parts, (0, 0, 0, 1), value=batch).flip(0).cummin(0).values.flip(0)
    return order, first, ends


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
