# SPDX-License-Identifier: Apache-2.0
"""Masks of interval lists: forward and backward beside FlexAttention, partial tiles beside full ones, plans, d = 128.

FlexAttention has a BlockMask of each mask and a mask_mod that reads its bool matrix. All of a length in one run.
"""

import functools

import flashmask
import torch
from flashmask.torch import operators, ops
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.instruments.medians import ratio_figures, time_figures
from benchmarks.instruments.timing import Contender, interleaved
from benchmarks.masks import listed_masks

LENGTHS, TOKENS, HEADS, HEAD_DIM = (8192, 32768), 32768, 16, 128
BAR_OF_PARTIAL, BAR_OF_PLAN_MS, AGREEMENT = 1.25, 1.0, 0.02


def inputs_of(seqlen):
    shape = (max(1, TOKENS // seqlen), HEADS, seqlen, HEAD_DIM)
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_() for _ in range(3)] + [
        torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    ]


def both_directions(attend, inputs):
    """out, dq, dk and dv."""
    *leaves, dout = inputs
    out = attend(*leaves)
    return out, *torch.autograd.grad(out, leaves, dout)


def flex_of(mask):
    visible = mask.to_dense()[0, 0]
    block_mask = create_block_mask(
        lambda b, h, i, j: visible[i, j], None, None, mask.seqlen_q, mask.seqlen_k, device="cuda", _compile=True
    )
    return functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=block_mask)


def ours(mask):
    return lambda *x: ops.attention(*x, mask, layout="bhsd")[0]


def check_agreement(name, got, want):
    for result, x, y in zip(("out", "dq", "dk", "dv"), got, want):
        error = ((x - y).float().norm() / y.float().norm()).item()
        if not error <= AGREEMENT:
            raise AssertionError(f"{name}: {result} is {error:.3f} of its norm from FlexAttention's")


def attention_figures(name, mask, rounds):
    inputs = inputs_of(mask.seqlen_q)
    calls = {"ours": ours(mask), "flex": flex_of(mask)}
    check_agreement(name, *(both_directions(call, inputs) for call in calls.values()))
    samples = interleaved(
        {key: Contender(functools.partial(both_directions, call, inputs)) for key, call in calls.items()}, rounds
    )
    return {
        "mask": name,
        "seqlen": mask.seqlen_q,
        **time_figures(samples["ours"]),
        **ratio_figures("over_flex", samples["ours"], samples["flex"]),
        **plan_figures(mask, rounds),
    }


def plan_figures(mask, rounds):
    """Time of the plan with all of its bits, and bytes of the lists, of the plan, and of the bits in it."""
    samples = interleaved({"plan": Contender(lambda: ops.plan(mask))}, rounds)
    plan = mask.plan().numel()
    bits = plan - operators.plan_bytes(mask.seqlen_q, mask.seqlen_k, 1, 1, 0)
    plan_ms = time_figures(samples["plan"])["ms"]
    return {
        "plan_ms": plan_ms,
        "intervals": len(mask.intervals),
        "list_bytes": listed_masks.list_bytes(mask),
        "plan_bytes": plan,
        "bits": bits,
    }


def partial_figures(seqlen, rounds):
    """Masks without a full or an empty tile, over the mask that hides nothing."""
    inputs = inputs_of(seqlen)
    attend = {"full": ours(flashmask.Mask(seqlen, seqlen))}
    attend |= {
        rule.__name__: ours(listed_masks.lists_of(rule(seqlen, "cuda")))
        for rule in (listed_masks.few_holes, listed_masks.every_second_row)
    }
    samples = {}
    with torch.no_grad():
        forwards = {name: Contender(functools.partial(call, *inputs[:3])) for name, call in attend.items()}
        samples["fwd"] = interleaved(forwards, rounds)
    outs = {name: call(*inputs[:3]) for name, call in attend.items()}
    backwards = {
        name: Contender(functools.partial(torch.autograd.grad, out, inputs[:3], inputs[3], retain_graph=True))
        for name, out in outs.items()
    }
    samples["bwd"] = interleaved(backwards, rounds)
    return [
        {"op": op, "seqlen": seqlen, "mask": name, **ratio_figures("over_full", of[name], of["full"])}
        for op, of in samples.items()
        for name in attend
        if name != "full"
    ]


def own_hashes(hashes):
    """The hashes of kernels that may have run."""
    return {i: hashes[i] for i in sorted(hashes) if ".plan." in i or f".bf16.d{HEAD_DIM}.dv{HEAD_DIM}." in i}


def run(arguments, receipt, save, progress_type):
    progress, cells = progress_type([1] * (len(LENGTHS) + 1)), []
    torch.manual_seed(0)
    receipt["kernel_hashes"] = own_hashes(arguments.kernels.hashes)
    partial = partial_figures(LENGTHS[0], arguments.rounds)
    progress.step(1, "partial tiles")
    for seqlen in LENGTHS:
        masks = listed_masks.of_length(seqlen, "cuda")
        cells += [attention_figures(name, make(), arguments.rounds) for name, make in masks.items()]
        receipt["figures"]["lists"] = {"head_dim": HEAD_DIM, "heads": HEADS, "cells": cells, "partial": partial}
        save()
        progress.step(1, f"{seqlen} tokens")
    in_time, cheap = (
        (f["plan_ms"] <= BAR_OF_PLAN_MS for f in cells),
        (f["over_full"] <= BAR_OF_PARTIAL for f in partial),
    )
    for f in cells:
        print(
            f"{'PASS' if f['plan_ms'] <= BAR_OF_PLAN_MS else 'FAIL'}  {f['mask']} S={f['seqlen']:6} {f['ms']:8.2f} ms, "
            f"{f['over_flex']:.3f} of FlexAttention's; plan {f['plan_ms']:.3f} ms (bar {BAR_OF_PLAN_MS}) of "
            f"{f['plan_bytes']} bytes, {f['bits']} of them bits, from {f['intervals']} intervals in {f['list_bytes']}"
        )
    for f in partial:
        print(
            f"{'PASS' if f['over_full'] <= BAR_OF_PARTIAL else 'FAIL'}  {f['op']} S={f['seqlen']:6} {f['mask']}: "
            f"{f['over_full']:.3f} of the full mask's (bar {BAR_OF_PARTIAL})"
        )
    return all(in_time) and all(cheap)
