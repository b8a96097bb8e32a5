# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention against torch's own and against dense masks, forward and backward."""

import flashmask
import pytest
import torch
import torch.nn.functional as F
from dense_reference import assert_close, attention
from devices import DEVICE, DTYPE, head_dims, put, tolerance_of
from flashmask import masks


def make(seed=0, batch=2, heads_q=4, heads_kv=4, rows=40, keys=40, dim=16, dim_v=16):
    """query, key, value and a gradient of out."""
    g = torch.Generator().manual_seed(seed)
    dim, dim_v = head_dims(dim, dim_v)
    shapes = [
        (batch, heads_q, rows, dim),
        (batch, heads_kv, keys, dim),
        (batch, heads_kv, keys, dim_v),
        (batch, heads_q, rows, dim_v),
    ]
    return put(*(torch.randn(shape, generator=g) for shape in shapes))


def with_gradients(function, q, k, v, dout):
    """The result and its gradients."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*inputs)
    return (out, *torch.autograd.grad((out.double() * dout).sum(), inputs))


def compare(ours, theirs, tensors):
    for name, got, want in zip(
        ("out", "dq", "dk", "dv"), with_gradients(ours, *tensors), with_gradients(theirs, *tensors)
    ):
        assert_close(got, want, name, tolerance_of(name, DTYPE))


@pytest.mark.parametrize("rows,keys", [(40, 40), (30, 200), (200, 30), (1, 7)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_like_torch(rows, keys, is_causal):
    """Causal is top-left here and there, whatever the lengths."""
    tensors = make(rows=rows, keys=keys, dim_v=8)
    compare(
        lambda *x: flashmask.scaled_dot_product_attention(*x, is_causal=is_causal, scale=0.2),
        lambda *x: F.scaled_dot_product_attention(*(y.double() for y in x), is_causal=is_causal, scale=0.2),
        tensors,
    )


def test_grouped_heads():
    tensors = make(heads_q=6, heads_kv=2)
    compare(
        lambda *x: flashmask.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True),
        lambda *x: F.scaled_dot_product_attention(*(y.double() for y in x), is_causal=True, enable_gqa=True),
        tensors,
    )
    with pytest.raises(ValueError, match="enable_gqa"):
        flashmask.scaled_dot_product_attention(*tensors[:3])


def representable(shape, seed):
    """Random dense masks of at most two hidden runs a column: row 7 sees nothing, and key 5 is seen by no row."""
    g = torch.Generator().manual_seed(seed)
    *outer, rows, keys = shape
    i = torch.arange(rows)[:, None]
    end = torch.randint(8, rows, (*outer, 1, keys), generator=g)
    begin = torch.randint(0, 8, (*outer, 1, keys), generator=g)
    second = torch.randint(8, rows, (*outer, 1, keys), generator=g)
    visible = ~(((i >= begin) & (i < 8)) | ((i >= second) & (i < end)))
    visible[..., 5] = False
    return visible


@pytest.mark.parametrize("shape", [(40, 40), (1, 1, 40, 40), (2, 1, 40, 40), (2, 4, 40, 40), (4, 40, 40)])
def test_bool_masks(shape):
    visible = representable(shape, len(shape))
    compare(
        lambda *x: flashmask.scaled_dot_product_attention(*x, visible.to(DEVICE)),
        lambda *x: attention(*x, visible)[0],
        make(len(shape)),
    )


@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 40), (1, 40), (40,), (2, 4, 1, 40), (1, 1, 1, 1), (2, 1, 40, 1), (1, 1, 1)]
)
def test_broadcast_masks(shape):
    """Key padding, and sizes of 1 anywhere."""
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
    if shape[-1] == 1 and len(shape) == 4 and shape[-2] > 1:
        visible = (torch.arange(40) < 25)[:, None].expand(shape)
    tensors = make(3)
    compare(
        lambda *x: flashmask.scaled_dot_product_attention(*x, visible.to(DEVICE)),
        lambda *x: attention(*x, visible)[0],
        tensors,
    )


def test_padding_needs_no_host():
    """A mask of keys is traced like any other computation; other contents compile nothing anew."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, m: flashmask.scaled_dot_product_attention(q, k, v, m), fullgraph=True, backend="aot_eager"
    )
    q, k, v, _ = make(4)
    for seed in range(2):
        visible = (torch.rand(2, 1, 1, 40, generator=torch.Generator().manual_seed(seed)) < 0.5).to(DEVICE)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            assert_close(
                compiled(q, k, v, visible), attention(q, k, v, visible)[0], tolerance=tolerance_of("out", DTYPE)
            )


