# SPDX-License-Identifier: Apache-2.0
"""Measured cases, forward, backward or both together, against the bars: FlashMask V3 and cuDNN for Hopper's kernels;
for mma.sync's kernels FlashAttention-2, the visible share of their own time, FlexAttention and SDPA with a dense mask.

Every ratio counts our plan's own time as ours and is speed: their time over our time. A peer that took no part in the
case's run has its last one, with a date and a device (receipts.py), or none.
"""

import math
from statistics import median

from benchmarks import receipts

V3 = "flashmask_v3"
# op, head_dim: (seqlens, each cell, geometric mean), ours over V3; of both together only the mean has a bar
V3_BARS = {
    "fwd": {128: ((8192, 32768, 131072), 1.0, 1.15), 64: ((8192, 32768), 1.0, 1.20)},
    "bwd": {128: ((8192, 32768, 131072), 1.0, 1.05), 64: ((8192, 32768), 1.0, 1.20)},
    "total": {128: ((8192, 32768, 131072), None, 1.08), 64: ((8192, 32768), None, 1.20)},
}
# op, head_dim: ours over cuDNN, for full and causal at these lengths
CUDNN_BARS = {"fwd": {128: 1.05, 64: 1.10}, "bwd": {128: 1.09, 64: 1.18}, "total": {}}
CUDNN_SEQLENS = (8192, 32768)
MMA_SYNC_SEQLENS, MMA_SYNC_MASK_DIMS = (8192, 32768), (64, 128)
# Each cell, geometric mean of a direction; full and causal of all head dims below 256, where FlashAttention-2's tile
# needs more shared memory than an A100 has.
FA2_BARS, FA2_BELOW = {"fwd": (0.88, 0.96), "bwd": (0.88, 0.97)}, 256
# A mask's time over its visible share of the full mask's, at most, in cells with at least so much visible.
SHARE_BAR, LEAST_LIVE = 1.2, 0.1
# Geometric means over the masks. FlexAttention runs on Hopper by wgmma, which is faster than mma.sync there.
MASK_BARS = {"flex": 0.75, "sdpa": 3.0}
# The deterministic backward's time over the fast one's, at most; of Hopper's kernels also with grouped heads.
DETERMINISTIC_BARS = {"median": 1.07, "every cell": 1.18}
DETERMINISTIC_GROUPED_BARS = {"every cell": 1.12}
FA3_BARS = {"fwd": {}, "bwd": {256: 1.0}, "total": {}}  # op, head_dim: ours over FA3, for full and causal
# Our own modes (deterministic, dense) or a part of a call (plain): no peers for both directions together.
OF_ONE_DIRECTION = ("deterministic", "dense", "plain")
OURS_OTHERWISE = ("deterministic", receipts.SMALL)  # reported as their time over ours, without a plan


def recorded(cases, peer):
    """(dates, devices) of the ratios over a peer that are not of the cases' own runs, each in order."""
    figures = [case["peers"].get(peer, {}) for case in cases]
    return tuple(sorted({f[name] for f in figures if "recorded" in f}) for name in ("recorded", "device"))


def geomean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def ratio_to(case, peer):
    """Their time over ours with the plan, by the median over rounds if there is one. None if the peer was not
    measured."""
    figures = case["peers"].get(peer)
    if figures is None:
        return None
    ratio = figures.get("ratio") or figures["ms"] / case["ours_ms"]
    return ratio * case["ours_ms"] / (case["ours_ms"] + case["plan_ms"])


def sum_of(*figures):
    """A peer's figures for both directions together."""
    latest = max((f for f in figures if "recorded" in f), key=lambda f: f["recorded"], default={})
    return {"ms": sum(f["ms"] for f in figures), **{n: latest[n] for n in ("recorded", "device") if n in latest}}


def total_of(forward, backward):
    """A case of both directions of one cell, with one plan: times are the sums of the medians."""
    ours = forward["ours_ms"] + backward["ours_ms"]
    flop = sum(case["ours_tflops"] * case["ours_ms"] for case in (forward, backward))
    peers = {
        name: sum_of(forward["peers"][name], backward["peers"][name])
        for name in forward["peers"]
        if name in backward["peers"] and name not in OF_ONE_DIRECTION
    }
    if "deterministic" in backward["peers"]:
        ms = forward["ours_ms"] + backward["peers"]["deterministic"]["ms"]
        peers["deterministic"] = {"ms": ms, "ratio": ms / ours}
    marked = forward.get("marked", False) or backward.get("marked", False)
    return {
        **backward,
        "op": "total",
        "ours_ms": ours,
        "ours_tflops": flop / ours,
        "plan_ms": forward["plan_ms"],
        "peers": peers,
        "marked": marked,
    }


