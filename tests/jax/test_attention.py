# SPDX-License-Identifier: Apache-2.0
"""dot_product_attention against jax.nn's: forms of masks, jax.nn's own arguments, dtypes, rows that see nothing."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_reference import DTYPE, ON_GPU, assert_all_close, assert_close, compare, inputs, random_douts, results
from flashmask.jax import Mask, dot_product_attention

T, S = 150, 200


def runs(rng, *shape):
    """Random hidden runs of rows [*shape, 2], begin and end."""
    return np.sort(rng.integers(0, T + 1, (*shape, 2)), -1)


def columns(rng, batch, heads, vectors):
    """Random startend_row_indices, int32."""
    if vectors == 1:
        made = rng.integers(T // 2, T + 1, (batch, heads, S, 1))
    elif vectors == 4:
        made = np.concatenate([runs(rng, batch, heads, S), runs(rng, batch, heads, S)], -1)
    else:
        made = runs(rng, batch, heads, S)
    return made.astype(np.int32)


def blocks(rng, batch, heads):
    return rng.integers(0, 2, (batch, heads, -(-T // 128), -(-S // 128))).astype(bool)


MASKS = {
    "full": lambda rng: Mask(T, S),
    "causal": lambda rng: Mask(T, S, causal=True),
    "causal from the first key": lambda rng: Mask(T, S, causal=True, q_offset=0),
    "window": lambda rng: Mask(T, S, window=(20, 7)),
    "causal window": lambda rng: Mask(T, S, causal=True, window=(20, -1), q_offset=30),
    "LTS": lambda rng: Mask(T, S, causal=True, bounds=columns(rng, 1, 1, 1)),
    "LTS, LTE": lambda rng: Mask(T, S, causal=True, bounds=columns(rng, 2, 1, 2)),
    "LTS, UTE": lambda rng: Mask(T, S, bounds=columns(rng, 2, 2, 2)[..., ::-1]),
    "LTS, LTE, UTS, UTE": lambda rng: Mask(T, S, bounds=columns(rng, 1, 4, 4)),
    "bounds and a window": lambda rng: Mask(T, S, window=(90, 60), bounds=columns(rng, 2, 1, 4)),
    "block mask": lambda rng: Mask(T, S, block_mask=blocks(rng, 2, 2)),
    "bounds and a block mask": lambda rng: Mask(
        T, S, causal=True, bounds=columns(rng, 1, 2, 2), block_mask=blocks(rng, 2, 1)
    ),
    "int32 block mask": lambda rng: Mask(T, S, block_mask=2 * blocks(rng, 1, 4).astype(np.int32)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(rng, name):
    mask, arrays = MASKS[name](rng), inputs(rng, seqlen_q=T, seqlen_k=S)
    compare(rng, lambda *x: dot_product_attention(*x, mask, return_residual=True), arrays, mask.to_dense())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16] + ([] if ON_GPU else [jnp.float32]))
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_dtypes_and_heads(rng, dtype, heads):
    mask = Mask(T, T, causal=True, bounds=np.where(np.arange(T) < 60, 60, T)[None, None, :, None])
    arrays = inputs(rng, seqlen_q=T, seqlen_k=T, heads_q=heads[0], heads_kv=heads[1], dtype=dtype)
    function = lambda *x: dot_product_attention(*x, mask, scale=0.3, return_residual=True)
    compare(rng, function, arrays, mask.to_dense(), scale=0.3)


ARGUMENTS = {
    "nothing": {},
    "is_causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "window": {"local_window_size": (30, 12), "key_value_seq_lengths": [S, S]},  # jax.nn 0.6 reads no window alone
    "causal window": {"is_causal": True, "local_window_size": 25},
    "query lengths": {"query_seq_lengths": [70, T], "key_value_seq_lengths": [S, S]},
    "key lengths": {"key_value_seq_lengths": [1, 177]},
    "all": {
        "is_causal": True,
        "query_seq_lengths": [140, 3],
        "key_value_seq_lengths": [90, S],
        "local_window_size": (100, 0),
    },
}


def jax_nn(query, key, value, **arguments):
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    lengths = {name: jnp.asarray(x, jnp.int32) for name, x in arguments.items() if name.endswith("lengths")}
    return jax.nn.dot_product_attention(query, key, value, **{**arguments, **lengths})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_jax_nn(rng, name):
    arguments = ARGUMENTS[name]
    arrays = inputs(rng, seqlen_q=T, seqlen_k=S)
    # Rows for which jax.nn takes the mean of all values, as they see nothing: those beyond the last key's window.
    residual = dot_product_attention(*arrays, **arguments, return_residual=True)[1]
    sees = np.isfinite(residual)[..., None]
    assert sees.mean() > 0.3
    douts = random_douts(rng, arrays)
    got, want = (
        results(lambda *x: (function(*x, **arguments) * sees, jnp.zeros(())), arrays, douts)
        for function in (dot_product_attention, jax_nn)
    )
    assert_all_close(got, want)


@pytest.mark.skipif(
    "return_residual" not in inspect.signature(jax.nn.dot_product_attention).parameters,
    reason="this jax.nn returns no residual",
)
def test_residual_of_jax_nn(rng):
    arrays = inputs(rng)
    got = dot_product_attention(*arrays, is_causal=True, return_residual=True)
    want = jax.nn.dot_product_attention(*arrays, is_causal=True, return_residual=True)
    for x, y in zip(got, want):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=5e-2, rtol=2e-2)


def test_without_a_batch(rng):
    q, k, v = (np.asarray(x)[0] for x in inputs(rng))
    out, residual = dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    batched = dot_product_attention(q[None], k[None], v[None], is_causal=True, return_residual=True)
    assert out.shape == q.shape and residual.shape == q.shape[:-1]
    assert all(np.array_equal(x, np.asarray(y)[0]) for x, y in zip((out, residual), batched))


def test_rows_that_see_nothing(rng):
    arrays = inputs(rng)
    mask = Mask(150, 150, causal=True, bounds=jnp.full((1, 1, 150, 1), 100))  # no key is seen from row 100 on
    function = lambda *x: dot_product_attention(*x, mask, return_residual=True)
    out, residual, dq, dk, dv = map(np.asarray, results(function, arrays, [1.0, 1.0]))
    assert not out[:, 100:].any() and (residual[:, 100:] == -np.inf).all() and np.isfinite(residual[:, :100]).all()
    assert not dq[:, 100:].any() and not dk[:, 100:].any() and not dv[:, 100:].any()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


def test_values_of_another_head_dim(rng):
    q, k, v = inputs(rng, head_dim=32)
    out = dot_product_attention(q, k, v[..., :24], is_causal=True)
    assert_close(out, dot_product_attention(q, k, v, is_causal=True)[..., :24], 1e-6)


@pytest.mark.skipif(ON_GPU, reason="float64 is the CPU's")
def test_float64(rng):
    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable_x64(True):
        q, k, v = (jnp.asarray(rng.standard_normal((1, 40, 2, 16))) for _ in range(3))
        assert q.dtype == jnp.float64
        out, residual = dot_product_attention(q, k, v, is_causal=True, backend="reference", return_residual=True)
        want = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        assert out.dtype == residual.dtype == jnp.float64
        np.testing.assert_allclose(out, want, atol=1e-6)  # jax.nn's softmax is float32
        with pytest.raises(NotImplementedError, match="reference"):
            dot_product_attention(q, k, v)


def test_gradients_have_the_same_bits_in_every_run(rng):
    arrays = inputs(rng, seqlen_q=500, seqlen_k=500)
    gradients = jax.jit(
        jax.grad(lambda *x: dot_product_attention(*x, is_causal=True).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    )
    first = gradients(*arrays)
    for _ in range(3):
        assert all(map(np.array_equal, first, gradients(*arrays)))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1)])
def test_short_and_empty(rng, lengths):
    q, k, v = inputs(rng, seqlen_q=lengths[0], seqlen_k=lengths[1])
    function = lambda *x: dot_product_attention(*x, return_residual=True)
    out, residual, *gradients = map(np.asarray, results(function, (q, k, v), [1.0, 1.0]))
    assert out.shape == q.shape and out.dtype == DTYPE
    assert all(np.isfinite(x).all() for x in (out, *gradients))
    if lengths == (5, 0):
        assert not out.any() and (residual == -np.inf).all()


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1, 2)])
def test_broadcast_inputs(rng, axes):
    """Arrays of numpy with strides of 0."""

    def widened(x):
        return np.broadcast_to(x[tuple(slice(1) if axis in axes else slice(None) for axis in range(4))], x.shape)

    arrays = [widened(np.asarray(x)) for x in inputs(rng, seqlen_q=S, seqlen_k=S, heads_kv=4)]
    mask = Mask(S, S, causal=True, bounds=np.broadcast_to(np.int32(30), (2, 4, S, 1)))
    loss = jax.value_and_grad(lambda *arrays: dot_product_attention(*arrays, mask=mask).sum(), argnums=(0, 1, 2))
    got, want = loss(*arrays), loss(*map(np.ascontiguousarray, arrays))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)))
