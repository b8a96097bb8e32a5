#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model of the time of the kernels of mma.sync on devices that few have: TFLOP/s of a full mask from figures of the
device and the tables of tiles, and, where receipts of such kernels are, how far it is off.

    python benchmarks/sm80_model.py [--results FOLDER] [--refit]

What a CTA does for a tile is taken as phases that follow each other: products, each as long as the tensor cores or as
reading its operands from shared memory, whichever is longer, and a share of the other; exponentials; writing to shared
memory; adding dq. A second CTA on a multiprocessor hides what a barrier costs a lone one; it does not hide phases
behind each other. A query tile of the forward has a beginning and an end besides. Of masks only full and causal are
modelled, as the visible share of tiles, without the element mask of those on the diagonal. The deterministic backward
is not modelled.

Four constants are fitted to receipts. --refit fits them anew, and for each pair of head dims without its cells, and
says how far off those are then.
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
# Other fp32 instructions for a score, counted in the sources: maximum, scale - row_max, sum, half of a conversion;
# backward scale - lse, - delta, times P, two halves of a conversion.
FP32_OF_SCORE = {"fwd": 3.5, "bwd": 4}
REGISTERS = 65536  # a thread of the forward has up to 255


class Fitted(NamedTuple):
    """Constants of all kernels and devices: what --refit prints, rounded so that the largest error becomes less."""

    # Of a product's shorter part, multiplying or reading operands, what does not run under the longer: warps that a
    # barrier has put in step read, and then multiply, at the same time.
    unhidden: float
    # Clocks for which a lone CTA's pipes are empty at a barrier: the slowest warp, the loads it waits for, the first
    # operands, the last sums.
    barrier: float
    # Clocks for a byte of dq that RED.F32 adds, a sector of 32 bytes a clock: the next reads of shared memory wait
    # behind it in the same unit.
    dq: float
    # Clocks of a lone CTA of the forward before its first step and after its last: it starts, finds its rows in the
    # plan, waits for the first loads, and stores; and what it leaves idle in the last round.
    query_tile: float


FITTED = Fitted(unhidden=0.2, barrier=395, dq=1 / 31, query_tile=22000)


class Device(NamedTuple):
    kernels: str  # the set that "auto" would take, or the one that is forced
    multiprocessors: int
    ghz: float
    mma_flop: int  # of mma.sync, 16 bits with fp32 sums, a clock and multiprocessor
    fp32: int  # instructions of a lane, a clock and multiprocessor
    shared_kilobytes: int  # of a multiprocessor
    gb_per_second: float  # of memory


# Clocks are NVIDIA's boost clocks, which cards with little power (A10, L4) do not hold. The H100's is the median of
# what receipts of these kernels found under load (`card_before`, `card_after`: 1.4 to 1.98, with 700 W); the H200, the
# same chip with as much power, is taken to hold it, too. mma_flop is the peak of the data sheet by clock and
# multiprocessors: 312, 125, 121, 71, 165 and 209 TFLOP/s. On Hopper mma.sync reaches 62.9 % of wgmma's 4096 (Luo et
# al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture, arXiv 2402.13499).
DEVICES = {
    "H100": Device("sm80", 132, 1.9, 2576, 128, 228, 3350),
    "H200": Device("sm80", 132, 1.9, 2576, 128, 228, 4800),
    "A100": Device("sm80", 108, 1.41, 2048, 64, 164, 2039),
    "A10": Device("sm86", 72, 1.695, 1024, 128, 100, 600),
    "L4": Device("sm86", 58, 2.04, 1024, 128, 100, 300),
    "RTX 3090": Device("sm86", 82, 1.695, 512, 128, 100, 936),
    "RTX 4090": Device("sm86", 128, 2.52, 512, 128, 100, 1008),
    "RTX 5090": Device("sm86", 170, 2.407, 512, 128, 100, 1792),
}


# --- Tiles: rows of tile_config.h --------------------------------------------------------------------


