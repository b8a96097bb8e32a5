# SPDX-License-Identifier: Apache-2.0
"""Cost of sinks, softcap, ALiBi and dropout: their calls' time over the plain call's, at every kernel's head dims.

In one run, in bfloat16; the softcap also in float16, which has a tanh of its own.
"""

from itertools import product

import torch
from harness import kernels
from harness.calls import Backward, Forward, Mask, Plan, explained
from harness.features import NONE, Features

from benchmarks.instruments.medians import ratio_figures, time_figures
from benchmarks.instruments.sm_clock import Marks
from benchmarks.instruments.timing import Contender, interleaved

SEQLEN, TOKENS, HIDDEN, SOFTCAP, DROPOUT = 8192, 65536, 4096, 50.0, 0.1
# {(feature, direction, head dim): (mask or None for each, the most that the call's time over the plain one's may be)}
BARS = {
    ("sink", "fwd", 128): (None, 1.02),
    ("sink", "bwd", 128): (None, 1.02),
    ("softcap", "fwd", 128): ("full", 1.24),
    ("softcap", "bwd", 128): ("causal documents", 1.32),
    ("dropout", "fwd", 128): (None, 1.50),
    ("dropout", "fwd", 64): (None, 1.95),
    ("dropout", "bwd", 128): (None, 1.28),
    ("dropout", "bwd", 64): (None, 1.28),
}
BAR_OF_CYCLES, CYCLES_HEAD_DIM = 1.005, 128  # of a sink
DTYPES = (torch.bfloat16, torch.float16)


def asked(heads, dtype):
    sink = torch.randn(heads, device="cuda")
    state = torch.tensor([7, 0], dtype=torch.int64, device="cuda")
    if dtype == torch.float16:
        return {"plain": NONE, "softcap": Features(softcap=SOFTCAP)}
    return {
        "plain": NONE,
        "sink": Features(sink=sink),
        "softcap": Features(softcap=SOFTCAP),
        "ALiBi": Features(alibi_slopes=torch.exp2(-8 * torch.rand(heads, device="cuda"))),
        "dropout": Features(dropout=DROPOUT, state=state),
        "all": Features(sink, SOFTCAP, DROPOUT, state),
    }


def masks():
    ends = torch.arange(1, SEQLEN + 1, device="cuda").add(1023).div(1024, rounding_mode="floor").mul(1024)
    bounds = ends.int()[None, None, :, None].contiguous()
    return {
        "full": Mask(SEQLEN, SEQLEN),
        "causal": Mask(SEQLEN, SEQLEN, causal=True),
        "causal documents": Mask(SEQLEN, SEQLEN, causal=True, bounds=bounds),
    }


def inputs_of(dim, dim_v, dtype):
    heads = HIDDEN // 64 if dim == 64 else max(1, HIDDEN // dim)
    shape = (TOKENS // SEQLEN, SEQLEN, heads)
    return [torch.randn((*shape, d), dtype=dtype, device="cuda") for d in (dim, dim, dim_v, dim_v)]


def calls_of(mask, inputs):
    """{(feature, op): call}, forwards that have run."""
    q, k, v, dout = inputs
    plan, found = Plan(mask), {}
    for name, features in asked(q.shape[2], q.dtype).items():
        forward = Forward(q, k, v, mask, plan=plan, features=features).run()
        found[name, "fwd"] = forward
        found[name, "bwd"] = Backward(forward, dout, None, plan=plan)
    return found


def measure(calls, rounds):
    samples = interleaved({key: Contender(call.launch) for key, call in calls.items()}, rounds)
    figures = []
    for feature in dict.fromkeys(name for name, _ in calls if name != "plain"):
        of = {op: (samples[feature, op], samples["plain", op]) for op in ("fwd", "bwd")}
        of["fwd + bwd"] = [[a + b for a, b in zip(of["fwd"][n], of["bwd"][n])] for n in range(2)]
        for op, (ours, plain) in of.items():
            figures.append(
                {"feature": feature, "op": op, **time_figures(ours), **ratio_figures("over_plain", ours, plain)}
            )
    return figures


def sink_cycles(calls, marks, rounds):
    """{op: ratio_figures} of a sink's call over the plain one's, in cycles, which vary less than times."""
    found = {}
    for op in ("fwd", "bwd"):
        taken = {"sink": [], "plain": []}
        for _ in range(2 * rounds + 1):
            for name, cycles in taken.items():
                cycles.append(marks.cycles(calls[name, op].launch))
        found[op] = ratio_figures("cycles_over_plain", taken["sink"], taken["plain"])
    return found


def judge(figure):
    """Adds the bar to a figure that has one."""
    if "cycles_over_plain" in figure:
        return {**figure, "bar": BAR_OF_CYCLES, "passed": figure["cycles_over_plain"] <= BAR_OF_CYCLES}
    head_dim = figure["head_dim"] if figure["head_dim"] == figure["head_dim_v"] else None
    mask, bar = BARS.get((figure["feature"], figure["op"], head_dim), (None, None))
    if bar is None or mask not in (None, figure["mask"]):
        return {**figure, "passed": True}
    return {**figure, "bar": bar, "passed": figure["over_plain"] <= bar}


def run(arguments, receipt, save, progress_type):
    dims = kernels.head_dims(kernels.default_library(), "bwd")
    progress, figures, in_cycles, hashes = progress_type([1] * (3 * len(dims) * len(DTYPES))), [], [], {}
    marks = Marks()
    for (dim, dim_v), dtype in product(dims, DTYPES):
        inputs = inputs_of(dim, dim_v, dtype)
        for mask_name, mask in masks().items():
            calls = calls_of(mask, inputs)
            for (_, op), call in calls.items():
                hashes.update({i: arguments.kernels.hashes[i] for i in explained(call, op == "bwd")["kernels"]})
            at = {"mask": mask_name, "head_dim": dim, "head_dim_v": dim_v, "dtype": str(dtype).removeprefix("torch.")}
            figures += [judge({**at, **figure}) for figure in measure(calls, arguments.rounds)]
            if (dim, dim_v) == (CYCLES_HEAD_DIM,) * 2 and ("sink", "fwd") in calls:
                found = sink_cycles(calls, marks, arguments.rounds)
                in_cycles += [judge({**at, "op": op, **figure}) for op, figure in found.items()]
            progress.step(1, f"{mask_name} d={dim}/{dim_v} {at['dtype']}")
    receipt["kernel_hashes"] = dict(sorted(hashes.items()))
    held = {"seqlen": SEQLEN, "softcap": SOFTCAP, "dropout": DROPOUT, "cells": figures, "cycles_of_sink": in_cycles}
    receipt["figures"]["features"] = held
    save()
    for f in figures:
        bar = f" (bar {f['bar']:.2f})" if "bar" in f else ""
        print(
            f"{'PASS' if f['passed'] else 'FAIL'}  d={f['head_dim']:3}/{f['head_dim_v']:3} {f['mask']:16} "
            f"{f['dtype']:8} {f['feature']:8} {f['op']:9} {f['ms']:.2f} ms: {f['over_plain']:.3f} of plain{bar}"
        )
    for f in in_cycles:
        print(
            f"{'PASS' if f['passed'] else 'FAIL'}  d={f['head_dim']} {f['mask']} sink {f['op']}: "
            f"{f['cycles_over_plain']:.4f} of plain in cycles (bar {f['bar']})"
        )
    return all(f["passed"] for f in [*figures, *in_cycles])
