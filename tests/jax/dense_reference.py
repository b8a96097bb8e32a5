# SPDX-License-Identifier: Apache-2.0
"""Reference for the package: jax.nn's attention of the same arrays in float32, and the inputs of both.

The tests run on JAX's default device. On a GPU its backend takes bfloat16 and float16 and head dims of 64 and 128.
"""

import jax
import jax.numpy as jnp
import numpy as np

ON_GPU = jax.default_backend() == "gpu"
DTYPE = jnp.bfloat16 if ON_GPU else jnp.float32
HEAD_DIM = 64 if ON_GPU else 16
# Relative to the largest element: results are rounded to their dtype, and so are the weights of the values.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2.5e-3}
SAME = TOLERANCES["bfloat16"] if ON_GPU else 1e-6  # on a GPU the sums of a gradient may be in another order
NAMES = "out", "residual", "dq", "dk", "dv"


def inputs(rng, batch=2, seqlen_q=150, seqlen_k=150, heads_q=4, heads_kv=2, head_dim=HEAD_DIM, dtype=DTYPE):
    """Random query, key and value."""
    shapes = (
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
    )
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def dense_attention(query, key, value, visible, scale):
    """(out, residual) of jax.nn under a bool mask [batch, heads_q, rows, keys]; rows that see nothing: 0 and -inf."""
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    seen = visible.any(-1).swapaxes(1, 2)[..., None]
    out = jnp.where(seen, jax.nn.dot_product_attention(query, key, value, mask=visible, scale=scale), 0)
    key = jnp.repeat(key, query.shape[2] // key.shape[2], 2)
    scores = scale * jnp.einsum("btnh,bsnh->btns", query, key)
    scores = jnp.where(visible.swapaxes(1, 2), scores, -jnp.inf)
    finite = jnp.where(seen, scores, 0)
    return out, jnp.where(seen[..., 0], jax.nn.logsumexp(finite, -1), -jnp.inf)


def loss_of(results, douts):
    """A scalar that reaches every element of out and the residual of every row that sees something."""
    out, residual = results
    return sum(
        (jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32) * dx).sum() for x, dx in zip((out, residual), douts)
    )


def results(function, arrays, douts):
    """(out, residual, dq, dk, dv) of function(q, k, v) -> (out, residual) for the gradients `douts` of both."""

    def loss(*arrays):
        values = function(*arrays)
        return loss_of(values, douts), values

    gradients, values = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return (*values, *gradients)


@jax.jit
def _dense_results(arrays, visible, scale, douts):
    return results(lambda *arrays: dense_attention(*arrays, visible, scale), arrays, douts)


def random_douts(rng, arrays):
    shape = (*arrays[0].shape[:-1], arrays[2].shape[-1])
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (shape, shape[:-1])]


def compare(rng, function, arrays, visible, scale=None):
    """function(q, k, v) -> (out, residual) with dense attention, and the gradients for random gradients of both."""
    batch, heads_q, heads_kv = *arrays[0].shape[:3:2], arrays[1].shape[2]
    heads = heads_q // heads_kv if visible.shape[1] == heads_kv else 1
    visible = np.broadcast_to(
        np.repeat(visible, heads, 1), (batch, heads_q, arrays[0].shape[1], arrays[1].shape[1])
    )  # one shape, so that the reference is compiled once
    douts = random_douts(rng, arrays)
    scale = arrays[0].shape[3] ** -0.5 if scale is None else scale
    assert_all_close(results(function, arrays, douts), _dense_results(arrays, visible, scale, douts))


def assert_all_close(got, want):
    """Compares all that results() returns."""
    for name, x, y in zip(NAMES, got, want):
        assert_close(x, y, TOLERANCES[got[0].dtype.name], name)


def stacked(trees):
    """The trees as one of numpy's arrays with a dimension more. jnp.stack would compile a program for each shape."""
    return jax.tree.map(lambda *x: np.stack([np.asarray(one) for one in x]), *trees)


def assert_close(got, want, tolerance, name=""):
    """Compares: -inf at equal places, and otherwise within `tolerance` of the largest element of `want`, or of 1."""
    assert got.shape == want.shape, name
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], name)
    if finite.any():
        error = np.abs(got[finite] - want[finite]).max()
        assert error <= tolerance * max(1, np.abs(want[finite]).max()), f"{name}: {error}"
