# SPDX-License-Identifier: Apache-2.0
"""Caches of one shape on a GPU, our calls over them, and the time of calls that take turns.

A contender's calls are captured in a CUDA graph that walks through caches of 1.25 GB or more, so that L2 serves
nothing; graphs are replayed in turn, in another order each round.
"""

import json
from typing import NamedTuple

import torch
from flashmask.inference import CachePlan, KvCache, explain, flashmask_with_kvcache

from benchmarks.instruments.medians import middle, ratio, spread
from benchmarks.instruments.orders import orders

ROTATED_BYTES = int(1.25e9)
REPLAY_SECONDS, MOST_CALLS = 3e-3, 256  # of a graph
BYTES_A_SECOND, CALL_SECONDS = 3.5e12, 6e-6  # about
AGREEMENT, FLOAT8_AGREEMENT = 2e-2, 1e-1  # of the norm; with queries and weights in float8, too


class Cell:
    """Caches of a shape that together outgrow L2, as parts of two pools, whose type they have. `scale_of` makes their
    scales if they are float8."""

    def __init__(self, pools, shape, page, scale_of=None):
        self.batch, self.keys, self.heads_q, self.heads_kv, self.dim, self.rows = shape
        self.page, self.name = page, shape.name(page)
        self.bytes = 2 * shape.elements * pools[0].element_size()
        self.is_float8 = pools[0].element_size() == 1
        unit = page or self.keys  # keys that lie together
        units = pools[0].numel() // (unit * self.heads_kv * self.dim)
        of_request = -(-self.keys // unit)
        self.count = max(1, min(-(-ROTATED_BYTES // self.bytes), units // (self.batch * of_request)))
        self.k, self.v = (self.in_units(pool, units, unit) for pool in pools)
        self.tables = []
        if page:
            order = torch.randperm(units, device=pools[0].device)[: self.count * self.batch * of_request]
            self.tables = list(order.int().view(self.count, self.batch, of_request))
        self.lengths = torch.full((self.batch,), self.keys, device="cuda", dtype=torch.int32)
        self.scales = (None, None)
        if scale_of:
            self.scales = tuple(scale_of(self) for _ in range(2))
        self.q = torch.randn(self.batch, self.rows, self.heads_q, self.dim, device="cuda", dtype=torch.bfloat16)

    def in_units(self, pool, units, unit):
        return pool[: units * unit * self.heads_kv * self.dim].view(units, unit, self.heads_kv, self.dim)

    def cache(self, n):
        """k, v and the table of cache n; None where it is contiguous."""
        if self.page:
            return self.k, self.v, self.tables[n]
        requests = slice(n * self.batch, (n + 1) * self.batch)
        return self.k[requests], self.v[requests], None

    def caches(self):
        return [KvCache(*self.cache(n), self.lengths, *self.scales) for n in range(self.count)]

    def ours(self, mask=None, **invariance):
        """A call on cache n, with a ready plan of its own. `invariance`: batch_invariant and split_size."""
        caches, plans, out = self.caches(), [], torch.empty_like(self.q)
        for cache in caches:
            plans.append(plan_of(self, float8=self.is_float8, **invariance))
            plans[-1].update(mask, cache, rows=self.rows)
        return lambda n: flashmask_with_kvcache(self.q, caches[n], mask, plans[n], out=out, **invariance)

    def kernel(self, mask=None):
        """The id of the kernel that ours runs."""
        return json.loads(explain(self.q, self.caches()[0], mask))["kernel"]

    def calls(self):
        """Calls of a graph: whole walks through the caches that fill some milliseconds."""
        seconds = self.bytes / BYTES_A_SECOND + CALL_SECONDS
        return -(-max(self.count, min(MOST_CALLS, int(REPLAY_SECONDS / seconds))) // self.count) * self.count


def plan_of(shape, **options):
    """A plan with room for a shape, or a cell: keys fill their pages."""
    sizes = shape.batch, shape.batch * shape.rows, shape.keys, shape.heads_q, shape.heads_kv, shape.dim
    return CachePlan(*sizes, device="cuda", **options)


class Contender(NamedTuple):
    """`call` takes the number of a cache, of `count`; `calls` of them are timed together."""

    call: object
    count: int
    calls: int


def contender_of(cell, call):
    return Contender(call, cell.count, cell.calls())


def check_agreement(name, theirs, ours, allowed=AGREEMENT):
    """A peer that computes something else would make a ratio without meaning."""
    norm, ours = torch.linalg.vector_norm, ours.float()
    error = float(norm(theirs.float() - ours) / norm(ours))
    if not error < allowed:
        raise AssertionError(f"{name} differs from ours by {error:.3g} of the norm")


def graph_of(contender):
    """The contender's calls in a graph, which has run once."""
    for n in range(2):
        contender.call(n % contender.count)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(contender.calls):
            contender.call(n % contender.count)
    graph.replay()
    return graph


def microseconds(graph):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def in_turns(contenders, rounds, seed):
    """{name: microseconds of a call in each round}"""
    graphs, times = {name: graph_of(contender) for name, contender in contenders.items()}, {n: [] for n in contenders}
    for order in orders(graphs, rounds, seed):
        for name in order:
            times[name].append(microseconds(graphs[name]) / contenders[name].calls)
    return times


def time_figures(times):
    """A receipt's entries for {name: microseconds in each round}; ratios are those over "ours"."""
    return {
        "us": {name: middle(own) for name, own in times.items()},
        "us_spread": {name: spread(own) for name, own in times.items()},
        "over_ours": {name: ratio(own, times["ours"]) for name, own in times.items() if name != "ours"},
    }
