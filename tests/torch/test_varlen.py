# SPDX-License-Identifier: Apache-2.0
"""flashmask_varlen_func against one dense attention per document, forward and backward."""

import random

import flashmask
import pytest
import torch
from dense_reference import assert_close, attention, compare
from devices import DEVICE, DTYPE, head_dims, put, tolerance_of
from flashmask.varlen import varlen_mask


def cumulative(lengths, dtype=torch.int32):
    return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], dtype=dtype, device=DEVICE)


def document_rule(rows, keys, causal, window):
    """Visibility of a document's `keys` keys to its `rows` rows, aligned at the bottom right."""
    left, right = window
    stands_at, key = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        visible &= key <= stands_at
    if left >= 0:
        visible &= key >= stands_at - left
    if right >= 0:
        visible &= key <= stands_at + right
    return visible


def by_document(q, k, v, lengths_q, lengths_k, causal, window, scale=None):
    outs, lses = [], []
    for rows, keys, q_d, k_d, v_d in zip(
        lengths_q, lengths_k, q.split(lengths_q), k.split(lengths_k), v.split(lengths_k)
    ):
        out, lse = attention(
            q_d.transpose(0, 1),
            k_d.transpose(0, 1),
            v_d.transpose(0, 1),
            document_rule(rows, keys, causal, window),
            scale,
        )
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, -1)


def random_lengths(rng, documents, longest):
    return [rng.choice([0, 1, rng.randint(0, longest), rng.randint(0, longest)]) for _ in range(documents)]


def make(seed, total_q, total_k, heads_q=2, heads_kv=2, dim=16, dim_v=16):
    """q, k, v and gradients of out and lse."""
    g = torch.Generator().manual_seed(seed)
    dim, dim_v = head_dims(dim, dim_v)
    shapes = [
        (total_q, heads_q, dim),
        (total_k, heads_kv, dim),
        (total_k, heads_kv, dim_v),
        (total_q, heads_q, dim_v),
        (heads_q, total_q),
    ]
    return put(*(torch.randn(shape, generator=g) for shape in shapes))


def check(lengths_q, lengths_k, seed=0, causal=False, window=(-1, -1), scale=None, dtype=torch.int32, **shape):
    q, k, v, dout, dlse = make(seed, sum(lengths_q), sum(lengths_k), **shape)
    cu_q, cu_k = cumulative(lengths_q, dtype), cumulative(lengths_k, dtype)
    ours = lambda q, k, v: flashmask.flashmask_varlen_func(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max(lengths_q),
        max(lengths_k),
        causal=causal,
        window_size=window,
        softmax_scale=scale,
        return_softmax_lse=True,
    )
    theirs = lambda q, k, v: by_document(q, k, v, lengths_q, lengths_k, causal, window, scale)
    compare(ours, theirs, (q, k, v), dout, dlse)


@pytest.mark.parametrize("seed", range(12))
def test_random_documents(seed):
    rng = random.Random(seed)
    documents = rng.randint(1, 7)
    lengths_q, lengths_k = random_lengths(rng, documents, 90), random_lengths(rng, documents, 90)
    if seed % 3 == 0:
        lengths_k = lengths_q
    window = rng.choice(
        [(-1, -1), (-1, -1), (rng.randint(0, 20), -1), (rng.randint(0, 20), rng.randint(0, 20)), (0, 0), (1000, 1000)]
    )
    check(lengths_q, lengths_k, seed, causal=seed % 2 == 0, window=window, heads_q=4, heads_kv=rng.choice([1, 2, 4]))


@pytest.mark.parametrize("causal", [False, True])
def test_documents_longer_than_tiles(causal):
    check([300, 0, 137, 1], [200, 50, 290, 1], causal=causal, dim=32, dim_v=32)


@pytest.mark.parametrize(
    "lengths_q,lengths_k", [([0], [0]), ([0, 0], [0, 5]), ([4, 0], [0, 0]), ([0, 3, 0], [3, 0, 0]), ([1], [1])]
)
def test_zero_lengths(lengths_q, lengths_k):
    check(lengths_q, lengths_k, causal=True)
    check(lengths_q, lengths_k)


def test_scale_head_dim_v_and_int64():
    check([10, 20], [15, 9], scale=0.3, dtype=torch.int64, dim=24, dim_v=8)


def test_tokens_past_the_last_document():
    q, k, v, _, _ = make(3, 20, 20)
    cu = cumulative([5, 8])
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    out, lse = flashmask.flashmask_varlen_func(q, k, v, cu, cu, causal=True, return_attn_probs=True)
    want, want_lse = by_document(q[:13], k[:13], v[:13], [5, 8], [5, 8], True, (-1, -1))
    assert_close(out[:13], want, "out", tolerance_of("out", DTYPE))
    assert_close(lse[:, :13], want_lse, "lse", tolerance_of("lse", DTYPE))
    assert (out[13:] == 0).all() and torch.isneginf(lse[:, 13:]).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (gradient[13:] == 0).all() and torch.isfinite(gradient).all()


