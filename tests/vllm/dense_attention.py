# SPDX-License-Identifier: Apache-2.0
"""Attention of one request in float64, by vLLM's definition of what a row sees."""

import torch


def visible_keys(rows, window=None, spans=(), spans_end_at_window=False):
    """bool [rows, keys] of the request's last rows. rows: (first, end). spans: their first and last tokens."""
    i, j = torch.arange(*rows)[:, None], torch.arange(rows[1])
    in_window = torch.ones_like(i - j, dtype=torch.bool) if window is None else i - j < window
    visible = (j <= i) & in_window
    for first, last in spans:
        both = (i >= first) & (i <= last) & (j >= first) & (j <= last)
        visible |= both & in_window if spans_end_at_window else both
    return visible


def dense_attention(q, k, v, visible, scale, softcap=None, sinks=None, slopes=None):
    """out [rows, heads, dim_v] of the last rows of k [keys, heads_kv, dim] and v."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if slopes is not None:
        i, j = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
        scores = scores - torch.tensor(slopes).double()[:, None, None] * (i - j).abs()
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, column), -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(k)], v)
