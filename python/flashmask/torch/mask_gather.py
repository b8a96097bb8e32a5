# SPDX-License-Identifier: Apache-2.0
"""Rows and keys of a Mask by segments, where its tensors are.

Repeats the C++ interface's gather in torch's operators, which trace and do not wait for a device. Interval
lists the library gathers itself, in host memory.
"""

import ctypes as C

import torch

from .._core import arguments, capi
from .._core.errors import UnsupportedError
from . import host_masks, mask_forms
from .host_masks import BLOCK

_NO_OTHERS = {"block_mask": None, "q_pos": None, "k_pos": None}
_FARTHEST = 1 << 30  # so that positions are int32


def gather(mask, rows, keys):
    """Mask.gather. rows, keys: [(begin, end), ...]; keys None: all."""
    rows = _segments("rows", rows, mask.seqlen_q, ascending=True)
    keys = [(0, mask.seqlen_k)] if keys is None else _segments("keys", keys, mask.seqlen_k)
    if mask.block_mask is not None:
        _check_blocks("rows", rows)
        _check_blocks("keys", keys)
    if mask.column_ptr is not None:
        return _gather_lists(mask, rows, keys)
    changes = {"seqlen_q": _length(rows), "seqlen_k": _length(keys), "block_mask": _blocks(mask, rows, keys)}
    bounds = gather_bounds(mask, rows, keys)
    if mask.q_pos is not None:
        positions = {"q_pos": take(mask.q_pos, rows, 1), "k_pos": take(mask.k_pos, keys, 1)}
        return mask.replace(bounds=bounds, **positions, **changes)
    if len(rows) <= 1 and len(keys) <= 1:
        return mask.replace(bounds=bounds, q_offset=_offset(mask) + _begin(rows) - _begin(keys), **changes)
    pairs = hidden_rows(mask, rows, keys, bounds)
    if len(pairs) <= 2:
        bounds = _joined(pairs, changes["seqlen_q"])
        return mask.replace(bounds=bounds, causal=False, window=None, q_offset=None, **changes)
    return with_indices(mask.replace(bounds=bounds, q_offset=None, **changes), mask, rows, [keys])


def gather_each(mask, rows, keys):
    """Does gather for a mask without blocks and positions whose bounds have batch entries: keys[e], of entry e.

    Entries with fewer keys than others end in keys that no row sees.
    """
    rows = _segments("rows", rows, mask.seqlen_q, ascending=True)
    seqlen_q, seqlen_k = _length(rows), max(_length(segments) for segments in keys)
    bounds, causal = [], mask.causal
    for entry, segments in enumerate(keys):
        one, segments = mask.replace(bounds=mask.bounds[entry : entry + 1]), _segments("keys", segments, mask.seqlen_k)
        own = gather_bounds(one, rows, segments)
        pairs = hidden_rows(one, rows, segments, own)
        if len(pairs) <= 2:  # alike for all entries
            own, causal = _joined(pairs, seqlen_q), False
        room = seqlen_k - own.shape[2]
        hidden = own.new_tensor([0, seqlen_q, 0, 0][: own.shape[3]]).expand(1, own.shape[1], room, own.shape[3])
        bounds.append(torch.cat([own, hidden], 2))
    changes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "bounds": torch.cat(bounds), "q_offset": None}
    if len(pairs) <= 2:
        return mask.replace(causal=causal, window=None, **changes)
    return with_indices(mask.replace(**changes), mask, rows, keys)


def with_indices(part, mask, rows, keys):
    """`part`, of these rows and keys of a mask without positions, with their places there as positions.

    keys: the segments of each batch entry, or of all at once; what is beyond them is at 0.
    """
    offset = _offset(mask)
    if abs(offset) > _FARTHEST:
        raise ValueError(f"q_offset is {offset}; where rows and keys have positions it is within 2^30 of 0")
    device = mask.device if part.device is None else part.device
    k_pos = [_indices(segments, device, torch.int32) for segments in keys]
    k_pos = torch.stack([torch.nn.functional.pad(x, (0, part.seqlen_k - len(x))) for x in k_pos])
    q_pos = _indices(rows, device, torch.int32)[None] + offset
    return part.replace(q_offset=None, q_pos=q_pos, k_pos=k_pos)


def _gather_lists(mask, rows, keys):
    """Does gather for a mask with interval lists."""
    pairs = [(C.c_int64 * (2 * len(x)))(*(end for segment in x for end in segment)) for x in (rows, keys)]
    segments = capi.make(capi.Segments, rows=pairs[0], row_count=len(rows), keys=pairs[1], key_count=len(keys))
    refer = lambda structs: (*map(C.byref, structs), C.byref(segments))  # noqa: E731
    return type(mask)(**host_masks.compose("fm_mask_gather", [mask], _length(rows), _length(keys), refer))


