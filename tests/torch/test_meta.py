# SPDX-License-Identifier: Apache-2.0
"""Tensors without contents, on meta and fake: results have a call's shapes and dtypes; what would be read is named."""

import flashmask
import pytest
import torch
from devices import ON_CUDA
from flashmask import Mask, flashmask_attention, flashmask_varlen_func, masks, merge_attention
from flashmask.varlen import varlen_mask
from torch._subclasses import FakeTensorMode

pytestmark = pytest.mark.skipif(ON_CUDA, reason="where nothing is computed, one device suffices")

S = 40


def bounds(device):
    return torch.full((1, 1, S, 1), S, dtype=torch.int32, device=device)


# The arguments of a call beside the tensors, from their device.
CALLS = {
    "full": lambda device: {},
    "causal": lambda device: {"causal": True},
    "window": lambda device: {"window_size": (3, 0)},
    "q_offset": lambda device: {"causal": True, "q_offset": 2},
    "bounds": lambda device: {"startend_row_indices": bounds(device), "causal": True},
    "block_mask": lambda device: {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)},
    "positions": lambda device: {
        "causal": True,
        **dict.fromkeys(("q_pos", "k_pos"), torch.zeros(1, S, dtype=torch.int32, device=device)),
    },
    "band": lambda device: {"startend_row_indices": masks.sliding_window(S, S, 7)},
    "documents": lambda device: {
        "startend_row_indices": masks.causal_document(seqlens=torch.tensor([15, 25], device=device), seqlen=S)
    },
    "sink": lambda device: {"sink": torch.zeros(4, device=device), "causal": True},
    "softcap": lambda device: {"softcap": 2.0, "causal": True},
    "dropout": lambda device: {"dropout": 0.1, "causal": True},
    "split_size": lambda device: {"split_size": 128, "causal": True},
    "deterministic": lambda device: {"deterministic": True, "causal": True},
    "bhsd": lambda device: {"layout": "bhsd", "causal": True},
}


def inputs(device, layout="bshd"):
    shapes = ((2, S, 4, 16), (2, S, 2, 16), (2, S, 2, 8))
    tensors = [torch.zeros(shape, device=device) for shape in shapes]
    return [(x.transpose(1, 2) if layout == "bhsd" else x).requires_grad_() for x in tensors]


def attend(arguments, device):
    arguments = arguments(device)
    tensors = inputs(device, arguments.get("layout", "bshd"))
    out, lse = flashmask_attention(*tensors, return_softmax_lse=True, **arguments)
    return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), tensors)]


@pytest.mark.parametrize("name", CALLS)
def test_attention(name):
    want = attend(CALLS[name], "cpu")
    with FakeTensorMode():
        fake = attend(CALLS[name], "cpu")
    for made, device in ((attend(CALLS[name], "meta"), "meta"), (fake, "cpu")):
        for got, x in zip(made, want):
            assert (got.shape, got.dtype, got.device.type) == (x.shape, x.dtype, device)
            assert got.stride() == x.stride()


def test_other_calls():
    q, k, v = (x.detach() for x in inputs("meta"))
    for ends in ([0, 15, S], torch.tensor([0, 15, S], device="meta")):
        assert flashmask_varlen_func(q[0], k[0], v[0], ends, ends, causal=True).shape == (S, 4, 8)
        assert varlen_mask(ends, ends, S, S, device="meta").device.type == "meta"
    out, lse = flashmask_attention(q, k, v, return_softmax_lse=True)
    assert [x.device.type for x in merge_attention([out, out], [lse, lse])] == ["meta", "meta"]
    by_heads = [x.transpose(1, 2) for x in (q, k, v)]
    attention = flashmask.scaled_dot_product_attention
    for shown in (None, masks.causal(S), torch.ones(2, 1, 1, S, dtype=torch.bool, device="meta")):
        assert attention(*by_heads, attn_mask=shown, enable_gqa=True).device.type == "meta"
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):  # autocast of another device
            assert flashmask_attention(q, k, v, causal=True).dtype == torch.float32


@pytest.mark.parametrize("mask", [masks.causal(S), Mask(S, S, bounds=bounds("meta"), causal=True)])
def test_what_a_mask_says_by_its_shape(mask):
    assert mask.plan("meta").device.type == "meta" and "Mask(40" in repr(mask)
    assert mask.to_dense().shape == mask.shape == (1, 1, S, S)
    assert mask.gather([(0, 7)]).shape == (1, 1, 7, S)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert "Mask(40" in repr(mask)


READERS = {
    "from_dense": (lambda x: masks.from_dense(x > 0), "visible"),
    "attn_mask": (lambda x: flashmask.scaled_dot_product_attention(*[x] * 3, attn_mask=x > 0), "attn_mask"),
    "dropout_mask": (lambda x: flashmask.dropout_mask(x[0, 0, 0, :2].long(), 0.1, 1, 1, 2, 2), "state"),
    "stats": (lambda x: mask_on(x).stats(), "the mask"),
    "to_startend": (lambda x: mask_on(x).to_startend(), "the mask"),
    "to_block_mask": (lambda x: mask_on(x).to_block_mask(), "the mask"),
    "plot": (lambda x: mask_on(x).plot(), "the mask"),
    "intersect": (lambda x: masks.intersect(mask_on(x), mask_on(x)), "the mask"),
}


def mask_on(x):
    return Mask(S, S, bounds=bounds(x.device), causal=True)


@pytest.mark.parametrize("name", READERS)
def test_what_reads_contents_is_refused(name):
    read, argument = READERS[name]
    with pytest.raises(ValueError, match=f"{argument} is on meta, without contents"):
        read(torch.zeros(1, 1, S, S, device="meta"))
    with FakeTensorMode(), pytest.raises(ValueError, match=f"{argument} is a FakeTensor, without contents"):
        read(torch.zeros(1, 1, S, S))


def test_explain_says_where_calls_run():
    q, k, v = inputs("meta")
    assert flashmask.explain(q, k, v, causal=True).startswith("refused   query is on meta; it must be on the CPU")


class Exported(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, q, ends):
        if self.kind == "varlen":
            return flashmask_varlen_func(q[0], q[0], q[0], ends, ends, causal=True)
        if self.kind == "documents":
            return flashmask_attention(q, q, q, masks.causal_document(ends, seqlen=q.shape[1]))
        return flashmask_attention(q[:, 4:], q, q, **CALLS[self.kind](q.device) | {"q_offset": 4})


@pytest.mark.parametrize("kind", ["varlen", "documents", "causal", "window"])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_export(kind, is_dynamic):
    q, ends = torch.randn(1, S, 2, 16), torch.tensor([0, 15, S], dtype=torch.int32)
    shapes = ({1: torch.export.Dim("seqlen", min=8, max=4096)}, None) if is_dynamic else None
    program = torch.export.export(Exported(kind), (q, ends), dynamic_shapes=shapes, strict=False)
    torch.testing.assert_close(program.module()(q, ends), Exported(kind)(q, ends))
    torch.export.export(Exported(kind), (q.to("meta"), ends.to("meta")), dynamic_shapes=shapes, strict=False)
