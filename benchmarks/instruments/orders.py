# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is in measurements that take turns."""

import itertools
import random
from collections import Counter

SHUFFLES = 200  # a round's order is the best of


def orders(names, rounds, seed=0):
    """An order of the names for each round, random but for this: over all rounds each follows every other about equally
    often. A call's time depends on the call before it (the card's power state, caches), and in few rounds chance would
    have one follow a light call more often than another does.

    It approximates, for any number of rounds, the designs of E. J. Williams, "Experimental designs balanced for the
    estimation of residual effects of treatments", 1949."""
    shuffle, met, last = random.Random(seed), Counter(), []
    for _ in range(rounds):
        shuffles = [shuffle.sample(list(names), len(names)) for _ in range(SHUFFLES)]
        order = min(shuffles, key=lambda order: sum(met[pair] for pair in itertools.pairwise(last + order)))
        met.update(itertools.pairwise(last + order))
        last = order[-1:]
        yield order