def with_totals(cases):
    """The cases, and one more of each cell that was measured in both directions."""

    def cell(case):
        return tuple(case[name] for name in receipts.IDENTITY if name != "op" and name in case)

    backward = {cell(case): case for case in cases if case["op"] == "bwd"}
    return cases + [
        total_of(case, backward[cell(case)]) for case in cases if case["op"] == "fwd" and cell(case) in backward
    ]


def row_of(case):
    """A case's row of the table."""
    tflops = case["ours_tflops"] * case["ours_ms"] / (case["ours_ms"] + case["plan_ms"])
    return {
        **{name: case[name] for name in ("op", "arch", "head_dim", "head_dim_v", "seqlen", "mask", "live")},
        "grouped": case["heads"] != case["heads_kv"],
        "ms": case["ours_ms"] + case["plan_ms"],
        "tflops": tflops,
        "v3": ratio_to(case, V3),
        **{name: ratio_to(case, name) for name in ("flex", "fa3", "cudnn", "fa2", "sdpa")},
        **{name: case["peers"].get(name, {}).get("ratio") for name in OURS_OTHERWISE},
    }


def rows_of(cases, op="fwd"):
    return [row_of(case) for case in cases if case["op"] == op]


def check(name, got, bar, detail=""):
    return {"name": name, "got": got, "bar": bar, "passed": got >= bar, "detail": detail}


def check_at_most(name, got, bar, detail=""):
    return {**check(name, got, bar, detail), "passed": got <= bar, "at_most": True}


def place(row):
    return f"d={row['head_dim']} S={row['seqlen']} {row['mask']}"


def v3_checks(rows, head_dim, seqlens, each, mean, label):
    measured = [r for r in rows if r["head_dim"] == head_dim and r["seqlen"] in seqlens]
    if not most_have(measured, "v3"):
        return []
    cells = [r for r in measured if r["v3"]]
    if not cells:
        return []
    worst = min(cells, key=lambda r: r["v3"])
    of_each = (
        []
        if each is None
        else [
            check(
                f"{label}: every cell over V3",
                worst["v3"],
                each,
                f"worst {worst['mask']} {worst['seqlen']}, {len(cells)} cells",
            )
        ]
    )
    return [
        *of_each,
        check(f"{label}: geometric mean over V3", geomean([r["v3"] for r in cells]), mean, f"{len(cells)} cells"),
    ]


def checks(rows, op="fwd"):
    """Checks the bars of `op`, the direction of all rows, for the cells that have bars. Grouped heads have one, of
    Hopper's deterministic backward."""
    of_set = {}
    for row in rows:
        if not row["grouped"]:
            of_set.setdefault(row["arch"], []).append(row)
    found = [
        found
        for arch, own in of_set.items()
        for found in (hopper_checks(own, op) if arch == receipts.HOPPER else mma_sync_checks(own, arch))
    ]
    grouped = [row for row in rows if row["grouped"] and row["arch"] == receipts.HOPPER and op == "bwd"]
    return [*found, *deterministic_checks(grouped, "grouped heads", DETERMINISTIC_GROUPED_BARS)]


def mma_sync_checks(rows, label):
    """Checks the bars of mma.sync's kernels over all rows of one direction."""
    rows = [r for r in rows if r["seqlen"] in MMA_SYNC_SEQLENS and r["op"] != "total"]
    masks = [r for r in rows if r["head_dim"] in MMA_SYNC_MASK_DIMS]
    return [
        *fa2_checks(rows, label),
        *share_checks(masks, label),
        *(
            check(
                f"{label}: geometric mean over {COLUMNS[peer][1:]}", mean_of(masks, peer), bar, worst_text(masks, peer)
            )
            for peer, bar in MASK_BARS.items()
            if any(r[peer] for r in masks)
        ),
        *deterministic_checks(rows, label),
    ]


def fa2_checks(rows, label):
    rows = [r for r in rows if r["mask"] in ("full", "causal") and r["fa2"] and r["head_dim"] < FA2_BELOW]
    if not rows:
        return []
    each, mean = FA2_BARS[rows[0]["op"]]
    return [
        check(f"{label}: every cell over FA2", min(r["fa2"] for r in rows), each, worst_text(rows, "fa2")),
        check(f"{label}: geometric mean over FA2", mean_of(rows, "fa2"), mean, f"{len(rows)} cells"),
    ]


def share_checks(rows, label):
    """Checks time over visible share for the masks whose shape also has a measured full mask."""

    def shape(row):
        return row["head_dim"], row["head_dim_v"], row["seqlen"]

    full_ms = {shape(r): r["ms"] for r in rows if r["mask"] == "full"}
    found = [
        (r["ms"] / (r["live"] * full_ms[shape(r)]), place(r))
        for r in rows
        if r["mask"] != "full" and r["live"] >= LEAST_LIVE and shape(r) in full_ms
    ]
    if not found:
        return []
    worst, where = max(found)
    detail = f"worst {where}, {len(found)} cells"
    return [check_at_most(f"{label}: time over the visible share of the full mask's", worst, SHARE_BAR, detail)]


