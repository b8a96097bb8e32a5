# SPDX-License-Identifier: Apache-2.0
"""attention and attention_backward, on numpy arrays."""

from typing import Any

from .._core import arguments, call_options, ctypes_calls
from .._core.annotations import Backend, Layout, Window
from .._core.docstrings import composed
from .arrays import Array, Numpy, checked_array, in_bshd, in_layout
from .dropout import checked_state
from .mask import Mask, as_mask


@composed
def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | Array | None = None,
    *,
    causal: bool = False,
    window_size: Window = None,
    q_offset: int | None = None,
    block_mask: Array | None = None,
    softmax_scale: float | None = None,
    layout: Layout = "bshd",
    backend: Backend = "auto",
    threads: int = 0,
    softcap: float = 0.0,
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    q_pos: Array | None = None,
    k_pos: Array | None = None,
    dropout: float = 0.0,
    dropout_state: Array | None = None,
    split_size: int | None = 0,
) -> tuple[Array, Array]:
    """Softmax attention in which each key is hidden from up to two runs of query rows: (out, lse).

    q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim] and v [batch, seqlen_k, heads_kv,
    head_dim_v] of one dtype: float32, float16 or ml_dtypes.bfloat16; float64 with backend="reference". heads_q is a
    multiple of heads_kv. Any strides, but the last dimension contiguous: nothing is copied.

    mask: a flashmask.numpy.Mask, which says everything about the mask; or startend_row_indices as Mask.bounds; or None:
        no key has hidden rows of its own.
    causal, window_size, q_offset, block_mask, q_pos, k_pos: as in Mask (window_size is its window), without one.
    {softmax_scale}
    {layout}
    backend: "auto", "cpu" or "reference" (slow).
    threads: the most threads to use; 0: OpenMP's default. The result does not depend on it.
    {softcap}
    {sink}
    {alibi_slopes}
    {dropout_p}
    dropout_state: int64 or uint64 [2], a seed and an offset, which select the dropped weights (dropout_mask); the
        backward takes the same state. Needed for dropout.
    {split_size}

    Returns out, in q's dtype and layout, [batch, seqlen_q, heads_q, head_dim_v], and lse [batch, heads_q, seqlen_q],
    natural logarithm, float32 (float64 for float64).
    {hidden_rows}

    {raises}
    """
    q, k, v = in_bshd(layout, q=q, k=k, v=v)
    call_mask = as_mask(mask, q, k, causal, window_size, q_offset, block_mask, q_pos, k_pos)
    options = read_options(
        softmax_scale, backend, threads, softcap, sink, alibi_slopes, dropout, dropout_state, split_size
    )
    out, lse = ctypes_calls.forward(Numpy, q, k, v, call_mask, **options)
    return in_layout(layout, out), lse


@composed
def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    mask: Mask | Array | None = None,
    *,
    dlse: Array | None = None,
    causal: bool = False,
    window_size: Window = None,
    q_offset: int | None = None,
    block_mask: Array | None = None,
    softmax_scale: float | None = None,
    layout: Layout = "bshd",
    backend: Backend = "auto",
    threads: int = 0,
    softcap: float = 0.0,
    sink: Array | None = None,
    alibi_slopes: Array | None = None,
    q_pos: Array | None = None,
    k_pos: Array | None = None,
    dropout: float = 0.0,
    dropout_state: Array | None = None,
    split_size: int | None = 0,
) -> tuple[Array, ...]:
    """The gradients of attention(): (dq, dk, dv), in the shapes, dtypes and memory layouts of q, k and v.

    With a sink (dq, dk, dv, dsink).

    dout: the gradient of out, with out's shape and dtype. dlse: the gradient of lse, or None. All other arguments are
    the forward call's, and out and lse its results. The same bits in every run.

    {raises}
    """
    dout, q, k, v, out = in_bshd(layout, dout=dout, q=q, k=k, v=v, out=out)
    call_mask = as_mask(mask, q, k, causal, window_size, q_offset, block_mask, q_pos, k_pos)
    options = read_options(
        softmax_scale, backend, threads, softcap, sink, alibi_slopes, dropout, dropout_state, split_size
    )
    lse = checked_array("lse", lse)
    dlse = None if dlse is None else checked_array("dlse", dlse)
    gradients = ctypes_calls.backward(Numpy, dout, dlse, q, k, v, out, lse, call_mask, **options)
    return *(in_layout(layout, x) for x in gradients[:3]), *gradients[3:]


def read_options(
    softmax_scale: Any,
    backend: Any,
    threads: Any,
    softcap: Any,
    sink: Any,
    alibi_slopes: Any,
    dropout: Any,
    dropout_state: Any,
    split_size: Any,
) -> dict[str, Any]:
    """Options as ctypes_calls takes them."""
    p = arguments.share("dropout", dropout)
    if p > 0 and dropout_state is None:
        raise ValueError(f"dropout is {p} without dropout_state; it must be given, int64 or uint64 [2]")
    return {
        **call_options.read(
            softmax_scale=softmax_scale, backend=backend, threads=threads, softcap=softcap, split_size=split_size
        ),
        "sink": None if sink is None else checked_array("sink", sink),
        "alibi_slopes": None if alibi_slopes is None else checked_array("alibi_slopes", alibi_slopes),
        "dropout_p": p,
        "dropout_state": None if dropout_state is None else checked_state(dropout_state),
    }
