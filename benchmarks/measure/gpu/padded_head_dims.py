# SPDX-License-Identifier: Apache-2.0
"""Cost of head dims between two instances: their time over the time at the instance's own head dim, in one run."""

import torch
from harness.calls import Backward, Forward, Mask, Plan, explained

from benchmarks.instruments.medians import ratio_figures, time_figures
from benchmarks.instruments.timing import Contender, interleaved

SEQLEN, TOKENS, HEADS, BAR = 8192, 32768, 32, 1.05
PADDED = {80: 96, 72: 96, 40: 64}  # head dims and their instances'


def masks():
    return {"full": Mask(SEQLEN, SEQLEN), "causal": Mask(SEQLEN, SEQLEN, causal=True)}


def calls_of(dim, mask, plan):
    """{op: call} and the kernels that they run."""
    q, k, v, dout = (
        torch.randn((TOKENS // SEQLEN, SEQLEN, HEADS, dim), dtype=torch.bfloat16, device="cuda") for _ in range(4)
    )
    forward = Forward(q, k, v, mask, plan=plan).run()
    calls = {"fwd": forward, "bwd": Backward(forward, dout, None, plan=plan)}
    return calls, {op: explained(call, op == "bwd")["kernels"] for op, call in calls.items()}


def measure(mask, rounds):
    """[cells, ids of kernels]"""
    plan, figures, ids = Plan(mask), [], set()
    made = {dim: calls_of(dim, mask, plan) for dim in sorted({*PADDED, *PADDED.values()})}
    for op in ("fwd", "bwd"):
        samples = interleaved({dim: Contender(calls[op].launch) for dim, (calls, _) in made.items()}, rounds)
        for dim, of in PADDED.items():
            if made[dim][1][op] != made[of][1][op]:
                raise RuntimeError(f"{op} of head_dim {dim} does not run in the kernels of {of}")
            ids.update(made[dim][1][op])
            found = ratio_figures("over_instance", samples[dim], samples[of])
            figures.append({"op": op, "head_dim": dim, "instance": of, **time_figures(samples[dim]), **found})
    return figures, ids


def run(arguments, receipt, save, progress_type):
    progress, figures, ids = progress_type([1] * len(masks())), [], set()
    for name, mask in masks().items():
        found, used = measure(mask, arguments.rounds)
        figures += [{"mask": name, "bar": BAR, "passed": f["over_instance"] <= BAR, **f} for f in found]
        ids |= used
        progress.step(1, name)
    receipt["kernel_hashes"] = {i: arguments.kernels.hashes[i] for i in sorted(ids)}
    receipt["figures"]["padding"] = {"seqlen": SEQLEN, "cells": figures}
    save()
    for f in figures:
        print(
            f"{'PASS' if f['passed'] else 'FAIL'}  {f['op']} d={f['head_dim']:3} {f['mask']:7} {f['ms']:.2f} ms: "
            f"{f['over_instance']:.3f} of d={f['instance']} (bar {BAR:.2f})"
        )
    return all(f["passed"] for f in figures)
