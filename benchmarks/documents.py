# SPDX-License-Identifier: Apache-2.0
"""The figures of the documents, from receipts and benchmarks/data: docs/performance.md and docs/end-to-end.md as a
whole, and what other pages hold between `<!-- figures: NAME -->` and `<!-- end of figures -->`.

Every ratio of GPU kernels is speed, their time over ours with our plan's time counted as ours, unless a column says
otherwise. A kernel that is missing from a run has an empty cell or no column.
"""

import json
import re
import statistics
from pathlib import Path

import beside
import receipts
import verdict
from end_to_end import page
from receipts import short_length
from shapes import IN_WORDS, OPS, by_shape, chart_name, heads_text, is_grouped
from topics import PICTURES, cpu_section, figures_of, measurements, tests
from words import dims_text, listed, markdown_table, ms_text, paragraph, percent, range_text, size_text, speed_text

ROOT = Path(__file__).resolve().parent.parent
PEERS = "Other kernels"  # left out once receipts, or other machine code of ours, have overtaken all of them
SECTIONS = (
    "Overview",
    "Where ours is not first",
    "Forward",
    "Backward",
    PEERS,
    "Other measurements",
    "Tests on a GPU",
    "On the CPU",
)
MMA_SYNC = "Kernels of mma.sync"  # a section where they measured something
PAGE = "docs/performance.md"
COMMAND = "python benchmarks/report.py --docs"
MARKED = re.compile(r"(<!-- figures: (\w+) .*?-->\n).*?(<!-- end of figures -->)", re.S)
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
# Of verdict's rows.
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
    dates = sorted({run["date"] for run in runs})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    devices, versions = sorted({run["device"] for run in runs}), sorted({run["torch"] for run in runs})
    return f"{when}, {listed(devices)}, PyTorch {listed(versions)}"


# --- Cells -------------------------------------------------------------------------------------------


def of_receipts(found):
    """(cases with the run that each is of, {topic: receipt}) of {file name: receipt}."""
    cases = [
        {**case, "run": receipts.run_of(receipt, case), "marked": False}
        for receipt in found.values()
        for case in receipt["cases"]
    ]
    return cases, {receipt["what"]: receipt for receipt in found.values() if not receipt["cases"]}


def hopper(cases):
    return [case for case in cases if case["arch"] == receipts.HOPPER]


def slice_table(cases):
    """The masks of one shape."""
    rows = [verdict.row_of(case) for case in cases]
    peers = [key for key in COLUMNS if any(row[key] for row in rows)]
    otherwise = [key for key in OURS_OTHERWISE if any(row[key] for row in rows)]
    head = ["mask", "live tiles", "ms", "TFLOP/s", *(f"over {NAMES[COLUMNS[key]]}" for key in peers)]
    head += [OURS_OTHERWISE[key] for key in otherwise]
    lines = []
    for case, row in zip(cases, rows):
        of_ours = [f"{row[key]:.2f}" if row[key] else "" for key in otherwise]
        ratios = [speed_text(row[key]) for key in peers]
        lines.append([row["mask"], percent(row["live"]), ms_text(case["ours_ms"]), f"{row['tflops']:.0f}", *ratios])
        lines[-1] += of_ours
    means = [speed_text(verdict.mean_of(rows, key)) if sum(bool(r[key]) for r in rows) > 2 else "" for key in peers]
    mean = ["geometric mean", "", "", f"{verdict.mean_of(rows, 'tflops'):.0f}", *means, *[""] * len(otherwise)]
    return markdown_table(head, [*lines, mean] if len(rows) > 2 else lines)


def plain(cases, op):
    """{(head_dim, seqlen): rows} of the cells whose query heads have a key head each."""
    kept = [c for c in cases if c["op"] == op and not is_grouped(c) and c["head_dim"] == c["head_dim_v"]]
    return {(c[0]["head_dim"], c[0]["seqlen"]): list(map(verdict.row_of, c)) for c in by_shape(kept)}