def deterministic_checks(rows, label, bars=DETERMINISTIC_BARS):
    """Checks the deterministic backward against the fast one."""
    slow = [r for r in rows if r["deterministic"]]
    if not slow:
        return []
    worst = max(slow, key=lambda r: r["deterministic"])
    got = {"median": median(r["deterministic"] for r in slow), "every cell": worst["deterministic"]}
    detail = f"worst {place(worst)}, {len(slow)} cells"
    return [check_at_most(f"{label}: deterministic, {what}", got[what], bar, detail) for what, bar in bars.items()]


def worst_text(rows, key):
    rows = [r for r in rows if r[key]]
    return f"worst {place(min(rows, key=lambda r: r[key]))}, {len(rows)} cells"


def hopper_checks(rows, op):
    """Geometric means for each (head_dim, seqlen), and over the lengths of a head_dim; cells over cuDNN and FA3; the
    deterministic backward."""
    found = []
    for head_dim, (seqlens, each, mean) in V3_BARS[op].items():
        present = sorted({r["seqlen"] for r in rows if r["head_dim"] == head_dim} & set(seqlens))
        for seqlen in present:
            found += v3_checks(rows, head_dim, (seqlen,), each, mean, f"d={head_dim} S={seqlen}")
        if len(present) > 1:
            found += v3_checks(rows, head_dim, present, each, mean, f"d={head_dim} all")
    for r in rows:
        if r["mask"] not in ("full", "causal"):
            continue
        if r["cudnn"] and r["head_dim"] in CUDNN_BARS[op] and r["seqlen"] in CUDNN_SEQLENS:
            found.append(check(f"{place(r)}: over cuDNN", r["cudnn"], CUDNN_BARS[op][r["head_dim"]]))
        if r["fa3"] and r["head_dim"] in FA3_BARS[op]:
            found.append(check(f"{place(r)}: over FA3", r["fa3"], FA3_BARS[op][r["head_dim"]]))
    return [*found, *(deterministic_checks(rows, "all head dims") if op == "bwd" else [])]


def cell_text(value, form="6.2f"):
    return format(value, form) if value is not None else " " * (int(form.split(".")[0]) - 1) + "-"


def most_have(rows, key):
    """True if at least half of the rows have a value in a column: a mean of fewer says little of the rest."""
    return 2 * sum(bool(row[key]) for row in rows) >= max(len(rows), 1)


def mean_of(rows, key):
    """Geometric mean of the values that rows have in a column; None if there are none."""
    return geomean(values) if (values := [r[key] for r in rows if r[key]]) else None


COLUMNS = {
    "flex": "/Flex",
    "v3": "/V3",
    "fa3": "/FA3",
    "fa2": "/FA2",
    "cudnn": "/cuDNN",
    "sdpa": "/SDPA",
    "deterministic": "det",
    receipts.SMALL: "99 KiB",
}
ALWAYS = ("flex", "v3", "cudnn")  # columns of Hopper's table


def table(rows):
    """The short table: one line a cell, then geometric means. Every column but TFLOP/s is a speed ratio.

    det: deterministic mode's time over the fast one's, where it was measured; 99 KiB: that of the small tiles.
    """
    always = ALWAYS if all(r["arch"] == receipts.HOPPER for r in rows) else ()
    columns = [key for key in COLUMNS if key in always or any(r[key] for r in rows)]
    heads = " ".join(f"{COLUMNS[key]:>6}" for key in columns)
    lines = [f"{'d':>4} {'S':>6} {'mask':22} {'live':>5} {'TFLOP/s':>8} {heads}"]
    for r in rows:
        ratios = " ".join(cell_text(r[key]) for key in columns)
        lines.append(f"{r['head_dim']:4} {r['seqlen']:6} {r['mask']:22} {r['live']:5.3f} {r['tflops']:8.1f} {ratios}")
    for head_dim, seqlen in sorted({(r["head_dim"], r["seqlen"]) for r in rows}):
        cells = [r for r in rows if (r["head_dim"], r["seqlen"]) == (head_dim, seqlen)]
        means = " ".join(
            cell_text(mean_of(cells, key)) if key in ("flex", "v3", "sdpa") else " " * 6 for key in columns
        )
        tflops = cell_text(mean_of(cells, "tflops"), "8.1f")
        lines.append(f"{head_dim:4} {seqlen:6} {'geometric mean':22} {'':5} {tflops} {means}".rstrip())
    return lines


def bar_text(check):
    return f"{'at most ' if check.get('at_most') else ''}{check['bar']:.2f}"


def check_lines(found):
    return [
        f"{'PASS' if c['passed'] else 'FAIL'}  {c['name']}: {c['got']:.3f} (bar {bar_text(c)}) {c['detail']}".rstrip()
        for c in found
    ]
