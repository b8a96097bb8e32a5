# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 (Dao-AILab/flash-attention, hopper) as operators of PyTorch: full, causal, and packed documents as
sequences of their own. The wheel tokenspeed-fa3 has them (flash_attn_3/_C.abi3.so), forward alone; both directions are
in a build for XLA (fa3_xla.py), which is taken where both lie.

Its calls allocate from PyTorch's cache, as they do for its users.
"""

import functools

import numpy as np
import torch

from benchmarks.masks import paper_masks
from benchmarks.peers import FILES, LeftOut, fa3_xla, library

# Mask: (causal, whether its documents are packed sequences)
MASKS = {"full": (False, False), "causal": (True, False), "document": (False, True), "causal_document": (True, True)}
HEAD_DIMS = (64, 128, 192, 256)  # with values as wide: it runs others in larger tiles


@functools.cache
def load():
    """(the operators, the name of the file that has them)"""
    path = library("fa3_xla", "fa3")
    try:
        if path.name == FILES["fa3_xla"]:
            return fa3_xla.load(path), path.name
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        raise LeftOut(f"torch {torch.__version__} does not load it: {str(error)[:200]}") from error
    return torch.ops.flash_attn_3, path.name


def packed(lengths, batch):
    """(where the documents of all batch entries begin and end, one behind the other; the longest)"""
    ends = torch.as_tensor(lengths).repeat(batch).cumsum(0)
    return torch.cat((ends.new_zeros(1), ends)).to(torch.int32), int(max(lengths))


class Call:
    """How a mask is said: `sequences` are the operators' arguments for it."""

    def __init__(self, mask, q, k, v):
        batch, seqlen, _, head_dim = q.shape
        if mask not in MASKS:
            raise LeftOut("it takes no such mask")
        causal, self.varlen = MASKS[mask]
        if head_dim not in HEAD_DIMS or v.shape[3] != head_dim:
            raise LeftOut(f"it has no kernels of head dims {head_dim} and {v.shape[3]}")
        self.ops, self.file = load()
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

    def run(self, operator, *tensors, **options):
        """Builds leave parts out, and say so when they are called."""
        try:
            return operator(*tensors, **options, **self.sequences)
        except RuntimeError as error:
            raise LeftOut(f"this build refuses it: {str(error)[:200]}") from error

    def as_taken(self, x):
        """[batch, seqlen, heads, d], or [tokens, heads, d] of packed sequences: the same memory."""
        return x.flatten(0, 1) if self.varlen else x


class Forward(Call):
    def __init__(self, mask, q, k, v):
        super().__init__(mask, q, k, v)
        self.shape, self.inputs = (*q.shape[:3], v.shape[3]), [self.as_taken(x) for x in (q, k, v)]

    def __call__(self):
        self.out, self.lse, *_ = self.run(self.ops.fwd, *self.inputs, num_splits=1)

    def results(self):
        return (self.out.view(self.shape),)


class Backward(Call):
    """The gradients of a Forward that has run, written to `gradients`."""

    def __init__(self, mask, forward, q, k, v, dout, gradients):
        super().__init__(mask, q, k, v)
        self.gradients = gradients
        self.tensors = (self.as_taken(dout), *forward.inputs, forward.out, forward.lse, *map(self.as_taken, gradients))

    def __call__(self):
        self.run(self.ops.bwd, *self.tensors)

    def results(self):
        return self.gradients
