# SPDX-License-Identifier: Apache-2.0
"""A small Llama, whose attention is an argument, and the attentions that training compares.

An attention is made for a Batch, attend(batch), and is then a function (q, k, v) -> out of [batch, seqlen, heads,
head_dim] each; k and v may have fewer heads.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from flashmask import flashmask_attention
from torch import nn

HEAD_DIM = 64
VOCABULARY = 260  # of the files of `flashmask run`: bytes and four more
ROTARY_BASE = 10000.0


# --- The model --------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def rotations(positions):
    """cos and sin [batch, seqlen, 1, HEAD_DIM / 2], float32, of positions [batch, seqlen]."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, HEAD_DIM, 2, device=positions.device) / HEAD_DIM)
    angles = positions[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x, rotation):
    """x [batch, seqlen, heads, HEAD_DIM] turned by its positions, in its dtype."""
    cos, sin = rotation
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, dim, heads_kv):
        super().__init__()
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, heads_kv * HEAD_DIM, bias=False) for _ in range(2))

    def forward(self, x, rotation, attend):
        q, k, v = (project(x).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        return self.o(attend(rotate(q, rotation), rotate(k, rotation), v).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim, inner):
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim, heads_kv):
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention, self.mlp = Attention(dim, heads_kv), SwiGLU(dim, 8 * dim // 3)

    def forward(self, x, rotation, attend):
        x = x + self.attention(self.attention_norm(x), rotation, attend)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Logits [batch, seqlen, VOCABULARY] of input_ids and position_ids [batch, seqlen].

    dim is a multiple of HEAD_DIM times heads_kv.
    """

    def __init__(self, layers, dim, heads_kv):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, dim), nn.Linear(dim, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block(dim, heads_kv) for _ in range(layers))
        self.norm = RMSNorm(dim)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids, position_ids, attend):
        x, rotation = self.embedding(input_ids), rotations(position_ids)
        for block in self.blocks:
            x = block(x, rotation, attend)
        return self.head(self.norm(x))


# --- Its attentions ---------------------------------------------------------------------------------


def skipping(deterministic):
    """The attention that users call: empty tiles are skipped."""
    return lambda batch: lambda q, k, v: flashmask_attention(q, k, v, batch.mask, deterministic=deterministic)


def dense(batch):
    """Our kernels under the mask as a matrix of bytes: every tile is computed and masked element by element."""
    visible = batch.mask.to_dense()
    return lambda q, k, v: DenseAttention.apply(q, k, v, visible)


class DenseAttention(torch.autograd.Function):
    """The dense-mask mode, which only the C interface has, as python/harness/calls.py calls it. Its gradients are
    deterministic under torch.use_deterministic_algorithms."""

    @staticmethod
    def forward(ctx, q, k, v, visible):
        # Loads what FLASHMASK_LIBRARY names, which may be set after this module is read.
        from harness.calls import Forward

        call = Forward(q, k, v, dense=visible).run()
        ctx.save_for_backward(q, k, v, visible, call.out, call.lse)
        return call.out

    @staticmethod
    def backward(ctx, dout):
        from harness.calls import Backward
        from harness.features import NONE

        q, k, v, visible, out, lse = ctx.saved_tensors
        forward = SimpleNamespace(inputs=(q, k, v, None), out=out, lse=lse, features=NONE)
        deterministic = torch.are_deterministic_algorithms_enabled()
        return *Backward(forward, dout.contiguous(), dense=visible, deterministic=deterministic).run().gradients(), None
