# SPDX-License-Identifier: Apache-2.0
"""Prefill and verification over KV caches on a Hopper GPU, beside our own forward on contiguous tensors,
FlashAttention-3 and FlashInfer.

Chunks of new rows over the keys before them, drafts of many requests, and images whose tokens see each other. The
calls, their plans ready, take turns as those of decode do.
"""

import functools
import sys

from benchmarks import cell_bars, receipts
from benchmarks.measure.gpu import decode, decode_shapes, prefill_bars

PEERS = ("fa3", "flashinfer")


def add_arguments(parser):
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=150, help="seconds after which nothing more is begun")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)


def check_arguments(arguments):
    if arguments.kernels.arch != receipts.HOPPER:
        sys.exit(f"prefill measures kernels of {receipts.HOPPER}, and {arguments.kernels.arch} is in use")


def steps_of(session, steps):
    """[(where its figures belong, what it is called, the step)], the most wanted first. `steps`: their module."""
    chunks = [
        ("chunks", shape.name(page), functools.partial(steps.chunk, session, shape, page))
        for shape, pages in decode_shapes.CHUNKS.items()
        for page in pages
    ]
    drafts = ("drafts", "drafts", functools.partial(steps.drafts, session))
    images = ("images", "images", functools.partial(steps.images, session))
    return [*chunks[:2], drafts, images, *chunks[2:]]


def summary(figures):
    """The last lines of a run: what was left out, and the bars that were missed."""
    rows = [*figures["chunks"], *figures["drafts"], *figures["images"]]
    reasons = dict.fromkeys(f"{name}: {why}" for row in rows for name, why in row["left_out"].items())
    checks = prefill_bars.of_all(figures)
    missed = [c for c in checks if not c["passed"]]
    return [
        *(f"----  {reason}" for reason in reasons),
        *(f"FAIL  {name}: {why}" for name, why in figures["failed"].items()),
        *(f"----  not measured: {name}" for name in figures["not_measured"]),
        f"{len(checks) - len(missed)} of {len(checks)} bars held; missed:",
        *(cell_bars.check_lines(missed) or ["none"]),
    ]


def run(arguments, receipt, save, progress_type):
    from benchmarks.measure.gpu import decode_steps, prefill_steps

    session = decode_steps.Session(arguments)
    figures = {name: [] for name in ("chunks", "drafts", "images", "not_measured")} | {"failed": {}, "versions": {}}
    receipt["figures"]["prefill"] = figures

    def save_so_far():
        figures["versions"] = session.versions()
        receipt["kernel_hashes"] = arguments.kernels.hashes_of({*decode.PLAN_KERNELS, *session.kernels})
        save()

    decode.measure(steps_of(session, prefill_steps), figures, arguments.budget, save_so_far)
    print("\n".join(summary(figures)))
    return decode.passes(receipt, prefill_bars.of_all(figures), figures["failed"])
