# SPDX-License-Identifier: Apache-2.0
"""Memory past the last row and key that a mask lets through counts as zeros: unwritten, it may hold NaN.

Hopper's kernels need it to be finite."""

import os

import flashmask
import pytest
import torch
from devices import DEVICE, DTYPE, ON_CUDA

pytestmark = pytest.mark.skipif(
    ON_CUDA and os.environ.get("FLASHMASK_KERNELS") not in ("sm80", "sm86"),
    reason="on Hopper's kernels padding has to be finite",
)


def results(call, tensors, padding, value):
    """Output and gradients as bytes, with `value` at the places `padding` of q, k, v and dout."""
    leaves = [x.masked_fill(padding, value).requires_grad_() for x in tensors]
    out = call(*leaves)
    dout = torch.linspace(-1, 1, out.numel(), device=DEVICE).to(out.dtype).view_as(out).masked_fill(padding, value)
    return [x.detach().view(torch.int8) for x in (out, *torch.autograd.grad(out, leaves, dout))]


def assert_counts_as_zeros(call, tensors, padding):
    zeros = results(call, tensors, padding, 0.0)
    assert not zeros[0].view(DTYPE).masked_select(padding).any()
    for value in (float("nan"), float("inf")):
        for name, got, want in zip(("out", "dq", "dk", "dv"), results(call, tensors, padding, value), zeros):
            assert torch.equal(got, want), f"{name} with {value} in the padding"


@pytest.mark.parametrize("causal", (False, True))
def test_behind_cu_seqlens(causal):
    cu_seqlens = torch.tensor([0, 100, 300], dtype=torch.int32, device=DEVICE)
    tensors = [torch.randn(384, 2, 64, device=DEVICE, dtype=DTYPE) for _ in range(3)]

    def call(q, k, v):
        return flashmask.flashmask_varlen_func(q, k, v, cu_seqlens, cu_seqlens, causal=causal, deterministic=True)

    assert_counts_as_zeros(call, tensors, (torch.arange(384, device=DEVICE) >= 300)[:, None, None])


def test_right_padding_of_a_batch():
    lengths = torch.tensor([130, 200], device=DEVICE)
    tensors = [torch.randn(2, 256, 2, 64, device=DEVICE, dtype=DTYPE) for _ in range(3)]
    padding = torch.arange(256, device=DEVICE) >= lengths[:, None]
    mask = flashmask.masks.padding(256, 256, lengths, lengths)

    def call(q, k, v):
        return flashmask.flashmask_attention(q, k, v, mask, deterministic=True)

    assert_counts_as_zeros(call, tensors, padding[:, :, None, None])
