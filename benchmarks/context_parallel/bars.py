# SPDX-License-Identifier: Apache-2.0
"""Bars that speed.py holds the cells of its receipt to; the pages say which bars were missed."""

PEERS = ("all gather", "flex")
LEAST_SPEEDUP = {32768: 1.8, 131072: 1.9}  # of 64/8, on two GPUs
MOST_FIXED = {"forward": 0.15, "backward": 0.3}  # ms
MOST_RECEIVED, MOST_OFF, MOST_OVER_FASTEST = 1.1, 0.1, 1.02
MOST_ERROR = {"cuda": 2e-2, "cpu": 1e-4}  # of the largest value; bfloat16, float32


def both(times):
    return times["forward_ms"] + times["backward_ms"]


def judgements(cell, device, ranks):
    """[(what, figure, bar, whether it holds)]. Times are judged on GPUs alone."""
    auto, times = cell["auto"], cell["times"]
    worst = max(cell["errors"].values())
    yield "error", worst, MOST_ERROR[device], worst <= MOST_ERROR[device]
    if cell["least_received_keys"]:
        share = cell["received_keys"] / cell["least_received_keys"]
        yield "received", share, MOST_RECEIVED, share <= MOST_RECEIVED
    if device != "cuda":
        return
    if ranks == 2 and cell["heads"] == 64:
        speedup, bar = both(times["one"]) / both(times[auto]), LEAST_SPEEDUP[cell["seqlen"]]
        yield "speed-up", speedup, bar, speedup >= bar
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
