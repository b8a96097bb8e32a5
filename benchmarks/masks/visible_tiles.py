# SPDX-License-Identifier: Apache-2.0
"""Tiles of a mask with a visible element, found from its column bounds in linear time, in numpy.

Written from the meaning of the bounds alone and apart from the library, so that a benchmark's FLOP count does not
depend on it.
"""

import numpy as np

TILE = 128


def hidden_intervals(indices, causal, seqlen):
    """int64 [3, seqlen, 2]: each column's half-open intervals of hidden rows, maybe empty or overlapping."""
    columns = np.arange(seqlen)
    nothing = np.zeros(seqlen, np.int64)
    above = (nothing, columns if causal else nothing)
    vectors = [] if indices is None else list(np.asarray(indices).reshape(seqlen, -1).T.astype(np.int64))
    lower, upper = (nothing, nothing), (nothing, nothing)
    if len(vectors) == 1:
        lower = (vectors[0], nothing + seqlen)
    elif len(vectors) == 2 and causal:
        lower = tuple(vectors)
    elif len(vectors) == 2:
        lower, upper = (vectors[0], nothing + seqlen), (nothing, vectors[1])
    elif len(vectors) == 4:
        lower, upper = tuple(vectors[:2]), tuple(vectors[2:])
    return np.stack([np.stack(pair, -1) for pair in (above, lower, upper)])


def disjoint(intervals):
    """Merges intervals of hidden rows until none overlap or touch; unused intervals are left empty."""
    empty = intervals[..., 0] >= intervals[..., 1]
    intervals = np.where(empty[..., None], np.iinfo(np.int64).max, intervals)
    order = np.argsort(intervals[..., 0], axis=0)
    merged = np.take_along_axis(intervals, order[..., None], axis=0)
    for n in range(1, len(merged)):
        before, here = merged[n - 1], merged[n]
        joins = here[:, 0] <= before[:, 1]
        here[:, 0] = np.where(joins, before[:, 0], here[:, 0])
        here[:, 1] = np.where(joins, np.maximum(before[:, 1], here[:, 1]), here[:, 1])
        before[joins] = 0
    merged[merged[..., 0] == np.iinfo(np.int64).max] = 0
    return merged


def live_tiles(indices, causal, seqlen, rows=TILE, keys=TILE):
    """bool [row tiles, key tiles] of rows x keys; seqlen is a multiple of both."""
    count, tiles = seqlen // rows, seqlen // keys
    change = np.zeros((tiles, count + 1), np.int32)  # of the number of columns that a row tile does not see at all
    key_tile = np.arange(seqlen) // keys
    for interval in disjoint(hidden_intervals(indices, causal, seqlen)):
        first, end = -(-interval[:, 0] // rows), interval[:, 1] // rows
        whole = first < end
        np.add.at(change, (key_tile[whole], first[whole]), 1)
        np.add.at(change, (key_tile[whole], end[whole]), -1)
    return (np.cumsum(change, axis=1)[:, :count] < keys).T


def visible_elements(indices, causal, seqlen):
    """Number of elements that the mask shows."""
    hidden = np.clip(disjoint(hidden_intervals(indices, causal, seqlen)), 0, seqlen)
    return seqlen * seqlen - int((hidden[..., 1] - hidden[..., 0]).clip(0).sum())


def live_share(indices, causal, seqlen):
    """The paper's `live`: the share of 128x128 tiles with a visible element."""
    return float(live_tiles(indices, causal, seqlen).mean())
