# SPDX-License-Identifier: Apache-2.0
"""Features of a call beside its mask (docs/features.md), and their effect on an attention in torch."""

import ctypes as C
from dataclasses import dataclass

import torch
from flashmask import capi


@dataclass
class Features:
    """Tensors are on the calls' device. sink [heads], float32 or the tensors' dtype; softcap, 0 is none; dropout, the
    share of weights that are dropped, with its state, int64 [2]. partial: results are float32, whatever the inputs.
    alibi_slopes [heads] or [batch, heads], with the distances of rows and keys, [batch or 1, 1, rows, keys]."""

    sink: torch.Tensor = None
    softcap: float = 0.0
    dropout: float = 0.0
    state: torch.Tensor = None
    partial: bool = False
    alibi_slopes: torch.Tensor = None
    distances: torch.Tensor = None

    def __str__(self):
        sink = None if self.sink is None else self.sink.dtype
        return (
            f"sink {sink}, softcap {self.softcap}, dropout {self.dropout}, partial {self.partial}, "
            f"ALiBi {self.alibi_slopes is not None}"
        )

    def numbers(self):
        """Numbers and flags, by their names in fm_options."""
        return {"softcap": self.softcap, "dropout_p": self.dropout, "partial_out": self.partial}

    def result_dtype(self, dtype):
        """Dtype of out and the gradients for tensors of this dtype."""
        return torch.float32 if self.partial else dtype

    def capped(self, scores):
        """Scores of scaled products [batch, heads, rows, keys]."""
        capped = self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores
        if self.alibi_slopes is None:
            return capped
        return capped - (self.alibi_slopes.double()[..., None, None] * self.distances).to(scores.dtype)

    def slope(self, scores):
        """The derivative of capped()."""
        return torch.cosh(scores / self.softcap).reciprocal().square() if self.softcap else torch.ones_like(scores)

    def sink_column(self, scores):
        """The sink's score in each row [batch, heads, rows, 1] of these, in their dtype; -inf without one."""
        if self.sink is None:
            return scores.new_full((1, 1, 1, 1), float("-inf"))
        return self.sink.to(scores.dtype)[None, :, None, None]

    def factors(self, batch, heads, seqlen_q, seqlen_k):
        """Dropout's factors of the weights, float64 [batch, heads, seqlen_q, seqlen_k]; 1 without dropout."""
        if not self.dropout:
            return torch.ones((1, 1, 1, 1), dtype=torch.float64)
        kept = torch.empty((batch, heads, seqlen_q, seqlen_k), dtype=torch.bool)
        state, described = self.state.cpu(), capi.Tensor()
        described.data, described.dtype, described.ndim = kept.data_ptr(), capi.dtype_of(kept.dtype), kept.ndim
        described.shape[:4], described.stride[:4] = kept.shape, kept.stride()
        capi.check(capi.open_library().fm_dropout_mask(self.dropout, state.data_ptr(), C.byref(described)))
        share_kept = 1 - round(self.dropout * 65536) / 65536
        return kept.to(self.state.device).double() / share_kept


NONE = Features()
