# SPDX-License-Identifier: Apache-2.0
"""The orders in which contenders take turns."""

import itertools
import random
from collections import Counter

import pytest

from benchmarks.instruments.orders import orders


def repeats(found):
    """How often a neighbour has been one before, over all rounds."""
    met = Counter(itertools.pairwise(itertools.chain.from_iterable(found)))
    return sum(met.values()) - len(met)


@pytest.mark.parametrize("count, rounds", [(3, 4), (4, 7), (5, 4), (6, 7), (8, 7)])
def test_each_follows_every_other_about_equally_often(count, rounds):
    names = [f"contender {n}" for n in range(count)]
    found = list(orders(names, rounds))
    assert len(found) == rounds and all(sorted(order) == names for order in found)
    met = Counter(itertools.pairwise(itertools.chain.from_iterable(found)))
    assert max(met.values()) <= rounds / (count - 1) + 1
    shuffle = random.Random(0)
    by_chance = [repeats([shuffle.sample(names, count) for _ in range(rounds)]) for _ in range(20)]
    ours = [repeats(list(orders(names, rounds, seed))) for seed in range(20)]
    assert sum(ours) < sum(by_chance)


def test_a_seed_names_the_orders():
    names = "abcdef"
    assert list(orders(names, 5, 1)) == list(orders(names, 5, 1)) != list(orders(names, 5, 2))


def test_one_name_and_no_rounds():
    assert list(orders("a", 2)) == [["a"], ["a"]] and list(orders("ab", 0)) == []
