# SPDX-License-Identifier: Apache-2.0
"""Rows and keys of a mask by segments, against the same rows and columns of its dense matrix."""

import pytest
import torch
from devices import DEVICE
from flashmask import Mask, UnsupportedError, masks
from flashmask.torch.mask_gather import with_indices
from mask_cases import draw_mask


def draw_segments(rng, seqlen, unit=1):
    cuts = sorted(min(rng.randint(0, -(-seqlen // unit)) * unit, seqlen) for _ in range(2 * rng.randint(0, 4)))
    return list(zip(cuts[::2], cuts[1::2]))


def index(segments):
    return [i for begin, end in segments for i in range(begin, end)]


def check(mask, rows, keys):
    part = mask.gather(rows, keys)
    want = mask.to_dense()[:, :, index(rows)][..., index(keys)]
    assert (part.seqlen_q, part.seqlen_k) == (len(index(rows)), len(index(keys)))
    assert torch.equal(part.to_dense(), want.expand(part.batch, part.heads, -1, -1))
    return part


def test_random_masks(rng):
    for _ in range(150):
        mask = draw_mask(rng, block_mask=False).to(DEVICE)
        keys = draw_segments(rng, mask.seqlen_k)
        rng.shuffle(keys)
        check(mask, draw_segments(rng, mask.seqlen_q), keys)


def test_block_masks(rng):
    for _ in range(10):
        mask = draw_mask(rng, longest=700, block_mask=True).to(DEVICE)
        check(mask, draw_segments(rng, mask.seqlen_q, 128), draw_segments(rng, mask.seqlen_k, 128))


def test_positions(rng):
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    for band in ({"causal": True}, {"window": (3, 2)}, {"causal": True, "window": (9, -1)}, {}):
        q_pos, k_pos = (torch.randint(-5, 30, (2, n), generator=generator, dtype=torch.int32) for n in (40, 50))
        mask = Mask(40, 50, q_pos=q_pos.to(DEVICE), k_pos=k_pos.to(DEVICE), **band)
        check(mask, draw_segments(rng, 40), draw_segments(rng, 50))


def test_all_keys_by_default():
    mask = masks.causal_document(seqlens=[30, 50], device=DEVICE)
    rows = [(3, 10), (40, 80)]
    assert torch.equal(mask.gather(rows).to_dense(), mask.gather(rows, [(0, 80)]).to_dense())


def test_positions_only_where_intervals_have_no_room():
    zigzag = [(0, 4), (12, 16)]
    assert check(Mask(16, 16, causal=True, window=(5, -1)), zigzag, zigzag).bounds.shape[-1] == 2
    two = torch.tensor([9, 12], dtype=torch.int32, device=DEVICE).expand(1, 1, 16, 2)
    assert check(Mask(16, 16, bounds=two, causal=True), zigzag, zigzag).q_pos is None
    assert check(Mask(16, 16, bounds=two, causal=True, window=(3, -1)), zigzag, zigzag).q_pos is not None
    one_run = check(Mask(16, 16, causal=True), [(4, 8), (8, 12)], [(0, 12)])
    assert one_run.causal and one_run.bounds is None


def test_traces():
    mask = masks.causal_document(seqlens=[30, 50], device=DEVICE)

    def bounds(x):
        return mask.replace(bounds=x).gather([(0, 20), (60, 80)], [(60, 80), (0, 7)]).bounds

    traced = torch.compile(bounds, fullgraph=True, backend="eager")
    assert torch.equal(traced(mask.bounds), bounds(mask.bounds))


def test_errors():
    mask = Mask(10, 20, causal=True)
    for rows, keys, words in (
        ([(-1, 5)], None, r"rows\[0\] is \(-1, 5\)"),
        ([(0, 4), (2, 5)], None, r"rows\[1\] is \(2, 5\).*must ascend"),
        ([], [(0, 21)], r"keys\[0\] is \(0, 21\).*\[0, 20\)"),
    ):
        with pytest.raises(ValueError, match=words):
            mask.gather(rows, keys)
    blocked = Mask(300, 300, block_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match=r"rows.*\(0, 100\).*128"):
        blocked.gather([(0, 100), (128, 300)])


def test_positions_lie_beside_the_bounds():
    """The whole mask may have no tensors, and so no device."""
    whole, part = masks.causal(64), masks.causal_document(seqlens=[20, 44]).to("meta")
    placed = with_indices(part, whole, [(0, 64)], [[(0, 64)]])
    assert whole.device is None and placed.q_pos.device == placed.k_pos.device == part.device
