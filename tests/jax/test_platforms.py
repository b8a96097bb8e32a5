# SPDX-License-Identifier: Apache-2.0
"""Where a process has a CPU and a GPU: both calls are traced, and the platform decides when the program is lowered.

The tests see two platforms also where there is no GPU. There the library refuses to size a call for CUDA, so the one
that is traced has no workspace; it is lowered all the same, and never run.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from dense_reference import inputs
from flashmask.jax import _library, dot_product_attention, masks


@pytest.fixture(autouse=True)
def two_platforms(monkeypatch):
    found = _library.platforms()
    monkeypatch.setattr(_library, "platforms", lambda: sorted({*found, "cpu", "cuda"}, key=found.__contains__))
    jax.clear_caches()
    yield
    jax.clear_caches()


def loss(q, k, v, mask):
    return jnp.sin(dot_product_attention(q, k, v, mask).astype(jnp.float32)).sum()


def lowered(platform, function, *arguments):
    """The calls of the library in the program for a platform: (name, number of arguments, number of results)."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    calls = re.findall(r"(?:%\d+)(?::(\d+))? = stablehlo.custom_call @(flashmask_\w+)\((.*?)\)", text)
    return [(name, given.count("%"), int(results or 1)) for results, name, given in calls]


def test_each_platform_gets_its_calls(rng):
    arguments = *inputs(rng), masks.causal_document(seqlens=[50, 100])
    gradients = jax.grad(loss, argnums=(0, 1, 2))
    # The forward leaves its plan for the backward; without one it keeps it to itself.
    assert lowered("cpu", loss, *arguments) == [("flashmask_forward", 4, 2)]
    assert lowered("cpu", gradients, *arguments) == [("flashmask_forward", 4, 3), ("flashmask_backward", 8, 3)]
    # One result more: the workspace.
    assert lowered("cuda", loss, *arguments) == [("flashmask_forward", 4, 3)]
    assert lowered("cuda", gradients, *arguments) == [("flashmask_forward", 4, 4), ("flashmask_backward", 8, 4)]


def test_the_gradient_of_the_residual_is_an_argument_only_where_there_is_one(rng):
    def of_both(q, k, v):
        out, residual = dot_product_attention(q, k, v, return_residual=True)
        return out.astype(jnp.float32).sum() + residual.astype(jnp.float32).sum()

    arguments = inputs(rng)
    of_out = lambda *x: dot_product_attention(*x).astype(jnp.float32).sum()
    # q, k, v, out, lse, dout and the plan
    assert lowered("cpu", jax.grad(of_out), *arguments)[1] == ("flashmask_backward", 7, 3)
    assert lowered("cpu", jax.grad(of_both), *arguments)[1] == ("flashmask_backward", 8, 3)


def test_the_program_runs_where_it_can(rng):
    arguments = *inputs(rng), masks.causal_document(seqlens=[50, 100])
    gradients = jax.grad(loss, argnums=(0, 1, 2))
    got = jax.jit(gradients)(*arguments)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), arguments)
    mapped = jax.vmap(gradients)(*stacked)
    assert all(jnp.allclose(x, y[1], atol=1e-6) for x, y in zip(got, mapped))


def test_what_no_platform_takes_is_raised_while_tracing(rng):
    q, k, v = inputs(rng)
    with pytest.raises(ValueError, match="heads"):
        jax.eval_shape(dot_product_attention, q[:, :, :3], k, v)
