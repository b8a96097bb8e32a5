# SPDX-License-Identifier: Apache-2.0
"""The figures of the documents, from receipts and benchmarks/data: docs/performance.md, docs/performance/ and
docs/end-to-end.md as a whole, and what other pages hold between `<!-- figures: NAME -->` and
`<!-- end of figures -->`.
"""

import operator
import re
from statistics import geometric_mean

from benchmarks import ROOT, receipts
from benchmarks.context_parallel.bars import both
from benchmarks.receipts import short_length
from benchmarks.report import end_to_end_page, missed_bars, performance_pages
from benchmarks.report.comparison import (
    DIRECTIONS,
    ahead_text,
    dated_name,
    dense_text,
    hopper,
    mean_text,
    plain,
    runs_text,
)
from benchmarks.report.markdown import listed, markdown_table, ms_text, paragraph, percent, speed_text
from benchmarks.report.performance_pages import COMMAND
from benchmarks.report.sections import figures_of, overlap_text
from benchmarks.report.shapes import is_grouped

PICTURES = "docs/img"
SUMMARY_DIMS = (128, 64)  # head dims of README's table
WHERE_NOT = f"{performance_pages.PAGE}#where-ours-is-not-first"
MARKED = re.compile(r"(<!-- figures: (\w+) .*?-->\n).*?(<!-- end of figures -->)", re.S)


def of_receipts(found):
    """(cases with the run that each is of, {topic: receipt}) of {file name: receipt}."""
    cases = [
        {**case, "run": receipts.run_of(receipt, case), "marked": False}
        for receipt in found.values()
        for case in receipt["cases"]
    ]
    return cases, {receipt["what"]: receipt for receipt in found.values() if not receipt["cases"]}


# --- Parts of other pages ----------------------------------------------------------------------------