def test_a_mask_says_itself_where_its_diagonal_lies():
    tensors = make(rows=20, keys=50)
    mask = flashmask.Mask(seqlen_q=20, seqlen_k=50, causal=True)
    visible = torch.arange(50) <= torch.arange(20)[:, None] + 30
    compare(lambda *x: flashmask.scaled_dot_product_attention(*x, mask), lambda *x: attention(*x, visible)[0], tensors)


def test_a_mask_of_more_than_two_intervals():
    visible = torch.ones(2, 1, 40, 40, dtype=torch.bool)
    visible[1, 0, [3, 6, 9], 17] = False
    q, k, v, dout = make()
    compare(
        lambda *x: flashmask.scaled_dot_product_attention(*x, visible.to(DEVICE)),
        lambda *x: attention(*x, visible)[0],
        (q, k, v, dout),
    )
    visible[1, 0, 6, 17] = True
    compare(
        lambda *x: flashmask.scaled_dot_product_attention(*x, visible.to(DEVICE)),
        lambda *x: attention(*x, visible)[0],
        make(),
    )


@pytest.mark.parametrize("kind", ["causal", "padding", "dense"])
def test_more_than_a_tile(kind):
    q, k, v, _ = make(rows=150, keys=200, dim=64, dim_v=64)
    rows, keys = torch.arange(150)[:, None], torch.arange(200)
    visible = {
        "causal": keys <= rows,
        "padding": (keys < torch.tensor([[200], [70]]))[:, None, None],
        "dense": abs(keys - rows) < 50,
    }[kind].to(DEVICE)
    out = (
        flashmask.scaled_dot_product_attention(q, k, v, is_causal=True)
        if kind == "causal"
        else flashmask.scaled_dot_product_attention(q, k, v, visible)
    )
    assert_close(out, attention(q, k, v, visible)[0], kind, tolerance_of("out", DTYPE))


def test_refusals():
    q, k, v, _ = make()
    call = flashmask.scaled_dot_product_attention
    for arguments, error, match in (
        ({"attn_mask": torch.zeros(40, 40, device=DEVICE)}, flashmask.UnsupportedError, "torch.float32"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0"),
        (
            {"attn_mask": torch.ones(40, 40, dtype=torch.bool, device=DEVICE), "is_causal": True},
            ValueError,
            "is_causal",
        ),
        ({"attn_mask": torch.ones(40, 39, dtype=torch.bool, device=DEVICE)}, ValueError, r"\(40, 39\)"),
        ({"attn_mask": torch.ones(1, 2, 4, 40, 40, dtype=torch.bool, device=DEVICE)}, ValueError, "broadcast"),
        ({"attn_mask": [[True]]}, TypeError, "list"),
        ({"attn_mask": torch.ones(40, 40, dtype=torch.bool, device="meta")}, ValueError, "meta"),
    ):
        with pytest.raises(error, match=match):
            call(q, k, v, **arguments)
    with pytest.raises(ValueError, match="key has shape"):
        call(q, k[0], v)


def test_builders_are_masks_too():
    q, k, v, _ = make()
    mask = masks.causal_document(seqlens=[12, 28], device=DEVICE)
    visible = torch.block_diag(torch.ones(12, 12), torch.ones(28, 28)).tril().bool()
    assert_close(
        flashmask.scaled_dot_product_attention(q, k, v, mask),
        attention(q, k, v, visible)[0],
        tolerance=tolerance_of("out", DTYPE),
    )
