# SPDX-License-Identifier: Apache-2.0
"""flashmask_attention: attention under a column mask, with the arguments of PaddlePaddle's function of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, overload

import torch

from .._core.annotations import Backend, Layout, Window
from .._core.call_options import DROPOUT_TENSORS, NUMBERS, TENSORS
from .._core.docstrings import composed
from . import ops, tensor_arguments
from .dropout import read_as_paddle
from .mask import Mask, as_mask

if TYPE_CHECKING:
    from typing_extensions import Unpack

Startend: TypeAlias = torch.Tensor | Mask


class AttentionKeywords(TypedDict, total=False):
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
    alibi_slopes: torch.Tensor | None
    q_pos: torch.Tensor | None
    k_pos: torch.Tensor | None
    dropout_state: torch.Tensor | None
    fixed_seed_offset: torch.Tensor | None
    rng_name: str
    training: bool
    split_size: int | None


@overload
def flashmask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    startend_row_indices: Startend | None = None,
    *,
    return_softmax_lse: Literal[False] = False,
    return_seed_offset: Literal[False] = False,
    **options: Unpack[AttentionKeywords],
) -> torch.Tensor: ...
@overload
def flashmask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    startend_row_indices: Startend | None = None,
    *,
    return_softmax_lse: Literal[True],
    return_seed_offset: Literal[False] = False,
    **options: Unpack[AttentionKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flashmask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    startend_row_indices: Startend | None = None,
    *,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    **options: Unpack[AttentionKeywords],
) -> Any: ...


@composed
def flashmask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    startend_row_indices: Startend | None = None,
    *,
    causal: bool = False,
    window_size: Window = None,
    q_offset: int | None = None,
    softmax_scale: float | None = None,
    block_mask: torch.Tensor | None = None,
    deterministic: bool | None = None,
    layout: Layout = "bshd",
    dropout: float = 0.0,
    return_softmax_lse: bool = False,
    backend: Backend = "auto",
    max_ctas: int = 0,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    q_pos: torch.Tensor | None = None,
    k_pos: torch.Tensor | None = None,
    dropout_state: torch.Tensor | None = None,
    fixed_seed_offset: torch.Tensor | None = None,
    rng_name: str = "",
    training: bool = True,
    return_seed_offset: bool = False,
    split_size: int | None = 0,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Softmax attention in which each key is hidden from up to two runs of query rows.

    query [batch, seqlen_q, heads_q, head_dim], key [batch, seqlen_k, heads_kv, head_dim] and value [batch, seqlen_k,
    heads_kv, head_dim_v] on one device, of one dtype: float32, bfloat16 or float16 on the CPU, bfloat16 or float16 on
    CUDA; float64 with backend="reference". heads_q is a multiple of heads_kv. Any strides, but the last dimension
    contiguous: a tensor that is not is an error, as nothing is copied silently.

    startend_row_indices: a flashmask.Mask, which says everything about the mask, or
        {startend_row_indices}
    causal: row i sees keys j <= i + q_offset.
    window_size: (left, right), row i sees i + q_offset - left <= j <= i + q_offset + right; -1 is unbounded; an int w
        is (w, w). It combines with the rest of the mask: a key is visible if nothing hides it.
    q_offset: key position of row 0, default seqlen_k - seqlen_q: the last row stands at the last key.
    {block_mask}
        On CUDA bool or uint8.
    {softmax_scale}
    deterministic: gradients with the same bits in every run; None follows torch.use_deterministic_algorithms.
    {layout}
    backend: "auto", "cpu", "cuda" or "reference".
    max_ctas: on CUDA, the most CTAs of the attention kernel that run at a time, forward and backward, so that the other
        multiprocessors are left to other streams, for communication, say; 0: one for each multiprocessor. It never
        changes a bit of out, lse and deterministic gradients. Ignored on the CPU.
    {softcap}
    {sink}
        Differentiable, as query, key and value are.
    {alibi_slopes}
    {dropout_p}
    dropout_state: int64 [2] on query's device, a seed and an offset, which say what is dropped (dropout_mask); None:
        drawn from torch's default generator there. The backward drops the same.
    fixed_seed_offset, training, return_seed_offset, rng_name: Paddle's arguments. The first is another name of
        dropout_state, training=False is dropout=0, and return_seed_offset returns the state, drawn or given, last.
        Torch has no generators by name: a rng_name raises UnsupportedError.
    {positions}
    {split_size}

    Returns out, in query's dtype and layout, [batch, seqlen_q, heads_q, head_dim_v]; with return_softmax_lse (out,
    lse), lse [batch, heads_q, seqlen_q] natural logarithm, float32 (float64 for float64). Both are
    differentiable. The gradients that reach out and lse may have any strides (CUDA copies an expanded one, as sum()
    has, once).
    {hidden_rows}

    {raises}
    """
    if fixed_seed_offset is not None or rng_name != "" or training is not True or return_seed_offset:
        of_paddle = dropout_state, fixed_seed_offset, rng_name, training, return_seed_offset
        dropout, dropout_state = read_as_paddle(query, dropout, *of_paddle)
    features = ()
    if dropout != 0 or softcap != 0 or sink is not None or alibi_slopes is not None or split_size != 0:
        given = dict(softcap=softcap, sink=sink, alibi_slopes=alibi_slopes, split_size=split_size)
        features = read_features(query, dropout, dropout_state, **given)
    mask = call_mask(
        query, key, value, startend_row_indices, causal, window_size, q_offset, block_mask, layout, q_pos, k_pos
    )
    out, lse = ops.checked_attention(
        query, key, value, mask, softmax_scale, layout, deterministic, backend, max_ctas, features
    )
    if return_seed_offset:
        assert dropout_state is not None  # read_as_paddle has drawn it
        return (out, lse, dropout_state) if return_softmax_lse else (out, dropout_state)
    return (out, lse) if return_softmax_lse else out