def summary(cases, topics):
    """README's table: 8K, both head dims and directions."""
    cases = hopper(cases)
    sides = [(d, op, plain(cases, op).get((d, 8192), [])) for d in SUMMARY_DIMS for op in ("fwd", "bwd")]
    sides = [side for side in sides if side[2]]
    of_runs = [c for c in cases if c["seqlen"] == 8192 and c["head_dim"] in SUMMARY_DIMS and not is_grouped(c)]
    rows = []
    for name, show, key in (
        (dated_name(of_runs, "flex"), mean_text, "flex"),
        (dated_name(of_runs, "flashmask_v3"), mean_text, "v3"),
        ("FlashAttention-3, full / causal", dense_text, "fa3"),
        ("cuDNN, full / causal", dense_text, "cudnn"),
    ):
        found = [show(side, key, len(side)) if show is mean_text else show(side, key) for _, _, side in sides]
        rows += [[name, *found]] if any(found) else []
    faster = ahead_text(cases)
    ahead = f"Ours is not first everywhere: {faster} ([which]({WHERE_NOT}))." if faster else ""
    return [
        *paragraph(
            f"Speed over other kernels at 8K tokens, bfloat16, geometric mean over twelve masks ({runs_text(of_runs)}):"
        ),
        *markdown_table(["", *(f"d = {d}, {DIRECTIONS[op]}" for d, op, _ in sides)], rows),
        "",
        *paragraph(ahead)[:-1],
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


# Contenders of a receipt of context parallelism, as the page names them: those that speed is compared with, and those
# beside the way that the model chooses.
_OVER = {"one": "one", "all gather": "an all-gather", "flex": "torch's FlexAttention"}
_OTHERS = {
    "gather": '`way="gather"`',
    "arrive": '`way="arrive"`',
    "early gradients": "arrive with early gradients",
    "overlap": '`way="overlap"`',
}


def context_parallel(cases, topics):
    """docs/context-parallel.md's tables."""
    lines = [line for run in missed_bars.context_parallel_runs(topics).values() for line in [*of_gpus(run), ""]]
    return lines[:-1]


def of_gpus(run):
    """The table of a receipt of context parallelism, and what it says of the bars."""
    cells = run["figures"]["context_parallel"]["cells"]
    over = [name for name in _OVER if any(name in cell["times"] for cell in cells)]
    others = [way for way in _OTHERS if any(way in cell["times"] and way != cell["auto"] for cell in cells)]
    head = ["tokens", "mask", "heads", "keys that travel", "one, ms", "all, ms"]
    return [
        *paragraph(columns_text(run, over, others)),
        *markdown_table(
            [*head, *(f"over {_OVER[name]}" for name in over), *(f"{way}, ms" for way in others), "fixed", "predicted"],
            [context_parallel_row(cell, over, others) for cell in cells],
        ),
        "",
        *paragraph(f"{kernels_text(cells)} {overlap_text(run)} {bars_text(missed_bars.of_context_parallel(run))}")[:-1],
    ]


def columns_text(run, over, others):
    """Says what was measured, and the columns of its table."""
    held = run["figures"]["context_parallel"]
    said = (
        f"Forward and backward on {held['ranks']} GPUs, d = 128 ({run['date']}, {run['device']}; a link takes in "
        f"{held['link_gb_s']:.0f} GB/s): time on one and on all, and speed over an all-gather of all keys that is "
        "waited for, on the same rows"
    )
    if "flex" in over:
        heads = {f"{cell['heads']} / {cell['heads_kv']}" for cell in held["cells"] if "flex" in cell["times"]}
        said += (
            f"; speed over {_OVER['flex']} behind torch's own all-gather (`flex_cp_allgather`), with "
            f"{listed(sorted(heads))} heads alone, as each cell is compiled anew"
        )
    if others:
        said += f"; then the time of {listed([_OTHERS[way] for way in others])}, in ms"
    return (
        f"{said}. Fixed: what is neither kernels nor bytes at the link's rate, forward and backward, in ms. Last: how "
        "far the model's time, with this run's rates, is from the measured one."
    )


def kernels_text(cells):
    """Says how fast gather is, and its kernels alone, which no exchange could exceed; "" if no cell has the latter."""
    cells = [cell for cell in cells if "kernels" in cell["times"]]
    if not cells:
        return ""
    one, kernels, gather = ([both(cell["times"][name]) for cell in cells] for name in ("one", "kernels", "gather"))
    alone, all_of_it = (geometric_mean(map(operator.truediv, one, ours)) for ours in (kernels, gather))
    return (
        f"In the geometric mean of all cells gather's speed over one GPU is {speed_text(all_of_it)}, and that of its "
        f"kernels alone, once all keys are there, {speed_text(alone)}."
    )


def bars_text(bars):
    """How many bars hold, and which were missed, with what was reached."""
    missed = "; ".join(
        f"{what}: {count} ({reached}; {asked})" for what, count, reached, asked in missed_bars.missed_rows(bars)
    )
    return f"{sum(bar.passed for bar in bars)} of {len(bars)} bars held{f'; missed were {missed}' * bool(missed)}."


def context_parallel_row(cell, over, others):
    ms = {name: both(times) for name, times in cell["times"].items()}
    ours = ms[cell["auto"]]
    travels = cell["received_keys"] / (cell["seqlen"] * cell["batch"])
    fixed = " / ".join(f"{cell[f'fixed_{phase}_ms']:.2f}" for phase in ("forward", "backward"))
    off = percent(cell["predicted_ms"][cell["auto"]] / ours - 1)
    shape = [f"{short_length(cell['seqlen'])} x {cell['batch']}", cell["mask"]]
    shape += [f"{cell['heads']} / {cell['heads_kv']}", percent(travels)]
    ratios = [speed_text(ms[name] / ours) if name in ms else "" for name in over]
    of_others = [ms_text(ms[way]) if way in ms else "" for way in others]
    return [*shape, ms_text(ms["one"]), ms_text(ours), *ratios, *of_others, fixed, off]


def long_context(cases, topics):
    """The speed of the example that trains over context parallelism."""
    runs = figures_of(topics, "long-context")
    if not runs:
        return []
    receipt = topics["long-context"]
    rows = [
        [
            short_length(run["seqlen"]),
            f"{run['tokens_per_second']:,.0f}",
            f"{run['seqlen'] * run['dp'] / run['tokens_per_second']:.2f}",
            f"{run['peak_memory_gb']:.1f}",
        ]
        for run in runs["runs"]
    ]
    said = runs["runs"][0]
    of_replicas = "One sequence over" if said["dp"] == 1 else f"{said['dp']} sequences, each over"
    return [
        *paragraph(
            f"{of_replicas} {said['cp']} GPUs, a model of {said['parameters'] / 1e9:.2f} B parameters "
            f"({receipt['date']}, {receipt['device']}, `scripts/gpu-check long-context`):"
        ),
        *markdown_table(["tokens", "tokens a second", "seconds a step", "peak memory of a GPU, GB"], rows),
    ]


def overlap(cases, topics):
    """The measured figures of docs/context-parallel-scaling.md."""
    said = map(overlap_text, missed_bars.context_parallel_runs(topics).values())
    return paragraph(" ".join(said))[:-1]


PARTS = {
    "summary": summary,
    "training": training,
    "context_parallel": context_parallel,
    "long_context": long_context,
    "overlap": overlap,
}
PAGES = ("README.md", "docs/training.md", "docs/context-parallel.md", "docs/context-parallel-scaling.md")


def with_figures(text, cases, topics):
    """A page with its marked parts written anew."""

    def part(match):
        return match[1] + "\n".join(PARTS[match[2]](cases, topics)) + "\n" + match[3]

    return MARKED.sub(part, text)


def pages(found):
    """{path: text} of all pages with figures, as they have to be with {file name: receipt}."""
    cases, topics = of_receipts(found)
    marked = {name: with_figures((ROOT / name).read_text(encoding="utf-8"), cases, topics) for name in PAGES}
    whole = {
        **performance_pages.pages(cases, topics),
        end_to_end_page.PAGE: end_to_end_page.page(hopper(cases), topics, COMMAND),
    }
    return {**whole, **marked}
