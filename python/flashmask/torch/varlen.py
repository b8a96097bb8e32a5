# SPDX-License-Identifier: Apache-2.0
"""Attention over packed documents with flash-attn's arguments: (total, heads, head_dim) tensors and cu_seqlens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch

from .._core import arguments
from .._core.annotations import Backend, Integers, Window
from . import tensor_arguments
from .annotations import Device
from .attention import flashmask_attention
from .mask import Mask

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["flashmask_varlen_func", "varlen_mask"]


class VarlenKeywords(TypedDict, total=False):
    """Arguments by keyword of flashmask_varlen_func that do not change what it returns."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    alibi_slopes: torch.Tensor | None
    deterministic: bool | None
    block_table: None
    backend: Backend
    max_ctas: int
    sink: torch.Tensor | None
    dropout_state: torch.Tensor | None
    split_size: int | None


@overload
def flashmask_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_attn_probs: Literal[False] = False,
    return_softmax_lse: Literal[False] = False,
    **options: Unpack[VarlenKeywords],
) -> torch.Tensor: ...
@overload
def flashmask_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_attn_probs: bool = False,
    return_softmax_lse: Literal[True],
    **options: Unpack[VarlenKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flashmask_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    **options: Unpack[VarlenKeywords],
) -> Any: ...
def flashmask_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    block_table: None = None,
    backend: Backend = "auto",
    max_ctas: int = 0,
    sink: torch.Tensor | None = None,
    dropout_state: torch.Tensor | None = None,
    split_size: int | None = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention within each document of a packed batch. Differentiable in q, k, v and sink, and through lse.

    Args:
        q: (total_q, heads_q, head_dim); k: (total_k, heads_kv, head_dim); v: (total_k, heads_kv, head_dim_v). heads_q
            is a multiple of heads_kv.
        cu_seqlens_q, cu_seqlens_k: (documents + 1,) integers on q's device, or a list or numpy array of them, ascending
            from 0: document d has query rows cu_seqlens_q[d] to cu_seqlens_q[d + 1] and keys cu_seqlens_k[d] to
            cu_seqlens_k[d + 1]. A document may have no rows, no keys or neither. Rows past the last document see
            nothing, and no row sees keys past it. Values in host memory are checked; values on a device are never read
            on the host.
        max_seqlen_q, max_seqlen_k: accepted and ignored; nothing depends on them.
        softmax_scale: default 1 / sqrt(head_dim).
        causal, window_size: aligned at the bottom right of each document, as in flash-attn >= 2.1: with n rows and m
            keys, row i of the document stands at its key p = i + m - n and sees keys p - left .. p + right; -1 (None,
            sys.maxsize) is unbounded, causal is right = 0.
        deterministic: True: the same gradient bits in every run. None follows
            torch.are_deterministic_algorithms_enabled().
        return_softmax_lse, return_attn_probs: either one returns lse too. Probabilities are never made.
        alibi_slopes: (heads_q,) or (1, heads_q), float32: scores are lowered by slope * |i + m - n - key| in a document
            of n rows and m keys, aligned as causal is. flash-attn's (batch, heads_q) raises ValueError.
        block_table: only None.
        dropout_p: dropout in flashmask_attention; rows and keys are the packed batch's.
        softcap, sink, dropout_state, backend, max_ctas: as in flashmask_attention.
        split_size: as there; splits count the packed batch's keys, so a document has the bits that it has alone if it
            begins at a multiple.

    Returns:
        out (total_q, heads_q, head_dim_v), or (out, lse) with lse (heads_q, total_q): natural log, float32 (float64 for
        float64 inputs). A row that sees no key has out 0 and lse -inf (with a sink, the sink).

    Raises:
        UnsupportedError: block_table is given, or no backend takes the call.
        ValueError, TypeError: an argument is wrong.

    Each call makes its own mask and plan. To share them among the layers of a model, make the mask once with
    varlen_mask and call flashmask_attention(q[None], k[None], v[None], mask).
    """
    arguments.refuse_unsupported(block_table=(block_table, None))
    tensor_arguments.check_tensors("(total tokens, heads, head_dim)", q=q, k=k, v=v)
    cu_q, cu_k = _both_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], q.device)
    tensor_arguments.check_one_device(q=q, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    mask = _mask(cu_q, cu_k, q.shape[0], k.shape[0], *_window(window_size, causal))
    if alibi_slopes is not None and cu_q is not cu_k:
        mask = _with_positions(mask, cu_q, cu_k)
    out, lse = flashmask_attention(
        q[None],
        k[None],
        v[None],
        mask,
        softmax_scale=softmax_scale,
        deterministic=deterministic,
        return_softmax_lse=True,
        backend=backend,
        max_ctas=max_ctas,
        softcap=softcap,
        sink=sink,
        alibi_slopes=alibi_slopes,
        dropout=arguments.share("dropout_p", dropout_p),
        dropout_state=dropout_state,
        split_size=split_size,
    )
    return (out[0], lse[0]) if return_softmax_lse or return_attn_probs else out[0]


def varlen_mask(
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers,
    total_q: int,
    total_k: int,
    *,
    causal: bool = False,
    window_size: Window = (-1, -1),
    device: Device | None = None,
) -> Mask:
    """The Mask of packed documents whose queries and keys may differ in length.

    Arguments as in flashmask_varlen_func. Lists go to `device`.

    Two intervals always suffice. Let key column j belong to document d, with rows [q0, q1) and keys up to k1. Aligned
    at the bottom right, row i stands at key i + k1 - q1, so the rows that may see j are those with

        q0 <= i < q1                              its own document
        i >= j - right - (k1 - q1)                right = 0 if causal
        i <= j + left  - (k1 - q1)

    Each line keeps one run of rows, so together they keep one run [first, last). The rows before `first` and the rows
    from `last` on are hidden: the two intervals of the form (LTS, UTE) = (last, first). If no row sees the column, last
    <= first and the two cover everything.
    """
    total_q, total_k = arguments.length("total_q", total_q), arguments.length("total_k", total_k)
    cu_q, cu_k = _both_cu_seqlens(cu_seqlens_q, cu_seqlens_k, total_q, total_k, device)
    tensor_arguments.check_one_device(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    return _mask(cu_q, cu_k, total_q, total_k, *_window(window_size, causal))


def _mask(cu_q: torch.Tensor, cu_k: torch.Tensor, total_q: int, total_k: int, left: int, right: int) -> Mask:
    """varlen_mask of int64 cu_seqlens and a window with causal folded in."""
    key = torch.arange(total_k, device=cu_k.device)
    # The number of documents that end at or before the key; past the last one this is an extra document without rows.
    document = torch.searchsorted(cu_k[1:], key, right=True)
    first, last = cu_q[document], torch.cat((cu_q[1:], cu_q[-1:]))[document]
    at_key = key + last - torch.cat((cu_k[1:], cu_k[-1:]))[document]  # the row that stands at the key
    if right >= 0:
        first = torch.maximum(first, at_key - right)
    if left >= 0:
        last = torch.minimum(last, at_key + left + 1)
    bounds = torch.stack((last, first), dim=-1).to(torch.int32)
    return Mask(seqlen_q=total_q, seqlen_k=total_k, bounds=bounds[None, None])


def _with_positions(mask: Mask, cu_q: torch.Tensor, cu_k: torch.Tensor) -> Mask:
    """The mask with positions at which the last row of each document stands at the document's last key."""
    row = torch.arange(mask.seqlen_q, device=cu_q.device)
    shift = cu_k[1:] - cu_q[1:]
    document = torch.searchsorted(cu_q[1:], row, right=True)
    q_pos = row + torch.cat((shift, shift.new_zeros(1)))[document]
    k_pos = torch.arange(mask.seqlen_k, dtype=torch.int32, device=cu_k.device)
    return Mask(
        seqlen_q=mask.seqlen_q,
        seqlen_k=mask.seqlen_k,
        bounds=mask.bounds,
        q_pos=q_pos.to(torch.int32)[None],
        k_pos=k_pos[None],
    )


