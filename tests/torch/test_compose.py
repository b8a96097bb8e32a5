# SPDX-License-Identifier: Apache-2.0
"""Masks put together: against their dense matrices."""

import pytest
import torch
from devices import DEVICE
from flashmask import Mask, UnsupportedError, masks
from mask_cases import draw_mask


def dense(mask):
    """On DEVICE. A mask without tensors is on none, and gives its matrix in host memory."""
    return mask.to_dense().to(DEVICE)


def check(compose, pieces, want):
    """compose(), of `pieces`, is the mask of `want`; its tensors are where theirs are."""
    mask = compose()
    assert torch.equal(dense(mask).expand_as(want), want)
    places = {piece.device for piece in pieces} - {None} or {torch.device("cpu")}
    assert mask.device is None or {mask.device} == places


def draw_pair(rng):
    """Two masks of the same lengths."""
    pair = [draw_mask(rng, longest=16, block_mask=False).to(DEVICE) for _ in range(2)]
    rows, keys = (min(getattr(mask, name) for mask in pair) for name in ("seqlen_q", "seqlen_k"))
    return [masks.crop(mask, (0, rows), (0, keys)) for mask in pair]


def test_intersections(rng):
    for _ in range(150):
        a, b = draw_pair(rng)
        check(lambda: masks.intersect(a, b), (a, b), dense(a) & dense(b))  # noqa: B023


def test_concatenations(rng):
    for _ in range(100):
        pieces = [draw_mask(rng, longest=12, block_mask=False).to(DEVICE) for _ in range(rng.randint(1, 3))]
        batch, heads = (max(getattr(m, name) for m in pieces) for name in ("batch", "heads"))
        matrices = [dense(m).expand(batch, heads, -1, -1) for m in pieces]
        want = torch.stack(
            [
                torch.stack([torch.block_diag(*(d[b, h].int() for d in matrices)) for h in range(heads)])
                for b in range(batch)
            ]
        )
        want = want.bool().reshape(batch, heads, *want.shape[2:])
        check(lambda: masks.concatenate(pieces), pieces, want)  # noqa: B023


def test_a_column_of_more_than_two_intervals():
    one, other = (
        Mask(10, 4, bounds=torch.tensor(runs, dtype=torch.int32, device=DEVICE).expand(1, 1, 4, 4))
        for runs in ([1, 2, 3, 4], [5, 6, 7, 8])
    )
    both = masks.intersect(one, other)
    assert both.bounds is None and both.column_ptr.tolist() == [[[0, 4, 8, 12, 16]]]
    assert both.intervals.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]] * 4
    assert masks.intersect(one, one).stats() == one.stats()


def test_block_masks(rng):
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    blocked = [
        Mask(256, 300, causal=True, block_mask=torch.randint(0, 2, (n, 1, 2, 3), generator=generator).bool().to(DEVICE))
        for n in (1, 2)
    ]
    both = masks.intersect(*blocked)
    assert both.block_mask.shape == (2, 1, 2, 3) and both.window == (-1, 0)
    assert torch.equal(both.to_dense(), blocked[0].to_dense() & blocked[1].to_dense())
    packed = masks.concatenate([masks.crop(blocked[0], keys=(0, 256)), masks.causal(100)])
    assert packed.block_mask.shape == (1, 1, 3, 3) and packed.shape == (1, 1, 356, 356)
    with pytest.raises(UnsupportedError, match="128"):
        masks.concatenate([masks.causal(100), blocked[0]])


def test_a_window_over_positions_stays_one():
    pos = torch.stack([torch.arange(12), torch.arange(12) // 2]).to(DEVICE, torch.int32)
    window = Mask(12, 12, causal=True, window=(3, -1), q_pos=pos, k_pos=pos)
    documents = masks.document(seqlens=[5, 7], device=DEVICE)
    both = masks.intersect(window, documents)
    assert torch.equal(both.q_pos, pos) and both.device == pos.device
    assert torch.equal(both.to_dense(), window.to_dense() & documents.to_dense())
    packed = masks.concatenate([window, window])
    assert packed.q_pos.shape == (2, 24)
    assert torch.equal(packed.to_dense()[1, 0, 12:, 12:], window.to_dense()[1, 0])


def test_bands_that_do_not_see_the_row_itself():
    ahead, behind = Mask(8, 8, window=(0, -1), q_offset=2), Mask(8, 8, causal=True, q_offset=5)
    both = masks.intersect(ahead, behind)
    assert both.bounds is None
    assert torch.equal(both.to_dense(), ahead.to_dense() & behind.to_dense())
    nothing = masks.intersect(ahead, Mask(8, 8, causal=True))
    assert not nothing.to_dense().any()


def test_without_pieces_or_keys():
    assert masks.concatenate([]).shape == (1, 1, 0, 0)
    assert masks.intersect(Mask(3, 0), Mask(3, 0)).shape == (1, 1, 3, 0)


def test_errors():
    causal = masks.causal(8)
    with pytest.raises(TypeError, match=r"pieces\[1\] is a tensor.*flashmask.Mask"):
        masks.concatenate([causal, torch.ones(8, 8)])
    with pytest.raises(TypeError, match="b is None"):
        masks.intersect(causal, None)
    with pytest.raises(ValueError, match=r"lengths \(8, 8\) and \(9, 9\)"):
        masks.intersect(causal, masks.causal(9))
    with pytest.raises(ValueError, match=r"rows\[0\] is \(4, 9\)"):
        masks.crop(causal, rows=(4, 9))
