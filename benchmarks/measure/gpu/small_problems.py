# SPDX-License-Identifier: Apache-2.0
"""Wall time of 1,000 back-to-back calls on a small problem with a ready plan: the host's cost of a call.

With --op bwd a call is the forward and its backward. PyTorch's contenders go through its autograd; ours are the C
interface's two calls and, where the operators are (FLASHMASK_TORCH_LIBRARY or build/gpu-carry/libflashmask_torch.so),
the PyTorch package's, through autograd, too, and the same replayed from a CUDA graph. Where the operators that do
nothing are (FLASHMASK_EMPTY_OPERATOR or build/gpu-carry/libflashmask_empty_operator.so), a torch.autograd.Function of
them shows what PyTorch takes for any operators.
"""

import contextlib
import os
import time

import torch
from harness.calls import Backward, Forward, Plan
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import ROOT, cell_bars
from benchmarks.instruments.kernels_used import case_of
from benchmarks.instruments.medians import middle, ratio, spread
from benchmarks.instruments.orders import orders
from benchmarks.masks import paper_masks
from benchmarks.masks.flex_masks import flex_mask
from benchmarks.measure.gpu import small_bars
from benchmarks.measure.gpu.forward_cell import FlexPeer, device_mask, to_device

BATCH, CALLS = 1, 1000
MASKS, HEAD_DIMS = ("causal", "causal_document"), (128, 64)
SHAPES = {"fwd": [(8, 2048)], "bwd": [(8, 2048), (2, 4096)]}  # heads and tokens


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


def contenders_of(mask_name, head_dim, heads, seqlen):
    """{name: (call, context around the timed calls)}"""
    torch.manual_seed(head_dim)
    q, k, v = (torch.randn((BATCH, seqlen, heads, head_dim), dtype=torch.bfloat16, device="cuda") for _ in range(3))
    mask = device_mask(*paper_masks.paper_mask(mask_name, seqlen), seqlen)
    ours = Forward(q, k, v, mask, plan=Plan(mask)).run()
    first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    found = {"ours": (ours.launch, contextlib.nullcontext)}
    if mask_name == "causal":
        found["cudnn"] = (sdpa(*first), lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    found["flex"] = (FlexPeer(*first, flex_mask(mask_name, seqlen, to_device)), contextlib.nullcontext)
    return found


def with_gradients(forward, inputs, dout):
    """A call of `forward`, which takes no arguments and gives out, and of its backward."""

    def call():
        return torch.autograd.grad(forward(), inputs, dout)

    return call


def replayed(call):
    """The call from a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def has_library(variable, name):
    """True if the library is at the environment's variable or was carried; sets the variable to its path."""
    library = os.environ.get(variable) or ROOT / "build" / "gpu-carry" / name
    if not os.path.exists(library):
        return False
    os.environ[variable] = str(library)
    return True


def empty_call(inputs):
    """A forward of operators that do nothing; None if their library is missing."""
    if not has_library("FLASHMASK_EMPTY_OPERATOR", "libflashmask_empty_operator.so"):
        return None
    from benchmarks.measure.torch_overhead import EmptyFunction

    torch.ops.load_library(os.environ["FLASHMASK_EMPTY_OPERATOR"])
    options = None, True, None, -1, -1, False, "auto"
    return lambda: EmptyFunction.apply(*inputs, None, None, None, options)[0]


def torch_call(mask_name, inputs):
    """The PyTorch package's forward, if its operators are there; else None."""
    seqlen = inputs[0].shape[1]
    if not has_library("FLASHMASK_TORCH_LIBRARY", "libflashmask_torch.so"):
        return None
    import flashmask

    bounds, causal = paper_masks.paper_mask(mask_name, seqlen)
    mask = flashmask.Mask(seqlen, seqlen, bounds=None if bounds is None else to_device(bounds), causal=causal)
    return lambda: flashmask.flashmask_attention(*inputs, mask)


def both_contenders_of(mask_name, head_dim, heads, seqlen):
    """Contenders of forward and backward together, as contenders_of returns them."""
    torch.manual_seed(head_dim)
    q, k, v, dout = (
        torch.randn((BATCH, seqlen, heads, head_dim), dtype=torch.bfloat16, device="cuda") for _ in range(4)
    )
    mask = device_mask(*paper_masks.paper_mask(mask_name, seqlen), seqlen)
    plan = Plan(mask)
    forward = Forward(q, k, v, mask, plan=plan).run()
    backward = Backward(forward, dout, plan=plan).run()
    plain = contextlib.nullcontext
    found = {"ours": (lambda: (forward.launch(), backward.launch()), plain)}
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    if ours := torch_call(mask_name, inputs):
        found["ours_in_pytorch"] = (with_gradients(ours, inputs, dout), plain)
        found["ours_in_graph"] = (replayed(with_gradients(ours, inputs, dout)), plain)
        if empty := empty_call(inputs):
            found["empty_operators"] = (with_gradients(empty, inputs, dout), plain)
    first, of_first = (
        [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)],
        dout.transpose(1, 2).contiguous(),
    )
    if mask_name == "causal":
        found["cudnn"] = (
            with_gradients(sdpa(*first), first, of_first),
            lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        )
    found["flex"] = (with_gradients(FlexPeer(*first, flex_mask(mask_name, seqlen, to_device)), first, of_first), plain)
    return found


