# SPDX-License-Identifier: Apache-2.0
"""The paper's masks as FlexAttention mask_mods, for the very cells of paper_masks.paper_mask.

flex_mask(name, seqlen, to_device) -> mask_mod(batch, head, query, key), or None for `full`. FlexAttention's speed
depends on how a mask is written: document masks look a document number up for query and key, windows compare positions,
eviction looks the key's bound up. They are rules of their own, so they also check the bounds of paper_masks.
"""

import numpy as np

from benchmarks.masks import paper_masks


def drawn_documents(seqlen):
    """(lengths, the generator after drawing them), as paper_masks draws them."""
    rng = np.random.default_rng(0)
    return paper_masks.document_lengths(rng, seqlen), rng


def document_ids(lengths):
    return np.repeat(np.arange(len(lengths)), lengths)


def causal(seqlen, to_device):
    return lambda b, h, q, k: q >= k


def sliding_window(seqlen, to_device):
    width = seqlen // 16
    return lambda b, h, q, k: (q >= k) & (q - k < width)


def causal_document(seqlen, to_device):
    owner = to_device(document_ids(drawn_documents(seqlen)[0]))
    return lambda b, h, q, k: (q >= k) & (owner[q] == owner[k])


def document(seqlen, to_device):
    owner = to_device(document_ids(drawn_documents(seqlen)[0]))
    return lambda b, h, q, k: owner[q] == owner[k]


def answer_ids(seqlen):
    """0 in a question, 1, 2, ... in its answers."""
    lengths, rng = drawn_documents(seqlen)
    parts = []
    for length in lengths:
        share = rng.uniform(0.1, 0.2, size=int(rng.integers(2, 7)))
        sizes = np.maximum(1, (share / (1 + share.sum()) * length).astype(int))
        parts.append(np.repeat(np.arange(len(sizes) + 1), [length - sizes.sum(), *sizes]))
    return np.concatenate(parts)


def shared_question(seqlen, to_device):
    owner, answer = to_device(document_ids(drawn_documents(seqlen)[0])), to_device(answer_ids(seqlen))
    return lambda b, h, q, k: (q >= k) & (owner[q] == owner[k]) & ((answer[k] == 0) | (answer[q] == answer[k]))


def global_sliding_window(seqlen, to_device):
    tokens, reach = 16, seqlen // 16
    return lambda b, h, q, k: (q < tokens) | (k < tokens) | ((q - k <= reach) & (k - q <= reach))


def causal_blockwise(seqlen, to_device):
    lengths, _ = drawn_documents(seqlen)
    owner, last = to_device(document_ids(lengths)), len(lengths) - 1
    return lambda b, h, q, k: (q >= k) & ((owner[q] == owner[k]) | (owner[q] == last))


def prefix_lm_document(seqlen, to_device):
    lengths, rng = drawn_documents(seqlen)
    begins = np.cumsum(lengths) - lengths
    prefix_ends = [begin + int(length * rng.uniform(0.1, 0.5)) for begin, length in zip(begins, lengths)]
    owner, prefix = to_device(document_ids(lengths)), to_device(np.repeat(prefix_ends, lengths))
    return lambda b, h, q, k: (owner[q] == owner[k]) & ((q >= k) | (k < prefix[k]))


def prefix_lm_causal(seqlen, to_device):
    prefix = seqlen // 2
    return lambda b, h, q, k: (q >= k) | (k < prefix)


def qk_sparse(seqlen, to_device):
    indices, _ = paper_masks.paper_mask("qk_sparse", seqlen)
    first, last = to_device(indices[0, 0, :, 0].copy()), to_device(indices[0, 0, :, 1].copy())
    return lambda b, h, q, k: (q >= k) & ~((q >= first[k]) & (q < last[k]))


def random_eviction(seqlen, to_device):
    indices, _ = paper_masks.paper_mask("random_eviction", seqlen)
    evicted = to_device(indices[0, 0, :, 0].copy())
    return lambda b, h, q, k: (q >= k) & (q < evicted[k])


def flex_mask(name, seqlen, to_device):
    """`to_device` turns an int32 array into what the mask_mod may index."""
    if name == "full":
        return None
    return globals()[name](seqlen, lambda array: to_device(np.ascontiguousarray(array, dtype=np.int32)))
