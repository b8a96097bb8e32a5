# SPDX-License-Identifier: Apache-2.0
"""Mask: its rule, what it becomes, and when it refuses.

FLASHMASK_LIBRARY names the C library and FLASHMASK_COMMAND the `flashmask` program; comparisons with one that is not
named are skipped. Statistics and pictures: test_mask_pictures.py; plans, copies and compiled code: test_mask_life.py.
"""

import json
import os
import random
import subprocess

import pytest
import torch
from flashmask import Mask, UnrepresentableMaskError, masks
from flashmask.torch.mask import as_mask
from mask_cases import bounds_of, draw_mask, visible

COMMAND = os.environ.get("FLASHMASK_COMMAND")

# --- The rule -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_to_dense_is_the_rule(seed):
    rng = random.Random(seed)
    mask = draw_mask(rng, longest=17)
    dense = mask.to_dense()
    assert dense.dtype == torch.bool and tuple(dense.shape) == (mask.batch, mask.heads, mask.seqlen_q, mask.seqlen_k)
    assert mask.shape == dense.shape and mask.ndim == dense.ndim and mask.contiguous() is mask
    want = [
        visible(mask, b, h, i, j)
        for b in range(mask.batch)
        for h in range(mask.heads)
        for i in range(mask.seqlen_q)
        for j in range(mask.seqlen_k)
    ]
    assert dense.flatten().tolist() == want


@pytest.mark.skipif("FLASHMASK_LIBRARY" not in os.environ, reason="FLASHMASK_LIBRARY is not set")
@pytest.mark.parametrize("seed", range(25))
def test_to_dense_is_the_c_librarys(seed):
    import ctypes

    from flashmask import capi

    mask = draw_mask(random.Random(seed), longest=300)
    left, right = mask.window or (-1, -1)
    fields = {
        name: x.numpy() for name, x in (("bounds", mask.bounds), ("block_mask", mask.block_mask)) if x is not None
    }
    flags = (
        (capi.CAUSAL if mask.causal else 0) | capi.HAS_WINDOW | (capi.HAS_Q_OFFSET if mask.q_offset is not None else 0)
    )
    struct = capi.mask(
        mask.seqlen_q,
        mask.seqlen_k,
        flags=flags,
        window_left=left,
        window_right=right,
        q_offset=mask.q_offset or 0,
        **fields,
    )
    want = torch.zeros((mask.batch, mask.heads, mask.seqlen_q, mask.seqlen_k), dtype=torch.uint8)
    lib = capi.load()
    assert lib.fm_mask_to_dense(ctypes.byref(struct), ctypes.byref(capi.tensor(want.numpy()))) == capi.OK, (
        lib.fm_last_error()
    )
    assert torch.equal(mask.to_dense(), want.bool())


# --- Other forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_to_startend_says_the_same(seed):
    mask = draw_mask(random.Random(seed), longest=30, block_mask=False)
    try:
        bounds, causal = mask.to_startend()
    except UnrepresentableMaskError as error:
        # A band and two intervals can be more than two.
        assert mask.bounds is not None and 0 <= error.column < mask.seqlen_k
        return
    assert bounds.dtype == torch.int32 and bounds.shape[:3] == (mask.batch, mask.heads, mask.seqlen_k)
    again = masks.from_startend(bounds, causal, seqlen_q=mask.seqlen_q)
    assert torch.equal(again.to_dense(), mask.to_dense())


