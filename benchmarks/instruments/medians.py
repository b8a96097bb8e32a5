# SPDX-License-Identifier: Apache-2.0
"""Medians and spreads over the rounds of a measurement; None is a round that a contender sat out.

A spread is the middle half of the values, [first quartile, third quartile].
"""

import math
from statistics import median, quantiles


def taken(values):
    return [v for v in values if v is not None]


def middle(values):
    return median(taken(values))


def spread(values):
    values = taken(values)
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return [first, third]


def ratios(over, under):
    """`over` / `under` in each round that both took part in."""
    return [a / b for a, b in zip(over, under) if a is not None and b is not None]


def ratio(over, under):
    """Median over the rounds of `over` / `under`."""
    return median(ratios(over, under))


def time_figures(values):
    """A receipt's entries for a contender's milliseconds."""
    return {"ms": middle(values), "ms_spread": spread(values), "rounds": len(taken(values))}


def ratio_figures(name, over, under):
    """A receipt's entries for a ratio within rounds."""
    found = ratios(over, under)
    return {name: median(found), f"{name}_spread": spread(found)}


def line_fit(xs, ys):
    """(intercept, slope, R^2) of least squares."""
    count = len(xs)
    mean_x, mean_y = sum(xs) / count, sum(ys) / count
    across = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys))
    spread_x = sum((x - mean_x) ** 2 for x in xs)
    slope = across / spread_x
    total = sum((y - mean_y) ** 2 for y in ys)
    left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys))
    return mean_y - slope * mean_x, slope, 1 - left / total


def bucket_of(sparsity, width=0.05):
    return math.floor(sparsity / width + 1e-9)
