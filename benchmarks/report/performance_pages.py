# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md, which is read, and docs/performance/, which has every table: a page for each head dim, one for
each other kind of measurement, and all cells as CSV."""

import csv
import io

from benchmarks import cell_bars, receipts
from benchmarks.report import decode_page, missed_bars, prefill_section, sections, unreceipted_peers
from benchmarks.report.comparison import (
    COLUMNS,
    DIRECTIONS,
    NAMES,
    OURS_OTHERWISE,
    ahead_table,
    builds_text,
    left_out_text,
    means_table,
    peer_tables,
    recorded_names,
    recorded_text,
    runs_text,
    slower_text,
    standing_table,
)
from benchmarks.report.markdown import (
    dims_text,
    item,
    listed,
    markdown_table,
    ms_text,
    paragraph,
    percent,
    size_text,
    speed_text,
)
from benchmarks.report.sections import PICTURES
from benchmarks.report.shapes import IN_WORDS, by_shape, chart_name, heads_text, is_grouped

PAGE, FOLDER, INDEX = "docs/performance.md", "docs/performance", "docs/performance/README.md"
CELLS = "cells.csv"
COMMAND = "python -m benchmarks.report --docs"
WRITTEN = f"<!-- Written by `{COMMAND}`: edits here are lost. -->"
MMA_SYNC, PEERS, OTHERS, DECODE = "mma-sync.md", "other-kernels.md", "measurements.md", "decode.md"
V3_LARGEST = 256  # the largest head dim that FlashMask V3 has kernels of


# --- Tables of cells ---------------------------------------------------------------------------------


def slice_table(cases):
    """The masks of one shape."""
    rows = [cell_bars.row_of(case) for case in cases]
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
    means = [speed_text(cell_bars.mean_of(rows, key)) if sum(bool(r[key]) for r in rows) > 2 else "" for key in peers]
    mean = ["geometric mean", "", "", f"{cell_bars.mean_of(rows, 'tflops'):.0f}", *means, *[""] * len(otherwise)]
    return markdown_table(head, [*lines, mean] if len(rows) > 2 else lines)


def bench_command(case):
    """The command that measures the cells of a shape."""
    kernels = "" if case["arch"] == receipts.HOPPER else f"FLASHMASK_KERNELS={case['arch']} "
    values = f" --head-dim-v {case['head_dim_v']}" * (case["head_dim_v"] != case["head_dim"])
    grouped = f" --heads-kv {case['heads_kv']}" * is_grouped(case)
    sizes = f"--head-dim {case['head_dim']}{values} --seqlen {case['seqlen']}{grouped}"
    return f"{kernels}scripts/gpu-check bench --op {case['op']} {sizes}"


def shapes(cases, kernels=""):
    """A picture and a table of each shape."""
    lines = []
    for alike in by_shape(cases):
        first = alike[0]
        direction = IN_WORDS[first["op"]]
        grouped = f", {heads_text(first)}" * is_grouped(first)
        size = size_text(first["head_dim"], first["seqlen"], first["head_dim_v"])
        lines += [f"## {kernels}{direction}, {size}{grouped}", "", f"`{bench_command(first)}`", ""]
        lines += [f"![{direction} by mask]({PICTURES}/gpu-{chart_name(first)}.svg)", "", *slice_table(alike), ""]
    return lines


def both_directions(cases):
    totals = by_shape([case for case in cell_bars.with_totals(cases) if case["op"] == "total"])
    links = [
        f"[{size_text(c['head_dim'], c['seqlen'], c['head_dim_v'])}{', grouped' * is_grouped(c)}]"
        f"({PICTURES}/gpu-{chart_name(c)}.svg)"
        for c, *_ in totals
    ]
    return paragraph(f"Forward and backward together, as pictures: {', '.join(links)}.") if links else []


def cells_csv(cases):
    """Every cell, Hopper's kernels first; ratios are speed over the kernel that the column names."""
    peers, sizes = list(COLUMNS), ["head_dim", "head_dim_v", "seqlen", "batch", "heads", "heads_kv", "dtype"]
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(
        ["kernels", "op", *sizes, "mask", "live", "ms", "plan_ms", "tflops", *(f"over_{COLUMNS[p]}" for p in peers)]
        + ["deterministic_over_fast", "small_tiles_over_large", "device", "date", "torch"]
    )
    for case in (case for alike in by_shape(cases) for case in alike):
        row, run = cell_bars.row_of(case), case["run"]
        figures = [case["live"], case["ours_ms"], case["plan_ms"], *(row[key] for key in ("tflops", *peers))]
        figures += [row[key] for key in OURS_OTHERWISE]
        lines.writerow(
            [case["arch"], case["op"], *(case[name] for name in sizes), case["mask"]]
            + ["" if figure is None else f"{figure:.4g}" for figure in figures]
            + [run["device"], run["date"], run["torch"]]
        )
    return out.getvalue()


