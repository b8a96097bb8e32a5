# SPDX-License-Identifier: Apache-2.0
"""The paper's kernel benchmark, forward or backward: twelve masks at one length and head dim, 131072 tokens a case,
hidden size 4096, and five of the masks once more with grouped heads.

Correctness comes first in each cell; a cell that fails is not timed. Ours reads [batch, seqlen, heads, d] contiguous,
and so do FlashMask V3 and FlashAttention-3; PyTorch's own contenders read the same values in [batch, heads, seqlen, d]
contiguous, which they prefer.
"""

import sys

from benchmarks import cell_bars
from benchmarks.instruments import matmul
from benchmarks.instruments.kernels_used import case_of
from benchmarks.instruments.medians import middle, ratio_figures, spread, time_figures
from benchmarks.masks import paper_masks, visible_tiles
from benchmarks.receipts import HOPPER, SMALL

TOKENS, HIDDEN = 128 * 1024, 4096
# Peers of both directions. matmul is no peer: one 8192^3 bfloat16 product, whose TFLOP/s show how warm the card was.
OTHERS = ("flashmask_v3", "fa3", "flex", "cudnn")
CONTENDERS = {
    "fwd": ("ours", "plan", *OTHERS, "dense", "plain", "matmul"),
    "bwd": ("ours", "plan", "deterministic", *OTHERS, "matmul"),
}
# Peers of mma.sync's kernels: others of mma.sync, FlexAttention and, if the device fits both, their own small tiles.
MMA_SYNC_CONTENDERS = {
    "fwd": ("ours", "plan", "fa2", "flex", "sdpa", "matmul"),
    "bwd": ("ours", "plan", "deterministic", "fa2", "flex", "sdpa", "matmul"),
}
ON_REQUEST = ("fa2", "sdpa", SMALL)
NO_PEERS = ("ours", "plan", "matmul")
# Numbers of matrix products with d = head_dim and d = head_dim_v, each 2 B H S^2 d FLOP over the visible part.
PRODUCTS = {"fwd": (1, 1), "bwd": (3, 2)}
# Current models: 32 query heads for 8 key heads at head dim 128, 64 for 8 at 64.
GROUPED_HEADS_KV = 8
GROUPED_MASKS = ("full", "causal", "causal_document", "document", "shared_question")


class Cell:
    """One mask at one shape, as far as it needs no GPU."""

    def __init__(self, mask, seqlen, head_dim, op="fwd", heads_kv=None, tokens=TOKENS, hidden=HIDDEN, head_dim_v=None):
        self.op, self.mask, self.seqlen, self.head_dim = op, mask, seqlen, head_dim
        self.head_dim_v = head_dim_v or head_dim
        self.batch, self.heads = tokens // seqlen, hidden // head_dim
        self.heads_kv = heads_kv or self.heads
        self.indices, self.causal = paper_masks.paper_mask(mask, seqlen)
        self.live = visible_tiles.live_share(self.indices, self.causal, seqlen)
        of_qk, of_v = PRODUCTS[op]
        columns = of_qk * self.head_dim + of_v * self.head_dim_v
        self.flop = 2 * columns * self.batch * self.heads * seqlen * seqlen * self.live

    @property
    def group(self):
        """Query heads of a key head."""
        return self.heads // self.heads_kv

    @property
    def label(self):
        grouped = f" {self.heads}/{self.heads_kv} heads" if self.group > 1 else ""
        dims = f"{self.head_dim}/{self.head_dim_v}" if self.head_dim_v != self.head_dim else self.head_dim
        return f"d={dims} S={self.seqlen}{grouped} {self.mask}"

    def case(self):
        """The fields of the receipt's case that are known before anything is measured."""
        sizes = self.head_dim, self.seqlen, self.batch, self.heads, self.heads_kv
        return {**case_of(self.op, *sizes, self.mask, head_dim_v=self.head_dim_v), "live": self.live}

    def weight(self):
        """Estimated seconds of compilation and work, for progress."""
        return (6 if self.op == "fwd" else 12) + self.flop / 2e13

    def tflops(self, ms):
        return self.flop / ms / 1e9


def peer_figures(samples, name, record):
    theirs, ours = samples[name], samples["ours"]
    return {**time_figures(theirs), **ratio_figures("ratio", theirs, ours), **record.get(name, {})}


def matmul_figures(values):
    return {**time_figures(values), "tflops": matmul.tflops(middle(values))}


