# SPDX-License-Identifier: Apache-2.0
"""Bars that speed.py holds the cells of its receipt to; the pages say which bars were missed."""

from statistics import geometric_mean

from benchmarks.receipts import short_length

PEERS = ("all gather", "flex")
LEAST_SPEEDUP = 1.9  # of 64/8, on two GPUs
# By GPUs and lengths: the geometric mean of the speed-ups of all cells.
LEAST_MEANS = {2: {(32768, 131072): 1.93}, 4: {(32768,): 3.5, (131072,): 3.85}}
LEAST_AHEAD = {2: 15}  # by GPUs: the cells, of 18, in which arrive is faster than gather
MOST_FIXED = {"forward": 0.15, "backward": 0.3}  # ms
MOST_RECEIVED, MOST_OFF, MOST_OVER_FASTEST = 1.1, 0.1, 1.02
MOST_ERROR = {"cuda": 2e-2, "cpu": 1e-4}  # of the largest value; bfloat16, float32


def both(times):
    return times["forward_ms"] + times["backward_ms"]


def speedup(cell):
    """One GPU's time over that of the way that the cost model chooses."""
    return both(cell["times"]["one"]) / both(cell["times"][cell["auto"]])


def run_judgements(cells, device, ranks, is_complete):
    """[(what, figure, bar, whether it holds)] of each cell and, of a complete run on GPUs, of all cells together."""
    for cell in cells:
        yield from judgements(cell, device, ranks)
    if is_complete and device == "cuda":
        yield from joint_judgements(cells, ranks)


def joint_judgements(cells, ranks):
    """Judges all cells of a complete run together."""
    for seqlens, bar in LEAST_MEANS.get(ranks, {}).items():
        mean = geometric_mean(speedup(cell) for cell in cells if cell["seqlen"] in seqlens)
        yield f"mean speed-up at {' and '.join(map(short_length, seqlens))}", mean, bar, mean >= bar
    if ranks in LEAST_AHEAD:
        pairs = [(cell["times"].get("arrive"), cell["times"]["gather"]) for cell in cells]
        ahead = sum(arrive is not None and both(arrive) < both(gather) for arrive, gather in pairs)
        yield "cells in which arrive is faster than gather", ahead, LEAST_AHEAD[ranks], ahead >= LEAST_AHEAD[ranks]


def judgements(cell, device, ranks):
    """Judges a cell. Times are judged on GPUs alone."""
    auto, times = cell["auto"], cell["times"]
    worst = max(cell["errors"].values())
    yield "error", worst, MOST_ERROR[device], worst <= MOST_ERROR[device]
    if cell["least_received_keys"]:
        share = cell["received_keys"] / cell["least_received_keys"]
        yield "received", share, MOST_RECEIVED, share <= MOST_RECEIVED
    if device != "cuda":
        return
    if ranks == 2 and cell["heads"] == 64:
        yield "speed-up", speedup(cell), LEAST_SPEEDUP, speedup(cell) >= LEAST_SPEEDUP
    for phase, bar in MOST_FIXED.items():
        yield f"fixed {phase} ms", cell[f"fixed_{phase}_ms"], bar, cell[f"fixed_{phase}_ms"] <= bar
    for peer in PEERS:
        if peer in times:
            ratio = both(times[peer]) / both(times[auto])
            yield f"{peer}, over ours", ratio, 1.0, ratio > 1
    if "fastest" in cell:
        ratio = both(times[auto]) / both(times[cell["fastest"]])
        yield "auto, over the fastest way", ratio, MOST_OVER_FASTEST, ratio <= MOST_OVER_FASTEST
    off = cell["predicted_ms"][auto] / both(times[auto]) - 1
    yield "prediction off by", off, MOST_OFF, abs(off) <= MOST_OFF
