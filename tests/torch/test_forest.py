# SPDX-License-Identifier: Apache-2.0
"""A Forest against the plain call over the same cache, and what it refuses."""

import dataclasses
import itertools
import os

import pytest
import torch
from devices import DEVICE, ON_CUDA, cuda_only
from flashmask.errors import UnsupportedError
from flashmask.inference import Forest, KvCache, SequenceMask, flashmask_with_kvcache

HEADS_Q, HEADS_KV, DIM = 4, 2, 64
DTYPE = torch.bfloat16 if ON_CUDA else torch.float32
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2} if ON_CUDA else {"rtol": 2e-5, "atol": 2e-6}


@dataclasses.dataclass
class Batch:
    """Requests over one cache, and how many pages each one shares with some other."""

    cache: KvCache
    rows: torch.Tensor  # [batch], of each request in a call
    q: torch.Tensor  # packed

    @property
    def cu_seqlens_q(self):
        return torch.nn.functional.pad(self.rows.cumsum(0), (1, 0)).int().to(DEVICE)

    def forest(self, **changes):
        packed = {"rows": len(self.q), "cu_seqlens_q": self.cu_seqlens_q}
        cache = self.cache
        return Forest.from_page_table(cache.page_table, cache.seqlens, cache.k.shape[1], **{**packed, **changes})


def distinct_pages(forest):
    """Pages that a call over the forest reads."""
    return int((forest._pages >= 0).sum())


def draw(page_size, paths, keys, rows, dtype=DTYPE):
    """Requests whose pages are `paths`, in a cache of random numbers with NaN in pages of no request."""
    pages = max(itertools.chain.from_iterable(paths), default=0) + 2
    places = torch.randperm(pages)
    table = torch.full((len(paths), max(map(len, paths)) + 1), -1, dtype=torch.int32)
    used = torch.zeros(pages, dtype=torch.bool)
    for row, path in zip(table, paths):
        row[: len(path)] = places[path].int()
        used[places[path]] = True
    k, v = (torch.randn(pages, page_size, HEADS_KV, DIM) for _ in range(2))
    for x in (k, v):
        x[~used] = float("nan")
    cache = KvCache(*(x.to(DEVICE, dtype) for x in (k, v)), table.to(DEVICE), torch.tensor(keys).int().to(DEVICE))
    q = torch.randn(sum(rows), HEADS_Q, DIM).to(DEVICE, DTYPE)
    return Batch(cache, torch.tensor(rows), q)


def tree(page_size, requests=9, depth=6):
    """A random tree of pages: each request goes on from some prefix of an earlier one's, in any order."""
    paths, fresh = [[0]], itertools.count(1)
    for _ in range(requests - 1):
        parent = paths[torch.randint(len(paths), ()).item()]
        kept = parent[: torch.randint(len(parent) + 1, ()).item()]
        paths.append(kept + [next(fresh) for _ in range(torch.randint(1, depth, ()).item())])
    paths = [paths[i] for i in torch.randperm(requests)]
    keys = [torch.randint((len(p) - 1) * page_size, len(p) * page_size + 1, ()).item() for p in paths]
    rows = [torch.randint(0, 4, ()).item() for _ in paths]
    return draw(page_size, paths, keys, rows)


def check(batch, forest=None, mask=None, **options):
    """Asserts that out and lse are the plain call's."""
    forest = forest or batch.forest()
    every = {"return_softmax_lse": True, **options}
    wanted = flashmask_with_kvcache(batch.q, batch.cache, mask, cu_seqlens_q=batch.cu_seqlens_q, **every)
    for got, want in zip(forest.attention(batch.q, batch.cache, mask, **every), wanted):
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_random_trees_equal_the_plain_call(page_size, seed):
    torch.manual_seed(seed)
    batch = tree(page_size)
    check(batch)
    check(batch, mask=SequenceMask(window_size=(page_size + 2, 0)))


def test_every_page_is_listed_once():
    batch = draw(16, [[0, 1, 2], [0, 1, 3], [0, 4], [5, 6], [0, 1, 2, 7]], [40, 48, 17, 32, 50], [1, 1, 1, 1, 1])
    # The first request's row is in page 2, so the last, whose row is behind it, has it for itself.
    assert distinct_pages(batch.forest()) == 9
    check(batch)


