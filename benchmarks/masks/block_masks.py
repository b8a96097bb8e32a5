# SPDX-License-Identifier: Apache-2.0
"""Random 128 x 128 block masks of a given sparsity."""

import numpy as np

BLOCK = 128
LENGTHS = (8192, 32768, 131072)
SPARSITIES = tuple(n / 10 for n in range(1, 10))


def blocks_of(seqlen, sparsity):
    """(live blocks, all blocks)"""
    count = (seqlen // BLOCK) ** 2
    return count - round(sparsity * count), count


def live_share(seqlen, sparsity):
    live, count = blocks_of(seqlen, sparsity)
    return live / count


def draw(seqlen, sparsity, seed=0):
    """bool [seqlen / 128, seqlen / 128], True where a block is live: any set of that many blocks is as likely."""
    live, count = blocks_of(seqlen, sparsity)
    found = np.zeros(count, bool)
    found[np.random.default_rng([seed, seqlen, live]).permutation(count)[:live]] = True
    return found.reshape(seqlen // BLOCK, -1)