def mean_text(rows, key, every):
    """The geometric mean over the masks that a kernel ran, and how many those are if not all."""
    count = sum(bool(row[key]) for row in rows)
    return speed_text(verdict.mean_of(rows, key)) + (f" ({count} masks)" if 0 < count < every else "")


def worst_text(rows, key):
    """The cell in which a kernel comes nearest to ours, or leads."""
    worst = min((row for row in rows if row[key]), key=lambda row: row[key], default=None)
    return f"{worst[key]:.2f}x ({worst['mask']})" if worst else ""


def dense_text(rows, key):
    """Full and causal."""
    found = {row["mask"]: row[key] for row in rows if row[key]}
    return " / ".join(speed_text(found[mask]) for mask in ("full", "causal") if mask in found)


def standing_table(cases, op):
    """A direction at each head dim and length."""
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


def builds_text(cases):
    """Which lengths of a direction and head dim ran other code of a kernel than others did; empty if none."""
    lengths = {}
    for case in cases:
        for name, text in case["kernel_hashes"].items():
            if not receipts.is_of_plan(name):
                lengths.setdefault(name, {}).setdefault(text, set()).add(case["seqlen"])
    kernels = {}
    for name, of_build in lengths.items():
        if len(of_build) > 1:
            groups = sorted(sorted(found) for found in of_build.values())
            apart = " apart from ".join(listed([short_length(n) for n in group]) for group in groups)
            kernels.setdefault(apart, []).append(f"`{name}`")
    said = "; ".join(f"{listed(sorted(names))}: {apart}" for apart, names in sorted(kernels.items()))
    return f"Lengths that ran different builds of a kernel: {said}." if said else ""


def means_table(cases):
    """Geometric means over FlashMask V3, of both directions and of both together."""
    means = {}
    for op in OPS:
        for shape, rows in plain(verdict.with_totals(cases), op).items():
            means.setdefault(shape, []).append(verdict.mean_of(rows, "v3"))
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
    """Whether a direction of a cell of data/peers.json was measured next to the attention kernels that the receipts are
    of: those of its length, else all of its head dim."""
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
    held, tables = json.loads(beside.FILE.read_text()), []
    for table in held["tables"]:
        cells = [with_what_counts(cell, held, cases) for cell in table["cells"]]
        tables.append({**table, "cells": [cell for cell in cells if cell]})
    return held, [table for table in tables if table["cells"]]


def from_receipts(cases):
    """{(mask, grouped, op, peer, (head_dim, head_dim_v), seqlen): their time over ours}."""
    found = {}
    for case in cases:
        row = verdict.row_of(case)
        at = (row["mask"], row["grouped"], row["op"])
        size = (row["head_dim"], row["head_dim_v"]), row["seqlen"]
        found |= {(*at, peer, *size): row[key] for key, peer in COLUMNS.items() if row[key]}
    return found


def from_data(tables):
    """The same of data/peers.json."""
    found = {}
    for cell in (cell for table in tables for cell in table["cells"]):
        for peer, pair in cell["over_ours"].items():
            for op, ratio in zip(("fwd", "bwd"), pair):
                if ratio and peer in NAMES:
                    dims = (cell["head_dim"], cell["head_dim"])
                    found[cell["mask"], "heads_kv" in cell, op, peer, dims, cell["seqlen"]] = ratio
    return found


def ahead(cases):
    """{(mask, grouped, op): {peer: {(dims, seqlen): ratio}}} where another kernel takes clearly less time. Of a
    cell that was measured twice, in receipts and in data/peers.json, the ratio less favourable to ours."""
    ratios, found = from_data(peer_tables(cases)[1]), {}
    for at, ratio in from_receipts(cases).items():
        ratios[at] = min(ratio, ratios.get(at, ratio))
    for (*of_mask, peer, dims, seqlen), ratio in sorted(ratios.items(), key=str):
        if ratio <= beside.CLEARLY:
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


