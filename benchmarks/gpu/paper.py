# SPDX-License-Identifier: Apache-2.0
"""The paper's kernel benchmark, forward or backward: twelve masks at one length and head dim, 131072 tokens a case, hidden size 4096.

Correctness comes first in each cell; a cell that fails is not timed. Ours reads [batch, seqlen, heads, d] contiguous, the torch
peers the same values in [batch, heads, seqlen, d] contiguous, which they prefer.
"""

import sys

import paper_masks
import tile_count
import verdict
from samples import middle, ratio

TOKENS, HIDDEN = 128 * 1024, 4096
CONTENDERS = {"fwd": ("ours", "plan", "flex", "cudnn", "dense", "plain"), "bwd": ("ours", "plan", "deterministic", "flex", "cudnn")}
DIRECTION = {"fwd": "forward", "bwd": "backward"}
PRODUCTS = {"fwd": 2, "bwd": 5}  # of matrices, each 2 B H S^2 d over what is visible


class Cell:
    """One mask at one shape, and what of it needs no GPU."""

    def __init__(self, mask, seqlen, head_dim, op="fwd", tokens=TOKENS, hidden=HIDDEN):
        self.op, self.mask, self.seqlen, self.head_dim = op, mask, seqlen, head_dim
        self.batch, self.heads = tokens // seqlen, hidden // head_dim
        self.indices, self.causal = paper_masks.paper_mask(mask, seqlen)
        self.live = tile_count.live_share(self.indices, self.causal, seqlen)
        self.flop = 2 * PRODUCTS[op] * self.batch * self.heads * seqlen * seqlen * head_dim * self.live

    def weight(self):
        """About how long it takes, for progress: seconds of compilation and the work."""
        return (6 if self.op == "fwd" else 12) + self.flop / 2e13

    def tflops(self, ms):
        return self.flop / ms / 1e9


def peer_figures(name, samples, record):
    figures = {"ms": middle(samples[name]), "ratio": ratio(samples[name], samples["ours"]), **record.get(name, {}), "samples": samples[name]}
    if "plan" in samples:
        figures["ratio_with_plan"] = ratio(samples[name], samples["ours"], samples["plan"])
    return figures


def case_of(cell, samples, record, error):
    """The receipt's case. `samples`: {contender: [ms of each round]}; `record`: more about a contender."""
    ours = middle(samples["ours"])
    peers = {name: peer_figures(name, samples, record) for name in samples if name not in ("ours", "plan")}
    return {"op": cell.op, "mask": cell.mask, "head_dim": cell.head_dim, "head_dim_v": cell.head_dim, "seqlen": cell.seqlen, "batch": cell.batch, "heads": cell.heads,
            "heads_kv": cell.heads, "dtype": "bfloat16", "live": cell.live, "plan_ms": middle(samples["plan"]), "ours_ms": ours, "ours_tflops": cell.tflops(ours),
            "error": error, "ours_samples": samples["ours"], "plan_samples": samples["plan"], "peers": peers}


class DryCell:
    """Invented times, to try the driver without a GPU; such a receipt is refused by everything that reads receipts."""

    def __init__(self, cell, arguments):
        self.cell, self.contenders, self.rounds = cell, arguments.contenders, arguments.rounds

    def verify(self):
        if self.cell.op == "bwd":
            return {name: {"ours": 0.001, "plain": 0.001, "allowed": 0.002} for name in ("dq", "dk", "dv")}
        return {"out": 0.001, "plain": 0.001, "allowed": 0.002, "lse": 0.0}

    def samples(self):
        base = self.cell.flop / 6e11
        factor = {"ours": 1.0, "plan": 0.01, "deterministic": 1.05, "flex": 1.6, "cudnn": 1.1, "dense": 5.0, "plain": 20.0}
        names = [n for n in self.contenders if n != "cudnn" or self.cell.mask in ("full", "causal")]
        return {n: [base * factor[n] * (1 + 0.01 * k) for k in range(self.rounds)] for n in names}, {"flex": {"block_mask_ms": 1.0}}


