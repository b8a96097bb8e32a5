# SPDX-License-Identifier: Apache-2.0
"""Foundations of the GPU benchmarks.

The paper's cells, FlexAttention's rules for them, tile counts, drawn sparsities, and where a plan's bits lie.
"""

import ctypes as C

import numpy as np
import pytest
from flashmask import capi
from flashmask._core import ctypes_calls
from flashmask._core.families import families

from benchmarks.instruments import medians
from benchmarks.masks import block_masks, flex_masks, paper_masks, sparsity_masks, visible_tiles
from benchmarks.measure import mask_build, wasted_work
from benchmarks.measure.gpu import plan_layout

lib = capi.load()

# Share of 128x128 tiles with a visible element: 8K, 32K, 128K: those of the masks that FlashMask V3's
# recorded ratios were measured on.
LIVE = {
    "full": (1.000, 1.000, 1.000),
    "causal": (0.508, 0.502, 0.500),
    "sliding_window": (0.076, 0.064, 0.061),
    "causal_document": (0.147, 0.062, 0.058),
    "document": (0.278, 0.121, 0.115),
    "shared_question": (0.133, 0.058, 0.051),
    "global_sliding_window": (0.165, 0.132, 0.124),
    "causal_blockwise": (0.389, 0.070, 0.087),
    "prefix_lm_document": (0.151, 0.072, 0.066),
    "prefix_lm_causal": (0.629, 0.626, 0.625),
    "qk_sparse": (0.486, 0.479, 0.477),
    "random_eviction": (0.508, 0.502, 0.500),
}
SEQLENS = (8192, 32768, 131072)


@pytest.mark.parametrize("name", paper_masks.NAMES)
def test_live_shares_of_the_cells(name):
    shares = [visible_tiles.live_share(*paper_masks.paper_mask(name, seqlen), seqlen) for seqlen in SEQLENS]
    assert [round(share, 3) for share in shares] == list(LIVE[name])


def visible_by_bounds(indices, causal, seqlen):
    """Computes it from the intervals, element by element."""
    rows = np.arange(seqlen)[:, None]
    seen = np.ones((seqlen, seqlen), bool)
    for interval in visible_tiles.hidden_intervals(indices, causal, seqlen):
        seen &= ~((rows >= interval[:, 0]) & (rows < interval[:, 1]))
    return seen


@pytest.mark.parametrize("seqlen", [1024, 2048])
@pytest.mark.parametrize("name", paper_masks.NAMES)
def test_flex_rules_say_what_the_bounds_say(name, seqlen):
    """Bounds, mask_mod and the library agree on every element; tile counts come from looking at them."""
    indices, causal = paper_masks.paper_mask(name, seqlen)
    seen = visible_by_bounds(indices, causal, seqlen)
    rule = flex_masks.flex_mask(name, seqlen, lambda array: array)
    positions = np.arange(seqlen)
    assert np.array_equal(
        seen, np.ones_like(seen) if rule is None else rule(0, 0, positions[:, None], positions[None, :])
    )
    assert np.array_equal(visible_tiles.live_tiles(indices, causal, seqlen), tiles_of(seen, 128, 128).any((1, 3)))
    mask = capi.mask(
        seqlen, seqlen, flags=capi.CAUSAL if causal else 0, **({} if indices is None else {"bounds": indices})
    )
    dense = np.empty((1, 1, seqlen, seqlen), np.bool_)
    assert lib.fm_mask_to_dense(C.byref(mask), C.byref(capi.tensor(dense))) == capi.OK
    assert np.array_equal(seen, dense[0, 0])


@pytest.mark.parametrize("name", paper_masks.NAMES)
def test_flex_rules_at_full_length(name):
    """Bounds and mask_mod at the benchmark's own lengths, on a sample of elements."""
    for seqlen in SEQLENS:
        indices, causal = paper_masks.paper_mask(name, seqlen)
        rule = flex_masks.flex_mask(name, seqlen, lambda array: array)
        rng = np.random.default_rng(1)
        q, k = rng.integers(0, seqlen, (2, 200_000))
        k = np.where(rng.random(k.size) < 0.5, np.clip(q + rng.integers(-200, 200, k.size), 0, seqlen - 1), k)
        seen = np.ones(k.size, bool)
        for interval in visible_tiles.hidden_intervals(indices, causal, seqlen):
            seen &= ~((q >= interval[k, 0]) & (q < interval[k, 1]))
        assert rule is None and seen.all() or np.array_equal(seen, rule(0, 0, q, k)), seqlen


