# SPDX-License-Identifier: Apache-2.0
"""Latency against block sparsity at 32K, d = 128, 65536 tokens: it should be a line through zero."""

import time

import torch
from harness.calls import Forward, Plan

from benchmarks import receipts
from benchmarks.instruments.kernels_used import case_of
from benchmarks.instruments.medians import bucket_of, line_fit, middle
from benchmarks.instruments.orders import orders
from benchmarks.instruments.timing import Contender
from benchmarks.masks.sparsity_masks import KINDS, fill_buckets
from benchmarks.measure.gpu.forward_cell import device_mask
from benchmarks.measure.gpu.sparsity_chart import sparsity_chart

SEQLEN, HEAD_DIM, BATCH, HEADS = 32768, 128, 2, 32
EACH, TARGET_MS = 10, 8.0
MOST_ROUNDS = 5  # some 370 masks: all of them together are to take less than two minutes
R2_BAR, INTERCEPT_BAR = 0.98, 0.03


def call_of(inputs, out, mask):
    """The forward call of a mask with its plan ready."""
    on_device = device_mask(mask["indices"], mask["causal"], SEQLEN)
    return Forward(*inputs, on_device, plan=Plan(on_device), out=out).run()


def measured(masks, calls, rounds, progress):
    """Milliseconds of every mask: the median over rounds, in another order each."""
    contenders = [Contender(call.launch) for call in calls]
    for contender in contenders:
        contender.warm_up(TARGET_MS)
    samples = [[] for _ in masks]
    for n, order in enumerate(orders(range(len(masks)), rounds)):
        for at in order:
            samples[at].append(contenders[at].measure())
        progress.step(1, f"sparsity: round {n + 1} of {rounds}")
    return [middle(s) for s in samples]


def fit(points, full_ms):
    intercept, slope, r2 = line_fit([p["live"] for p in points], [p["ms"] for p in points])
    return {
        "intercept_ms": intercept,
        "slope_ms": slope,
        "r2": r2,
        "intercept_share": intercept / full_ms,
        "samples": len(points),
        "buckets": len({bucket_of(1 - p["live"]) for p in points}),
        "passed": r2 >= R2_BAR and intercept / full_ms <= INTERCEPT_BAR,
    }


def kernel_hashes(arguments):
    return arguments.kernels.of(case_of("fwd", HEAD_DIM, SEQLEN, BATCH, HEADS))


def run(arguments, receipt, save, progress_type):
    begin = time.monotonic()
    masks = [mask for kind in KINDS for mask in fill_buckets(kind, SEQLEN, EACH)]
    print(f"drew {len(masks)} masks in {time.monotonic() - begin:.0f} s", flush=True)
    torch.manual_seed(0)
    inputs = [torch.randn((BATCH, SEQLEN, HEADS, HEAD_DIM), dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    out = torch.empty_like(inputs[0])
    full = {"kind": "full", "indices": None, "causal": False, "live": 1.0}
    rounds = min(arguments.rounds, MOST_ROUNDS)
    progress = progress_type([1] * rounds)
    calls = [call_of(inputs, out, mask) for mask in [*masks, full]]
    times = measured([*masks, full], calls, rounds, progress)
    points = [{"kind": mask["kind"], "live": mask["live"], "ms": ms} for mask, ms in zip(masks, times)]
    fits = {kind: fit([p for p in points if p["kind"] == kind], times[-1]) for kind in KINDS} | {
        "all": fit(points, times[-1])
    }
    receipt["figures"]["sparsity"] = {
        "seqlen": SEQLEN,
        "head_dim": HEAD_DIM,
        "batch": BATCH,
        "heads": HEADS,
        "full_ms": times[-1],
        "fits": fits,
        "points": points,
    }
    save()
    draw(receipt)
    for kind, f in fits.items():
        print(
            f"{'PASS' if f['passed'] else 'FAIL'}  {kind:16} {f['samples']:4} samples in {f['buckets']:2} buckets: "
            f"R2 {f['r2']:.4f} (bar {R2_BAR}), at zero work {f['intercept_share']:+.2%} "
            f"of the full mask's {times[-1]:.2f} ms (bar {INTERCEPT_BAR:.0%})"
        )
    return all(f["passed"] for f in fits.values())


def draw(receipt):
    folder = receipts.output_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{receipt['date']}-sparsity.svg").write_text(sparsity_chart(receipt["figures"]["sparsity"]))
