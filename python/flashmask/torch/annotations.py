# SPDX-License-Identifier: Apache-2.0
"""Types in the signatures of PyTorch's functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    from .mask import Mask

Device: TypeAlias = "torch.device | str | int"
Startend: TypeAlias = "torch.Tensor | Mask"