# --- The page that is read ---------------------------------------------------------------------------


def head_dims(cases):
    """[(head_dim, head_dim_v)], the largest first."""
    return sorted({(case["head_dim"], case["head_dim_v"]) for case in cases}, reverse=True)


def file_of(head_dim, head_dim_v):
    return f"d{head_dim}.md" if head_dim == head_dim_v else f"d{head_dim}-dv{head_dim_v}.md"


def heading(cases):
    by_head_dim = ", ".join(f"[{dims_text(*dims)}](performance/{file_of(*dims)})" for dims in head_dims(cases))
    return [
        WRITTEN,
        "# Performance",
        "",
        *paragraph(
            "This page says how fast the kernels are beside others, where they are not the fastest, and how that was "
            "measured. Each figure is printed from a receipt of a run on a GPU in "
            "[benchmarks/results](../benchmarks/results), or, where there is no receipt, from "
            f"[benchmarks/data](../benchmarks/data); `{COMMAND}` prints this page and the tables behind it."
        ),
        *paragraph(
            "Contents: [Overview](#overview) · [Where ours is not first](#where-ours-is-not-first) · "
            "[Bars that were missed](#bars-that-were-missed) · [Method](#method) · "
            "[What was not measured](#what-was-not-measured)"
        ),
        *paragraph(
            f"[Every table](performance/README.md), mask by mask: {by_head_dim or 'no cell yet'}; [block masks, "
            f"features, plans, small problems](performance/{OTHERS}); [the CPU](performance/cpu.md)."
        ),
    ]


def overview(cases):
    lines = [
        "## Overview",
        "",
        *paragraph(
            f"bfloat16, {runs_text(cases)}. Ratios such as 1.10x are speed: the other kernel's time over ours, with "
            "the time of our plan counted as ours. `scripts/gpu-check bench --op OP --head-dim D --seqlen S` measures "
            "the cells of a row."
        ),
    ]
    for op in ("fwd", "bwd"):
        lines += [f"{IN_WORDS[op]}: geometric mean over the masks that the other kernel ran, and single cells.", ""]
        lines += [*standing_table(cases, op), ""]
    lines += paragraph(builds_text(cases)) if builds_text(cases) else []
    lines += ["Geometric means over FlashMask V3, of each direction and of both together:", "", *means_table(cases), ""]
    return lines


def not_first(cases, others, topics):
    said = [left_out_text(cases), slower_text(cases), mma_sync_text(others)]
    said += [sections.features_text(topics)]
    said += map(sections.overlap_text, missed_bars.context_parallel_runs(topics).values())
    return [
        "## Where ours is not first",
        "",
        *paragraph(
            f"Cells in which another kernel is clearly faster, below {unreceipted_peers.CLEARLY} of our time. Of a "
            "cell that was measured twice, in a receipt and in [peers.json](../benchmarks/data/peers.json), the ratio "
            "less favourable to ours stands here."
        ),
        *ahead_table(cases),
        "",
        *paragraph(
            "The varlen kernels begin their tiles where a document begins. Ours begin at multiples of the tile size, "
            "so that a document has partial tiles at both ends."
        ),
        *(line for text in said if text for line in paragraph(text)),
    ]


def mma_sync_text(cases):
    """How the kernels of mma.sync stand beside others of the same device."""
    words = []
    for op in ("fwd", "bwd"):
        rows = [row for row in cell_bars.rows_of(cases, op) if not row["grouped"]]
        of_masks = [row for row in rows if row["head_dim"] in cell_bars.MMA_SYNC_MASK_DIMS]
        shares = [
            f"{cell_bars.mean_of(of, key):.2f} of {NAMES[key]}'s in {count} cells"
            for key, of in (("flex", of_masks), ("fa2", rows))
            if (count := sum(row[key] is not None for row in of))
        ]
        words += [f"{DIRECTIONS[op]}, {listed(shares)}"] if shares else []
    if not words:
        return ""
    return (
        f"[The kernels of mma.sync](performance/{MMA_SYNC}), for GPUs from Ampere on, were measured on a Hopper GPU, "
        "where FlexAttention compiles to faster instructions that they do without. Their speed, by geometric mean "
        f"(over FlexAttention at d = {listed([str(d) for d in cell_bars.MMA_SYNC_MASK_DIMS])}): "
        f"{'; '.join(words)}."
    )


