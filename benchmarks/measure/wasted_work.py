# SPDX-License-Identifier: Apache-2.0
"""Wasted work: elements whose products a kernel computes, over those that the mask shows.

    python -m benchmarks.measure.wasted_work --seqlen 32768

Counts the paper's masks, from their column bounds alone, in granules that kernels skip as a whole: 64 rows x 128 keys
on Hopper (a warpgroup of the forward, a tile of the backward; at head dim 64 the backward's tiles have 128 rows),
128 x 128 with mma.sync. Next to them stand half granules, 64 x 64, and, for documents, tiles of 128 x 128 that begin at
each document's first row and key, as in kernels for packed sequences.
"""

import argparse

import numpy as np

from benchmarks.masks import paper_masks, visible_tiles

GRANULES = ((64, 128), (128, 128), (64, 64))


def computed_over_visible(name, seqlen):
    """[of each of GRANULES]"""
    mask = *paper_masks.paper_mask(name, seqlen), seqlen
    visible = visible_tiles.visible_elements(*mask)
    return [
        int(visible_tiles.live_tiles(*mask, *granule).sum()) * granule[0] * granule[1] / visible for granule in GRANULES
    ]


def packed_over_visible(name, seqlen):
    """Computed over visible elements for tiles from each document's first row; None but for masks of documents."""
    if name not in ("document", "causal_document"):
        return None
    lengths = paper_masks.document_lengths(np.random.default_rng(0), seqlen)
    tiles = -(-lengths // visible_tiles.TILE)
    computed = (tiles * (tiles + 1) / 2 if name == "causal_document" else tiles**2).sum() * visible_tiles.TILE**2
    return float(computed / visible_tiles.visible_elements(*paper_masks.paper_mask(name, seqlen), seqlen))


def table(seqlen):
    """(head, rows) of text."""
    head = ["mask", *(f"{rows} x {keys}" for rows, keys in GRANULES), "128 x 128 from each document's first row"]
    rows = []
    for name in paper_masks.NAMES:
        packed = packed_over_visible(name, seqlen)
        found = [*computed_over_visible(name, seqlen), *([] if packed is None else [packed])]
        rows.append([name, *(f"{ratio:.3f}" for ratio in found), *[""] * (packed is None)])
    return head, rows


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, choices=paper_masks.DOCUMENTS, default=32768)
    head, rows = table(parser.parse_args(words).seqlen)
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


if __name__ == "__main__":
    main()