def test_requests_that_are_equal_share_all_but_the_last_page():
    batch = draw(16, [[0, 1, 2]] * 5, [41] * 5, [1] * 5)
    assert distinct_pages(batch.forest()) == 2 + 5
    check(batch)


def test_features():
    torch.manual_seed(0)
    batch = tree(16)
    sink, slopes = (torch.rand(HEADS_Q).to(DEVICE) for _ in range(2))
    check(batch, sink=sink)
    check(batch, softcap=5.0, softmax_scale=0.3)
    check(batch, alibi_slopes=slopes, mask=SequenceMask(causal=False, window_size=(40, 0)))


def test_requests_without_keys_or_rows():
    batch = draw(16, [[0, 1], [], [0, 1, 2], [0, 3], [4]], [32, 0, 40, 20, 3], [2, 2, 0, 1, 5])
    check(batch)


def test_rows_of_every_request_alike():
    torch.manual_seed(1)
    batch = draw(16, [[0, 1, 2], [0, 1, 3], [0, 4]], [40, 48, 17], [2, 2, 2])
    forest = batch.forest(rows=2, cu_seqlens_q=None)
    q = batch.q.unflatten(0, (3, 2))
    wanted = flashmask_with_kvcache(q, batch.cache, return_softmax_lse=True)
    for got, want in zip(forest.attention(q, batch.cache, return_softmax_lse=True), wanted):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, **TOLERANCE)
    torch.testing.assert_close(forest.attention(q, batch.cache), wanted[0], **TOLERANCE)


def test_float8():
    torch.manual_seed(2)
    batch = draw(16, [[0, 1, 2], [0, 1, 3], [0, 4]], [40, 48, 17], [1, 2, 1], dtype=torch.float8_e4m3fn)
    batch.cache.k_scale = torch.rand(batch.cache.k.shape[:3]).to(DEVICE)
    batch.cache.v_scale = 0.5
    check(batch)


