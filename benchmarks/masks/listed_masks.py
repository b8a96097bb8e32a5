# SPDX-License-Identifier: Apache-2.0
"""Masks of interval lists, which two intervals per key cannot say."""

import flashmask
import torch

DOCUMENTS, EXCLUDED = 8, 0.05
IMAGES, KERNEL = {8192: 90, 32768: 181}, 13  # sides of square images of about so many tokens
WINDOW, DILATION = 256, 4


def indices(seqlen, device):
    every = torch.arange(seqlen, dtype=torch.int32, device=device)
    return every[:, None], every[None, :]


def excluded_documents(seqlen, device):
    """Causal documents without a random share of their elements."""
    row, key = indices(seqlen, device)
    ends = torch.randperm(seqlen - 1, device=device)[: DOCUMENTS - 1].add(1)
    document = torch.zeros(seqlen, dtype=torch.int32, device=device).index_fill_(0, ends, 1).cumsum(0)
    same = document[:, None] == document[None, :]
    return same & (key <= row) & (torch.rand(seqlen, seqlen, device=device) > EXCLUDED)


def every_second_row(seqlen, device):
    """All tiles partial, with as many intervals as there can be."""
    row, key = indices(seqlen, device)
    return (row + key) % 2 == 0


def few_holes(seqlen, device):
    """All tiles partial, with three intervals per column of each tile."""
    row, key = indices(seqlen, device)
    return (row * 37 + key * 11) % 128 > 3


def lists_of(visible):
    """The Mask of a matrix, without a band, on the matrix's device."""
    hidden = ~visible.T.contiguous()
    before = torch.nn.functional.pad(hidden[:, :-1], (1, 0))
    after = torch.nn.functional.pad(hidden[:, 1:], (0, 1))
    begins, ends = (hidden & ~before).nonzero(), (hidden & ~after).nonzero()
    counts = torch.bincount(begins[:, 0], minlength=len(hidden))
    column_ptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()[None, None]
    intervals = torch.stack((begins[:, 1], ends[:, 1] + 1), 1).int()
    rows, keys = visible.shape
    return flashmask.Mask(rows, keys, column_ptr=column_ptr, intervals=intervals)


def of_length(seqlen, device):
    """{name: a function that makes the Mask}"""
    side = IMAGES.get(seqlen) or int(seqlen**0.5)
    made = flashmask.masks
    return {
        "documents without 5 %": lambda: lists_of(excluded_documents(seqlen, device)),
        f"{KERNEL} x {KERNEL} of {side} x {side}": lambda: made.neighborhood_2d(
            side, side, KERNEL, KERNEL, device=device
        ),
        "dilated window": lambda: made.dilated(seqlen, WINDOW, DILATION, causal=True, device=device),
    }


def list_bytes(mask):
    return sum(x.numel() * x.element_size() for x in (mask.column_ptr, mask.intervals))
