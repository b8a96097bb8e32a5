# SPDX-License-Identifier: Apache-2.0
"""Decode of requests that begin with the same pages, as a Forest, beside the plain call over the same tables and
FlashInfer's levels, on a Hopper GPU; and the time of a forest's update. Calls take turns as those of decode do.
"""

import functools
import sys

from benchmarks import cell_bars, receipts
from benchmarks.measure.gpu import decode, decode_shapes, forest_bars

PEERS = ("flashinfer",)


def add_arguments(parser):
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=120, help="seconds after which nothing more is begun")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)


def check_arguments(arguments):
    if arguments.kernels.arch != receipts.HOPPER:
        sys.exit(f"forests measures kernels of {receipts.HOPPER}, and {arguments.kernels.arch} is in use")


def steps_of(session, steps):
    """[(where its figures belong, what it is called, the step)]. `steps`: their module."""
    return [
        (
            "cells",
            f"{keys} shared keys of {shape.name(64)}",
            functools.partial(steps.shared_prefix, session, shape, keys),
        )
        for shape, keys in decode_shapes.SHARED
    ]


def summary(figures):
    """The last lines of a run: what was left out, and the bars that were missed."""
    reasons = dict.fromkeys(f"{name}: {why}" for row in figures["cells"] for name, why in row["left_out"].items())
    checks = forest_bars.of_all(figures)
    missed = [c for c in checks if not c["passed"]]
    return [
        *(f"----  {reason}" for reason in reasons),
        *(f"FAIL  {name}: {why}" for name, why in figures["failed"].items()),
        *(f"----  not measured: {name}" for name in figures["not_measured"]),
        f"{len(checks) - len(missed)} of {len(checks)} bars held; missed:",
        *(cell_bars.check_lines(missed) or ["none"]),
    ]


def run(arguments, receipt, save, progress_type):
    from benchmarks.measure.gpu import decode_steps, forest_steps

    session = decode_steps.Session(arguments)
    figures = {"cells": [], "not_measured": [], "failed": {}, "versions": {}}
    receipt["figures"]["forests"] = figures

    def save_so_far():
        figures["versions"] = session.versions()
        receipt["kernel_hashes"] = arguments.kernels.hashes_of({*decode.PLAN_KERNELS, *session.kernels})
        save()

    decode.measure(steps_of(session, forest_steps), figures, arguments.budget, save_so_far)
    print("\n".join(summary(figures)))
    return decode.passes(receipt, forest_bars.of_all(figures), figures["failed"])
