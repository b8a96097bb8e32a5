# SPDX-License-Identifier: Apache-2.0
"""The builders of the masks of certain models and training methods, as in test_masks.py."""

import pytest
import torch
from builder_checks import check, check_cpp, documents_of, draw_lengths, from_cpp, ways_to_give
from flashmask import masks


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
        mask, order = masks.block_diffusion(3, seqlens=lengths, order="concatenated")
        fits = all(d == doc[-1] for d in several)
        fitted += fits
        assert (mask.column_ptr is None) == fits
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
