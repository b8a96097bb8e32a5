# SPDX-License-Identifier: Apache-2.0
"""How our kernels stand beside others, from the receipts' cells and data/peers.json: means, and where one is faster.

Every ratio is speed, their time over ours with our plan's time counted as ours, unless a column says otherwise. A
kernel that is missing from a run has an empty cell or no column.
"""

import json
import statistics

from benchmarks import cell_bars, receipts
from benchmarks.receipts import short_length
from benchmarks.report import unreceipted_peers
from benchmarks.report.markdown import dims_text, listed, markdown_table, range_text, size_text, span_text, speed_text
from benchmarks.report.shapes import OPS, by_shape, is_grouped

NAMES = {  # of peers
    "flex": "FlexAttention",
    "flashmask_v3": "FlashMask V3",
    "flashmask_v4": "FlashMask V4",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "fa4_block_sparse": "FlashAttention-4 (mask_mod)",
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2",
    "sdpa": "SDPA with a dense mask",
}
# Columns of cell_bars.row_of, and the peers they name.
COLUMNS = {"flex": "flex", "v3": "flashmask_v3", "fa3": "fa3", "fa2": "fa2", "cudnn": "cudnn", "sdpa": "sdpa"}
OURS_OTHERWISE = {"deterministic": "deterministic over fast", receipts.SMALL: "tiles of 99 KiB over those of 163"}
PACKED = ("document", "causal_document")  # masks for which FlashAttention runs as packed sequences
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "total": "both"}


# --- Words ---------------------------------------------------------------------------------------


def peer_name(peer, mask):
    """A kernel by the interface that the mask is given to."""
    return NAMES[peer] + " (varlen)" * (peer in ("fa3", "fa4") and mask in PACKED)


def runs_text(cases):
    """When, where and with what some cases were measured."""
    runs = [case["run"] for case in cases]
    if not runs:
        return "none"
    when = span_text(sorted({run["date"] for run in runs}))
    devices, versions = sorted({run["device"] for run in runs}), sorted({run["torch"] for run in runs})
    return f"{when}, {listed(devices)}, PyTorch {listed(versions)}"


def dated_name(cases, peer):
    """A peer's name, with the dates and devices of its ratios that are not of the cases' own runs."""
    dates, devices = cell_bars.recorded(cases, peer)
    return f"{NAMES[peer]} ({span_text(dates)}, {listed(devices)})" if dates else NAMES[peer]


def recorded_names(cases, peers=NAMES):
    """Dated names of the peers whose ratios are in part not of the cases' own runs."""
    return [dated_name(cases, peer) for peer in peers if any(cell_bars.recorded(cases, peer))]


def recorded_text(cases, peers=NAMES):
    """Names them; empty if all ratios are of the cases' own runs."""
    names = recorded_names(cases, peers)
    return f"Some have older ratios over {listed(names)}." if names else ""


# --- Cells -------------------------------------------------------------------------------------------


def hopper(cases):
    return [case for case in cases if case["arch"] == receipts.HOPPER]


def plain(cases, op):
    """{(head_dim, seqlen): rows} of the cells whose query heads have a key head each."""
    kept = [c for c in cases if c["op"] == op and not is_grouped(c) and c["head_dim"] == c["head_dim_v"]]
    return {(c[0]["head_dim"], c[0]["seqlen"]): list(map(cell_bars.row_of, c)) for c in by_shape(kept)}


def mean_text(rows, key, every):
    """The geometric mean over the masks that a kernel ran, if most, and how many they are if not all."""
    if not cell_bars.most_have(rows, key):
        return ""
    count = sum(bool(row[key]) for row in rows)
    return speed_text(cell_bars.mean_of(rows, key)) + (f" ({count} masks)" if 0 < count < every else "")


def worst_text(rows, key):
    """The cell in which a kernel comes nearest to ours, or leads, of most masks."""
    if not cell_bars.most_have(rows, key):
        return ""
    worst = min((row for row in rows if row[key]), key=lambda row: row[key])
    return f"{worst[key]:.2f}x ({worst['mask']})"


def dense_text(rows, key):
    """Speeds of the full and the causal mask."""
    found = {row["mask"]: row[key] for row in rows if row[key]}
    return " / ".join(speed_text(found[mask]) for mask in ("full", "causal") if mask in found)


def standing_table(cases, op):
    """A row for each head dim and length of a direction."""
    rows = []
    for (head_dim, seqlen), found in plain(cases, op).items():
        slower = [row["deterministic"] for row in found if row["deterministic"]]
        rows.append(
            [
                size_text(head_dim, seqlen),
                mean_text(found, "flex", len(found)),
                mean_text(found, "v3", len(found)),
                worst_text(found, "v3"),
                dense_text(found, "fa3"),
                dense_text(found, "cudnn"),
                *[f"{statistics.median(slower):.2f}, {max(slower):.2f}" if slower else ""] * (op == "bwd"),
            ]
        )
    head = ["", "FlexAttention", "FlashMask V3", "V3, worst cell", "FlashAttention-3, full / causal"]
    head += ["cuDNN, full / causal", *["deterministic over fast, median and worst"] * (op == "bwd")]
    used = [n for n in range(len(head)) if n == 0 or any(row[n] for row in rows)]
    return markdown_table([head[n] for n in used], [[row[n] for n in used] for row in rows])


