# SPDX-License-Identifier: Apache-2.0
"""Every builder of bands, documents, one sequence and trees against the rule it stands for, written here a second time.

FLASHMASK_COMMAND names the `flashmask` program; without it the comparisons with C++ are skipped. The other builders:
test_model_masks.py.
"""

import random

import pytest
import torch
from builder_checks import (
    LENGTHS,
    check,
    check_cpp,
    dense,
    document_rules,
    documents_of,
    draw_lengths,
    from_cpp,
    ways_to_give,
)
from flashmask import UnrepresentableMaskError, masks

# --- Bands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, keys", [(0, 0), (1, 1), (7, 7), (5, 9), (9, 5), (0, 4), (4, 0)])
def test_bands(rows, keys):
    check(masks.full(rows, keys), rows, keys, lambda i, j: True)
    check(masks.causal(rows, keys), rows, keys, lambda i, j: j <= i + keys - rows)
    check(masks.causal(rows, keys, q_offset=2), rows, keys, lambda i, j: j <= i + 2)
    for left, right in ((-1, -1), (0, 0), (3, 0), (-1, 2), (2, -1), (100, 100)):
        for offset in (None, 0, -3):
            at = keys - rows if offset is None else offset
            mask = masks.sliding_window(rows, keys, left, right, q_offset=offset)
            check(
                mask,
                rows,
                keys,
                lambda i, j: (left == -1 or i + at - left <= j) and (right == -1 or j <= i + at + right),
            )


def test_bands_as_in_cpp():
    check_cpp(masks.full(7), "full", 7)
    check_cpp(masks.causal(7, q_offset=-2), "causal", 7, q_offset=-2)
    check_cpp(masks.sliding_window(9, 9, 3, 1), "sliding_window", 9, left=3, right=1)


# --- Documents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS)
def test_documents(lengths):
    doc = documents_of(lengths)
    for build, rule in document_rules(doc).items():
        for given in ways_to_give(lengths):
            if build is masks.causal_blockwise and lengths and lengths[-1] == 0 and "ids" not in "".join(given):
                continue  # here an empty block is the last one
            check(build(**given), len(doc), len(doc), rule)


def test_documents_drawn(rng):
    for _ in range(10):
        lengths = draw_lengths(rng)
        doc = documents_of(lengths)
        for build, rule in document_rules(doc).items():
            if build is masks.causal_blockwise and lengths and lengths[-1] == 0:
                continue
            check(build(seqlens=torch.tensor(lengths, dtype=torch.int64)), len(doc), len(doc), rule)


@pytest.mark.parametrize("family", ["causal_document", "document", "causal_blockwise"])
@pytest.mark.parametrize("lengths", [[5], [0, 3, 0, 0, 4, 0], [2, 7, 1, 0, 5]])
def test_documents_as_in_cpp(family, lengths):
    check_cpp(getattr(masks, family)(seqlens=lengths), family, sum(lengths), lengths=lengths)


def test_the_last_block_may_be_empty_and_takes_what_follows():
    check_cpp(masks.causal_blockwise(seqlens=[3, 4, 0]), "causal_blockwise", 7, lengths=[3, 4, 0])
    block = [0, 0, 1, 1, 1, 2, 2, 2]
    check(
        masks.causal_blockwise(seqlens=[2, 3, 1], seqlen=8),
        8,
        8,
        lambda i, j: j <= i and (block[i] == block[j] or block[i] == 2),
    )


def test_tokens_past_the_last_document_are_hidden():
    doc = [0, 0, 0, 1, 1, None, None]
    inside = lambda i, j: doc[i] is not None and doc[i] == doc[j]  # noqa: E731
    check(masks.document([0, 3, 5], seqlen=7), 7, 7, inside)
    check(masks.causal_document(seqlens=[3, 2], seqlen=7), 7, 7, lambda i, j: inside(i, j) and j <= i)
    check(
        masks.prefix_lm_document(seqlens=[3, 2], prefix=[2, 1], seqlen=7),
        7,
        7,
        lambda i, j: inside(i, j) and (j <= i or j < 2 or j == 3),
    )
    check(masks.document([0], seqlen=2), 2, 2, lambda i, j: False)


