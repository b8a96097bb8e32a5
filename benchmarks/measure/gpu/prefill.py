# SPDX-License-Identifier: Apache-2.0
"""Prefill and verification over KV caches on a Hopper GPU, beside our own forward on contiguous tensors,
FlashAttention-3, FlashInfer, XQA (drafts) and vLLM's Triton kernel (images).

Chunks of new rows over the keys before them, drafts of many requests, images whose tokens see each other, and chunks
over float8 caches. The calls, their plans ready, take turns as those of decode do.
"""

import functools

from benchmarks.measure.gpu import decode, decode_shapes, prefill_bars

PEERS = ("fa3", "flashinfer", "xqa", "vllm_triton")


def add_arguments(parser):
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=150, help="seconds after which nothing more is begun")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)


def check_arguments(arguments):
    decode.check_is_hopper(arguments)


def steps_of(session, steps):
    """[(where its figures belong, what it is called, the step)], the most wanted first. `steps`: their module."""
    chunks = [
        ("chunks", shape.name(page), functools.partial(steps.chunk, session, shape, page))
        for shape, pages in decode_shapes.CHUNKS.items()
        for page in pages
    ]
    drafts = ("drafts", "drafts", functools.partial(steps.drafts, session))
    images = ("images", "images", functools.partial(steps.images, session))
    float8 = ("float8", "float8", functools.partial(steps.float8, session))
    return [*chunks[:2], drafts, images, float8, *chunks[2:]]


def run(arguments, receipt, save, progress_type):
    from benchmarks.measure.gpu import prefill_steps

    steps = functools.partial(steps_of, steps=prefill_steps)
    return decode.run_lists(
        arguments, receipt, save, ("chunks", "drafts", "images", "float8"), steps, prefill_bars.of_all
    )