def without_steps(names):
    """Kernels in code marks, without those of a call that another one of them names: its steps and variants."""
    return [f"`{name}`" for name in sorted(names) if not any(name.startswith(f"{other}.") for other in names)]


def builds_text(cases):
    """Which lengths of a head dim ran other code of a kernel than others did; empty if none."""
    lengths = {}
    for case in cases:
        for name, text in case["kernel_hashes"].items():
            if ".dv" in name:  # not of a plan and not of all head dims
                lengths.setdefault(name, {}).setdefault(text, set()).add(case["seqlen"])
    kernels = {}
    for name, of_build in lengths.items():
        if len(of_build) > 1:
            groups = sorted(sorted(found) for found in of_build.values())
            apart = " apart from ".join(listed([short_length(n) for n in group]) for group in groups)
            kernels.setdefault(apart, []).append(name)
    said = "; ".join(f"{listed(without_steps(names))}: {apart}" for apart, names in sorted(kernels.items()))
    return f"Lengths that ran different builds of a kernel: {said}." if said else ""


def means_table(cases):
    """Geometric means over FlashMask V3, of both directions and of both together."""
    means = {}
    for op in OPS:
        for shape, rows in plain(cell_bars.with_totals(cases), op).items():
            if cell_bars.most_have(rows, "v3"):
                means.setdefault(shape, []).append(cell_bars.mean_of(rows, "v3"))
    complete = [(size_text(*shape), found) for shape, found in means.items() if len(found) == 3 and all(found)]
    rows = [[place, *map(speed_text, found)] for place, found in complete]
    return markdown_table(["over FlashMask V3", "forward", "backward", "both"], rows)


# --- Where another kernel is faster ------------------------------------------------------------------


def measured_hashes(cases):
    """{kernel: hashes} of all cells."""
    found = {}
    for case in cases:
        for name, text in case["kernel_hashes"].items():
            found.setdefault(name, set()).add(text)
    return found


def counts(cell, op, held, cases):
    """True if a direction of a cell of data/peers.json was measured next to the attention kernels of the receipts: the
    receipts of its length, else all of its head dim."""
    of_op = [case for case in cases if (case["op"], case["head_dim"]) == (op, cell["head_dim"])]
    measured = measured_hashes([case for case in of_op if case["seqlen"] == cell["seqlen"]] or of_op)
    kernels = f".{op}.bf16.d{cell['head_dim']}."
    of_cell = {name: text for name, text in held["kernel_hashes"].items() if kernels in name}
    return all(measured.get(name, {text}) == {text} for name, text in of_cell.items())


def with_what_counts(cell, held, cases):
    """A cell of data/peers.json without the directions that do not count; None if neither does."""
    of_op = [counts(cell, op, held, cases) for op in ("fwd", "bwd")]
    if all(of_op):
        return {**cell, "marked": False}
    pairs = {
        peer: [ratio if counted else None for ratio, counted in zip(pair, of_op)]
        for peer, pair in cell["over_ours"].items()
    }
    pairs = {peer: pair for peer, pair in pairs.items() if any(pair)}
    kept = {name: value for name, value in cell.items() if name != "best_of_both"}
    return {**kept, "over_ours": pairs, "marked": False} if pairs else None


def peer_tables(cases):
    """(data/peers.json, its tables with the cells that count)."""
    held, tables = json.loads(unreceipted_peers.FILE.read_text()), []
    for table in held["tables"]:
        cells = [with_what_counts(cell, held, cases) for cell in table["cells"]]
        tables.append({**table, "cells": [cell for cell in cells if cell]})
    return held, [table for table in tables if table["cells"]]


def from_receipts(cases):
    """{(mask, grouped, op, peer, (head_dim, head_dim_v), seqlen): their time over ours}."""
    found = {}
    for case in cases:
        row = cell_bars.row_of(case)
        at = (row["mask"], row["grouped"], row["op"])
        size = (row["head_dim"], row["head_dim_v"]), row["seqlen"]
        found |= {(*at, peer, *size): row[key] for key, peer in COLUMNS.items() if row[key]}
    return found


def from_data(tables):
    """The ratios of data/peers.json, keyed as from_receipts keys them."""
    found = {}
    for cell in (cell for table in tables for cell in table["cells"]):
        for peer, pair in cell["over_ours"].items():
            for op, ratio in zip(("fwd", "bwd"), pair):
                if ratio and peer in NAMES:
                    dims = (cell["head_dim"], cell["head_dim"])
                    found[cell["mask"], "heads_kv" in cell, op, peer, dims, cell["seqlen"]] = ratio
    return found


