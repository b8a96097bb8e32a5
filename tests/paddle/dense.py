# SPDX-License-Identifier: Apache-2.0
"""Attention over a dense mask, written in Paddle, and Paddle's dense form of startend_row_indices."""

import paddle


def attention(q, k, v, visible, scale=None, kept=1):
    """(out, lse) in float64, differentiable; q, k and v are BSHD, visible bool [batch, heads, rows, keys].

    kept: what dropout multiplies each weight by.
    """
    heads = q.shape[2]
    q, k, v = (x.astype("float64").transpose([0, 2, 1, 3]) for x in (q, k, v))
    k, v = (_repeated(x, heads // x.shape[1], 1) for x in (k, v))
    visible = _repeated(visible, heads // visible.shape[1], 1)
    scores = paddle.matmul(q, k, transpose_y=True) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = paddle.where(visible, scores, paddle.full_like(scores, -1e30))
    sees = visible.any(-1, keepdim=True)
    p = paddle.where(sees, paddle.nn.functional.softmax(scores, -1), paddle.zeros_like(scores))
    lse = paddle.logsumexp(scores, -1)
    lse = paddle.where(sees[..., 0], lse, paddle.full_like(lse, -float("inf")))
    return paddle.matmul(p * kept, v).transpose([0, 2, 1, 3]), lse


def visible(seqlen_q, seqlen_k, indices=None, causal=False, window=None, block_mask=None):
    """Visibility by the arguments of Paddle's function, bool [batch, heads, rows, keys]."""
    i = paddle.arange(seqlen_q, dtype="int32").reshape([seqlen_q, 1])
    j = paddle.arange(seqlen_k, dtype="int32").reshape([1, seqlen_k])
    seen = paddle.ones([1, 1, seqlen_q, seqlen_k], dtype="bool")
    if causal:  # aligned at the bottom right
        seen = seen & (j <= i + seqlen_k - seqlen_q)
    if window is not None:
        seen = seen & (j >= i - window[0]) & (j <= i + window[1])
    if indices is not None:
        seen = seen & ~_hidden([x.unsqueeze(2) for x in indices.unbind(-1)], i, causal)
    if block_mask is not None:
        keep = _repeated(_repeated(block_mask, 128, 2), 128, 3)
        keep = keep[:, :, :seqlen_q, :seqlen_k] != 0
        heads = max(seen.shape[1], keep.shape[1])
        seen, keep = (_repeated(x, heads // x.shape[1], 1) for x in (seen, keep))
        seen = seen & keep
    return seen


def _repeated(x, times, axis):
    """Each entry along an axis `times` times; of any dtype."""
    shape = x.shape
    wide = x.unsqueeze(axis + 1).expand([*shape[: axis + 1], times, *shape[axis + 1 :]])
    return wide.reshape([*shape[:axis], shape[axis] * times, *shape[axis + 1 :]])


def _hidden(bounds, i, causal):
    if len(bounds) == 1:
        return i >= bounds[0]
    if len(bounds) == 4:
        return (i >= bounds[0]) & (i < bounds[1]) | (i >= bounds[2]) & (i < bounds[3])
    return (i >= bounds[0]) & (i < bounds[1]) if causal else (i >= bounds[0]) | (i < bounds[1])
