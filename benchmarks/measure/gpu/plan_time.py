# SPDX-License-Identifier: Apache-2.0
"""The planner's time: twelve masks at 8K (one mask, and sixteen different ones), 32K and 128K, and in runs at 1M.

Timed by events around back-to-back calls (with the host's side of a call) and by replaying a graph (the kernels alone).
`benchmarks/report/replan.py` puts the latter into the benchmark's cells. A plan in runs waits for the device, so it is
in no graph.
"""

import numpy as np
from harness.calls import Mask, Plan

from benchmarks.instruments.medians import middle, spread
from benchmarks.instruments.timing import Contender, graph_of, interleaved
from benchmarks.masks import paper_masks
from benchmarks.measure.gpu.forward_cell import to_device

SIZES = ((8192, 1), (8192, 16), (32768, 1), (131072, 1))
LONG = 1048576
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


def measure_long(name, rounds):
    """The plan of a mask of 1M tokens as it is made ahead of calls: in runs, or if it has too many, in bits."""
    plan = Plan(mask_of(name, LONG, 1), counted=True)
    samples = interleaved({"events": Contender(plan.launch)}, rounds, target_ms=20.0)
    return {
        "mask": name,
        "seqlen": LONG,
        "bytes": plan.buffer.numel(),
        "in_runs": plan.buffer.numel() < plan.mask.plan_bytes(),
        "events_us": middle(samples["events"]) * 1e3,
    }


def kernel_hashes(arguments):
    return arguments.kernels.of_plan()


def run(arguments, receipt, save, progress_type):
    cells = [(name, *size) for size in SIZES for name in paper_masks.NAMES]
    progress, figures, long = progress_type([1] * (len(cells) + len(paper_masks.NAMES))), [], []
    for name, seqlen, batch in cells:
        figures.append(measure(name, seqlen, batch, arguments.rounds))
        progress.step(1, f"plan of {name}, S={seqlen}, {batch} masks")
    for name in paper_masks.NAMES:
        long.append(measure_long(name, arguments.rounds))
        progress.step(1, f"plan of {name}, S={LONG}")
    receipt["figures"] |= {"plan": figures, "long_plan": long}
    save()
    print(f"{'plan, us: graph (events)':24}" + "".join(f"{f'{s // 1024}K x {b}':>16}" for s, b in SIZES))
    for name in paper_masks.NAMES:
        row = [next(f for f in figures if (f["mask"], f["seqlen"], f["batch"]) == (name, *size)) for size in SIZES]
        print(f"{name:24}" + "".join(f"{f['graph_us']:8.1f} ({f['events_us']:5.1f})" for f in row))
    print(f"{'plan at 1M':24}{'form':>8}{'MiB':>8}{'ms':>8}")
    for f in long:
        form = "runs" if f["in_runs"] else "bits"
        print(f"{f['mask']:24}{form:>8}{f['bytes'] / 2**20:8.2f}{f['events_us'] / 1e3:8.3f}")
    return True