def rows_of(kind, path=TILES):
    """The numbers of each row of a table: ForwardTile or BackwardTile."""
    found = re.findall(rf"^ *{kind}\{{([\d, ]+)\}},", path.read_text(encoding="utf-8"), re.M)
    return [tuple(map(int, row.split(","))) for row in found]


def tile_of(device, op, head_dim, head_dim_v, kilobytes):
    """The row that the library takes: of the least head dims that hold the call's the largest that fits; in the forward
    the one of which a multiprocessor holds most warps, then most CTAs."""
    rows = rows_of({"fwd": "ForwardTile", "bwd": "BackwardTile"}[op])
    holding = [row for row in rows if row[0] >= head_dim and row[1] >= head_dim_v and row[2] <= kilobytes]

    def worth(row):
        held = ctas(device, row) if op == "fwd" else 0
        return (-row[0], -row[1], held * row[5], held, row[2])

    return max(holding, key=worth)


def product(device, fitted, m, n, k, reads):
    """Clocks of one of m x n x k whose operands are read as 2 bytes: `reads` of them."""
    shorter, longer = sorted((2 * m * n * k / device.mma_flop, 2 * reads / SHARED_BYTES))
    return longer + fitted.unhidden * shorter


def pointwise(device, op, scores):
    return scores / EXPONENTIALS + FP32_OF_SCORE[op] * scores / device.fp32


