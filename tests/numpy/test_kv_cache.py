# SPDX-License-Identifier: Apache-2.0
"""flashmask.numpy over a KV cache, against loops over rows and keys in float64; its appends, and what it refuses."""

import dataclasses
import math

import flashmask.numpy as fm
import ml_dtypes
import numpy as np
import pytest

FOR_GOOD = 2**31 - 1
FLOAT8 = ml_dtypes.float8_e4m3fn
TOLERANCES = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def int32(*values):
    return np.array(values, np.int32)


# --- The same attention, one row and key at a time ------------------------------------------------------


class Dense:
    """A call as loops: `keys[b]` and `values[b]` are [n, heads_kv, dim] in float64, as lists of each request."""

    def __init__(self, keys, values, causal=True, window=(-1, -1), vectors=None, tail=None, positions=None, depth=None):
        self.keys, self.values, self.causal, self.window = keys, values, causal, window
        self.vectors, self.tail, self.positions, self.depth = vectors, tail, positions, depth

    def place(self, b, index, of_keys):
        """The position of a row or key."""
        if self.positions:
            return self.positions[of_keys][b][index]
        n = len(self.keys[b])
        if self.depth and index >= n - len(self.tail[b]):
            return n - len(self.tail[b]) + self.depth[b][index - n + len(self.tail[b])]
        return index

    def sees(self, b, head, row, key):
        distance = self.place(b, key, True) - self.place(b, row, False)
        left, right = self.window
        tail = len(self.keys[b]) - (len(self.tail[b]) if self.tail else 0)
        if left >= 0 and distance < -left:
            return False
        if min(row, key) >= tail:
            return self.tail[b][row - tail][key - tail]
        if self.causal and distance > 0 or right >= 0 and distance > right:
            return False
        return self.vectors is None or not hidden(self.vectors[b][head][key], row, self.causal)

    def row(self, q, b, head, row, group, scale, sink=None, slope=0.0):
        """(out, lse) of one row, which is the sequence's `row`."""
        n, head_kv = len(self.keys[b]), head // group
        seen = [j for j in range(n) if row >= 0 and self.sees(b, head_kv, row, j)]
        scores = [
            float(q @ self.keys[b][j, head_kv]) * scale
            - slope * abs(self.place(b, row, False) - self.place(b, j, True))
            for j in seen
        ]
        every = scores + ([] if sink is None else [sink])
        if not every:
            return np.zeros(self.values[b].shape[2]), -math.inf
        most = max(every)
        lse = most + math.log(sum(math.exp(x - most) for x in every))
        weighted = [math.exp(x - lse) * self.values[b][j, head_kv] for x, j in zip(scores, seen)]
        return sum(weighted, np.zeros(self.values[b].shape[2])), lse

    def check(self, q, out, lse, rows, scale=None, sink=None, slopes=None, tolerance=None):
        """Compares a packed call whose request b has the rows `rows[b]` of q; those of no request are 0 and -inf."""
        heads = q.shape[1]
        group = heads // self.keys[0].shape[1]
        scale = q.shape[2] ** -0.5 if scale is None else scale
        want = np.zeros(out.shape)
        want_lse = np.full(lse.shape, -np.inf)
        for b, mine in enumerate(rows):
            for i, at in enumerate(mine):
                for h in range(heads):
                    row = len(self.keys[b]) - len(mine) + i
                    features = {"sink": None if sink is None else sink[h], "slope": 0 if slopes is None else slopes[h]}
                    found = self.row(q[at, h].astype(np.float64), b, h, row, group, scale, **features)
                    want[at, h], want_lse[h, at] = found
        tolerance = tolerance or TOLERANCES[q.dtype.name]
        assert np.array_equal(np.isinf(lse), np.isinf(want_lse))
        seen = np.isfinite(want_lse)
        assert np.abs(lse[seen] - want_lse[seen]).max(initial=0) <= 1e-5
        assert np.abs(out.astype(np.float64) - want).max() <= tolerance * max(np.abs(want).max(), 1)


def hidden(vectors, row, causal):
    """The rule of startend_row_indices for one column."""
    x = [int(value) for value in vectors]
    if causal:
        return x[0] <= row < (x[1] if len(x) == 2 else math.inf)
    return x[0] <= row < x[1] or x[2] <= row < x[3] if len(x) == 4 else row >= x[0] or row < x[1]


# --- Caches to draw -------------------------------------------------------------------------------------


