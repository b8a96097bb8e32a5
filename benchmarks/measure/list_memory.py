# SPDX-License-Identifier: Apache-2.0
"""The memory of masks of interval lists on a GPU, beside FlexAttention's for the same masks: a table.

    python -m benchmarks.measure.list_memory [TOKENS ..]

Ours are the lists, and the plan with the bits of its partial tiles, as the library lays it out. FlexAttention's are a
BlockMask and the bool tensor that its mask_mod reads. Both are counted on the CPU, where 32768 tokens take minutes and
12 GB.
"""

import sys

import torch
from flashmask.torch import operators
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.masks import listed_masks

LENGTHS = (8192, 32768)
GRANULE = 64, 128  # rows and keys, of which a plan holds the bits


def partial_granules(visible):
    """How many granules of a matrix have both visible and hidden elements."""
    rows, keys = (-(-n // side) * side for n, side in zip(visible.shape, GRANULE))
    hidden_counts = granule_counts(~visible, rows, keys)
    return int(((granule_counts(visible, rows, keys) > 0) & (hidden_counts > 0)).sum())


def granule_counts(elements, rows, keys):
    padded = torch.nn.functional.pad(elements, (0, keys - elements.shape[1], 0, rows - elements.shape[0]))
    return padded.view(rows // GRANULE[0], GRANULE[0], keys // GRANULE[1], GRANULE[1]).sum((1, 3), dtype=torch.int32)


def flex_bytes(visible):
    """Bytes of a BlockMask's tensors, and of the matrix."""
    made = create_block_mask(lambda b, h, i, j: visible[i, j], None, None, *visible.shape, device=visible.device)
    tensors = [x for x in made.as_tuple() if isinstance(x, torch.Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors) + visible.numel() * visible.element_size()


def figures(mask):
    """Bytes: of lists, of the plan, of FlexAttention's."""
    visible = mask.to_dense()[0, 0]
    plan = operators.plan_bytes(mask.seqlen_q, mask.seqlen_k, 1, 1, partial_granules(visible))
    return listed_masks.list_bytes(mask), plan, flex_bytes(visible)


def main(lengths=LENGTHS):
    torch.manual_seed(0)
    print("| mask | tokens | lists | plan, with its bits | FlexAttention | ours, a share of it |\n" + "|---" * 6 + "|")
    for seqlen in lengths:
        for name, make in listed_masks.of_length(seqlen, "cpu").items():
            mask = make()
            lists, plan, flex = figures(mask)
            sizes = " | ".join(f"{size / 1e6:.1f} MB" for size in (lists, plan, flex))
            print(f"| {name} | {mask.seqlen_q} | {sizes} | {(lists + plan) / flex:.3f} |", flush=True)


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]] or LENGTHS)
