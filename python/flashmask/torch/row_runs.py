# SPDX-License-Identifier: Apache-2.0
"""Runs of neighbouring rows that see a key."""

from __future__ import annotations

import dataclasses

import torch

_WORD_BITS = 62  # bits that sort as one int64


@dataclasses.dataclass(frozen=True)
class Runs:
    """Half-open runs of a request's rows, counted from its first: [batch, keys, heads, runs], empty ones last."""

    begin: torch.Tensor
    end: torch.Tensor

    def is_empty(self) -> torch.Tensor:
        return self.end <= self.begin

    def shifted(self, rows: torch.Tensor) -> Runs:
        return Runs(self.begin - rows, self.end - rows)


@dataclasses.dataclass(frozen=True)
class PlacedRows:
    """All rows of a call, each [rows]; `order` puts those of a request side by side, and those of none last."""

    request: torch.Tensor
    is_row: torch.Tensor  # it is a request's
    index: torch.Tensor  # its place among its request's
    sequence_row: torch.Tensor  # the row of its request's sequence that it is
    order: torch.Tensor
    begins: torch.Tensor  # [batch + 1], where requests begin in that order

    def in_order(self) -> PlacedRows:
        placed = {name: getattr(self, name)[self.order] for name in ("request", "is_row", "index", "sequence_row")}
        return dataclasses.replace(self, order=torch.arange(len(self.order), device=self.order.device), **placed)


def complement(begin: torch.Tensor, end: torch.Tensor, first: torch.Tensor, last: torch.Tensor, most: int) -> Runs:
    """The parts of [first, last), [.., 1], outside of n intervals [begin, end), [.., n]: at most so many runs."""
    is_empty = end <= begin
    begin, order = torch.where(is_empty, last, begin).clamp(first, last).sort(-1)
    end = torch.where(is_empty, last, end).clamp(first, last).gather(-1, order).cummax(-1).values
    left = Runs(torch.cat((first, end), -1), torch.cat((begin, last), -1))
    order = left.is_empty().to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
    return Runs(left.begin.gather(-1, order), left.end.gather(-1, order))


def of_visible(visible: torch.Tensor, rows: PlacedRows, most: int) -> Runs:
    """The runs of true elements of each request's rows, which are in order, at most so many: visible is [rows, keys,
    heads]."""
    batch = len(rows.begins) - 1
    index, request = rows.index[:, None, None], rows.request[:, None, None]
    visible = visible & rows.is_row[:, None, None]
    follows = torch.nn.functional.pad(visible[:-1], (0, 0, 0, 0, 1, 0)) & (index > 0)
    starts = visible & ~follows
    stops = visible & ~torch.nn.functional.pad((follows & visible)[1:], (0, 0, 0, 0, 0, 1))
    started = torch.nn.functional.pad(starts.cumsum(0), (0, 0, 0, 0, 1, 0))
    run = started[1:] - started[rows.begins[rows.request]] - 1
    keys, heads = visible.shape[1:]
    place = torch.arange(keys * heads, device=visible.device).view(keys, heads)
    place = (request * (keys * heads) + place) * most + run.clamp(0, most - 1)
    count = batch * keys * heads * most  # the place of what is neither a start nor a stop

    def scattered(where: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(count + 1, dtype=torch.int32, device=visible.device)
        x.scatter_(0, torch.where(where, place, count).flatten(), value.to(x.dtype).expand_as(place).flatten())
        return x[:count].view(batch, keys, heads, most)

    return Runs(scattered(starts, index), scattered(stops, index + 1))


def nested_places(visible: torch.Tensor, is_row: torch.Tensor) -> torch.Tensor:
    """Places of rows, [batch, rows], in which the rows that see a key are neighbours for every key, if the keys' sets
    of rows nest, as in trees: visible is [batch, rows, keys]. Rows that are none come last."""
    # Lexicographic, larger sets first: of two rows of a set all rows between agree on the sets around it, so on it.
    keys = visible.sum(1).argsort(dim=1, descending=True, stable=True)
    visible = visible.gather(2, keys[:, None].expand_as(visible))
    order = torch.arange(visible.shape[1], device=visible.device).expand_as(is_row)
    for bits in reversed(visible.split(_WORD_BITS, 2)):
        shifts = torch.arange(bits.shape[2] - 1, -1, -1, device=visible.device)
        order = _sorted_by((bits.long() << shifts).sum(2), order)
    order = _sorted_by(is_row.long(), order)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def _sorted_by(keys: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The order with descending keys, stable."""
    return order.gather(1, keys.gather(1, order).argsort(dim=1, descending=True, stable=True))