def receipt_case(cell, samples, record, error, left_out, kernels):
    """The receipt's case. `samples`: {contender: [ms of each round]}; `record`: more about a contender; `left_out`:
    {contender: why}."""
    times = {f"{name}_ms": middle(samples[name]) for name in ("plan", "ours")}
    spreads = {f"{name}_ms_spread": spread(samples[name]) for name in ("plan", "ours")}
    peers = {name: peer_figures(samples, name, record) for name in samples if name not in NO_PEERS}
    case = {"arch": kernels.arch, **cell.case()}
    found = {
        **case,
        **times,
        **spreads,
        "ours_tflops": cell.tflops(times["ours_ms"]),
        "kernel_hashes": kernels.of_cell({**case, "peers": peers}),
        "error": error,
        "peers": peers,
        "left_out": left_out,
    }
    return {**found, "matmul": matmul_figures(samples["matmul"])} if "matmul" in samples else found


class DryCell:
    """Invented times, to try the driver without a GPU; such a receipt is refused by everything that reads receipts."""

    FACTORS = {
        "ours": 1.0,
        "plan": 0.01,
        "deterministic": 1.05,
        "flashmask_v3": 1.15,
        "fa3": 1.02,
        "fa2": 1.9,
        "sdpa": 4.0,
        SMALL: 1.1,
        "flex": 1.6,
        "cudnn": 1.1,
        "dense": 5.0,
        "plain": 20.0,
    }
    SOME_MASKS = {
        "cudnn": ("full", "causal"),
        "fa2": ("full", "causal"),
        "fa3": ("full", "causal", "document", "causal_document"),
    }

    def __init__(self, cell, arguments):
        self.cell, self.contenders, self.rounds = cell, arguments.contenders, arguments.rounds
        self.left_out = {"fa3": "invented"} if cell.group > 1 and "fa3" in arguments.contenders else {}

    def verify(self):
        if self.cell.op == "bwd":
            return {name: {"ours": 0.001, "plain": 0.001, "allowed": 0.002} for name in ("dq", "dk", "dv")}
        return {"out": 0.001, "plain": 0.001, "allowed": 0.002, "lse": 0.0}

    def base_ms(self, name):
        if name == "matmul":
            return 2 * matmul.SIZE**3 / 7e11
        return self.cell.flop / 6e11 * self.FACTORS[name]

    def samples(self):
        names = [
            n
            for n in self.contenders
            if n not in self.left_out and self.cell.mask in self.SOME_MASKS.get(n, [self.cell.mask])
        ]
        times = {n: [self.base_ms(n) * (1 + 0.01 * k) for k in range(self.rounds)] for n in names}
        return times, {"flex": {"block_mask_ms": 1.0}}


def line_of(cell, case):
    with_plan = case["ours_ms"] + case["plan_ms"]
    words = [f"{cell.label}: {cell.tflops(with_plan):.1f} TFLOP/s with the plan ({case['plan_ms'] * 1e3:.1f} us)"]
    words += [f"{name} {cell_bars.ratio_to(case, name):.2f}" for name in case["peers"]]
    words += [f"left out {name}" for name in case["left_out"]]
    return ", ".join(words)


def cell_type(arguments):
    """The class that measures a cell."""
    if arguments.dry_run:
        return DryCell
    if arguments.op == "bwd":
        from benchmarks.measure.gpu.backward_cell import GpuBackwardCell

        return GpuBackwardCell
    from benchmarks.measure.gpu.forward_cell import GpuCell

    return GpuCell


def measured(cell, make, arguments):
    """The receipt's case of a cell, whose tensors are gone when it returns."""
    device_cell = make(cell, arguments)
    error = device_cell.verify()
    samples, record = device_cell.samples()
    return receipt_case(cell, samples, record, error, device_cell.left_out, arguments.kernels)


def cells_of(arguments):
    """The cells asked for; by default every mask with ungrouped heads, then some masks with grouped heads."""
    heads = HIDDEN // arguments.head_dim
    grouped = () if arguments.masks or heads % GROUPED_HEADS_KV else (GROUPED_HEADS_KV,)
    heads_kv = arguments.heads_kv or (heads, *grouped)
    sizes = arguments.seqlen, arguments.head_dim, arguments.op
    return [
        Cell(mask, *sizes, n, arguments.tokens, head_dim_v=arguments.head_dim_v)
        for n in heads_kv
        for mask in arguments.masks or (paper_masks.NAMES if n == heads else GROUPED_MASKS)
    ]


