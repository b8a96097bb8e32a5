# SPDX-License-Identifier: Apache-2.0
"""Masks of more than two hidden intervals per column: against dense matrices, and in attention and its gradient."""

import dense_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_reference import DTYPE, HEAD_DIM, TOLERANCES
from flashmask.errors import UnsupportedError
from flashmask.jax import Mask, dot_product_attention, explain, masks

T = 150
ROW, KEY = np.mgrid[:T, :T]
MATRICES = {
    "random": np.random.default_rng(1).random((2, 2, T, T)) > 0.3,
    "every third": (ROW % 3 == KEY % 3)[None, None],
    "two intervals": ((KEY <= ROW) | (KEY == 100))[None, None],
}


@pytest.fixture
def arrays():
    """query, key, value and a gradient of out."""
    rng = np.random.default_rng(0)
    return (*dense_reference.inputs(rng), jnp.asarray(rng.standard_normal((2, T, 4, HEAD_DIM)), DTYPE))


def results(attend, q, k, v, dout):
    """(out, dq, dk, dv)."""
    out, pull = jax.vjp(attend, q, k, v)
    return (out, *pull(dout))


def wanted(visible, arrays):
    """Results of attention in float64, in numpy."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in arrays)
    k, v = np.repeat(k, 2, 2), np.repeat(v, 2, 2)
    scores = np.einsum("bihd,bjhd->bhij", q, k) / HEAD_DIM**0.5
    scores = np.where(np.repeat(visible, 4 // visible.shape[1], 1), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("bhij,bjhd->bihd", p, v)
    dp = np.einsum("bihd,bjhd->bhij", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / HEAD_DIM**0.5
    shared = lambda x: x.reshape(2, T, 2, 2, HEAD_DIM).sum(3)  # noqa: E731
    dk, dv = np.einsum("bhij,bihd->bjhd", ds, q), np.einsum("bhij,bihd->bjhd", p, dout)
    return out, np.einsum("bhij,bjhd->bihd", ds, k), shared(dk), shared(dv)


def close(got, want):
    for x, y in zip(got, want, strict=True):
        assert np.abs(np.asarray(x, np.float64) - y).max() <= TOLERANCES[jnp.dtype(DTYPE).name] * np.abs(y).max()


@pytest.mark.parametrize("name", MATRICES)
def test_from_dense(name, arrays):
    visible = MATRICES[name]
    mask = masks.from_dense(visible)
    assert (mask.column_ptr is None) == (name == "two intervals")
    np.testing.assert_array_equal(mask.to_dense(), visible)
    np.testing.assert_array_equal(masks.from_dense(jnp.asarray(visible[0, 0])).to_dense()[0, 0], visible[0, 0])
    want = wanted(visible, arrays)
    close(results(lambda *x: dot_product_attention(*x, mask), *arrays), want)
    traced = jax.jit(lambda mask, *x: results(lambda *y: dot_product_attention(*y, mask), *x))
    close(traced(mask, *arrays), want)


def test_a_mapped_call_shares_lists_or_has_its_own(arrays):
    """Lists of one entry, of each batch entry, and of each call of vmap."""
    visible = [np.random.default_rng(n).random((2, 1, T, T)) > 0.3 for n in range(3)]
    stacked = tuple(jnp.stack([x, -x, 2 * x]) for x in arrays)
    call = lambda mask, *x: results(lambda *y: dot_product_attention(*y, mask), *x)  # noqa: E731
    each = [tuple(x[n] for x in stacked) for n in range(3)]
    for shared in (visible[0][:1], visible[0]):
        got = jax.vmap(call, (None, 0, 0, 0, 0))(masks.from_dense(shared), *stacked)
        for n in range(3):
            close([x[n] for x in got], wanted(shared, each[n]))
    own = [masks.from_dense(x) for x in visible]
    most = max(len(mask.intervals) for mask in own)
    pad = lambda x: jnp.concatenate((x, jnp.zeros((most - len(x), 2), jnp.int32)))  # noqa: E731
    one = own[0].replace(
        column_ptr=jnp.stack([mask.column_ptr for mask in own]), intervals=jnp.stack([pad(m.intervals) for m in own])
    )
    got = jax.vmap(call)(one, *stacked)
    for n in range(3):
        close([x[n] for x in got], wanted(visible[n], each[n]))


def test_leaves():
    mask = masks.from_dense(MATRICES["random"])
    leaves, structure = jax.tree.flatten(mask)
    assert [x.dtype.name for x in leaves] == ["int32", "int32"] and leaves[0].shape == (2, 2, T + 1)
    again = jax.tree.unflatten(structure, leaves)
    np.testing.assert_array_equal(jax.jit(Mask.to_dense)(again), MATRICES["random"])


def test_builders_give_lists():
    mask = masks.neighborhood_2d(7, 9, 3, 3)
    y, x = np.divmod(np.arange(63), 9)
    near = lambda at, length: np.abs(at[:, None].clip(1, length - 2) - at) <= 1  # noqa: E731
    assert mask.column_ptr is not None
    np.testing.assert_array_equal(mask.to_dense()[0, 0], near(y, 7) & near(x, 9))
    assert masks.dilated(20, 3, 1).column_ptr is None
    both, order = masks.block_diffusion(2, seqlens=[4, 4], order="concatenated")
    assert both.column_ptr is not None and order.tolist() == list(range(16))


def test_what_is_refused(arrays):
    with pytest.raises(ValueError, match="intervals is None and column_ptr is given"):
        Mask(4, 5, column_ptr=jnp.zeros((1, 1, 6), jnp.int32))
    with pytest.raises(TypeError, match="column_ptr is .*float32.*; it must be an array of int32"):
        Mask(4, 5, column_ptr=jnp.zeros((1, 1, 6)), intervals=jnp.zeros((3, 2), jnp.int32))
    short = Mask(T, T, column_ptr=jnp.zeros((1, 1, 6), jnp.int32), intervals=jnp.zeros((3, 2), jnp.int32))
    with pytest.raises(ValueError, match="column_ptr"):
        dot_product_attention(*arrays[:3], short)
    with pytest.raises(TypeError, match="visible is traced"):
        jax.jit(masks.from_dense)(jnp.ones((3, 3), bool))
    with pytest.raises(ValueError, match="visible is .*; it must be bool or uint8"):
        masks.from_dense(jnp.ones((3, 3)))


def test_memory_is_limited(arrays, monkeypatch):
    mask = masks.dilated(T, 3, 2)
    monkeypatch.setenv("FLASHMASK_MAX_MASK_BYTES", "1")
    with pytest.raises(UnsupportedError, match=r"interval lists .* max_mask_bytes allows 1 \(FLASHMASK_MAX_MASK_BYTES"):
        jax.grad(lambda q: dot_product_attention(q, *arrays[1:3], mask).sum())(arrays[0])


def test_explain_counts_the_lists(arrays):
    mask = masks.from_dense(MATRICES["random"])
    assert f"{len(mask.intervals)} hidden intervals" in explain(*arrays[:3], mask)