@pytest.mark.parametrize("seed", range(15))
def test_to_startend_is_the_cpp_librarys(seed, tmp_path):
    if not COMMAND:
        pytest.skip("FLASHMASK_COMMAND is not set")
    mask = draw_mask(random.Random(seed), longest=20, block_mask=False)
    left, right = mask.window or (-1, -1)
    rows, keys = mask.seqlen_q, mask.seqlen_k
    if mask.bounds is not None:
        mask = mask.replace(bounds=mask.bounds[:1, :1].clamp(0, rows))
    band = {"lo": None if left == -1 else -left, "hi": 0 if mask.causal else None if right == -1 else right}
    names = {1: ["lts"], 2: ["lts", "lte"] if mask.causal else ["lts", "ute"], 4: ["lts", "lte", "uts", "ute"]}
    vectors = (
        {}
        if mask.bounds is None
        else {name: mask.bounds[0, 0, :, n].tolist() for n, name in enumerate(names[mask.bounds.shape[-1]])}
    )
    file = tmp_path / "mask.json"
    file.write_text(
        json.dumps(
            {
                "seqlen_q": rows,
                "seqlen_k": keys,
                "batch": 1,
                "heads": 1,
                "band": band,
                "q_offset": keys - rows if mask.q_offset is None else mask.q_offset,
                **vectors,
            }
        )
    )
    shown = json.loads(
        subprocess.run([COMMAND, "show", str(file), "--json"], capture_output=True, text=True, check=True).stdout
    )
    if shown["vectors"]["form"] != "startend_row_indices":
        with pytest.raises(UnrepresentableMaskError):
            mask.to_startend()
        return
    bounds, causal = mask.to_startend()
    got = {name: bounds[0, 0, :, n].tolist() for n, name in enumerate(shown["vectors"]["names"])}
    assert bounds.shape[-1] == len(got) and causal == shown["vectors"]["causal"] and got == shown["vectors"]["values"]
    stats = mask.stats()
    for name in ("elements", "visible", "tiles", "partial_tiles", "full_tiles"):
        assert getattr(stats, name) == shown["statistics"][name]


def test_to_startend_folds_the_band():
    bounds, causal = masks.sliding_window(6, 6, 2).to_startend()
    assert causal and bounds.flatten().tolist() == [3, 4, 5, 6, 6, 6]
    bounds, causal = masks.full(3, 4).to_startend()
    assert not causal and bounds.tolist() == [[[[3, 0]] * 4]]
    with pytest.raises(ValueError, match="cannot hold a block mask"):
        masks.causal(5).replace(block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool)).to_startend()


@pytest.mark.parametrize("seed", range(15))
def test_to_block_mask(seed):
    mask = draw_mask(random.Random(seed), longest=500)
    if mask.seqlen_q == 0 or mask.seqlen_k == 0:
        return
    batch, heads = mask.batch * 2 if mask.batch == 1 else mask.batch, mask.heads * 2
    block_mask = mask.to_block_mask(batch=batch, heads=heads)
    assert block_mask.shape == (batch, heads, mask.seqlen_q, mask.seqlen_k)
    dense = mask.to_dense().repeat_interleave(2, 1).expand(batch, -1, -1, -1)
    b, h, i, j = torch.meshgrid(*map(torch.arange, dense.shape), indexing="ij")
    assert torch.equal(block_mask.mask_mod(b, h, i, j), dense)
    # Its blocks: live ones are those with something visible, and full ones hide nothing.
    tiles = (
        torch.nn.functional.pad(dense, (0, -mask.seqlen_k % 128, 0, -mask.seqlen_q % 128))
        .unfold(2, 128, 128)
        .unfold(3, 128, 128)
    )
    assert torch.equal(block_mask.to_dense().bool(), tiles.any(-1).any(-1))
    assert torch.equal(block_mask.full_kv_num_blocks, tiles.all(-1).all(-1).sum(-1, dtype=torch.int32))


def of_both_heads(bounds_heads, block_heads, rows=300, keys=200):
    """A mask whose vectors and block mask each have heads of their own."""
    generator = torch.Generator().manual_seed(bounds_heads)
    bounds = torch.randint(0, rows + 1, (2, bounds_heads, keys, 2), generator=generator, dtype=torch.int32)
    blocks = torch.rand(1, block_heads, 3, 2, generator=generator) < 0.6
    return Mask(rows, keys, bounds=bounds, block_mask=blocks)


