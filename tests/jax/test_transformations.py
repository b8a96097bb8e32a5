# SPDX-License-Identifier: Apache-2.0
"""dot_product_attention under jit, grad, vmap, shard_map, scan, donation and checkpoint."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_reference import DTYPE, SAME, TOLERANCES, assert_close, inputs, stacked
from flashmask.jax import Mask, dot_product_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec

try:
    from jax import shard_map
except ImportError:  # before JAX 0.6
    from jax.experimental.shard_map import shard_map

S = 150


def documents(ends, batch=1, heads=1):
    """A causal mask of documents packed into one sequence that end before the given rows."""
    lts = np.asarray(ends, np.int32)[np.searchsorted(ends, np.arange(S), side="right")]
    return Mask(S, S, causal=True, bounds=np.broadcast_to(lts[None, None, :, None], (batch, heads, S, 1)))


def loss(q, k, v, mask=None):
    """A scalar of out and the residual, whose gradients differ from row to row."""
    out, residual = dot_product_attention(q, k, v, mask, return_residual=True)
    return jnp.sin(3 * out.astype(jnp.float32)).sum() + jnp.cos(residual.astype(jnp.float32)).sum()


gradients_of = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def assert_same(got, want, tolerance=SAME):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(x, y, tolerance)


def calls_in(jaxpr):
    """The calls of the library in a traced function, as the shapes of their first arrays."""
    found = []
    for equation in jaxpr.eqns:
        parameters = dict(equation.params)
        if "branches" in parameters:  # one for each platform
            parameters["branches"] = parameters["branches"][:1]
        if equation.primitive.name == "ffi_call":
            found.append((equation.params["target_name"], equation.invars[0].aval.shape))
        for value in jax.tree.leaves(tuple(parameters.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += calls_in(inner)
    return found


# --- jit ------------------------------------------------------------------------------------------------------------


def test_a_new_mask_of_the_same_lengths_does_not_retrace(rng):
    arrays, traced = inputs(rng), []

    @jax.jit
    def gradients(arrays, mask):
        traced.append(mask)
        return gradients_of(*arrays, mask)

    for ends in ([30, 100, S], [S], [1, 2, 149, S]):
        mask = documents(ends)
        assert_same(gradients(arrays, mask), gradients_of(*arrays, mask))
    assert len(traced) == 1
    gradients(arrays, mask.replace(window=(20, 0)))
    assert len(traced) == 2


def test_a_mask_made_within_jit(rng):
    arrays = inputs(rng, batch=1)

    @jax.jit
    def attend(arrays, lts):
        return dot_product_attention(*arrays, Mask(S, S, causal=True, bounds=lts[None, None, :, None]))

    mask = documents([60, S])
    assert_same(attend(arrays, mask.bounds[0, 0, :, 0]), dot_product_attention(*arrays, mask))


def test_lengths_are_traced(rng):
    arrays, traced = inputs(rng), []

    @jax.jit
    def attend(lengths):
        traced.append(lengths)
        return dot_product_attention(*arrays, key_value_seq_lengths=lengths)

    for lengths in ([1, 150], [80, 3]):
        cut = [
            dot_product_attention(arrays[0][n : n + 1], *(x[n : n + 1, :length] for x in arrays[1:]))
            for n, length in enumerate(lengths)
        ]
        assert_same(attend(jnp.asarray(lengths)), jnp.concatenate(cut), TOLERANCES[jnp.dtype(DTYPE).name])
    assert len(traced) == 1


def test_donated_arrays(rng):
    (q, k, v), mask = inputs(rng), documents([30, S])
    want = dot_product_attention(q, k, v, mask)
    given = jnp.array(q)
    assert_same(jax.jit(dot_product_attention, donate_argnums=0)(given, k, v, mask), want, 0)
    assert given.is_deleted()


def test_a_program_is_nothing_but_the_calls(rng):
    """No copy, no transposed lse, no zeros for a gradient that is not asked for."""

    def with_gradients(q, k, v, dout):
        out, back = jax.vjp(lambda *x: dot_product_attention(*x, is_causal=True), q, k, v)
        return out, back(dout)

    (q, k, v) = inputs(rng)
    program = jax.jit(with_gradients).lower(q, k, v, q).compile().as_text()
    operations = re.findall(r"^ *(?:ROOT )?%\S+ = .*? ([a-z-]+)\(", program, re.MULTILINE)
    assert operations.count("custom-call") == 2
    assert not {"copy", "transpose", "broadcast", "fusion"} & set(operations), program


# --- grad -----------------------------------------------------------------------------------------------------------


def test_checkpoint(rng):
    arrays, mask = inputs(rng), documents([30, S])
    remade = jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2))
    assert_same(remade(*arrays, mask), gradients_of(*arrays, mask))
    names = [name for name, _ in calls_in(jax.make_jaxpr(remade)(*arrays, mask).jaxpr)]
    assert names == ["flashmask_forward", "flashmask_forward", "flashmask_backward"]


def test_layers_in_a_scan(rng):
    q, k, v = inputs(rng, heads_kv=4)
    mask = documents([70, S])
    scales = jnp.asarray([0.5, 1.0, 2.0], DTYPE)

    def layers(q, roll):
        layer = lambda x, scale: (dot_product_attention(scale * x, k, v, mask), None)
        if roll:
            return jax.lax.scan(layer, q, scales)[0].astype(jnp.float32).sum()
        return functools.reduce(lambda x, scale: layer(x, scale)[0], scales, q).astype(jnp.float32).sum()

    got, want = (jax.jit(jax.grad(layers), static_argnums=1)(q, roll) for roll in (True, False))
    assert_same(got, want, TOLERANCES[jnp.dtype(DTYPE).name])


def test_derivatives_that_are_not_there(rng):
    arrays = inputs(rng)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(dot_product_attention, arrays, arrays)
    with pytest.raises(ValueError, match="flashmask.*cannot be differentiated"):
        jax.grad(lambda q: gradients_of(q, *arrays[1:])[0].astype(jnp.float32).sum())(arrays[0])


# --- vmap -----------------------------------------------------------------------------------------------------------


def many_inputs(rng, count, **shape):
    return stacked([inputs(rng, **shape) for _ in range(count)])


def one_by_one(function, arrays, masks):
    return stacked([function(*(x[n] for x in arrays), mask) for n, mask in enumerate(masks)])


MASKS_TO_MAP = {
    "one for all": lambda: [documents([30, S])] * 3,
    "one for each": lambda: [documents(ends) for ends in ([30, S], [S], [1, 149, S])],
    "of each batch entry": lambda: [documents(ends, batch=2, heads=4) for ends in ([30, S], [S], [1, 149, S])],
}


@pytest.mark.parametrize("name", MASKS_TO_MAP)
@pytest.mark.parametrize("function", [dot_product_attention, gradients_of], ids=["forward", "gradients"])
def test_vmap(rng, function, name):
    masks, arrays = MASKS_TO_MAP[name](), many_inputs(rng, 3)
    mask, axis = (masks[0], None) if name == "one for all" else (stacked(masks), 0)
    mapped = jax.vmap(function, in_axes=(0, 0, 0, axis))
    assert_same(jax.jit(mapped)(*arrays, mask), one_by_one(function, arrays, masks))
    calls = calls_in(jax.make_jaxpr(mapped)(*arrays, mask).jaxpr)
    shapes = {shape for name, shape in calls if name != "flashmask_build_plan"}
    assert shapes == {(6, *arrays[0].shape[2:])}


def test_vmap_of_one_argument(rng):
    (q, k, v), mask = inputs(rng), documents([30, S], batch=2)
    queries = stacked([q, 2 * q, -q])
    got = jax.vmap(gradients_of, in_axes=(2, None, None, None))(np.moveaxis(queries, 0, 2), k, v, mask)
    assert_same(got, one_by_one(gradients_of, [queries, stacked([k] * 3), stacked([v] * 3)], [mask] * 3))


def test_gradient_of_a_vmap_within_a_vmap(rng):
    arrays = [x.reshape(2, 3, *x.shape[1:]) for x in many_inputs(rng, 6, batch=1)]
    mask = documents([30, S])
    twice = jax.vmap(jax.vmap(loss, in_axes=(0, 0, 0, None)), in_axes=(0, 0, 0, None))
    total = lambda *x: twice(*x).sum()
    want = one_by_one(gradients_of, [x.reshape(6, *x.shape[2:]) for x in arrays], [mask] * 6)
    got = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*arrays, mask)
    assert_same([x.reshape(6, *x.shape[2:]) for x in got], want)


def layers(q, k, v, mask):
    """loss() of three layers, whose gradient takes what they keep out of one loop and into another."""
    layer = lambda x, scale: (dot_product_attention(scale * x, k, v, mask), None)
    return loss(jax.lax.scan(layer, q, jnp.asarray([0.5, 1.0, 2.0], q.dtype))[0], k, v, mask)


@pytest.mark.parametrize("name", MASKS_TO_MAP)
def test_vmap_of_layers_in_a_scan(rng, name):
    masks, arrays = MASKS_TO_MAP[name](), many_inputs(rng, 3, heads_kv=4)
    mask, axis = (masks[0], None) if name == "one for all" else (stacked(masks), 0)
    gradients = jax.jit(jax.grad(layers, argnums=(0, 1, 2)))
    mapped = jax.jit(jax.vmap(gradients, in_axes=(0, 0, 0, axis))).lower(*arrays, mask).compile()
    want = one_by_one(gradients, arrays, masks)
    assert_same(mapped(*arrays, mask), want, max(SAME, TOLERANCES[jnp.dtype(DTYPE).name]))
    # Plans that nobody reads are not made.
    called = re.findall(r'custom_call_target="(flashmask_\w+)"', mapped.as_text())
    assert set(called) == {"flashmask_forward", "flashmask_backward"}


@pytest.mark.parametrize("name", MASKS_TO_MAP)
def test_gradients_of_a_mapped_forward_that_are_taken_one_by_one(rng, name):
    """Takes them together, too, by a vmap that no longer knows which masks were shared."""
    masks, arrays = MASKS_TO_MAP[name](), many_inputs(rng, 3)
    mask, axis = (masks[0], None) if name == "one for all" else (stacked(masks), 0)
    # The function that a vjp returns keeps its residuals in its leaves.
    back_of = lambda q, k, v, mask: jax.vjp(lambda *x: dot_product_attention(*x, mask), q, k, v)[1]
    backs = jax.vmap(back_of, in_axes=(0, 0, 0, axis))(*arrays, mask)
    douts = jnp.cos(jnp.asarray(arrays[0]))
    want = [back_of(*(x[n] for x in arrays), masks[n])(douts[n]) for n in range(3)]
    assert_same([jax.tree.map(lambda x: x[n], backs)(douts[n]) for n in range(3)], want)
    assert_same(jax.vmap(lambda back, dout: back(dout))(backs, douts), stacked(want))


# --- shard_map ------------------------------------------------------------------------------------------------------

SHARDINGS = {
    "batch": (PartitionSpec("x"), PartitionSpec("x"), PartitionSpec("x")),
    "heads": (PartitionSpec(None, None, "x"), PartitionSpec(None, None, "x"), PartitionSpec()),
    "query heads of one key head": (PartitionSpec(None, None, "x"), PartitionSpec(), PartitionSpec()),
}


@pytest.mark.parametrize("name", SHARDINGS)
def test_shard_map(rng, name):
    of_query, of_key, of_mask = SHARDINGS[name]
    heads_kv = 1 if of_key == PartitionSpec() else 2
    # On the CPU everywhere, which has two devices here. numpy's arrays are on none yet.
    arrays = [np.asarray(x) for x in inputs(rng, heads_kv=heads_kv, dtype=jnp.float32)]
    bounds = np.asarray(documents([30, S], batch=2).bounds)
    attend = lambda q, k, v, bounds: dot_product_attention(q, k, v, Mask(S, S, causal=True, bounds=bounds))
    mesh = Mesh(jax.devices("cpu")[:2], ("x",))
    sharded = shard_map(attend, mesh=mesh, in_specs=(of_query, of_key, of_key, of_mask), out_specs=of_query)
    with jax.default_device(jax.devices("cpu")[0]):
        got, want = (
            jax.jit(jax.grad(lambda *x: jnp.sin(3 * function(*x, bounds)).sum(), argnums=(0, 1, 2)))(*arrays)
            for function in (sharded, attend)
        )
    assert_same(got, want, 1e-5)


def test_sharded_arrays_without_shard_map(rng):
    mesh, mask = Mesh(jax.devices("cpu")[:2], ("x",)), documents([30, S])
    arrays = [np.asarray(x) for x in inputs(rng, dtype=jnp.float32)]
    mask = jax.tree.map(np.asarray, mask)
    with jax.default_device(jax.devices("cpu")[0]):
        want = jax.jit(gradients_of)(*arrays, mask)
    sharded = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec("x")))
    assert_same(jax.jit(gradients_of)(*sharded, mask), want, 1e-5)
