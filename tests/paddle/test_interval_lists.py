# SPDX-License-Identifier: Apache-2.0
"""Masks of more than two hidden intervals per column: against their dense matrices, and in attention both ways."""

import dense
import flashmask.numpy
import flashmask.paddle as fm
import numpy as np
import paddle
import pytest
from flashmask.paddle import IntervalLists, MaskArguments, masks

ROWS, KEYS = 70, 90
ROW, KEY = np.mgrid[:ROWS, :KEYS]
RANDOM = np.random.default_rng(1).random((2, 2, ROWS, KEYS))
WINDOW = (KEY <= ROW + 9) & (KEY >= ROW - 30)
MATRICES = {
    "random": RANDOM > 0.3,
    "every third": (ROW % 3 == KEY % 3)[None, None],
    "random in a window": WINDOW & (RANDOM > 0.2),
    "a window and two intervals": (WINDOW & (ROW // 5 % 6 != 1) & (ROW // 2 != KEY // 2))[None, None],
    "vectors": ((KEY <= ROW) | (KEY == 50))[None, None],
}


def results(attend, *leaves):
    """(out, dq, dk, dv); the gradient of out is the same for all."""
    leaves = [x.detach() for x in leaves]
    for x in leaves:
        x.stop_gradient = False
    out = attend(*leaves)
    weights = paddle.to_tensor(np.random.default_rng(3).standard_normal(out.shape))
    (out.astype("float64") * weights).sum().backward()
    return (out, *(x.grad for x in leaves))


def check(mask, visible):
    rng, (rows, keys) = np.random.default_rng(0), visible.shape[2:]
    shapes = ((2, rows, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16))
    leaves = [paddle.to_tensor(rng.standard_normal(shape), dtype="float32") for shape in shapes]
    got = results(lambda *x: fm.flashmask_attention(*x, **mask._asdict()), *leaves)
    seen = paddle.to_tensor(visible)
    want = results(lambda *x: dense.attention(*x, seen)[0], *(x.astype("float64") for x in leaves))
    for x, y in zip(got, want, strict=True):
        assert float((x.astype("float64") - y).abs().max()) <= 1e-5 * float(y.abs().max())


@pytest.mark.parametrize("name", MATRICES)
def test_from_dense(name):
    visible = MATRICES[name]
    mask = masks.from_dense(paddle.to_tensor(visible))
    assert isinstance(mask, MaskArguments)
    assert isinstance(mask.startend_row_indices, IntervalLists) == (name != "vectors")
    if name != "vectors":
        lists = {key: x.numpy() for key, x in mask.startend_row_indices._asdict().items()}
        assert np.array_equal(flashmask.numpy.Mask(ROWS, KEYS, **lists).to_dense(), visible)
    check(mask, visible)


@pytest.mark.parametrize(
    "build",
    [
        lambda m: m.neighborhood_2d(5, 6, 3, 3),
        lambda m: m.dilated(30, 4, 3),
        lambda m: m.bigbird(40, 2, 1, 1, 3, seed=4),
        lambda m: m.block_diffusion(2, seqlens=[4, 4], order="concatenated")[0],
        lambda m: m.dilated(30, 4, 1),
    ],
)
def test_builders(build):
    want = build(flashmask.numpy.masks)
    mask = build(masks)
    assert isinstance(mask.startend_row_indices, IntervalLists) == (want.column_ptr is not None)
    check(mask, want.to_dense())


def test_what_is_refused():
    q = paddle.zeros([1, 4, 1, 8])
    column_ptr, intervals = paddle.zeros([1, 1, 4], dtype="int32"), paddle.zeros([3, 2], dtype="int32")
    with pytest.raises(ValueError, match="column_ptr"):
        fm.flashmask_attention(q, q, q, IntervalLists(column_ptr, intervals))
    with pytest.raises(TypeError, match="column_ptr is .*; it must be a paddle.Tensor"):
        fm.flashmask_attention(q, q, q, IntervalLists([0, 0, 0, 0, 0], intervals))
    with pytest.raises(ValueError, match="visible is .*; it must be bool or uint8"):
        masks.from_dense(paddle.zeros([3, 3]))
    with pytest.raises(TypeError, match="visible is .*; it must be a paddle.Tensor"):
        masks.from_dense(np.zeros((3, 3), bool))


def test_a_list_changed_in_place_is_seen_by_the_backward():
    mask = masks.from_dense(paddle.to_tensor(MATRICES["random"]))
    q, k = paddle.randn([2, ROWS, 4, 16]), paddle.randn([2, KEYS, 2, 16])
    q.stop_gradient = False
    out = fm.flashmask_attention(q, k, k, **mask._asdict())
    mask.startend_row_indices.intervals.zero_()
    with pytest.raises(OSError, match="changed in place"):
        out.sum().backward()


def test_explain_counts_the_lists():
    mask = masks.from_dense(paddle.to_tensor(MATRICES["random"]))
    q, k = paddle.randn([2, ROWS, 4, 16]), paddle.randn([2, KEYS, 2, 16])
    assert f"{len(mask.startend_row_indices.intervals)} hidden intervals" in fm.explain(q, k, k, **mask._asdict())