def _window(window_size: Window, causal: bool) -> tuple[int, int]:
    """(left, right) with causal folded in; -1 is unbounded."""
    left, right = arguments.window("window_size", window_size) or (-1, -1)
    return left, 0 if arguments.flag("causal", causal) else right


def _both_cu_seqlens(
    cu_seqlens_q: Integers, cu_seqlens_k: Integers, total_q: int, total_k: int, device: Device | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both as int64 (documents + 1,), contiguous; one tensor twice if they are the same."""
    cu_q = _cu_seqlens("cu_seqlens_q", cu_seqlens_q, total_q, "query rows", device)
    are_lists = isinstance(cu_seqlens_q, list) and isinstance(cu_seqlens_k, list)
    is_one = cu_seqlens_k is cu_seqlens_q or are_lists and cu_seqlens_k == cu_seqlens_q
    if is_one and total_k == total_q:
        return cu_q, cu_q
    cu_k = _cu_seqlens("cu_seqlens_k", cu_seqlens_k, total_k, "keys", device)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_q has {cu_q.shape[0]} entries and cu_seqlens_k {cu_k.shape[0]}; "
            "they must have as many, one more than there are documents"
        )
    return cu_q, cu_k


def _cu_seqlens(name: str, values: Integers, total: int, tokens: str, device: Device | None) -> torch.Tensor:
    cu = tensor_arguments.integers(name, values, device).to(torch.int64).contiguous()
    if cu.ndim != 1 or cu.shape[0] < 1:
        raise ValueError(
            f"{name} has shape {tuple(cu.shape)}; it must be (documents + 1,): 0, then the end of each document"
        )
    tensor_arguments.check_cu_seqlens(name, cu, total, f"the number of {tokens}")
    return cu