def test_without_documents():
    q, k, v, _, _ = make(4, 6, 7)
    out, lse = flashmask.flashmask_varlen_func(q, k, v, cumulative([]), cumulative([]), return_softmax_lse=True)
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_mask_hides_exactly_the_other_documents():
    lengths_q, lengths_k = [3, 0, 4, 2], [5, 2, 0, 1]
    mask = varlen_mask(cumulative(lengths_q), cumulative(lengths_k), 9, 8, causal=True, window_size=(2, -1))
    want = torch.block_diag(
        *(document_rule(rows, keys, True, (2, -1)).int() for rows, keys in zip(lengths_q, lengths_k))
    ).bool()
    assert torch.equal(mask.to_dense()[0, 0].cpu(), want)


def test_shared_mask_gives_the_same():
    q, k, v, _, _ = make(5, 40, 40)
    cu = cumulative([11, 29])
    mask = varlen_mask(cu, cu, 40, 40, causal=True)
    assert torch.equal(
        flashmask.flashmask_attention(q[None], k[None], v[None], mask)[0],
        flashmask.flashmask_varlen_func(q, k, v, cu, cu, causal=True),
    )


def test_contents_are_not_read_and_maximum_lengths_are_ignored():
    """Compiled in one graph, which reading cu_seqlens on the host would break. Other lengths compile nothing anew."""
    torch._dynamo.reset()
    ours = lambda cu_q, cu_k: (
        lambda q, k, v: flashmask.flashmask_varlen_func(q, k, v, cu_q, cu_k, 1, 1, causal=True, return_softmax_lse=True)
    )
    compiled = torch.compile(
        lambda q, k, v, cu_q, cu_k: ours(cu_q, cu_k)(q, k, v), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for n, (lengths_q, lengths_k) in enumerate(
        [([5, 9, 6], [10, 0, 20]), ([0, 20, 0], [15, 8, 7]), ([60, 0, 12], [33, 0, 50])]
    ):
        q, k, v, dout, dlse = make(n, sum(lengths_q), sum(lengths_k))
        cu_q, cu_k = cumulative(lengths_q), cumulative(lengths_k)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            compare(
                lambda q, k, v: compiled(q, k, v, cu_q, cu_k),
                lambda q, k, v: by_document(q, k, v, lengths_q, lengths_k, True, (-1, -1)),
                (q, k, v),
                dout,
                dlse,
            )


def test_slices_of_packed_qkv():
    """Strided q, k, v, cu_seqlens and gradients: read in place."""
    (qkv,) = put(torch.randn(30, 3, 2, *head_dims(16)))
    qkv.requires_grad_()
    cu = torch.stack((cumulative([12, 18]), torch.zeros(3, dtype=torch.int32, device=DEVICE)), dim=1)[:, 0]
    out = flashmask.flashmask_varlen_func(*qkv.unbind(1), cu, cu, causal=True)
    want, _ = by_document(*qkv.unbind(1), [12, 18], [12, 18], True, (-1, -1))
    assert_close(out, want, tolerance=tolerance_of("out", DTYPE))
    assert_close(*(torch.autograd.grad(x.sum(), qkv)[0] for x in (out, want)), tolerance=tolerance_of("dqkv", DTYPE))


def test_grouped_heads_over_tiles():
    lengths_q, lengths_k = [300, 0, 150], [310, 40, 100]
    check(lengths_q, lengths_k, 10, causal=True, heads_q=4, heads_kv=2)


@pytest.mark.parametrize(
    "argument,name", [({"block_table": torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)}, "block_table")]
)
def test_unsupported_arguments(argument, name):
    q, k, v, _, _ = make(7, 8, 8)
    cu = cumulative([8])
    with pytest.raises(flashmask.UnsupportedError, match=name):
        flashmask.flashmask_varlen_func(q, k, v, cu, cu, **argument)


def test_wrong_arguments():
    q, k, v, _, _ = make(8, 8, 8)
    cu = cumulative([8])
    for match, arguments in (("q has shape", (q[None], k, v, cu, cu)), ("as many", (q, k, v, cu, cumulative([4, 4])))):
        with pytest.raises(ValueError, match=match):
            flashmask.flashmask_varlen_func(*arguments)
    with pytest.raises(TypeError, match="cu_seqlens_k is torch.float32; it must be integers"):
        flashmask.flashmask_varlen_func(q, k, v, cu, cu.float())
    with pytest.raises(ValueError, match="cu_seqlens_k is on meta"):
        flashmask.flashmask_varlen_func(q, k, v, cu, cu.to("meta"))
    with pytest.raises(ValueError, match="window_size"):
        flashmask.flashmask_varlen_func(q, k, v, cu, cu, window_size=(-2, 0))
    with pytest.raises(TypeError):
        flashmask.flashmask_varlen_func(q, k, v, cu, cu, 8, 8, 0.0)
