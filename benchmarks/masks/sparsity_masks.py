# SPDX-License-Identifier: Apache-2.0
"""Document masks drawn so that their block sparsity fills buckets of one width evenly."""

import numpy as np

from benchmarks.instruments.medians import bucket_of
from benchmarks.masks import visible_tiles

KINDS = ("causal_document", "shared_question", "document")


def lengths_with(rng, seqlen, pairs):
    """Document lengths whose pairs in one document are about the share `pairs` of all pairs.

    Random shares, raised to the power that brings them there.
    """
    count = int(np.ceil(1 / pairs)) + int(rng.integers(1, 9))
    shares = rng.uniform(0.05, 1, size=count)
    low, high = 0.0, 200.0
    for _ in range(60):
        power = (low + high) / 2
        weights = (shares / shares.max()) ** power
        weights /= weights.sum()
        low, high = (power, high) if (weights**2).sum() < pairs else (low, power)
    lengths = np.maximum(1, np.round(weights * seqlen)).astype(int)
    lengths[lengths.argmax()] += seqlen - lengths.sum()
    return rng.permutation(lengths)


def causal_document(rng, lengths):
    return np.repeat(np.cumsum(lengths), lengths)[:, None], True


def document(rng, lengths):
    ends = np.cumsum(lengths)
    return np.stack([np.repeat(ends, lengths), np.repeat(ends - lengths, lengths)], -1), False


def shared_question(rng, lengths):
    """Two to six answers of about 10 to 20 % of their question each."""
    bounds, begin = np.empty(sum(lengths), np.int64), 0
    for length in lengths:
        share = rng.uniform(0.1, 0.2, size=int(rng.integers(2, 7)))
        sizes = np.maximum(1, (share / (1 + share.sum()) * length).astype(int))
        end = begin + length
        bounds[begin:end] = end
        if length > 2 * len(sizes):
            stops = np.cumsum(sizes) + end - sizes.sum()
            bounds[end - sizes.sum() : end] = np.repeat(stops, sizes)
        begin = end
    return bounds[:, None], True


def draw(kind, seqlen, pairs, rng):
    """{kind, indices int32 [1, 1, seqlen, n], causal, live}"""
    indices, causal = globals()[kind](rng, lengths_with(rng, seqlen, pairs))
    indices = np.ascontiguousarray(indices.astype(np.int32)[None, None])
    return {
        "kind": kind,
        "indices": indices,
        "causal": causal,
        "live": visible_tiles.live_share(indices, causal, seqlen),
    }


def reachable(kind, width):
    """Buckets of sparsity that documents of this kind reach: up to 0.95; causal ones begin at a half."""
    first = 0.0 if kind == "document" else 0.5
    return range(bucket_of(first, width), bucket_of(0.95, width))


def fill_buckets(kind, seqlen, each, width=0.05, seed=0):
    """At least `each` masks in every reachable bucket."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    factor = 1 if kind == "document" else 2
    kept = []
    for bucket in reachable(kind, width):
        found, tries = 0, 0
        while found < each:
            tries += 1
            if tries > 200 * each:
                raise RuntimeError(
                    f"{kind}: no mask of sparsity {bucket * width:.2f} to {(bucket + 1) * width:.2f} "
                    f"after {tries} tries"
                )
            live = 1 - (bucket + rng.uniform()) * width
            # Sharing a question hides a little more than the documents do.
            guess = live * factor * (rng.uniform(1.0, 1.5) if kind == "shared_question" else rng.uniform(0.9, 1.02))
            mask = draw(kind, seqlen, float(np.clip(guess, 0.02, 0.9995)), rng)
            if bucket_of(1 - mask["live"], width) == bucket:
                kept.append(mask)
                found += 1
    return kept
