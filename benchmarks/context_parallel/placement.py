# SPDX-License-Identifier: Apache-2.0
"""How placements balance, what their ranks receive, and how long placing takes: the table of docs/context-parallel.md.

    python -m benchmarks.context_parallel.placement            # print the table
    python -m benchmarks.context_parallel.placement --check    # and fail where a bar is missed
    python -m benchmarks.context_parallel.placement --travels  # print what travels over the least that has to

Masks are those of MARCO's table: 32K tokens in a batch of two, and 128K; causal documents, documents, and prefix-LM
documents whose prefix is a third. Document lengths are log-uniform from 256 to a quarter of the sequence. Received keys
are those of the rank with most of them, as a share of what an all-gather brings to each. Needs no GPU.
"""

import argparse
import math
import random
import sys
import time

import torch
from flashmask import masks
from flashmask.context_parallel import place

MOST_IMBALANCE = 1.03
MOST_TRAVELS = 1.1
MOST_MS = 5.0  # at 128K, of processor time
RANKS = (2, 4, 8, 16)
KINDS = ("causal_document", "document", "prefix_lm_document")


def document_lengths(seqlen, seed, least=256, most=None):
    """Log-uniform lengths that fill the sequence."""
    draw = random.Random(seed)
    span = math.log(least), math.log(most or seqlen // 4)
    lengths, left = [], seqlen
    while left:
        lengths.append(min(left, int(math.exp(draw.uniform(*span)))))
        left -= lengths[-1]
    return lengths


def document_mask(kind, seqlen, seeds, **span):
    """A mask with a batch entry for each seed."""

    def of(seed):
        lengths = document_lengths(seqlen, seed, **span)
        prefix = {"prefix": [max(1, n // 3) for n in lengths]} if kind == "prefix_lm_document" else {}
        return getattr(masks, kind)(seqlens=lengths, **prefix)

    entries = [of(seed) for seed in seeds]
    return entries[0].replace(bounds=torch.cat([m.bounds for m in entries]))


def cells(seed):
    for seqlen, batch in ((32768, 2), (131072, 1)):
        for kind in KINDS:
            yield seqlen, batch, kind, document_mask(kind, seqlen, [2 * seed + b for b in range(batch)])


def placing_ms(mask, ranks):
    """Processor time of the fastest of five, in ms."""
    times = []
    for _ in range(5):
        begin = time.process_time()
        place(mask, ranks)
        times.append(time.process_time() - begin)
    return min(times) * 1e3


def rows(seed):
    for seqlen, batch, kind, mask in cells(seed):
        for ranks in RANKS:
            by_scheme = {scheme: place(mask, ranks, scheme=scheme) for scheme in ("contiguous", "zigzag", "balanced")}
            gathered = batch * seqlen * (ranks - 1) / ranks
            yield (
                (seqlen, kind, ranks),
                {s: p.imbalance() for s, p in by_scheme.items()},
                {s: max(p.received_rows()) / gathered for s, p in by_scheme.items()},
                placing_ms(mask, ranks),
            )


def travels(seed):
    """Prints the largest share of any rank of the keys that travel over those that its rows see; the worst of all."""
    worst = 0.0
    print("| tokens | mask | ranks | keys that travel over the least |")
    print("| --- " * 4 + "|")
    for seqlen, _, kind, mask in cells(seed):
        for ranks in RANKS:
            placement = place(mask, ranks)
            least = placement.received_rows()
            share = max((placement.mask(r).received_keys / least[r] for r in range(ranks) if least[r]), default=1.0)
            print(f"| {seqlen // 1024}K | {kind} | {ranks} | {share:.3f} |", flush=True)
            worst = max(worst, share)
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the document lengths")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--travels", action="store_true", help="what travels alone, and 1 if it is over the bar")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.travels:
        sys.exit(int(travels(arguments.seed) > MOST_TRAVELS))
    print(
        "| tokens | mask | ranks | load: contiguous | zigzag | balanced "
        "| received: contiguous | zigzag | balanced | ms |"
    )
    print("| --- " * 10 + "|")
    missed = []
    for (seqlen, kind, ranks), load, received, ms in rows(arguments.seed):
        words = [f"{load[s]:.3f}" for s in load] + [f"{100 * received[s]:.0f} %" for s in received]
        print(f"| {seqlen // 1024}K | {kind} | {ranks} | {' | '.join(words)} | {ms:.1f} |")
        if load["balanced"] > MOST_IMBALANCE or ms > MOST_MS:
            missed.append(f"{kind} of {seqlen} tokens on {ranks} ranks: load {load['balanced']:.3f}, {ms:.1f} ms")
    if arguments.check and missed:
        sys.exit("\n".join(["these miss a bar:", *missed]))


if __name__ == "__main__":
    main()
