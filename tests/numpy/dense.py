# SPDX-License-Identifier: Apache-2.0
"""Attention over a dense mask in float64, and masks to draw."""

import numpy as np


def attention(q, k, v, visible, scale=None):
    """(out, lse, probabilities) of BSHD tensors; visible and probabilities are [batch, heads, rows, keys]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    visible = np.repeat(visible, q.shape[2] // visible.shape[1], axis=1)
    scores = np.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = np.where(visible, scores, -np.inf)
    highest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e300)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + highest)[..., 0]
    p = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("bhij,bjhd->bihd", p, v), lse, p


def gradients(dout, q, k, v, visible, dlse=None, scale=None):
    """(dq, dk, dv)."""
    _, _, p = attention(q, k, v, visible, scale)
    dout, q, k, v = (x.astype(np.float64) for x in (dout, q, k, v))
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    wide_k, wide_v = (np.repeat(x, group, axis=2) for x in (k, v))
    dp = np.einsum("bihd,bjhd->bhij", dout, wide_v)
    ds = (
        p * (dp - (p * dp).sum(-1, keepdims=True) + (0 if dlse is None else dlse.astype(np.float64)[..., None])) * scale
    )

    def of_keys(x):
        return x.reshape(*k.shape[:3], group, x.shape[3]).sum(3)

    dq = np.einsum("bhij,bjhd->bihd", ds, wide_k)
    return dq, of_keys(np.einsum("bhij,bihd->bjhd", ds, q)), of_keys(np.einsum("bhij,bihd->bjhd", p, dout))


def visible(mask, block=128):
    """The rule of Mask, once more: bool [batch, heads, rows, keys]."""
    i, j = np.mgrid[: mask.seqlen_q, : mask.seqlen_k]
    p = i + (mask.seqlen_k - mask.seqlen_q if mask.q_offset is None else mask.q_offset)
    left, right = mask.window or (-1, -1)
    seen = np.ones((1, 1, mask.seqlen_q, mask.seqlen_k), bool)
    seen &= (j <= p) | (not mask.causal)
    seen &= (left == -1) | (j >= p - left)
    seen &= (right == -1) | (j <= p + right)
    if mask.bounds is not None:
        seen = seen & ~_hidden(np.moveaxis(mask.bounds, -1, 0)[..., None, :], i, mask.causal)
    if mask.block_mask is not None:
        keep = mask.block_mask[:, :, i // block, j // block] != 0
        heads = max(seen.shape[1], keep.shape[1])
        seen, keep = (np.repeat(x, heads // x.shape[1], axis=1) for x in (seen, keep))
        seen = seen & keep
    return seen


def _hidden(vectors, i, causal):
    if len(vectors) == 1:
        return i >= vectors[0]
    if len(vectors) == 4:
        return (i >= vectors[0]) & (i < vectors[1]) | (i >= vectors[2]) & (i < vectors[3])
    return (i >= vectors[0]) & (i < vectors[1]) if causal else (i >= vectors[0]) | (i < vectors[1])