def test_documents_of_a_batch():
    lengths = torch.tensor([[2, 3, 0], [1, 1, 2]])
    for given in (
        {"seqlens": lengths, "seqlen": 5},
        {"seqlens": lengths.tolist()},
        {"cu_seqlens": [[0, 2, 5, 5], [0, 1, 2, 4]]},
    ):
        mask = masks.causal_document(**given)
        assert (mask.batch, mask.heads, mask.seqlen_k) == (2, 1, 5)
        for b, doc in enumerate(([0, 0, 1, 1, 1], [0, 1, 2, 2, None])):
            check(mask, 5, 5, lambda i, j: doc[i] is not None and doc[i] == doc[j] and j <= i, batch=b)
    mask = masks.document(position_ids=torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]]))
    for b, doc in enumerate(([0, 0, 1, 1], [0, 1, 1, 1])):
        check(mask, 4, 4, lambda i, j: doc[i] == doc[j], batch=b)


def test_prefix_lm_document(rng):
    for _ in range(10):
        lengths = draw_lengths(rng)
        prefix = [rng.randint(0, length) for length in lengths]
        doc = documents_of(lengths)
        begin = [sum(lengths[:n]) for n in doc]
        rule = lambda i, j: doc[i] == doc[j] and (j <= i or j < begin[j] + prefix[doc[j]])  # noqa: E731
        check(masks.prefix_lm_document(seqlens=lengths, prefix=prefix), len(doc), len(doc), rule)
    given = {"lengths": [4, 0, 3], "prefix": [2, 0, 3]}
    check_cpp(
        masks.prefix_lm_document(seqlens=given["lengths"], prefix=given["prefix"]), "prefix_lm_document", 7, **given
    )
    ids = masks.prefix_lm_document(doc_ids=[7, 7, 7, 7, 1, 1, 1], prefix=[2, 3])
    assert torch.equal(ids.to_dense()[0], from_cpp("prefix_lm_document", 7, **given))


def test_shared_question(rng):
    for _ in range(10):
        groups = [(rng.randint(0, 5), draw_lengths(rng, 4, 4)) for _ in range(rng.randint(0, 3))]
        segments = [
            (g, a)
            for g, (question, answers) in enumerate(groups)
            for a, length in enumerate([question, *answers])
            for _ in range(length)
        ]
        rule = lambda i, j: j <= i and segments[i][0] == segments[j][0] and segments[j][1] in (0, segments[i][1])  # noqa: E731
        check(masks.shared_question(groups), len(segments), len(segments), rule)
    # It is a tree of two levels.
    mask = masks.shared_question(
        seqlens=torch.tensor([3, 2, 0, 2, 1, 4]), is_question=torch.tensor([1, 0, 0, 0, 1, 0]) != 0, seqlen=12
    )
    check_cpp(mask, "prefix_tree", 12, parents=[-1, 0, 0, 0, -1, 4], lengths=[3, 2, 0, 2, 1, 4])


# --- One sequence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen", [0, 1, 11])
def test_global_sliding_window(seqlen):
    for tokens, window in ((0, 0), (3, 2), (1, 50), (50, 1), (2, 0)):
        mask = masks.global_sliding_window(seqlen, tokens, window)
        check(mask, seqlen, seqlen, lambda i, j: i < tokens or j < tokens or abs(i - j) <= window)
        check_cpp(mask, "global_sliding_window", seqlen, **{"global": tokens}, window=window)


@pytest.mark.parametrize("seqlen", [0, 1, 9])
def test_prefix_lm_causal(seqlen):
    for prefix in {0, min(1, seqlen), seqlen // 2, seqlen}:
        mask = masks.prefix_lm_causal(seqlen, prefix)
        check(mask, seqlen, seqlen, lambda i, j: j <= i or j < prefix)
        check_cpp(mask, "prefix_lm_causal", seqlen, prefix=prefix)
    batched = masks.prefix_lm_causal(seqlen, torch.tensor([0, seqlen]))
    check(batched, seqlen, seqlen, lambda i, j: j <= i, batch=0)
    check(batched, seqlen, seqlen, lambda i, j: True, batch=1)


@pytest.mark.parametrize("spans", [[], [(0, 10)], [(2, 5), (5, 5), (5, 6), (9, 10)], [(3, 3)], [(0, 0), (0, 4)]])
def test_qk_sparse(spans):
    end_of = [next((end for begin, end in spans if begin <= j < end), 0) for j in range(10)]
    for dropped in (spans, torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)):
        mask = masks.qk_sparse(10, dropped)
        check(mask, 10, 10, lambda i, j: j <= i and not (end_of[j] and i < end_of[j]))
    if spans:
        check_cpp(mask, "qk_sparse", 10, spans=[x for span in spans for x in span])


