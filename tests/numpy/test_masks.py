# SPDX-License-Identifier: Apache-2.0
"""flashmask.numpy.masks against what the families are by definition, and what they refuse."""

import inspect

import flashmask.numpy as fm
import numpy as np
import pytest
from flashmask.numpy import masks

LENGTHS = [30, 0, 7, 20]
DOCUMENT = np.repeat(np.arange(4), LENGTHS)
ROW, KEY = np.mgrid[:57, :57]
SAME = DOCUMENT[ROW] == DOCUMENT[KEY]


@pytest.mark.parametrize(
    "documents",
    [
        {"seqlens": LENGTHS},
        {"cu_seqlens": np.cumsum([0, *LENGTHS])},
        {"cu_seqlens": np.cumsum([0, *LENGTHS], dtype=np.int32)},
        {"doc_ids": DOCUMENT},
        {"doc_ids": DOCUMENT.astype(np.uint8)},
        {"position_ids": np.concatenate([np.arange(n) for n in LENGTHS])},
    ],
    ids=str,
)
def test_documents(documents):
    assert np.array_equal(masks.causal_document(**documents).to_dense()[0, 0], SAME & (KEY <= ROW))
    assert np.array_equal(masks.document(**documents).to_dense()[0, 0], SAME)


def test_batch_entries_and_heads_are_leading_dimensions():
    mask = masks.causal_document(seqlens=[[30, 27], [57, 0]])
    assert mask.bounds.shape == (2, 1, 57, 1) and mask.bounds[:, 0, 0, 0].tolist() == [30, 57]
    assert masks.eviction(np.zeros((2, 3, 8), int)).bounds.shape == (2, 3, 8, 1)


@pytest.mark.parametrize(
    "mask, visible",
    [
        (masks.full(57), SAME | True),
        (masks.causal(57), KEY <= ROW),
        (masks.sliding_window(57, 57, 4), (KEY <= ROW) & (KEY >= ROW - 4)),
        (masks.padding(57, 57, [50]), KEY < 50),
        (masks.prefix_lm_causal(57, 9), (KEY <= ROW) | (KEY < 9)),
        (masks.attention_sink_window(2, 5, seqlens=[57]), (KEY <= ROW) & ((ROW - KEY < 5) | (KEY < 2))),
        (masks.block_causal(8, seqlen=57), KEY // 8 <= ROW // 8),
        (masks.prefix_tree([-1, 0, 0], [17, 20, 20]), (KEY <= ROW) & ((KEY < 17) | ((KEY < 37) == (ROW < 37)))),
        (
            masks.prefix_tree([-1, 0, 0], [17, 20, 20], window=9),
            (KEY <= ROW)
            & ((KEY < 17) | ((KEY < 37) == (ROW < 37)))
            & (ROW - 20 * (ROW >= 37) - KEY + 20 * (KEY >= 37) < 9),
        ),
        (masks.shared_question([(17, [20, 20])]), (KEY <= ROW) & ((KEY < 17) | ((KEY < 37) == (ROW < 37)))),
        (masks.hash_sparse([0] * 57, [0, 1, 0] * 19, True), (KEY <= ROW) & (KEY % 3 != 1)),
    ],
)
def test_families(mask, visible):
    assert np.array_equal(mask.to_dense()[0, 0], visible)


def test_block_diffusion_has_an_order():
    mask, order = masks.block_diffusion(4, seqlen=8)
    assert order.dtype == np.int64 and order.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    noisy, block = order < 8, order % 8 // 4
    same_copy = (noisy[:, None] == noisy) & (block[:, None] == block)
    assert np.array_equal(mask.to_dense()[0, 0], same_copy | (~noisy & (block < block[:, None])))


@pytest.mark.parametrize(
    "build, raised, words",
    [
        (lambda: masks.causal_document(), ValueError, "nothing is given"),
        (lambda: masks.causal_document(seqlens=[1.5]), TypeError, "seqlens is float64; it must be integers"),
        (lambda: masks.causal_document(seqlens=[3, -1]), ValueError, r"seqlens\[1\] is -1"),
        (lambda: masks.causal_document(seqlens=[3], device="cuda"), ValueError, "device is 'cuda'"),
        (lambda: masks.document(cu_seqlens=[[0, 1], [0]]), ValueError, "nested lists of one length"),
        (lambda: masks.document(cu_seqlens=5), ValueError, "cu_seqlens is a single number"),
        (lambda: masks.shared_question(seqlens=[1], is_question=[0.5]), TypeError, "is_question is float64"),
        (lambda: masks.prefix_tree([-1, 0, -1, 0]), ValueError, "depth-first"),
        (lambda: masks.full(4.5), TypeError, "seqlen_q is 4.5"),
    ],
)
def test_what_is_refused(build, raised, words):
    with pytest.raises(raised, match=words):
        build()


def test_a_mask_that_does_not_fit_names_its_column():
    with pytest.raises(fm.UnrepresentableMaskError) as error:
        masks.hash_sparse([1, 0] * 4, [0, 0, 1, 1, 0, 0, 1, 1], False)
    assert error.value.column == 0


def test_every_family_has_a_docstring():
    families = [name for name, _ in inspect.getmembers(masks, inspect.ismethod) if not name.startswith("_")]
    assert "prefix_tree" in families and all(getattr(masks, name).__doc__ for name in families)
