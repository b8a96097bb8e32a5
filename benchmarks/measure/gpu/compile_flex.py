# SPDX-License-Identifier: Apache-2.0
"""Compiles FlexAttention for the cells of the paper's benchmark, several at once.

torch keeps what it compiled on disk, where the measurements that follow find it: compiling one cell after the other
takes longer than measuring them.

    python -m benchmarks.measure.gpu.compile_flex --slices fwd:128:8192,bwd:64:8192 --jobs 8
    python -m benchmarks.measure.gpu.compile_flex --slices stale --longest 32768

The slices are those of run_slices.py.
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed

from benchmarks.measure.gpu import bench, paper, slices


def compile_cell(cell):
    """The cell's label, and the reason if it did not compile: then it is compiled when it is measured."""
    import torch

    from benchmarks.masks.flex_masks import flex_mask
    from benchmarks.measure.gpu.backward_cell import flex_backward
    from benchmarks.measure.gpu.forward_cell import FlexPeer, to_device

    label = f"{cell.op} {cell.label}"
    dim, dim_v = cell.head_dim, cell.head_dim_v
    inputs = [
        torch.randn((cell.batch, heads, cell.seqlen, width), dtype=torch.bfloat16, device="cuda")
        for heads, width in ((cell.heads, dim), (cell.heads_kv, dim), (cell.heads_kv, dim_v), (cell.heads, dim_v))
    ]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    slices.add_arguments(parser)
    parser.add_argument("--jobs", type=int, default=8, help="processes; each holds one cell's tensors, up to 12 GiB")
    arguments = parser.parse_args(words)
    slices.check_arguments(parser, arguments)
    return arguments


def cells_of(arguments):
    return [cell for words in slices.chosen(arguments) for cell in paper.cells_of(bench.parse(words))]


def main(words=None):
    arguments = parse_arguments(words)
    cells = cells_of(arguments)
    from benchmarks.instruments.timing import Progress

    progress = Progress([cell.weight() for cell in cells])
    with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = {pool.submit(compile_cell, cell): cell for cell in cells}
        for done in as_completed(work):
            progress.step(work[done].weight(), done.result())


if __name__ == "__main__":
    main()
