# SPDX-License-Identifier: Apache-2.0
"""Memory past the last row and key that a mask lets through counts as zeros: unwritten, it may hold NaN."""

import flashmask
import pytest
import torch
from devices import DEVICE, DTYPE

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))


def draw(*shape, head_dims=(64, 64), heads=(2, 2)):
    dims = (head_dims[0], head_dims[0], head_dims[1])
    return [torch.randn(*shape, h, d, device=DEVICE, dtype=DTYPE) for h, d in zip((heads[0], heads[1], heads[1]), dims)]


def results(call, tensors, padding, value):
    """Output and gradients, with `value` at the places `padding` of q, k, v and dout."""
    leaves = [x.masked_fill(padding, value).requires_grad_() for x in tensors]
    out = call(*leaves)
    dout = torch.linspace(-1, 1, out.numel(), device=DEVICE).to(out.dtype).view_as(out).masked_fill(padding, value)
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, dout))]


def same_bits(got, want):
    return torch.equal(got.view(torch.int8), want.view(torch.int8))


def is_close(got, want):
    """For sums of dq in any order."""
    return bool(torch.allclose(got.float(), want.float(), rtol=0.02, atol=0.02))


def assert_counts_as_zeros(call, tensors, padding, equal_dq=same_bits):
    zeros = results(call, tensors, padding, 0.0)
    assert not zeros[0].masked_select(padding).any()
    for value in (float("nan"), float("inf"), 3e4):
        for name, got, want in zip(("out", "dq", "dk", "dv"), results(call, tensors, padding, value), zeros):
            equal = equal_dq if name == "dq" else same_bits
            assert equal(got, want), f"{name} with {value} in the padding"


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("head_dims", HEAD_DIMS)
def test_behind_cu_seqlens(head_dims, causal):
    cu_seqlens = torch.tensor([0, 100, 300], dtype=torch.int32, device=DEVICE)

    def call(q, k, v):
        return flashmask.flashmask_varlen_func(q, k, v, cu_seqlens, cu_seqlens, causal=causal, deterministic=True)

    padding = (torch.arange(384, device=DEVICE) >= 300)[:, None, None]
    assert_counts_as_zeros(call, draw(384, head_dims=head_dims), padding)


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
def test_right_padding_of_a_batch(head_dims):
    """Every batch entry has an end of its own; the last one sees nothing."""
    lengths = torch.tensor([130, 200, 0], device=DEVICE)
    padding = torch.arange(256, device=DEVICE) >= lengths[:, None]
    mask = flashmask.masks.padding(256, 256, lengths, lengths)

    def call(q, k, v):
        return flashmask.flashmask_attention(q, k, v, mask, deterministic=True)

    tensors = draw(3, 256, head_dims=head_dims, heads=(4, 1))
    assert_counts_as_zeros(call, tensors, padding[:, :, None, None])


@pytest.mark.parametrize("deterministic", (False, True))
def test_many_tiles(deterministic):
    """Tiles before the last, and whole tiles of padding; few key heads, whose query heads kernels may divide."""
    mask = flashmask.masks.padding(1500, 1500, [1100], [1100], device=DEVICE).replace(window=(-1, 0))

    def call(q, k, v):
        return flashmask.flashmask_attention(q, k, v, mask, deterministic=deterministic)

    padding = (torch.arange(1500, device=DEVICE) >= 1100)[:, None, None]
    tensors = draw(1, 1500, head_dims=(128, 128), heads=(4, 1))
    assert_counts_as_zeros(call, tensors, padding, same_bits if deterministic else is_close)


def test_features():
    """A row of the padding sees the sink alone."""
    sink = torch.linspace(-1, 1, 2, device=DEVICE)
    mask = flashmask.masks.padding(300, 300, [200], [200], device=DEVICE)

    def call(q, k, v):
        return flashmask.flashmask_attention(q, k, v, mask, sink=sink, softcap=20.0)

    padding = (torch.arange(300, device=DEVICE) >= 200)[:, None, None]
    assert_counts_as_zeros(call, draw(1, 300), padding, is_close)
