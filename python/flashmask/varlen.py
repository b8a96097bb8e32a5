# SPDX-License-Identifier: Apache-2.0
"""Attention over packed documents with flash-attn's arguments, in PyTorch."""

from .torch.varlen import flashmask_varlen_func, varlen_mask

__all__ = ["flashmask_varlen_func", "varlen_mask"]
