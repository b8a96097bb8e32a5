# SPDX-License-Identifier: Apache-2.0
"""The masks of mask functions against transformers' own dense ones, element by element."""

import warnings

import pytest
import torch
from flashmask import UnsupportedError, masks
from flashmask.integrations import _mask_functions
from flashmask.integrations.transformers import attention_mask as ours
from transformers import masking_utils as utils

BATCH, ROWS = 2, 40
WINDOW = utils.sliding_window_causal_mask_function(7)
BIDIRECTIONAL_WINDOW = utils.sliding_window_bidirectional_mask_function(5)
CHUNKS = utils.chunked_causal_mask_function(9, torch.tensor([0, 4]))


def blocks(length=ROWS):
    """Image blocks, of ids that no other block has, -1 between them."""
    ids = torch.full((BATCH, length), -1)
    ids[0, 3:9], ids[0, 9:12], ids[0, 20:33], ids[1, 0:5], ids[1, 30:] = 0, 1, 2, 0, 7
    return utils.blockwise_overlay(ids)


def packed(function, lengths=((3, 20, 1, 16), (40,))):
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = utils.find_packed_sequence_indices(positions)
    return utils.packed_sequence_compatibility_function(function, positions, ids)


def apart(function, lengths=((3, 20, 1, 16), (40,))):
    """Documents as transformers 5.17 keeps them apart, without positions of their own."""
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    return utils.and_masks(function, utils.packed_sequence_mask_function(ids))


FUNCTIONS = {
    "causal": utils.causal_mask_function,
    "window": WINDOW,
    "bidirectional": utils.bidirectional_mask_function,
    "bidirectional window": BIDIRECTIONAL_WINDOW,
    "chunks": CHUNKS,
    "chunks in window": utils.and_masks(CHUNKS, utils.sliding_window_overlay(4)),
    "blocks": utils.or_masks(utils.causal_mask_function, blocks()),
    "blocks beside a window": utils.or_masks(WINDOW, blocks()),
    "blocks within a window": utils.and_masks(
        utils.or_masks(utils.causal_mask_function, blocks()), utils.sliding_window_overlay(7)
    ),
    "prefix": utils.or_masks(
        utils.causal_mask_function,
        utils.blockwise_overlay(torch.where(torch.arange(ROWS) < torch.tensor([[13], [0]]), 0, -1)),
    ),
    "blocks alone": utils.and_masks(blocks(), utils.bidirectional_mask_function),
}
SQUARE = {
    "documents by ids": apart(utils.causal_mask_function),
    "documents by ids, window": apart(WINDOW),
    "documents by ids, chunks": apart(CHUNKS),
    "documents": packed(utils.causal_mask_function),
    "documents, window": packed(WINDOW),
    "documents, chunks": packed(CHUNKS),
    "documents, both ways": packed(utils.bidirectional_mask_function),
    "documents, blocks": utils.or_masks(packed(utils.causal_mask_function), blocks()),
}
# (rows, keys, position of the first row, position of the first key): a whole sequence, and steps with caches.
SIZES = [(40, 40, 0, 0), (1, 30, 29, 0), (6, 36, 30, 0), (5, 12, 28, 21), (3, 40, 11, 0)]


def padding(keys):
    shown = torch.ones(BATCH, keys, dtype=torch.bool)
    shown[0, :4] = shown[1, -3:] = False
    return shown


def dense(function, size, shown, **others):
    rows, keys, q_offset, kv_offset = size
    return utils.sdpa_mask(
        BATCH, rows, keys, q_offset, kv_offset, function, shown, allow_is_causal_skip=False, **others
    )


def check(function, size, shown, q_offset=None, **others):
    rows, keys, first_row, first_key = size
    mask = ours(BATCH, rows, keys, first_row if q_offset is None else q_offset, first_key, function, shown, **others)
    torch.testing.assert_close(mask.to_dense().expand(BATCH, -1, -1, -1), dense(function, size, shown, **others))
    return mask


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name, size, is_padded):
    with warnings.catch_warnings(action="error"):  # a look at elements would warn
        check(FUNCTIONS[name], size, padding(size[1] + size[3]) if is_padded else None)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", SQUARE)