def test_eviction(rng):
    for shape in ((13,), (2, 13), (2, 3, 13)):
        at = torch.randint(-2, 18, shape, generator=torch.Generator().manual_seed(rng.randint(0, 99)))
        mask = masks.eviction(at)
        rows = at.reshape(-1, 1, 13) if at.ndim < 3 else at
        assert (mask.batch, mask.heads) == tuple(rows.shape[:2])
        for b in range(mask.batch):
            for h in range(mask.heads):
                check(mask, 13, 13, lambda i, j: j <= i and i < rows[b, h, j], batch=b, head=h)
    at = [rng.randint(0, 9) for _ in range(9)]
    check_cpp(masks.eviction(at), "eviction", 9, evicted_at=at)


@pytest.mark.parametrize("seqlen", [0, 1, 2, 3, 17, 64])
def test_random_eviction(seqlen):
    evictions = set()
    for seed in range(5):
        mask = masks.random_eviction(seqlen, seed)
        assert torch.equal(mask.bounds, masks.random_eviction(seqlen, seed).bounds)
        lts = mask.bounds[0, 0, :, 0].tolist()
        evictions.add(tuple(lts))
        # Each row from the middle on evicts exactly one key, one that came before it.
        first = max(seqlen // 2, 1)
        assert sorted(row for row in lts if row < seqlen) == list(range(first, seqlen))
        assert all(row > j for j, row in enumerate(lts))
    assert seqlen < 17 or len(evictions) == 5


def test_random_eviction_is_uniform():
    # The first eviction is drawn among 16 keys: over 1,024 seeds each is hit 64 times, give or take.
    first = torch.stack([masks.random_eviction(32, seed).bounds[0, 0, :, 0] for seed in range(1024)]).eq(16).sum(0)
    assert first[:16].sum() == 1024 and first[:16].min() > 34 and first[:16].max() < 96


def test_hash_sparse(rng):
    for _ in range(15):
        rows, keys, buckets, causal = rng.randint(0, 12), rng.randint(0, 12), rng.randint(1, 5), rng.random() < 0.5
        order = rng.sample(range(buckets), buckets)
        query = sorted((rng.randrange(buckets) for _ in range(rows)), key=order.index)
        key = [rng.randrange(buckets + 1) for _ in range(keys)]
        check(
            masks.hash_sparse(query, key, causal),
            rows,
            keys,
            lambda i, j: query[i] == key[j] and (not causal or j <= i + keys - rows),
        )


def test_hash_sparse_of_any_order(rng):
    fits = 0
    for _ in range(150):
        seqlen, causal = rng.randint(1, 6), rng.random() < 0.5
        query, key = ([rng.randrange(3) for _ in range(seqlen)] for _ in "qk")
        rule = lambda i, j: query[i] == key[j] and (not causal or j <= i)  # noqa: E731
        visible = dense(seqlen, seqlen, rule)
        # Rows that the band does not hide, as runs of hidden ones.
        runs = [
            sum(
                not visible[i, j] and (i == (j if causal else 0) or bool(visible[i - 1, j]))
                for i in range(j if causal else 0, seqlen)
            )
            for j in range(seqlen)
        ]
        if max(runs) <= 2:
            fits += 1
            check(masks.hash_sparse(torch.tensor(query), torch.tensor(key), causal), seqlen, seqlen, rule)
        else:
            column = next(j for j, n in enumerate(runs) if n > 2)
            with pytest.raises(
                UnrepresentableMaskError, match=f"column {column} needs {runs[column]}.*sort the queries"
            ) as error:
                masks.hash_sparse(query, key, causal)
            assert error.value.column == column
    assert 20 < fits < 150


def test_hash_sparse_as_in_cpp(rng):
    query, key = (sorted(rng.randrange(4) for _ in range(10)) for _ in "qk")
    for causal in (False, True):
        check_cpp(
            masks.hash_sparse(query, key, causal),
            "hash_sparse",
            10,
            query_buckets=query,
            key_buckets=key,
            causal=causal,
        )


# --- Trees ----------------------------------------------------------------------------------------------


def draw_tree(rng, nodes):
    parents, path = [], []
    for n in range(nodes):
        path = path[: rng.randint(0, len(path))]
        parents.append(path[-1] if path else -1)
        path.append(n)
    return parents


def is_ancestor(parents, ancestor, node):
    while node != -1 and node != ancestor:
        node = parents[node]
    return node == ancestor


def test_prefix_tree(rng):
    for nodes in (0, 1, 2, 5, 12, 17):
        parents = draw_tree(rng, nodes)
        lengths = [rng.choice((0, 1, 3)) for _ in range(nodes)]
        node = documents_of(lengths)
        rule = lambda i, j: j <= i and is_ancestor(parents, node[j], node[i])  # noqa: E731
        mask = masks.prefix_tree(parents, lengths)
        check(mask, len(node), len(node), rule)
        assert torch.equal(
            mask.bounds,
            masks.prefix_tree(
                torch.tensor(parents, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int32)
            ).bounds,
        )
        check(masks.prefix_tree(parents), nodes, nodes, lambda i, j: is_ancestor(parents, j, i))
        begin = [sum(lengths[:n]) for n in range(nodes)]
        end = [max(begin[m] + lengths[m] for m in range(nodes) if is_ancestor(parents, n, m)) for n in range(nodes)]
        check(masks.prefix_tree_from_intervals(begin, end), len(node), len(node), rule)
        check(
            masks.prefix_tree_from_intervals(
                torch.tensor(begin, dtype=torch.int64), torch.tensor(end, dtype=torch.int64), seqlen=len(node) + 2
            ),
            len(node) + 2,
            len(node) + 2,
            lambda i, j: max(i, j) < len(node) and rule(i, j),
        )
        if nodes > 1:
            check_cpp(mask, "prefix_tree", len(node), parents=parents, lengths=lengths)


def test_prefix_tree_deep_and_wide():
    chain = list(range(-1, 40))
    check(masks.prefix_tree(chain), 41, 41, lambda i, j: j <= i)
    check(masks.prefix_tree([-1] + [0] * 30), 31, 31, lambda i, j: j in (0, i))


def test_prefix_tree_batch():
    mask = masks.prefix_tree(torch.tensor([[-1, 0, 0], [-1, -1, -1]]), torch.tensor([[2, 1, 1], [2, 1, 0]]), seqlen=4)
    check(mask, 4, 4, lambda i, j: j <= i and (j, i) != (2, 3), batch=0)
    check(mask, 4, 4, lambda i, j: j <= i < 3 and (j < 2) == (i < 2), batch=1)


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2], [-1, 0, -1, 0], [-1, 0, 1, 0, 1], [-1, 0, 0, 1]])
def test_prefix_tree_refuses(parents):
    with pytest.raises(ValueError, match="parents|depth-first"):
        masks.prefix_tree(parents)


def test_intervals_that_do_not_nest_are_refused():
    def nests(tin, tout):
        """The rule of the C++ builder: own tokens, then children, without gaps."""
        written, around = 0, [sum(tout) + 9]
        for n, (begin, end) in enumerate(zip(tin, tout)):
            while len(around) > 1 and around[-1] == written:
                around.pop()
            if begin != written or end < begin or end > around[-1]:
                return False
            written = tin[n + 1] if n + 1 < len(tin) and tin[n + 1] < end else end
            if written < begin:
                return False
            around.append(end)
        return all(end == written for end in around[1:])

    rng = random.Random(1)
    seen = set()
    for _ in range(1200):
        nodes = rng.randint(1, 4)
        tin = [0, *sorted(rng.randint(0, 4) for _ in range(nodes - 1))]
        tout = [min(5, begin + rng.randint(0, 4)) for begin in tin]
        want = nests(tin, tout)
        seen.add((nodes, want))
        try:
            masks.prefix_tree_from_intervals(tin, tout)
            got = True
        except ValueError:
            got = False
        assert got == want, (tin, tout)
    assert len(seen) == 7  # one node always nests, if it begins at 0
