#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The CPU backend against PyTorch's CPU attention, and against itself without a mask, in one run.

    pip install torch numpy
    FLASHMASK_LIBRARY=build/release/src/libflashmask.so python benchmarks/cpu_vs_torch.py [--rounds 5] [--json FILE]

Three parts: dense float32 forward and forward + backward next to torch.nn.functional.scaled_dot_product_attention;
the paper's twelve masks, their time over (live share of 128x128 tiles) x our dense time; peak memory of
forward + backward over the length. Contenders take turns in every round; ratios are medians over the rounds.
"""

import argparse
import ctypes as C
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
from flashmask import capi  # noqa: E402
from paper_masks import NAMES, paper_mask  # noqa: E402

lib = capi.load()


class Ours:
    """Buffers and arguments of one call, [batch, heads, seqlen, dim] in memory as PyTorch lays it out."""

    def __init__(self, q, k, v, dout, indices=None, causal=False, threads=2):
        def bshd(x):
            return x.transpose(0, 2, 1, 3)

        self.keep = [q, k, v, dout, indices]
        self.out, self.dq, self.dk, self.dv = (np.empty_like(x) for x in (q, q, k, v))
        self.lse = np.empty(q.shape[:3], np.float32)
        self.options = capi.make(capi.Options, threads=threads, backend=b"cpu")
        seqlen = q.shape[2]
        self.mask = capi.mask(seqlen, seqlen, flags=capi.CAUSAL if causal else 0)
        if indices is not None:
            self.mask.bounds = capi.tensor(indices)
        size = C.c_size_t()
        self.check(lib.fm_plan_bytes(C.byref(self.mask), C.byref(size)))
        self.plan = np.empty(size.value, np.uint8)
        begin = time.perf_counter()
        self.check(lib.fm_plan_build(C.byref(self.mask), self.plan.ctypes.data_as(C.c_void_p), size, None))
        self.plan_seconds = time.perf_counter() - begin
        common = dict(q=bshd(q), k=bshd(k), v=bshd(v), out=bshd(self.out), lse=self.lse, mask=C.pointer(self.mask), plan=self.plan.ctypes.data,
                      plan_bytes=self.plan.nbytes)
        self.forward_args = capi.make(capi.ForwardArgs, **common)
        self.backward_args = capi.make(capi.BackwardArgs, **common, dout=bshd(dout), dq=bshd(self.dq), dk=bshd(self.dk), dv=bshd(self.dv))
        sizes = []
        for query, args in ((lib.fm_forward_workspace, self.forward_args), (lib.fm_backward_workspace, self.backward_args)):
            self.check(query(C.byref(args), C.byref(self.options), C.byref(size)))
            sizes.append(size.value)
        self.workspace = np.empty(max(sizes), np.uint8)

    @staticmethod
    def check(status):
        if status != capi.OK:
            raise RuntimeError(lib.fm_last_error().decode())

    def call(self, function, args):
        self.check(function(C.byref(args), self.workspace.ctypes.data_as(C.c_void_p), C.c_size_t(self.workspace.nbytes), C.byref(self.options)))

    def forward(self):
        self.call(lib.fm_forward, self.forward_args)

    def forward_backward(self):
        self.forward()
        self.call(lib.fm_backward, self.backward_args)


def seconds(function):
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def interleaved(contenders, rounds, label):
    """Seconds of every contender in every round, in an order shuffled anew each round."""
    times = {name: [] for name in contenders}
    shuffle = random.Random(0)
    for function in contenders.values():
        function()  # warm-up
    for n in range(rounds):
        order = list(contenders)
        shuffle.shuffle(order)
        for name in order:
            times[name].append(seconds(contenders[name]))
        print(f"\r{label}: round {n + 1}/{rounds}", end="", file=sys.stderr, flush=True)
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    return times


def ratio(times, over, under):
    return median(a / b for a, b in zip(times[over], times[under]))


def draw(heads, seqlen, dim):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, heads, seqlen, dim), np.float32) for _ in range(4)]


def dense(args, results):
    import torch

    torch.set_num_threads(args.threads)
    print(f"Dense float32, S = {args.dense_seqlen}, {args.heads} heads, {args.threads} threads; speed = PyTorch's time / ours")
    print(f"{'d':>4} {'':14} {'ours ms':>9} {'torch ms':>9} {'speed':>6}")
    for dim in (64, 128):
        arrays = draw(args.heads, args.dense_seqlen, dim)
        ours = Ours(*arrays, threads=args.threads)
        q, k, v, dout = (torch.from_numpy(x) for x in arrays)
        grads = [x.clone().requires_grad_(True) for x in (q, k, v)]
        attention = torch.nn.functional.scaled_dot_product_attention

        def torch_forward():
            with torch.no_grad():
                return attention(q, k, v)

        def torch_both():
            for x in grads:
                x.grad = None
            attention(*grads).backward(dout)

        times = interleaved({"ours": ours.forward, "torch": torch_forward, "ours both": ours.forward_backward, "torch both": torch_both}, args.rounds, f"dense d={dim}")
        assert np.abs(ours.out - torch_forward().numpy()).max() < 1e-4
        for what, a, b in (("forward", "ours", "torch"), ("fwd + bwd", "ours both", "torch both")):
            speed = ratio(times, b, a)
            print(f"{dim:4} {what:14} {median(times[a]) * 1e3:9.1f} {median(times[b]) * 1e3:9.1f} {speed:6.2f}")
            results.append({"part": "dense", "head_dim": dim, "what": what, "ours_ms": median(times[a]) * 1e3, "torch_ms": median(times[b]) * 1e3, "speed": speed})


def live_share(indices, causal, seqlen):
    """Share of 128x128 tiles with a visible element, counted from the dense matrix one tile row at a time."""
    mask = capi.mask(seqlen, seqlen, flags=capi.CAUSAL if causal else 0)
    if indices is not None:
        mask.bounds = capi.tensor(indices)
    dense_matrix = np.empty((1, 1, seqlen, seqlen), np.bool_)
    Ours.check(lib.fm_mask_to_dense(C.byref(mask), C.byref(capi.tensor(dense_matrix))))
    tiles = seqlen // 128
    return float(dense_matrix.reshape(tiles, 128, tiles, 128).any(axis=(1, 3)).mean())


def masks(args, results):
    seqlen, dim = args.mask_seqlen, args.mask_head_dim
    arrays = draw(args.heads, seqlen, dim)
    print(f"\nThe paper's masks, S = {seqlen}, d = {dim}, {args.heads} heads; ratio = time / (live share x our dense time)")
    print(f"{'mask':24} {'live':>6} {'plan ms':>8} {'fwd ms':>8} {'ratio':>6} {'both ms':>8} {'ratio':>6}")
    full = Ours(*arrays, threads=args.threads)
    for name in NAMES:
        indices, causal = paper_mask(name, seqlen)
        share = live_share(indices, causal, seqlen)
        ours = Ours(*arrays, indices, causal, threads=args.threads)
        times = interleaved({"mask": ours.forward, "full": full.forward, "mask both": ours.forward_backward, "full both": full.forward_backward}, args.rounds, name)
        forward, both = ratio(times, "mask", "full") / share, ratio(times, "mask both", "full both") / share
        print(f"{name:24} {share:6.3f} {ours.plan_seconds * 1e3:8.2f} {median(times['mask']) * 1e3:8.1f} {forward:6.2f} {median(times['mask both']) * 1e3:8.1f} {both:6.2f}")
        results.append({"part": "masks", "mask": name, "live": share, "plan_ms": ours.plan_seconds * 1e3, "forward_ratio": forward, "both_ratio": both})


def memory(args, results):
    print("\nPeak memory of one process, causal forward + backward, 1 head, d = 64")
    for seqlen in (16384, 32768, 65536):
        run = subprocess.run([sys.executable, __file__, "--peak-memory-of", str(seqlen)], capture_output=True, text=True, check=True)
        base, peak = map(int, run.stdout.split())
        print(f"S = {seqlen:6}: {peak / 1024:8.1f} MiB, {(peak - base) / seqlen * 1024:7.0f} bytes a token above the start")
        results.append({"part": "memory", "seqlen": seqlen, "peak_kib": peak, "base_kib": base})


def high_water_kib():
    """Peak resident memory of this program (getrusage would also count what its parent had when it was started)."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def peak_memory_of(seqlen, threads):
    base = high_water_kib()
    Ours(*draw(1, seqlen, 64), causal=True, threads=threads).forward_backward()
    print(base, high_water_kib())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dense-seqlen", type=int, default=4096)
    parser.add_argument("--mask-seqlen", type=int, default=8192)
    parser.add_argument("--mask-head-dim", type=int, default=64)
    parser.add_argument("--parts", default="dense,masks,memory", help="comma-separated")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--peak-memory-of", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_memory_of:
        return peak_memory_of(args.peak_memory_of, args.threads)
    results = []
    for part in args.parts.split(","):
        {"dense": dense, "masks": masks, "memory": memory}[part](args, results)
    if args.json:
        Path(args.json).write_text(json.dumps({"threads": args.threads, "rounds": args.rounds, "heads": args.heads, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
