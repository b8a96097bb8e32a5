# SPDX-License-Identifier: Apache-2.0
"""Types in the signatures of PyTorch's functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypedDict

from .._core.annotations import Backend, Layout, Window

if TYPE_CHECKING:
    import torch

    from .mask import Mask

Device: TypeAlias = "torch.device | str | int"
Startend: TypeAlias = "torch.Tensor | Mask"


class AttentionOptions(TypedDict, total=False):
    """Arguments by keyword of flashmask_attention that do not change what it returns."""

    causal: bool
    window_size: Window
    q_offset: int | None
    softmax_scale: float | None
    block_mask: torch.Tensor | None
    deterministic: bool | None
    layout: Layout
    dropout: float
    backend: Backend
    max_ctas: int
    softcap: float
    sink: torch.Tensor | None
    q_pos: torch.Tensor | None
    k_pos: torch.Tensor | None
    dropout_state: torch.Tensor | None
    fixed_seed_offset: torch.Tensor | None
    rng_name: str
    training: bool


class VarlenOptions(TypedDict, total=False):
    """The same of flashmask_varlen_func."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    alibi_slopes: None
    deterministic: bool | None
    block_table: None
    backend: Backend
    max_ctas: int
    sink: torch.Tensor | None
    dropout_state: torch.Tensor | None
