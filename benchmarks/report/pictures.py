# SPDX-License-Identifier: Apache-2.0
"""The pictures of pages, as SVG: cells, what topics found, and what is computed."""

import math

from benchmarks import cell_bars, charts, receipts
from benchmarks.charts import CUDNN, DENSE, FA3, FLEX, OURS, V3
from benchmarks.measure.gpu.sparsity_chart import sparsity_chart
from benchmarks.receipts import short_length
from benchmarks.report import comparison, documents, end_to_end_page
from benchmarks.report.markdown import listed
from benchmarks.report.shapes import IN_WORDS, by_shape, chart_name, heads_text

FA2, SDPA = FA3, DENSE  # which never stand beside each other
SERIES = [
    ("ours", "flashmask (plan included)", OURS, "box"),
    ("deterministic", "flashmask, deterministic", OURS, "hollow"),
    (cell_bars.V3, "FlashMask V3", V3, "box"),
    ("fa3", "FlashAttention-3", FA3, "box"),
    ("fa2", "FlashAttention-2", FA2, "box"),
    ("flex", "FlexAttention", FLEX, "box"),
    ("cudnn", "cuDNN", CUDNN, "box"),
    ("dense", "flashmask, dense mask", DENSE, "box"),
    ("sdpa", "SDPA, dense mask", SDPA, "box"),
]


def tflops_of(case):
    """TFLOP/s of everyone in a case. Ours counts the plan."""
    flop = case["ours_tflops"] * case["ours_ms"]
    times = {name: figures["ms"] for name, figures in case["peers"].items()}
    times["ours"] = case["ours_ms"] + case["plan_ms"]
    return {key: flop / times[key] if key in times else None for key, *_ in SERIES}


def marked_mask(case):
    """The mask's name, with a star where the kernels are another toolkit's."""
    return case["mask"] + " *" * case["marked"]


def speed_chart(cases):
    """Figure 5 of the paper for one direction, head dim and length: TFLOP/s by mask."""
    first = cases[0]
    groups = [(marked_mask(case), tflops_of(case)) for case in cases]
    series = [s for s in SERIES if any(values[s[0]] for _, values in groups)]
    kernels = "" if first["arch"] == receipts.HOPPER else f"{first['arch']}: "
    title = f"{kernels}{IN_WORDS[first['op']]}, head dim {first['head_dim']}, {short_length(first['seqlen'])} tokens"
    subtitle = (
        f"TFLOP/s over the tiles that are visible; batch {first['batch']}, {heads_text(first)}, "
        f"{first['dtype']}; {first['run']['device']}"
    )
    recorded = comparison.recorded_names(cases)
    note = (
        f"{listed(recorded)}: beside our kernels of that time; bars are our rate over the ratio of the times then."
        if recorded
        else ""
    )
    return charts.bar_chart(title, subtitle, groups, series, "TFLOP/s", note)


def bytes_text(count):
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:g} {unit}"
        count /= 1024
    return ""


def memory_chart():
    """Figure 4b of the paper: memory of one mask against length. Computed, not measured."""
    lengths = [4096 * 2**n for n in range(9)]
    series = [
        ("dense, bf16", DENSE, "line", [2 * s * s for s in lengths]),
        ("dense, 1 byte", FLEX, "line", [s * s for s in lengths]),
        ("4 vectors", V3, "line", [16 * s for s in lengths]),
        ("1 vector", OURS, "line", [4 * s for s in lengths]),
        ("plan, both directions", OURS, "dash", [plan_bytes(s) for s in lengths]),
    ]
    return charts.log_chart(
        "Memory of one mask",
        "One mask for all heads; a mask is 1 to 4 int32 vectors over the keys",
        lengths,
        series,
        "tokens",
        "bytes",
        short_length,
        bytes_text,
        "Computed from the formats. "
        "The plan, made from the vectors when they are used, is at most 1 byte for a tile of 128 x 128.",
    )


def plan_bytes(seqlen):
    """Two bits for each granule of 64 x 128, stored by rows and by keys."""
    rows, keys = math.ceil(seqlen / 64), math.ceil(seqlen / 128)
    return 16 * (rows * math.ceil(keys / 64) + keys * math.ceil(rows / 64))


def drawings(cases, figures):
    """{file stem: SVG} of cells, of what topics found, and of what is computed."""
    made = {chart_name(alike[0]): speed_chart(alike) for alike in by_shape(cell_bars.with_totals(cases))}
    if "sparsity" in figures:
        made["sparsity"] = sparsity_chart(figures["sparsity"])
    return {**made, "mask-memory": memory_chart()}


def document_drawings(found):
    """{file stem: SVG} of all pictures in docs/img that are drawn from {file name: receipt}."""
    cases, topics = documents.of_receipts(found)
    return {**drawings(cases, figures_in(topics)), **end_to_end_page.drawings(topics)}


def figures_in(topics):
    return {name: value for receipt in topics.values() for name, value in receipt["figures"].items()}
