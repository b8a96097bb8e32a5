# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 (Dao-AILab/flash-attention, hopper) as operators of PyTorch: full, causal, and packed documents as
sequences of their own.

Its calls allocate from PyTorch's cache, as they do for its users.
"""

import functools

import numpy as np
import torch

from benchmarks.masks import paper_masks
from benchmarks.peers import LeftOut, library

# Mask: (causal, whether its documents are packed sequences)
MASKS = {"full": (False, False), "causal": (True, False), "document": (False, True), "causal_document": (True, True)}
# (head_dim, head_dim_v) of this build, and the pairs that also take packed sequences
HEAD_DIMS = {(64, 64), (128, 128), (192, 128), (256, 256)}
PACKED_HEAD_DIMS = {(64, 64), (128, 128)}


@functools.cache
def load():
    try:
        torch.ops.load_library(str(library("fa3")))
    except (OSError, RuntimeError) as error:
        raise LeftOut(f"torch {torch.__version__} does not load it: {str(error)[:200]}") from error
    return torch.ops.flash_attn_3


def packed(lengths, batch):
    """(where the documents of all batch entries begin and end, one behind the other; the longest)"""
    ends = torch.as_tensor(lengths).repeat(batch).cumsum(0)
    return torch.cat((ends.new_zeros(1), ends)).to(torch.int32), int(max(lengths))


class Call:
    """How a mask is said: `sequences` are the operators' arguments for it."""

    def __init__(self, mask, q, k, v):
        batch, seqlen, heads, head_dim = q.shape
        if mask not in MASKS:
            raise LeftOut("it takes no such mask")
        if k.shape[2] != heads:
            raise LeftOut("this build has no grouped heads")
        causal, self.varlen = MASKS[mask]
        if (head_dim, v.shape[3]) not in (PACKED_HEAD_DIMS if self.varlen else HEAD_DIMS):
            what = "packed sequences of " if self.varlen else ""
            raise LeftOut(f"this build has no {what}head dims {head_dim} and {v.shape[3]}")
        self.ops = load()
        self.sequences = {"softmax_scale": head_dim**-0.5, "is_causal": causal}
        if self.varlen:
            edges, longest = packed(paper_masks.document_lengths(np.random.default_rng(0), seqlen), batch)
            edges = edges.to(q.device)
            self.sequences |= {
                "cu_seqlens_q": edges,
                "cu_seqlens_k": edges,
                "max_seqlen_q": longest,
                "max_seqlen_k": longest,
            }

    def as_taken(self, x):
        """[batch, seqlen, heads, d], or [tokens, heads, d] of packed sequences: the same memory."""
        return x.flatten(0, 1) if self.varlen else x


class Forward(Call):
    def __init__(self, mask, q, k, v):
        super().__init__(mask, q, k, v)
        self.shape, self.inputs = (*q.shape[:3], v.shape[3]), [self.as_taken(x) for x in (q, k, v)]

    def __call__(self):
        self.out, self.lse, *_ = self.ops.fwd(*self.inputs, num_splits=1, **self.sequences)

    def results(self):
        return (self.out.view(self.shape),)


class Backward(Call):
    """The gradients of a Forward that has run, written to `gradients`."""

    def __init__(self, mask, forward, q, k, v, dout, gradients):
        super().__init__(mask, q, k, v)
        self.gradients = gradients
        self.tensors = (self.as_taken(dout), *forward.inputs, forward.out, forward.lse, *map(self.as_taken, gradients))

    def __call__(self):
        self.ops.bwd(*self.tensors, **self.sequences)

    def results(self):
        return self.gradients
