# SPDX-License-Identifier: Apache-2.0
"""explain: the mask, the tiles and the backend of a call, or why there is none."""

import re

import flashmask.jax
import pytest
from dense_reference import ON_GPU, inputs
from flashmask.jax import explain, masks


def test_a_call(rng):
    q, k, v = inputs(rng, seqlen_q=384, seqlen_k=384)
    said = explain(q, k, v, masks.causal_document(seqlens=[128, 256]))
    assert re.search(r"query +\[2, 384, 4, \d+\] \w+ on (cpu|cuda:0)", said)
    assert "causal; LTS of each key, batch 1, heads 1" in said
    assert "9 of 128x128: 1 full, 3 partial, 5 skipped" in said
    backend = "cuda" if ON_GPU else "cpu"
    assert re.search(rf"forward +backend: {backend} ", said) and re.search(rf"backward +backend: {backend} ", said)
    assert "the same bits in every run" in said


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"bias": 1}, "refused   bias is 1"),
        ({"is_causal": True, "mask": masks.full(150)}, "refused   is_causal is given beside a Mask"),
        ({"backend": "none"}, "none"),
    ],
)
def test_refused(rng, arguments, says):
    assert says in explain(*inputs(rng), **arguments)


def test_names_are_those_of_the_call(rng):
    assert "softcap" in explain(*inputs(rng), softcap=3.0, return_residual=True)
    with pytest.raises(TypeError, match="no_such"):
        flashmask.jax.dot_product_attention(*inputs(rng), no_such=1)
