# SPDX-License-Identifier: Apache-2.0
"""Masks of more than two hidden intervals per column: against their dense matrices, and in attention both ways."""

import dense
import flashmask.numpy as fm
import numpy as np
import pytest
from flashmask.errors import UnsupportedError
from flashmask.numpy import masks

ROWS, KEYS = 150, 170
ROW, KEY = np.mgrid[:ROWS, :KEYS]
MATRICES = {
    "random": np.random.default_rng(1).random((2, 2, ROWS, KEYS)) > 0.3,
    "every third": (ROW % 3 == KEY % 3)[None, None],
    "two intervals": ((KEY <= ROW) | (KEY == 100))[None, None],
    "nothing": np.zeros((1, 1, ROWS, KEYS), bool),
}


def close(got, want):
    finite = np.isfinite(want)
    assert np.array_equal(got[~finite], want[~finite])
    assert np.abs(got[finite] - want[finite]).max(initial=0) <= 1e-5 * np.abs(want[finite]).max(initial=1)


def check(mask, visible):
    """attention and attention_backward in float32 against dense attention in float64."""
    rng, rows, keys = np.random.default_rng(0), mask.seqlen_q, mask.seqlen_k
    shapes = [(rows, 4), (keys, 2), (keys, 2), (rows, 4)]
    q, k, v, dout = (rng.standard_normal((2, *shape, 16), np.float32) for shape in shapes)
    out, lse = fm.attention(q, k, v, mask)
    for got, want in zip((out, lse), dense.attention(q, k, v, visible)):
        close(got, want)
    for got, want in zip(
        fm.attention_backward(dout, q, k, v, out, lse, mask), dense.gradients(dout, q, k, v, visible), strict=True
    ):
        close(got, want)


@pytest.mark.parametrize("name", MATRICES)
def test_from_dense(name):
    visible = MATRICES[name]
    mask = masks.from_dense(visible)
    assert (mask.column_ptr is None) == (name in ("two intervals", "nothing"))
    assert (mask.batch, mask.heads) == visible.shape[:2]
    assert np.array_equal(mask.to_dense(), visible)
    check(mask, visible)


def test_one_matrix_of_any_strides():
    visible = MATRICES["random"][0, 0]
    for given in (visible, visible.astype(np.uint8) * 7, np.asfortranarray(visible), visible[::-1][::-1]):
        assert np.array_equal(masks.from_dense(given).to_dense()[0, 0], visible)


def test_lists_in_any_order_beside_a_band_and_a_block_mask():
    rng = np.random.default_rng(2)
    ends = np.concatenate(([0], rng.integers(0, 9, (2, KEYS)).cumsum()))
    column_ptr = np.stack((ends[: KEYS + 1], ends[KEYS:]))[None].astype(np.int32)
    begin = rng.integers(-5, ROWS + 5, int(ends[-1]))
    intervals = np.stack((begin, begin + rng.integers(-2, 30, begin.shape)), 1).astype(np.int32)
    keep = np.array([[[[1, 0], [1, 1]]]], bool)
    visible = np.broadcast_to((KEY <= ROW + 7) & keep[0, 0, ROW // 128, KEY // 128], (1, 2, ROWS, KEYS)).copy()
    for head, j in np.ndindex(2, KEYS):
        for first, last in intervals[column_ptr[0, head, j] : column_ptr[0, head, j + 1]]:
            visible[0, head, max(first, 0) : max(last, 0), j] = False
    mask = fm.Mask(ROWS, KEYS, causal=True, q_offset=7, block_mask=keep, column_ptr=column_ptr, intervals=intervals)
    assert np.array_equal(mask.to_dense(), visible)
    check(mask, visible)


def test_builders_give_lists():
    mask = masks.neighborhood_2d(7, 9, 3, 3)
    y, x = np.divmod(np.arange(63), 9)
    near = lambda at, length: np.abs(at[:, None].clip(1, length - 2) - at) <= 1  # noqa: E731
    assert mask.column_ptr is not None
    assert np.array_equal(mask.to_dense()[0, 0], near(y, 7) & near(x, 9))
    assert masks.dilated(20, 3, 2).intervals.dtype == np.int32 and masks.dilated(20, 3, 1).column_ptr is None
    both, order = masks.block_diffusion(2, seqlens=[4, 4], order="concatenated")
    assert both.column_ptr is not None and order.tolist() == list(range(16))
    check(mask, mask.to_dense())


@pytest.mark.parametrize(
    "change, words",
    [
        ({"intervals": None}, "intervals"),
        ({"column_ptr": np.zeros((1, 1, 4), np.int32)}, "column_ptr"),
        ({"column_ptr": np.zeros((1, 1, 6), np.int64)}, "column_ptr"),
        ({"intervals": np.zeros((3, 3), np.int32)}, "intervals"),
        ({"bounds": np.zeros((1, 1, 5, 1), np.int32), "causal": True}, "column_ptr"),
    ],
)
def test_lists_that_do_not_fit_are_refused(change, words):
    given = {"column_ptr": np.zeros((1, 1, 6), np.int32), "intervals": np.zeros((3, 2), np.int32)}
    assert fm.Mask(4, 5, **given).to_dense().all()
    with pytest.raises(ValueError, match=words):
        fm.Mask(4, 5, **{**given, **change})


@pytest.mark.parametrize("visible", [np.zeros((3, 3)), np.zeros(3, bool), np.zeros((1, 3, 3), bool), None])
def test_what_is_no_matrix_is_refused(visible):
    with pytest.raises(ValueError, match="visible is .*; it must be bool or uint8"):
        masks.from_dense(visible)


def test_memory_is_limited(monkeypatch):
    mask = masks.dilated(20, 3, 2)
    q = np.zeros((1, 20, 1, 8), np.float32)
    monkeypatch.setenv("FLASHMASK_MAX_MASK_BYTES", "1")
    with pytest.raises(UnsupportedError, match=r"interval lists .* max_mask_bytes allows 1 \(FLASHMASK_MAX_MASK_BYTES"):
        fm.attention(q, q, q, mask)


def test_explain_counts_the_lists():
    mask = masks.from_dense(MATRICES["random"])
    q, k, v = (np.zeros((2, n, 2, 16), np.float32) for n in (ROWS, KEYS, KEYS))
    size = mask.column_ptr.nbytes + mask.intervals.nbytes
    assert f"{len(mask.intervals)} hidden intervals, {size} bytes, batch 2, heads 2" in fm.explain(q, k, v, mask)