def missed(cases, topics):
    pages = {
        missed_bars.HOPPER_KERNELS: "#overview",
        missed_bars.MMA_SYNC_KERNELS: f"performance/{MMA_SYNC}",
        missed_bars.ELEMENT_MASKS: f"performance/{OTHERS}#element-masks",
        missed_bars.BLOCK_MASKS: f"performance/{OTHERS}#block-masks",
        missed_bars.FEATURES: f"performance/{OTHERS}#sinks-softcap-and-dropout",
        missed_bars.PADDING: f"performance/{OTHERS}#head-dims-by-padding",
        missed_bars.SMALL: f"performance/{OTHERS}#small-problems",
        missed_bars.FIRST_CALL: f"performance/{OTHERS}#first-call",
        missed_bars.HOST_TIME: f"performance/{OTHERS}#host-time-of-a-pytorch-call",
        missed_bars.DECODE: f"performance/{DECODE}",
        missed_bars.DECODE_MMA_SYNC: f"performance/{DECODE}",
        missed_bars.PREFILL: f"performance/{DECODE}",
        missed_bars.FORESTS: f"performance/{DECODE}",
        **dict.fromkeys(missed_bars.SEVERAL_GPUS.values(), "context-parallel.md#which-way"),
        missed_bars.END_TO_END: "end-to-end.md#what-was-to-be-reached",
    }
    found = missed_bars.of_all(cases, topics, sections.of_suites(topics, "torch_overhead"))
    about = (
        "A bar is a figure that was set before the measurement; the command that measures prints each with PASS or "
        "FAIL. Ratios over other kernels are speed."
    )
    return [
        "## Bars that were missed",
        "",
        *paragraph(f"{about} {missed_bars.counts_text(found)}"),
        *missed_bars.table(found, pages),
        "",
    ]


METHOD = (
    "A case of the kernel benchmark is the FlashMask paper's: 131,072 tokens (batch x seqlen), a hidden size of 4096 "
    "(heads x head dim), bfloat16, standard normal values, and one of twelve masks for the whole batch.",
    "In each cell our result is first checked against float64, and the other kernels' against ours. A cell that fails "
    "is not timed.",
    "Then all kernels take turns, in another order each round, in one process on one GPU. Times are "
    "medians over the rounds, ratios medians of the ratios within a round, so that a card that slows down as it warms "
    "does not favour anyone. Compare ratios, not times, between runs.",
    "TFLOP/s count the 128 x 128 tiles that hold a visible element; *live* is their share. Ours counts the plan.",
    "A kernel that took no part in a cell's last run keeps its last ratio there, measured side by side with our "
    "kernels of a date and on a GPU that the page of the head dim and the receipt name.",
    "A receipt names the machine code that it measured. When a kernel changes, the tests name the cells that no longer "
    "stand for it ([the rule](../benchmarks/README.md#receipts)).",
)


def method():
    lines = [line for text in METHOD for line in item(text)]
    more = "[Benchmarks](../benchmarks/README.md) has every contender, command and bar."
    return ["## Method", "", *lines, "", *paragraph(more)]


def without_v3(cases):
    """[(head_dim, head_dim_v)] of which no cell was measured beside FlashMask V3."""
    with_it = {(case["head_dim"], case["head_dim_v"]) for case in cases if cell_bars.row_of(case)["v3"]}
    return [dims for dims in head_dims(cases) if dims not in with_it]


def without_v3_text(cases):
    """Names the head dims without a measured FlashMask V3; empty if there are none."""
    dims = without_v3(cases)
    if not dims:
        return ""
    told = f"FlashMask V3 was not measured at {listed([dims_text(*pair) for pair in dims])}"
    largest = (V3_LARGEST, V3_LARGEST)
    which = "that head dim" if dims == [largest] else dims_text(*largest)
    known = f", although it has kernels of {which}" * (largest in dims)
    return f"{told}{known}."


def not_measured(cases, others):
    names, all_cases = recorded_names(cases), [*cases, *others]
    earlier = (device for peer in NAMES for device in cell_bars.recorded(all_cases, peer)[1])
    devices = sorted({*(case["run"]["device"] for case in all_cases), *earlier})
    said = [
        without_v3_text(cases),
        sections.NO_BLOCK_SPARSE_PEER,
        f"Cells whose last run lacked a kernel have an older ratio over it: {listed(names)}." if names else "",
        f"No other GPU was measured than {listed(devices)}." if devices else "",
        "[What of the papers is not here](end-to-end.md#what-of-the-papers-is-not-here): trainings and kernels that "
        "they have and this project has not rebuilt.",
    ]
    return ["## What was not measured", "", *(line for text in said if text for line in item(text)), ""]


def read(cases, others, topics):
    """docs/performance.md."""
    return [
        *heading(cases),
        *overview(cases),
        *not_first(cases, others, topics),
        *missed([*cases, *others], topics),
        *method(),
        *not_measured(cases, others),
    ]


# --- The tables behind it ----------------------------------------------------------------------------


