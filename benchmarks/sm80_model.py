#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model of the time of the kernels of mma.sync on devices that few have: TFLOP/s of a full mask from figures of the
device and the tables of tiles, and, where receipts of such kernels are, how far it is off.

    python benchmarks/sm80_model.py [--results FOLDER]

What a CTA does for a tile is taken as phases that follow each other: products, each as long as the tensor cores or as
reading its operands from shared memory, whichever is longer, and the exponentials. A second CTA on a multiprocessor
hides barriers and latencies, which a single one waits for; it does not hide phases behind each other. Of masks only
full and causal are modelled, as the visible share of tiles.
"""

import argparse
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import receipts  # noqa: E402
import verdict  # noqa: E402

TILES = HERE.parent / "src" / "backends" / "cuda" / "sm80" / "tile_config.h"
KILOBYTES = {"sm80": 163, "sm86": 99}  # of shared memory that tiles of a set take at most
ERROR_BAR = 0.10
SEQLEN, TOKENS, HIDDEN = 8192, 131072, 4096  # of what is printed, as the benchmark's cases

# Of every multiprocessor. CUDA C++ Programming Guide, throughput of native arithmetic instructions and shared memory:
SHARED_BYTES = 128  # a clock: 32 banks of 4 bytes
EXPONENTIALS = 16  # a clock
L2_BYTES = 64  # a clock, both ways: 5120 bytes for 80 slices and 108 multiprocessors in NVIDIA's A100 white paper
# Other fp32 instructions for a score, counted in the sources: maximum, scale - row_max, sum, half of a conversion;
# backward scale - lse, - delta, times P, two halves of a conversion.
FP32_OF_SCORE = {"fwd": 3.5, "bwd": 4}
# Assumed: clocks in which a barrier leaves the pipes of a lone CTA empty, two of them for a tile.
BARRIER, BARRIERS = 300, 2


class Device(NamedTuple):
    kernels: str  # the set that "auto" would take, or the one that is forced
    multiprocessors: int
    ghz: float
    mma_flop: int  # of mma.sync, 16 bits with fp32 sums, a clock and multiprocessor
    fp32: int  # instructions of a lane, a clock and multiprocessor
    gb_per_second: float  # of memory


# Clocks are NVIDIA's boost clocks, which cards with little power (A10, L4) do not hold; the H200's is what its
# multiprocessors had after minutes of matrix products (`card_after` of receipts, 1.5 to 2.0). mma_flop is the peak of
# the data sheet by clock and multiprocessors: 312, 125, 121, 71, 165 and 209 TFLOP/s. On Hopper mma.sync reaches 62.9 %
# of wgmma's 4096 (Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture, arXiv 2402.13499).
DEVICES = {
    "H200": Device("sm80", 132, 1.5, 2576, 128, 4800),
    "A100": Device("sm80", 108, 1.41, 2048, 64, 2039),
    "A10": Device("sm86", 72, 1.695, 1024, 128, 600),
    "L4": Device("sm86", 58, 2.04, 1024, 128, 300),
    "RTX 3090": Device("sm86", 82, 1.695, 512, 128, 936),
    "RTX 4090": Device("sm86", 128, 2.52, 512, 128, 1008),
    "RTX 5090": Device("sm86", 170, 2.407, 512, 128, 1792),
}


# --- Tiles: rows of tile_config.h --------------------------------------------------------------------


def rows_of(kind, path=TILES):
    """The numbers of each row of a table: ForwardTile or BackwardTile."""
    found = re.findall(rf"^ *{kind}\{{([\d, ]+)\}},", path.read_text(encoding="utf-8"), re.M)
    return [tuple(map(int, row.split(","))) for row in found]


def tile_of(op, head_dim, head_dim_v, kilobytes):
    """The row that the library takes: of the least head dims that hold the call's the largest that fits."""
    rows = rows_of({"fwd": "ForwardTile", "bwd": "BackwardTile"}[op])
    holding = [row for row in rows if row[0] >= head_dim and row[1] >= head_dim_v and row[2] <= kilobytes]
    return min(holding, key=lambda row: (row[0], row[1], -row[2]))


def product(device, m, n, k, reads):
    """Clocks of one of m x n x k whose operands are read as 2 bytes: `reads` of them."""
    return max(2 * m * n * k / device.mma_flop, 2 * reads / SHARED_BYTES)


def pointwise(device, op, scores):
    return scores / EXPONENTIALS + FP32_OF_SCORE[op] * scores / device.fp32


def forward_clocks(device, tile):
    """Of `keys` keys, and how many rows and keys those are for. Every warp reads all of K and V; what the other product
    needs is written meanwhile."""
    dim, dim_v, _, rows, keys, warps, ctas = tile
    scores = product(device, rows, keys, dim, warps * keys * dim + rows * dim + keys * dim_v)
    values = product(device, rows, dim_v, keys, warps * keys * dim_v + keys * dim)
    barriers = BARRIERS * BARRIER * (ctas == 1)
    return scores + pointwise(device, "fwd", rows * keys) + values + barriers, rows, keys


