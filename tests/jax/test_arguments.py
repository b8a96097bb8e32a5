# SPDX-License-Identifier: Apache-2.0
"""Arguments that dot_product_attention refuses, and its messages."""

import flashmask
import jax
import numpy as np
import pytest
from dense_reference import ON_GPU, inputs
from flashmask.jax import Mask, UnsupportedError, dot_product_attention

S = 40
A_MASK = Mask(S, S, causal=True)


def refused(rng, error, says, mask=None, **arguments):
    q, k, v = inputs(rng, seqlen_q=S, seqlen_k=S)
    arrays = {name: arguments.pop(name, x) for name, x in (("query", q), ("key", k), ("value", v))}
    with pytest.raises(error, match=says):
        dot_product_attention(**arrays, mask=mask, **arguments)


def test_a_bias_is_refused(rng):
    refused(rng, UnsupportedError, "bias is .*; it must be None: it is not implemented", bias=np.zeros((1, 1, S, S)))
    assert UnsupportedError is flashmask.errors.UnsupportedError


def test_features_that_are_not_asked_for(rng):
    arrays = inputs(rng, seqlen_q=S, seqlen_k=S)
    assert np.array_equal(
        dot_product_attention(*arrays), dot_product_attention(*arrays, bias=None, softcap=None, sink=None)
    )


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ({"scale": "1"}, TypeError, "scale is '1'"),
        ({"is_causal": 2}, TypeError, "is_causal is 2"),
        ({"return_residual": None}, TypeError, "return_residual is None"),
        ({"deterministic": "no"}, TypeError, "deterministic is 'no'"),
        ({"backend": None}, TypeError, "backend is None"),
        ({"local_window_size": (1, -1)}, ValueError, "local_window_size is -1; it must be at least 0"),
        ({"local_window_size": (1, 2, 3)}, ValueError, "local_window_size has 3 entries"),
        ({"local_window_size": 1.5}, TypeError, "local_window_size is 1.5"),
        (
            {"query_seq_lengths": [1, 2, 3]},
            ValueError,
            r"query_seq_lengths is int32 \[3\]; it must be integers .*\[2\]",
        ),
        ({"key_value_seq_lengths": [1.0, 2.0]}, ValueError, "key_value_seq_lengths is float32"),
        ({"query": np.zeros((S, 4))}, ValueError, r"query has shape \[40, 4\]; it must have 4 dimensions"),
    ],
)
def test_values(rng, arguments, error, says):
    refused(rng, error, says, **arguments)


@pytest.mark.parametrize(
    "mask, arguments, error, says",
    [
        (
            np.ones((1, 1, S, S), bool),
            {},
            TypeError,
            "mask is a numpy.ndarray, bool .*; it must be a flashmask.jax.Mask",
        ),
        (Mask(S, S + 1), {}, ValueError, "the mask is for 40 query rows and 41 keys; the call has 40 and 40"),
        (A_MASK, {"is_causal": True}, ValueError, "is_causal is given beside a Mask"),
        (A_MASK, {"local_window_size": 3}, ValueError, "local_window_size is given beside a Mask"),
        (A_MASK, {"query_seq_lengths": [1, 2]}, ValueError, "query_seq_lengths is given beside a Mask"),
        (A_MASK, {"key_value_seq_lengths": [1, 2]}, ValueError, "key_value_seq_lengths is given beside a Mask"),
    ],
)
def test_masks(rng, mask, arguments, error, says):
    refused(rng, error, says, mask, **arguments)


cpu_checks = pytest.mark.skipif(ON_GPU, reason="where there is a GPU, it may be another platform that takes the call")


@cpu_checks
@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ({"key": np.zeros((2, S, 3, 16), np.float32)}, ValueError, "heads"),
        ({"key": np.zeros((1, S, 2, 16), np.float32)}, ValueError, "batch"),
        ({"key": np.zeros((2, S, 2, 8), np.float32)}, ValueError, "head_dim"),
        ({"value": np.zeros((2, S + 1, 2, 16), np.float32)}, ValueError, "seqlen_k|41"),
        ({"value": np.zeros((2, S, 2, 16), np.float16)}, ValueError, "dtype|float16"),
        ({"query": np.zeros((2, S, 4, 16), np.int8)}, TypeError, "q is int8; it must be float32"),
        ({"backend": "tpu"}, ValueError, "tpu"),
        ({"backend": "cuda"}, (UnsupportedError, RuntimeError), "cuda|CUDA"),
        ({"mask": Mask(S, S, bounds=np.zeros((1, 3, S, 2), np.int32))}, ValueError, "heads"),
        ({"mask": Mask(S, S, bounds=np.zeros((1, 1, S, 1), np.int32))}, ValueError, "causal"),
        ({"mask": Mask(S, S, bounds=np.zeros((1, 1, S + 1, 2), np.int32))}, ValueError, "41"),
        ({"mask": Mask(S, S, block_mask=np.zeros((1, 1, 2, 1), bool))}, ValueError, "block_mask"),
    ],
)
def test_what_the_library_checks_is_raised_while_tracing(rng, arguments, error, says):
    refused(rng, error, says, **arguments)
    q, k, v = inputs(rng, seqlen_q=S, seqlen_k=S)
    arguments = {"query": q, "key": k, "value": v, **arguments}
    with pytest.raises(error, match=says):
        jax.eval_shape(lambda: dot_product_attention(**arguments))
