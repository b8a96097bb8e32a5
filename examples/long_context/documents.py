# SPDX-License-Identifier: Apache-2.0
"""Packed documents to train on: made up, and predictable, so that the loss falls."""

from typing import NamedTuple

import torch
from flashmask import Mask, masks

IGNORED = -100  # the label of a token that is not to be predicted


class Batch(NamedTuple):
    """A sequence of packed documents: its mask, and [1, seqlen] ids, labels and each token's place in its document."""

    mask: Mask
    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor


def draw_lengths(seqlen: int, generator: torch.Generator) -> list[int]:
    """Lengths of documents that fill a sequence, log-uniform between 1/256 and 1/2 of it."""
    lengths: list[int] = []
    while (room := seqlen - sum(lengths)) > 0:
        share = 2.0 ** float(torch.empty(()).uniform_(-8, -1, generator=generator))
        lengths.append(min(max(int(share * seqlen), 1), room))
    return lengths


def draw_batch(seqlen: int, vocab: int, seed: int, device: torch.device) -> Batch:
    """The batch of a seed, alike on all ranks that draw it: in a document each token is the last one plus a step."""
    generator = torch.Generator().manual_seed(seed)
    lengths = draw_lengths(seqlen, generator)
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    first, step = torch.randint(0, vocab, (2, len(lengths)), generator=generator)
    ids = (first[documents] + positions * (step % 4 + 1)[documents]) % vocab
    labels = ids.masked_fill(positions == 0, IGNORED)  # nothing predicts a document's first token
    mask = masks.causal_document(seqlens=lengths)
    return Batch(mask, *(x[None].to(device) for x in (ids, labels, positions)))
