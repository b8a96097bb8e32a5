#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles FlexAttention for the cells of the paper's benchmark, several at once.

torch keeps what it compiled on disk, where the measurements that follow find it: compiling one cell after the other takes longer than
measuring them.

    python benchmarks/gpu/compile_flex.py --op fwd,bwd --head-dims 64,128 --seqlens 8192,32768 --jobs 8
"""

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import paper  # noqa: E402
import paper_masks  # noqa: E402


def compile_cell(cell):
    """The cell's label, and why it did not compile if it did not: then it is compiled when it is measured."""
    import torch
    from flex_masks import flex_mask
    from paper_backward import flex_backward
    from paper_gpu import FlexPeer, to_device

    label = f"{cell.op} d={cell.head_dim} S={cell.seqlen} {cell.mask}"
    inputs = [torch.randn((cell.batch, cell.heads, cell.seqlen, cell.head_dim), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    mask_mod = flex_mask(cell.mask, cell.seqlen, to_device)
    try:
        if cell.op == "bwd":
            flex_backward([x.requires_grad_() for x in inputs[:3]], inputs[3], mask_mod)
        else:
            with torch.no_grad():
                FlexPeer(*inputs[:3], mask_mod)
        return label
    except Exception as error:  # whatever the compiler throws
        return f"{label} FAILED: {str(error)[:300]}"
    finally:
        torch.cuda.empty_cache()


def parse_arguments(words):
    def numbers(text):
        return [int(n) for n in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", type=lambda t: t.split(","), default=["fwd", "bwd"])
    parser.add_argument("--head-dims", type=numbers, default=[128, 64])
    parser.add_argument("--seqlens", type=numbers, default=[8192, 32768, 131072])
    parser.add_argument("--masks", type=lambda t: t.split(","), default=paper_masks.NAMES)
    parser.add_argument("--jobs", type=int, default=8, help="processes; each holds one cell's tensors, up to 12 GiB")
    return parser.parse_args(words)


def main(words=None):
    arguments = parse_arguments(words)
    cells = [paper.Cell(mask, seqlen, head_dim, op) for seqlen in arguments.seqlens for head_dim in arguments.head_dims for op in arguments.op
             for mask in arguments.masks]
    from timing import Progress

    progress = Progress([cell.weight() for cell in cells])
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = {pool.submit(compile_cell, cell): cell for cell in cells}
        for done in as_completed(work):
            progress.step(work[done].weight(), done.result())


if __name__ == "__main__":
    main()
