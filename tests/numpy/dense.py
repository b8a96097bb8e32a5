# SPDX-License-Identifier: Apache-2.0
"""Attention over a dense mask in float64, and masks to draw."""

import numpy as np


def attention(q, k, v, visible, scale=None, softcap=0.0, sink=None, kept=1.0, bias=0.0):
    """(out, lse, probabilities, slopes) of BSHD tensors; visible, probabilities, the slopes of the softcap, `bias`, and
    what dropout multiplies the probabilities by, `kept`, are [batch, heads, rows, keys]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    visible = np.repeat(visible, q.shape[2] // visible.shape[1], axis=1)
    scores = np.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    slopes = np.cosh(scores / softcap) ** -2 if softcap else np.ones_like(scores)
    scores = np.where(visible, (softcap * np.tanh(scores / softcap) if softcap else scores) + bias, -np.inf)
    sink = np.full(q.shape[2], -np.inf) if sink is None else sink.astype(np.float64)
    highest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e300)
    highest = np.maximum(highest, sink[:, None, None])
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True) + np.exp(sink[:, None, None] - highest)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + highest)[..., 0]
    p = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("bhij,bjhd->bihd", p * kept, v), lse, p, slopes


def gradients(dout, q, k, v, visible, dlse=None, scale=None, softcap=0.0, sink=None, kept=1.0, bias=0.0):
    """(dq, dk, dv), and with a sink dsink."""
    _, lse, p, slopes = attention(q, k, v, visible, scale, softcap, sink, bias=bias)
    dout, q, k, v = (x.astype(np.float64) for x in (dout, q, k, v))
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    wide_k, wide_v = (np.repeat(x, group, axis=2) for x in (k, v))
    dp = np.einsum("bihd,bjhd->bhij", dout, wide_v) * kept
    delta = (p * dp).sum(-1, keepdims=True) - (0 if dlse is None else dlse.astype(np.float64)[..., None])
    ds = p * (dp - delta) * slopes * scale

    def of_keys(x):
        return x.reshape(*k.shape[:3], group, x.shape[3]).sum(3)

    dq = np.einsum("bhij,bjhd->bihd", ds, wide_k)
    found = dq, of_keys(np.einsum("bhij,bihd->bjhd", ds, q)), of_keys(np.einsum("bhij,bihd->bjhd", p * kept, dout))
    if sink is None:
        return found
    return *found, -(np.exp(sink.astype(np.float64)[:, None] - lse) * delta[..., 0]).sum((0, 2))


def visible(mask, block=128):
    """The rule of Mask, once more: bool [batch, heads, rows, keys]."""
    i, j = np.mgrid[: mask.seqlen_q, : mask.seqlen_k]
    p = i + (mask.seqlen_k - mask.seqlen_q if mask.q_offset is None else mask.q_offset)
    at = j
    if mask.q_pos is not None:
        p = mask.q_pos.astype(np.int64)[:, None, :, None]
        at = mask.k_pos.astype(np.int64)[:, None, None, :]
    left, right = mask.window or (-1, -1)
    seen = np.ones((1, 1, mask.seqlen_q, mask.seqlen_k), bool)
    seen = seen & ((at <= p) | (not mask.causal))
    seen = seen & ((left == -1) | (at >= p - left))
    seen = seen & ((right == -1) | (at <= p + right))
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
