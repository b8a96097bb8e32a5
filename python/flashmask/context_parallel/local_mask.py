# SPDX-License-Identifier: Apache-2.0
"""What one rank computes of a mask, and which keys travel between ranks for it."""

import hashlib
from dataclasses import dataclass, replace

import torch

from .. import _columns, _gather, _values
from ..mask import BLOCK, Mask

PIECES = 4  # in which keys travel, so that tiles of one run while the next is on its way
_SPARE = 20  # of so many keys of a peer one may travel that no row sees, so that runs are longer
_MOST_RUNS = 256  # of a peer's keys; more are joined, however many keys are between them


@dataclass(frozen=True)
class Piece:
    """Keys that arrive together.

    mask: of the local rows and these keys, those of each peer after another. receives: ((peer, keys), ...) in this
    order. sends: ((peer, local segments), ...): what leaves in the meantime for the same piece of others.
    """

    mask: Mask
    receives: tuple
    sends: tuple


@dataclass(frozen=True)
class LocalMask:
    """The part of a mask that one rank computes: its rows and all keys that one of them sees.

    own: the Mask of its rows and its own keys. pieces: Pieces of keys of other ranks. digest: of the whole mask and
    the placement; ranks that agree have the same.
    """

    rank: int
    world_size: int
    own: Mask
    pieces: tuple
    digest: str

    @property
    def rows(self):
        return self.own.seqlen_q

    @property
    def received_keys(self):
        """Keys of other ranks that arrive, each once in a forward and once in a backward."""
        return sum(keys for piece in self.pieces for _, keys in piece.receives)

    def to(self, device, non_blocking=False):
        """The same with its masks on `device`."""
        pieces = tuple(replace(piece, mask=piece.mask.to(device, non_blocking)) for piece in self.pieces)
        return replace(self, own=self.own.to(device, non_blocking), pieces=pieces)


def local_mask(placement, rank, index=0, *, pieces=PIECES):
    """The LocalMask of `rank` under mask `index` of a placement.

    pieces: in how many the keys of other ranks arrive, at most. Every rank computes the same without asking another;
    the masks are read in host memory. Raises ValueError naming the argument.
    """
    world = placement.world_size
    rank = _values.integer("rank", rank, 0, world - 1)
    index = _values.integer("index", index, 0, len(placement.masks) - 1)
    pieces = _values.integer("pieces", pieces, 1)
    whole = placement.masks[index]
    mask = whole.cpu()
    segments = [list(placement.segments(r)) for r in range(world)]
    seen = [_seen(mask, rows) for rows in segments]

    def keys(receiver, sender):
        """Segments of `sender`'s keys that `receiver` sees, one list for each piece that they arrive in."""
        return _parts(_runs(seen[receiver], segments[sender], mask), _shares(world, pieces), mask)

    received, sent = {}, {}
    for peer in range(world):
        if peer == rank:
            continue
        for n, part in enumerate(keys(rank, peer)):
            if part:
                received.setdefault(_piece(rank, peer, n, world, pieces), []).append((peer, part))
        for n, part in enumerate(keys(peer, rank)):
            if part:
                local = [_local(segment, segments[rank]) for segment in part]
                sent.setdefault(_piece(peer, rank, n, world, pieces), []).append((peer, tuple(local)))
    made = []
    for n in sorted(received.keys() | sent.keys()):
        # A block that the sequence's end cuts has to come last.
        arriving = sorted(received.get(n, []), key=lambda item: item[1][-1][1] == mask.seqlen_k)
        part = mask.gather(segments[rank], [segment for _, part in arriving for segment in part])
        made.append(Piece(part, tuple((peer, _length(part)) for peer, part in arriving), tuple(sent.get(n, []))))
    own = mask.gather(segments[rank], segments[rank])
    local = LocalMask(rank, world, own, tuple(made), _digest(mask, segments, pieces))
    return local if whole.device is None else local.to(whole.device)


def _seen(mask, rows):
    """bool [seqlen_k]: whether any of these rows sees a key, in any batch entry and head.

    Exact for intervals and a band over indices; of a block mask and a band over positions each is judged by itself, so
    that a key may be taken that only both together hide.
    """
    part, every = mask.gather(rows), [(0, mask.seqlen_k)]
    hidden = _gather.hidden_rows(mask, rows, every, _gather.gather_bounds(mask, rows, every))
    n = part.seqlen_q
    hidden = [(0 if begin is None else begin, n if end is None else end) for begin, end in hidden]
    seen = (_union(hidden, part) < n).flatten(0, 1).any(0)
    if mask.q_pos is not None:
        seen &= _in_band(part, *_columns.diagonals(part))
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
    """Whether some row is within the band of each key, by their positions."""
    seen = torch.zeros(part.seqlen_k, dtype=torch.bool)
    for b in range(max(part.q_pos.shape[0], part.k_pos.shape[0])):
        rows = part.q_pos[min(b, part.q_pos.shape[0] - 1)].long().sort().values
        keys = part.k_pos[min(b, part.k_pos.shape[0] - 1)].long()
        first = torch.searchsorted(rows, keys - hi) if hi is not None else torch.zeros_like(keys)
        last = torch.searchsorted(rows, keys - lo, right=True) if lo is not None else torch.full_like(keys, len(rows))
        seen |= first < last
    return seen


def _runs(seen, segments, mask):
    """The keys of `segments` that are seen, as runs [(begin, end), ...]; whole blocks where there is a block mask."""
    runs, gaps = [], []
    for begin, end in segments:
        wanted = seen[begin:end]
        if mask.block_mask is not None:
            blocks = torch.nn.functional.pad(wanted, (0, -len(wanted) % BLOCK)).view(-1, BLOCK).any(1)
            wanted = blocks.repeat_interleave(BLOCK)[: len(wanted)]
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
    """In how many parts the keys of one peer come."""
    return max(pieces // max(world - 1, 1), 1)


def _piece(receiver, sender, part, world, pieces):
    """The piece in which a part of the sender's keys arrives: each rank begins with the one after it."""
    distance = (sender - receiver) % world - 1
    if world - 1 >= pieces:
        return distance * pieces // (world - 1)
    return distance * _shares(world, pieces) + part


def _parts(runs, count, mask):
    """The runs cut into `count` lists of about as many keys each."""
    total, parts, taken = _length(runs), [[] for _ in range(count)], 0
    share = -(-total // count)
    if mask.block_mask is not None or share >= BLOCK:
        share = -(-share // BLOCK) * BLOCK
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
    """Where a segment of the sequence lies among the rows of a rank."""
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
