# SPDX-License-Identifier: Apache-2.0
"""Every builder against the rule it stands for, written here a second time, and against the C++ library's.

FLASHMASK_COMMAND names the `flashmask` program; without it the comparisons with C++ are skipped.
"""

import json
import os
import random
import subprocess

import numpy as np
import pytest
import torch
from flashmask import Mask, UnrepresentableMaskError, masks

COMMAND = os.environ.get("FLASHMASK_COMMAND")
LENGTHS = [[], [0], [1], [5], [0, 3, 0, 0, 4, 0], [1, 1, 1], [3, 0], [2, 7, 1, 0, 5]]


@pytest.fixture(params=range(3))
def rng(request):
    return random.Random(request.param)


def draw_lengths(rng, documents=6, longest=9):
    return [rng.choice((0, 1, rng.randint(0, longest))) for _ in range(rng.randint(0, documents))]


def documents_of(lengths):
    """The document of each token."""
    return [n for n, length in enumerate(lengths) for _ in range(length)]


def dense(rows, keys, rule):
    return torch.tensor([[bool(rule(i, j)) for j in range(keys)] for i in range(rows)], dtype=torch.bool).reshape(
        rows, keys
    )


def check(mask, rows, keys, rule, batch=0, head=0):
    got = mask.to_dense()[batch, head]
    want = dense(rows, keys, rule)
    assert torch.equal(got, want), f"{mask}\n{want.int()}"


