# SPDX-License-Identifier: Apache-2.0
"""The paper's kernel benchmark, forward: twelve masks at one length and head dim, 131072 tokens a case, hidden size 4096.

Correctness comes first in each cell; a cell that fails is not timed. Ours reads [batch, seqlen, heads, d] contiguous, the torch
peers the same values in [batch, heads, seqlen, d] contiguous, which they prefer.
"""

import sys

import paper_masks
import tile_count
import verdict
from samples import middle, ratio

TOKENS, HIDDEN = 128 * 1024, 4096
CONTENDERS = ("ours", "plan", "flex", "cudnn", "dense", "plain")


class Cell:
    """One mask at one shape, and what of it needs no GPU."""

    def __init__(self, mask, seqlen, head_dim, tokens=TOKENS, hidden=HIDDEN):
        self.mask, self.seqlen, self.head_dim = mask, seqlen, head_dim
        self.batch, self.heads = tokens // seqlen, hidden // head_dim
        self.indices, self.causal = paper_masks.paper_mask(mask, seqlen)
        self.live = tile_count.live_share(self.indices, self.causal, seqlen)
        self.flop = 4 * self.batch * self.heads * seqlen * seqlen * head_dim * self.live

    def weight(self):
        """About how long it takes, for progress: seconds of compilation and the work."""
        return 6 + self.flop / 2e13

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
    return {"op": "fwd", "mask": cell.mask, "head_dim": cell.head_dim, "head_dim_v": cell.head_dim, "seqlen": cell.seqlen, "batch": cell.batch, "heads": cell.heads,
            "heads_kv": cell.heads, "dtype": "bfloat16", "live": cell.live, "plan_ms": middle(samples["plan"]), "ours_ms": ours, "ours_tflops": cell.tflops(ours),
            "error": error, "ours_samples": samples["ours"], "plan_samples": samples["plan"], "peers": peers}


class DryCell:
    """Invented times, to try the driver without a GPU; such a receipt is refused by everything that reads receipts."""

    def __init__(self, cell, arguments):
        self.cell, self.contenders, self.rounds = cell, arguments.contenders, arguments.rounds

    def verify(self):
        return {"out": 0.001, "plain": 0.001, "allowed": 0.002, "lse": 0.0}

    def samples(self):
        base = self.cell.flop / 6e11
        factor = {"ours": 1.0, "plan": 0.01, "flex": 1.6, "cudnn": 1.1, "dense": 5.0, "plain": 20.0}
        names = [n for n in self.contenders if n != "cudnn" or self.cell.mask in ("full", "causal")]
        return {n: [base * factor[n] * (1 + 0.01 * k) for k in range(self.rounds)] for n in names}, {"flex": {"block_mask_ms": 1.0}}


def line_of(case):
    row = verdict.row_of(case)
    words = [f"d={row['head_dim']} S={row['seqlen']} {row['mask']}: {row['tflops']:.1f} TFLOP/s with the plan ({case['plan_ms'] * 1e3:.1f} us)"]
    words += [f"{name} {row[key]:.2f}x" for name, key in (("Flex", "flex"), ("V3", "v3"), ("cuDNN", "cudnn")) if row[key]]
    return ", ".join(words)


def run(arguments, receipt, save, progress_type):
    make = DryCell
    if not arguments.dry_run:
        from paper_gpu import GpuCell as make
    cells = [Cell(mask, arguments.seqlen, arguments.head_dim) for mask in arguments.masks]
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
    return summary(receipt)


def summary(receipt):
    rows = verdict.rows_of(receipt["cases"])
    found = verdict.checks(rows)
    receipt["figures"]["checks"] = found
    lines = verdict.table(rows) + verdict.check_lines(found)
    failures = receipt.get("failures", [])
    lines += [f"FAIL  {f['cell']}: {f['why'][:300]}" for f in failures]
    print("\n".join(lines))
    return not failures and all(c["passed"] for c in found)


def add_arguments(parser):
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128)
    parser.add_argument("--seqlen", type=int, default=8192, help="8192, 32768 or 131072; any multiple of 128 that divides 131072")
    parser.add_argument("--masks", type=lambda t: t.split(","), default=paper_masks.NAMES, help="comma-separated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contenders", type=lambda t: t.split(","), default=list(CONTENDERS), help=f"comma-separated, of {','.join(CONTENDERS)}; ours and plan always run")
    parser.add_argument("--target-ms", type=float, default=30.0, help="what one measurement should take")


def check_arguments(arguments):
    for given, known in ((arguments.masks, paper_masks.NAMES), (arguments.contenders, CONTENDERS)):
        unknown = sorted(set(given) - set(known))
        if unknown:
            sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    if arguments.seqlen % 128 or TOKENS % arguments.seqlen:
        sys.exit(f"--seqlen is {arguments.seqlen}; it must be a multiple of 128 that divides {TOKENS}")
    arguments.contenders = [n for n in CONTENDERS if n in {"ours", "plan", *arguments.contenders}]
    arguments.what = f"fwd-d{arguments.head_dim}-{arguments.seqlen // 1024}k"