def ahead_list(cases):
    """The same in a line for each direction, by kernel."""
    lines = {}
    for (mask, grouped, op), peers in ahead(cases).items():
        for peer, places in peers.items():
            said = f"{mask} {range_text(places.values())} ({places_text(places)})"
            lines.setdefault((grouped, op != "fwd"), {}).setdefault(peer_name(peer, mask), []).append(said)
    return [
        f"- {('Forward', 'Backward')[backward]}{', grouped heads' * grouped}. "
        + "; ".join(f"{name}: {', '.join(said)}" for name, said in peers.items())
        + "."
        for (grouped, backward), peers in sorted(lines.items())
    ]


def left_out_text(cases):
    """Which kernels that no receipt has are left out of some cells, as ours there have changed since."""
    held, found = json.loads(beside.FILE.read_text()), {}
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


# --- docs/performance.md -----------------------------------------------------------------------------


def heading(cases, sections):
    links = " · ".join(f"[{name}](#{re.sub('[^a-z -]', '', name.lower()).replace(' ', '-')})" for name in sections)
    return [
        f"<!-- Written by `{COMMAND}`: edits here are lost. -->",
        "# Performance",
        "",
        *paragraph(
            "Every figure on this page is printed from files in the repository: receipts of runs on one GPU at a time "
            "in [benchmarks/results](../benchmarks/results), and what was measured without a receipt in "
            f"[benchmarks/data](../benchmarks/data). `{COMMAND}` writes the page. "
            "[How it is measured](../benchmarks/README.md)."
        ),
        *paragraph(f"Contents: {links}"),
        *paragraph(
            "A GPU case has 131,072 tokens (batch x seqlen) with a hidden size of 4096 (heads x head dim), bfloat16. "
            "TFLOP/s count the 128x128 tiles that hold a visible element; *live* is their share. Ratios such as 1.10x "
            "are speed, the other kernel's time over ours, with the time of our plan counted as ours. "
            f"GPU cells: {runs_text(cases)}. FlashMask V3 ran beside ours where it took part in the run; elsewhere its "
            "ratio is from [flashmask_v3.json](../benchmarks/data/flashmask_v3.json), measured side by side with the "
            "same kernels."
        ),
    ]


def overview(cases):
    lines = ["## Overview", ""]
    for op in ("fwd", "bwd"):
        lines += [f"{IN_WORDS[op]}: geometric mean over the masks that the other kernel ran, and single cells.", ""]
        lines += [*standing_table(cases, op), ""]
        if said := builds_text([case for case in cases if case["op"] == op]):
            lines += paragraph(said)
    lines += ["Geometric means over FlashMask V3, of each direction and of both together:", "", *means_table(cases), ""]
    return lines


def not_first(cases):
    return [
        "## Where ours is not first",
        "",
        *paragraph(
            f"Cells in which another kernel is clearly faster, below {beside.CLEARLY} of our time. Of a cell that was "
            "measured twice, in a receipt and in [peers.json](../benchmarks/data/peers.json), the ratio less "
            "favourable to ours stands here."
        ),
        *ahead_table(cases),
        "",
        *paragraph(
            "The varlen kernels begin their tiles where a document begins. Ours begin at multiples of the tile size, "
            "so that a document has partial tiles at both ends."
        ),
        *(paragraph(said) if (said := left_out_text(cases)) else []),
        *paragraph(slower_text(cases)),
    ]


def slower_cells(cases):
    """[(grouped, deterministic mode's time over the fast one's, mask, head_dim, seqlen, head_dim_v)] of the
    backward."""
    rows = [row for row in map(verdict.row_of, cases) if row["op"] == "bwd" and row["deterministic"]]
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


def direction(cases, op):
    return [f"## {IN_WORDS[op]}", "", *shapes(cases, op)]


