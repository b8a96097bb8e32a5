# SPDX-License-Identifier: Apache-2.0
"""Padding, and masks made from other forms: FlashMask's vectors and dense matrices."""

import pytest
import torch
from builder_checks import check, check_cpp
from flashmask import UnrepresentableMaskError, masks

# --- Batches and other forms ------------------------------------------------------------------------------


def test_padding():
    mask = masks.padding(5, 7, [7, 0, 3], [5, 2, 0])
    for b, (keys, rows) in enumerate(((7, 5), (0, 2), (3, 0))):
        check(mask, 5, 7, lambda i, j: j < keys and i < rows, batch=b)
    check(masks.padding(5, 7, torch.tensor([4])), 5, 7, lambda i, j: j < 4)
    check_cpp(masks.padding(6, 6, [6, 2], [1, 5]), "padding", 6, key_lengths=[6, 2], query_lengths=[1, 5])


def test_from_startend():
    bounds = torch.tensor([[3, 0], [9, 2], [-5, 1]]).reshape(1, 1, 3, 2)
    check(
        masks.from_startend(bounds, seqlen_q=4),
        4,
        3,
        lambda i, j: not (i >= bounds[0, 0, j, 0] or i < bounds[0, 0, j, 1]),
    )
    check(
        masks.from_startend(bounds.int(), True),
        3,
        3,
        lambda i, j: j <= i and not bounds[0, 0, j, 0] <= i < bounds[0, 0, j, 1],
    )
    with pytest.raises(ValueError, match=r"\[batch, heads, seqlen_k, n\]"):
        masks.from_startend(bounds[0])


def runs_per_column(visible, band):
    """The most runs of hidden rows in a column beyond what (lo, hi) on j - i hides: what from_dense has to fit."""
    rows, keys = visible.shape
    most = []
    for j in range(keys):
        inside = [
            i for i in range(rows) if (band[0] is None or j - i >= band[0]) and (band[1] is None or j - i <= band[1])
        ]
        hidden = [not visible[i, j] for i in inside]
        most.append(sum(h and (n == 0 or not hidden[n - 1]) for n, h in enumerate(hidden)))
    return most


def bands_of(visible):
    seen = [(i, j) for i, j in visible.nonzero().tolist()]
    if not seen:
        return [(None, None)]
    lo, hi = min(j - i for i, j in seen), max(j - i for i, j in seen)
    return [(None, None), (None, hi), (lo, None), (lo, hi)]


def test_from_dense_exhaustively():
    """Every matrix of these sizes: at most three runs in a column, of which a band takes one if there are three."""
    for rows, keys in ((3, 3), (5, 2)):
        for number in range(2 ** (rows * keys)):
            visible = torch.tensor([number >> n & 1 for n in range(rows * keys)], dtype=torch.bool).reshape(rows, keys)
            assert torch.equal(masks.from_dense(visible).to_dense()[0, 0], visible), visible


def test_from_dense_has_lists_where_two_intervals_do_not_fit(rng):
    lists = 0
    for _ in range(60):
        rows, keys = rng.randint(4, 9), rng.randint(1, 5)
        visible = torch.tensor([rng.random() < 0.5 for _ in range(rows * keys)]).reshape(rows, keys)
        needs = [runs_per_column(visible, band) for band in bands_of(visible)]
        mask = masks.from_dense(visible)
        assert torch.equal(mask.to_dense()[0, 0], visible)
        assert (mask.column_ptr is None) == (min(map(max, needs)) <= 2)
        if mask.column_ptr is not None:
            lists += 1
            assert mask.column_ptr.diff().flatten().tolist() == min(needs, key=max)
    assert 5 < lists < 60


def test_from_dense_of_several_heads():
    visible = torch.ones(2, 3, 7, 4, dtype=torch.uint8)
    visible[1, 2, ::2, 3] = 0
    visible[1, 2, 1, 3] = 1
    visible[0, 0, 2] = 0
    mask = masks.from_dense(visible)
    assert torch.equal(mask.to_dense(), visible.bool())
    assert mask.column_ptr[1, 2, -2:].diff().item() == 4
    with pytest.raises(UnrepresentableMaskError, match=r"\(batch 1, head 2, column 3\) needs 4"):
        mask.to_startend()
    visible[1, 2, :4, 3] = 1
    assert torch.equal(masks.from_dense(visible).to_dense(), visible.bool())
    assert torch.equal(
        masks.from_dense(visible.transpose(2, 3).contiguous().transpose(2, 3)).to_dense(), visible.bool()
    )


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (1, 1)])
def test_from_dense_of_nothing(shape):
    for value in (True, False):
        visible = torch.full(shape, value)
        assert torch.equal(masks.from_dense(visible).to_dense()[0, 0], visible)


@pytest.mark.parametrize(
    "build",
    [
        lambda: masks.causal(9),
        lambda: masks.causal(9, 5),
        lambda: masks.sliding_window(9, 9, 3),
        lambda: masks.sliding_window(7, 9, 2, 1),
        lambda: masks.causal_document(seqlens=[3, 6]),
        lambda: masks.sliding_window(9, 4, 2, -1, q_offset=0),
    ],
)
def test_from_dense_finds_the_small_form(build):
    mask = masks.from_dense(build().to_dense())
    assert torch.equal(mask.to_dense(), build().to_dense())
    assert mask.bounds is None or mask.bounds.shape[-1] == 1
