# SPDX-License-Identifier: Apache-2.0
"""Mask: a pytree, what it says as a dense matrix, and what it refuses."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flashmask.jax import Mask, masks

T, S = 140, 200


def a_mask():
    bounds = np.sort(np.random.default_rng(0).integers(-3, T + 9, (2, 1, S, 2)), -1)
    return Mask(
        T, S, bounds=bounds, causal=True, window=(90, -1), q_offset=7, block_mask=np.eye(2, dtype=bool)[None, None]
    )


def test_arrays_are_the_leaves_and_all_else_is_static():
    mask = a_mask()
    leaves, structure = jax.tree.flatten(mask)
    assert [x.shape for x in leaves] == [(2, 1, S, 2), (1, 1, 2, 2)]
    assert structure == jax.tree.structure(mask.replace(bounds=mask.bounds + 1))
    assert structure != jax.tree.structure(mask.replace(window=None))
    assert [str(path[0]) for path, _ in jax.tree_util.tree_leaves_with_path(mask)] == [".bounds", ".block_mask"]
    assert jax.tree.leaves(Mask(T, S)) == []
    mapped = jax.tree.map(lambda x: x.shape, mask)
    assert (mapped.bounds, mapped.window) == ((2, 1, S, 2), (90, -1))


def test_dense():
    mask = a_mask()
    i, j = np.arange(T)[:, None], np.arange(S)
    begin, end = np.asarray(mask.bounds)[..., None, :, 0], np.asarray(mask.bounds)[..., None, :, 1]
    want = (j <= i + 7) & (j >= i + 7 - 90) & ~((begin <= i) & (i < end)) & (i // 128 == j // 128)
    assert mask.to_dense().shape == (2, 1, T, S)
    np.testing.assert_array_equal(mask.to_dense(), want)
    np.testing.assert_array_equal(jax.jit(Mask.to_dense)(mask), want)
    one = jax.tree.map(lambda x: jnp.broadcast_to(x, (2, *x.shape[1:]))[:, None], mask)
    np.testing.assert_array_equal(jax.vmap(Mask.to_dense)(one)[:, 0], want)


def test_int64_is_clamped():
    far = np.full((1, 1, S, 1), 2**40)
    assert (Mask(T, S, bounds=far, causal=True).bounds == T).all()
    assert (Mask(T, S, bounds=-far, causal=True).bounds == 0).all()


def test_pickled_and_shown():
    mask = a_mask()
    again = pickle.loads(pickle.dumps(mask))
    assert repr(again) == repr(mask)
    assert repr(mask.replace(block_mask=None)) == (
        "Mask(140, 200, bounds=int32[2, 1, 200, 2], causal=True, window=(90, -1), q_offset=7)"
    )
    assert np.array_equal(again.bounds, mask.bounds)


def test_does_not_change():
    mask = a_mask()
    with pytest.raises(AttributeError, match=r"mask.replace\(window=...\)"):
        mask.window = None
    with pytest.raises(AttributeError, match="does not change"):
        del mask.bounds


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ({"seqlen_q": -1}, ValueError, "seqlen_q is -1"),
        ({"seqlen_k": 2.5}, TypeError, r"seqlen_k is 2.5 \(float\); it must be an int"),
        ({"causal": "yes"}, TypeError, "causal is 'yes'"),
        ({"window": (1, 2, 3)}, ValueError, "window has 3 entries"),
        ({"q_offset": 1.0}, TypeError, "q_offset is 1.0"),
        ({"bounds": [1, 2]}, TypeError, "startend_row_indices is .*; it must be an array of int32"),
        ({"bounds": np.ones((1, 1, T, S), bool)}, TypeError, "startend_row_indices is bool .*not a dense mask"),
        ({"bounds": np.ones((1, 1, S, 2), np.float32)}, TypeError, "startend_row_indices is float32"),
        ({"block_mask": np.ones((1, 1, 2, 2))}, TypeError, "block_mask is .*float64.*; it must be an array of bool"),
    ],
)
def test_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        Mask(**{"seqlen_q": T, "seqlen_k": S, **arguments})


@pytest.mark.parametrize("q_offset", [2**40 + 1, -(2**40) - 1, 2**63, 2**64 + 5, -(10**30)])
def test_an_offset_beyond_all_sequences_is_refused(q_offset):
    for make in (lambda: Mask(8, 8, causal=True, q_offset=q_offset), lambda: masks.causal(8, q_offset=q_offset)):
        with pytest.raises(ValueError, match=rf"q_offset is {q_offset}; it must be between -2\^40 and 2\^40"):
            make()
    for far in (2**40, -(2**40)):
        assert (Mask(8, 8, causal=True, q_offset=far).to_dense() == (far > 0)).all()
