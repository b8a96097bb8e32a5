# SPDX-License-Identifier: Apache-2.0
"""Cost of the element mask: all live tiles marked partial against all marked full.

The masks hide nothing, so both plans give the same bits; the kernel evaluates the band alone, one interval or two
intervals for every element of a partial tile.
"""

import torch
from harness.calls import Forward, Mask, Plan

from benchmarks.instruments.kernels_used import case_of
from benchmarks.instruments.medians import ratio_figures, time_figures
from benchmarks.instruments.timing import Contender, interleaved
from benchmarks.measure.gpu.plan_layout import full_sections, live_sections, plan_layout

SEQLEN, TOKENS, HIDDEN, HEAD_DIMS = 8192, 131072, 4096, (128, 64)
BARS = {  # by head dim
    128: {"band": 0.05, "one interval": 0.15, "two intervals": 0.25},
    64: {"band": 0.07, "one interval": 0.15, "two intervals": 0.25},
}


def bounds(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda").expand(1, 1, SEQLEN, len(values)).contiguous()


def masks():
    """Masks that hide nothing: a far causal band, alone and with an empty interval, and two empty intervals."""
    far = {"causal": True, "q_offset": SEQLEN}
    return {
        "band": Mask(SEQLEN, SEQLEN, **far),
        "one interval": Mask(SEQLEN, SEQLEN, bounds=bounds(SEQLEN), **far),
        "two intervals": Mask(SEQLEN, SEQLEN, bounds=bounds(SEQLEN, SEQLEN, 0, 0)),
    }


def with_full_bits(plan, full):
    """A copy of a plan whose live granules are all full, or all partial."""
    copy = Plan(plan.mask)
    layout = plan_layout(SEQLEN, SEQLEN)
    for (begin, end), (live_begin, live_end) in zip(full_sections(layout), live_sections(layout)):
        copy.buffer[begin:end] = copy.buffer[live_begin:live_end] if full else 0
    return copy


def check_live(plan, name):
    layout = plan_layout(SEQLEN, SEQLEN)
    words = plan.buffer[layout.row_live_bits : layout.row_full_bits].cpu()
    if int(sum(bin(byte).count("1") for byte in words.tolist())) != layout.row_granules * layout.key_blocks:
        raise RuntimeError(
            f"{name}: not every granule of a mask that hides nothing is live: "
            "plan_layout.py does not match the library's plan"
        )


def measure(mask, name, inputs, rounds):
    plan = Plan(mask)
    check_live(plan, name)
    calls = {
        kind: Forward(*inputs, mask, plan=with_full_bits(plan, kind == "full")).run() for kind in ("full", "partial")
    }
    if not torch.equal(calls["full"].out, calls["partial"].out):
        raise RuntimeError(f"{name}: the doctored plans give different results")
    samples = interleaved({kind: Contender(call.launch) for kind, call in calls.items()}, rounds)
    over = ratio_figures("partial_over_full", samples["partial"], samples["full"])
    times = {f"{kind}_{name}": value for kind in calls for name, value in time_figures(samples[kind]).items()}
    return {**times, **over, "cost": over["partial_over_full"] - 1}


def kernel_hashes(arguments):
    return arguments.kernels.of_all([case_of("fwd", d, SEQLEN, TOKENS // SEQLEN, HIDDEN // d) for d in HEAD_DIMS])


def run(arguments, receipt, save, progress_type):
    progress, figures = progress_type([1] * 6), []
    for head_dim in HEAD_DIMS:
        heads = HIDDEN // head_dim
        inputs = [
            torch.randn((TOKENS // SEQLEN, SEQLEN, heads, head_dim), dtype=torch.bfloat16, device="cuda")
            for _ in range(3)
        ]
        for name, mask in masks().items():
            found = measure(mask, name, inputs, arguments.rounds)
            bar = BARS[head_dim][name]
            figures.append({"mask": name, "head_dim": head_dim, "bar": bar, "passed": found["cost"] <= bar, **found})
            progress.step(1, f"{name} d={head_dim}")
    receipt["figures"]["maskcost"] = {"seqlen": SEQLEN, "cells": figures}
    save()
    for f in figures:
        print(
            f"{'PASS' if f['passed'] else 'FAIL'}  d={f['head_dim']:3} {f['mask']:14} all full {f['full_ms']:.2f} ms, "
            f"all partial {f['partial_ms']:.2f} ms: {f['cost']:+.1%} (bar {f['bar']:.0%})"
        )
    return all(f["passed"] for f in figures)
