# SPDX-License-Identifier: Apache-2.0
"""Wall time of 1,000 back-to-back calls on a small problem with a ready plan: what the host's side of a call costs."""

import contextlib
import random
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import paper_masks
from flashmask_torch import Forward, Plan
from flex_masks import flex_mask
from paper_gpu import FlexPeer, device_mask, to_device
from samples import middle, ratio

BATCH, HEADS, SEQLEN, CALLS = 1, 8, 2048, 1000
FLEX_BAR = 0.7  # our time over FlexAttention's


def wall_ms(call):
    """Milliseconds for each of CALLS calls, launch to finish."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / CALLS * 1e3


def sdpa(q, k, v):
    def call():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call


def contenders_of(mask_name, head_dim):
    """{name: (call, context around the timed calls)}"""
    torch.manual_seed(head_dim)
    q, k, v = (torch.randn((BATCH, SEQLEN, HEADS, head_dim), dtype=torch.bfloat16, device="cuda") for _ in range(3))
    mask = device_mask(*paper_masks.paper_mask(mask_name, SEQLEN), SEQLEN)
    ours = Forward(q, k, v, mask, plan=Plan(mask)).run()
    first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    found = {"ours": (ours.launch, contextlib.nullcontext)}
    if mask_name == "causal":
        found["cudnn"] = (sdpa(*first), lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    found["flex"] = (FlexPeer(*first, flex_mask(mask_name, SEQLEN, to_device)), contextlib.nullcontext)
    return found


def measured(contenders, rounds):
    samples, shuffle = {name: [] for name in contenders}, random.Random(0)
    for _ in range(rounds):
        order = list(contenders)
        shuffle.shuffle(order)
        for name in order:
            call, context = contenders[name]
            with context():
                samples[name].append(wall_ms(call))
    return samples


def run(arguments, receipt, save, progress_type):
    cells = [(mask, head_dim) for mask in ("causal", "causal_document") for head_dim in (128, 64)]
    progress, figures = progress_type([1] * len(cells)), []
    with torch.no_grad():
        for mask, head_dim in cells:
            samples = measured(contenders_of(mask, head_dim), arguments.rounds)
            figures.append({"mask": mask, "head_dim": head_dim, "us": {n: middle(s) * 1e3 for n, s in samples.items()},
                            "ours_over": {n: ratio(samples["ours"], s) for n, s in samples.items() if n != "ours"}, "samples": samples})
            progress.step(1, f"{mask} d={head_dim}")
    receipt["figures"]["small"] = {"batch": BATCH, "heads": HEADS, "seqlen": SEQLEN, "calls": CALLS, "cells": figures}
    save()
    return report(figures)


def report(figures):
    passed = True
    for f in figures:
        words = ", ".join(f"{n} {us:.1f} us" for n, us in f["us"].items())
        over = ", ".join(f"ours / {n} {r:.2f}" for n, r in f["ours_over"].items())
        judged = f["mask"] == "causal_document"
        good = not judged or f["ours_over"]["flex"] <= FLEX_BAR
        passed &= good
        print(f"{('PASS' if good else 'FAIL') if judged else '    '}  {f['mask']:16} d={f['head_dim']:3}: {words}; {over}{f' (bar {FLEX_BAR} of flex)' if judged else ''}")
    return passed