def line_of(case):
    row = verdict.row_of(case)
    words = [f"d={row['head_dim']} S={row['seqlen']} {row['mask']}: {row['tflops']:.1f} TFLOP/s with the plan ({case['plan_ms'] * 1e3:.1f} us)"]
    words += [f"{name} {row[key]:.2f}x" for name, key in (("Flex", "flex"), ("V3", "v3"), ("cuDNN", "cudnn")) if row[key]]
    words += [f"deterministic takes {row['deterministic']:.3f}x the time"] if row["deterministic"] else []
    return ", ".join(words)


def cell_type(arguments):
    """What measures a cell."""
    if arguments.dry_run:
        return DryCell
    if arguments.op == "bwd":
        from paper_backward import GpuBackwardCell

        return GpuBackwardCell
    from paper_gpu import GpuCell

    return GpuCell


def run(arguments, receipt, save, progress_type):
    make = cell_type(arguments)
    cells = [Cell(mask, arguments.seqlen, arguments.head_dim, arguments.op) for mask in arguments.masks]
    progress = progress_type([c.weight() for c in cells])
    for cell in cells:
        label = f"d={cell.head_dim} S={cell.seqlen} {cell.mask}"
        try:
            device_cell = make(cell, arguments)
            error = device_cell.verify()
            samples, record = device_cell.samples()
            receipt["cases"].append(case_of(cell, samples, record, error))
            receipt["tests"]["passed"] += 1
            progress.step(cell.weight(), line_of(receipt["cases"][-1]))
        except (RuntimeError, AssertionError) as failure:  # torch's errors are RuntimeErrors
            receipt["tests"]["failed"] += 1
            receipt.setdefault("failures", []).append({"cell": label, "why": str(failure)[:2000]})
            progress.step(cell.weight(), f"{label} FAILED: {str(failure)[:500]}")
        save()
    return summary(receipt, arguments.op)


def summary(receipt, op):
    rows = verdict.rows_of(receipt["cases"], op)
    found = verdict.checks(rows, op)
    receipt["figures"]["checks"] = found
    lines = verdict.table(rows) + verdict.check_lines(found)
    failures = receipt.get("failures", [])
    lines += [f"FAIL  {f['cell']}: {f['why'][:300]}" for f in failures]
    print("\n".join(lines))
    return not failures and all(c["passed"] for c in found)


def add_arguments(parser):
    parser.add_argument("--op", choices=tuple(CONTENDERS), default="fwd", help="the forward or the backward pass")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128)
    parser.add_argument("--seqlen", type=int, default=8192, help="8192, 32768 or 131072; any multiple of 128 that divides 131072")
    parser.add_argument("--masks", type=lambda t: t.split(","), default=paper_masks.NAMES, help="comma-separated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contenders", type=lambda t: t.split(","), help="comma-separated; ours and plan always run; default: "
                        + "; ".join(f"{op} {','.join(names)}" for op, names in CONTENDERS.items()))
    parser.add_argument("--target-ms", type=float, default=30.0, help="what one measurement should take")


def check_arguments(arguments):
    contenders = CONTENDERS[arguments.op]
    arguments.contenders = contenders if arguments.contenders is None else arguments.contenders
    for given, known in ((arguments.masks, paper_masks.NAMES), (arguments.contenders, contenders)):
        unknown = sorted(set(given) - set(known))
        if unknown:
            sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    if arguments.seqlen % 128 or TOKENS % arguments.seqlen:
        sys.exit(f"--seqlen is {arguments.seqlen}; it must be a multiple of 128 that divides {TOKENS}")
    arguments.contenders = [n for n in contenders if n in {"ours", "plan", *arguments.contenders}]
    arguments.direction = DIRECTION[arguments.op]
    arguments.what = f"{arguments.op}-d{arguments.head_dim}-{arguments.seqlen // 1024}k"