def _segments(name, segments, seqlen, ascending=False):
    """Checks segments, drops empty ones and joins neighbours."""
    runs, last = [], 0
    for n, segment in enumerate(arguments.sequence(name, segments)):
        begin, end = (arguments.integer(f"{name}[{n}]", x) for x in arguments.sequence(f"{name}[{n}]", segment))
        if not 0 <= begin <= end <= seqlen:
            raise ValueError(f"{name}[{n}] is ({begin}, {end}); segments are (begin, end) within [0, {seqlen})")
        if ascending and begin < last:
            raise ValueError(
                f"{name}[{n}] is ({begin}, {end}) and the one before it ends at {last}; {name} must ascend"
            )
        last = end
        if begin == end:
            continue
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def _check_blocks(name, runs):
    for n, (begin, end) in enumerate(runs):
        if begin % BLOCK or n + 1 < len(runs) and end % BLOCK:
            raise UnsupportedError(
                f"{name} have a segment ({begin}, {end}), and the mask a block mask: segments must begin at multiples "
                f"of {BLOCK}, and all but the last end there"
            )


def _length(runs):
    return sum(end - begin for begin, end in runs)


def _begin(runs):
    return runs[0][0] if runs else 0


def _offset(mask):
    return mask.seqlen_k - mask.seqlen_q if mask.q_offset is None else mask.q_offset


def take(x, runs, dim):
    """The runs of x in dimension dim; one of their own memory, so that x may change."""
    parts = [x.narrow(dim, begin, end - begin) for begin, end in runs]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()


def _indices(runs, device, dtype=torch.int64):
    parts = [torch.arange(begin, end, dtype=dtype, device=device) for begin, end in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)


def _count(x, rows):
    """How many of the gathered rows are before each row in x, of values in [0, seqlen_q]."""
    total = torch.zeros_like(x)
    for begin, end in rows:
        total = total + (x - begin).clamp(0, end - begin)
    return total


def gather_bounds(mask, rows, keys):
    return None if mask.bounds is None else _count(take(mask.bounds, keys, 2).clamp(0, mask.seqlen_q), rows)


def _blocks(mask, rows, keys):
    if mask.block_mask is None:
        return None
    keep = mask.block_mask
    for dim, runs in ((2, rows), (3, keys)):
        blocks = [(begin // BLOCK, -(-end // BLOCK)) for begin, end in runs]
        keep = take(keep, blocks, dim)
    return keep


def hidden_rows(mask, rows, keys, bounds):
    """The gathered intervals, as mask_forms.intervals has them, with those that a band over indices hides."""
    pairs = mask_forms.intervals(mask.replace(bounds=bounds, seqlen_k=_length(keys), **_NO_OTHERS))
    if mask.q_pos is not None:
        return pairs
    lo, hi = mask_forms.diagonals(mask)
    at = _indices(keys, mask.device)

    def row(x):
        return _count(x.clamp(0, mask.seqlen_q), rows).to(torch.int32)[None, None]

    if lo is not None:
        pairs = _laid((row(at - lo + 1), None), pairs)
    if hi is not None:
        pairs = _laid((None, row(at - hi)), pairs)
    return pairs


def _laid(edge, pairs):
    """The pairs with one more, which begins at the first row or ends at the last, or joins another such pair."""
    (first, last) = edge
    for n, (begin, end) in enumerate(pairs):
        if begin is not None and end is None and first is not None:
            return [*pairs[:n], (torch.minimum(begin, first), None), *pairs[n + 1 :]]
        if begin is None and end is not None and last is not None:
            return [*pairs[:n], (None, torch.maximum(end, last)), *pairs[n + 1 :]]
    return [*pairs, edge]


def _joined(pairs, seqlen_q):
    """Bounds without causal: two vectors where one interval reaches to the end and the other from the beginning."""
    if not pairs:
        return None
    like = torch.broadcast_tensors(*(x for pair in pairs for x in pair if x is not None))[0]
    first, last = like.new_zeros(()), like.new_full((), seqlen_q)
    until = [pair for pair in pairs if pair[0] is not None and pair[1] is None]
    from_ = [pair for pair in pairs if pair[0] is None]
    if len(until) <= 1 and len(from_) <= 1 and len(until) + len(from_) == len(pairs):
        vectors = [until[0][0] if until else last, from_[0][1] if from_ else first]
    else:
        pairs = pairs + [(first, first)] * (2 - len(pairs))
        vectors = [x for begin, end in pairs for x in (first if begin is None else begin, last if end is None else end)]
    return torch.stack([x.expand_as(like) for x in vectors], -1)
