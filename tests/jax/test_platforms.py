# SPDX-License-Identifier: Apache-2.0
"""Processes with a CPU and a GPU: both calls are traced, and the platform decides when the program is lowered.

The tests see two platforms without a GPU, too. The library then refuses to size a call for CUDA, so the call that is
traced has no workspace; it is lowered all the same, and never run.
"""

import ctypes as C
import json
import re

import jax
import jax.numpy as jnp
import pytest
from dense_reference import inputs
from flashmask import capi
from flashmask.jax import Mask, dot_product_attention, library, masks, xla_calls
from flashmask.jax.attention import Options


@pytest.fixture(autouse=True)
def two_platforms(monkeypatch):
    found = library.platforms()
    monkeypatch.setattr(library, "platforms", lambda: sorted({*found, "cpu", "cuda"}, key=found.__contains__))
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


# --- Workspaces -------------------------------------------------------------------------------------------------------


@pytest.fixture
def h100_sizes(monkeypatch):
    """The library asked about a GPU that need not be there."""
    on_this_machine = library.workspace_bytes

    def workspace_bytes(operation, args, options):
        if options.device == capi.DEVICE_CPU:
            return on_this_machine(operation, args, options)
        gpu = capi.make(capi.GpuModel, compute_major=9, compute_minor=0, multiprocessors=132)
        asked = C.byref(args), operation == "backward", C.byref(options), C.byref(gpu)
        status, text = capi.text_of(library.load().fm_explain_json, *asked)
        capi.check(status)
        explained = json.loads(text)
        if explained["backend"] != "cuda":
            pytest.skip("needs a library with the CUDA backend")
        return explained["workspace_bytes"]

    monkeypatch.setattr(library, "workspace_bytes", workspace_bytes)


def workspaces(function, *arguments):
    """Workspaces of the calls in the program for CUDA: (name, bytes)."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"@flashmask_(forward|backward)\(.*-> \(.*tensor<(\d+)xui8>\)", text)
    return [(name, int(size)) for name, size in found]


@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 4)], ids=["one for each", "of each batch entry"])
@pytest.mark.parametrize("is_rolled", [False, True], ids=["unrolled", "scan"])
def test_workspaces_under_vmap_are_those_of_the_calls_that_are_made(rng, h100_sizes, is_rolled, batch, heads):
    """Also where what a forward keeps for its backward leaves one traced function and enters another, as in a scan.

    Some JAX trace the two of one call apart even without a scan.
    """
    entries, length = 3, 150
    q, k, v = inputs(rng, head_dim=64, heads_kv=4, dtype=jnp.bfloat16)
    bounds = jnp.full((entries, batch, heads, length, 1), 100, jnp.int32)

    def layers(q, bounds):
        mask = Mask(length, length, causal=True, bounds=bounds)
        layer = lambda x, _: (dot_product_attention(x, k, v, mask), None)
        out = jax.lax.scan(layer, q, None, length=2)[0] if is_rolled else layer(q, None)[0]
        return jnp.sin(out.astype(jnp.float32)).sum()

    shape = lambda x, *sizes: jax.ShapeDtypeStruct((*sizes, *x.shape[1:]), x.dtype)
    folded = [shape(x, entries * x.shape[0]) for x in (q, k, v)]
    lse = jax.ShapeDtypeStruct((entries * 2, 4, length), jnp.float32)
    mask = Mask(length, length, causal=True, bounds=jnp.zeros((entries * 2, heads, length, 1), jnp.int32))
    options = Options(softmax_scale=None, deterministic=True, backend="auto")
    given = lambda *arrays: (arrays, mask, xla_calls.Features(), None)
    ask = lambda operation, arrays, results: xla_calls._workspace_bytes(
        operation, options, given(*arrays), results, "cuda"
    )
    want = [
        ("forward", ask("forward", folded, (folded[0], lse))),
        ("backward", ask("backward", (*folded, folded[0], lse, folded[0], None), folded)),
    ]
    assert all(size > 1 for _, size in want)
    stacked = jnp.stack([q] * entries)
    assert workspaces(jax.vmap(jax.grad(layers)), stacked, bounds) == want