class Pages:
    """A cache whose sequences lie in permuted pages, with NaN wherever no key is."""

    def __init__(self, rng, lengths, page_size=3, heads_kv=2, dims=(16, 8), dtype=np.float32, spare=2):
        self.lengths, self.page_size = lengths, page_size
        most = max(-(-n // page_size) for n in lengths)
        pages = len(lengths) * most + spare
        self.table = rng.permutation(pages)[: len(lengths) * most].reshape(len(lengths), most).astype(np.int32)
        self.k, self.v = (np.full((pages, page_size, heads_kv, dim), np.nan).astype(dtype) for dim in dims)
        self.keys = [rng.standard_normal((n, heads_kv, dims[0])).astype(dtype) for n in lengths]
        self.values = [rng.standard_normal((n, heads_kv, dims[1])).astype(dtype) for n in lengths]
        for b, n in enumerate(lengths):
            for j in range(n):
                self.k[self.at(b, j)], self.v[self.at(b, j)] = self.keys[b][j], self.values[b][j]

    def at(self, b, j):
        """Page and slot of a request's key j."""
        return self.table[b, j // self.page_size], j % self.page_size

    def cache(self, **options):
        return fm.KvCache(self.k, self.v, self.table, int32(*self.lengths), **options)

    def dense(self, **mask):
        return Dense(*([x.astype(np.float64) for x in side] for side in (self.keys, self.values)), **mask)


def packed(rng, counts, heads=4, dim=16, dtype=np.float32, spare=3):
    """(q, cu_seqlens_q, the rows of each request), with rows of no request at the end."""
    ends = np.cumsum([0, *counts]).astype(np.int32)
    q = rng.standard_normal((ends[-1] + spare, heads, dim)).astype(dtype)
    return q, ends, [range(ends[b], ends[b + 1]) for b in range(len(counts))]


# --- Attention ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_ragged_rows_over_pages(rng, dtype):
    of = np.dtype(getattr(ml_dtypes, dtype, dtype))
    pages = Pages(rng, [7, 0, 1, 20], dtype=of)
    q, ends, rows = packed(rng, [2, 1, 3, 20], dtype=of)  # no keys; and more rows than keys
    backend = "reference" if dtype == "float64" else "auto"
    out, lse = fm.flashmask_with_kvcache(
        q, pages.cache(), cu_seqlens_q=ends, return_softmax_lse=True, validate=True, backend=backend
    )
    assert out.dtype == of and out.shape == (*q.shape[:2], 8)
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    pages.dense().check(q, out, lse, rows)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_layouts_tables_and_page_sizes_have_equal_bits(rng, page_size):
    pages = Pages(rng, [9, 5], page_size)
    q = rng.standard_normal((2, 3, 4, 16)).astype(np.float32)
    cache = pages.cache()
    out, lse = fm.flashmask_with_kvcache(q, cache, return_softmax_lse=True)
    head_major = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (pages.k, pages.v)]
    counts = [-(-n // page_size) for n in pages.lengths]
    lists = (int32(0, *np.cumsum(counts)), np.concatenate([pages.table[b, :n] for b, n in enumerate(counts)]))
    contiguous = [np.zeros((2, 9, *x.shape[2:]), np.float32) for x in (pages.k, pages.v)]
    for b, n in enumerate(pages.lengths):
        contiguous[0][b, :n], contiguous[1][b, :n] = pages.keys[b], pages.values[b]
    for other in (
        fm.KvCache(*head_major, pages.table, cache.seqlens, layout="HND"),
        dataclasses.replace(cache, page_table=lists),
        fm.KvCache(*contiguous, seqlens=cache.seqlens),
    ):
        assert other.batch == 2 and "2 requests" in repr(other)
        other.validate()
        got = fm.flashmask_with_kvcache(q, other, return_softmax_lse=True, threads=2)
        assert got[0].tobytes() == out.tobytes() and got[1].tobytes() == lse.tobytes()


@pytest.mark.parametrize("window, options", [((4, -1), {}), ((2, 1), {"causal": False}), (3, {"causal": False})])
def test_windows_sinks_and_slopes(rng, window, options):
    pages = Pages(rng, [12, 4])
    q, ends, rows = packed(rng, [3, 5])
    sink, slopes = (rng.random(4).astype(np.float32) for _ in range(2))
    out, lse = fm.flashmask_with_kvcache(
        q,
        pages.cache(),
        fm.SequenceMask(window_size=window, **options),
        ends,
        softmax_scale=0.3,
        sink=sink,
        alibi_slopes=slopes,
        return_softmax_lse=True,
    )
    sides = window if isinstance(window, tuple) else (window, window)
    dense = pages.dense(window=sides, **options)
    dense.check(q, out, lse, rows, scale=0.3, sink=sink, slopes=slopes)


@pytest.mark.parametrize("causal, vectors", [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_vectors_by_sequence_and_beside_the_pages(rng, causal, vectors):
    pages = Pages(rng, [11, 6])
    q, ends, rows = packed(rng, [4, 6])
    by_sequence = rng.integers(0, 12, (2, 2, 8, vectors)).astype(np.int32)  # fewer columns than keys
    absent = {(True, 1): [FOR_GOOD], (True, 2): [0, 0], (False, 2): [FOR_GOOD, 0], (False, 4): [0] * 4}
    in_pages = np.full((*pages.k.shape[:3], vectors), absent[causal, vectors], np.int32)
    rule = [[[absent[causal, vectors]] * n, [absent[causal, vectors]] * n] for n in pages.lengths]
    for b, n in enumerate(pages.lengths):
        for j in range(min(n, 8)):
            in_pages[pages.at(b, j)] = by_sequence[b, :, j]
            for h in range(2):
                rule[b][h][j] = by_sequence[b, h, j]
    dense = pages.dense(causal=causal, vectors=rule)
    results = []
    for bounds in (by_sequence, in_pages):
        mask = fm.SequenceMask(causal, bounds=bounds)
        out, lse = fm.flashmask_with_kvcache(q, pages.cache(), mask, ends, return_softmax_lse=True)
        dense.check(q, out, lse, rows)
        results.append(out.tobytes() + lse.tobytes())
    assert results[0] == results[1]


def tree_of(parents):
    """(bits [T, T], depth) of a tree of drafts, a node's parent being before it."""
    bits, depth = np.zeros((len(parents), len(parents)), bool), []
    for t, parent in enumerate(parents):
        bits[t, t] = True
        if parent >= 0:
            bits[t] |= bits[parent]
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    return bits, depth


def words_of(bits, size):
    """Words of 32 bits, [T, ceil(T / 32)]."""
    words = np.zeros((size, -(-size // 32)), np.uint32)
    for t, u in np.argwhere(bits):
        words[t, u // 32] |= np.uint32(1 << (u % 32))
    return words.view(np.int32)


@pytest.mark.parametrize("window", [(-1, -1), (3, -1)])
def test_trees_of_drafts_in_a_window(rng, window):
    trees = [tree_of([-1, 0, 0, 1, 1, 2, 3]), tree_of([-1, 0, -1])]
    pages = Pages(rng, [15, 5])
    q, ends, rows = packed(rng, [7, 3])
    size = 35  # two words a row
    tail = np.stack([words_of(bits, size) for bits, _ in trees])
    depth = np.stack([np.pad(depth, (0, size - len(depth))) for _, depth in trees]).astype(np.int32)
    mask = fm.SequenceMask(True, window, tail=tail, tail_lens=int32(7, 3), tail_depth=depth)
    out, lse = fm.flashmask_with_kvcache(q, pages.cache(), mask, ends, return_softmax_lse=True, validate=True)
    dense = pages.dense(window=window, tail=[bits for bits, _ in trees], depth=[depth for _, depth in trees])
    dense.check(q, out, lse, rows)


@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_blocks_that_a_mask_leaves_out(rng, dtype):
    """Rows 125 to 129 of a sequence, whose blocks of 128 keys differ by row and head."""
    pages = Pages(rng, [130], heads_kv=2, dims=(8, 8))
    q, ends, rows = packed(rng, [5])
    kept = np.array([[[1, 1], [0, 1]], [[1, 0], [1, 0]]], dtype)  # by head, block of rows and block of keys
    q = q[..., :8]
    out, lse = fm.flashmask_with_kvcache(
        q, pages.cache(), fm.SequenceMask(block_mask=kept[None]), ends, return_softmax_lse=True
    )
    dense = pages.dense()
    sees = dense.sees
    dense.sees = lambda b, head, row, key: kept[head, row // 128, key // 128] and sees(b, head, row, key)
    dense.check(q, out, lse, rows)


def test_positions_of_rows_and_keys(rng):
    pages = Pages(rng, [10, 6])
    q, ends, rows = packed(rng, [4, 2])
    q_pos, k_pos = rng.integers(0, 12, len(q)).astype(np.int32), rng.integers(0, 12, (2, 10)).astype(np.int32)
    beside = np.zeros(pages.k.shape[:2], np.int32)
    for b, n in enumerate(pages.lengths):
        for j in range(n):
            beside[pages.at(b, j)] = k_pos[b, j]
    of_rows = [dict(zip(range(pages.lengths[b] - len(rows[b]), pages.lengths[b]), q_pos[rows[b]])) for b in range(2)]
    dense = pages.dense(window=(5, -1), positions=(of_rows, k_pos))
    for positions in (k_pos, beside):
        mask = fm.SequenceMask(window_size=(5, -1), q_pos=q_pos, k_pos=positions)
        out, lse = fm.flashmask_with_kvcache(q, pages.cache(), mask, ends, return_softmax_lse=True)
        dense.check(q, out, lse, rows)


@pytest.mark.parametrize("viewed", [False, True])
@pytest.mark.parametrize("scales", [None, 0.25, "heads", "pages", "tokens"])
def test_float8_and_its_scales(rng, viewed, scales):
    pages = Pages(rng, [8, 5], dtype=FLOAT8)
    shape = {"heads": (2,), "pages": (len(pages.k), 1, 1), "tokens": pages.k.shape[:3]}.get(scales)
    of_k, of_v = (rng.uniform(0.5, 2, shape).astype(np.float32) if shape else scales for _ in range(2))
    stored = [x.view(np.uint8) if viewed else x for x in (pages.k, pages.v)]
    cache = fm.KvCache(*stored, pages.table, int32(8, 5), of_k, of_v)
    q, ends, rows = packed(rng, [2, 5], dtype=ml_dtypes.bfloat16)
    out, lse = fm.flashmask_with_kvcache(q, cache, cu_seqlens_q=ends, return_softmax_lse=True)
    wide_k, wide_v = (np.broadcast_to(1.0 if x is None else x, pages.k.shape[:3]) for x in (of_k, of_v))
    dense = pages.dense()
    for b, n in enumerate(pages.lengths):
        for j in range(n):
            dense.keys[b][j] *= wide_k[pages.at(b, j)][:, None]
            dense.values[b][j] *= wide_v[pages.at(b, j)][:, None]
    dense.check(q, out, lse, rows, tolerance=1.6e-2)


def test_values_that_lie_are_clamped_or_read_as_zeros(rng):
    pages = Pages(rng, [6, 6])
    q, ends, rows = packed(rng, [2, 2])
    pages.table[1, 1] = -5
    cache = dataclasses.replace(pages.cache(), seqlens=int32(999, 6))
    with pytest.raises(ValueError, match=r"seqlens\[0\] is 999; it must be between 0 and 6"):
        cache.validate()
    with pytest.raises(ValueError, match=r"seqlens\[0\] is 999"):
        fm.flashmask_with_kvcache(q, cache, cu_seqlens_q=ends, validate=True)
    out, lse = fm.flashmask_with_kvcache(q, cache, cu_seqlens_q=ends, return_softmax_lse=True)
    dense = pages.dense()
    dense.keys[1][3:] = dense.values[1][3:] = 0
    dense.check(q, out, lse, rows)


# --- Appending ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, FLOAT8])
def test_appended_rows_become_the_last_tokens(rng, dtype):
    pages = Pages(rng, [7, 4], dtype=dtype)
    new = np.float32 if dtype is FLOAT8 else dtype
    k, v = (rng.standard_normal((5, 2, dim)).astype(new) for dim in (16, 8))
    scale = 0.5 if dtype is FLOAT8 else None
    want = [x.copy() for x in (pages.k, pages.v)]
    for i, (b, j) in enumerate([(0, 6), (1, 0), (1, 1), (1, 2), (1, 3)]):
        for to, rows in zip(want, (k, v)):
            to[pages.at(b, j)] = (rows[i].astype(np.float32) / (scale or 1)).astype(dtype)
    cache = fm.KvCache(pages.k, pages.v, pages.table, int32(7, 4), scale, scale)
    fm.append_kv(k, v, cache, cu_seqlens=int32(0, 1, 5))
    for got, wanted in zip((pages.k, pages.v), want):
        assert got.view(np.uint8).tobytes() == wanted.view(np.uint8).tobytes()


def least_power(x):
    """The least power of two that is no less."""
    return np.exp2(np.ceil(np.log2(np.float64(x))))


def test_scales_of_pages_are_written(rng):
    """Token by token, as in one call."""
    k, v = (np.float32(rng.standard_normal((1, 11, 2, dim)) * [[0.1], [9]]) for dim in (16, 8))
    found = []
    for step in (11, 1):
        pages = [np.zeros((4, 3, 2, dim), FLOAT8) for dim in (16, 8)]
        scales = [np.zeros((4, 1, heads), np.float32) for heads in (2, 1)]
        cache = fm.KvCache(*pages, int32(3, 1, 0, 2).reshape(1, 4), int32(0), *scales)
        for i in range(0, 11, step):
            cache.seqlens[0] += step
            fm.append_kv(k[:, i : i + step], v[:, i : i + step], cache, write_scales=True)
        found.append(scales)
    for n, page in enumerate((3, 1, 0, 2)):
        tokens = slice(3 * n, 3 * n + 3)
        for of_k, of_v in found:
            assert np.array_equal(of_k[page, 0], least_power(abs(k[0, tokens]).max((0, 2)) / 448))
            assert of_v[page, 0, 0] == least_power(abs(v[0, tokens]).max() / 448)
    scales[1].flags.writeable = False
    with pytest.raises(ValueError, match="cache.v_scale is read-only"):
        fm.append_kv(k[:, :1], v[:, :1], cache, write_scales=True)


def test_slots_take_rows_and_bounds(rng):
    pages = Pages(rng, [6, 6])
    k, v = (rng.standard_normal((4, 2, dim)).astype(np.float32) for dim in (16, 8))
    bounds = np.full((*pages.k.shape[:2], 1, 1), FOR_GOOD, np.int32)
    total = pages.k.shape[0] * 3
    before = pages.k.copy()
    vectors = np.arange(4, dtype=np.int32).reshape(4, 1, 1)
    mask = fm.SequenceMask(bounds=bounds)
    fm.append_kv(k, v, pages.cache(), slots=np.array([4, -1, total, 2]), bounds=vectors, mask=mask)
    before[1, 1], before[0, 2] = k[0], k[3]
    assert np.array_equal(pages.k, before, equal_nan=True)
    assert np.array_equal(pages.v[1, 1], v[0]) and np.array_equal(pages.v[0, 2], v[3])
    assert bounds.reshape(-1)[[4, 2]].tolist() == [0, 3] and (bounds == FOR_GOOD).sum() == total - 2


def test_a_decode_loop_is_one_call(rng):
    pages = Pages(rng, [0, 0], spare=9)
    pages.table = rng.permutation(8).reshape(2, 4).astype(np.int32)
    seqlens = int32(0, 0)
    cache = fm.KvCache(pages.k[:8], pages.v[:8], pages.table, seqlens)
    q, k, v = (rng.standard_normal((2, 6, heads, d)).astype(np.float32) for heads, d in ((4, 16), (2, 16), (2, 8)))
    steps = []
    for i in range(6):
        seqlens += 1
        fm.append_kv(*(x[:, i : i + 1] for x in (k, v)), cache)
        steps.append(fm.flashmask_with_kvcache(q[:, i : i + 1], cache))
    at_once = fm.flashmask_with_kvcache(q, cache)
    assert np.array_equal(np.concatenate(steps, axis=1), at_once)


# --- Refusals -------------------------------------------------------------------------------------------


def test_training_has_the_bits_of_a_cache(rng):
    """A forward with split_size, and without it not."""
    q, k, v = (rng.standard_normal((2, 300, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    wanted = fm.flashmask_with_kvcache(q, fm.KvCache(k, v), split_size=128, return_softmax_lse=True)
    for split_size, is_same in ((128, True), (256, False), (None, False)):
        got = fm.attention(q, k, v, causal=True, split_size=split_size, threads=2)
        assert all(x.tobytes() == y.tobytes() for x, y in zip(got, wanted, strict=True)) == is_same


def test_what_a_cache_refuses(rng):
    pages = Pages(rng, [6, 6])
    k, v, table = pages.k, pages.v, pages.table
    for raised, words, arguments in (
        (TypeError, "k is None; it must be a numpy array", (None, v)),
        (ValueError, "k has shape .*; it must have 4 dimensions, .*page_size, heads_kv", (k[0], v)),
        (ValueError, "cache.v is .*; it must be", (k, v[:, :, :1], table)),
        (ValueError, "page_table has 1 entries; it must be an array or", (k, v, (table,))),
        (TypeError, "page_indptr is .* it must be a numpy array", (k, v, ([0, 2], [0, 1]))),
        (ValueError, "page_table is int64.*it must be int32", (k, v, table.astype(np.int64))),
        (ValueError, "seqlens is .*it must be int32 .2.", (k, v, table, int32(6))),
        (ValueError, "k_scale is .*only a float8_e4m3 cache has scales", (k, v, table, None, 2.0)),
        (TypeError, "v_scale is 'x'", (k, v, table, None, None, "x")),
        (ValueError, "layout is 'NDH'", (k, v, table, None, None, None, "NDH")),
    ):
        with pytest.raises(raised, match=words):
            fm.KvCache(*arguments)


def test_what_a_call_refuses(rng):
    pages = Pages(rng, [6, 6])
    cache = pages.cache()
    q = np.zeros((2, 1, 4, 16), np.float32)
    for raised, words, arguments in (
        (TypeError, "cache is .*KvCache", {"cache": (pages.k, pages.v)}),
        (TypeError, "mask is .*SequenceMask", {"mask": np.zeros((2, 2))}),
        (TypeError, "q is None", {"q": None}),
        (ValueError, "q has shape .*4 dimensions", {"q": q[0]}),
        (ValueError, "q has shape .*3 dimensions", {"cu_seqlens_q": int32(0, 1, 2)}),
        (ValueError, "split_size is 100; it must be a multiple of 128", {"split_size": 100}),
        (ValueError, "split_size is 0", {"split_size": 0}),
        (ValueError, "tail is .*it must be int32", {"mask": fm.SequenceMask(tail=int32(1))}),
        (ValueError, "k_pos is .*q_pos absent", {"mask": fm.SequenceMask(k_pos=np.zeros((2, 6), np.int32))}),
        (ValueError, "bounds is .*2 or 4 .not causal", {"mask": bounds_mask((2, 1, 6, 1), causal=False)}),
        (ValueError, "cache.k is .*it must be float16", {"q": q.astype(np.float16)}),
    ):
        with pytest.raises(raised, match=words):
            fm.flashmask_with_kvcache(**{"q": q, "cache": cache, **arguments})


def bounds_mask(shape, **options):
    return fm.SequenceMask(bounds=np.zeros(shape, np.int32), **options)


def test_key_layout_is_asked_for_where_shapes_do_not_say(rng):
    k, v = (np.zeros((2, 1, 2, dim), np.float32) for dim in (16, 8))
    cache = fm.KvCache(k, v, int32(0, 1).reshape(2, 1))
    q = np.zeros((2, 1, 4, 16), np.float32)
    for shape, words in (((2, 1, 1, 1), "fits both .*say which"), ((3, 1, 1, 1), "fits neither")):
        with pytest.raises(ValueError, match=f"key_layout is 'auto'.*{words}"):
            fm.flashmask_with_kvcache(q, cache, bounds_mask(shape))
    for layout in ("sequences", "pages"):
        fm.flashmask_with_kvcache(q, cache, bounds_mask((2, 1, 1, 1), key_layout=layout))
    with pytest.raises(ValueError, match="key_layout is 'rows'"):
        fm.SequenceMask(key_layout="rows")


def test_what_an_append_refuses(rng):
    pages = Pages(rng, [6, 6])
    k, v = (np.zeros((2, 1, 2, dim), np.float32) for dim in (16, 8))
    frozen = pages.k.copy()
    frozen.flags.writeable = False
    without = fm.KvCache(pages.k, pages.v, pages.table)
    for raised, words, arguments in (
        (TypeError, "cache is None", {"cache": None}),
        (TypeError, "v is None", {"v": None}),
        (ValueError, "seqlens is absent", {"cache": without}),
        (ValueError, "bounds is .* and mask has none", {"bounds": np.zeros((2, 1, 1, 1), np.int32)}),
        (ValueError, "slots is float32", {"slots": np.zeros((2, 1), np.float32)}),
        (ValueError, "cache.k is read-only", {"cache": dataclasses.replace(pages.cache(), k=frozen)}),
    ):
        with pytest.raises(raised, match=words):
            fm.append_kv(**{"k": k, "v": v, "cache": pages.cache(), **arguments})
