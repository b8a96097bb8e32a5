# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a mask, and the keys that travel between ranks for it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from .._core import arguments
from ..torch import mask_forms, mask_gather
from ..torch.annotations import Device
from ..torch.host_masks import BLOCK
from ..torch.mask import Mask
from . import cost, routes
from .partition import Partition

PIECES = cost.PIECES
_SPARE = 20  # one of so many of a peer's keys may travel unseen by any row, so that runs are longer
_MOST_RUNS = 256  # runs of a peer's keys; more are joined, however many keys are between them
_SIXTEEN = 16  # rows, or keys, whose dropout is numbered together


@dataclass(frozen=True)
class Piece:
    """Keys that arrive together.

    mask: of the local rows and these keys; keys: their segments, in order, as LocalMask.gathered_keys. receives:
    ((peer, entry, keys), ...), in order of peers and entries; entry: the batch entry whose keys they are, or None, for
    all. places, gathered_places: where they are among the piece's keys, and among those of LocalMask.gathered, (begin,
    end). sends: ((peer, entry, local segments), ...): what leaves in the meantime for the same piece of others.
    """

    mask: Mask
    keys: tuple[Any, ...]
    receives: tuple[Any, ...]
    places: tuple[Any, ...]
    gathered_places: tuple[Any, ...]
    sends: tuple[Any, ...]


class Masks(NamedTuple):
    """Masks of a rank's rows: with its own keys, with all keys, and with those of each piece."""

    own: Mask
    gathered: Mask
    of_pieces: tuple[Mask, ...]


class Origins(NamedTuple):
    """Places of the rows and keys of calls under Masks in the sequence, for dropout: fields of AttentionOptions."""

    own: dict[str, torch.Tensor]
    gathered: dict[str, torch.Tensor]
    of_pieces: tuple[dict[str, torch.Tensor], ...]