def run(arguments, receipt, save, progress_type):
    make, cells = cell_type(arguments), cells_of(arguments)
    progress = progress_type([c.weight() for c in cells])
    for cell in cells:
        try:
            receipt["cases"].append(measured(cell, make, arguments))
            receipt["tests"]["passed"] += 1
            progress.step(cell.weight(), line_of(cell, receipt["cases"][-1]))
        except (RuntimeError, AssertionError) as failure:  # torch's errors are RuntimeErrors
            receipt["tests"]["failed"] += 1
            receipt.setdefault("failures", []).append({"cell": cell.label, "why": str(failure)[:2000]})
            progress.step(cell.weight(), f"{cell.label} FAILED: {str(failure)[:500]}")
        save()
    return summary(receipt, arguments.op)


def summary(receipt, op):
    lines, found = [], []
    for grouped in (False, True):
        rows = cell_bars.rows_of([c for c in receipt["cases"] if (c["heads_kv"] != c["heads"]) is grouped], op)
        if not rows:
            continue
        lines += [f"grouped heads, {GROUPED_HEADS_KV} key heads"] if grouped else []
        lines += cell_bars.table(rows)
        found += [] if grouped else cell_bars.checks(rows, op)  # the bars are of heads that are not grouped
    receipt["figures"]["checks"] = found
    lines += cell_bars.check_lines(found)
    left_out = {item for case in receipt["cases"] for item in case["left_out"].items()}
    lines += [f"----  {name}: {why}" for name, why in sorted(left_out)]
    failures = receipt.get("failures", [])
    lines += [f"FAIL  {f['cell']}: {f['why'][:300]}" for f in failures]
    print("\n".join(lines))
    return not failures and all(c["passed"] for c in found)


def names(text):
    return text.split(",")


def numbers(text):
    return [int(n) for n in text.split(",")]


def add_arguments(parser):
    parser.add_argument("--op", choices=tuple(CONTENDERS), default="fwd", help="the forward or the backward pass")
    parser.add_argument("--head-dim", type=int, default=128, help="one that the library has kernels of")
    parser.add_argument("--head-dim-v", type=int, help="default: as --head-dim")
    parser.add_argument(
        "--seqlen", type=int, default=8192, help="8192, 32768 or 131072; any multiple of 128 that divides 131072"
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="of a case, batch times seqlen; default: %(default)s"
    )
    parser.add_argument("--masks", type=names, help="comma-separated; default: all")
    parser.add_argument(
        "--heads-kv",
        type=numbers,
        help="comma-separated; default: as many as query heads and, unless "
        f"--masks is given, {GROUPED_HEADS_KV} for {','.join(GROUPED_MASKS)}",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--contenders",
        type=names,
        help="comma-separated; ours and plan always run; default: "
        + "; ".join(f"{op} {','.join(found)}" for op, found in CONTENDERS.items())
        + f"; of the kernels of mma.sync fwd {','.join(MMA_SYNC_CONTENDERS['fwd'])}, and {SMALL} beside sm80; "
        + f"on request: {','.join(ON_REQUEST)}",
    )
    parser.add_argument(
        "--without", type=names, default=[], help="comma-separated contenders, of either op, to leave out"
    )
    parser.add_argument("--target-ms", type=float, default=30.0, help="what one measurement should take")


def default_contenders(op, arch):
    if arch == HOPPER:
        return CONTENDERS[op]
    return (*MMA_SYNC_CONTENDERS[op], *[SMALL] * (arch == "sm80"))


def check_arguments(arguments):
    """`arguments` with its kernels."""
    known = (*CONTENDERS[arguments.op], *ON_REQUEST)
    of_both = list(dict.fromkeys((*CONTENDERS["fwd"], *CONTENDERS["bwd"], *ON_REQUEST)))
    default = default_contenders(arguments.op, arguments.kernels.arch)
    asked = default if arguments.contenders is None else arguments.contenders
    for given, accepted in ((arguments.masks or [], paper_masks.NAMES), (asked, known), (arguments.without, of_both)):
        if unknown := sorted(set(given) - set(accepted)):
            sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(accepted)}")
    if arguments.seqlen % 128 or arguments.tokens % arguments.seqlen:
        sys.exit(f"--seqlen is {arguments.seqlen}; it must be a multiple of 128 that divides {arguments.tokens}")
    heads = HIDDEN // arguments.head_dim
    if wrong := [n for n in arguments.heads_kv or [] if n < 1 or heads % n]:
        sys.exit(f"--heads-kv has {wrong[0]}; it must divide the query heads, {heads}")
    arguments.contenders = [n for n in known if n in {"ours", "plan", *(set(asked) - set(arguments.without))}]
    arguments.head_dim_v = arguments.head_dim_v or arguments.head_dim
    arguments.what = f"{arguments.op}-d{arguments.head_dim}-dv{arguments.head_dim_v}-{arguments.seqlen // 1024}k"
