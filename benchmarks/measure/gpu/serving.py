# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of Hugging Face transformers: tokens a second of many requests to a random Llama, with our
attention over its paged cache beside transformers' own.

All requests arrive at once, of random lengths; their answers are equally long. Contenders have caches of one size and
take turns. Tokens are the answers'; time runs from the first request to the end of the last, without the start of the
manager. As answers of random weights hang on rounding, how far they agree is put down and not judged; the tests of
tests/integrations compare tokens, in float32.
"""

from benchmarks.instruments.medians import middle, ratio_figures, spread
from benchmarks.instruments.orders import orders
from benchmarks.peers import LeftOut

HEAD_DIM = 64
# Llama 3.2 1B, its prompts' lengths, and its answers'.
MODEL = dict(num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, vocab_size=128256)
MODEL |= dict(num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True)
LENGTHS, ANSWER = (32, 1024), 128
SLOW_SECONDS = 30  # of a run
BATCHING = dict(page_size=256, max_batch_tokens=1024)
# Sizes of a dry run, on a CPU.
DRY_MODEL = dict(num_hidden_layers=2, hidden_size=256, intermediate_size=96, vocab_size=512)
DRY_MODEL |= dict(num_attention_heads=4, num_key_value_heads=2)
DRY_LENGTHS, DRY_ANSWER, DRY_REQUESTS = (3, 40), 4, 5
CONTENDERS = {  # and their names in transformers
    "ours": None,
    "sdpa": "sdpa",
    "eager": "paged|eager",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
}


def add_arguments(parser):
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--contenders", nargs="*", choices=tuple(CONTENDERS), default=tuple(CONTENDERS))
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs; otherwise transformers decides")


def first_answers(workload, contenders):
    """({contender: its answers}, {contender: tokens a second}, {contender: why it is left out}) of a first run of each,
    in which it compiles, or captures, what it needs."""
    answers, speeds, left_out = {}, {}, {}
    for contender in contenders:
        print(f"      {contender}: first answers ...", flush=True)
        try:
            speeds[contender], answers[contender] = workload.answers(CONTENDERS[contender])
            print(f"      {contender}: {speeds[contender]:.0f} tokens/s in its first run", flush=True)
        except LeftOut as why:
            left_out[contender] = f"{why}"
        except Exception as why:  # in whatever way it fails, the others are measured
            left_out[contender] = f"{type(why).__name__}: {why}".split("\n")[0][:300]
            print(f"----  {contender}: {left_out[contender]}", flush=True)
    return answers, speeds, left_out


def speeds_of(workload, contenders, rounds, progress):
    """{contender: tokens a second of each round}, in another order each round."""
    speeds = {contender: [] for contender in contenders}
    for n, order in enumerate(orders(contenders, rounds)):
        for contender in order:
            speeds[contender].append(workload.answers(CONTENDERS[contender])[0])
        progress.step(1, f"round {n + 1} of {rounds}")
    return speeds


def agreement(answers, others):
    """The share of answers' tokens that come before the first one that differs."""
    pairs = [list(zip(*pair, strict=True)) for pair in zip(answers, others, strict=True)]
    same = [next((n for n, (x, y) in enumerate(pair) if x != y), len(pair)) for pair in pairs]
    return sum(same) / sum(map(len, pairs))


def figures_of(contender, speeds, answers):
    own, ours = speeds[contender], speeds.get("ours")
    figures = {"contender": contender, "rounds": len(own)}
    figures |= {"tokens_per_s": middle(own), "tokens_per_s_spread": spread(own)}
    if ours and contender != "ours":
        figures |= ratio_figures("ours_over", ours, own)
        figures["agreement"] = agreement(answers["ours"], answers[contender])
    return figures


def line_of(figures):
    line = f"      {figures['contender']:6}{figures['tokens_per_s']:10.0f} tokens/s"
    if "ours_over" not in figures:
        return line
    return f"{line}; ours {figures['ours_over']:.2f} times as fast, {figures['agreement']:.0%} of the tokens alike"


def own_hashes(hashes):
    """The hashes of kernels that may have run."""
    of_heads = f".decode.bf16.d{HEAD_DIM}.dv{HEAD_DIM}."
    return {i: hashes[i] for i in sorted(hashes) if ".cache." in i or of_heads in i}


def workload_of(arguments):
    from benchmarks.measure.gpu.serving_workload import Workload

    batching = BATCHING | {"use_cuda_graph": False if arguments.no_graphs else None}
    if arguments.dry_run:
        return Workload(DRY_MODEL, DRY_REQUESTS, DRY_LENGTHS, DRY_ANSWER, "cpu", **batching)
    return Workload(MODEL, arguments.requests, LENGTHS, ANSWER, "cuda", **batching)


def run(arguments, receipt, save, progress_type):
    workload = workload_of(arguments)
    receipt["kernel_hashes"] = {} if arguments.dry_run else own_hashes(arguments.kernels.hashes)
    answers, first, left_out = first_answers(workload, arguments.contenders)
    # A contender that takes minutes for its first run has that one alone.
    fast = [contender for contender, speed in first.items() if workload.tokens < SLOW_SECONDS * speed]
    speeds = {contender: [speed] for contender, speed in first.items()}

    def save_figures():
        cells = [figures_of(contender, speeds, answers) for contender in speeds]
        receipt["figures"]["serving"] = {**workload.description(), "cells": cells, "left_out": left_out}
        save()
        return cells

    save_figures()
    speeds |= speeds_of(workload, fast, arguments.rounds, progress_type([1] * arguments.rounds))
    print("\n".join([*(f"----  {name}: {why}" for name, why in left_out.items()), *map(line_of, save_figures())]))
    return "ours" in speeds