def ahead(cases):
    """{(mask, grouped, op): {peer: {(dims, seqlen): ratio}}} where another kernel takes clearly less time. A cell
    measured twice, in receipts and in data/peers.json, has the ratio less favourable to ours."""
    ratios, found = from_data(peer_tables(cases)[1]), {}
    for at, ratio in from_receipts(cases).items():
        ratios[at] = min(ratio, ratios.get(at, ratio))
    for (*of_mask, peer, dims, seqlen), ratio in sorted(ratios.items(), key=str):
        if ratio <= unreceipted_peers.CLEARLY:
            found.setdefault(tuple(of_mask), {}).setdefault(peer, {})[dims, seqlen] = ratio
    return found


def places_text(places):
    """(dims, seqlen) of one mask and direction, in words."""
    lengths = {}
    for (head_dim, head_dim_v), seqlen in sorted(places, key=lambda at: (-at[0][0], -at[0][1], at[1])):
        lengths.setdefault(dims_text(head_dim, head_dim_v), []).append(short_length(seqlen))
    return "; ".join(f"{dims}, {listed(found)}" for dims, found in lengths.items())


def ahead_table(cases):
    """A row for each mask and direction."""
    rows = []
    in_order = sorted(ahead(cases).items(), key=lambda item: (item[0][1], item[0][2] == "bwd"))
    for (mask, grouped, op), peers in in_order:
        faster = [
            f"{peer_name(peer, mask)} {range_text(places.values())} ({places_text(places)})"
            for peer, places in sorted(peers.items(), key=lambda item: min(item[1].values()))
        ]
        rows.append([f"{mask}{', grouped heads' * grouped}, {DIRECTIONS[op]}", "; ".join(faster)])
    return markdown_table(["mask, direction", "faster kernel: its time over ours"], rows)


def ahead_text(cases):
    """Which kernels are faster in some cells, and their time there over ours; empty if none is."""
    found = {}
    for (mask, *_), peers in ahead(cases).items():
        for peer, places in peers.items():
            found.setdefault(peer_name(peer, mask), []).extend(places.values())
    if not found:
        return ""
    names = sorted(found, key=lambda name: min(found[name]))
    return (
        f"{listed(names)} take {range_text([x for ratios in found.values() for x in ratios])} of our time in some cells"
    )


def left_out_text(cases):
    """Which kernels that no receipt has are left out of some cells, as ours there have changed since."""
    held, found = json.loads(unreceipted_peers.FILE.read_text()), {}
    for cell in (cell for table in held["tables"] for cell in table["cells"]):
        if not all(counts(cell, op, held, cases) for op in ("fwd", "bwd")):
            for peer in (NAMES.keys() - set(COLUMNS.values())) & cell["over_ours"].keys():
                found.setdefault(NAMES[peer], set()).add(cell["head_dim"])
    if not found:
        return ""
    dims = listed([str(d) for d in sorted(set().union(*found.values()))])
    return (
        f"{listed(sorted(found))} were measured in earlier runs alone. Where a kernel of ours has changed since, at "
        f"d = {dims}, they are not compared here."
    )


# --- The deterministic mode -----------------------------------------------------------------------------


def slower_cells(cases):
    """[(grouped, deterministic mode's time over the fast one's, mask, head_dim, seqlen, head_dim_v)] of the
    backward."""
    rows = [row for row in map(cell_bars.row_of, cases) if row["op"] == "bwd" and row["deterministic"]]
    found = {(r["grouped"], r["mask"], r["head_dim"], r["seqlen"], r["head_dim_v"]): r["deterministic"] for r in rows}
    for cell in (cell for table in peer_tables(cases)[1] for cell in table["cells"]):
        at = ("heads_kv" in cell, cell["mask"], cell["head_dim"], cell["seqlen"], cell["head_dim"])
        if "deterministic" in cell["over_ours"]:
            found[at] = max(cell["over_ours"]["deterministic"][1], found.get(at, 0))
    return [(grouped, ratio, *at) for (grouped, *at), ratio in found.items()]


def slower_text(cases):
    found = slower_cells(cases)
    plain_cells, grouped = ([cell for cell in found if cell[0] == flag] for flag in (False, True))
    words = []
    for cells, of_which in ((plain_cells, "time"), (grouped, "time with grouped heads")):
        if cells:
            _, worst, mask, *size = max(cells, key=lambda cell: cell[1])
            middle = statistics.median(cell[1] for cell in cells)
            of_worst = f"{worst:.2f} in the worst ({mask}, {size_text(*size)})"
            words.append(f"{middle:.2f} of the fast one's {of_which} in the median cell and {of_worst}")
    return f"The deterministic backward takes {'; '.join(words)}." if words else ""