def test_function_of_packed_documents(name, is_padded):
    with warnings.catch_warnings(action="error"):
        check(SQUARE[name], SIZES[0], padding(ROWS) if is_padded else None)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_offset_in_a_tensor(name, size):
    """A static cache's offset goes into the intervals, and is not read on the host."""
    check(FUNCTIONS[name], size, padding(size[1] + size[3]), q_offset=torch.tensor(size[2]))


def test_padding_shorter_than_the_keys():
    check(utils.causal_mask_function, (6, 36, 20, 0), padding(26))


def test_bands_have_no_tensors():
    for name in ("causal", "window", "bidirectional", "bidirectional window"):
        assert check(FUNCTIONS[name], SIZES[2], None).bounds is None
    assert check(WINDOW, SIZES[0], None).causal
    assert check(SQUARE["documents"], SIZES[0], None).bounds.shape == (BATCH, 1, ROWS, 1)


# --- Functions that are not understood ------------------------------------------------------------


def own(batch, head, row, key):
    """Every row sees the keys before it, but in its own half only those at even distances to the middle."""
    return (key <= row) & ((key < 10) | (row - key < 12) | (row > 30))


def test_other_functions_are_looked_at(monkeypatch):
    monkeypatch.setattr(_mask_functions, "_said", set())
    monkeypatch.setattr(_mask_functions, "_CHUNK", 7 * ROWS)
    with pytest.warns(UserWarning, match="own has parts that are not understood; all its 3200 elements"):
        mask = check(own, SIZES[0], None)
    assert mask.causal and mask.bounds.shape[-1] == 2
    for size in SIZES:
        for shown in (None, padding(size[1] + size[3])):
            check(utils.or_masks(own, utils.bidirectional_mask_function), size, shown, use_vmap=True)
            check(own, size, shown)


def test_blocks_in_parts_are_looked_at(monkeypatch):
    monkeypatch.setattr(_mask_functions, "_said", set())
    ids = torch.full((BATCH, ROWS), -1)
    ids[:, 3:9] = ids[:, 15:20] = 4
    with pytest.warns(UserWarning, match="or_mask"):
        check(utils.or_masks(utils.causal_mask_function, utils.blockwise_overlay(ids)), SIZES[0], None)


def test_documents_in_parts_are_looked_at(monkeypatch):
    """Whose ids come back, or whose positions are others than those of their tokens."""
    ids = torch.zeros(BATCH, ROWS, dtype=torch.int64)
    ids[:, 10:25] = 1
    positions = torch.arange(ROWS).flip(0).expand(BATCH, -1)
    causal = utils.causal_mask_function
    for function in (
        utils.and_masks(causal, utils.packed_sequence_mask_function(ids)),
        utils.packed_sequence_compatibility_function(causal, positions, ids.clamp(max=0)),
    ):
        monkeypatch.setattr(_mask_functions, "_said", set())
        with pytest.warns(UserWarning, match="and_mask"):
            check(function, SIZES[0], None)


def test_more_than_two_intervals_become_lists():
    for function in (
        lambda b, h, row, key: (row % 3 == 0) | (key == 0),
        lambda b, h, row, key: (row + key + b) % 4 != 0,
    ):
        check(function, SIZES[0], None)
        assert ours(BATCH, ROWS, ROWS, mask_function=function).column_ptr is not None


def test_what_is_too_long_is_refused():
    with pytest.raises(UnsupportedError, match="own has parts .* more than 4294967296.*mask="):
        ours(BATCH, 50000, 50000, mask_function=own)


def test_a_mask_given_by_the_caller_is_handed_on():
    mask = masks.causal(ROWS, ROWS)
    assert ours(BATCH, ROWS, ROWS, mask_function=own, attention_mask=mask) is mask