def shapes(cases, op, kernels=""):
    """A picture and a table of each shape."""
    lines = []
    for alike in by_shape([case for case in cases if case["op"] == op]):
        first = alike[0]
        grouped = f", {heads_text(first)}" * is_grouped(first)
        size = size_text(first["head_dim"], first["seqlen"], first["head_dim_v"])
        lines += [f"### {kernels}{IN_WORDS[op]}, {size}{grouped}", ""]
        lines += [f"![{IN_WORDS[op]} by mask]({PICTURES}/gpu-{chart_name(first)}.svg)", "", *slice_table(alike), ""]
    return lines


def mma_sync(cases):
    """What the kernels of mma.sync measured, if anything."""
    if not cases:
        return []
    lines = [f"## {MMA_SYNC}", "", f"[The kernels](kernels/sm80.md). Cells: {runs_text(cases)}.", ""]
    for arch in sorted({case["arch"] for case in cases}):
        own = [case for case in cases if case["arch"] == arch]
        for op in ("fwd", "bwd"):
            found = verdict.check_lines(verdict.checks(verdict.rows_of(own, op), op))
            lines += [f"Bars, {DIRECTIONS[op]}:", "", "```", *found, "```", ""] if found else []
            lines += shapes(own, op, f"{arch}, ")
    return lines


def both_directions(cases):
    totals = by_shape([case for case in verdict.with_totals(cases) if case["op"] == "total"])
    links = [
        f"[{size_text(c['head_dim'], c['seqlen'], c['head_dim_v'])}{', grouped' * is_grouped(c)}]"
        f"({PICTURES}/gpu-{chart_name(c)}.svg)"
        for c, *_ in totals
    ]
    return paragraph(f"Forward and backward together, as pictures: {', '.join(links)}.") if links else []


def peer_section(cases):
    held, tables = peer_tables(cases)
    lines = [f"## {PEERS}", ""]
    for title, about, head, rows in (beside.table_of(table, held) for table in tables):
        lines += [f"### {title}", "", *paragraph(about), *markdown_table(head, rows), ""]
    source = (
        f"Measured side by side, without a receipt ([peers.json](../benchmarks/data/peers.json)): {held['source']}."
    )
    return [*lines, source, ""] if tables else []


# --- The page -------------------------------------------------------------------------------------


def performance(cases, topics):
    """docs/performance.md."""
    others = [case for case in cases if case["arch"] != receipts.HOPPER]
    cases = hopper(cases)
    peers = peer_section(cases)
    sections = [name for name in SECTIONS if peers or name != PEERS]
    lines = [
        *heading(cases, [*sections, *[MMA_SYNC] * bool(others)]),
        *overview(cases),
        *not_first(cases),
        *direction(cases, "fwd"),
        *direction(cases, "bwd"),
        *both_directions(cases),
        *peers,
        *measurements(topics),
        *tests(topics),
        *cpu_section(),
        "",
        *mma_sync(others),
    ]
    return "\n".join(lines) + "\n"


# --- Parts of other pages ----------------------------------------------------------------------------


def summary(cases, topics):
    """README's table: 8K, both head dims and directions."""
    cases = hopper(cases)
    sides = [(d, op, plain(cases, op).get((d, 8192), [])) for d in (128, 64) for op in ("fwd", "bwd")]
    sides = [side for side in sides if side[2]]
    rows = []
    for name, show, key in (
        ("FlexAttention", mean_text, "flex"),
        ("FlashMask V3", mean_text, "v3"),
        ("FlashAttention-3, full / causal", dense_text, "fa3"),
        ("cuDNN, full / causal", dense_text, "cudnn"),
    ):
        found = [show(side, key, len(side)) if show is mean_text else show(side, key) for _, _, side in sides]
        rows += [[name, *found]] if any(found) else []
    of_runs = [case for case in cases if case["seqlen"] == 8192 and not is_grouped(case)]
    return [
        *paragraph(
            f"Speed over other kernels at 8K tokens, bfloat16, geometric mean over twelve masks ({runs_text(of_runs)}):"
        ),
        *markdown_table(["", *(f"d = {d}, {DIRECTIONS[op]}" for d, op, _ in sides)], rows),
        "",
        "Ours is not first everywhere. These take less time, given as their time over ours:",
        "",
        *ahead_list(cases),
        *([f"- {said}"] if (said := left_out_text(cases)) else []),
        "",
        *paragraph(slower_text(cases))[:-1],
    ]


