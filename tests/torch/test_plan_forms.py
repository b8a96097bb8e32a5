# SPDX-License-Identifier: Apache-2.0
"""Plans of long masks: in runs of tiles where these are few, and calls that read them."""

import pytest
import torch
from dense_reference import assert_close
from devices import DEVICE, DTYPE, TOLERANCES
from flashmask import Mask, flashmask_attention, masks
from flashmask.torch import operators, ops

BLOCKS = 2400
LONG = 128 * BLOCKS
DOCUMENT = 96  # divides LONG


def documents(length):
    return masks.causal_document(seqlens=[DOCUMENT] * (length // DOCUMENT), device=DEVICE)


def test_long_plans_of_few_runs_are_short():
    mask = documents(LONG)
    in_bits = operators.plan_bytes(LONG, LONG, 1, 1)
    assert ops.plan(mask).numel() == in_bits, "it was not counted"
    assert mask.plan().numel() == ops.plan(mask, counted=True).numel() < in_bits / 5


def test_short_plans_are_in_bits():
    mask = documents(96 * DOCUMENT)
    assert mask.plan().numel() == ops.plan(mask).numel()


@pytest.mark.parametrize("stripes,in_runs", [(8, True), (9, False)])
def test_more_than_eight_runs_are_bits(stripes, in_runs):
    keep = torch.arange(BLOCKS) * 2 * stripes // BLOCKS % 2 == 0
    mask = Mask(LONG, LONG, block_mask=keep.expand(1, 1, BLOCKS, BLOCKS).contiguous().to(DEVICE))
    assert (mask.plan().numel() < ops.plan(mask).numel()) == in_runs


def test_attention_reads_runs():
    """Each document is one of a batch, whose mask is short."""
    torch.manual_seed(0)
    long = [torch.randn(1, LONG, 1, 8).to(DEVICE, DTYPE).requires_grad_() for _ in range(3)]
    short = [x.detach().view(-1, DOCUMENT, 1, 8).requires_grad_() for x in long]
    mask = documents(LONG)
    assert mask.plan().numel() < ops.plan(mask).numel()
    out, expected = flashmask_attention(*long, mask), flashmask_attention(*short, causal=True)
    dout = torch.randn_like(out)
    out.backward(dout)
    expected.backward(dout.view_as(expected))
    for got, wanted in zip((out, *(x.grad for x in long)), (expected, *(x.grad for x in short))):
        assert_close(got.view_as(wanted), wanted, tolerance=TOLERANCES[DTYPE])
