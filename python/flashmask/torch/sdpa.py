# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention's arguments over the library's kernels."""

import torch

from .._core import arguments
from .._core.errors import UnsupportedError
from . import mask_forms, ops, tensor_arguments
from .attention import flashmask_attention
from .mask import Mask

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Mask | torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention: its arguments, its layout, its causal alignment.

    Differentiable in query, key and value.

    Args:
        query: [batch, heads_q, seqlen_q, head_dim]; key: [batch, heads_kv, seqlen_k, head_dim]; value: [batch,
            heads_kv, seqlen_k, head_dim_v].
        attn_mask: a Mask, which defines where its diagonal lies, or a bool tensor, True = attend, that broadcasts to
            [batch, heads_q, seqlen_q, seqlen_k]. A tensor of size 1 in seqlen_q's place, as for padding, costs next to
            nothing. Any other is read on the host and turned into a Mask in each call, which torch.compile cannot
            trace: make the Mask once if the time matters.
        dropout_p: the share of the attention weights that are set to zero, in training or not, as in torch; drawn from
            torch's default generator, but not the weights that torch's own function drops.
        is_causal: row i sees keys 0 .. i, aligned at the top left. Not together with attn_mask.
        scale: default 1 / sqrt(head_dim).
        enable_gqa: must be set if heads_kv differs from heads_q, which it has to divide.

    Returns:
        [batch, heads_q, seqlen_q, head_dim_v]. A row that sees no key is 0.

    Raises:
        UnsupportedError: a mask of numbers that are added to the scores, or no backend takes the call: CUDA no bool
            mask with a column that needs more than two intervals.
        ValueError, TypeError: an argument is wrong.
    """
    ops.check_dimensions(query, key, value, "bhsd")
    is_causal, enable_gqa = arguments.flag("is_causal", is_causal), arguments.flag("enable_gqa", enable_gqa)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}; "
            "they must have as many, or enable_gqa must be set"
        )
    if is_causal and attn_mask is not None:
        raise ValueError(
            "is_causal is set and attn_mask is given; only one of them is accepted "
            "(a Mask can be causal itself: masks.causal)"
        )
    mask = None if attn_mask is None else _as_mask(attn_mask, query, key)
    return flashmask_attention(
        query,
        key,
        value,
        mask,
        causal=is_causal,
        q_offset=0 if is_causal else None,
        softmax_scale=scale,
        layout="bhsd",
        dropout=arguments.share("dropout_p", dropout_p),
    )


def _as_mask(attn_mask: Mask | torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Mask:
    if isinstance(attn_mask, Mask):
        return attn_mask
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"attn_mask is {arguments.describe(attn_mask)}; it must be a Mask or a bool tensor")
    tensor_arguments.check_dense("attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool:
        raise UnsupportedError(
            f"attn_mask is {attn_mask.dtype}; it must be bool, True = attend. "
            "Numbers that are added to the scores are not supported; if there are only 0 and -inf, pass attn_mask == 0"
        )
    if attn_mask.device != query.device:
        raise arguments.elsewhere("attn_mask", attn_mask.device, "query", query.device)
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    visible = attn_mask[(None,) * (4 - attn_mask.dim())] if attn_mask.dim() < 4 else attn_mask
    if visible.dim() != 4 or any(size not in (1, whole) for size, whole in zip(visible.shape, full)):
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)}; "
            f"it must broadcast to [batch, heads_q, seqlen_q, seqlen_k] = {full}"
        )
    if visible.shape[2] == 1:
        return _key_mask(visible[:, :, 0], *full[2:])
    tensor_arguments.check_holds("attn_mask", attn_mask)
    return Mask(**mask_forms.from_dense(visible.expand(*visible.shape[:3], full[3])))


def _key_mask(visible: torch.Tensor, seqlen_q: int, seqlen_k: int) -> Mask:
    """The Mask of keys that all rows see or none does: hidden from row 0 on, or from seqlen_q on.

    The keys: [batch or 1, heads or 1, seqlen_k or 1].
    """
    hidden_from = torch.where(visible, seqlen_q, 0).expand(*visible.shape[:2], seqlen_k)
    bounds = torch.stack((hidden_from, torch.zeros_like(hidden_from)), dim=-1).to(torch.int32)
    return Mask(seqlen_q=seqlen_q, seqlen_k=seqlen_k, bounds=bounds)
