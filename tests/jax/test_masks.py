# SPDX-License-Identifier: Apache-2.0
"""flashmask.jax.masks: every family from lists, from JAX's arrays and traced, and what they refuse."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_reference import ON_GPU
from flashmask._core.families import Builders, families
from flashmask.jax import Mask, UnrepresentableMaskError, masks

IDS = [0] * 30 + [1] * 50 + [2] * 20
# For each family its arrays, as lists, and the rest of its arguments; some in several forms.
CALLS = {
    "full": ({}, {"seqlen_q": 30, "seqlen_k": 40}),
    "causal": ({}, {"seqlen_q": 30, "q_offset": 3}),
    "sliding_window": ({}, {"seqlen_q": 30, "seqlen_k": 40, "left": 3, "right": 4}),
    "causal_document": ({"doc_ids": IDS}, {}),
    "document": ({"cu_seqlens": [0, 30, 80]}, {"seqlen": 100}),
    "prefix_lm_document": ({"seqlens": [30, 50, 20], "prefix": [5, 50, 1]}, {"seqlen": 100}),
    "causal_blockwise": ({"position_ids": [*range(30), *range(50), *range(20)]}, {}),
    "shared_question": ({"seqlens": [10, 5, 6, 20], "is_question": [True, False, False, True]}, {"seqlen": 50}),
    "global_sliding_window": ({}, {"seqlen": 50, "global_tokens": 3, "window": 5}),
    "prefix_lm_causal": ({"prefix": [3, 20]}, {"seqlen": 50}),
    "qk_sparse": ({"dropped": [[3, 8], [10, 30]]}, {"seqlen": 50}),
    "eviction": ({"evicted_at": [*range(5, 45)]}, {}),
    "hash_sparse": ({"query_buckets": [0] * 10 + [1] * 10, "key_buckets": [1, 0] * 10}, {"causal": True}),
    "prefix_tree": ({"parents": [-1, 0, 1, 0], "lengths": [5, 6, 7, 8]}, {"seqlen": 30}),
    "prefix_tree_from_intervals": ({"tin": [0, 5, 11], "tout": [18, 18, 18]}, {"seqlen": 20}),
    "padding": ({"key_lengths": [3, 40], "query_lengths": [30, 1]}, {"seqlen_q": 30, "seqlen_k": 40}),
    "attention_sink_window": ({"doc_ids": IDS}, {"sink": 2, "window": 9}),
    "block_causal": ({"blocks": [10, 20, 70]}, {"window": 2, "seqlen": 100}),
    "causal_with_blocks": ({"block_ids": [-1] * 10 + [4] * 20 + [-1] * 5}, {"window": 7}),
    "block_diffusion": ({"doc_ids": IDS}, {"blocks": 16}),
    "eagle3_ttt": ({"doc_ids": IDS}, {"steps": 3}),
    "dflash": ({"anchors": [3, 40, 90], "doc_ids": IDS}, {"block": 4}),
}


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)))


def test_every_family_of_arrays_is_called():
    numbers = {"length", "number", "reach", "flag"}
    kinds = {name: {parameter["kind"] for parameter in family["parameters"]} for name, family in families().items()}
    assert {name for name in kinds if kinds[name] - numbers} <= set(CALLS)
    assert set(kinds) == {name for name, _ in inspect.getmembers(Builders, inspect.isfunction) if name[0] != "_"}


@pytest.mark.parametrize("family", CALLS)
def test_lists_arrays_and_traces_make_the_same(family):
    lists, others = CALLS[family]
    build = functools.partial(getattr(masks, family), **others)
    made, arrays = build(**lists), {name: jnp.asarray(x) for name, x in lists.items()}
    same(build(**arrays), made)
    same(jax.jit(lambda arrays: build(**arrays))(arrays), made)
    mask = made[0] if isinstance(made, tuple) else made
    assert 0 < np.asarray(mask.to_dense()).mean() < 1 or family == "full"


def test_the_mask_of_documents():
    ids = np.asarray(IDS)
    want = (ids[:, None] == ids) & (np.arange(100)[:, None] >= np.arange(100))
    np.testing.assert_array_equal(masks.causal_document(doc_ids=jnp.asarray(ids)).to_dense()[0, 0], want)


def test_a_batch_and_heads():
    ids = jnp.asarray([IDS, [5] * 100])
    mask = masks.causal_document(doc_ids=ids)
    assert mask.bounds.shape == (2, 1, 100, 1)
    same(jax.tree.map(lambda x: x[1:], mask), masks.causal_document(doc_ids=ids[1:]))
    each = jax.vmap(lambda ids: masks.causal_document(doc_ids=ids))(ids)
    assert np.array_equal(each.bounds[:, 0], mask.bounds)


def test_the_order_of_block_diffusion():
    mask, order = masks.block_diffusion(jnp.asarray([2, 3]), seqlen=5)
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 4, 7, 8, 9] and order.dtype == jnp.int32
    assert mask.seqlen_q == mask.seqlen_k == 10


def test_lists_go_to_a_device():
    device = jax.devices("cpu")[-1]
    assert masks.causal_document(seqlens=[3, 4], device=device).bounds.devices() == {device}


@pytest.mark.parametrize(
    "build, error, says",
    [
        (
            lambda: masks.causal_document(),
            ValueError,
            "it must be one of cu_seqlens, seqlens, doc_ids and position_ids",
        ),
        (lambda: masks.causal_document(seqlens=[3, 4], seqlen=5), ValueError, "the sum of seqlens is 7; .*, 5"),
        (lambda: masks.causal_document(doc_ids=[0, 1, 0]), ValueError, "document id 0 comes back"),
        (lambda: masks.causal_document(seqlens=[0.5]), TypeError, "seqlens is float64; it must be integers"),
        (lambda: masks.causal_document(seqlens=[[1], [2, 3]]), ValueError, "nested lists of one length"),
        (lambda: masks.causal_document(seqlens=jnp.asarray(3)), ValueError, "seqlens is a single number"),
        (lambda: masks.causal_document(seqlens=jnp.asarray([3])), ValueError, "seqlen is missing; seqlens is not read"),
        (lambda: masks.causal_document(doc_ids=jnp.asarray([0.5])), TypeError, "doc_ids is float32"),
        (lambda: masks.block_causal(0, seqlen=9), ValueError, "blocks is 0"),
        (lambda: masks.block_causal(jnp.zeros(3, int), seqlen=9, window=0), ValueError, "window is 0"),
        (lambda: masks.hash_sparse([0, 1, 0, 1, 0, 1], [0] * 6, False), UnrepresentableMaskError, "row"),
    ],
)
def test_refused(build, error, says):
    with pytest.raises(error, match=says):
        build()


@pytest.mark.skipif(ON_GPU, reason="values are not read on a GPU")
def test_wrong_values_in_arrays_of_the_cpu():
    with pytest.raises(Exception, match="document id 0 comes back"):
        jax.block_until_ready(masks.causal_document(doc_ids=jnp.asarray([0, 1, 0])))


def test_masks_are_pytrees_of_one_structure():
    made = [masks.causal_document(doc_ids=jnp.asarray(ids)) for ids in (IDS, [0] * 100)]
    assert isinstance(made[0], Mask) and jax.tree.structure(made[0]) == jax.tree.structure(made[1])