def tiles_of(matrix, rows, keys):
    """Zero-padded to whole tiles: [row tiles, rows, key tiles, keys]."""
    height, width = (-(-n // m) * m for n, m in zip(matrix.shape, (rows, keys)))
    padded = np.zeros((height, width), bool)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded.reshape(height // rows, rows, width // keys, keys)


@pytest.mark.parametrize("name", paper_masks.NAMES)
def test_wasted_work_counts_elements(name):
    """Against the matrix, looked at element by element."""
    seqlen = 1024
    seen = visible_by_bounds(*paper_masks.paper_mask(name, seqlen), seqlen)
    expected = [tiles_of(seen, *g).any((1, 3)).sum() * g[0] * g[1] / seen.sum() for g in wasted_work.GRANULES]
    assert wasted_work.computed_over_visible(name, seqlen) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["document", "causal_document"])
def test_wasted_work_of_packed_tiles(name):
    """A matrix of each document by itself begins with a tile."""
    seqlen = 1024
    seen = visible_by_bounds(*paper_masks.paper_mask(name, seqlen), seqlen)
    ends = np.cumsum(paper_masks.document_lengths(np.random.default_rng(0), seqlen))
    documents = [seen[begin:end, begin:end] for begin, end in zip([0, *ends[:-1]], ends)]
    assert sum(document.sum() for document in documents) == seen.sum()
    computed = sum(tiles_of(document, 128, 128).any((1, 3)).sum() for document in documents) * 128 * 128
    assert wasted_work.packed_over_visible(name, seqlen) == pytest.approx(computed / seen.sum())


@pytest.mark.parametrize("count", [1, 2, 4])
def test_tile_counts_of_random_bounds(count):
    """Overlapping, touching and empty intervals in any order."""
    rng = np.random.default_rng(count)
    seqlen = 512
    for case in range(60):
        causal = count == 1 or count == 2 and case % 2 == 0
        runs = rng.integers(0, seqlen + 1, (seqlen // 64, count)) // (64 if case % 3 else 1) * (64 if case % 3 else 1)
        indices = np.repeat(runs, 64, axis=0).astype(np.int32)[None, None]
        expected = tiles_of(visible_by_bounds(indices, causal, seqlen), 128, 128).any((1, 3))
        assert np.array_equal(visible_tiles.live_tiles(indices, causal, seqlen), expected)


@pytest.mark.parametrize("seqlen, sparsity", [(8192, 0.1), (8192, 0.5), (32768, 0.9), (131072, 0.7)])
def test_block_masks_have_their_share_of_live_blocks(seqlen, sparsity):
    drawn = block_masks.draw(seqlen, sparsity)
    assert drawn.shape == (seqlen // 128, seqlen // 128) and drawn.mean() == block_masks.live_share(seqlen, sparsity)
    assert abs(drawn.mean() - (1 - sparsity)) < 2e-4
    assert (drawn != block_masks.draw(seqlen, sparsity, seed=1)).any()
    apart = drawn.mean(0) - drawn.mean()  # deviations of the columns, which are drawn as all blocks are
    assert abs(apart).max() < 6 * (drawn.std() / len(drawn) ** 0.5)


@pytest.mark.parametrize("kind", sparsity_masks.KINDS)
def test_sparsity_buckets_are_filled(kind):
    drawn = sparsity_masks.fill_buckets(kind, 32768, 2)
    per_bucket = {
        bucket: sum(medians.bucket_of(1 - mask["live"]) == bucket for mask in drawn)
        for bucket in sparsity_masks.reachable(kind, 0.05)
    }
    assert set(per_bucket.values()) == {2} and len(per_bucket) == (19 if kind == "document" else 9)
    assert all(0 <= mask["indices"].min() and mask["indices"].max() <= 32768 for mask in drawn)


def host_plan(mask):
    size = C.c_size_t()
    assert lib.fm_plan_bytes(C.byref(mask), C.byref(size)) == capi.OK
    plan = np.zeros(size.value, np.uint8)
    assert lib.fm_plan_build(C.byref(mask), plan.ctypes.data_as(C.c_void_p), size, None) == capi.OK, lib.fm_last_error()
    return plan


def bits_at(plan, begin, masks, rows, words, width):
    """bool [masks, rows, width] of a section of 64-bit words."""
    section = plan[begin : begin + 8 * masks * rows * words].reshape(masks, rows, 8 * words)
    return np.unpackbits(section, axis=-1, bitorder="little")[..., :width].astype(bool)


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, heads", [(64, 128, 1), (1000, 700, 3), (300, 9000, 2), (9000, 300, 2), (8192, 8192, 1)]
)
def test_plan_layout_is_the_librarys(seqlen_q, seqlen_k, heads):
    """Live and full bits in both directions lie where plan_layout says and say what the dense matrix says."""
    rng = np.random.default_rng(0)
    runs = rng.integers(0, seqlen_q + 1, (1, heads, -(-seqlen_k // 150), 2))
    bounds = np.ascontiguousarray(np.repeat(runs, 150, axis=2)[:, :, :seqlen_k].astype(np.int32))
    mask = capi.mask(seqlen_q, seqlen_k, flags=capi.CAUSAL, bounds=bounds)
    plan, at = host_plan(mask), plan_layout.plan_layout(seqlen_q, seqlen_k, 1, heads)
    assert plan_layout.HEADER.unpack_from(plan)[1:5] == (seqlen_q, seqlen_k, 1, heads) and at.end <= plan.nbytes

    dense = np.empty((1, heads, seqlen_q, seqlen_k), np.bool_)
    assert lib.fm_mask_to_dense(C.byref(mask), C.byref(capi.tensor(dense))) == capi.OK
    live = np.stack([tiles_of(d, 64, 128).any((1, 3)) for d in dense[0]])
    full = np.stack([~tiles_of(~d, 64, 128).any((1, 3)) for d in dense[0]])
    for begin, expected in ((at.row_live_bits, live), (at.row_full_bits, full)):
        assert np.array_equal(bits_at(plan, begin, heads, at.row_granules, at.words_per_row, at.key_blocks), expected)
    for begin, expected in ((at.key_live_bits, live), (at.key_full_bits, full)):
        assert np.array_equal(
            bits_at(plan, begin, heads, at.key_blocks, at.words_per_key, at.row_granules), expected.transpose(0, 2, 1)
        )


def test_the_time_of_every_family_of_arrays_is_measured():
    cases = mask_build.cases(8192)
    built = set()
    for family, vectors, numbers in cases.values():
        given = {name: np.ascontiguousarray(x) for name, x in vectors.items()}
        parameters = ctypes_calls.mask_parameters({name: capi.tensor(x) for name, x in given.items()}, numbers)
        mask = capi.make(capi.Mask)
        capi.check(lib.fm_mask_shape(family.encode(), C.byref(parameters), C.byref(mask), None))
        assert mask.seqlen_k == 8192
        bounds = np.empty(tuple(mask.bounds.shape[:4]), np.int32)
        mask.bounds = capi.tensor(bounds)
        capi.check(lib.fm_mask_build(family.encode(), C.byref(parameters), C.byref(mask), None))
        built.add(family)
    numbers = {"length", "number", "reach", "flag"}
    of_arrays = {name for name, family in families().items() if {p["kind"] for p in family["parameters"]} - numbers}
    assert of_arrays - {"prefix_tree_from_intervals"} <= built


def test_memory_of_lists_beside_flexattentions(capsys):
    pytest.importorskip("torch")
    from benchmarks.masks import listed_masks
    from benchmarks.measure import list_memory

    list_memory.main([256])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 3 and all("| 0.1 MB |" in line for line in lines)  # 64 KiB of bools, and a BlockMask
    visible = listed_masks.few_holes(200, "cpu")  # 4 x 2 granules, of which the edges' are partial, too
    assert list_memory.partial_granules(visible) == 8
    assert list_memory.partial_granules(visible | True) == 0
