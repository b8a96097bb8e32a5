# SPDX-License-Identifier: Apache-2.0
"""Statistics, repr and drawings of a Mask."""

import random
import time
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from flashmask import Mask, masks
from mask_cases import draw_mask
from torch.utils import _pytree as pytree


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


def test_stats_of_a_long_mask():
    whole = masks.causal_document(seqlens=[3000, 1, 0, 5000, 191]).stats()
    assert whole.visible == sum(n * (n + 1) // 2 for n in (3000, 1, 5000, 191))


def test_stats_at_a_quarter_of_a_million():
    n = 1 << 18
    stats = masks.causal(n).stats()
    tiles = n // 128
    assert (stats.visible, stats.full_tiles, stats.partial_tiles) == (n * (n + 1) // 2, tiles * (tiles - 1) // 2, tiles)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("side", [1, 4, 128, 512])
def test_raster_counts_what_is_visible(seed, side):
    from flashmask.torch.mask_forms import raster

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
    """Cells that see something, and their visible share."""
    from flashmask.torch.mask_forms import raster, sampled_cells

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


def test_another_default_device_changes_nothing():
    """Counting happens in host memory."""
    for mask in (masks.causal_document(seqlens=[200, 100]), masks.causal(300)):
        ask = lambda: (mask.stats(), repr(mask), mask.plot(), mask.to_startend()[0].tolist())  # noqa: B023, E731
        want = ask()
        with torch.device("meta"):
            assert ask() == want
    visible = masks.document(seqlens=[3, 4]).to_dense()
    with torch.device("meta"):
        got = masks.from_dense(visible)
    assert torch.equal(got.to_dense(), visible)


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