def ctas(device, tile):
    """How many of the forward a multiprocessor holds at a time."""
    dim, dim_v, _, rows, keys, warps, _ = tile
    needed = 2 * (rows * dim + keys * (dim + dim_v)) + 16 * rows + 1024  # mask bits; what CUDA keeps
    return min(REGISTERS // (256 * 32 * warps), 1024 * device.shared_kilobytes // needed)


def forward_clocks(device, fitted, tile):
    """Of `keys` keys, how many rows and keys those are for, and of each query tile besides.

    Every warp reads all of K and V, and its rows of Q unless they are in registers (`kQInRegisters`).
    """
    dim, dim_v, _, rows, keys, warps, _ = tile
    of_q = 0 if rows == 16 * warps and dim <= 192 else rows * dim
    products = product(device, fitted, rows, keys, dim, warps * keys * dim + of_q)
    products += product(device, fitted, rows, dim_v, keys, warps * keys * dim_v)
    written = 2 * keys * (dim + dim_v) / SHARED_BYTES
    barriers = 2 * fitted.barrier * (ctas(device, tile) == 1)
    clocks = products + pointwise(device, "fwd", rows * keys) + written + barriers
    return clocks, rows, keys, fitted.query_tile / ctas(device, tile)


def backward_clocks(device, fitted, tile):
    """The same. Eight warps divide a product's columns and rows as BackwardTile in tile_config.h says."""
    dim, dim_v, _, rows, keys, _, dout_buffers, in_registers = tile

    def grid(m, n, k, column_warps, saved=0):
        """A product whose first operand is read for each group of columns, the second for each group of rows."""
        return product(device, fitted, m, n, k, column_warps * m * k + 8 // column_warps * (n * k - saved))

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
    # P and dS are written to shared memory, Q and dO arrive there.
    written = 2 * (2 * rows * keys + rows * (dim + dim_v)) / SHARED_BYTES
    waits = (2 + (dout_buffers == 1)) * fitted.barrier + 4 * rows * dim * fitted.dq
    return products + pointwise(device, "bwd", rows * keys) + written + waits, rows, keys, 0


def milliseconds(device, case, kernels, fitted=FITTED):
    """Of a receipt's case."""
    tile = tile_of(device, case["op"], case["head_dim"], case["head_dim_v"], KILOBYTES[kernels])
    clocks, rows, keys, of_query_tile = (forward_clocks if case["op"] == "fwd" else backward_clocks)(
        device, fitted, tile
    )
    tiles = case["batch"] * case["heads"] * case["seqlen"] ** 2 * case["live"] / (rows * keys)
    query_tiles = case["batch"] * case["heads"] * case["seqlen"] / rows
    busy = (tiles * clocks + query_tiles * of_query_tile) / device.multiprocessors / device.ghz / 1e6
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


class Cell(NamedTuple):
    device: Device
    case: dict
    kernels: str
    ms: float  # measured

    def label(self):
        dims = self.case["head_dim"], self.case["head_dim_v"]
        named = {**self.case, "arch": self.kernels, "head_dim": "/".join(map(str, sorted({*dims}, reverse=True)))}
        return receipts.label_of(named)

    def error(self, fitted=FITTED):
        """Predicted over measured."""
        return milliseconds(self.device, self.case, self.kernels, fitted) / self.ms


def cells_of(found):
    """What is modelled in {file name: receipt}; where sm86 has a tile of its own, that too."""
    cells = []
    for receipt in found.values():
        for case in receipt["cases"]:
            device, kernels = device_of(receipts.run_of(receipt, case)["device"]), case["arch"]
            if not device or kernels not in KILOBYTES or case["mask"] not in ("full", "causal"):
                continue
            cells.append(Cell(device, case, kernels, case["ours_ms"]))
            of_case = case["op"], case["head_dim"], case["head_dim_v"]
            small = case["peers"].get(receipts.SMALL, {})
            if "ms" in small and len({tile_of(device, *of_case, most) for most in KILOBYTES.values()}) == 2:
                cells.append(Cell(device, case, receipts.SMALL, small["ms"]))
    return cells


def judged(name, errors):
    """A line for [(label, predicted over measured)]."""
    mean = math.exp(sum(math.log(ratio) for _, ratio in errors) / len(errors))
    where, worst = max(errors, key=lambda error: abs(error[1] - 1))
    detail = f"worst {where}, {len(errors)} cells, geometric mean {mean:.3f}"
    return verdict.check_lines([verdict.check_at_most(f"model: {name}", abs(worst - 1), ERROR_BAR, detail)])[0]


def compared(folder):
    """Lines that compare the model with the receipts of a folder."""
    errors = [(cell.label(), cell.error()) for cell in cells_of(receipts.load_folder(folder))]
    if not errors:
        return [f"No receipts of sm80 or sm86 on these devices in {folder}: the predictions are unchecked."]
    lines = [f"{label:40} predicted over measured {ratio:.3f}" for label, ratio in errors]
    return [*lines, judged("error of every cell", errors)]


def refit(cells):
    """The constants with the least squares of relative errors: times are linear in them."""
    import numpy as np

    count = len(Fitted._fields)
    base = np.array([cell.error(Fitted(*np.zeros(count))) for cell in cells])
    slopes = np.array([[cell.error(Fitted(*unit)) for unit in np.eye(count)] for cell in cells]) - base[:, None]
    return Fitted(*map(float, np.linalg.lstsq(slopes, 1 - base, rcond=None)[0]))


def refitted(folder):
    """Lines: the constants fitted to a folder, and the errors of each pair of head dims under those of the others."""
    cells = cells_of(receipts.load_folder(folder))

    def dims(cell):
        return cell.case["head_dim"], cell.case["head_dim_v"]

    pairs, errors = sorted({dims(cell) for cell in cells}), []
    if len(pairs) < 2:
        return ["Too few receipts to fit the constants to."]
    for pair in pairs:
        fitted = refit([cell for cell in cells if dims(cell) != pair])
        errors += [(cell.label(), cell.error(fitted)) for cell in cells if dims(cell) == pair]
    constants = ", ".join(f"{name} {value:.3g}" for name, value in refit(cells)._asdict().items())
    return [f"fitted to all: {constants}", judged("error of head dims left out of the fit", errors)]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=receipts.RESULTS, help="folder of receipts")
    parser.add_argument("--refit", action="store_true", help="fit the constants to the receipts")
    options = parser.parse_args(words)
    lines = [*predicted(), "", *compared(options.results)]
    print("\n".join([*lines, *refitted(options.results)] if options.refit else lines))


if __name__ == "__main__":
    main()