def from_cpp(family, seqlen, **parameters):
    """The C++ library's mask as a dense matrix [batch, rows, keys], from its vectors as JSON."""
    if not COMMAND:
        pytest.skip("FLASHMASK_COMMAND is not set")
    arguments = [
        f"{name}={','.join(map(str, value)) if isinstance(value, list) else int(value)}"
        for name, value in parameters.items()
    ]
    done = subprocess.run(
        [COMMAND, "show", family, "--seqlen", str(seqlen), "--json", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    mask = json.loads(done.stdout)["mask"]
    keys, lo, hi, offset = mask["seqlen_k"], mask["band"]["lo"], mask["band"]["hi"], mask["q_offset"]

    def hidden(vectors, default, at, i):
        begin, end = (mask.get(name) for name in vectors)
        if begin is None and end is None:
            return False
        return (begin[at] if begin else 0) <= i < (end[at] if end else mask["seqlen_q"])

    def visible(b, i, j):
        at = b * keys + j
        in_band = (lo is None or lo <= j - i - offset) and (hi is None or j - i - offset <= hi)
        return in_band and not hidden(("lts", "lte"), None, at, i) and not hidden(("uts", "ute"), None, at, i)

    return torch.stack([dense(mask["seqlen_q"], keys, lambda i, j: visible(b, i, j)) for b in range(mask["batch"])])


def check_cpp(mask, family, seqlen, **parameters):
    assert torch.equal(mask.to_dense()[:, 0], from_cpp(family, seqlen, **parameters))


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


def ways_to_give(lengths):
    """The same documents in every form that can say them."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    yield {"seqlens": lengths}
    yield {"seqlens": torch.tensor(lengths, dtype=torch.int32)}
    yield {"cu_seqlens": ends}
    yield {"cu_seqlens": torch.tensor(ends), "seqlen": ends[-1]}
    yield {"doc_ids": torch.tensor(documents_of(lengths), dtype=torch.int64) * 3 % 17}
    yield {"position_ids": [at for length in lengths for at in range(length)]}


def document_rules(doc):
    last = doc[-1] if doc else None
    return {
        masks.causal_document: lambda i, j: doc[i] == doc[j] and j <= i,
        masks.document: lambda i, j: doc[i] == doc[j],
        masks.causal_blockwise: lambda i, j: j <= i and (doc[i] == doc[j] or doc[i] == last),
    }


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


def test_attention_sink_window(rng):
    for _ in range(15):
        lengths = draw_lengths(rng)
        doc = documents_of(lengths)
        at = [t for length in lengths for t in range(length)]
        sink, window = rng.randint(0, 4), rng.choice((-1, 1, 2, 3, 50))
        rule = lambda i, j: doc[i] == doc[j] and j <= i and (window == -1 or i - j < window or at[j] < sink)  # noqa: E731
        for given in ways_to_give(lengths):
            check(masks.attention_sink_window(sink, window, **given), len(doc), len(doc), rule)
    check_cpp(
        masks.attention_sink_window(2, 3, seqlens=[6, 0, 5]),
        "attention_sink_window",
        11,
        lengths=[6, 0, 5],
        sink=2,
        window=3,
    )
    check_cpp(masks.attention_sink_window(1, -1, seqlen=7), "attention_sink_window", 7, sink=1, window=-1)
    check_cpp(masks.attention_sink_window(1, 2, seqlen=7), "attention_sink_window", 7, sink=1, window=2)


def test_block_causal(rng):
    for _ in range(15):
        lengths = draw_lengths(rng)
        doc = documents_of(lengths)
        cuts = sorted([0, *(rng.randint(0, len(doc)) for _ in range(rng.randint(0, 4))), len(doc)])
        of_blocks = [end - begin for begin, end in zip(cuts, cuts[1:])]
        block, window = documents_of(of_blocks), rng.choice((-1, 1, 2, 3, 50))
        sees = lambda back: back >= 0 and (window == -1 or back < window)  # noqa: E731
        for given in ways_to_give(lengths):
            check(
                masks.block_causal(of_blocks, window=window, **given),
                len(doc),
                len(doc),
                lambda i, j: doc[i] == doc[j] and sees(block[i] - block[j]),
            )
        at, length = [t for n in lengths for t in range(n)], rng.randint(1, 6)
        for given in ways_to_give(lengths):
            check(
                masks.block_causal(length, window=window, **given),
                len(doc),
                len(doc),
                lambda i, j: doc[i] == doc[j] and sees(at[i] // length - at[j] // length),
            )


def test_block_causal_as_in_cpp():
    check_cpp(
        masks.block_causal([4, 0, 5, 2], seqlens=[6, 0, 5], window=2),
        "block_causal",
        11,
        lengths=[6, 0, 5],
        blocks=[4, 0, 5, 2],
        window=2,
    )
    check_cpp(
        masks.block_causal(3, seqlens=[7, 0, 4], window=2), "block_causal", 11, lengths=[7, 0, 4], blocks=3, window=2
    )
    check_cpp(masks.block_causal(torch.tensor([3, 4])), "block_causal", 7, blocks=[3, 4])
    check_cpp(masks.block_causal(2, seqlen=7), "block_causal", 7, blocks=2)


def test_block_causal_of_a_batch_and_past_the_last_block():
    mask = masks.block_causal(torch.tensor([[2, 3], [1, 1]]), seqlen=5)
    check(mask, 5, 5, lambda i, j: j < 2 or i >= 2, batch=0)
    check(mask, 5, 5, lambda i, j: j <= i < 2, batch=1)


def draw_blocks(rng, lengths):
    """A block's number for each token, -1 for none; the numbers of one document may come back in the next."""
    ids = []
    for length in lengths:
        numbers, own = iter(rng.sample(range(9), 9)), []
        while len(own) < length and len(own) < 8:
            own += [rng.choice((-1, -3, next(numbers)))] * rng.randint(1, 3)
        ids += (own + [-1] * length)[:length]
    return ids


def test_causal_with_blocks(rng):
    for _ in range(15):
        lengths = draw_lengths(rng)
        doc, block = documents_of(lengths), draw_blocks(rng, lengths)
        window = rng.choice((-1, 1, 2, 3, 50))
        rule = lambda i, j: (
            doc[i] == doc[j] and (j <= i and (window == -1 or i - j < window) or block[i] == block[j] >= 0)
        )
        for given in ways_to_give(lengths):
            given.pop("seqlen", None)
            check(masks.causal_with_blocks(block, window=window, **given), len(doc), len(doc), rule)
    check(masks.causal_with_blocks([-1, 3, 3, -1, 5]), 5, 5, lambda i, j: j <= i or (i, j) == (1, 2))


def test_causal_with_blocks_as_in_cpp():
    ids = [-1, 2, 2, 2, -1, 0, 0, 7, 7, -1, -1]
    check_cpp(masks.causal_with_blocks(ids, window=2), "causal_with_blocks", 11, blocks=[1, 4, 5, 7, 7, 9], window=2)
    check_cpp(
        masks.causal_with_blocks(ids, seqlens=[5, 2, 4]),
        "causal_with_blocks",
        11,
        lengths=[5, 2, 4],
        blocks=[1, 4, 5, 7, 7, 9],
    )


def test_causal_with_blocks_of_a_batch_and_past_the_last_document():
    mask = masks.causal_with_blocks(torch.tensor([[1, 1, -1, 1], [-1, 0, 0, 0]]), seqlens=[2, 1])
    check(mask, 4, 4, lambda i, j: i < 2 and j < 2 or (i, j) == (2, 2), batch=0)
    check(mask, 4, 4, lambda i, j: j <= i < 2 or (i, j) == (2, 2), batch=1)


def parts_of(doc, block):
    """The number of the run of tokens that share a document and a block, for each token."""
    pairs = list(zip(doc, block))
    return [sum(pairs[n] != pairs[n - 1] for n in range(1, t + 1)) for t in range(len(pairs))]


def diffusion_rule(doc, part, order):
    """The definition, of places to which `order` took the tokens of [x_t | x_0]; a token without a block is hidden."""
    total = len(doc)

    def sees(row, key):
        (copy_i, i), (copy_j, j) = divmod(order[row], total), divmod(order[key], total)
        return doc[i] == doc[j] >= 0 and (copy_j == 1 and part[j] < part[i] or part[j] == part[i] and copy_i == copy_j)

    return sees


def test_block_diffusion(rng):
    for _ in range(15):
        lengths = draw_lengths(rng)
        doc = documents_of(lengths)
        cuts = sorted([0, *(rng.randint(0, len(doc)) for _ in range(rng.randint(0, 4))), len(doc)])
        of_blocks = [end - begin for begin, end in zip(cuts, cuts[1:])]
        at, length = [t for n in lengths for t in range(n)], rng.randint(1, 6)
        for blocks, part in (
            (of_blocks, parts_of(doc, documents_of(of_blocks))),
            (length, parts_of(doc, [t // length for t in at])),
        ):
            for given in ways_to_give(lengths):
                mask, order = masks.block_diffusion(blocks, **given)
                order = order.tolist()
                # Each block's noisy copy, then its clean one; that they are all of them says that it is a permutation.
                assert order == sorted(range(2 * len(doc)), key=lambda n: (part[n % len(doc)], n // len(doc), n))
                check(mask, 2 * len(doc), 2 * len(doc), diffusion_rule(doc, part, order))


def test_block_diffusion_concatenated(rng):
    fitted = 0
    for _ in range(60):
        lengths = draw_lengths(rng)
        doc, total = documents_of(lengths), sum(lengths)
        part = parts_of(doc, [t // 3 for n in lengths for t in range(n)])
        several = [d for d in set(doc) if len({part[t] for t in range(total) if doc[t] == d}) > 1]
        build = lambda: masks.block_diffusion(3, seqlens=lengths, order="concatenated")  # noqa: B023, E731
        if any(d != doc[-1] for d in several):
            first = total + doc.index(min(several))
            with pytest.raises(
                UnrepresentableMaskError,
                match=f"order 'concatenated' .* column {first} needs 3; the order 'interleaved' fits",
            ):
                build()
            continue
        fitted += 1
        mask, order = build()
        assert order.tolist() == list(range(2 * total))
        check(mask, 2 * total, 2 * total, diffusion_rule(doc, part, range(2 * total)))
    assert 0 < fitted < 60


def test_block_diffusion_as_in_cpp():
    check_cpp(
        masks.block_diffusion([4, 0, 5, 2], seqlens=[6, 0, 5])[0],
        "block_diffusion",
        22,
        lengths=[6, 0, 5],
        blocks=[4, 0, 5, 2],
    )
    check_cpp(masks.block_diffusion(3, seqlens=[7, 0, 4])[0], "block_diffusion", 22, lengths=[7, 0, 4], blocks=3)
    check_cpp(masks.block_diffusion(2, seqlen=7)[0], "block_diffusion", 14, blocks=2)
    check_cpp(
        masks.block_diffusion(2, seqlen=7, order="concatenated")[0], "block_diffusion", 14, blocks=2, concatenated=1
    )


@pytest.mark.parametrize("order", ["interleaved", "concatenated"])
def test_block_diffusion_of_a_batch_and_past_the_last_block(order):
    mask, places = masks.block_diffusion(torch.tensor([[2, 3], [1, 0]]), seqlen=5, order=order)
    assert places.shape == (2, 10)
    for batch, (doc, part) in enumerate([([0] * 5, [0, 0, 1, 1, 1]), ([0] + [-1] * 4, [0, 9, 9, 9, 9])]):
        assert sorted(places[batch].tolist()) == list(range(10))
        check(mask, 10, 10, diffusion_rule(doc, part, places[batch].tolist()), batch=batch)


@pytest.mark.parametrize("order", ["interleaved", "concatenated"])
def test_block_diffusion_past_the_last_document(order):
    mask, places = masks.block_diffusion(4, seqlens=[3], seqlen=6, order=order)
    check(mask, 12, 12, diffusion_rule([0] * 3 + [-1] * 3, [0] * 3 + [9] * 3, places.tolist()))


def test_block_diffusion_moves_tokens_and_changes_nothing_else():
    """Attention over the interleaved copies, put back, is that over [x_t | x_0] under the mask of that order."""
    concatenated, _ = masks.block_diffusion(3, seqlen=10, order="concatenated")
    interleaved, order = masks.block_diffusion(3, seqlen=10)
    visible = torch.empty(20, 20, dtype=torch.bool)
    visible[order[:, None], order] = interleaved.to_dense()[0, 0]
    assert torch.equal(visible, concatenated.to_dense()[0, 0])


def test_eagle3_ttt(rng):
    for _ in range(15):
        lengths = draw_lengths(rng)
        doc, steps = documents_of(lengths), rng.randint(1, 4)
        total = len(doc)
        rule = lambda i, j: doc[i] == doc[j] and j <= i if j < total else j % total == i  # noqa: B023, E731
        for given in ways_to_give(lengths):
            check(masks.eagle3_ttt(steps, **given), total, steps * total, rule)
    assert torch.equal(masks.eagle3_ttt(1, seqlens=[3, 4]).to_dense(), masks.causal_document(seqlens=[3, 4]).to_dense())
    check(
        masks.eagle3_ttt(3, seqlens=[2], seqlen=4),
        4,
        12,
        lambda i, j: i < 2 and j % 4 < 2 and (j <= i if j < 4 else j % 4 == i),
    )


def test_eagle3_ttt_as_in_cpp():
    square = from_cpp("eagle3_ttt", 33, steps=3, lengths=[6, 0, 5])
    assert (
        torch.equal(masks.eagle3_ttt(3, seqlens=[6, 0, 5]).to_dense()[:, 0], square[:, 22:])
        and not square[:, :22].any()
    )


def test_dflash(rng):
    for _ in range(15):
        lengths = draw_lengths(rng)
        doc, block = documents_of(lengths), rng.randint(1, 4)
        context = len(doc)
        anchors = sorted(rng.randint(0, context) for _ in range(rng.randint(0, 7)))
        rows = len(anchors) * block

        def rule(i, j):
            if j >= context:
                return (j - context) // block == i // block  # noqa: B023
            anchor = anchors[i // block]  # noqa: B023
            return j < anchor and doc[j] == doc[min(anchor, context - 1)]  # noqa: B023

        for given in ways_to_give(lengths):
            check(masks.dflash(anchors, block, **given), rows, context + rows, rule)


def test_dflash_as_in_cpp():
    square = from_cpp("dflash", 20, anchors=[2, 6, 11], block=3, lengths=[6, 0, 5])
    assert (
        torch.equal(masks.dflash([2, 6, 11], 3, seqlens=[6, 0, 5]).to_dense()[:, 0], square[:, 11:])
        and not square[:, :11].any()
    )


def test_dflash_of_a_batch_and_past_the_last_document():
    mask = masks.dflash(torch.tensor([[1, 3], [2, -1]]), 2, seqlen=3)
    own = lambda i, j: j >= 3 and (j - 3) // 2 == i // 2  # noqa: E731
    check(mask, 4, 7, lambda i, j: own(i, j) or j < (1, 3)[i // 2] and j < 3, batch=0)
    check(mask, 4, 7, lambda i, j: i < 2 and (own(i, j) or j < 2), batch=1)
    mask = masks.dflash([1, 3], 1, seqlens=torch.tensor([[3, 0], [1, 2], [2, 0]]), seqlen=3)
    for batch, seen in enumerate([((0,), (0, 1, 2)), ((), (1, 2)), ((0,), ())]):
        check(mask, 2, 5, lambda i, j: j == 3 + i or j in seen[i], batch=batch)  # noqa: B023


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


# --- Batches and other forms ------------------------------------------------------------------------------


def test_padding():
    mask = masks.padding(5, 7, [7, 0, 3], [5, 2, 0])
    for b, (keys, rows) in enumerate(((7, 5), (0, 2), (3, 0))):
        check(mask, 5, 7, lambda i, j: j < keys and i < rows, batch=b)
    check(masks.padding(5, 7, torch.tensor([4])), 5, 7, lambda i, j: j < 4)
    check_cpp(masks.padding(6, 6, [6, 2], [1, 5]), "padding", 6, key_lengths=[6, 2], query_lengths=[1, 5])


def test_from_startend():
    bounds = torch.tensor([[3, 0], [9, 2], [-5, 1]]).reshape(1, 1, 3, 2)
    check(
        masks.from_startend(bounds, seqlen_q=4),
        4,
        3,
        lambda i, j: not (i >= bounds[0, 0, j, 0] or i < bounds[0, 0, j, 1]),
    )
    check(
        masks.from_startend(bounds.int(), True),
        3,
        3,
        lambda i, j: j <= i and not bounds[0, 0, j, 0] <= i < bounds[0, 0, j, 1],
    )
    with pytest.raises(ValueError, match=r"\[batch, heads, seqlen_k, n\]"):
        masks.from_startend(bounds[0])


def runs_per_column(visible, band):
    """The most runs of hidden rows in a column beyond what (lo, hi) on j - i hides: what from_dense has to fit."""
    rows, keys = visible.shape
    most = []
    for j in range(keys):
        inside = [
            i for i in range(rows) if (band[0] is None or j - i >= band[0]) and (band[1] is None or j - i <= band[1])
        ]
        hidden = [not visible[i, j] for i in inside]
        most.append(sum(h and (n == 0 or not hidden[n - 1]) for n, h in enumerate(hidden)))
    return most


def bands_of(visible):
    seen = [(i, j) for i, j in visible.nonzero().tolist()]
    if not seen:
        return [(None, None)]
    lo, hi = min(j - i for i, j in seen), max(j - i for i, j in seen)
    return [(None, None), (None, hi), (lo, None), (lo, hi)]


def test_from_dense_exhaustively():
    """Every matrix of these sizes: at most three runs in a column, of which a band takes one if there are three."""
    for rows, keys in ((3, 3), (5, 2)):
        for number in range(2 ** (rows * keys)):
            visible = torch.tensor([number >> n & 1 for n in range(rows * keys)], dtype=torch.bool).reshape(rows, keys)
            assert torch.equal(masks.from_dense(visible).to_dense()[0, 0], visible), visible


def test_from_dense_refuses_what_does_not_fit(rng):
    refused = 0
    for _ in range(60):
        rows, keys = rng.randint(4, 9), rng.randint(1, 5)
        visible = torch.tensor([rng.random() < 0.5 for _ in range(rows * keys)]).reshape(rows, keys)
        needs = [runs_per_column(visible, band) for band in bands_of(visible)]
        if min(map(max, needs)) <= 2:
            assert torch.equal(masks.from_dense(visible).to_dense()[0, 0], visible)
        else:
            refused += 1
            best = min(needs, key=max)
            column = next(j for j, n in enumerate(best) if n > 2)
            with pytest.raises(
                UnrepresentableMaskError, match=rf"\(batch 0, head 0, column {column}\) needs {best[column]}"
            ) as error:
                masks.from_dense(visible)
            assert error.value.column == column
    assert 5 < refused < 60


def test_from_dense_names_batch_and_head():
    visible = torch.ones(2, 3, 7, 4, dtype=torch.uint8)
    visible[1, 2, ::2, 3] = 0
    visible[1, 2, 1, 3] = 1
    visible[0, 0, 2] = 0
    with pytest.raises(UnrepresentableMaskError, match=r"\(batch 1, head 2, column 3\) needs 4"):
        masks.from_dense(visible)
    visible[1, 2, :4, 3] = 1
    assert torch.equal(masks.from_dense(visible).to_dense(), visible.bool())
    assert torch.equal(
        masks.from_dense(visible.transpose(2, 3).contiguous().transpose(2, 3)).to_dense(), visible.bool()
    )


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (1, 1)])
def test_from_dense_of_nothing(shape):
    for value in (True, False):
        visible = torch.full(shape, value)
        assert torch.equal(masks.from_dense(visible).to_dense()[0, 0], visible)


@pytest.mark.parametrize(
    "build",
    [
        lambda: masks.causal(9),
        lambda: masks.causal(9, 5),
        lambda: masks.sliding_window(9, 9, 3),
        lambda: masks.sliding_window(7, 9, 2, 1),
        lambda: masks.causal_document(seqlens=[3, 6]),
        lambda: masks.sliding_window(9, 4, 2, -1, q_offset=0),
    ],
)
def test_from_dense_finds_the_small_form(build):
    mask = masks.from_dense(build().to_dense())
    assert torch.equal(mask.to_dense(), build().to_dense())
    assert mask.bounds is None or mask.bounds.shape[-1] == 1


# --- Arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: masks.causal_document(), "nothing is given; it must be one of cu_seqlens"),
        (lambda: masks.causal_document([0, 2], seqlens=[2]), "cu_seqlens and seqlens are given"),
        (lambda: masks.document(seqlens=[2, -1, 3]), r"seqlens\[1\] is -1"),
        (lambda: masks.causal_document([3, 1]), r"cu_seqlens\[0\] is 3; .* lengths go in as seqlens="),
        (lambda: masks.document(seqlens=[[3, 4], [7]]), "seqlens must be integers, nested lists of one length"),
        (
            lambda: masks.document(cu_seqlens=[0, 3, 2]),
            r"cu_seqlens\[2\] is 2; cu_seqlens must begin with 0 and ascend",
        ),
        (lambda: masks.document(cu_seqlens=[1, 3]), r"cu_seqlens\[0\] is 1"),
        (lambda: masks.document(cu_seqlens=[]), "cu_seqlens is empty"),
        (lambda: masks.eagle3_ttt(2, seqlen=-1), "seqlen is -1; it must be between 0 and 2147483647"),
        (lambda: masks.document(doc_ids=[1, 1], seqlen=3), "seqlen is 3, but doc_ids has 2 tokens"),
        (lambda: masks.document(doc_ids=[[1, 1, 2], [2, 7, 2]]), r"document id 2 comes back at \[1, 2\]"),
        (lambda: masks.document(doc_ids=[4, 4, 2, 4, 2]), r"document id 4 comes back at \[3\]"),
        (
            lambda: masks.document(seqlens=torch.tensor([2], device="meta")),
            "seqlen is missing; seqlens is not read on the host",
        ),
        (lambda: masks.prefix_lm_causal(5, 6), "prefix.* is 6; it must be between 0 and seqlen, 5"),
        (
            lambda: masks.prefix_lm_document(seqlens=[2, 2], prefix=[1]),
            "prefix has 1 entries; it needs one for each of the 2",
        ),
        (lambda: masks.prefix_lm_document(seqlens=[2, 2], prefix=[1, 3]), "between 0 and the document's length"),
        (lambda: masks.qk_sparse(9, [(4, 6), (5, 7)]), "ascending, disjoint"),
        (lambda: masks.qk_sparse(9, [(4, 10)]), "ascending, disjoint"),
        (lambda: masks.padding(4, 4, [5]), r"key_lengths\[0\] is 5; it must be between 0 and seqlen_k, 4"),
        (lambda: masks.padding(4, 4, [5, 1], [1]), "query_lengths has 1 entries and key_lengths 2"),
        (lambda: masks.padding(4, 4, []), "one entry for each batch entry"),
        (lambda: masks.shared_question(), "give groups, or both"),
        (lambda: masks.prefix_tree([-1, 0], [1]), "lengths has 1 entries; it needs one for each of the 2 nodes"),
        (lambda: masks.global_sliding_window(4, -1, 2), "global_tokens is -1"),
        (lambda: masks.attention_sink_window(-1, 2, seqlen=4), "sink is -1; it must be at least 0"),
        (lambda: masks.attention_sink_window(1, 0, seqlen=4), "window is 0; it must be at least 1, or -1 for all"),
        (lambda: masks.attention_sink_window(1, 2), "nothing is given"),
        (lambda: masks.block_causal(0, seqlen=4), "blocks is 0; a block must have at least 1 token"),
        (
            lambda: masks.block_causal([2, 3], seqlens=[4]),
            "the sum of blocks is 5; it must be at most the length .*, 4",
        ),
        (lambda: masks.block_causal([2, -1], seqlens=[4]), r"blocks\[1\] is -1; a length must be at least 0"),
        (lambda: masks.block_causal(2, seqlen=4, window=0), "window is 0; it must be at least 1, or -1 for all"),
        (
            lambda: masks.causal_with_blocks([1, 1, -1, 1]),
            r"block id 1 comes back at \[3\]; the tokens of a block must be contiguous",
        ),
        (
            lambda: masks.causal_with_blocks([[0, 1], [4, 4]], doc_ids=[1, 1, 1]),
            "seqlen is 2, but doc_ids has 3 tokens",
        ),
        (lambda: masks.causal_with_blocks(3), "block_ids is a single number"),
        (lambda: masks.causal_with_blocks([1, 1], window=0), "window is 0; it must be at least 1, or -1 for all"),
        (lambda: masks.block_diffusion(0, seqlen=4), "blocks is 0; a block must have at least 1 token"),
        (
            lambda: masks.block_diffusion(2, seqlen=4, order="sorted"),
            "order is 'sorted'; it must be 'interleaved' or 'concatenated'",
        ),
        (
            lambda: masks.block_diffusion([2, 3], seqlens=[4]),
            "the sum of blocks is 5; it must be at most the length .*, 4",
        ),
        (lambda: masks.eagle3_ttt(0, seqlen=4), "steps is 0; it must be at least 1"),
        (lambda: masks.eagle3_ttt(2), "nothing is given"),
        (lambda: masks.dflash([1], 0, seqlen=4), "block is 0; it must be at least 1"),
        (lambda: masks.dflash(1, 2, seqlen=4), "anchors is a single number"),
        (
            lambda: masks.dflash([1, 5], 2, seqlen=4),
            r"anchors\[1\] is 5; it must be at most the length of the context, 4",
        ),
        (lambda: masks.dflash([2, 3, 1], 2, seqlen=4), r"anchors\[2\] is 1; sort the blocks by anchor"),
        (
            lambda: masks.dflash([-1, 3], 2, seqlen=4),
            r"anchors\[1\] is 3; sort the blocks by anchor, negative ones last",
        ),
        (lambda: masks.sliding_window(4, 4, -2), r"window is \(-2, 0\)"),
        (lambda: masks.from_dense(torch.ones(2, 2)), "visible is torch.float32"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Every builder that takes documents, blocks or a tree together with a length.
WITH_A_LENGTH = {
    "causal_document": lambda **given: masks.causal_document(**given),
    "document": lambda **given: masks.document(**given),
    "causal_blockwise": lambda **given: masks.causal_blockwise(**given),
    "prefix_lm_document": lambda **given: masks.prefix_lm_document(prefix=[1, 2], **given),
    "attention_sink_window": lambda **given: masks.attention_sink_window(1, 2, **given),
    "block_causal": lambda **given: masks.block_causal(2, **given),
    "block_diffusion": lambda **given: masks.block_diffusion(2, **given)[0],
    "eagle3_ttt": lambda **given: masks.eagle3_ttt(2, **given),
    "dflash": lambda **given: masks.dflash([1], 2, **given),
    "causal_with_blocks": lambda seqlen, **given: masks.causal_with_blocks([-1] * seqlen, **given),
}
BEYOND = {"seqlens": ([5, 6], "the sum of seqlens is 11"), "cu_seqlens": ([0, 5, 11], r"cu_seqlens\[2\] is 11")}


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
@pytest.mark.parametrize("given", BEYOND)
@pytest.mark.parametrize("name", WITH_A_LENGTH)
def test_documents_that_go_beyond_the_length_are_refused(name, given, form):
    """None is cut silently; what is on a device cannot be looked at."""
    values, message = BEYOND[given]
    with pytest.raises(ValueError, match=f"{message}; it must be at most the length of the sequence, 10"):
        WITH_A_LENGTH[name](**{given: form(values)}, seqlen=10)
    for seqlen in (11, 12):
        WITH_A_LENGTH[name](**{given: form(values)}, seqlen=seqlen)
    if name not in ("causal_with_blocks", "dflash"):  # whose other tensors are lists here
        assert WITH_A_LENGTH[name](**{given: torch.tensor(values, device="meta")}, seqlen=10).device.type == "meta"


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: masks.causal_document(seqlens=[[5, 5], [5, 6]], seqlen=10),
            r"the sum of seqlens\[1\] is 11; it must be at most",
        ),
        (lambda: masks.document([[0, 10], [0, 11]], seqlen=10), r"cu_seqlens\[1, 1\] is 11; it must be at most"),
        (lambda: masks.shared_question([(5, [3, 3])], seqlen=10), "the sum of seqlens is 11; it must be at most"),
        (
            lambda: masks.shared_question(seqlens=[5, 6], is_question=[True, False], seqlen=10),
            "the sum of seqlens is 11; it must be at most",
        ),
        (lambda: masks.prefix_tree([-1, 0], [5, 6], seqlen=10), "the sum of lengths is 11; it must be at most"),
        (lambda: masks.prefix_tree([-1] * 11, seqlen=10), "the sum of lengths is 11; it must be at most"),
        (lambda: masks.prefix_tree_from_intervals([0, 5], [11, 11], seqlen=10), r"tout\[0\] is 11; it must be at most"),
        (lambda: masks.block_causal([5, 6], seqlen=10), "the sum of blocks is 11; it must be at most"),
        (lambda: masks.block_causal([5, 6], seqlens=[10]), "the sum of blocks is 11; it must be at most"),
        (lambda: masks.block_diffusion([5, 6], seqlen=10), "the sum of blocks is 11; it must be at most"),
    ],
)
def test_what_else_goes_beyond_the_length_is_refused(call, message):
    with pytest.raises(ValueError, match=f"{message} the length of the sequence, 10"):
        call()


@pytest.mark.parametrize("lengths", [torch.ones(3), [3.5, 1], np.array([3.0, 1.0])])
def test_float_lengths_are_refused(lengths):
    with pytest.raises(TypeError, match="seqlens is torch.float32; it must be integers"):
        masks.document(seqlens=lengths)


@pytest.mark.parametrize("lengths", ["12", {"a": 1}, [4, None]])
def test_what_is_no_number_is_named(lengths):
    with pytest.raises(TypeError, match="seqlens must be integers"):
        masks.document(seqlens=lengths)


@pytest.mark.parametrize(
    "given",
    [
        {"seqlens": [3, 0, 4]},
        {"cu_seqlens": [0, 3, 3, 7]},
        {"doc_ids": [0] * 3 + [2] * 4},
        {"seqlens": [[3, 4], [7, 0]]},
    ],
)
def test_numpy_is_as_good_as_lists(given):
    ((name, values),) = given.items()
    assert torch.equal(
        masks.causal_document(**{name: np.array(values)}).to_dense(), masks.causal_document(**given).to_dense()
    )


# --- Without the values -----------------------------------------------------------------------------------

TRACED = {
    "cu_seqlens": lambda x: masks.causal_document(torch.nn.functional.pad(x.cumsum(0), (1, 0)), seqlen=30),
    "seqlens": lambda x: masks.document(seqlens=x, seqlen=30),
    "doc_ids": lambda x: masks.causal_blockwise(doc_ids=x.cumsum(0) // 3),
    "position_ids": lambda x: masks.causal_document(position_ids=x),
    "prefix_lm_document": lambda x: masks.prefix_lm_document(seqlens=x, prefix=x // 2, seqlen=30),
    "shared_question": lambda x: masks.shared_question(
        seqlens=x, is_question=torch.arange(9, device=x.device) % 3 == 0, seqlen=30
    ),
    "global_sliding_window": lambda x: masks.global_sliding_window(x.shape[0], 2, 3, device=x.device),
    "prefix_lm_causal": lambda x: masks.prefix_lm_causal(16, x),
    "qk_sparse": lambda x: masks.qk_sparse(30, torch.stack([x.cumsum(0), x.cumsum(0) + 1], -1)),
    "eviction": lambda x: masks.eviction(x),
    "random_eviction": lambda x: masks.random_eviction(x.shape[0], 3, device=x.device),
    "hash_sparse": lambda x: masks.hash_sparse(x.sort().values, x, True),
    "attention_sink_window": lambda x: masks.attention_sink_window(2, 3, position_ids=x),
    "block_causal": lambda x: masks.block_causal(x, seqlens=x.flip(0), window=2, seqlen=30),
    "block_causal, equal": lambda x: masks.block_causal(3, position_ids=x, window=2),
    "causal_with_blocks": lambda x: masks.causal_with_blocks(x.sort().values - 1, position_ids=x, window=2),
    "block_diffusion": lambda x: masks.block_diffusion(x, seqlens=x.flip(0), seqlen=30)[0],
    "block_diffusion, concatenated": lambda x: masks.block_diffusion(
        3, seqlen=x.shape[0], order="concatenated", device=x.device
    )[0],
    "eagle3_ttt": lambda x: masks.eagle3_ttt(3, position_ids=x),
    "dflash": lambda x: masks.dflash(x.sort().values, 2, seqlens=x, seqlen=30),
    "prefix_tree": lambda x: masks.prefix_tree(torch.arange(-1, 8, device=x.device), x, seqlen=30),
    "prefix_tree_from_intervals": lambda x: masks.prefix_tree_from_intervals(x[:1] * 0, x[:1], seqlen=9),
    "padding": lambda x: masks.padding(16, 9, x),
    "from_startend": lambda x: masks.from_startend(x[None, None, :, None], True),
}


@pytest.mark.parametrize("name", TRACED)
def test_nothing_waits_for_the_values(name):
    """A meta tensor has no values: whatever looked at them would raise."""
    mask = TRACED[name](torch.empty(9, dtype=torch.int64, device="meta"))
    assert isinstance(mask, Mask) and mask.device.type == "meta"


LISTS = {
    "seqlens": lambda device: masks.causal_document(seqlens=[[2, 0, 3], [1, 0, 0]], device=device),
    "cu_seqlens": lambda device: masks.document([[0, 2, 5], [0, 0, 4]], device=device),
    "position_ids": lambda device: masks.document(position_ids=[0, 1, 0], device=device),
    "groups": lambda device: masks.shared_question([(2, [1, 3]), (4, [])], device=device),
    "prefix_lm_document": lambda device: masks.prefix_lm_document([0, 4], [2], device=device),
    "qk_sparse": lambda device: masks.qk_sparse(9, [(2, 4)], device=device),
    "attention_sink_window": lambda device: masks.attention_sink_window(2, 3, seqlen=9, device=device),
    "block_causal": lambda device: masks.block_causal([2, 3], window=1, device=device),
    "block_causal, equal": lambda device: masks.block_causal(2, seqlen=9, device=device),
    "causal_with_blocks": lambda device: masks.causal_with_blocks([-1, 0, 0, 1, 1], seqlens=[3, 2], device=device),
    "block_diffusion": lambda device: masks.block_diffusion([2, 3], device=device)[0],
    "block_diffusion, equal": lambda device: masks.block_diffusion(2, seqlen=9, order="concatenated", device=device)[0],
    "eagle3_ttt": lambda device: masks.eagle3_ttt(2, seqlen=9, device=device),
    "dflash": lambda device: masks.dflash([0, 3], 2, seqlens=[3, 2], device=device),
    "prefix_tree": lambda device: masks.prefix_tree([-1, 0, 0], [2, 1, 3], device=device),
    "prefix_tree_from_intervals": lambda device: masks.prefix_tree_from_intervals([0, 2], [5, 5], device=device),
    "hash_sparse": lambda device: masks.hash_sparse([0, 1], [1, 0], False, device=device),
    "padding": lambda device: masks.padding(4, 4, [3, 1], device=device),
    "eviction": lambda device: masks.eviction([3, 1], device=device),
    "random_eviction": lambda device: masks.random_eviction(9, 1, device=device),
    "global_sliding_window": lambda device: masks.global_sliding_window(9, 1, 1, device=device),
    "prefix_lm_causal": lambda device: masks.prefix_lm_causal(9, 1, device=device),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_go_to_the_device_and_compile(name):
    build = LISTS[name]
    assert build("meta").device.type == "meta" and build("meta").bounds.shape == build(None).bounds.shape
    torch._dynamo.reset()
    assert torch.equal(torch.compile(build, fullgraph=True, backend="eager")("cpu").bounds, build(None).bounds)


def test_the_order_of_block_diffusion_compiles():
    compiled = torch.compile(lambda x: masks.block_diffusion(x, seqlen=30)[1], fullgraph=True, backend="eager")
    for values in (torch.tensor([4, 0, 9]), torch.tensor([1, 20, 9])):
        assert torch.equal(compiled(values), masks.block_diffusion(values, seqlen=30)[1])


@pytest.mark.parametrize("name", TRACED)
def test_builders_compile(name):
    torch._dynamo.reset()
    build = TRACED[name]
    compiled = torch.compile(build, fullgraph=True, backend="eager")
    for seed in range(2):
        values = torch.randint(0, 4, (9,), generator=torch.Generator().manual_seed(seed)) + (name == "qk_sparse")
        assert torch.equal(compiled(values).bounds, build(values).bounds)


def test_hash_sparse_that_does_not_fit_is_noticed_in_compiled_code():
    compiled = torch.compile(lambda q: masks.hash_sparse(q, q, False), fullgraph=True, backend="eager")
    compiled(torch.tensor([0, 0, 1, 1, 2]))
    with pytest.raises(RuntimeError, match="does not fit two row intervals"):
        compiled(torch.tensor([0, 1, 0, 1, 0]))
