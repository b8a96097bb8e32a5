# SPDX-License-Identifier: Apache-2.0
"""The twelve masks of the FlashMask paper's kernel tables at one length, as startend_row_indices.

paper_mask(name, seqlen) -> (indices int32 [1, 1, seqlen, n] or None, causal). Documents: 3 to 7 at 8K, 10 to 14 at 32K,
11 to 15 at 128K. Each (name, seqlen) is one fixed cell: every draw starts from numpy.random.default_rng(0).
"""

import numpy as np

DOCUMENTS = {8192: (3, 7), 32768: (10, 14), 131072: (11, 15)}


def document_lengths(rng, seqlen):
    """Document lengths near multiples of 128, never on one."""
    low, high = DOCUMENTS.get(seqlen, (3, 7))
    count = rng.integers(low, high + 1)
    ends = 128 * np.sort(rng.choice(np.arange(1, seqlen // 128), count - 1, replace=False))
    ends = ends + rng.integers(-63, 64, size=ends.shape)
    return np.diff(np.concatenate([[0], ends, [seqlen]]))


def spread(values, lengths):
    return np.repeat(values, lengths)


def document_ends(lengths):
    return spread(np.cumsum(lengths), lengths)


def document_begins(lengths):
    return spread(np.cumsum(lengths) - lengths, lengths)


def full(rng, s):
    return None, False


def causal(rng, s):
    return None, True


def sliding_window(rng, s):
    return [np.minimum(np.arange(s) + s // 16, s)], True


def causal_document(rng, s):
    return [document_ends(document_lengths(rng, s))], True


def document(rng, s):
    lengths = document_lengths(rng, s)
    return [document_ends(lengths), document_begins(lengths)], False


def shared_question(rng, s):
    lts, begin = np.empty(s, np.int64), 0
    for length in document_lengths(rng, s):
        answers = int(rng.integers(2, 7))
        share = rng.uniform(0.1, 0.2, size=answers)
        sizes = np.maximum(1, (share / (1 + share.sum()) * length).astype(int))
        end = begin + length
        lts[begin:end] = end
        answer = end - sizes.sum()
        for size in sizes:
            lts[answer : answer + size] = answer + size
            answer += size
        begin = end
    return [lts], True


def global_sliding_window(rng, s):
    tokens, reach, j = 16, s // 16, np.arange(s)
    near = j < tokens  # seen by all rows
    above = j > tokens + reach  # far enough right to be hidden from rows above the window
    lts = np.where(near, s, np.minimum(j + reach + 1, s))
    return [lts, np.full(s, s), np.where(above, tokens, 0), np.where(above, j - reach, 0)], False


def causal_blockwise(rng, s):
    lengths = document_lengths(rng, s)
    test_begin = s - lengths[-1]
    return [document_ends(lengths), np.where(np.arange(s) < test_begin, test_begin, s)], True


def prefix_lm_document(rng, s):
    lengths = document_lengths(rng, s)
    ute, begin = np.arange(s), 0
    for length in lengths:
        prefix = int(length * rng.uniform(0.1, 0.5))
        ute[begin : begin + prefix] = begin
        begin += length
    return [document_ends(lengths), ute], False


def prefix_lm_causal(rng, s):
    j = np.arange(s)
    return [np.full(s, s), np.where(j < s // 2, 0, j)], False


def qk_sparse(rng, s):
    lts, lte = np.full(s, s), np.full(s, s)
    for begin, count in ((1024, 538), (2358, 1700)):
        begin, count = int(begin * s / 8192), int(count * s / 8192)
        lts[begin : begin + count] = np.arange(begin, begin + count)
        lte[begin : begin + count] = begin + count
    return [lts, lte], True


def random_eviction(rng, s):
    half = s // 2
    victims, rows = rng.choice(s - 1, s - half, replace=False), np.arange(half, s)
    early = victims < rows - 1
    victims = np.concatenate([victims[early], victims[~early]])
    lts = np.full(s, s)
    lts[victims] = np.maximum(rows, victims + 1)
    return [lts], True


MASKS = [
    full,
    causal,
    sliding_window,
    causal_document,
    document,
    shared_question,
    global_sliding_window,
    causal_blockwise,
    prefix_lm_document,
    prefix_lm_causal,
    qk_sparse,
    random_eviction,
]
NAMES = [f.__name__ for f in MASKS]


def paper_mask(name, seqlen):
    vectors, causal_flag = MASKS[NAMES.index(name)](np.random.default_rng(0), seqlen)
    indices = None if vectors is None else np.ascontiguousarray(np.stack(vectors, -1).astype(np.int32)[None, None])
    return indices, causal_flag
