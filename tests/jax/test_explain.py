# SPDX-License-Identifier: Apache-2.0
"""flashmask.jax.explain: the words of the other frontends, for JAX's arrays."""

import jax
import jax.numpy as jnp
import pytest
from dense_reference import ON_GPU
from flashmask.jax import dot_product_attention, explain, masks


def arrays(dtype=jnp.float32, dim=64):
    return [jnp.zeros((2, 300, heads, dim), dtype) for heads in (4, 2, 2)]


@pytest.mark.skipif(ON_GPU, reason="the arrays are on the GPU")
def test_what_runs():
    text = explain(*arrays(), is_causal=True)
    for line in (
        "query     [2, 300, 4, 64] float32 on cpu",
        "mask      causal; row 0 at key 0",
        "tiles     9 of 128x128: 3 full, 3 partial, 3 skipped",
        "forward   backend: cpu",
        "backward  backend: cpu",
    ):
        assert line in text, text
    assert "LTS of each key, batch 1, heads 1" in explain(*arrays(), masks.causal_document(seqlens=[100, 200]))
    assert "batch 2" in explain(*arrays(), key_value_seq_lengths=jnp.array([7, 300]))


def test_one_that_is_refused():
    text = explain(*arrays(jnp.float16, dim=300))
    assert "forward   refused: head_dim (q's last dimension) is 300" in text and text.endswith("nearest   none")


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"bias": 30.0}, "bias is 30.0"),
        ({"backend": 3}, "backend is 3"),
        ({"is_causal": True, "mask": masks.full(300)}, "is_causal is given beside a Mask"),
        ({"key": jnp.zeros((2, 300, 2, 32))}, "k is float32 [2, 300, 2, 32]"),
    ],
)
def test_wrong_calls_are_texts_too(arguments, says):
    given = {**dict(zip(("query", "key", "value"), arrays())), **arguments}
    text = explain(**given)
    assert text.startswith("refused   ") and says in text
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
        dot_product_attention(**given)
    assert says in str(error.value)


def test_arguments_that_there_are_not_raise():
    with pytest.raises(TypeError, match="nonsense"):
        explain(*arrays(), nonsense=1)


def test_traced_arrays_are_refused():
    said = []
    jax.jit(lambda q: said.append(explain(q, q, q)))(arrays()[0])
    assert said == ["refused   an array is traced; explain takes arrays whose contents are there"]