def backward_clocks(device, tile):
    """The same. Eight warps divide a product's columns and rows as BackwardTile in tile_config.h says."""
    dim, dim_v, _, rows, keys, _, _, in_registers = tile

    def grid(m, n, k, column_warps, saved=0):
        """A product whose first operand is read for each group of columns, the second for each group of rows."""
        return product(device, m, n, k, column_warps * m * k + 8 // column_warps * (n * k - saved))

    of_scores = 2 if rows == 128 or (rows == 64 and keys == 64) else 4
    of_dq = 2 if rows == 128 or dim % 64 else 4
    of_gradients = {d: 2 if keys == 128 or d % 64 else 4 for d in (dim, dim_v)}
    products = (
        grid(rows, keys, dim, of_scores)
        + grid(rows, keys, dim_v, of_scores, saved=keys * in_registers)
        + grid(keys, dim_v, rows, of_gradients[dim_v])
        + grid(keys, dim, rows, of_gradients[dim])
        + grid(rows, dim, keys, of_dq)
    )
    # P and dS are written to shared memory, Q and dO arrive there; dq is added in fp32 where the L2 cache is.
    written = 2 * (2 * rows * keys + rows * (dim + dim_v)) / SHARED_BYTES + 4 * rows * dim / L2_BYTES
    return products + pointwise(device, "bwd", rows * keys) + written + BARRIERS * BARRIER, rows, keys


def milliseconds(device, case, kernels):
    """Of a receipt's case."""
    tile = tile_of(case["op"], case["head_dim"], case["head_dim_v"], KILOBYTES[kernels])
    clocks, rows, keys = (forward_clocks if case["op"] == "fwd" else backward_clocks)(device, tile)
    tiles = case["batch"] * case["heads"] * case["seqlen"] ** 2 * case["live"] / (rows * keys)
    busy = tiles * clocks / device.multiprocessors / device.ghz / 1e6
    return busy + memory_bytes(case) / device.gb_per_second / 1e6 if case["op"] == "bwd" else busy


def memory_bytes(case):
    """Of the backward's other kernels: out and dO are read; sums of dq are cleared, read, and dq is written."""
    rows = case["batch"] * case["heads"] * case["seqlen"]
    return rows * (2 * 2 * case["head_dim_v"] + (4 + 4 + 2) * case["head_dim"])


def flop(case):
    of_qk, of_v = {"fwd": (1, 1), "bwd": (3, 2)}[case["op"]]
    columns = of_qk * case["head_dim"] + of_v * case["head_dim_v"]
    return 2 * columns * case["batch"] * case["heads"] * case["seqlen"] ** 2 * case["live"]


# --- What is printed ---------------------------------------------------------------------------------


def full_case(op, head_dim, head_dim_v):
    sizes = {"seqlen": SEQLEN, "batch": TOKENS // SEQLEN, "heads": HIDDEN // head_dim, "live": 1.0}
    return {"op": op, "head_dim": head_dim, "head_dim_v": head_dim_v, **sizes}


def predicted():
    """The lines of the table."""
    dims = sorted({row[:2] for row in rows_of("BackwardTile")})
    heads = "".join(f"{f'{d}/{v}' if d != v else d:>12}" for d, v in dims)
    lines = [f"TFLOP/s of a full mask, {SEQLEN // 1024}K tokens, forward / backward", f"{'':16}{heads}"]
    for name, device in DEVICES.items():
        for kernels in ("sm80", "sm86") if device.kernels == "sm80" else ("sm86",):
            rates = []
            for pair in dims:
                cases = [full_case(op, *pair) for op in ("fwd", "bwd")]
                rates.append(" / ".join(f"{flop(c) / milliseconds(device, c, kernels) / 1e9:.0f}" for c in cases))
            lines.append(f"{name:10}{kernels:6}" + "".join(f"{rate:>12}" for rate in rates))
    return lines


def device_of(text):
    """The figures of a receipt's device; None if there are none."""
    return next((device for name, device in DEVICES.items() if re.search(rf"\b{name}\b", text)), None)


def errors(found):
    """[(label, predicted over measured)] of what is modelled in {file name: receipt}."""
    cells = []
    for receipt in found.values():
        for case in receipt["cases"]:
            device = device_of(receipts.run_of(receipt, case)["device"])
            if device and case["arch"] in KILOBYTES and case["mask"] in ("full", "causal"):
                cells.append((receipts.label_of(case), milliseconds(device, case, case["arch"]) / case["ours_ms"]))
    return cells


def compared(folder):
    """Lines that compare the model with the receipts of a folder."""
    cells = errors(receipts.load_folder(folder))
    if not cells:
        return [f"No receipts of sm80 or sm86 on these devices in {folder}: the predictions are unchecked."]
    mean = math.exp(sum(math.log(ratio) for _, ratio in cells) / len(cells))
    where, worst = max(cells, key=lambda cell: abs(cell[1] - 1))
    name, detail = "model: error of every cell", f"worst {where}, {len(cells)} cells, geometric mean {mean:.3f}"
    check = verdict.check_at_most(name, abs(worst - 1), ERROR_BAR, detail)
    lines = [f"{label:40} predicted over measured {ratio:.3f}" for label, ratio in cells]
    return [*lines, *verdict.check_lines([check])]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=receipts.RESULTS, help="folder of receipts")
    print("\n".join([*predicted(), "", *compared(parser.parse_args(words).results)]))


if __name__ == "__main__":
    main()
