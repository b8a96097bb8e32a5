# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 as the wheel dew-flash-attn-cu13 has it (dew_flash_attn/libdew_flash_attn3.so): handlers of XLA's
foreign function interface, forward and backward, for sm90 and head dims 64, 128, 192 and 256.

It is built without PackGQA, which FlashAttention-3's own forward takes for grouped heads of packed sequences.
"""

import ctypes as C

import torch

from benchmarks.peers import xla_ffi

TILE_ROWS = 128  # of the backward, at most
NO_WINDOW = {"window_size_left": -1, "window_size_right": -1}


def load(path):
    """OSError if it does not load."""
    return Operators(C.CDLL(str(path)), torch.device("cuda", torch.cuda.current_device()))


class Operators:
    """The handlers, called as flash_attn_3's operators of PyTorch are (fa3.py)."""

    def __init__(self, library, device):
        self.library, self.host = library, xla_ffi.Host(device)

    def call(
        self,
        name,
        tensors,
        results,
        *,
        softmax_scale,
        is_causal,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
    ):
        attributes = {"softmax_scale": softmax_scale, "is_causal": is_causal} | NO_WINDOW
        if cu_seqlens_q is not None:
            name, tensors = f"varlen_{name}", (*tensors, cu_seqlens_q, cu_seqlens_k)
            attributes |= {"max_seqlen": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        self.host.call(getattr(self.library, f"dew_flash3_mha_{name}"), tensors, results, **attributes)

    def fwd(self, q, k, v, *, num_splits, **mask):
        """(out, lse)"""
        if num_splits != 1:
            raise RuntimeError(f"num_splits is {num_splits}; this build has no kernels for more than 1")
        out, lse = torch.empty_like(q), q.new_empty(lse_shape(q), dtype=torch.float32)
        splits = [q.new_empty([1] * rank, dtype=torch.float32) for rank in (4, 3)]  # their out and lse, not written
        self.call("fwd", (q, k, v), (out, lse, *splits), **mask)
        return out, lse

    def bwd(self, dout, q, k, v, out, lse, dq, dk, dv, **mask):
        """Writes dq, dk and dv."""
        scratch = [q.new_empty(scratch_size(q, mask.get("cu_seqlens_q")), dtype=torch.float32) for _ in range(2)]
        self.call("bwd", (dout, q, k, v, out, lse), (dq, dk, dv, *scratch), **mask)


def lse_shape(q):
    """[batch, heads, seqlen], or [heads, tokens] of packed sequences"""
    *batch, rows, heads, _ = q.shape
    return *batch, heads, rows


def scratch_size(q, cu_seqlens):
    """A number for each row and head, with room for whole tiles of each sequence and one more."""
    *batch, rows, heads, _ = q.shape
    tokens, sequences = (batch[0] * rows, batch[0]) if batch else (rows, len(cu_seqlens) - 1)
    return (tokens + TILE_ROWS * (sequences + 1)) * heads