def training(cases, topics):
    """docs/training.md's table."""
    found = figures_of(topics, "training")
    if not found:
        return []
    rows = []
    for task, of_task in found["tasks"].items():
        first, last = (of_task["losses"]["skipping"][n] for n in (0, -1))
        least, free = of_task["tiles"]["least_empty_share"], of_task["losses"]["nondeterministic"][-1]
        seconds = [f"{of_task['seconds'][name]:.1f} s" for name in ("skipping", "dense")]
        rows.append([task, percent(least), f"{first:.4f}, {last:.4f}", f"{free:.4f}", *seconds])
    head = ["", "empty tiles, in the batch with fewest", "loss, first and last step", "nondeterministic, last step"]
    return [
        f"{found['settings']['steps']} steps of each task, measured on {topics['training']['date']}:",
        "",
        *markdown_table([*head, "skipping", "dense"], rows),
    ]


def context_parallel(cases, topics):
    """docs/context-parallel.md's table."""
    found = figures_of(topics, "context-parallel")
    if not found:
        return []
    held, run = found["context_parallel"], topics["context-parallel"]
    rows = []
    for cell in held["cells"]:
        ms = {name: times["forward_ms"] + times["backward_ms"] for name, times in cell["times"].items()}
        ours = ms[cell["auto"]]
        over = [speed_text(ms[name] / ours) for name in ("one", "all gather")]
        travels = cell["received_keys"] / (cell["seqlen"] * cell["batch"])
        fixed = " / ".join(f"{cell[f'fixed_{phase}_ms']:.2f}" for phase in ("forward", "backward"))
        off = percent(cell["predicted_ms"][cell["auto"]] / ours - 1)
        shape = [f"{short_length(cell['seqlen'])} x {cell['batch']}", cell["mask"]]
        shape += [f"{cell['heads']} / {cell['heads_kv']}", percent(travels)]
        rows.append([*shape, ms_text(ms["one"]), ms_text(ours), *over, fixed, off])
    head = ["tokens", "mask", "heads", "keys that travel", "one, ms", "both, ms", "over one", "over an all-gather"]
    return [
        *paragraph(
            f"Forward and backward on {held['ranks']} GPUs, d = 128 ({run['date']}, {run['device']}; a link takes in "
            f"{held['link_gb_s']:.0f} GB/s): time on one and on both, and speed over an all-gather of all keys that is "
            "waited for, on the same rows. Fixed: what is neither kernels nor bytes at the link's rate, forward and "
            "backward, in ms. Last: how far the model's time, with this run's rates, is from the measured one."
        ),
        *markdown_table([*head, "fixed", "predicted"], rows),
    ]


PARTS = {"summary": summary, "training": training, "context_parallel": context_parallel}
PAGES = ("README.md", "docs/training.md", "docs/context-parallel.md")


def with_figures(text, cases, topics):
    """A page with its marked parts written anew."""

    def part(match):
        return match[1] + "\n".join(PARTS[match[2]](cases, topics)) + "\n" + match[3]

    return MARKED.sub(part, text)


def pages(found):
    """{path: text} of all pages with figures, as they have to be with {file name: receipt}."""
    cases, topics = of_receipts(found)
    marked = {name: with_figures((ROOT / name).read_text(encoding="utf-8"), cases, topics) for name in PAGES}
    whole = {PAGE: performance(cases, topics), page.PAGE: page.page(hopper(cases), topics, COMMAND)}
    return {**whole, **marked}