def measured(contenders, rounds):
    samples = {name: [] for name in contenders}
    for order in orders(contenders, rounds):
        for name in order:
            call, context = contenders[name]
            with context():
                samples[name].append(wall_ms(call))
    return samples


def figures_of(cell, samples):
    return {
        **cell,
        "us": {n: middle(s) * 1e3 for n, s in samples.items()},
        "us_spread": {n: [x * 1e3 for x in spread(s)] for n, s in samples.items()},
        "ours_over": {n: ratio(samples["ours"], s) for n, s in samples.items() if n != "ours"},
    }


def cells_of(op):
    """[{member of a cell: its value}]"""
    return [
        {"mask": mask, "head_dim": head_dim, "heads": heads, "seqlen": seqlen}
        for heads, seqlen in SHAPES[op]
        for mask in MASKS
        for head_dim in HEAD_DIMS
    ]


def kernel_hashes(arguments):
    ops = ("fwd", "bwd") if arguments.op == "bwd" else ("fwd",)
    return arguments.kernels.of_all(
        [
            case_of(op, c["head_dim"], c["seqlen"], BATCH, c["heads"], mask=c["mask"])
            for op in ops
            for c in cells_of(arguments.op)
        ]
    )


def run(arguments, receipt, save, progress_type):
    cells = cells_of(arguments.op)
    progress, figures = progress_type([1] * len(cells)), []
    both = arguments.op == "bwd"
    with torch.set_grad_enabled(both):
        for cell in cells:
            contenders = (both_contenders_of if both else contenders_of)(*cell.values())
            figures.append(figures_of(cell, measured(contenders, arguments.rounds)))
            progress.step(1, f"{cell['mask']} d={cell['head_dim']}, {cell['heads']} x {cell['seqlen']}")
    receipt["figures"]["small"] = {"batch": BATCH, "calls": CALLS, "op": arguments.op, "cells": figures}
    save()
    judged = small_bars.of_all(receipt["figures"]["small"])
    print("\n".join([*(line_of(f) for f in figures), *cell_bars.check_lines(judged)]))
    return all(bar["passed"] for bar in judged)


def line_of(figures):
    us = ", ".join(f"{n} {us:.1f} us" for n, us in figures["us"].items())
    over = ", ".join(f"ours / {n} {r:.2f}" for n, r in figures["ours_over"].items())
    return f"{figures['mask']:16} d={figures['head_dim']:3}, {figures['heads']} x {figures['seqlen']}: {us}; {over}"
