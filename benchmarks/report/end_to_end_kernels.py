# SPDX-License-Identifier: Apache-2.0
"""The page's section of kernels: tables 4 to 9 of the paper beside the receipts' cells."""

from benchmarks import cell_bars
from benchmarks.end_to_end import paper_tables
from benchmarks.end_to_end.figures import not_measured, short_length
from benchmarks.report.comparison import recorded_text
from benchmarks.report.markdown import markdown_table, ms_text, paragraph, percent, speed_text

ABOUT = (
    "TFLOP/s of forward and backward together, over the visible tiles; the paper's on an A100, ours on the GPU of "
    "[the kernel benchmark](performance.md), whose cells these are. Sparsity differs a little, as each cell is one "
    "drawn mask where the paper averages five. Ratios are speed over FlexAttention of the same row."
)


def totals_of(cases):
    """Both directions together of the cells of tables 4 to 9."""
    return [
        case
        for case in cell_bars.with_totals(cases)
        if case["op"] == "total"
        and case["heads"] == case["heads_kv"]
        and case["head_dim"] == case["head_dim_v"]
        and (case["head_dim"], case["seqlen"]) in paper_tables.TABLES
    ]


def section(cases):
    """TFLOP/s of both directions, the paper's beside ours."""
    totals = totals_of(cases)
    lines = ["## Kernels: tables 4 to 9", "", *paragraph(f"{ABOUT} {recorded_text(totals, ('flex',))}".rstrip())]
    for table in paper_tables.claims()["tables"]:
        at = table["head_dim"], table["seqlen"]
        found = {c["mask"]: c for c in totals if (c["head_dim"], c["seqlen"]) == at}
        lines += [f"### Table {table['table']}: d = {at[0]}, {short_length(at[1])}", ""]
        lines += [*table_of(table, found), ""] if found else not_measured("tables")
    return lines


def table_of(table, found):
    rows = []
    for mask, theirs in table["total_tflops"]["flashmask"].items():
        flex = table["total_tflops"]["flex"][mask]
        rows.append([mask, f"{theirs:.0f}", f"{flex:.0f}", speed_text(theirs / flex), *ours_of(found.get(mask))])
    head = ["mask", "paper: FlashMask", "FlexAttention", "ratio", "sparsity", "here: ms", "flashmask", "FlexAttention"]
    return markdown_table([*head, "ratio"], rows)


def ours_of(case):
    if case is None:
        return [""] * 5
    row, flop = cell_bars.row_of(case), case["ours_tflops"] * case["ours_ms"]
    flex = case["peers"].get("flex")
    theirs = [f"{flop / flex['ms']:.0f}", speed_text(row["flex"])] if flex else ["", ""]
    return [percent(1 - case["live"]), ms_text(case["ours_ms"] + case["plan_ms"]), f"{row['tflops']:.0f}", *theirs]


def spans(cases):
    """{head_dim: speed over FlexAttention in the cells of tables 4 to 9}, both directions together."""
    rows = [row for row in map(cell_bars.row_of, totals_of(cases)) if row["flex"]]
    return {head_dim: [row["flex"] for row in rows if row["head_dim"] == head_dim] for head_dim in (128, 64)}
