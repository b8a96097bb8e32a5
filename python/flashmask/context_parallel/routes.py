# SPDX-License-Identifier: Apache-2.0
"""Places of each key that travels, in the tensors of its sender and its receiver: index tensors, made once.

A key of a tensor with its batch entry is a row in [tensors * batch * keys, heads, head_dim]: k and v travel together
if their heads have the same width, as two tensors of a stack, and otherwise one after the other. A rank sends, and
receives, one tensor of rows; more segments cost no further calls of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Route:
    """The way of some pieces' keys. rows_out, rows_in: how many rows go to and come from each rank.

    sent: int64, the rows that leave, among [tensors * batch * keys] of their source, for rank 0, 1, ... one after the
        other.
    seqlen_k: the keys of each batch entry among which those that arrive have their places.
    places: int64, where they go among [tensors * batch * seqlen_k]; None: to `begin` and after it, in the order of
        arrival.
    padding: int64, keys of these that nothing fills (seen by no row, but to be numbers); None: there are none.
    """

    rows_out: list[int]
    rows_in: list[int]
    sent: torch.Tensor
    seqlen_k: int
    places: torch.Tensor | None
    begin: int
    padding: torch.Tensor | None


@dataclass(frozen=True)
class Routes:
    """of_pieces: the Route of each; sent: the rows of all, one after the other.

    Of the gradients that come back for these: rows: int64, each row of the source that has some, once; own: the same
    rows among [tensors * batch * keys] of the rank's own. rounds: ((which of those that come back, None: all; which of
    `rows` they are added to, None: all), ...). A row is in a round once, so that the order of a sum, that in which its
    parts were sent, is the same in every run.
    """

    of_pieces: tuple[Route, ...]
    sent: torch.Tensor
    rows: torch.Tensor
    own: torch.Tensor
    rounds: tuple[Any, ...]


def of_gathered(local, batch, tensors, device):
    """Routes of one piece, all keys at once, into the keys of local.gathered; the source is that as well."""
    entries = Entries(batch, tensors)
    begin, seqlen_k = local.own_keys[0], local.gathered.seqlen_k
    places = [piece.gathered_places for piece in local.pieces]
    # Keys from one rank to another stay together, whatever the piece.
    sends = sorted((what for piece in local.pieces for what in piece.sends), key=_peer)
    receives = sorted(
        ((*what, at) for piece, of in zip(local.pieces, places) for what, at in zip(piece.receives, of)), key=_peer
    )
    own = [_rows([local.own_keys], entry, seqlen_k) for entry in entries.of(None)]
    route = _route(local, sends, receives, seqlen_k, begin, seqlen_k, entries, device, own)
    return _routes([route], seqlen_k, local.own_keys, device)


def of_pieces(local, batch, tensors, device):
    """Routes of each piece into its own keys; the source is the rank's keys."""
    routes, entries = [], Entries(batch, tensors)
    for piece in local.pieces:
        receives = [(*what, at) for what, at in zip(piece.receives, piece.places)]
        routes.append(_route(local, piece.sends, receives, local.rows, 0, piece.mask.seqlen_k, entries, device, []))
    return _routes(routes, local.rows, (0, local.rows), device)


class Entries:
    """The batch entries of a stack of tensors, those of the first tensor first."""

    def __init__(self, batch, tensors):
        self.batch, self.count = batch, batch * tensors

    def of(self, entry):
        """Stack indices of batch entry `entry` of each tensor; None: of all entries."""
        return range(self.count) if entry is None else range(entry, self.count, self.batch)


def _route(local, sends, receives, source, shift, seqlen_k, entries, device, filled):
    """sends: (peer, entry, segments), of `source` keys, shifted; receives: (peer, entry, keys, (begin, end))."""
    rows_out, rows_in = [0] * local.world_size, [0] * local.world_size
    sent, places = [], []
    for peer, entry, segments in sends:
        shifted = [(begin + shift, end + shift) for begin, end in segments]
        for e in entries.of(entry):
            sent.append(_rows(shifted, e, source))
            rows_out[peer] += len(sent[-1])
    for peer, entry, _, at in receives:
        for e in entries.of(entry):
            places.append(_rows([at], e, seqlen_k))
            rows_in[peer] += len(places[-1])
    sent, places = _joined(sent), _joined(places)
    free = torch.ones(entries.count * seqlen_k, dtype=torch.bool, device="cpu")
    free[_joined([places, *filled])] = False
    padding = free.nonzero().flatten()
    begin = int(places[0]) if len(places) else 0
    in_order = torch.equal(places, torch.arange(begin, begin + len(places), device="cpu"))
    return Route(
        rows_out,
        rows_in,
        sent.to(device),
        seqlen_k,
        None if in_order else places.to(device),
        begin,
        padding.to(device) if len(padding) else None,
    )


def _peer(message):
    return message[0]


def _rows(segments, entry, keys):
    return _joined([torch.arange(entry * keys + b, entry * keys + e, device="cpu") for b, e in segments])


def _joined(parts):
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


def _routes(routes, source, own_keys, device):
    """source: keys of each batch entry of the source; own_keys: (begin, end), the rank's own among them."""
    sent = torch.cat([route.sent for route in routes])
    rows, rounds = _rounds(sent.cpu())
    begin, end = own_keys
    own = rows // max(source, 1) * (end - begin) + rows % max(source, 1) - begin
    rounds = tuple(tuple(None if x is None else x.to(device) for x in pair) for pair in rounds)
    return Routes(tuple(routes), sent, rows.to(device), own.to(device), rounds)


def _rounds(sent):
    """Routes.rows and Routes.rounds."""
    sorted_rows, order = sent.sort(stable=True)
    _, counts = sorted_rows.unique_consecutive(return_counts=True)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    number = torch.empty_like(sent)
    number[order] = torch.arange(len(sent), device="cpu") - first
    found = [(number == n).nonzero().flatten() for n in range(int(counts.max()) if len(counts) else 0)]
    if not found:
        return sent, []
    rows = sent[found[0]]  # every row: round n has what comes back for a row the nth time
    place = torch.empty(int(rows.max()) + 1, dtype=torch.int64, device="cpu")
    place[rows] = torch.arange(len(rows), device="cpu")
    begin = (None if len(rows) == len(sent) else found[0], None)
    return rows, [begin, *((which, place[sent[which]]) for which in found[1:])]
