# SPDX-License-Identifier: Apache-2.0
"""flashmask.paddle.masks: the arguments that say what the same builders say in numpy."""

import dense
import flashmask.numpy
import flashmask.paddle as fm
import numpy as np
import paddle
import pytest
from flashmask.paddle import masks

CALLS = {
    "full": lambda m: m.full(20),
    "causal": lambda m: m.causal(9, 20),
    "sliding_window": lambda m: m.sliding_window(20, 20, 4, 1),
    "a side beyond int64": lambda m: m.sliding_window(20, 20, 2**64, 1),
    "causal_document": lambda m: m.causal_document(seqlens=[[12, 8], [20, 0]]),
    "document": lambda m: m.document([0, 7, 20]),
    "shared_question": lambda m: m.shared_question([(3, [4, 5]), (2, [6])]),
    "prefix_tree": lambda m: m.prefix_tree([-1, 0, 0], [8, 7, 5]),
    "hash_sparse": lambda m: m.hash_sparse([0, 0, 1, 1], [1, 0, 1, 0], True),
    "padding": lambda m: m.padding(15, 20, [13, 4]),
    "eagle3_ttt": lambda m: m.eagle3_ttt(3, seqlens=[4, 5]),
    "dflash": lambda m: m.dflash([2, 5], 3, seqlen=14),
}


@pytest.mark.parametrize("name", CALLS)
def test_masks(name):
    indices, causal = CALLS[name](masks)
    want = CALLS[name](flashmask.numpy.masks)
    assert indices.dtype == paddle.int32 and indices.shape[3] in ((1, 2) if causal else (2, 4))
    assert np.array_equal(dense.visible(want.seqlen_q, want.seqlen_k, indices, causal).numpy(), want.to_dense())


def test_block_diffusion_has_an_order():
    mask, order = masks.block_diffusion(4, seqlens=[12, 8])
    want, wanted = flashmask.numpy.masks.block_diffusion(4, seqlens=[12, 8])
    assert np.array_equal(order.numpy(), wanted)
    assert np.array_equal(dense.visible(40, 40, *mask).numpy(), want.to_dense())


def test_tensors_of_paddle_are_taken():
    ids = paddle.to_tensor([[0, 0, 4, 4, 4], [1, 1, 1, 1, 2]])
    for documents in (ids, ids.astype("int32"), ids.transpose([1, 0]).contiguous().transpose([1, 0])):
        assert masks.causal_document(doc_ids=documents).startend_row_indices[:, 0, :, 0].tolist() == [
            [2, 2, 5, 5, 5],
            [4, 4, 4, 4, 5],
        ]
    is_question = paddle.to_tensor([True, False, False])
    assert masks.shared_question(seqlens=[3, 1, 1], is_question=is_question).causal


def test_the_call_takes_them():
    q = paddle.randn([1, 20, 2, 16])
    mask = masks.causal_document(seqlens=[12, 8])
    out = fm.flashmask_attention(q, q, q, **mask._asdict())
    alone = fm.flashmask_attention(q[:, 12:], q[:, 12:], q[:, 12:], causal=True)
    assert np.allclose(out[:, 12:].numpy(), alone.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "build, raised, words",
    [
        (lambda: masks.causal_document(seqlens=[1.5]), TypeError, "seqlens is paddle.float32; it must be integers"),
        (lambda: masks.causal_document(seqlens=[3, -1]), ValueError, r"seqlens\[1\] is -1"),
        (lambda: masks.causal_document(seqlens=[3], device="gpu"), ValueError, "device is gpu"),
        (lambda: masks.document(cu_seqlens=[[0, 1], [0]]), ValueError, "nested lists of one length"),
        (lambda: masks.document(cu_seqlens=5), ValueError, "cu_seqlens is a single number"),
        (lambda: masks.causal(8, q_offset=2**64 + 5), ValueError, r"q_offset is \d+; it must be between -2\^40"),
        (lambda: masks.sliding_window(8, 8, 3, q_offset=-(2**41)), ValueError, r"q_offset is -\d+; it must be between"),
        (lambda: masks.sliding_window(8, 8, -(2**64)), ValueError, "window is .*; each side must be at least 0"),
        (lambda: masks.full(2**64 + 8), ValueError, r"seqlen_q is \d+; it must be between 0 and 2147483647"),
        (lambda: masks.causal(8, 2**64 + 8), ValueError, r"seqlen_k is \d+; it must be between 0 and 2147483647"),
        (lambda: masks.shared_question(seqlens=[1], is_question=[0.5]), TypeError, "is_question is paddle.float32"),
    ],
)
def test_what_is_refused(build, raised, words):
    with pytest.raises(raised, match=words):
        build()
