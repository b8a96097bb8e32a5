# SPDX-License-Identifier: Apache-2.0
"""The bars that were set for every measurement, and which of them its receipt misses."""

from collections import namedtuple

from benchmarks import cell_bars
from benchmarks.context_parallel import bars as context_parallel_bars
from benchmarks.measure.gpu import decode_bars, forest_bars, prefill_bars, small_bars
from benchmarks.measure.gpu.time_to_first_output import BAR_SECONDS
from benchmarks.receipts import HOPPER
from benchmarks.report.markdown import listed, markdown_table

Bar = namedtuple("Bar", "what got bar passed")
HOPPER_KERNELS, MMA_SYNC_KERNELS = "Hopper's kernels", "mma.sync's kernels"
ELEMENT_MASKS, BLOCK_MASKS, FEATURES, PADDING = "element masks", "block masks", "features", "head dims by padding"
SMALL, FIRST_CALL = "small problems", "first call"
HOST_TIME, END_TO_END = "host time of a PyTorch call", "training end to end"
SEVERAL_GPUS = {2: "two GPUs", 4: "four GPUs"}  # of context parallelism
DECODE, DECODE_MMA_SYNC = "decode over caches", "decode over caches, mma.sync"
PREFILL = "prefill over caches"
FORESTS = "shared prefixes"


def of_checks(found):
    """Bars of dicts whose names are `place: what`."""
    return [Bar(c["name"].split(": ", 1)[-1], c["got"], c["bar"], c["passed"]) for c in found]


def of_cells(cases):
    """Bars of the benchmark's cells, by direction and then for both together."""
    merged = cell_bars.with_totals(cases)
    return [
        bar for op in ("fwd", "bwd", "total") for bar in of_checks(cell_bars.checks(cell_bars.rows_of(merged, op), op))
    ]


def of_topic(topics, name, key, what, kept=lambda cell: True, cells="cells"):
    """Bars in the cells of a topic's receipt, next to the figure `key`."""
    found = topics[name]["figures"][name].get(cells, []) if name in topics else []
    return [Bar(what(c), c[key], c["bar"], c["passed"]) for c in found if "bar" in c and kept(c)]


def of_blocks(topics):
    """Bars of block masks whose live share is large enough for the bar to apply."""
    least = topics["blocks"]["figures"]["blocks"]["least_live"] if "blocks" in topics else 0
    what = "time over the live share of the full mask's"
    return of_topic(topics, "blocks", "over_share", lambda cell: what, lambda cell: cell["live"] >= least)


def of_features(topics):
    return [
        *of_topic(topics, "features", "over_plain", lambda c: f"{c['feature']}, {c['op']}: time over the plain call's"),
        *of_topic(
            topics,
            "features",
            "cycles_over_plain",
            lambda c: f"sink, {c['op']}: cycles over the plain call's",
            cells="cycles_of_sink",
        ),
    ]


def of_small(topics):
    receipts = (topics[name] for name in ("small", "small-bwd") if name in topics)
    return of_checks(found for receipt in receipts for found in small_bars.of_all(receipt["figures"]["small"]))


def of_first_call(topics):
    found = topics["first"]["figures"]["first"] if "first" in topics else []
    said = {"seconds": "seconds from its inputs", "process_difference": "seconds that it adds to a process"}
    return [Bar(what, cell[key], BAR_SECONDS, cell[key] <= BAR_SECONDS) for key, what in said.items() for cell in found]


def of_host_time(found):
    """Bars of benchmarks/measure/torch_overhead.py."""
    said = {"no_grad": "a forward, us", "with_backward": "forward and backward, us"}
    return [
        Bar(said[name], found["microseconds"][name], bar, found["microseconds"][name] <= bar)
        for name, bar in (found["bars"] or {}).items()
    ]


def context_parallel_runs(topics):
    """{GPUs: the receipt of context parallelism on so many}, the fewest first."""
    found = {
        t["figures"]["context_parallel"]["ranks"]: t for t in topics.values() if "context_parallel" in t["figures"]
    }
    return dict(sorted(found.items()))


def of_context_parallel(run):
    """Bars of one of these receipts."""
    held = run["figures"]["context_parallel"]
    judged = context_parallel_bars.run_judgements(held["cells"], "cuda", held["ranks"], run["complete"])
    return [Bar(what, abs(got), bar, passed) for what, got, bar, passed in judged]


def of_decode(topics, name="decode"):
    return of_checks(decode_bars.of_all(topics[name]["figures"]["decode"])) if name in topics else []


def of_prefill(topics):
    return of_checks(prefill_bars.of_all(topics["prefill"]["figures"]["prefill"])) if "prefill" in topics else []


def of_forests(topics):
    return of_checks(forest_bars.of_all(topics["forests"]["figures"]["forests"])) if "forests" in topics else []


def missed_rows(bars):
    """[what, how many of how many, what was reached, what was asked for] of bars that were missed."""
    rows = []
    for what in dict.fromkeys(bar.what for bar in bars if not bar.passed):
        alike = [bar for bar in bars if bar.what == what]
        missed = [bar for bar in alike if not bar.passed]
        low, high = (f"{pick(bar.got for bar in missed):.4g}" for pick in (min, max))
        asked = listed([f"{bar:.4g}" for bar in sorted({bar.bar for bar in missed})])
        side = "at most" if missed[0].got > missed[0].bar else "at least"
        reached = low if low == high else f"{low} to {high}"
        rows.append([what, f"{len(missed)} of {len(alike)}", reached, f"{side} {asked}"])
    return rows


def of_all(cases, topics, host_times):
    """{kind of measurement: its bars}, without those that have none."""
    found = {
        HOPPER_KERNELS: of_cells([case for case in cases if case["arch"] == HOPPER]),
        MMA_SYNC_KERNELS: of_cells([case for case in cases if case["arch"] != HOPPER]),
        ELEMENT_MASKS: of_topic(topics, "maskcost", "cost", lambda c: f"{c['mask']}, what it adds"),
        BLOCK_MASKS: of_blocks(topics),
        FEATURES: of_features(topics),
        PADDING: of_topic(topics, "padding", "over_instance", lambda c: "time over the larger head dim's"),
        SMALL: of_small(topics),
        FIRST_CALL: of_first_call(topics),
        HOST_TIME: [bar for found in host_times for bar in of_host_time(found)],
        **{SEVERAL_GPUS[n]: of_context_parallel(run) for n, run in context_parallel_runs(topics).items()},
        DECODE: of_decode(topics),
        DECODE_MMA_SYNC: of_decode(topics, "decode-sm80"),
        PREFILL: of_prefill(topics),
        FORESTS: of_forests(topics),
        END_TO_END: of_checks(check for receipt in topics.values() for check in receipt["figures"].get("checks", [])),
    }
    return {name: bars for name, bars in found.items() if bars}


def table(found, pages):
    """Missed bars, one a row. `pages`: the page with the figures of each kind of measurement."""
    rows = [[f"[{name}]({pages[name]})", *row] for name, bars in found.items() for row in missed_rows(bars)]
    return markdown_table(["", "bar", "missed", "reached", "asked"], rows) if rows else []


def counts_text(found):
    """How many bars hold, by kind of measurement."""
    held = [f"{sum(bar.passed for bar in bars)} of {len(bars)} ({name})" for name, bars in found.items()]
    return f"Held: {listed(held)}." if held else ""
