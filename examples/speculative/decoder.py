# SPDX-License-Identifier: Apache-2.0
"""A small decoder of Llama's kind over a paged cache."""

import torch
from paged_cache import PagedCache
from torch import nn
from torch.nn import functional as F


class Decoder(nn.Module):
    """RMS norms, rotary positions, grouped heads and gated units."""

    def __init__(self, vocab=512, width=256, layers=4, heads=8, heads_kv=2, head_dim=64):
        super().__init__()
        self.heads, self.heads_kv, self.head_dim = heads, heads_kv, head_dim
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, heads_kv, head_dim) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def cache(self, batch: int, most_tokens: int, most_rows: int) -> PagedCache:
        """A cache for so many sequences of at most so many tokens, and steps of at most so many rows together."""
        weight = self.embedding.weight
        sizes = self.heads, self.heads_kv, self.head_dim
        return PagedCache(len(self.layers), batch, most_tokens, most_rows, *sizes, weight.dtype, weight.device)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        """Logits [rows, vocab] of a step that the cache has begun. tokens, positions: [rows]."""
        x, turns = self.embedding(tokens), rotations(positions, self.head_dim, self.embedding.weight.dtype)
        for n, layer in enumerate(self.layers):
            x = layer(x, turns, n, cache)
        return self.head(self.norm(x))


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

    def forward(self, x, turns, n, cache):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (-1, self.head_dim)).split(self.split, dim=1)
        x = x + self.out(cache.attend(n, rotated(q, turns), rotated(k, turns), v).flatten(1))
        gate, up = self.gate_up(self.between(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotations(positions, dim, dtype):
    """cos and sin [rows, 1, dim / 2] of RoFormer's angles, position * 10000^(-2 i / dim)."""
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=positions.device) / dim)
    angles = positions[:, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x, turns):
    (a, b), (cos, sin) = x.chunk(2, dim=-1), turns
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
