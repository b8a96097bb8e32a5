# SPDX-License-Identifier: Apache-2.0
"""A Forest against the plain call over the same cache, and what it refuses."""

import dataclasses
import itertools
import os

import pytest
import torch
from devices import DEVICE, ON_CUDA, cuda_only
from flashmask import masks
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


def tree(page_size, requests=9, depth=6, most_rows=3):
    """A random tree of pages: each request goes on from some prefix of an earlier one's, in any order."""
    paths, fresh = [[0]], itertools.count(1)
    for _ in range(requests - 1):
        parent = paths[torch.randint(len(paths), ()).item()]
        kept = parent[: torch.randint(len(parent) + 1, ()).item()]
        paths.append(kept + [next(fresh) for _ in range(torch.randint(1, depth, ()).item())])
    paths = [paths[i] for i in torch.randperm(requests)]
    keys = [torch.randint((len(p) - 1) * page_size, len(p) * page_size + 1, ()).item() for p in paths]
    rows = [torch.randint(0, most_rows + 1, ()).item() for _ in paths]
    return draw(page_size, paths, keys, rows)


def check(batch, forest=None, mask=None, **options):
    """Asserts that out and lse are the plain call's."""
    forest = forest or batch.forest(mask=mask)
    every = {"return_softmax_lse": True, **options}
    wanted = flashmask_with_kvcache(batch.q, batch.cache, mask, cu_seqlens_q=batch.cu_seqlens_q, **every)
    out, lse = forest.attention(batch.q, batch.cache, mask, **every)
    for got, want in zip((out, lse), wanted):
        torch.testing.assert_close(got, want, **TOLERANCE)
    in_order = forest.attention(batch.q[forest.order], batch.cache, mask, in_order=True, **every)
    assert torch.equal(in_order[0][forest.places], out) and torch.equal(in_order[1][:, forest.places], lse)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_random_trees_equal_the_plain_call(page_size, seed):
    torch.manual_seed(seed)
    batch = tree(page_size)
    check(batch)
    check(batch, mask=SequenceMask(window_size=(page_size + 2, 0)))


