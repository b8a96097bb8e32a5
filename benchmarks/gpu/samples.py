# SPDX-License-Identifier: Apache-2.0
"""Medians over the rounds of a measurement; None is a round that a contender sat out."""

import math
from statistics import median


def middle(values):
    return median(v for v in values if v is not None)


def ratio(over, *under):
    """Median over the rounds of `over` / the sum of `under`."""
    return median(a / sum(b) for a, *b in zip(over, *under) if a is not None and None not in b)


def line_fit(xs, ys):
    """(intercept, slope, R^2) of least squares."""
    count = len(xs)
    mean_x, mean_y = sum(xs) / count, sum(ys) / count
    across = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys))
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = across / spread
    total = sum((y - mean_y) ** 2 for y in ys)
    left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys))
    return mean_y - slope * mean_x, slope, 1 - left / total


def bucket_of(sparsity, width=0.05):
    return math.floor(sparsity / width + 1e-9)
