# SPDX-License-Identifier: Apache-2.0
"""Random block masks: calls over the live share of the full call's time, in one run, forward and backward, d = 128."""

import torch
from harness.calls import Backward, Forward, Mask, Plan, explained

from benchmarks.instruments.medians import ratio_figures, time_figures
from benchmarks.instruments.timing import Contender, interleaved
from benchmarks.masks import block_masks

TOKENS, HIDDEN, HEAD_DIM = 65536, 4096, 128
BAR, LEAST_LIVE = 1.10, 0.2  # the bar holds from this live share on


def heads_of(seqlen):
    """Number of heads that keeps a sequence's products within those of 64K tokens at the whole hidden size."""
    return HIDDEN // HEAD_DIM * TOKENS // max(TOKENS, seqlen)


def masks_of(seqlen):
    """{sparsity: Mask}; 0 is the full mask, which has no block mask."""
    drawn = {
        sparsity: torch.from_numpy(block_masks.draw(seqlen, sparsity)).cuda()[None, None]
        for sparsity in block_masks.SPARSITIES
    }
    return {0.0: Mask(seqlen, seqlen)} | {s: Mask(seqlen, seqlen, block_mask=x) for s, x in drawn.items()}


def calls_of(inputs, mask):
    """{op: call}"""
    q, k, v, dout = inputs
    plan = Plan(mask)
    forward = Forward(q, k, v, mask, plan=plan).run()
    return {"fwd": forward, "bwd": Backward(forward, dout, None, plan=plan)}


def measure(seqlen, rounds):
    """[cells, ids of kernels]"""
    shape = (max(1, TOKENS // seqlen), seqlen, heads_of(seqlen), HEAD_DIM)
    inputs = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    calls = {sparsity: calls_of(inputs, mask) for sparsity, mask in masks_of(seqlen).items()}
    figures, ids = [], set()
    for op in ("fwd", "bwd"):
        ids.update(explained(calls[0.0][op], op == "bwd")["kernels"])
        samples = interleaved({s: Contender(of[op].launch) for s, of in calls.items()}, rounds)
        for sparsity in block_masks.SPARSITIES:
            live = block_masks.live_share(seqlen, sparsity)
            expected = [ms and live * ms for ms in samples[0.0]]
            found = time_figures(samples[sparsity]) | ratio_figures("over_share", samples[sparsity], expected)
            passed = live < LEAST_LIVE or found["over_share"] <= BAR
            figures.append({"op": op, "seqlen": seqlen, "live": live, **found, "bar": BAR, "passed": passed})
    return figures, ids


def run(arguments, receipt, save, progress_type):
    progress, figures, ids = progress_type([1] * len(block_masks.LENGTHS)), [], set()
    torch.manual_seed(0)
    for seqlen in block_masks.LENGTHS:
        found, used = measure(seqlen, arguments.rounds)
        figures += found
        ids |= used
        receipt["kernel_hashes"] = {i: arguments.kernels.hashes[i] for i in sorted(ids)}
        receipt["figures"]["blocks"] = {"head_dim": HEAD_DIM, "least_live": LEAST_LIVE, "cells": figures}
        save()
        progress.step(1, f"{seqlen} tokens")
    for f in figures:
        print(
            f"{'PASS' if f['passed'] else 'FAIL'}  {f['op']} S={f['seqlen']:6} {f['live']:4.0%} live "
            f"{f['ms']:8.2f} ms: {f['over_share']:.3f} of that share of the full mask's "
            f"(bar {BAR:.2f} from {LEAST_LIVE:.0%} on)"
        )
    return all(f["passed"] for f in figures)