@pytest.mark.parametrize("group", [1, 2, 8, 30])
@pytest.mark.parametrize("rows", [1, 3])
def test_prefixes_of_all_of_groups_and_of_none(group, rows):
    """More requests than a tile has rows: pages of all, of neighbours, and of one."""
    torch.manual_seed(group)
    requests, fresh = 75, itertools.count(1)
    groups = [[next(fresh) for _ in range(9)] for _ in range(-(-requests // group))]
    paths = [[0, *groups[n // group], *(next(fresh) for _ in range(1 + n % 9))] for n in range(requests)]
    paths = [paths[n] for n in torch.randperm(requests)]
    keys = [len(path) * 16 - torch.randint(10, ()).item() for path in paths]
    batch = draw(16, paths, keys, [rows] * requests)
    forest = Forest.from_page_table(batch.cache.page_table, batch.cache.seqlens, 16, rows=rows)
    q = batch.q.unflatten(0, (requests, rows))
    for mask in (None, SequenceMask(window_size=(100, 0))):
        wanted = flashmask_with_kvcache(q, batch.cache, mask)
        got = forest.attention(q, batch.cache, mask)
        torch.testing.assert_close(got, wanted, **TOLERANCE)
        assert torch.equal(forest.attention(q, batch.cache, mask, max_ctas=3 if ON_CUDA else 0), got)


def integers(*shape, least=0, most):
    return torch.randint(least, most + 1, shape, dtype=torch.int32).to(DEVICE)


def choice(options):
    return options[torch.randint(len(options), ()).item()]


def random_vectors(batch, causal, vectors, layout, heads):
    """Vectors that hide keys from and until rows near those of the calls, and for good."""
    pages, page_size = batch.cache.k.shape[:2]
    requests, columns = batch.cache.page_table.shape[0], int(batch.cache.seqlens.max())  # some keys have none
    lead = (pages, page_size, heads) if layout == "pages" else (choice((1, requests)), heads, columns)
    bounds = integers(*lead, vectors, most=columns + 4)
    # Most starts are for good and most ends 0, so that rows see something, and pages are shared.
    starts = [0] if causal or vectors == 2 else [0, 2]
    bounds[..., starts] = torch.where(torch.rand(*lead, 1).to(DEVICE) < 0.8, 2**31 - 1, bounds[..., starts])
    if vectors > 1 and not (causal or vectors == 4):
        bounds[..., 1] = torch.where(torch.rand(lead).to(DEVICE) < 0.8, 0, bounds[..., 1])
    return SequenceMask(causal, bounds=bounds, key_layout=layout)


@pytest.mark.parametrize("heads", [1, HEADS_KV])
@pytest.mark.parametrize("layout", ["sequences", "pages"])
@pytest.mark.parametrize("causal, vectors", [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_vectors(causal, vectors, layout, heads):
    for page_size in (1, 4, 16):
        batch = tree(page_size, most_rows=9)
        mask = random_vectors(batch, causal, vectors, layout, heads)
        check(batch, mask=mask)
        check(batch, mask=mask.replace(window_size=(page_size + 2, -1)))


@pytest.mark.parametrize("window", [(-1, -1), (9, 3), (-1, 2), (5, -1)])
def test_rows_that_see_later_keys(window):
    for page_size in (1, 4, 16):
        check(tree(page_size, most_rows=9), mask=SequenceMask(False, window))


def random_tail(batch, drafts, bits):
    """Trees of drafts whose parents come before them or anywhere, or any bits; of some lengths."""
    requests = len(batch.rows)
    if bits == "any":
        return {"tail": masks.tail_from_dense(torch.rand(requests, drafts, drafts).to(DEVICE) < choice((0.05, 0.4)))}
    parents = torch.stack([(torch.rand(requests) * (t + 1)).int() - 1 for t in range(drafts)], 1)
    if bits == "shuffled":
        names = torch.randperm(drafts + 1).int()  # the last is the name of the root
        names = torch.cat((names[names != drafts], torch.tensor([-1], dtype=torch.int32)))
        parents = names[parents][:, names[:-1].argsort()]
    tail, depth = masks.draft_tree(parents.to(DEVICE))
    return {"tail": tail, "tail_depth": choice((None, depth))}


@pytest.mark.parametrize("bits", ["ascending", "shuffled", "any"])
@pytest.mark.parametrize("causal", [True, False])
def test_tails(causal, bits):
    for page_size, drafts in itertools.product((1, 4, 16), (1, 7, 70)):
        batch = tree(page_size, depth=2 + 70 // page_size, most_rows=choice((drafts, drafts + 5)))
        lengths = choice((None, integers(len(batch.rows), most=drafts + 2)))
        mask = SequenceMask(causal, tail_lens=lengths, **random_tail(batch, drafts, bits))
        check(batch, mask=mask)
        check(batch, mask=mask.replace(window_size=(5, -1)), alibi_slopes=torch.rand(HEADS_Q).to(DEVICE))


def test_trees_list_their_pages_once():
    batch = draw(16, [[0, 1, 2, 3], [0, 1, 4, 5]], [56, 60], [24, 24])
    tail = random_tail(batch, 24, "shuffled")["tail"]
    mask = SequenceMask(tail=tail)
    forest = batch.forest(mask=mask)
    assert distinct_pages(forest) == 2 + 2 + 2
    check(batch, forest, mask)


@pytest.mark.parametrize("layout", ["sequences", "pages"])
def test_positions(layout):
    for page_size in (1, 4, 16):
        batch = tree(page_size, most_rows=9)
        pages, most = batch.cache.k.shape[0], int(batch.cache.seqlens.max())
        q_pos = integers(len(batch.q), most=most)
        shape = (pages, page_size) if layout == "pages" else (choice((1, len(batch.rows))), most - 1)
        for k_pos in (None, integers(*shape, most=most)):
            mask = SequenceMask(q_pos=q_pos, k_pos=k_pos, key_layout=layout)
            check(batch, mask=mask)
            check(batch, mask=mask.replace(window_size=(5, -1)), alibi_slopes=torch.rand(HEADS_Q).to(DEVICE))
            check(batch, mask=mask.replace(causal=False, window_size=(5, 3)))


@pytest.mark.parametrize("row_blocks", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_blocks(rows, row_blocks):
    batch = tree(16, requests=4, depth=40, most_rows=rows)
    for requests, heads in ((1, 1), (4, HEADS_KV)):
        blocks = torch.rand(requests, heads, row_blocks, 4).to(DEVICE) < 0.6
        for causal in (True, False):
            check(batch, mask=SequenceMask(causal, block_mask=blocks))


def test_masks_of_everything():
    """Vectors by key head beside a tail, blocks or positions."""
    for page_size in (1, 4, 16):
        batch = tree(page_size, depth=2 + 40 // page_size, most_rows=12)
        for causal, vectors in ((True, 2), (False, 4)):
            mask = random_vectors(batch, causal, vectors, "sequences", HEADS_KV)
            blocks = torch.rand(len(batch.rows), HEADS_KV, 1, 2).to(DEVICE) < 0.8
            check(batch, mask=mask.replace(**random_tail(batch, 8, "ascending"), block_mask=blocks))
            q_pos = integers(len(batch.q), most=100)
            check(batch, mask=mask.replace(q_pos=q_pos, block_mask=blocks, window_size=(20, -1)))


def hidden_from(rows, *keys, most):
    """Vectors by sequences that hide keys from these rows on, for good."""
    bounds = torch.full((len(rows), 1, most, 1), 2**31 - 1, dtype=torch.int32)
    for request, (row, hidden) in enumerate(zip(rows, keys)):
        bounds[request, 0, hidden] = row
    return SequenceMask(bounds=bounds.to(DEVICE), key_layout="sequences")


def test_pages_are_shared_where_rows_see_them_alike():
    batch = draw(16, [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 5]], [60, 60, 60], [1, 1, 1])
    everywhere, nowhere = slice(0, 16), slice(0, 0)
    for keys, wanted in (
        ((nowhere, nowhere, nowhere), 3 + 3),
        ((everywhere,) * 3, 2 + 3),  # nothing sees page 0, so it is not read
        ((nowhere, slice(17, 20), slice(17, 20)), 2 + 2 + 3),
        ((slice(5, 7), slice(17, 20), slice(33, 40)), 2 + 3 + 2 + 3),
    ):
        for mask in (hidden_from([50] * 3, *keys, most=64), hidden_from([50] * 3, *keys, most=40)):
            forest = batch.forest(mask=mask)
            assert distinct_pages(forest) == wanted
            check(batch, forest, mask)


def test_windows_by_vectors_share_what_they_show():
    """First tokens and a window, of requests of several lengths."""
    shared = list(range(20))
    batch = draw(16, [[*shared, 20 + n] for n in range(6)], [320 + 16 * n % 17 for n in range(6)], [1] * 6)
    key = torch.arange(336, dtype=torch.int32)
    bounds = torch.where(key < 4, 2**31 - 1, key + 100)[None, None, :, None].to(DEVICE)
    mask = SequenceMask(bounds=bounds, key_layout="sequences")
    forest = batch.forest(mask=mask)
    assert distinct_pages(forest) <= 1 + 8 + 6 * 2
    check(batch, forest, mask)


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
    for kind in ("causal", "window", "vectors", "blocks", "positions"):
        batch = tree(page_size, depth=700 // page_size)
        most, requests = int(batch.cache.seqlens.max()), len(batch.rows)
        hidden = [slice(*sorted(torch.randint(most, (2,)).tolist())) for _ in range(requests)]
        mask = {
            "causal": None,
            "window": SequenceMask(window_size=(150, 0)),
            "vectors": hidden_from([0, most // 2] * (requests // 2) + [most], *hidden, most=most),
            "blocks": SequenceMask(block_mask=torch.rand(1, HEADS_KV, 1, most // 128).to(DEVICE) < 0.7),
            "positions": SequenceMask(
                causal=False, window_size=(most // 2, 50), q_pos=integers(len(batch.q), most=most)
            ),
        }[kind]
        forest = batch.forest(mask=mask, **invariance)
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


@pytest.mark.skipif(os.environ.get("FLASHMASK_KERNELS", "auto") not in ("auto", "sm90"), reason="they promise L1 alone")
def test_bits_of_requests_that_see_their_first_split_otherwise():
    """The others have to be their own then, too: a row's splits are added in their order."""
    batch = draw(128, [[*range(8), 8 + n] for n in range(4)], [1030] * 4, [1] * 4)
    mask = hidden_from([0] * 4, *[slice(0, 10 * n) for n in range(4)], most=128)
    invariance = {"batch_invariant": True, "split_size": 128}
    wanted = flashmask_with_kvcache(batch.q, batch.cache, mask, cu_seqlens_q=batch.cu_seqlens_q, **invariance)
    assert torch.equal(batch.forest(mask=mask, **invariance).attention(batch.q, batch.cache), wanted)
    assert distinct_pages(batch.forest(mask=mask)) == 4 + 7 + 4  # with other bits


def test_stores_into_a_mask_count_from_the_next_update():
    batch = draw(16, [[0, 1, 2], [0, 1, 3]], [40, 44], [1, 1])
    bounds = torch.full((len(batch.cache.k), 16, 1, 1), 2**31 - 1, dtype=torch.int32).to(DEVICE)
    mask = SequenceMask(bounds=bounds, key_layout="pages")
    forest = batch.forest(mask=mask)
    plan = forest.plan(HEADS_Q, HEADS_KV, DIM)
    for hidden, pages in ((0, 4), (3, 4), (16, 3)):  # a page of which nothing is seen is not read
        bounds[batch.cache.page_table[0, 0].long(), :hidden] = 30
        forest.update()
        forest.update_plan(plan, batch.cache)
        assert distinct_pages(forest) == pages
        check(batch, forest, mask)
        wanted = flashmask_with_kvcache(batch.q, batch.cache, mask, cu_seqlens_q=batch.cu_seqlens_q)
        torch.testing.assert_close(forest.attention(batch.q, batch.cache, plan=plan), wanted, **TOLERANCE)


def test_bad_values_stay_inside():
    batch = draw(16, [[0, 1, 2], [0, 1, 3]], [1000, -5], [1, 1])
    batch.cache.page_table[0, 0] = 10**6
    for cu_seqlens_q in ([0, 5, 1], [-3, 1, 2], [2, 2, 2]):
        forest = batch.forest(cu_seqlens_q=torch.tensor(cu_seqlens_q).int().to(DEVICE))
        assert sorted(forest._places.tolist()) == [0, 1]
        assert torch.isfinite(forest.attention(batch.q, batch.cache)).all()
    bad = {"dtype": torch.int32, "device": DEVICE}
    tail = {"tail": torch.full((2, 3, 1), -1, **bad), "tail_depth": torch.full((2, 3), 10**9, **bad)}
    for mask in (
        SequenceMask(tail_lens=torch.tensor([-7, 10**9], **bad), **tail),
        SequenceMask(bounds=torch.full((1, 1, 99, 1), -(2**31), **bad), key_layout="sequences"),
    ):
        forest = batch.forest(mask=mask)
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


def step_mask(kind, requests):
    if kind == "causal":
        return None
    if kind == "tail":
        tail, depth = masks.draft_tree(torch.tensor([[-1, 0, 0, 1]] * requests).to(DEVICE))
        return SequenceMask(tail=tail, tail_depth=depth, window_size=(30, 0))
    return hidden_from([40] * requests, *[slice(3 * n, 20) for n in range(requests)], most=64)


@cuda_only
@pytest.mark.parametrize("kind", ["causal", "tail", "vectors"])
def test_one_graph_serves_every_step(kind):
    torch.manual_seed(4)
    batch = draw(16, [[0, 1, 2, 3], [0, 1, 4, 5], [0, 6, 7]], [33, 33, 17], [4, 1, 2])
    mask = step_mask(kind, 3)
    forest = batch.forest(mask=mask)
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
        check(batch, forest, mask)


def test_refusals():
    batch = draw(16, [[0, 1], [0, 2]], [20, 20], [1, 1])
    cache, forest = batch.cache, batch.forest()
    table = cache.page_table
    bounds, tail = (torch.zeros(*shape, dtype=torch.int32, device=DEVICE) for shape in ((1, 1, 32, 1), (2, 1, 1)))
    for mask, message in (
        (SequenceMask(causal=False), "mask.causal is False with window_size"),
        (SequenceMask(bounds=bounds), "mask.bounds is given"),
        (SequenceMask(tail=tail), "mask.tail is given"),
    ):
        with pytest.raises(ValueError, match=message):
            forest.attention(batch.q, cache, mask)
    own = SequenceMask(bounds=bounds, key_layout="sequences")
    with pytest.raises(ValueError, match="mask.bounds is another tensor"):
        batch.forest(mask=own).attention(batch.q, cache, own.replace(bounds=bounds.clone()))
    with pytest.raises(ValueError, match="mask.bounds is None"):
        batch.forest(mask=own).attention(batch.q, cache, SequenceMask())
    q_pos = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    blocks = torch.ones(1, 3, 9, 1, dtype=torch.bool, device=DEVICE)
    for refused, message in (
        (SequenceMask(tail=tail, q_pos=q_pos), "mask.tail is given beside mask.q_pos"),
        (SequenceMask(False, (-1, 3), tail=tail), r"mask.window_size is \(-1, 3\) beside mask.tail"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            batch.forest(mask=refused)
    for wrong, message in (
        (SequenceMask(bounds=bounds), "mask.key_layout is 'auto' beside bounds or k_pos"),
        (own.replace(causal=False), r"mask.bounds has shape \[1, 1, 32, 1\]"),
        (own.replace(bounds=bounds.expand(2, 2, 32, 1), block_mask=blocks), "mask.bounds has 2 heads and mask.block_m"),
        (SequenceMask(tail_lens=q_pos), "mask.tail_lens is given and mask.tail is not"),
        (SequenceMask(k_pos=bounds[0, ..., 0], key_layout="sequences"), "mask.k_pos is given and mask.q_pos is not"),
        (SequenceMask(q_pos=q_pos[:1]), r"mask.q_pos has shape \[1\]; the forest is for \[2\] rows"),
    ):
        with pytest.raises(ValueError, match=message):
            batch.forest(mask=wrong)
    with pytest.raises(TypeError, match="mask.q_pos is torch.int64"):
        batch.forest(mask=SequenceMask(q_pos=q_pos.long()))
    with pytest.raises(TypeError, match="mask is a dict"):
        batch.forest(mask={})
    for refused, name in (
        (SequenceMask(tail=tail), "tail"),
        (own.replace(bounds=bounds.expand(1, 1, 32, 2)), "bounds"),
    ):
        with pytest.raises(UnsupportedError, match=f"mask.{name} is given with batch_invariant"):
            batch.forest(mask=refused, batch_invariant=True, split_size=128)
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