@pytest.mark.parametrize("heads", [(2, 4), (4, 2), (1, 4), (3, 3), (2, 6)])
def test_heads_of_the_vectors_and_of_the_block_mask_are_broadcast_to_the_larger(heads):
    """Broadcasts as a call does with heads_kv and heads_q: a key head's mask serves its query heads."""
    mask, most = of_both_heads(*heads), max(heads)
    wide = mask.replace(
        bounds=mask.bounds.repeat_interleave(most // heads[0], 1),
        block_mask=mask.block_mask.repeat_interleave(most // heads[1], 1),
    )
    assert mask.heads == most and mask.to_dense().shape == (2, most, 300, 200)
    assert torch.equal(mask.to_dense(), wide.to_dense()) and mask.stats() == wide.stats()
    assert repr(mask).splitlines()[1:] == repr(wide).splitlines()[1:]
    assert all(mask.plot(1, head) == wide.plot(1, head) for head in range(most))
    indices = torch.meshgrid(*map(torch.arange, (2, most, 300, 200)), indexing="ij")
    assert torch.equal(mask.to_block_mask().mask_mod(*indices), wide.to_dense())
    assert torch.equal(mask.to_block_mask().to_dense(), wide.to_block_mask().to_dense())


def test_heads_that_do_not_divide_each_other_are_refused():
    with pytest.raises(ValueError, match="heads of the bounds is 4 and of the block mask 3; .* one divides the other"):
        of_both_heads(4, 3)


def test_traced_plans_of_both_heads_have_the_size_of_the_larger():
    from flashmask.torch import ops
    from torch._subclasses.fake_tensor import FakeTensorMode

    for heads in ((2, 4), (4, 2), (1, 4)):
        mask = of_both_heads(*heads)
        with FakeTensorMode() as mode:
            fakes = {name: mode.from_tensor(getattr(mask, name)) for name in ("bounds", "block_mask")}
            traced = ops.plan(mask.replace(**fakes))
        assert traced.shape == ops.plan(mask).shape == ops.plan(of_both_heads(4, 4)).shape


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("batch", [1, 3])
def test_flex_attention_broadcasts_a_mask_of_one_head(batch):
    """BlockMask's own 1 stands for any batch and heads, which it then asks the predicate for."""
    from torch.nn.attention.flex_attention import flex_attention

    keep = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 1]]).bool()[None, None]
    mask = masks.causal_document(seqlens=[100, 30, 170]).replace(block_mask=keep)
    q, k, v = torch.randn(3, batch, 4, 300, 16).unbind()
    got = flex_attention(q, k, v, block_mask=mask.to_block_mask())
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.to_dense()).nan_to_num()
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_agrees_with_sdpa():
    from torch.nn.attention.flex_attention import flex_attention

    mask = masks.causal_document(seqlens=[100, 30, 170])
    q, k, v = torch.randn(3, 1, 2, 300, 16).unbind()
    got = flex_attention(q, k, v, block_mask=mask.to_block_mask(heads=2))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.to_dense())
    assert torch.allclose(got, want, atol=1e-5)
    with pytest.raises(ValueError, match="heads is 5; the mask has 2"):
        masks.eviction(torch.zeros(1, 2, 4, dtype=torch.int64)).to_block_mask(heads=5)


# --- Arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal, accepted", [(True, (1, 2)), (False, (2, 4))])
def test_as_mask_takes_paddles_forms(causal, accepted):
    for n in range(1, 6):
        if n in accepted:
            mask = as_mask(bounds_of(n, batch=2, heads=3), seqlen_q=4, seqlen_k=6, causal=causal)
            assert (mask.batch, mask.heads, mask.causal, mask.bounds.shape[-1]) == (2, 3, causal, n)
        else:
            with pytest.raises(
                ValueError,
                match=rf"startend_row_indices is torch.int32 \[1, 1, 6, {n}\] and causal is {causal}; accepted are",
            ):
                as_mask(bounds_of(n), seqlen_q=4, seqlen_k=6, causal=causal)


@pytest.mark.parametrize(
    "value, error, message",
    [
        (
            bounds_of(2)[0],
            ValueError,
            r"\[1, 6, 2\]; accepted are\n  causal=True    \[batch, heads, seqlen_k, 1\]  LTS",
        ),
        (bounds_of(2, keys=5), ValueError, "it has 5 columns, but there are 6 keys"),
        (bounds_of(2, batch=0), ValueError, "batch and heads must be at least 1"),
        (bounds_of(2, dtype=torch.int16), TypeError, "startend_row_indices is torch.int16"),
        (bounds_of(2, dtype=torch.float32), TypeError, "from_dense"),
        (torch.ones(1, 1, 4, 6, dtype=torch.bool), TypeError, "from_dense"),
        ([[1, 2]], TypeError, "is a list; it must be a flashmask.Mask, a tensor or None"),
        (masks.full(5, 6), ValueError, "the mask is for 5 query rows and 6 keys; the call has 4 and 6"),
    ],
)
def test_as_mask_refuses(value, error, message):
    with pytest.raises(error, match=message):
        as_mask(value, seqlen_q=4, seqlen_k=6)


