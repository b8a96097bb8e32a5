# SPDX-License-Identifier: Apache-2.0
"""The planner's time: twelve masks at 8K (one mask, and sixteen different ones), 32K and 128K.

Timed by events around back-to-back calls (with the host's side of a call) and by replaying a graph (the kernels alone).
`benchmarks/report/replan.py` puts the latter into the benchmark's cells.
"""

import numpy as np
from harness.calls import Mask, Plan

from benchmarks.instruments.medians import middle, spread
from benchmarks.instruments.timing import Contender, graph_of, interleaved
from benchmarks.masks import paper_masks
from benchmarks.measure.gpu.forward_cell import to_device

SIZES = ((8192, 1), (8192, 16), (32768, 1), (131072, 1))
IN_GRAPH = 20


def mask_of(name, seqlen, batch):
    """`batch` different draws of a mask, one for each batch entry."""
    drawn = [paper_masks.MASKS[paper_masks.NAMES.index(name)](np.random.default_rng(n), seqlen) for n in range(batch)]
    if drawn[0][0] is None:
        return Mask(seqlen, seqlen, causal=drawn[0][1])
    indices = np.stack([np.stack(vectors, -1) for vectors, _ in drawn])[:, None].astype(np.int32)
    return Mask(seqlen, seqlen, bounds=to_device(np.ascontiguousarray(indices)), causal=drawn[0][1])


def measure(name, seqlen, batch, rounds):
    plan = Plan(mask_of(name, seqlen, batch))
    replay = graph_of(plan.build, IN_GRAPH)
    plan.build()
    samples = interleaved(
        {"events": Contender(plan.launch), "graph": Contender(replay, calls=IN_GRAPH)}, rounds, target_ms=5.0
    )
    return {
        "mask": name,
        "seqlen": seqlen,
        "batch": batch,
        "bytes": plan.buffer.numel(),
        "events_us": middle(samples["events"]) * 1e3,
        "graph_us": middle(samples["graph"]) * 1e3,
        "graph_us_spread": [1e3 * ms for ms in spread(samples["graph"])],
    }


def kernel_hashes(arguments):
    return arguments.kernels.of_plan()


def run(arguments, receipt, save, progress_type):
    cells = [(name, *size) for size in SIZES for name in paper_masks.NAMES]
    progress, figures = progress_type([1] * len(cells)), []
    for name, seqlen, batch in cells:
        figures.append(measure(name, seqlen, batch, arguments.rounds))
        progress.step(1, f"plan of {name}, S={seqlen}, {batch} masks")
    receipt["figures"]["plan"] = figures
    save()
    print(f"{'plan, us: graph (events)':24}" + "".join(f"{f'{s // 1024}K x {b}':>16}" for s, b in SIZES))
    for name in paper_masks.NAMES:
        row = [next(f for f in figures if (f["mask"], f["seqlen"], f["batch"]) == (name, *size)) for size in SIZES]
        print(f"{name:24}" + "".join(f"{f['graph_us']:8.1f} ({f['events_us']:5.1f})" for f in row))
    return True
