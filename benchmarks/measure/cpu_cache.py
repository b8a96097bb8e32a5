# SPDX-License-Identifier: Apache-2.0
"""One row of attention over a paged KV cache on the CPU, against PyTorch's attention over a gathered one and against
reading the cache's memory, in one run.

    pip install torch numpy
    export FLASHMASK_LIBRARY=... FLASHMASK_TORCH_LIBRARY=... PYTHONPATH=python
    python -m benchmarks.measure.cpu_cache [--batch 8] [--keys 8192] [--rounds 15] [--json FILE]

32 query heads over 8 key heads, d = 128, pages of 16 keys in a random order. PyTorch gets contiguous keys, whose
gathering is not timed (scaled_dot_product_attention, enable_gqa). Reading sums the same bytes as 64-bit integers with
as many threads. Contenders take turns, in another order each round; figures are medians, ratios medians of ratios.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from flashmask.inference import KvCache, flashmask_with_kvcache

from benchmarks.instruments.orders import orders

HEADS_Q, HEADS_KV, DIM, PAGE = 32, 8, 128, 16


def seconds(function):
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def contenders(dtype, batch, keys):
    pages = batch * keys // PAGE
    k, v = (torch.randn(pages, PAGE, HEADS_KV, DIM, dtype=dtype) for _ in range(2))
    table = torch.randperm(pages).view(batch, -1).int()
    q = torch.randn(batch, 1, HEADS_Q, DIM, dtype=dtype)
    cache = KvCache(k, v, table, torch.full((batch,), keys, dtype=torch.int32))
    gathered = [x[table.long()].view(batch, keys, HEADS_KV, DIM).transpose(1, 2).contiguous() for x in (k, v)]
    words = [x.view(torch.int64) for x in (k, v)]

    def ours():
        return flashmask_with_kvcache(q, cache)

    def peer():
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), *gathered, enable_gqa=True)

    error = (ours() - peer().transpose(1, 2)).abs().max().item()
    assert error < (2e-2 if dtype == torch.bfloat16 else 1e-5), error
    size = sum(x.numel() * x.element_size() for x in (k, v))
    return {"ours": ours, "torch": peer, "read": lambda: [x.sum() for x in words]}, size


def measure(dtype, batch, keys, rounds):
    functions, size = contenders(dtype, batch, keys)
    times = {name: [] for name in functions}
    for n, order in enumerate(orders(functions, rounds)):
        for name in order:
            times[name].append(seconds(functions[name]))
        print(f"\r{dtype}: round {n + 1}/{rounds} ({(n + 1) / rounds:.0%})", end="", file=sys.stderr, flush=True)
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)

    def ratio(over):
        return median(a / b for a, b in zip(times[over], times["ours"]))

    return {
        "dtype": str(dtype).removeprefix("torch."),
        "batch": batch,
        "keys": keys,
        "ours_ms": median(times["ours"]) * 1e3,
        "read_gb_per_s": size / median(times["read"]) / 1e9,
        "share_of_read": ratio("read"),
        "torch_over_ours": ratio("torch"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(
        f"{args.batch} requests of {args.keys} keys, {HEADS_Q}/{HEADS_KV} heads, d = {DIM}, pages of {PAGE}, ", end=""
    )
    print(f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}")
    print(f"{'dtype':9} {'ours ms':>8} {'read GB/s':>10} {'share':>6} {'torch/ours':>11}")
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        row = measure(dtype, args.batch, args.keys, args.rounds)
        rows.append(row)
        print(
            f"{row['dtype']:9} {row['ours_ms']:8.2f} {row['read_gb_per_s']:10.1f} {row['share_of_read']:6.2f} "
            f"{row['torch_over_ours']:11.2f}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps({"threads": torch.get_num_threads(), "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
