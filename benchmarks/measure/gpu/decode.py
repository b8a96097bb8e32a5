# SPDX-License-Identifier: Apache-2.0
"""Decode over paged KV caches on a Hopper GPU, beside FlashAttention-3's kernels for caches, in one run.

    export FLASHMASK_LIBRARY=... FLASHMASK_TORCH_LIBRARY=... PYTHONPATH=python
    python -m benchmarks.measure.gpu.decode [--fa3 _vllm_fa3_C.abi3.so] [--rounds 9] [--cells FILTER] [--json FILE]

--fa3 is the library of vLLM's wheel (vllm 0.33.0, vllm_flash_attn/), called in the form of flash_attn_with_kvcache with
its metadata made beforehand, as plans are here. A contender's calls are captured in a CUDA graph that walks through
caches of 1.25 GB or more, so that L2 serves nothing; graphs are replayed in turn, shuffled anew in every round. Figures
are medians, ratios of medians. Bytes are those of K and V.

Without --cells masks follow (a tree of drafts, a window, evicted keys), plan.update, and the host's time of a call.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import geometric_mean, median

import torch
from flashmask import masks
from flashmask.inference import CachePlan, KvCache, SequenceMask, flashmask_with_kvcache

BF16 = torch.bfloat16
POOL_BYTES, ROTATED_BYTES = 8 << 30, int(1.25e9)
#        heads_q, heads_kv, dim: groups of 4, 8, 2 and 1
MODELS = ((32, 8, 128), (64, 8, 64), (16, 8, 256), (32, 32, 128))
LENGTHS = ((1, 1024), (8, 1024), (1, 8192), (8, 8192), (64, 1024), (1, 32768), (8, 32768), (64, 8192), (1, 131072))


class Cell:
    """Caches of one shape that together outgrow L2."""

    def __init__(self, pools, batch, keys, heads_q, heads_kv, dim, page, rows=1):
        self.batch, self.keys, self.rows, self.page, self.dim = batch, keys, rows, page, dim
        self.heads_q, self.heads_kv = heads_q, heads_kv
        self.bytes = 4 * batch * keys * heads_kv * dim
        pages, of_request = pools[0].numel() // (page * heads_kv * dim), -(-keys // page)
        self.count = max(1, min(-(-ROTATED_BYTES // self.bytes), pages // (batch * of_request)))
        self.k, self.v = (x[: pages * page * heads_kv * dim].view(pages, page, heads_kv, dim) for x in pools)
        order = torch.randperm(pages, device="cuda")[: self.count * batch * of_request]
        self.tables = list(order.int().view(self.count, batch, of_request))
        self.lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
        self.q = torch.randn(batch, rows, heads_q, dim, device="cuda", dtype=BF16)
        self.out = torch.empty_like(self.q)

    def name(self):
        rows = f", {self.rows} rows" if self.rows > 1 else ""
        return f"{self.batch} x {self.keys}, {self.heads_q}/{self.heads_kv} d={self.dim} page {self.page}{rows}"

    def ours(self, mask=None):
        caches = [KvCache(self.k, self.v, table, self.lengths) for table in self.tables]
        plans = []
        for cache in caches:
            plans.append(self.plan(self.tables[0].shape[1] * self.page))
            plans[-1].update(mask, cache, rows=self.rows)
        return lambda n: flashmask_with_kvcache(self.q, caches[n], mask, plans[n], out=self.out)

    def plan(self, room):
        rows = self.batch * self.rows
        return CachePlan(self.batch, rows, room, self.heads_q, self.heads_kv, self.dim, device="cuda")

    def fa3(self):
        ops, none = torch.ops._vllm_fa3_C, None
        causal, out = self.rows > 1, torch.empty_like(self.q)
        shape = (self.batch, self.rows, self.keys, self.heads_q, self.heads_kv, self.dim, self.dim, BF16, self.lengths)
        metadata = ops.get_scheduler_metadata(
            *shape, *[none] * 5, self.page, 0, causal, -1, -1, False, 0, none, 0
        )  # fmt: skip

        def call(n):
            ops.fwd(
                self.q, self.k, self.v, none, none, none, out, none, none, none, none, self.lengths, none, self.keys,
                self.tables[n], *[none] * 8, self.dim**-0.5, causal, -1, -1, 0.0, True, metadata, 0, none, 0, none, 1,
                0, none,
            )  # fmt: skip
            return out

        return call


def graph_of(call, count, calls):
    for n in range(2):
        call(n % count)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(calls):
            call(n % count)
    return graph


def microseconds(graph):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def measure(cell, contenders, rounds, shuffle):
    calls = max(cell.count, min(256, int(3e-3 / (cell.bytes / 3.5e12 + 6e-6))))
    calls = -(-calls // cell.count) * cell.count
    graphs = {name: graph_of(call, cell.count, calls) for name, call in contenders.items()}
    if "fa3" in contenders:
        ours, theirs = (contenders[name](0).float() for name in ("ours", "fa3"))
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        assert error < 2e-2, (cell.name(), error)  # of the largest element: means of many keys are small
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        order = list(graphs)
        shuffle.shuffle(order)
        for name in order:
            times[name].append(microseconds(graphs[name]) / calls)
    row = {"cell": cell.name(), "MB": round(cell.bytes / 1e6, 1), **{f"{n}_us": median(t) for n, t in times.items()}}
    row["gb_per_s"] = cell.bytes / row["ours_us"] / 1e3
    if "fa3_us" in row:
        row["fa3_over_ours"] = row["fa3_us"] / row["ours_us"]
    return row


def decode_cells(pools, wanted):
    for heads_q, heads_kv, dim in MODELS:
        for page in (64, 16):
            for batch, keys in LENGTHS:
                if 4 * batch * keys * heads_kv * dim > 2 * pools[0].numel() * 2:
                    continue
                name = f"{batch} x {keys}, {heads_q}/{heads_kv} d={dim} page {page}"
                if wanted in name:
                    yield Cell(pools, batch, keys, heads_q, heads_kv, dim, page)


def masked(pools, rounds, shuffle):
    """Trees, a window and evicted keys beside our own causal time."""
    cell = Cell(pools, 16, 16384, 32, 8, 128, 64, rows=8)
    tail, depth = masks.draft_tree(torch.tensor([[-1, 0, 0, 1, 1, 2, 2, 5]] * 16, device="cuda"))
    tree = SequenceMask(tail=tail, tail_depth=depth)
    row = measure(cell, {"ours": cell.ours(), "tree": cell.ours(tree), "tail": cell.ours(SequenceMask(tail=tail))},
                  rounds, shuffle)  # fmt: skip
    yield {**row, "tree_over_causal": row["tree_us"] / row["ours_us"]}
    cell = Cell(pools, 8, 131072, 32, 8, 128, 64)
    evicted = torch.full((*cell.k.shape[:2], 1, 1), 2**31 - 1, device="cuda", dtype=torch.int32)
    blocks = cell.tables[0].view(-1, 2).long()  # of 128 keys, which lie in two pages
    evicted[blocks[torch.rand(len(blocks), device="cuda") < 0.9]] = 0
    contenders = {
        "ours": cell.ours(),
        "window": cell.ours(SequenceMask(window_size=(1023, 0))),
        "evicted": cell.ours(SequenceMask(bounds=evicted, key_layout="pages")),
    }
    yield measure(cell, contenders, rounds, shuffle)


def other(pools):
    """plan.update on the GPU, and the host's time of a call."""
    for batch, keys in ((64, 8192), (256, 4096)):
        cell = Cell(pools, batch, keys, 32, 8, 128, 16)
        cache, plan = KvCache(cell.k, cell.v, cell.tables[0], cell.lengths), cell.plan(keys)
        bounds = torch.full((*cell.k.shape[:2], 1, 1), 2**31 - 1, device="cuda", dtype=torch.int32)
        for name, mask in (("causal", None), ("vectors", SequenceMask(bounds=bounds, key_layout="pages"))):
            graph = graph_of(lambda _, mask=mask: plan.update(mask, cache), 1, 100)
            yield {
                "plan.update": f"{batch} x {keys}, {name}",
                "us": median(microseconds(graph) for _ in range(9)) / 100,
            }
    cell = Cell(pools, 1, 1024, 32, 8, 128, 64)
    call, times = cell.ours(), []
    for _ in range(300):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(0)
        times.append(time.perf_counter() - begin)
    yield {"host": "a call", "us": median(times) * 1e6}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fa3", type=Path, help="library of the peer")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cells", default="", help="only cells with this in their name")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.fa3:
        torch.ops.load_library(str(arguments.fa3.resolve()))
    torch.manual_seed(0)
    shuffle = random.Random(0)
    pools = [torch.empty(POOL_BYTES // 4, dtype=BF16, device="cuda").normal_() for _ in range(2)]
    rows, ratios = [], []
    with torch.no_grad():
        for cell in decode_cells(pools, arguments.cells):
            contenders = {"ours": cell.ours(), **({"fa3": cell.fa3()} if arguments.fa3 else {})}
            rows.append(measure(cell, contenders, arguments.rounds, shuffle))
            if "fa3_over_ours" in rows[-1]:
                ratios.append(rows[-1]["fa3_over_ours"])
            print(json.dumps(rows[-1]), flush=True)
        if not arguments.cells:
            for row in (*masked(pools, arguments.rounds, shuffle), *other(pools)):
                rows.append(row)
                print(json.dumps(row), flush=True)
    summary = {"gpu": torch.cuda.get_device_name(), "rounds": arguments.rounds}
    if ratios:
        summary["fa3_over_ours"] = geometric_mean(ratios)
    print(json.dumps(summary))
    if arguments.json:
        arguments.json.write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
