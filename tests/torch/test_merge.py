# SPDX-License-Identifier: Apache-2.0
"""merge_attention of attention over parts of the keys against attention over all of them, forward and backward."""

import flashmask
import pytest
import torch
from dense_reference import NAMES, assert_close, attention, compare, gradients, loss_of
from devices import DEVICE, head_dims, put


def make(seed, batch=2, rows=50, keys=60, heads=2, dim=16, dtype=None):
    """q, k, v and gradients of out and lse."""
    g = torch.Generator().manual_seed(seed)
    (dim,) = head_dims(dim)
    shapes = [
        (batch, rows, heads, dim),
        (batch, keys, heads, dim),
        (batch, keys, heads, dim),
        (batch, rows, heads, dim),
        (batch, heads, rows),
    ]
    return put(*(torch.randn(shape, generator=g) for shape in shapes), dtype=dtype)


def in_parts(cuts, keys, **arguments):
    """Attention over keys[a:b] for each part, merged. A part's mask is causal, its diagonal moved to its first key."""

    def function(q, k, v):
        edges = [0, *cuts, keys]
        parts = [
            flashmask.flashmask_attention(
                q, k[:, a:b], v[:, a:b], causal=True, q_offset=q.shape[1] // 4 - a, return_softmax_lse=True, **arguments
            )
            for a, b in zip(edges, edges[1:])
        ]
        return flashmask.merge_attention(*zip(*parts))

    return function


def over_the_union(q, k, v):
    rows, keys = torch.arange(q.shape[1]), torch.arange(k.shape[1])
    visible = keys <= rows[:, None] + q.shape[1] // 4
    out, lse = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visible)
    return out.transpose(1, 2), lse


@pytest.mark.parametrize("cuts", [[], [30], [1, 2, 20, 45], [20, 20]])
def test_parts_of_the_keys(cuts):
    q, k, v, dout, dlse = make(len(cuts))
    compare(in_parts(cuts, 60), over_the_union, (q, k, v), dout, dlse)


def test_rows_that_see_nothing():
    """Even rows see nothing in the second part, rows below 10 nothing in either.

    Gradients are finite, and out 0, lse -inf where nothing is seen.
    """
    q, k, v, dout, dlse = make(7, batch=1, rows=30, keys=40, dtype=torch.float32)
    rows, keys = torch.arange(30)[:, None], torch.arange(40)
    visible = (rows >= 10) & ((keys < 20) | (rows % 2 == 1))

    def parts(q, k, v):
        results = []
        for a, b in ((0, 20), (20, 40)):
            out, lse = attention(
                q.transpose(1, 2), k[:, a:b].transpose(1, 2), v[:, a:b].transpose(1, 2), visible[:, a:b]
            )
            results.append((out.transpose(1, 2), lse))
        return flashmask.merge_attention(*zip(*results))

    def union(q, k, v):
        out, lse = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visible)
        return out.transpose(1, 2), lse

    got = gradients(parts, (q, k, v), dout, dlse)
    for name, x, want in zip(NAMES, got, gradients(union, (q, k, v), dout, dlse)):
        assert_close(x, want, name, tolerance=1e-6)
    assert (got[0][:, :10] == 0).all() and torch.isneginf(got[1][..., :10]).all()


def test_gradcheck():
    g = torch.Generator().manual_seed(1)
    outs = [torch.randn(1, 3, 2, 4, dtype=torch.float64, generator=g).to(DEVICE).requires_grad_() for _ in range(3)]
    lses = [torch.randn(1, 2, 3, dtype=torch.float64, generator=g).to(DEVICE) for _ in range(3)]
    lses[1][0, 0, 1] = -torch.inf
    lses = [x.requires_grad_() for x in lses]
    # A difference quotient at -inf is no number, so the lse that is -inf is held fixed.
    hold = torch.isneginf(lses[1])
    function = lambda *x: flashmask.merge_attention(x[:3], (x[3], x[4].masked_fill(hold, -torch.inf), x[5]))
    finite = lses[1].detach().masked_fill(hold, 0.0).requires_grad_()
    assert torch.autograd.gradcheck(function, (*outs, lses[0], finite, lses[2]))


def test_all_parts_empty_has_finite_gradients():
    outs = [torch.zeros(1, 2, 1, 4, device=DEVICE, requires_grad=True) for _ in range(2)]
    lses = [torch.full((1, 1, 2), -torch.inf, device=DEVICE, requires_grad=True) for _ in range(2)]
    out, lse = flashmask.merge_attention(outs, lses)
    assert (out == 0).all() and torch.isneginf(lse).all()
    for gradient in torch.autograd.grad(loss_of(out, lse, torch.ones_like(out), torch.ones_like(lse)), outs + lses):
        assert (gradient == 0).all()


def test_large_scores():
    """Exponentials of the lse itself would overflow."""
    outs = [torch.full((1, 1, 1, 2), x) for x in (1.0, 5.0)]
    out, lse = flashmask.merge_attention(outs, [torch.full((1, 1, 1), 1000.0), torch.full((1, 1, 1), 1000.0)])
    assert torch.equal(out, torch.full((1, 1, 1, 2), 3.0)) and abs(lse.item() - 1000.6931) < 1e-3


def test_layouts_and_dtypes():
    q, k, v, _, _ = make(3, dtype=torch.bfloat16)
    parts = [
        flashmask.flashmask_attention(q, k[:, a:b], v[:, a:b], return_softmax_lse=True) for a, b in ((0, 25), (25, 60))
    ]
    outs, lses = zip(*parts)
    out, lse = flashmask.merge_attention(outs, lses)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    bhsd, lse_bhsd = flashmask.merge_attention([x.transpose(1, 2) for x in outs], lses, layout="bhsd")
    assert torch.equal(bhsd.transpose(1, 2), out) and torch.equal(lse_bhsd, lse)
    packed, packed_lse = flashmask.merge_attention([x[0] for x in outs], [x[0] for x in lses])
    assert torch.equal(packed, out[0]) and torch.equal(packed_lse, lse[0])


def test_wrong_arguments():
    out, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    for outs, lses, layout, match in (
        ([], [], "bshd", "at least one"),
        ([out], [lse, lse], "bshd", "as many"),
        ([out], [lse], "bhsd", r"lses\[0\]"),
        ([out, out[:, :3]], [lse, lse[..., :3]], "bshd", r"outs\[1\]"),
        ([out], [lse], "sbhd", "layout"),
    ):
        with pytest.raises(ValueError, match=match):
            flashmask.merge_attention(outs, lses, layout=layout)
