# SPDX-License-Identifier: Apache-2.0
"""Predictions of the cost model for one attention layer on 4 to 1024 GPUs and 32K to 16M tokens.

    python -m benchmarks.report.context_parallel_scaling --docs    # write docs/context-parallel-scaling.md
    python -m benchmarks.report.context_parallel_scaling           # print it

Each placement is made by flashmask.context_parallel.place; only the times are a model's (cost.py). Needs no GPU.
"""

import argparse
import dataclasses

import torch
from flashmask import masks
from flashmask.context_parallel import Machine, cost, place

from benchmarks import ROOT, receipts
from benchmarks.context_parallel.placement import document_mask
from benchmarks.report import documents

PAGE = ROOT / "docs" / "context-parallel-scaling.md"
HEADS, HEAD_DIM = (64, 8), 128
RANKS = (4, 8, 16, 64, 256, 1024)
SEQLENS = tuple(2**n for n in (15, 17, 19, 20, 22, 24))
MARKS = {"gather": "", "overlap": "°", "all_to_all": "*"}
LEAST_ROWS = 1024  # of a rank: below it a layer is too short to share
KINDS = {
    "causal": "one causal sequence",
    "causal_document": "causal documents, lengths log-uniform from 256 to a quarter of the sequence",
    "sft": "causal documents of 128 to 4,096 tokens",
    "window": "a causal window of 4,096 keys",
}


def mask_of(kind, seqlen):
    if kind == "causal":
        return masks.causal(seqlen)
    if kind == "window":
        return masks.sliding_window(seqlen, seqlen, left=4095)
    span = {"least": 128, "most": 4096} if kind == "sft" else {}
    return document_mask("causal_document", seqlen, [0], **span)


def tokens(n):
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}K"


def time_on_one(placement, machine):
    return cost.single(
        tiles=sum(placement.loads()),
        tile_elements=placement.unit * 128,
        mask_heads=1,
        heads=HEADS,
        head_dim=HEAD_DIM,
        machine=machine,
    )


def cell(mask, ranks, machine):
    """(efficiency, the way chosen, seconds forward and backward, the placement)."""
    placement = place(mask, ranks, heads=HEADS, head_dim=HEAD_DIM)
    ways = placement.costs(machine=machine)
    way = cost.chosen(ways)
    return time_on_one(placement, machine).total / (ranks * ways[way].total), way, ways[way].total, placement


def table(kind, machine):
    lines = [f"| tokens | {' | '.join(f'{ranks} GPUs' for ranks in RANKS)} |", "| --- " * (len(RANKS) + 1) + "|"]
    for seqlen in SEQLENS:
        mask = mask_of(kind, seqlen)
        words = []
        for ranks in RANKS:
            if seqlen // ranks < LEAST_ROWS:
                words.append("")
                continue
            efficiency, way, seconds, _ = cell(mask, ranks, machine)
            words.append(f"{100 * efficiency:.0f} %, {1e3 * seconds:.3g} ms{MARKS[way]}")
        lines.append(f"| {tokens(seqlen)} | {' | '.join(words)} |")
    return lines


def assumptions(machine):
    words = {
        "forward_flops": "FLOP/s of a GPU over live tiles, forward",
        "backward_flops": "the same, backward",
        "link": "bytes/s that a GPU takes in inside of a node",
        "network": "bytes/s that a GPU takes in from other nodes (400 Gb/s)",
        "gpus_per_node": "GPUs of a node",
        "memory": "bytes/s of a GPU's own memory",
        "latency": "seconds of a piece that travels",
        "fixed_forward": "seconds of a call beyond kernels and bytes, forward",
        "fixed_backward": "the same, backward",
        "pieces": "pieces in which keys travel, where they overlap with tiles",
    }
    return [f"| `{f.name}` | {getattr(machine, f.name):g} | {words[f.name]} |" for f in dataclasses.fields(machine)]


def page(machine):
    lines = [
        "# Predicted scaling of context parallelism",
        "",
        "A prediction, not a measurement: no cell of this page has run. Placements and what their ranks receive are",
        "computed as a program would; the times are those of [a model](../python/flashmask/context_parallel/cost.py).",
        "With the rates of a run on GPUs of one host it comes [as near](context-parallel.md#which-way) as the last",
        "column there says. `python -m benchmarks.report.context_parallel_scaling --docs` writes this page.",
        "",
        "A cell is the predicted efficiency (one GPU's time over all GPUs' time together) and the time of one layer,",
        f"forward and backward, batch 1, {HEADS[0]} query and {HEADS[1]} key heads of {HEAD_DIM}. A star marks the",
        "all-to-all over heads where the model prefers it, a ring (°) keys and values that travel under tiles;",
        "elsewhere they are gathered first ([the ways](context-parallel.md#attention)). Empty cells have less than",
        f"{LEAST_ROWS:,} rows for each GPU.",
        "",
        "The model predicts rings where links are slow. Within one host, where it was measured, gathering won:",
        "",
        f"<!-- figures: overlap ({documents.COMMAND}) -->",
        "<!-- end of figures -->",
        "",
        "## Assumptions",
        "",
        "| | value | |",
        "| --- | --- | --- |",
        *assumptions(machine),
        "",
        "- The rates are assumed, the same for every mask and length; the link's rate was measured between H200s of",
        "  one host, the network's is nominal. Links do not disturb each other or the kernels.",
        "- Where keys and values overlap with tiles, the last piece's share of the tiles runs after it, and partial",
        "  results, in fp32 for every query head, move through memory until they are merged. The other ways overlap",
        "  with nothing.",
        "- Backward, keys and values travel again where they are not kept, and dk and dv in fp32 the other way.",
        "- In a group of several nodes all bytes are spread evenly over the ranks, also where a placement has",
        "  neighbours in one node: windows and documents are better than predicted there.",
        "- Beyond 2M tokens rows are handed out in units of more than 128, and live tiles are as tall, which counts a",
        "  diagonal's tiles too high.",
        "",
    ]
    for kind, words in KINDS.items():
        lines += [f"## {words[0].upper()}{words[1:]}", "", *table(kind, machine), ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--docs", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = page(Machine())
    if arguments.docs:
        PAGE.write_text(documents.with_figures(text, *documents.of_receipts(receipts.load_folder())))
    else:
        print(text)


if __name__ == "__main__":
    main()
