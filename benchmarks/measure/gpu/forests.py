# SPDX-License-Identifier: Apache-2.0
"""Decode of requests that begin with the same pages, as a Forest, beside the plain call over the same tables and
FlashInfer's levels, on a Hopper GPU; and the time of a forest's update. Calls take turns as those of decode do.
"""

import functools

from benchmarks.measure.gpu import decode, decode_shapes, forest_bars

PEERS = ("flashinfer",)


def add_arguments(parser):
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=120, help="seconds after which nothing more is begun")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)


def check_arguments(arguments):
    decode.check_is_hopper(arguments)


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


def run(arguments, receipt, save, progress_type):
    from benchmarks.measure.gpu import forest_steps

    steps = functools.partial(steps_of, steps=forest_steps)
    return decode.run_lists(arguments, receipt, save, ("cells",), steps, forest_bars.of_all)
