# SPDX-License-Identifier: Apache-2.0
"""Compiles FlexAttention for the cells of the paper's benchmark, several at once.

torch keeps what it compiled on disk, where the measurements that follow find it: compiling one cell after the other
takes longer than measuring them.

    python -m benchmarks.measure.gpu.compile_flex --op fwd,bwd --head-dims 64,128 --seqlens 8192,32768 --jobs 8
"""

import argparse
import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed

from benchmarks.measure.gpu import paper


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
    parser.add_argument("--op", type=paper.names, default=["fwd", "bwd"])
    parser.add_argument("--head-dims", type=paper.numbers, default=[128, 64])
    parser.add_argument("--seqlens", type=paper.numbers, default=[8192, 32768, 131072])
    parser.add_argument("--masks", type=paper.names, help="default: all, and some with grouped heads")
    parser.add_argument("--heads-kv", type=paper.numbers, help="as of bench.py paper")
    parser.add_argument("--jobs", type=int, default=8, help="processes; each holds one cell's tensors, up to 12 GiB")
    return parser.parse_args(words)


def cells_of(arguments):
    shapes = itertools.product(arguments.seqlens, arguments.head_dims, arguments.op)
    return [
        cell
        for seqlen, head_dim, op in shapes
        for cell in paper.cells_of(
            argparse.Namespace(
                op=op,
                head_dim=head_dim,
                head_dim_v=head_dim,
                seqlen=seqlen,
                tokens=paper.TOKENS,
                masks=arguments.masks,
                heads_kv=arguments.heads_kv,
            )
        )
    ]


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
