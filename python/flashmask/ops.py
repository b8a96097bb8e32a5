# SPDX-License-Identifier: Apache-2.0
"""Calls of the PyTorch operators: attention with partial results, and the backward of a part."""

from .torch.ops import attention, backward, partial_backward, plan

__all__ = ["attention", "backward", "partial_backward", "plan"]