def read_features(query: torch.Tensor, dropout: float, dropout_state: torch.Tensor | None, **given: Any) -> Any:
    """Features as ops.read_features has them."""
    tensor_arguments.check_dense("query", query)
    return ops.read_features(query.device, dropout, dropout_state, **given)


def options_by_name(
    query: torch.Tensor,
    dropout: float,
    dropout_state: torch.Tensor | None,
    softmax_scale: float | None,
    deterministic: bool | None,
    backend: Backend,
    max_ctas: int,
    **features: Any,
) -> dict[str, Any]:
    """Options that the arguments of flashmask_attention mean, as call_options names them; none is drawn."""
    state = torch.zeros(2, dtype=torch.int64, device=query.device) if dropout_state is None else dropout_state
    given = read_features(query, dropout, state, **features)[len(DROPOUT_TENSORS) :]
    scale, is_deterministic, ctas = ops.read_options(softmax_scale, deterministic, backend, max_ctas)
    if is_deterministic is None:
        is_deterministic = torch.are_deterministic_algorithms_enabled()
    return {
        "softmax_scale": scale,
        "deterministic": is_deterministic,
        "backend": backend,
        "max_ctas": ctas,
        **{option.name: value for option, value in zip((*TENSORS, *NUMBERS), given)},
    }


def call_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    startend_row_indices: Startend | None,
    causal: bool,
    window_size: Window,
    q_offset: int | None,
    block_mask: torch.Tensor | None,
    layout: Layout,
    q_pos: torch.Tensor | None = None,
    k_pos: torch.Tensor | None = None,
) -> Any:
    """The Mask of a call of flashmask_attention; raises what the call would, as far as arguments and shapes decide."""
    ops.check_dimensions(query, key, value, layout)
    length = 1 if layout == "bshd" else 2
    lengths = query.shape[length], key.shape[length]
    return as_mask(startend_row_indices, *lengths, causal, window_size, q_offset, block_mask, q_pos, k_pos)