@dataclass(frozen=True)
class LocalMask:
    """The part of a mask that one rank computes: its rows and all keys that one of them sees.

    own: the Mask of its rows and its own keys. pieces: Pieces of keys of other ranks, as many on every rank, also on
    those to which nothing travels; none if nothing does on any rank. gathered: the Mask of its rows and all of these
    keys, its own at own_keys, (begin, end); gathered_keys: their segments of the sequence, in order, of each batch
    entry whose keys travel by themselves, or of all together. whole: the Mask of the sequence. placement, index: what
    it was made of. digest: of the whole mask and the placement; ranks that agree have the same.
    """

    rank: int
    placement: Partition = field(repr=False)
    index: int
    own: Mask
    pieces: tuple[Piece, ...]
    gathered: Mask
    gathered_keys: tuple[Any, ...]
    own_keys: tuple[int, int]
    whole: Mask
    digest: str
    _arriving: tuple[Any, ...] = field(repr=False, compare=False)  # as _lay_out takes them
    _seen: Any = field(repr=False, compare=False)  # as _travels takes it
    _most_pieces: int = field(repr=False, compare=False)  # as local_mask was asked for
    _granule: int = field(repr=False, compare=False)  # keys that travel come in as many, from multiples of it on
    _made: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    def rows(self) -> int:
        return self.own.seqlen_q

    @property
    def received_keys(self) -> int:
        """Keys of other ranks that arrive, once in a forward and once in a backward, summed over the mask's batch."""
        entries = self.whole.batch
        return sum(keys * (entries if e is None else 1) for piece in self.pieces for _, e, keys in piece.receives)

    @property
    def keeps_keys(self) -> bool:
        """Result of cost.keeps_keys, equal on all ranks."""
        return self.once("keeps keys", self._keeps_keys)

    def _keeps_keys(self):
        received = self.placement.received_rows(self.index)
        return cost.keeps_keys(received, self.placement.most_rows * self.whole.batch)

    def to(self, device: Device, non_blocking: bool = False) -> LocalMask:
        """Returns a copy with its masks on `device`, or this object if they are there already."""

        def there(mask):
            return mask.to(device, non_blocking)

        masks = {name: there(getattr(self, name)) for name in ("own", "gathered", "whole")}
        pieces = tuple(replace(piece, mask=there(piece.mask)) for piece in self.pieces)
        are_there = all(getattr(self, name) is mask for name, mask in masks.items())
        if are_there and all(piece.mask is old.mask for piece, old in zip(pieces, self.pieces)):
            return self
        return replace(self, pieces=pieces, _made={}, **masks)

    def masks(self, positions: bool, device: torch.device) -> Masks:
        """The Masks of the rank's rows. positions: such that each says how far apart rows and keys are in the sequence,
        which ALiBi measures: by its q_offset, or by positions where it has several runs of rows or keys."""
        if positions:
            return self.once(("positions", device), lambda: self._with_positions(device))
        return Masks(self.own, self.gathered, tuple(piece.mask for piece in self.pieces))

    def _with_positions(self, device):
        rows = self.placement.segments(self.rank)

        def placed(mask, keys):
            return _with_positions(mask, self.whole, rows, keys).to(device)

        of_pieces = tuple(placed(piece.mask, piece.keys) for piece in self.pieces)
        return Masks(placed(self.own, (rows,)), placed(self.gathered, self.gathered_keys), of_pieces)

    # --- For dropout --------------------------------------------------------------------------------

    @property
    def has_sixteens(self) -> bool:
        """Tells if every rank's rows are whole sixteens of the sequence, but for its end."""
        return self.once("has sixteens", self._has_sixteens)

    def _has_sixteens(self):
        ranks = range(self.world_size)
        return all(begin % _SIXTEEN == 0 for rank in ranks for begin, _ in self.placement.segments(rank))

    def in_sixteens(self, device: torch.device) -> LocalMask:
        """Returns the same, whose masks are on `device`, with keys that travel in whole sixteens of the sequence, as
        dropout numbers them."""
        return self.once(("in sixteens", device), lambda: self._in_sixteens(device))

    def _in_sixteens(self, device):
        if self._granule % _SIXTEEN == 0 or not self.pieces:
            return self
        made = local_mask(self.placement, self.rank, self.index, pieces=self._most_pieces, granule=_SIXTEEN)
        return made.to(device)

    def origins(self, device: torch.device) -> Origins:
        """The Origins of the rank's calls, on a device; of in_sixteens()."""
        return self.once(("origins", device), lambda: self._make_origins(device))

    def _make_origins(self, device):
        rows = (self.placement.segments(self.rank),)

        def origin(keys):
            return {"dropout_q_origin": _sixteens(rows).to(device), "dropout_k_origin": _sixteens(keys).to(device)}

        return Origins(origin(rows), origin(self.gathered_keys), tuple(origin(piece.keys) for piece in self.pieces))

    def way(self, heads: tuple[int, int], head_dim: int) -> str:
        """How the cost model would compute attention of (heads_q, heads_kv) heads: "gather", "overlap" or
        "all_to_all"."""
        return self.once(("way", heads, head_dim), lambda: self.placement.way(self.index, heads, head_dim))

    # --- What travels, as tensors ------------------------------------------------------------------

    def gathered_routes(self, batch: int, tensors: int, device: torch.device) -> routes.Routes:
        """Routes of all keys at once, of a stack of tensors with this batch."""
        make = routes.of_gathered
        return self.once(("gathered", batch, tensors, device), lambda: make(self, batch, tensors, device))

    def piece_routes(self, batch: int, tensors: int, device: torch.device) -> routes.Routes:
        """Routes of the pieces."""
        make = routes.of_pieces
        return self.once(("pieces", batch, tensors, device), lambda: make(self, batch, tensors, device))

    # --- For keys that arrive while a call runs -----------------------------------------------------

    @property
    def travels_together(self) -> bool:
        """Tells if a key travels for all batch entries, or each entry's keys by themselves."""
        return _entries(self.whole, self._granule) == [None]

    def by_arrival(self) -> LocalMask:
        """Returns the same with keys in the order in which they are copied: the rank's own, then piece after piece."""
        return self.once("by arrival", self._by_arrival)

    def _by_arrival(self):
        arriving = tuple(sorted(self._arriving, key=lambda part: part[0]))
        if arriving == self._arriving:
            return self
        rows = self.placement.segments(self.rank)
        laid = _lay_out(self.whole.cpu(), rows, arriving, len(self.pieces), self._granule)
        pieces = (replace(piece, gathered_places=places) for piece, places in zip(self.pieces, laid.places))
        ordered = replace(
            self,
            pieces=tuple(pieces),
            gathered=laid.mask,
            gathered_keys=laid.keys,
            own_keys=laid.own_keys,
            _arriving=arriving,
            _made={},
        )
        return ordered if self.whole.device is None else ordered.to(self.whole.device)

    @property
    def parts_are_whole_tiles(self) -> bool:
        """Tells if on every rank the keys of by_arrival().gathered are its own, in whole blocks of 128, and then
        others'."""
        rows = (self.placement.rows(rank) for rank in range(self.world_size))
        return self.whole.block_mask is None and all(n % BLOCK == 0 for n in rows)

    def needed_pieces(self, device: torch.device) -> torch.Tensor:
        """int32 [1 or batch, blocks of 128 keys of `gathered`]: how many pieces have to have arrived before a block is
        read."""
        return self.once(("needed", device), lambda: self._needed_pieces().to(device))

    def _needed_pieces(self):
        entries = _entries(self.whole, self._granule)
        needed = torch.zeros(len(entries), -(-self.gathered.seqlen_k // BLOCK), dtype=torch.int32, device="cpu")
        for n, piece in enumerate(self.pieces):  # ascending, so that a block has the last of those that it needs
            for (_, entry, _), (begin, end) in zip(piece.receives, piece.gathered_places):
                needed[entry or 0, begin // BLOCK : -(-end // BLOCK)] = n + 1
        return needed

    def travelling(self) -> list[list[int]]:
        """How many keys travel from one rank, the first index, to another, summed over the entries that travel by
        themselves."""
        return self.once("travelling", self._travelling)

    def _travelling(self):
        ranks = range(self.world_size)
        return [[sum(keys for _, _, keys in self._parts(sender, receiver)) for receiver in ranks] for sender in ranks]

    def received_by(self, rank: int) -> int:
        """How many keys follow a rank's own in its by_arrival().gathered."""
        return self.once(("received by", rank), lambda: self._places_at(rank))[0]

    def places_at(self, rank: int) -> dict[tuple[int, int | None], int]:
        """Says where keys of this rank begin among those that follow another's own: by piece and batch entry."""
        return self.once(("received by", rank), lambda: self._places_at(rank))[1]

    def _places_at(self, receiver):
        ends, places = dict.fromkeys(_entries(self.whole, self._granule), 0), {}
        senders = (sender for sender in range(self.world_size) if sender != receiver)
        parts = [(n, sender, e, keys) for sender in senders for n, e, keys in self._parts(sender, receiver)]
        for n, sender, e, keys in sorted(parts, key=lambda part: part[0]):  # as _by_arrival sorts them
            if sender == self.rank:
                places[n, e] = ends[e]
            ends[e] += keys
        return max(ends.values()), places

    def _parts(self, sender, receiver):
        """[(piece, entry, keys), ...] that travel from one rank to another, in order."""
        return self.once(("parts", sender, receiver), lambda: self._make_parts(sender, receiver))

    def _make_parts(self, sender, receiver):
        if sender == receiver:
            return []
        segments, found = list(self.placement.segments(sender)), []
        for entry, of_entry in zip(_entries(self.whole, self._granule), self._seen):
            runs = _runs(of_entry[receiver], segments, self._granule)
            for n, part in enumerate(_parts(runs, _shares(self.world_size, self._most_pieces), self._granule)):
                if part:
                    piece = _piece(receiver, sender, n, self.world_size, self._most_pieces)
                    found.append((piece, entry, _length(part)))
        return sorted(found, key=lambda part: part[0])

    # --- For an all-to-all over heads -------------------------------------------------------------

    def rows_of_ranks(self) -> list[int]:
        return self.once("rows", lambda: [self.placement.rows(rank) for rank in range(self.world_size)])

    def by_ranks(self, device: torch.device) -> torch.Tensor:
        """int64 [seqlen]: the rows of rank 0, then those of rank 1, and so on."""
        ranks = range(self.world_size)
        return self.once(
            ("by ranks", device), lambda: torch.cat([self.placement.index(rank) for rank in ranks]).to(device)
        )

    def in_order(self, device: torch.device) -> torch.Tensor:
        """Index in by_ranks of each row of the sequence."""
        return self.once(("in order", device), lambda: self.by_ranks(device).argsort())

    def of_heads(self, q: tuple[int, int], kv: tuple[int, int], heads: tuple[int, int]) -> Mask:
        """The whole Mask for the query heads q and the key heads kv, (begin, end), of heads = (heads_q, heads_kv)."""
        return self.once(("heads", q, kv), lambda: _of_heads(self.whole, {heads[1]: kv, heads[0]: q}))

    def once(self, key: Any, make: Any) -> Any:
        """Result of make(), which is called for the first time that a key comes."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def local_mask(placement: Partition, rank: int, index: int = 0, *, pieces: int = PIECES, granule: int = 1) -> LocalMask:
    """The LocalMask of `rank` under mask `index` of a placement.

    pieces: in how many the keys of other ranks arrive, at most. granule: these keys are whole granules of the sequence,
    of so many keys, which divide those of the ranks' runs; with a block mask they are whole blocks. Every rank computes
    the same without asking another; the masks are read in host memory. Raises ValueError naming the argument.
    """
    world = placement.world_size
    rank = arguments.integer("rank", rank, 0, world - 1)
    index = arguments.integer("index", index, 0, len(placement.masks) - 1)
    pieces = arguments.integer("pieces", pieces, 1)
    whole = placement.masks[index]
    mask = whole.cpu()
    granule = arguments.integer("granule", granule, 1) if mask.block_mask is None else BLOCK
    segments = [list(placement.segments(r)) for r in range(world)]
    entries = _entries(mask, granule)
    of_entries = [mask if e is None else _of_entry(mask, e) for e in entries]
    seen = [[_seen(one, rows) for rows in segments] for one in of_entries]

    def keys(receiver, sender):
        """((piece, entry), segments) of the sender's keys that the receiver sees."""
        for e, of_entry in zip(entries, seen):
            runs = _runs(of_entry[receiver], segments[sender], granule)
            for n, part in enumerate(_parts(runs, _shares(world, pieces), granule)):
                if part:
                    yield (_piece(receiver, sender, n, world, pieces), e), part

    received: dict[int, list[Any]] = {}
    sent: dict[int, list[Any]] = {}
    for peer in range(world):
        if peer == rank:
            continue
        for (n, e), part in keys(rank, peer):
            received.setdefault(n, []).append((peer, e, part))
        for (n, e), part in keys(peer, rank):
            own_part = tuple(_local(segment, segments[rank]) for segment in part)
            sent.setdefault(n, []).append((peer, e, own_part))
    # All ranks take part in each piece: one message is a collective.
    every = range(_piece_count(world, pieces)) if _travels(seen, segments) else ()
    # Sorted by rank, as keys arrive if all travel at once.
    arriving = sorted(((n, *part) for n in every for part in received.get(n, [])), key=lambda part: part[1])
    laid = _lay_out(mask, segments[rank], arriving, len(every), granule)
    made = []
    for n in every:
        parts = received.get(n, [])
        part, part_keys, own_places = _laid_out(mask, segments[rank], [part[1:] for part in parts], granule)
        receives = tuple((peer, e, _length(segments)) for peer, e, segments in parts)
        made.append(Piece(part, part_keys, receives, own_places, laid.places[n], tuple(sent.get(n, []))))
    local = LocalMask(
        rank=rank,
        placement=placement,
        index=index,
        own=mask.gather(segments[rank], segments[rank]),
        pieces=tuple(made),
        gathered=laid.mask,
        gathered_keys=laid.keys,
        own_keys=laid.own_keys,
        whole=mask,
        digest=_digest(mask, segments, pieces),
        _arriving=tuple(arriving),
        _seen=seen,
        _most_pieces=pieces,
        _granule=granule,
    )
    return local if whole.device is None else local.to(whole.device)


def _of_entry(mask, entry):
    return mask.replace(bounds=mask.bounds[entry : entry + 1])


def _entries(mask, granule):
    """The batch entries whose keys travel by themselves, as others see others; [None]: those of all together.

    A granule that the sequence's end cuts comes last, where a rank's own keys would begin elsewhere in each entry.
    """
    alone = mask.bounds is not None and mask.bounds.shape[0] > 1 and mask.block_mask is None and mask.q_pos is None
    alone = alone and mask.seqlen_k % granule == 0
    return list(range(mask.bounds.shape[0])) if alone else [None]


class _Layout(NamedTuple):
    """All keys that a rank sees: LocalMask.gathered and so on, and each piece's gathered_places."""

    mask: Mask
    keys: tuple[Any, ...]
    own_keys: tuple[int, int]
    places: tuple[Any, ...]


def _lay_out(mask, rows, arriving, pieces, granule):
    """The _Layout of a rank's own keys, those of `rows`, and then of `arriving`, ((piece, peer, entry, segments),
    ...)."""
    own = [(e, list(rows)) for e in _entries(mask, granule)]
    laid, keys, places = _laid_out(mask, rows, own + [part[2:] for part in arriving], granule)
    of_parts = list(zip(arriving, places[len(own) :]))
    of_pieces = (tuple(place for part, place in of_parts if part[0] == n) for n in range(pieces))
    return _Layout(laid, keys, places[0], tuple(of_pieces))


def _laid_out(mask, rows, parts, granule):
    """The Mask of these rows and parts [(entry, segments)] of keys, the keys of each of _entries, and where each part
    is, (begin, end)."""
    # A granule that the sequence's end cuts has to come last.
    order = sorted(range(len(parts)), key=lambda n: granule > 1 and _is_last(parts[n][1], mask))
    keys, lengths, places = {e: [] for e in _entries(mask, granule)}, {}, [None] * len(parts)
    for n in order:
        e, segments = parts[n]
        begin = lengths.get(e, 0)
        lengths[e] = begin + _length(segments)
        places[n] = begin, lengths[e]
        keys[e] += segments
    laid = mask.gather(rows, keys[None]) if None in keys else mask_gather.gather_each(mask, rows, list(keys.values()))
    return laid, tuple(map(tuple, keys.values())), tuple(places)


def _is_last(segments, mask):
    return bool(segments) and segments[-1][1] == mask.seqlen_k


def _sixteens(keys):
    """int32 [entries, sixteens]: the numbers of the sixteens of the sequence that each entry's segments have."""

    def of_segment(begin, end):
        return torch.arange(begin // _SIXTEEN, -(-end // _SIXTEEN), dtype=torch.int32, device="cpu")

    none = torch.empty(0, dtype=torch.int32, device="cpu")
    of_entries = [torch.cat([none, *(of_segment(*segment) for segment in segments)]) for segments in keys]
    return torch.nn.utils.rnn.pad_sequence(of_entries, batch_first=True)


def _with_positions(mask, whole, rows, keys):
    """`mask`, gathered from the whole one, with positions where neither it nor its q_offset says the distances.

    keys: the segments of each of _entries.
    """
    if mask.q_pos is not None:
        return mask
    if whole.column_ptr is not None:  # gathered anew: a part of the lists may have become a band over gathered indices
        every = [(0, whole.seqlen_k)]
        return mask_gather.with_indices(whole, whole, every, [every]).gather(rows, keys[0])
    # The gathered mask has a q_offset if rows and keys are one run each.
    return mask_gather.with_indices(mask, whole, rows, keys) if mask.q_offset is None else mask


def _of_heads(mask, ranges):
    """ranges: {number of heads: (begin, end)}."""

    def part(x):
        if x is None or x.shape[1] == 1:
            return x
        begin, end = ranges[x.shape[1]]
        return x[:, begin:end].contiguous()

    # Lists of fewer heads count over the same intervals.
    return mask.replace(bounds=part(mask.bounds), block_mask=part(mask.block_mask), column_ptr=part(mask.column_ptr))


def _seen(mask, rows):
    """bool [seqlen_k]: whether any of these rows sees a key, in any batch entry and head.

    Exact for interval lists, and for intervals and a band over indices; of a block mask and a band over positions each
    is judged by itself, so that a key may be taken that only both together hide.
    """
    part, every = mask.gather(rows), [(0, mask.seqlen_k)]
    if mask.column_ptr is not None:
        return mask_forms.seen_keys(part)
    hidden = mask_gather.hidden_rows(mask, rows, every, mask_gather.gather_bounds(mask, rows, every))
    n = part.seqlen_q
    hidden = [(0 if begin is None else begin, n if end is None else end) for begin, end in hidden]
    seen = (_union(hidden, part) < n).flatten(0, 1).any(0)
    if mask.q_pos is not None:
        seen &= _in_band(part, *mask_forms.diagonals(part))
    if part.block_mask is not None:
        kept = part.block_mask.flatten(0, 2).bool().any(0)
        seen &= kept.repeat_interleave(BLOCK)[: part.seqlen_k]
    return seen


def _union(intervals, part):
    """How many rows of each column lie in one of the intervals: [batch, heads, seqlen_k]."""
    shape = (1, 1, part.seqlen_k) if part.bounds is None else part.bounds.shape[:3]
    if not intervals:
        return torch.zeros(shape, dtype=torch.int64)
    begins, ends = (
        torch.stack([torch.as_tensor(x).clamp(0, part.seqlen_q).long().expand(shape) for x in side])
        for side in zip(*intervals)
    )
    begins, order = begins.sort(0)
    ends = torch.maximum(ends.gather(0, order), begins)
    reached = torch.cat([torch.zeros_like(ends[:1]), ends.cummax(0).values[:-1]])
    return (ends - torch.maximum(begins, reached)).clamp(min=0).sum(0)


def _in_band(part, lo, hi):
    """Marks the keys that have some row within their band, by positions."""
    seen = torch.zeros(part.seqlen_k, dtype=torch.bool)
    for b in range(max(part.q_pos.shape[0], part.k_pos.shape[0])):
        rows = part.q_pos[min(b, part.q_pos.shape[0] - 1)].long().sort().values
        keys = part.k_pos[min(b, part.k_pos.shape[0] - 1)].long()
        first = torch.searchsorted(rows, keys - hi) if hi is not None else torch.zeros_like(keys)
        last = torch.searchsorted(rows, keys - lo, right=True) if lo is not None else torch.full_like(keys, len(rows))
        seen |= first < last
    return seen


def _runs(seen, segments, granule):
    """The keys of `segments` that are seen, as runs [(begin, end), ...] of whole granules."""
    runs, gaps = [], []
    for begin, end in segments:
        wanted = seen[begin:end]
        if granule > 1:
            granules = torch.nn.functional.pad(wanted, (0, -len(wanted) % granule)).view(-1, granule).any(1)
            wanted = granules.repeat_interleave(granule)[: len(wanted)]
        edges = (torch.nn.functional.pad(wanted.int(), (1, 1)).diff().nonzero().flatten() + begin).tolist()
        first = len(runs)
        runs += zip(edges[::2], edges[1::2])
        gaps += [(runs[n][0] - runs[n - 1][1], n) for n in range(first + 1, len(runs))]
    return _without_gaps(runs, sorted(gaps))


def _without_gaps(runs, gaps):
    """Joins runs over the smallest gaps, (keys, run after it), as long as that adds little or there are too many."""
    spare, closed = _length(runs) // _SPARE, set()
    for keys, n in gaps:
        if keys > spare and len(runs) - len(closed) <= _MOST_RUNS:
            break
        spare -= keys
        closed.add(n)
    joined = []
    for n, (begin, end) in enumerate(runs):
        joined.append((joined.pop()[0], end) if n in closed else (begin, end))
    return joined


def _shares(world, pieces):
    """Number of parts that the keys of one peer come in."""
    return max(pieces // max(world - 1, 1), 1)


def _piece(receiver, sender, part, world, pieces):
    """The piece in which a part of the sender's keys arrives: each rank begins with the one after it."""
    distance = (sender - receiver) % world - 1
    if world - 1 >= pieces:
        return distance * pieces // (world - 1)
    return distance * _shares(world, pieces) + part


def _piece_count(world, pieces):
    """Number of pieces that keys arrive in, on every rank."""
    return min((world - 1) * _shares(world, pieces), pieces)


def _travels(seen, segments):
    """Tells if any rank sees a key of another. seen: per entry and rank, as by _seen."""
    for of_ranks in seen:
        for rank, keys in enumerate(of_ranks):
            others = keys.clone()
            for begin, end in segments[rank]:
                others[begin:end] = False
            if others.any():
                return True
    return False


def _parts(runs, count, granule):
    """The runs cut into `count` lists of about as many keys each, in whole granules."""
    total, parts, taken = _length(runs), [[] for _ in range(count)], 0
    share = -(-total // count)
    granule = BLOCK if share >= BLOCK else granule
    share = -(-share // granule) * granule
    for begin, end in runs:
        while begin < end:
            n = min(taken // share, count - 1)
            room = end - begin if n == count - 1 else (n + 1) * share - taken
            until = min(begin + room, end)
            parts[n].append((begin, until))
            taken += until - begin
            begin = until
    return parts


def _length(runs):
    return sum(end - begin for begin, end in runs)


def _local(segment, segments):
    """Maps a segment of the sequence to the rows of a rank."""
    before = 0
    for begin, end in segments:
        if begin <= segment[0] < end:
            return segment[0] - begin + before, segment[1] - begin + before
        before += end - begin
    raise AssertionError(f"{segment} is not among {segments}")


def _digest(mask, segments, pieces):
    fields = mask._fields()
    text = hashlib.sha256(repr((segments, pieces)).encode())
    for name, value in fields.items():
        text.update(f"{name}={tuple(value.shape) if isinstance(value, torch.Tensor) else value};".encode())
        if isinstance(value, torch.Tensor):
            text.update(value.contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return text.hexdigest()
