# SPDX-License-Identifier: Apache-2.0
"""A small decoder of Llama's kind whose rows are computed one by one.

A library's matrix products add up in another order for another number of rows. One row at a time, everything but
attention has equal bits in every call, so any difference would be attention's. A GPU has batch-invariant products for
the same end.
"""

import torch
from torch import nn
from torch.nn import functional as F


class RowModel(nn.Module):
    """RMS norms, rotary positions, grouped heads and gated units."""

    def __init__(self, vocab=64, width=64, layers=2, heads=4, heads_kv=2, head_dim=32, most_tokens=512):
        super().__init__()
        self.heads, self.heads_kv, self.head_dim = heads, heads_kv, head_dim
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, heads_kv, head_dim) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)
        # RoFormer's angles, position * 10000^(-2 i / dim), made once for all calls.
        angles = torch.arange(most_tokens)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()], dim=1))

    @property
    def attention_dtype(self):
        return torch.bfloat16 if self.turns.is_cuda else torch.float32

    def forward(self, tokens, positions, attend):
        """Log probabilities [rows, vocab] of the tokens that follow.

        tokens, positions: [rows]. attend(layer, q, k, v): the attention, [rows, heads, head_dim], of q [rows, heads,
        head_dim] and k and v [rows, heads_kv, head_dim], all of attention_dtype.
        """
        x, turns = self.embedding(tokens), self.turns[positions]
        for n, layer in enumerate(self.layers):
            q, k, v = one_by_one(layer.project, x, turns)
            attended = attend(n, *(part.to(self.attention_dtype) for part in (q, k, v)))
            (x,) = one_by_one(layer.finish, x, attended.float())
        (log_probs,) = one_by_one(lambda row: (self.head(self.norm(row)).log_softmax(-1),), x)
        return log_probs


class Layer(nn.Module):
    def __init__(self, width, heads, heads_kv, head_dim):
        super().__init__()
        self.split = [heads, heads_kv, heads_kv]
        self.head_dim = head_dim
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.split) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def project(self, x, turn):
        """q, k and v of a row."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (-1, self.head_dim)).split(self.split)
        return rotated(q, turn), rotated(k, turn), v

    def finish(self, x, attended):
        """The row after the layer, of which the attention is given."""
        x = x + self.out(attended.flatten())
        gate, up = self.gate_up(self.between(x)).chunk(2)
        return (x + self.down(F.silu(gate) * up),)


def one_by_one(function, *inputs):
    """The results of function(*rows), a tuple, for the rows of tensors, each stacked."""
    return tuple(map(torch.stack, zip(*map(function, *inputs))))


def rotated(x, turn):
    (a, b), (cos, sin) = x.chunk(2, dim=-1), turn
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
