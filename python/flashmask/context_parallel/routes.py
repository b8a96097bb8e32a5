# SPDX-License-Identifier: Apache-2.0
"""Where each key that travels lies in the tensors of who sends and who receives it: index tensors, made once.

A key with its batch entry is a row, of k and v side by side, in a tensor [batch * keys, heads, head_dim + head_dim_v].
What leaves a rank, or arrives, is one tensor of rows; how many segments they lie in costs no call of torch.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Route:
    """The way of some pieces' keys. rows_out, rows_in: how many rows go to and come from each rank.

    sent: int64, the rows that leave, among [batch * keys] of their source, for rank 0, 1, ... one after the other.
    seqlen_k: the keys of each batch entry among which those that arrive have their places.
    places: int64, where they go among [batch * seqlen_k]; None: to `begin` and after it, in the order of arrival.
    padding: int64, keys of these that nothing fills (seen by no row, but to be numbers); None: there are none.
    """

    rows_out: list
    rows_in: list
    sent: torch.Tensor
    seqlen_k: int
    places: torch.Tensor
    begin: int
    padding: torch.Tensor


@dataclass(frozen=True)
class Routes:
    """of_pieces: the Route of each; sent: the rows of all, one after the other. rounds: how returned gradients of all
    these rows are added up, see add_returned."""

    of_pieces: tuple
    sent: torch.Tensor
    rounds: tuple


def of_gathered(local, batch, device):
    """Routes of one piece, all keys at once, into the keys of local.gathered; the source is that as well."""
    begin, seqlen_k = local.own_keys[0], local.gathered.seqlen_k
    places = [piece.gathered_places for piece in local.pieces]
    # What one rank sends another stays together, whatever the piece.
    sends = sorted((what for piece in local.pieces for what in piece.sends), key=_peer)
    receives = sorted(
        ((*what, at) for piece, of in zip(local.pieces, places) for what, at in zip(piece.receives, of)), key=_peer
    )
    own = [_rows([local.own_keys], entry, seqlen_k) for entry in range(batch)]
    route = _route(local, sends, receives, seqlen_k, begin, seqlen_k, batch, device, own)
    return Routes((route,), route.sent, _rounds(route.sent, device))


def of_pieces(local, batch, device):
    """Routes of each piece into its own keys; the source is the rank's keys."""
    routes = []
    for piece in local.pieces:
        receives = [(*what, at) for what, at in zip(piece.receives, piece.places)]
        routes.append(_route(local, piece.sends, receives, local.rows, 0, piece.mask.seqlen_k, batch, device, []))
    sent = torch.cat([route.sent for route in routes])
    return Routes(tuple(routes), sent, _rounds(sent, device))


def _route(local, sends, receives, source, shift, seqlen_k, batch, device, filled):
    """sends: (peer, entry, segments), of `source` keys, shifted; receives: (peer, entry, keys, (begin, end))."""
    rows_out, rows_in = [0] * local.world_size, [0] * local.world_size
    sent, places = [], []
    for peer, entry, segments in sends:
        shifted = [(begin + shift, end + shift) for begin, end in segments]
        for e in range(batch) if entry is None else (entry,):
            sent.append(_rows(shifted, e, source))
            rows_out[peer] += len(sent[-1])
    for peer, entry, _, at in receives:
        for e in range(batch) if entry is None else (entry,):
            places.append(_rows([at], e, seqlen_k))
            rows_in[peer] += len(places[-1])
    sent, places = _joined(sent), _joined(places)
    free = torch.ones(batch * seqlen_k, dtype=torch.bool, device="cpu")
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


def _rounds(sent, device):
    """((which of the returned rows, None for all; the rows that they belong to), ...): a row is in a round once, so
    that the order of the sum, that in which they were sent, is the same in every run."""
    sent = sent.cpu()
    sorted_rows, order = sent.sort(stable=True)
    _, counts = sorted_rows.unique_consecutive(return_counts=True)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    number = torch.empty_like(sent)
    number[order] = torch.arange(len(sent), device="cpu") - first
    rounds = []
    for n in range(int(counts.max()) if len(counts) else 0):
        which = (number == n).nonzero().flatten()
        every = len(which) == len(sent)
        rounds.append((None if every else which.to(device), sent[which].to(device)))
    return tuple(rounds)