@pytest.mark.skipif(os.environ.get("FLASHMASK_KERNELS", "auto") not in ("auto", "sm90"), reason="they promise L1 alone")
@pytest.mark.parametrize("page_size", [16, 128])
def test_bits_of_the_plain_call(page_size):
    """Under batch_invariant, where requests of one split and of several lie side by side."""
    torch.manual_seed(5)
    invariance = {"batch_invariant": True, "split_size": 128}
    for mask in (None, SequenceMask(window_size=(150, 0))):
        batch = tree(page_size, depth=700 // page_size)
        forest = batch.forest(**invariance)
        assert distinct_pages(forest) < sum(-(-n // page_size) for n in batch.cache.seqlens.tolist())
        options = {"return_softmax_lse": True, "sink": torch.rand(HEADS_Q).to(DEVICE)}
        wanted = flashmask_with_kvcache(
            batch.q, batch.cache, mask, cu_seqlens_q=batch.cu_seqlens_q, **invariance, **options
        )
        for got, want in zip(forest.attention(batch.q, batch.cache, mask, **options), wanted):
            assert torch.equal(got, want)


def test_lengths_and_tables_may_grow():
    """Under one plan, whose tensors stay where they are."""
    torch.manual_seed(3)
    batch = draw(16, [[0, 1, 2, 3], [0, 1, 4, 5], [0, 6, 7]], [33, 33, 17], [1, 1, 1])
    forest = batch.forest()
    plan = forest.plan(HEADS_Q, HEADS_KV, DIM)
    for step in range(20):
        forest.update_plan(plan, batch.cache)
        check(batch, forest)
        wanted = flashmask_with_kvcache(batch.q, batch.cache, cu_seqlens_q=batch.cu_seqlens_q)
        torch.testing.assert_close(forest.attention(batch.q, batch.cache, plan=plan), wanted, **TOLERANCE)
        batch.cache.seqlens += 1
        if step == 9:  # the third leaves, and another comes that goes on where the second does
            batch.cache.page_table[2] = batch.cache.page_table[1]
            batch.cache.seqlens[2] = 20
        forest.update()


def test_bad_values_stay_inside():
    batch = draw(16, [[0, 1, 2], [0, 1, 3]], [1000, -5], [1, 1])
    batch.cache.page_table[0, 0] = 10**6
    for cu_seqlens_q in ([0, 5, 1], [-3, 1, 2], [2, 2, 2]):
        forest = batch.forest(cu_seqlens_q=torch.tensor(cu_seqlens_q).int().to(DEVICE))
        assert sorted(forest._places.tolist()) == [0, 1]
        assert torch.isfinite(forest.attention(batch.q, batch.cache)).all()


def test_validation_is_of_the_requests():
    batch = draw(16, [[0, 1, 2], [0, 1, 3]], [40, 48], [1, 2])
    check(batch, validate=True)
    batch.cache.seqlens[1] = 1000
    with pytest.raises(ValueError, match=r"seqlens\[1\] is 1000"):
        batch.forest().attention(batch.q, batch.cache, validate=True)


def test_rows_of_no_request_are_zero():
    batch = draw(16, [[0, 1, 2], [0, 1, 3]], [40, 48], [1, 2])
    padded = torch.cat((batch.q, batch.q))
    out, lse = batch.forest(rows=6).attention(padded, batch.cache, return_softmax_lse=True)
    wanted = flashmask_with_kvcache(batch.q, batch.cache, cu_seqlens_q=batch.cu_seqlens_q)
    torch.testing.assert_close(out[:3], wanted, **TOLERANCE)
    assert not out[3:].any() and torch.isneginf(lse[:, 3:]).all()


@cuda_only
def test_one_graph_serves_every_step():
    torch.manual_seed(4)
    batch = draw(16, [[0, 1, 2, 3], [0, 1, 4, 5], [0, 6, 7]], [33, 33, 17], [1, 1, 1])
    forest = batch.forest()
    plan, graph = forest.plan(HEADS_Q, HEADS_KV, DIM), torch.cuda.CUDAGraph()

    def step():
        forest.update()
        forest.update_plan(plan, batch.cache)
        return forest.attention(batch.q, batch.cache, plan=plan)

    step()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([33, 33, 17], [64, 50, 40], [1, 0, 48]):
        batch.cache.seqlens.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, step())


def test_refusals():
    batch = draw(16, [[0, 1], [0, 2]], [20, 20], [1, 1])
    cache, forest = batch.cache, batch.forest()
    table = cache.page_table
    for mask in (
        SequenceMask(causal=False),
        SequenceMask(bounds=torch.zeros(1, 1, 32, 1, dtype=torch.int32, device=DEVICE)),
        SequenceMask(tail=torch.zeros(2, 1, 1, dtype=torch.int32, device=DEVICE)),
    ):
        with pytest.raises(UnsupportedError, match="mask.(causal|bounds|tail) is"):
            forest.attention(batch.q, cache, mask)
    with pytest.raises(UnsupportedError, match="out is given"):
        forest.attention(batch.q, cache, out=batch.q)
    with pytest.raises(TypeError, match="split_size is given; it is an argument of Forest.from_page_table"):
        forest.attention(batch.q, cache, split_size=256)
    with pytest.raises(ValueError, match="split_size is 1000; with batch_invariant it must be whole pages of 16"):
        batch.forest(batch_invariant=True, split_size=1000)
    with pytest.raises(UnsupportedError, match="slopes"):
        forest.attention(batch.q, cache, alibi_slopes=torch.ones(2, HEADS_Q, device=DEVICE))
    with pytest.raises(ValueError, match="cache.page_table is another tensor"):
        forest.attention(batch.q, KvCache(cache.k, cache.v, table.clone(), cache.seqlens))
    with pytest.raises(ValueError, match="pages of 32 keys"):
        forest.attention(batch.q, KvCache(cache.k.view(-1, 32, HEADS_KV, DIM), cache.v, table, cache.seqlens))
    with pytest.raises(ValueError, match="q has shape"):
        forest.attention(batch.q[:1], cache)
    with pytest.raises(TypeError, match="seqlens is torch.int64"):
        Forest.from_page_table(table, cache.seqlens.long(), 16)
    with pytest.raises(ValueError, match="seqlens has 1 entries; it must have 2"):
        Forest.from_page_table(table, cache.seqlens[:1], 16)
    with pytest.raises(ValueError, match="room for 0 keys"):
        Forest.from_page_table(table[:0], cache.seqlens[:0], 16)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        forest.attention(batch.q, cache, no_such=1)
