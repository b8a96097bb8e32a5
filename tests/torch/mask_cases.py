# SPDX-License-Identifier: Apache-2.0
"""Masks of any kind, and the rule for one element of them."""

import torch
from flashmask import Mask


def draw_mask(rng, longest=40, block_mask=None):
    """A mask of any kind: odd values, broadcast and own heads, windows, offsets."""
    rows, keys = rng.randint(0, longest), rng.randint(0, longest)
    causal = rng.random() < 0.5
    batch, heads = rng.choice((1, 2)), rng.choice((1, 3))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    bounds = None
    if rng.random() < 0.8:
        vectors = rng.choice((1, 2) if causal else (2, 4))
        bounds = torch.randint(-3, rows + 4, (batch, heads, keys, vectors), generator=generator, dtype=torch.int32)
    keep = None
    if rng.random() < 0.5 if block_mask is None else block_mask:
        shape = (rng.choice((1, batch)), rng.choice((1, heads)), -(-rows // 128), -(-keys // 128))
        keep = torch.randint(0, 3, shape, generator=generator, dtype=torch.int32).to(
            rng.choice((torch.int32, torch.uint8, torch.bool))
        )
    window = rng.choice((None, (-1, -1), (3, 0), (-1, 4), (7, -1), (0, 0), (100, 100)))
    return Mask(
        rows, keys, bounds=bounds, causal=causal, window=window, q_offset=rng.choice((None, 0, 5, -4)), block_mask=keep
    )


def visible(mask, b, h, i, j):
    """The rule, once more and for one element."""
    offset = mask.seqlen_k - mask.seqlen_q if mask.q_offset is None else mask.q_offset
    left, right = mask.window or (-1, -1)
    if mask.causal and j > i + offset or left != -1 and j < i + offset - left or right != -1 and j > i + offset + right:
        return False
    if (
        mask.block_mask is not None
        and not mask.block_mask[b % mask.block_mask.shape[0], h % mask.block_mask.shape[1], i // 128, j // 128]
    ):
        return False
    if mask.bounds is None:
        return True
    v = mask.bounds[b % mask.bounds.shape[0], h % mask.bounds.shape[1], j].tolist()
    if mask.causal:
        return not v[0] <= i < (v[1] if len(v) == 2 else mask.seqlen_q)
    if len(v) == 2:
        return v[1] <= i < v[0]
    return not (v[0] <= i < v[1] or v[2] <= i < v[3])


def bounds_of(n, keys=6, dtype=torch.int32, batch=1, heads=1):
    return torch.zeros(batch, heads, keys, n, dtype=dtype)
