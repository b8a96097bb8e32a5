# SPDX-License-Identifier: Apache-2.0
"""Mask: what it shows, what it becomes, how it travels, and when it refuses.

FLASHMASK_LIBRARY names the C library and FLASHMASK_COMMAND the `flashmask` program; comparisons with one that is not
named are skipped.
"""

import copy
import json
import os
import pickle
import random
import subprocess
import sys
import time
import types
import xml.etree.ElementTree as ElementTree

import flashmask
import pytest
import torch
from flashmask import Mask, UnrepresentableMaskError, masks
from flashmask.mask import as_mask
from torch.utils import _pytree as pytree

COMMAND = os.environ.get("FLASHMASK_COMMAND")


def draw_mask(rng, longest=40, block_mask=None):
    """A mask of any kind: odd values, broadcast and own heads, windows, offsets."""
    rows, keys = rng.randint(0, longest), rng.randint(0, longest)
    causal = rng.random() < 0.5
    batch, heads = rng.choice((1, 2)), rng.choice((1, 3))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    bounds = None
    if rng.random() < 0.8:
        vectors = rng.choice((1, 2) if causal else (2, 4))
        bounds = torch.randint(-3, rows + 4, (batch, heads, keys, vectors), generator=generator, dtype=torch.int32)
    keep = None
    if rng.random() < 0.5 if block_mask is None else block_mask:
        shape = (rng.choice((1, batch)), rng.choice((1, heads)), -(-rows // 128), -(-keys // 128))
        keep = torch.randint(0, 3, shape, generator=generator, dtype=torch.int32).to(
            rng.choice((torch.int32, torch.uint8, torch.bool))
        )
    window = rng.choice((None, (-1, -1), (3, 0), (-1, 4), (7, -1), (0, 0), (100, 100)))
    return Mask(
        rows, keys, bounds=bounds, causal=causal, window=window, q_offset=rng.choice((None, 0, 5, -4)), block_mask=keep
    )


def visible(mask, b, h, i, j):
    """The rule, once more and for one element."""
    offset = mask.seqlen_k - mask.seqlen_q if mask.q_offset is None else mask.q_offset
    left, right = mask.window or (-1, -1)
    if mask.causal and j > i + offset or left != -1 and j < i + offset - left or right != -1 and j > i + offset + right:
        return False
    if (
        mask.block_mask is not None
        and not mask.block_mask[b % mask.block_mask.shape[0], h % mask.block_mask.shape[1], i // 128, j // 128]
    ):
        return False
    if mask.bounds is None:
        return True
    v = mask.bounds[b % mask.bounds.shape[0], h % mask.bounds.shape[1], j].tolist()
    if mask.causal:
        return not v[0] <= i < (v[1] if len(v) == 2 else mask.seqlen_q)
    if len(v) == 2:
        return v[1] <= i < v[0]
    return not (v[0] <= i < v[1] or v[2] <= i < v[3])


@pytest.fixture
def calls(monkeypatch):
    """In place of the compiled operators: a plan says how many were made before it."""
    made = []

    def plan(mask, device=None):
        made.append(mask)
        return torch.tensor([len(made)], dtype=torch.uint8)

    stand_in = types.ModuleType("flashmask.ops")
    stand_in.plan = plan
    monkeypatch.setitem(sys.modules, "flashmask.ops", stand_in)
    monkeypatch.setattr(flashmask, "ops", stand_in, raising=False)
    return made


# --- The rule -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_to_dense_is_the_rule(seed):
    rng = random.Random(seed)
    mask = draw_mask(rng, longest=17)
    dense = mask.to_dense()
    assert dense.dtype == torch.bool and tuple(dense.shape) == (mask.batch, mask.heads, mask.seqlen_q, mask.seqlen_k)
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


# --- Statistics and pictures ------------------------------------------------------------------------------


def tiles_of(dense):
    """(full, partial) tiles of 128 x 128, by looking at every element."""
    full = partial = 0
    for row in dense.flatten(0, 1):
        for tile in (t for rows in row.split(128) for t in rows.split(128, 1) if t.numel()):
            full += bool(tile.all())
            partial += bool(tile.any()) and not bool(tile.all())
    return full, partial


@pytest.mark.parametrize("seed", range(25))
def test_stats(seed):
    mask = draw_mask(random.Random(seed), longest=600)
    dense, stats = mask.to_dense(), mask.stats()
    assert (stats.elements, stats.visible) == (dense.numel(), int(dense.sum()))
    assert (stats.full_tiles, stats.partial_tiles) == tiles_of(dense)
    assert stats.tiles == mask.batch * mask.heads * -(-mask.seqlen_q // 128) * -(-mask.seqlen_k // 128)
    assert stats.empty_tiles == stats.tiles - stats.full_tiles - stats.partial_tiles
    assert stats.visible_share == (stats.visible / stats.elements if stats.elements else 0)


def test_stats_of_a_long_mask_in_several_chunks(monkeypatch):
    mask = masks.causal_document(seqlens=[3000, 1, 0, 5000, 191])
    whole = mask.stats()
    monkeypatch.setattr("flashmask._columns._CHUNK", 2000)
    assert mask.stats() == whole
    assert whole.visible == sum(n * (n + 1) // 2 for n in (3000, 1, 5000, 191))


def test_stats_at_a_quarter_of_a_million():
    n = 1 << 18
    stats = masks.causal(n).stats()
    tiles = n // 128
    assert (stats.visible, stats.full_tiles, stats.partial_tiles) == (n * (n + 1) // 2, tiles * (tiles - 1) // 2, tiles)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("side", [1, 4, 128, 512])
def test_raster_counts_what_is_visible(seed, side):
    from flashmask._columns import raster

    mask = draw_mask(random.Random(seed), longest=700)
    if mask.seqlen_q == 0 or mask.seqlen_k == 0:
        return
    b, h = mask.batch - 1, mask.heads - 1
    dense = mask.to_dense()[b, h]
    cells = raster(mask, b, h, side)
    if side >= 4:
        want = [[int(cell.sum()) for cell in rows.split(side, 1)] for rows in dense.split(side)]
        assert cells.visible.tolist() == want
        assert cells.elements.tolist() == [[cell.numel() for cell in rows.split(side, 1)] for rows in dense.split(side)]
    else:
        assert torch.equal(cells.visible, dense.long())
    i, j = random.Random(seed).randrange(mask.seqlen_q), random.Random(seed + 1).randrange(mask.seqlen_k)
    wide = max(side, 128)
    tile = dense[i // wide * wide :, j // wide * wide :][:wide, :wide]
    assert bool(cells.whole[i // side, j // side]) == bool(tile.all())
    assert bool(cells.skipped[i // side, j // side]) == (not tile.any())


def test_repr():
    text = repr(masks.causal_document(seqlens=[2, 3]))
    assert text.splitlines() == [
        "Mask(5 query rows x 5 keys, causal, 1 bound per key, cpu)",
        "██········",
        "████······",
        "····██····",
        "····████··",
        "····██████",
        "visible 36 %; 1 tile of 128 x 128: 0 full, 1 partial, 0 empty",
    ]
    text = repr(masks.sliding_window(3000, 3000, 99, 3, q_offset=7))
    assert "window (99, 3), q_offset 7" in text and "a cell is 128 x 128" in text and len(text.splitlines()) == 26
    assert repr(masks.full(0, 4)) == "Mask(0 query rows x 4 keys)"
    assert "batch 2, heads 3" in repr(
        Mask(
            4,
            4,
            bounds=torch.zeros(2, 3, 4, 1, dtype=torch.int32),
            causal=True,
            block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
        )
    )
    assert (
        repr(Mask(4, 4, bounds=torch.zeros(1, 1, 4, 2, dtype=torch.int32, device="meta")))
        == "Mask(4 query rows x 4 keys, 2 bounds per key, meta)"
    )
    assert "bounds=7" in repr(pytree.tree_map(lambda x: 7, masks.eviction([1, 2])))


def rows_of(n):
    return torch.arange(n, dtype=torch.int32)


LARGE = {
    "vectors": lambda n: masks.causal_document(seqlens=torch.full((64,), n // 64)),
    "four vectors": lambda n: Mask(n, n, bounds=rows_of(n).expand(1, 4, n).mT[None]),
    "a band": lambda n: masks.sliding_window(n, n, n // 100),
    "heads": lambda n: Mask(n, n, bounds=rows_of(n).expand(1, (1 << 23) // n, n)[..., None], causal=True),
    "blocks": lambda n: Mask(n, n, causal=True, block_mask=torch.ones(1, 1, n // 128, n // 128, dtype=torch.bool)),
}


@pytest.mark.parametrize(
    "kind, tokens",
    [(kind, 1 << n) for kind in LARGE for n in (13, 15, 17, 19, 20, 23) if n < 20 or kind not in ("blocks", "heads")],
)
def test_repr_takes_no_time(kind, tokens):
    """At most 0.05 s of one thread at any length."""
    mask = LARGE[kind](tokens)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        spent = []
        for _ in range(3):
            begin = time.process_time()
            text = repr(mask)
            spent.append(time.process_time() - begin)
    finally:
        torch.set_num_threads(threads)
    assert min(spent) <= 0.05
    assert "visible" in text and len(text.splitlines()) > 10


@pytest.mark.parametrize("kind", LARGE)
def test_a_sample_says_about_the_same_as_a_count(kind):
    """Which cells see something, and the share of what is visible."""
    from flashmask._columns import raster, sampled_cells

    mask = LARGE[kind](1 << 13)
    exact, (visible, elements) = raster(mask, 0, 0, 512), sampled_cells(mask, 0, 0, 512, 1531)
    assert torch.equal(visible > 0, exact.visible > 0)
    assert torch.equal(visible == elements, exact.visible == exact.elements)
    assert abs(visible.sum() / elements.sum() - exact.visible.sum() / exact.elements.sum()) < 0.01
    assert (visible / elements - exact.visible / exact.elements).abs().max() < 0.05


def test_repr_says_that_it_is_a_sample():
    n = 1 << 20
    lines = repr(masks.causal(n)).splitlines()
    assert lines[0] == f"Mask({n} query rows x {n} keys, causal)" and len(lines) == 18
    assert lines[-1] == "visible about 50 %, from a sample of keys; mask.stats() counts tiles; a cell is 65536 x 65536"
    keep = torch.ones(1, 1, n // 128, n // 128, dtype=torch.bool)
    assert "visible about 50 %, from a sample" in repr(masks.causal(n).replace(block_mask=keep))
    tall = Mask(1 << 27, 128, block_mask=torch.ones(1, 1, 1 << 20, 1, dtype=torch.bool))
    assert repr(tall).splitlines()[1].startswith("not looked at, for its size: mask.plot() draws it")


def test_svg_is_bounded_and_well_formed():
    generator = torch.Generator().manual_seed(0)
    noise = Mask(4096, 4096, bounds=torch.randint(0, 4096, (1, 1, 4096, 4), generator=generator, dtype=torch.int32))
    checkers = Mask(
        128 * 128, 128 * 128, block_mask=((torch.arange(128)[:, None] + torch.arange(128)) % 2 == 0)[None, None]
    )
    for mask in (
        noise,
        checkers,
        masks.full(0, 5),
        masks.full(1),
        masks.causal(1 << 20),
        masks.causal(200, 100_000),
        masks.random_eviction(128),
    ):
        picture = mask.plot()
        assert len(picture) < 300_000 and mask._repr_svg_() == picture
        assert ElementTree.fromstring(picture).tag.endswith("svg")
    with pytest.raises(ValueError, match="max_cells is 129"):
        noise.plot(max_cells=129)
    with pytest.raises(IndexError, match="head is 1; the mask has 1"):
        noise.plot(head=1)


def test_svg_shows_the_tiles():
    """Causal, 3 x 3 tiles of one cell: three partial ones on the diagonal, three full below, the rest is the ground."""
    root = ElementTree.fromstring(masks.causal(384).plot(max_cells=3))
    paths = {path.get("fill"): path.get("d") for path in root.iter("{http://www.w3.org/2000/svg}path")}
    assert paths == {"#e5a335": "M0 0h1v1H0zM1 1h1v1H1zM2 2h1v1H2z", "#3b6fb6": "M0 1h1v1H0zM0 2h2v1H0z"}


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
    """As a call does with heads_kv and heads_q: each key head's are those of its query heads."""
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
    from flashmask import ops
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


def bounds_of(n, keys=6, dtype=torch.int32, batch=1, heads=1):
    return torch.zeros(batch, heads, keys, n, dtype=dtype)


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


# --- The plan ---------------------------------------------------------------------------------------------


def test_plan_is_made_once(calls):
    mask = masks.causal_document(seqlens=[2, 3])
    assert mask.plan() is mask.plan() is mask.plan("cpu") and calls == [mask]
    assert mask.replace().plan() is not mask.plan() and len(calls) == 2


def test_plan_of_a_mask_without_tensors_needs_a_device(calls):
    mask = masks.causal(4)
    assert mask.device is None
    with pytest.raises(ValueError, match="say which one its plan is for"):
        mask.plan()
    assert mask.plan("cpu") is mask.plan(torch.device("cpu")) and len(calls) == 1
    with pytest.raises(ValueError, match="the mask is on cpu and its plan was asked for on meta"):
        masks.document(seqlens=[1, 2]).plan("meta")


@pytest.mark.parametrize("part", ["bounds", "block_mask"])
def test_a_change_in_place_is_noticed(calls, part):
    mask = Mask(5, 5, bounds=bounds_of(2, keys=5), block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    getattr(mask, part).zero_()  # before the first plan it is nobody's business
    mask.plan()
    getattr(mask, part)[0, 0, 0, 0] = 0
    with pytest.raises(RuntimeError, match="changed in place after its plan was made"):
        mask.plan()
    mask.replace().plan()
    assert len(calls) == 2


def test_the_tensor_of_the_caller_is_the_masks(calls):
    bounds = bounds_of(1, keys=5)
    mask = as_mask(bounds, seqlen_q=5, seqlen_k=5, causal=True)
    mask.plan()
    bounds.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        mask.plan()


def test_plans_in_inference_mode(calls):
    with torch.inference_mode():
        mask = masks.causal_document(seqlens=torch.tensor([2, 3]))
        assert mask.plan() is mask.plan()
    assert mask.plan() is mask.plan() and len(calls) == 1 and not mask.plan().is_inference()


def test_the_plan_of_a_trace_is_not_kept(calls):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mask = masks.causal(4)
    with FakeTensorMode():
        assert type(mask.plan("cpu")) is not torch.Tensor
    assert type(mask.plan("cpu")) is torch.Tensor


# --- Travelling ---------------------------------------------------------------------------------------------


def both_tensors():
    return Mask(
        130,
        140,
        bounds=torch.randint(0, 130, (2, 1, 140, 2), dtype=torch.int32),
        window=(4, 9),
        q_offset=3,
        block_mask=torch.tensor([[1, 0], [1, 1]], dtype=torch.uint8)[None, None],
    )


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(4, 6),
        masks.causal_document(seqlens=[3, 4]),
        masks.causal(9).replace(block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool)),
        both_tensors(),
    ],
)
def test_pytree(mask):
    leaves, spec = pytree.tree_flatten({"mask": mask, "x": 1})
    assert [x for x in leaves if isinstance(x, torch.Tensor)] == [
        x for x in (mask.bounds, mask.block_mask) if x is not None
    ]
    again = pytree.tree_unflatten(leaves, spec)["mask"]
    assert isinstance(again, Mask) and again.bounds is mask.bounds and again.block_mask is mask.block_mask
    assert torch.equal(again.to_dense(), mask.to_dense()) and pytree.tree_structure(again) == pytree.tree_structure(
        mask
    )
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(mask)[0]]
    assert paths == [name for name in (".bounds", ".block_mask") if getattr(mask, name[1:]) is not None]


def test_pytree_structures_differ_by_what_is_not_a_tensor():
    structure = pytree.tree_structure(masks.causal(4))
    assert structure == pytree.tree_structure(masks.causal(4)) != pytree.tree_structure(masks.causal(5))


def test_moves():
    mask = both_tensors()
    assert mask.to("cpu") is mask and mask.cpu() is mask and masks.causal(3).to("meta").device is None
    moved = mask.to("meta")
    assert (
        moved.device.type == "meta"
        and moved.window == mask.window
        and moved.q_offset == 3
        and tuple(moved.block_mask.shape) == (1, 1, 2, 2)
    )


def test_copies_and_pickles(calls):
    mask = both_tensors()
    mask.plan()
    for again in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert torch.equal(again.to_dense(), mask.to_dense()) and again.bounds is not mask.bounds
        assert again.plan() is not mask.plan()


def test_a_saved_mask_is_loaded_as_data_alone(tmp_path, calls):
    """torch.load's default since 2.6: what is not registered is refused."""
    file = tmp_path / "batch.pt"
    for mask in (both_tensors(), masks.causal_document(seqlens=[3, 4]), masks.causal(5)):
        mask.plan("cpu")
        torch.save({"mask": mask, "x": torch.ones(2)}, file)
        again = torch.load(file, weights_only=True)["mask"]
        assert isinstance(again, Mask) and torch.equal(again.to_dense(), mask.to_dense())
        assert again.plan("cpu") is not mask.plan("cpu")


def test_positions_are_refused_by_name(tmp_path):
    """By the constructor, which replace() and a file go through."""
    for name in ("q_pos", "k_pos"):
        positions, text = torch.zeros(1, 5, dtype=torch.int32), f"{name} is a tensor, .* it must be None"
        with pytest.raises(flashmask.UnsupportedError, match=text):
            Mask(5, 5, **{name: positions})
        with pytest.raises(flashmask.UnsupportedError, match=text):
            masks.causal(5).replace(**{name: positions})
        with pytest.raises(flashmask.UnsupportedError, match=text):
            object.__new__(Mask).__setstate__({**masks.causal(5).__getstate__(), name: positions})
        assert torch.equal(Mask(5, 5, **{name: None}).to_dense(), masks.full(5).to_dense())


def test_what_a_file_says_is_checked(tmp_path):
    mask = masks.causal_document(seqlens=[3, 4])
    state = {**mask.__getstate__(), "seqlen_k": 6}
    with pytest.raises(ValueError, match="it has 7 columns, but there are 6 keys"):
        object.__new__(Mask).__setstate__(state)
    older = {**mask.__getstate__(), "_plans": {}}
    again = object.__new__(Mask)
    again.__setstate__(older)
    assert torch.equal(again.to_dense(), mask.to_dense())


def test_a_mask_taken_apart_and_put_together_keeps_its_plan(calls):
    """As a wrapper of every layer does with its arguments, to cast what is a floating-point tensor."""
    for mask in (both_tensors(), masks.causal_document(seqlens=[3, 4]), masks.causal(5)):
        calls.clear()
        cast = lambda x: x.half() if torch.is_floating_point(x) else x
        for _ in range(3):
            again = pytree.tree_map_only(torch.Tensor, cast, {"mask": mask, "x": torch.ones(2)})["mask"]
            assert again is not mask and again.plan("cpu") is mask.plan("cpu")
        assert len(calls) == 1
    pytree.tree_map(lambda x: x, mask.replace(window=(1, 1))).plan("cpu")
    assert len(calls) == 2


def test_a_mask_put_together_of_other_tensors_has_a_plan_of_its_own(calls):
    mask = both_tensors()
    mask.plan()
    leaves, spec = pytree.tree_flatten(mask)
    assert pytree.tree_unflatten([x.clone() for x in leaves], spec).plan() is not mask.plan()
    assert pytree.tree_map(lambda x: x[:, :, :0], mask)._plans is not mask._plans
    structure = pytree.tree_structure(mask)
    calls.clear()
    del mask
    assert not pytree.tree_unflatten(leaves, structure)._plans  # nobody keeps the first one's


def test_a_change_in_place_is_noticed_after_a_tree_map(calls):
    mask = both_tensors()
    mask.plan()
    again = pytree.tree_map(lambda x: x, mask)
    mask.bounds.zero_()
    with pytest.raises(RuntimeError, match="changed in place after its plan was made"):
        again.plan()


def collated(lengths):
    """A batch as a collate function makes it."""
    return {"x": torch.tensor(lengths), "mask": masks.causal_document(seqlens=lengths), "block": both_tensors()}


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_data_loader(workers):
    lengths = [[3, 4], [5, 2]]
    batches = list(torch.utils.data.DataLoader(lengths, batch_size=None, collate_fn=collated, num_workers=workers))
    for batch, wanted in zip(batches, lengths, strict=True):
        assert torch.equal(
            batch["mask"].to("cpu", non_blocking=True).to_dense(), masks.causal_document(seqlens=wanted).to_dense()
        )
        assert batch["block"].window == (4, 9) and batch["block"].block_mask.dtype == torch.uint8


def test_pinned_memory(monkeypatch):
    """As a DataLoader asks for it; every tensor, and only them."""
    from torch.utils.data._utils.pin_memory import pin_memory

    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x, *device: pinned.append(x) or x.clone())
    mask = both_tensors()
    again = pin_memory({"mask": mask})["mask"]
    assert len(pinned) == 2 and pinned[0] is mask.bounds and pinned[1] is mask.block_mask
    assert again.bounds is not mask.bounds and torch.equal(again.to_dense(), mask.to_dense())
    assert masks.causal(3).pin_memory().seqlen_q == 3 and len(pinned) == 2


# --- Compiled code ------------------------------------------------------------------------------------------


def weights(mask, x):
    return x.masked_fill(~mask.to_dense()[0, 0], 0).sum(-1)


def counting_backend():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    return CompileCounter()


def test_compiled_code_takes_masks_of_any_contents_and_length():
    counter = counting_backend()
    compiled = torch.compile(weights, fullgraph=True, backend=counter)
    for n in range(4):
        mask = masks.causal_document(seqlens=[3, n, 5], seqlen=12)
        x = torch.rand(12, 12)
        assert torch.equal(compiled(mask, x), weights(mask, x))
    assert counter.frame_count == 1
    for length in (13, 14, 20):
        mask, x = masks.causal_document(seqlens=[3, 5], seqlen=length), torch.rand(length, length)
        assert torch.equal(compiled(mask, x), weights(mask, x))
    assert counter.frame_count == 2  # the second one takes any length


def test_compiled_code_does_not_care_whether_there_is_a_plan(calls):
    counter = counting_backend()
    compiled = torch.compile(weights, fullgraph=True, backend=counter)
    mask, x = masks.causal(6).replace(bounds=bounds_of(1)), torch.rand(6, 6)
    compiled(mask, x)
    mask.plan()
    compiled(mask, x)
    assert counter.frame_count == 1


def test_compiled_code_makes_masks():
    counter = counting_backend()

    def build(cu_seqlens, x):
        mask = masks.causal_document(cu_seqlens, seqlen=x.shape[0])
        return mask.replace(window=(4, 0)), weights(mask, x)

    compiled = torch.compile(build, fullgraph=True, backend=counter)
    for length in (13, 14, 15):
        x, cu_seqlens = torch.rand(length, length), torch.tensor([0, 3, 5 + length // 2, length - 1])
        (mask, got), (want_mask, want) = compiled(cu_seqlens, x), build(cu_seqlens, x)
        assert isinstance(mask, Mask) and torch.equal(mask.to_dense(), want_mask.to_dense()) and torch.equal(got, want)
    assert counter.frame_count == 2


def test_compiled_code_raises_the_same_errors():
    compiled = torch.compile(lambda x: as_mask(x, seqlen_q=4, seqlen_k=6), fullgraph=True, backend="eager")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="accepted are|dimensions"):
        compiled(bounds_of(2)[0])