def test_as_mask_with_a_mask():
    mask = masks.causal(4, 6)
    assert as_mask(mask, seqlen_q=4, seqlen_k=6) is mask
    for name, value in (
        ("causal", True),
        ("window_size", (1, 0)),
        ("q_offset", 0),
        ("block_mask", torch.ones(1, 1, 1, 1)),
    ):
        with pytest.raises(ValueError, match=f"{name} is given beside a Mask"):
            as_mask(mask, seqlen_q=4, seqlen_k=6, **{name: value})


def test_int64_bounds_keep_their_meaning():
    values = torch.tensor([2**40, -(2**40), 3, -1]).reshape(1, 1, 4, 1)
    mask = as_mask(values, seqlen_q=4, seqlen_k=4, causal=True)
    assert mask.bounds.dtype == torch.int32 and mask.bounds.flatten().tolist() == [4, 0, 3, 0]


@pytest.mark.parametrize(
    "given, kept",
    [
        (None, None),
        (3, (3, 3)),
        ((2, 0), (2, 0)),
        ([5, None], (5, -1)),
        ((-1, -1), None),
        ((None, None), None),
        (-1, None),
    ],
)
def test_windows(given, kept):
    assert as_mask(None, seqlen_q=4, seqlen_k=6, window_size=given).window == kept


@pytest.mark.parametrize(
    "given, error", [((1, 2, 3), ValueError), ((-2, 0), ValueError), (torch.tensor([1, 2]), TypeError)]
)
def test_windows_refused(given, error):
    with pytest.raises(error, match="window_size"):
        as_mask(None, seqlen_q=4, seqlen_k=6, window_size=given)


def test_block_masks():
    keep = torch.tensor([[2, 0, 1]], dtype=torch.int32)[None, None]
    mask = Mask(100, 300, block_mask=keep)
    assert mask.block_mask.dtype == torch.bool and mask.block_mask.flatten().tolist() == [True, False, True]
    for bad in (keep[0], keep.long(), keep[..., :2], keep[:0]):
        with pytest.raises(ValueError, match="block_mask is"):
            Mask(100, 300, block_mask=bad)
    with pytest.raises(TypeError, match="block_mask is a list"):
        Mask(100, 300, block_mask=[1])
    with pytest.raises(ValueError, match="heads of the bounds is 3 and of the block mask 2"):
        Mask(100, 300, bounds=bounds_of(2, keys=300, heads=3), block_mask=keep.expand(1, 2, 1, 3))


def test_lengths_are_checked():
    for bad in (-1, 2**31):
        with pytest.raises(ValueError, match=f"seqlen_k is {bad}"):
            Mask(4, bad)
    with pytest.raises(TypeError, match="seqlen_q is a tensor"):
        Mask(torch.tensor(3), 4)


def test_bounds_that_are_not_contiguous_are_copied():
    wide = torch.arange(24, dtype=torch.int32).reshape(1, 1, 2, 12).transpose(2, 3)
    mask = Mask(12, 12, bounds=wide)
    assert mask.bounds.is_contiguous() and torch.equal(mask.bounds, wide)
    assert Mask(12, 12, bounds=mask.bounds).bounds is mask.bounds


def test_masks_do_not_change():
    mask = masks.causal(4)
    for change in (
        lambda: setattr(mask, "causal", False),
        lambda: setattr(mask, "new", 1),
        lambda: delattr(mask, "bounds"),
    ):
        with pytest.raises(AttributeError, match="does not change"):
            change()
    other = mask.replace(causal=False, window=(1, -1))
    assert (other.causal, other.window, other.seqlen_q) == (False, (1, -1), 4) and mask.causal