def page_head(title, about):
    return [WRITTEN, f"# {title}", "", *paragraph(f"{about} [Overview and method](../performance.md).")]


def of_head_dim(cases):
    """Both directions of one head dim."""
    head_dim, head_dim_v = cases[0]["head_dim"], cases[0]["head_dim_v"]
    about = filter(None, [f"Cells: {runs_text(cases)}.", recorded_text(cases), without_v3_text(cases)])
    head = page_head(f"Kernels of {dims_text(head_dim, head_dim_v)}", " ".join(about))
    return [*head, *both_directions(cases), *shapes(cases)]


def mma_sync(cases):
    lines = page_head(
        "Kernels of mma.sync",
        f"[What they are](../kernels/sm80.md). Cells: {runs_text(cases)}. On a Hopper GPU FlexAttention runs by wgmma, "
        f"which is faster there. {recorded_text(cases)}".rstrip(),
    )
    for arch in sorted({case["arch"] for case in cases}):
        own = [case for case in cases if case["arch"] == arch]
        for op in ("fwd", "bwd"):
            found = cell_bars.check_lines(cell_bars.checks(cell_bars.rows_of(own, op), op))
            lines += [f"Bars, {DIRECTIONS[op]}:", "", "```", *found, "```", ""] if found else []
        lines += shapes(own, f"{arch}, ")
    return lines


def peers(cases):
    """Times of other kernels without a receipt; empty once receipts, or newer code of ours, supersede them."""
    held, tables = peer_tables(cases)
    source = "Measured side by side, without a receipt ([peers.json](../../benchmarks/data/peers.json)): "
    lines = page_head("Other kernels", f"{source}{held['source']}.")
    for title, about, head, rows in (unreceipted_peers.table_of(table, held) for table in tables):
        lines += [f"## {title}", "", *paragraph(about), *markdown_table(head, rows), ""]
    return lines if tables else []


def index(names):
    """The folder's index, from {file name: (title, the command that measures it)}."""
    return [
        *page_head("Every table", f"All cells in one file: [{CELLS}]({CELLS})."),
        *markdown_table(["", "measured by"], [[f"[{title}]({name})", by] for name, (title, by) in names.items()]),
        "",
    ]


def pages(cases, topics):
    """{path: text} of docs/performance.md and docs/performance."""
    others = [case for case in cases if case["arch"] != receipts.HOPPER]
    own = [case for case in cases if case["arch"] == receipts.HOPPER]
    made, names = {}, {}

    def add(name, title, by, lines):
        if lines:
            made[f"{FOLDER}/{name}"], names[name] = lines, (title, by)

    for dims in head_dims(own):
        alike = [case for case in own if (case["head_dim"], case["head_dim_v"]) == dims]
        values = f" --head-dim-v {dims[1]}" * (dims[0] != dims[1])
        command = f"`scripts/gpu-check bench --op OP --head-dim {dims[0]}{values} --seqlen S`"
        add(file_of(*dims), f"Kernels of {dims_text(*dims)}, forward and backward", command, of_head_dim(alike))
    if others:
        command = "`FLASHMASK_KERNELS=sm80 scripts/gpu-check bench ...`"
        add(MMA_SYNC, "Kernels of mma.sync, for Ampere and later", command, mma_sync(others))
    add(PEERS, "Other kernels beside ours", "side by side, without a receipt", peers(own))
    kinds = "sparsity, element masks, block masks, features, plans, masks, small problems, memory"
    about = "Single measurements; the command that makes each stands in its section."
    measured = [*page_head("Other measurements", about), *sections.measurements(topics)]
    add(OTHERS, f"Other measurements: {kinds}", "`scripts/gpu-check sparsity`, `maskcost`, `blocks`, ...", measured)
    if of_tests := sections.tests(topics):
        lines = [*page_head("Tests on a GPU", "What passed, failed and was skipped."), *of_tests]
        add("tests.md", "Tests on a GPU", "`scripts/gpu-check tests`", lines)
    decode = [*decode_page.lines(topics), "", *prefill_section.lines(topics), "", *decode_page.serving(topics)]
    lines = [*page_head("Decode over paged caches", "Hopper's kernels over caches."), *decode]
    add(DECODE, "Decode over paged caches", "`scripts/gpu-check decode`", lines)
    lines = [*page_head("On the CPU", "The CPU backend beside PyTorch."), *sections.cpu_section()]
    add("cpu.md", "On the CPU", "`python -m benchmarks.measure.cpu_vs_torch`", lines)
    made |= {PAGE: read(own, others, topics), INDEX: index(names)}
    texts = {name: "\n".join(lines).rstrip("\n") + "\n" for name, lines in made.items()}
    return {**texts, f"{FOLDER}/{CELLS}": cells_csv(cases)}
