# SPDX-License-Identifier: Apache-2.0
"""Softcap, sinks and dropout against dense attention written out, and under JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_reference import DTYPE, ON_GPU, SAME, TOLERANCES, assert_close, inputs, stacked
from flashmask.jax import Mask, dot_product_attention, dropout_mask, explain, masks

try:
    from jax import shard_map
except ImportError:  # before JAX 0.6
    from jax.experimental.shard_map import shard_map
from jax.sharding import Mesh, PartitionSpec

S, HEADS = 150, 4
STATE = np.array([[5, 6], [7, 8]], np.uint32)


def scores_of(q, k, visible, softcap):
    """float32 [batch, heads, rows, keys]."""
    q, k = q.astype(jnp.float32), jnp.repeat(k.astype(jnp.float32), q.shape[2] // k.shape[2], 2)
    s = q.shape[3] ** -0.5 * jnp.einsum("bthd,bshd->bhts", q, k)
    return jnp.where(visible, softcap * jnp.tanh(s / softcap) if softcap else s, -jnp.inf)


def dense(q, k, v, sink, visible, softcap=0.0, kept=1.0):
    """(out, residual); kept: what each weight is multiplied by."""
    scores = scores_of(q, k, visible, softcap)
    if sink is None:
        sink = jnp.full(q.shape[2], -jnp.inf)
    sinks = jnp.broadcast_to(sink.astype(jnp.float32)[None, :, None, None], (*scores.shape[:3], 1))
    every = jnp.concatenate([scores, sinks], -1)
    sees = jnp.isfinite(every).any(-1, keepdims=True)
    every = jnp.where(sees, every, 0)
    lse = jax.nn.logsumexp(every, -1, keepdims=True)
    weights = jnp.where(sees, jnp.exp(every - lse)[..., :-1], 0) * kept
    out = jnp.einsum("bhts,bshd->bthd", weights, jnp.repeat(v.astype(jnp.float32), q.shape[2] // v.shape[2], 2))
    return out, jnp.where(sees, lse, -jnp.inf)[..., 0].swapaxes(1, 2)


def kept_of(rng, p, batch=2):
    return dropout_mask(rng, p, batch, HEADS, S, S) * (65536 / (65536 - round(p * 65536)))


def weighted(results, douts):
    out, residual = results
    residual = jnp.where(jnp.isfinite(residual), residual, 0)
    return sum((x.astype(jnp.float32) * dx).sum() for x, dx in zip((out, residual), douts))


def douts_of(rng, q):
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (q.shape, q.shape[:-1])]


def attend(mask, **arguments):
    return lambda q, k, v, sink: dot_product_attention(q, k, v, mask, sink=sink, return_residual=True, **arguments)


def with_gradients(function, arrays, douts):
    """(out, residual) of the arrays, of which the sink may be None, and the gradients of those that are there."""

    def loss(arrays):
        results = function(*arrays)
        return weighted(results, douts), results

    gradients, results = jax.grad(loss, has_aux=True)(arrays)
    return *results, *(x for x in gradients if x is not None)


# Jitted here, so that masks and keys that differ in their values compile nothing.


@functools.partial(jax.jit, static_argnames=("softcap", "dropout_rate"))
def ours(arrays, mask, douts, **arguments):
    return with_gradients(attend(mask, **arguments), arrays, douts)


@functools.partial(jax.jit, static_argnames="softcap")
def wanted(arrays, visible, douts, softcap, kept):
    return with_gradients(lambda *x: dense(*x, visible, softcap, kept), arrays, douts)


BLIND = lambda: Mask(S, S, causal=True, bounds=jnp.full((1, 1, S, 1), 120))  # rows from 120 on see nothing
FEATURES = {
    "softcap": {"softcap": 2.0},
    "sink": {"sink": True},
    "dropout": {"dropout_rate": 0.3},
    "all": {"softcap": 3.0, "sink": True, "dropout_rate": 0.125},
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16] + ([] if ON_GPU else [jnp.float32]))
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("mask", [lambda: masks.causal_document(seqlens=[60, 90]), BLIND], ids=["documents", "blind"])
def test_against_dense_attention(rng, mask, name, dtype):
    mask, features = mask(), dict(FEATURES[name])
    sink = jnp.asarray(rng.standard_normal(HEADS), jnp.float32) if features.pop("sink", False) else None
    kept = 1.0
    if p := features.get("dropout_rate"):
        features["dropout_rng"] = jax.random.key(3)
        kept = kept_of(features["dropout_rng"], p)
    arrays = (*inputs(rng, dtype=dtype), sink)
    douts = douts_of(rng, arrays[0])
    got = ours(arrays, mask, douts, **features)
    want = wanted(arrays, mask.to_dense(), douts, features.get("softcap", 0.0), kept)
    for x, y, label in zip(got, want, ("out", "residual", "dq", "dk", "dv", "dsink"), strict=False):
        assert_close(x, y, TOLERANCES[jnp.dtype(dtype).name], label)
    assert len(got) == len(want) == (5 if sink is None else 6)


def test_a_sink_is_a_key_of_jax_nn(rng):
    """One whose value is 0 and whose score is its bias."""
    q, k, v = inputs(rng, seqlen_q=S, seqlen_k=S)
    sink = jnp.asarray(rng.standard_normal(HEADS), jnp.float32)

    def with_one_more_key(q, k, v, sink):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
        bias = jnp.where(jnp.arange(S + 1) == S, sink[None, :, None, None], 0)
        sees = jnp.tril(jnp.ones((S, S + 1), bool)).at[:, S].set(True)
        return jax.nn.dot_product_attention(
            q, k, v, bias=jnp.broadcast_to(bias, (2, HEADS, S, S + 1)), mask=sees[None, None]
        )

    with_a_sink = lambda q, k, v, sink: dot_product_attention(q, k, v, is_causal=True, sink=sink)
    douts = douts_of(rng, q)[0], jnp.zeros(())
    got, want = (
        jax.jit(functools.partial(with_gradients, lambda *x: (function(*x), jnp.zeros(()))))((q, k, v, sink), douts)
        for function in (with_a_sink, with_one_more_key)
    )
    for x, y in zip(got, want):
        assert_close(x, y, TOLERANCES[jnp.dtype(DTYPE).name])


def test_a_sink_of_the_arrays_dtype(rng):
    arrays = inputs(rng, dtype=jnp.bfloat16)
    sink = jnp.ones(HEADS, jnp.bfloat16)
    dsink = jax.grad(lambda sink: dot_product_attention(*arrays, sink=sink).astype(jnp.float32).sum())(sink)
    assert dsink.dtype == jnp.bfloat16 and dsink.shape == (HEADS,) and dsink.any()


# --- What is dropped --------------------------------------------------------------------------------------------------


def test_forms_of_the_state(rng):
    arrays = inputs(rng)
    drop = lambda state: np.asarray(dot_product_attention(*arrays, dropout_rate=0.5, dropout_rng=state))
    want = drop(STATE)
    whole = STATE.view("<u8").reshape(2)
    for state in (jnp.asarray(STATE), whole, whole.view(np.int64)):
        assert np.array_equal(drop(state), want)
    assert np.array_equal(drop(jax.random.key(1)), drop(jax.random.PRNGKey(1)))
    assert not np.array_equal(drop(jax.random.key(1)), drop(jax.random.key(2)))
    assert np.array_equal(drop(jax.random.key(1, impl="rbg")), drop(jax.random.key(1, impl="rbg")))
    kept = pytest.importorskip("flashmask.numpy").dropout_mask(whole, 0.5, 2, HEADS, S, S)
    assert np.array_equal(dropout_mask(STATE, 0.5, 2, HEADS, S, S), kept) and 0.49 < kept.mean() < 0.51


def test_a_new_key_does_not_retrace(rng):
    arrays, traced = inputs(rng), []

    @jax.jit
    def drop(key):
        traced.append(key)
        return dot_product_attention(*arrays, dropout_rate=0.2, dropout_rng=key)

    for n in range(3):
        key = jax.random.key(n)
        assert np.array_equal(drop(key), dot_product_attention(*arrays, dropout_rate=0.2, dropout_rng=key))
    assert len(traced) == 1


def test_without_dropout_the_key_is_not_read(rng):
    arrays = inputs(rng)
    assert np.array_equal(dot_product_attention(*arrays, dropout_rng=jax.random.key(0)), dot_product_attention(*arrays))


def dropping(q, k, v, sink=None, state=STATE):
    out, residual = dot_product_attention(
        q, k, v, is_causal=True, sink=sink, dropout_rate=0.4, dropout_rng=state, return_residual=True
    )
    return jnp.sin(3 * out.astype(jnp.float32)).sum() + jnp.cos(residual.astype(jnp.float32)).sum()


def test_checkpoint_drops_the_same(rng):
    arrays = (*inputs(rng), jnp.ones(HEADS))
    of = lambda function: jax.jit(jax.grad(function, argnums=(0, 1, 2, 3)))(*arrays)
    for x, y in zip(of(jax.checkpoint(dropping)), of(dropping)):
        assert_close(x, y, SAME)


# --- vmap -------------------------------------------------------------------------------------------------------------


def assert_same(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(x, y, SAME)


def each(function, count):
    return stacked([function(n) for n in range(count)])


@pytest.fixture
def many(rng):
    return stacked([inputs(rng, batch=1) for _ in range(3)])


def test_vmap_over_keys(many):
    states = np.arange(12, dtype=np.uint32).reshape(3, 2, 2)
    value = jax.jit(lambda q, k, v, state: jax.value_and_grad(dropping, argnums=(0, 1, 2))(q, k, v, None, state))
    want = each(lambda n: value(*(x[n] for x in many), states[n]), 3)
    assert_same(jax.jit(jax.vmap(value))(*many, states), want)


def test_vmap_with_one_key_drops_different_weights_in_each_entry(many):
    """The forward and its gradient the same ones, whether vmap is inside of grad or outside."""
    same = [x[:1].repeat(3, 0) for x in many]
    drop = lambda q, k, v: dot_product_attention(q, k, v, dropout_rate=0.5, dropout_rng=STATE)
    outs = np.asarray(jax.vmap(drop)(*same))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not np.array_equal(outs[a], outs[b])
    inside = jax.grad(lambda *x: jax.vmap(dropping)(*x).sum(), argnums=(0, 1, 2))
    outside = jax.vmap(jax.grad(dropping, argnums=(0, 1, 2)))
    assert_same(jax.jit(outside)(*many), jax.jit(inside)(*many))


@pytest.mark.skipif(ON_GPU, reason="differences of values need float32")
def test_gradients_under_vmap_are_those_of_the_values_that_the_forward_returns(many):
    values = jax.jit(jax.vmap(dropping))
    inside = jax.jit(jax.grad(lambda *x: values(*x).sum(), argnums=(0, 1, 2)))(*many)
    step = np.float32(1e-2)  # along ones
    slope = np.asarray(values(*(x + step for x in many)) - values(*(x - step for x in many))) / (2 * step)
    want = sum(np.asarray(g).reshape(3, -1).sum(1) for g in inside)
    assert_close(slope, want, 2e-2)


def test_nested_vmaps_with_one_key_drop_different_weights(many):
    q, k, v = (x[0] for x in many)
    four = lambda x: jnp.broadcast_to(x, (2, 2, *x.shape))
    drop = lambda q, k, v: dot_product_attention(q, k, v, dropout_rate=0.5, dropout_rng=STATE)
    outs = np.asarray(jax.vmap(jax.vmap(drop))(four(q), four(k), four(v))).reshape(4, -1)
    assert len({x.tobytes() for x in outs}) == 4


def test_several_gradients_of_one_forward(rng):
    """vmap over the backward alone: it drops what the forward dropped."""
    arrays = inputs(rng)
    out, back = jax.vjp(
        lambda *x: dot_product_attention(*x, dropout_rate=0.4, dropout_rng=STATE, sink=jnp.ones(HEADS)), *arrays
    )
    douts = jnp.stack([jnp.ones_like(out), out, -out])
    assert_same(jax.vmap(back)(douts), each(lambda n: back(douts[n]), 3))


@pytest.mark.parametrize("sink", [None, 0.5], ids=["folded", "one by one"])
@pytest.mark.parametrize("batch", [1, 2])
def test_plans_of_backwards_that_map_the_mask_in_another_way_than_the_forward(rng, batch, sink):
    """On the CPU a plan of other masks is an error; then a backward makes its own."""
    arrays = stacked([inputs(rng, batch=2) for _ in range(3)])
    mask = Mask(S, S, causal=True, bounds=jnp.asarray([[60], [100]])[:batch, None, :, None].repeat(S, 2))
    sink = None if sink is None else jnp.full(HEADS, sink)
    attend = lambda q, k, v: dot_product_attention(q, k, v, mask, sink=sink)
    loss = lambda *x: jnp.sin(attend(*x).astype(jnp.float32)).sum()
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    assert_same(jax.vmap(gradients)(*arrays), each(lambda n: gradients(*(x[n] for x in arrays)), 3))
    out, back = jax.vjp(attend, *(x[0] for x in arrays))
    douts = jnp.stack([jnp.ones_like(out), out, -out])
    assert_same(jax.vmap(back)(douts), each(lambda n: back(douts[n]), 3))


def test_vmap_over_a_sink_and_past_it(many):
    sinks = np.arange(3 * HEADS, dtype=np.float32).reshape(3, HEADS) / 10
    function = lambda q, k, v, sink: jnp.sin(dot_product_attention(q, k, v, sink=sink).astype(jnp.float32)).sum()
    value = jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2, 3)))
    for sink, axis in ((sinks, 0), (sinks[1], None)):
        want = each(lambda n: value(*(x[n] for x in many), sink if axis is None else sink[n]), 3)
        assert_same(jax.jit(jax.vmap(value, in_axes=(0, 0, 0, axis)))(*many, sink), want)
    total = jax.jit(jax.grad(lambda sink: jax.vmap(function, in_axes=(0, 0, 0, None))(*many, sink).sum()))(sinks[1])
    assert_close(total, want[1][3].sum(0), max(SAME, 1e-5))


# --- shard_map --------------------------------------------------------------------------------------------------------


def test_shard_map_over_heads_and_over_the_batch(rng):
    arrays = [np.asarray(x) for x in inputs(rng, dtype=jnp.float32)]
    sink = np.linspace(-1, 1, HEADS, dtype=np.float32)
    attend = lambda q, k, v, sink: dot_product_attention(q, k, v, is_causal=True, sink=sink, softcap=5.0)
    mesh, heads, batch = Mesh(jax.devices("cpu")[:2], ("x",)), PartitionSpec(None, None, "x"), PartitionSpec("x")
    loss = lambda function: jax.jit(jax.grad(lambda *x: jnp.sin(3 * function(*x)).sum(), argnums=(0, 1, 2, 3)))(
        *arrays, sink
    )
    with jax.default_device(jax.devices("cpu")[0]):
        want = loss(attend)
        for specs, of_sink in ((heads, PartitionSpec("x")), (batch, PartitionSpec())):
            sharded = shard_map(attend, mesh=mesh, in_specs=(specs, specs, specs, of_sink), out_specs=specs)
            for x, y in zip(loss(sharded), want):
                assert_close(x, y, 1e-5)


def test_shards_with_keys_of_their_own(rng):
    arrays = [np.asarray(x) for x in inputs(rng, dtype=jnp.float32)]
    mesh, batch = Mesh(jax.devices("cpu")[:2], ("x",)), PartitionSpec("x")

    def attend(q, k, v):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("x"))
        return dot_product_attention(q, k, v, dropout_rate=0.5, dropout_rng=key)

    with jax.default_device(jax.devices("cpu")[0]):
        got = jax.jit(shard_map(attend, mesh=mesh, in_specs=(batch,) * 3, out_specs=batch))(*arrays)
        for n in range(2):
            key = jax.random.fold_in(jax.random.key(0), n)
            one = dot_product_attention(*(x[n : n + 1] for x in arrays), dropout_rate=0.5, dropout_rng=key)
            assert_close(got[n : n + 1], one, 1e-6)


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ({"dropout_rate": 0.1}, ValueError, "dropout_rate is 0.1 and dropout_rng is missing"),
        (
            {"dropout_rate": 1.0, "dropout_rng": STATE},
            ValueError,
            "dropout_rate is 1.0; it must be at least 0 and less than 1",
        ),
        ({"dropout_rate": "0.1"}, TypeError, "dropout_rate is '0.1'"),
        ({"dropout_rate": 0.1, "dropout_rng": 3}, TypeError, "dropout_rng is 3"),
        ({"dropout_rate": 0.1, "dropout_rng": np.zeros((4, 2), np.uint32)}, ValueError, "dropout_rng is .* one key"),
        ({"dropout_rate": 0.1, "dropout_rng": np.zeros(2, np.float32)}, ValueError, "dropout_rng is .*float32"),
        ({"softcap": -1.0}, ValueError, "softcap is -1"),
        ({"softcap": "1"}, TypeError, "softcap is '1'"),
        ({"sink": np.zeros(3, np.float32)}, ValueError, "sink"),
        ({"sink": np.zeros(HEADS, np.float16)}, ValueError, "sink"),
    ],
)
def test_wrong_arguments_are_named(rng, arguments, error, says):
    arrays = inputs(rng)
    with pytest.raises(error, match=says):
        dot_product_attention(*arrays, **arguments)
    assert explain(*arrays, **arguments).startswith("refused")


def test_explain(rng):
    text = explain(*inputs(rng), softcap=2.0, sink=np.zeros(HEADS, np.float32), dropout_rate=0.1, dropout_rng=STATE)
    for word in ("softcap", "sink", "dropout"):
        assert word in text, text


@pytest.mark.parametrize("by_batch", [False, True])
def test_alibi_is_a_bias_of_jax_nn(rng, by_batch):
    """Also under vmap, whose mapped dimension becomes part of the batch."""
    q, k, v = inputs(rng)
    slopes = jnp.asarray(rng.random((len(q), HEADS) if by_batch else HEADS), jnp.float32)
    distance = jnp.abs(jnp.arange(S)[:, None] - jnp.arange(S))
    bias = -jnp.atleast_2d(slopes)[..., None, None] * distance

    def ours(q, k, v):
        return dot_product_attention(q, k, v, is_causal=True, alibi_slopes=slopes)

    def theirs(q, k, v):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v, bias, is_causal=True)

    douts = douts_of(rng, q)[:1]
    loss = lambda function: lambda *x: (function(*x).astype(jnp.float32) * douts[0]).sum()
    got = (ours(q, k, v), *jax.grad(loss(ours), (0, 1, 2))(q, k, v))
    want = (theirs(q, k, v), *jax.grad(loss(theirs), (0, 1, 2))(q, k, v))
    for x, y, label in zip(got, want, ("out", "dq", "dk", "dv"), strict=True):
        assert_close(x, y, TOLERANCES[jnp.dtype(DTYPE).name], label)
    mapped = jax.vmap(ours)(*(jnp.stack((x, 2 * x)) for x in (q, k, v)))
    assert jnp.array_equal(mapped[0], got[0]) and jnp.array_equal(mapped[1], ours(2 * q, 2 * k, 2 * v))
    with pytest.raises(NotImplementedError, match="the gradient of alibi_slopes is not implemented"):
        jax.grad(lambda s: dot_product_attention(q, k, v, alibi_slopes=s).astype(jnp.float32).sum())(slopes)
