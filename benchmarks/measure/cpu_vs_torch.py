# SPDX-License-Identifier: Apache-2.0
"""The CPU backend against PyTorch's CPU attention, and against itself without a mask, in one run.

    pip install torch numpy
    export FLASHMASK_LIBRARY=build/release/src/libflashmask.so PYTHONPATH=python
    python -m benchmarks.measure.cpu_vs_torch [--rounds 5] [--json FILE]

Three parts: dense forward and forward + backward next to torch.nn.functional.scaled_dot_product_attention; the paper's
twelve masks, their time over (live share of 128x128 tiles) x our dense time, next to the same function with the mask as
a matrix of bools, and with --flex next to FlexAttention's forward; peak memory of forward + backward over the length.
Contenders take turns in every round; ratios are medians over the rounds.

--parts partial is a fourth: what the element masks of partial tiles cost. It needs no PyTorch.

--peak does none of these and needs no PyTorch: GFLOP/s of the dense forward and backward, and their share of the
float32 multiply-adds that build/release/bin/fma_peak measures in the same round with as many threads.
"""

import argparse
import ctypes as C
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np
from flashmask import capi

from benchmarks import ROOT
from benchmarks.instruments.orders import orders
from benchmarks.masks.paper_masks import NAMES, paper_mask

lib = capi.load()


def tensor(array):
    """numpy has no bfloat16: its bits are uint16 here."""
    if array.dtype != np.uint16:
        return capi.tensor(array)
    t = capi.tensor(array.view(np.float16))
    t.dtype = capi.BFLOAT16
    return t


class Ours:
    """Buffers and arguments of one call, [batch, heads, seqlen, dim] in memory as PyTorch lays it out."""

    def __init__(self, q, k, v, dout, indices=None, causal=False, threads=2):
        def bshd(x):
            return tensor(x.transpose(0, 2, 1, 3))

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
        common = dict(
            q=bshd(q),
            k=bshd(k),
            v=bshd(v),
            out=bshd(self.out),
            lse=self.lse,
            mask=C.pointer(self.mask),
            plan=self.plan.ctypes.data,
            plan_bytes=self.plan.nbytes,
        )
        self.forward_args = capi.make(capi.ForwardArgs, **common)
        self.backward_args = capi.make(
            capi.BackwardArgs, **common, dout=bshd(dout), dq=bshd(self.dq), dk=bshd(self.dk), dv=bshd(self.dv)
        )
        sizes = []
        for query, args in (
            (lib.fm_forward_workspace, self.forward_args),
            (lib.fm_backward_workspace, self.backward_args),
        ):
            self.check(query(C.byref(args), C.byref(self.options), C.byref(size)))
            sizes.append(size.value)
        self.workspace = np.empty(max(sizes), np.uint8)

    @staticmethod
    def check(status):
        if status != capi.OK:
            raise RuntimeError(lib.fm_last_error().decode())

    def call(self, function, args):
        self.check(
            function(
                C.byref(args),
                self.workspace.ctypes.data_as(C.c_void_p),
                C.c_size_t(self.workspace.nbytes),
                C.byref(self.options),
            )
        )

    def forward(self):
        self.call(lib.fm_forward, self.forward_args)

    def backward(self):
        self.call(lib.fm_backward, self.backward_args)

    def forward_backward(self):
        self.forward()
        self.backward()


def seconds(function):
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def interleaved(contenders, rounds, label):
    """Seconds of every contender in every round, in another order each round."""
    times = {name: [] for name in contenders}
    for function in contenders.values():
        function()  # warm-up
    for n, order in enumerate(orders(contenders, rounds)):
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


class Torch:
    """PyTorch's attention of the same values."""

    def __init__(self, arrays, visible=None):
        import torch

        def as_tensor(x):
            return (
                torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == np.uint16 else torch.from_numpy(x)
            )

        self.no_grad = torch.no_grad
        self.q, self.k, self.v, self.dout = map(as_tensor, arrays)
        self.grads = [x.clone().requires_grad_(True) for x in (self.q, self.k, self.v)]
        self.mask = None if visible is None else torch.from_numpy(visible)

    def attention(self, *qkv):
        import torch

        return torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=self.mask)

    def forward(self):
        with self.no_grad():
            return self.attention(self.q, self.k, self.v)

    def forward_backward(self):
        for x in self.grads:
            x.grad = None
        self.attention(*self.grads).backward(self.dout)


class Flex:
    """FlexAttention's compiled forward."""

    def __init__(self, arrays, name, seqlen):
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        from benchmarks.masks.flex_masks import flex_mask

        torch._dynamo.reset()
        mask_mod = flex_mask(name, seqlen, torch.from_numpy)
        self.block_mask = mask_mod and create_block_mask(mask_mod, None, None, seqlen, seqlen, device="cpu")
        self.qkv = [torch.from_numpy(x) for x in arrays[:3]]
        self.compiled = torch.compile(flex_attention)

    def forward(self):
        import torch

        with torch.no_grad():
            return self.compiled(*self.qkv, block_mask=self.block_mask)


def to_bfloat16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def as_float32(x):
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def dense(args, results):
    speeds = []
    print(f"Dense, {args.heads} heads, {args.threads} threads; speed = PyTorch's time / ours")
    print(f"{'dtype':9} {'S':>6} {'d':>4} {'':9} {'ours ms':>9} {'torch ms':>9} {'speed':>6}")
    for dtype in args.dtypes.split(","):
        for seqlen in map(int, args.dense_seqlen.split(",")):
            for dim in (64, 128):
                speeds += dense_cell(args, results, dtype, seqlen, dim)
    print(f"geometric mean of the speeds {geometric_mean(speeds):.2f}, least {min(speeds):.2f}")


def dense_cell(args, results, dtype, seqlen, dim):
    arrays = draw(args.heads, seqlen, dim)
    if dtype == "bfloat16":
        arrays = [to_bfloat16(x) for x in arrays]
    ours, peer = Ours(*arrays, threads=args.threads), Torch(arrays)
    contenders = {
        "ours": ours.forward,
        "torch": peer.forward,
        "ours both": ours.forward_backward,
        "torch both": peer.forward_backward,
    }
    times = interleaved(contenders, args.rounds, f"{dtype} S={seqlen} d={dim}")
    assert np.abs(as_float32(ours.out) - peer.forward().float().numpy()).max() < (1e-4 if dtype == "float32" else 2e-2)
    speeds = []
    for what, a, b in (("forward", "ours", "torch"), ("fwd + bwd", "ours both", "torch both")):
        speeds.append(ratio(times, b, a))
        ours_ms, torch_ms = median(times[a]) * 1e3, median(times[b]) * 1e3
        print(f"{dtype:9} {seqlen:6} {dim:4} {what:9} {ours_ms:9.1f} {torch_ms:9.1f} {speeds[-1]:6.2f}", flush=True)
        results.append(
            {
                "part": "dense",
                "dtype": dtype,
                "seqlen": seqlen,
                "head_dim": dim,
                "what": what,
                "ours_ms": ours_ms,
                "torch_ms": torch_ms,
                "speed": speeds[-1],
            }
        )
    return speeds


def visible_matrix(indices, causal, seqlen):
    mask = capi.mask(seqlen, seqlen, flags=capi.CAUSAL if causal else 0)
    if indices is not None:
        mask.bounds = capi.tensor(indices)
    visible = np.empty((1, 1, seqlen, seqlen), np.bool_)
    Ours.check(lib.fm_mask_to_dense(C.byref(mask), C.byref(capi.tensor(visible))))
    return visible


def live_share(visible):
    """Share of 128x128 tiles with a visible element."""
    tiles = visible.shape[2] // 128
    return float(visible.reshape(tiles, 128, tiles, 128).any(axis=(1, 3)).mean())


def masks(args, results):
    seqlen, dim = args.mask_seqlen, args.mask_head_dim
    arrays = draw(args.mask_heads, seqlen, dim)
    print(
        f"\nThe paper's masks, S = {seqlen}, d = {dim}, {args.mask_heads} heads; "
        "ratio = time / (live share x our dense time);"
    )
    print("speed = time of PyTorch with the mask as a matrix / ours, and the same x live share")
    print(
        f"{'mask':24} {'live':>6} {'plan ms':>8} {'fwd ms':>8} {'ratio':>6} {'speed':>6} {'x live':>6}"
        f" {'both ms':>8} {'ratio':>6} {'speed':>6} {'x live':>6}" + (f" {'flex speed':>10}" if args.flex else "")
    )
    full = Ours(*arrays, threads=args.threads)
    for name in NAMES:
        masks_row(args, results, arrays, full, name)


def masks_row(args, results, arrays, full, name):
    indices, causal = paper_mask(name, args.mask_seqlen)
    visible = visible_matrix(indices, causal, args.mask_seqlen)
    share = live_share(visible)
    ours, peer = Ours(*arrays, indices, causal, threads=args.threads), Torch(arrays, visible)
    contenders = {
        "mask": ours.forward,
        "full": full.forward,
        "torch": peer.forward,
        "mask both": ours.forward_backward,
        "full both": full.forward_backward,
        "torch both": peer.forward_backward,
    }
    if args.flex:
        contenders["flex"] = Flex(arrays, name, args.mask_seqlen).forward
    times = interleaved(contenders, args.rounds, name)
    row = {"part": "masks", "mask": name, "live": share, "plan_ms": ours.plan_seconds * 1e3}
    line = f"{name:24} {share:6.3f} {row['plan_ms']:8.2f}"
    for what, suffix in (("forward", ""), ("both", " both")):
        over_dense, speed = (
            ratio(times, "mask" + suffix, "full" + suffix) / share,
            ratio(times, "torch" + suffix, "mask" + suffix),
        )
        line += f" {median(times['mask' + suffix]) * 1e3:8.1f} {over_dense:6.2f} {speed:6.2f} {speed * share:6.2f}"
        row |= {f"{what}_ratio": over_dense, f"{what}_speed": speed}
    if args.flex:
        row["flex_speed"] = ratio(times, "flex", "mask")
        line += f" {row['flex_speed']:10.2f}"
    print(line, flush=True)
    results.append(row)


def memory(args, results):
    print("\nPeak memory of one process, causal forward + backward, 1 head, d = 64")
    for seqlen in (16384, 32768, 65536):
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.measure.cpu_vs_torch", "--peak-memory-of", str(seqlen)],
            capture_output=True,
            text=True,
            check=True,
        )
        base, peak = map(int, run.stdout.split())
        print(
            f"S = {seqlen:6}: {peak / 1024:8.1f} MiB, "
            f"{(peak - base) / seqlen * 1024:7.0f} bytes a token above the start"
        )
        results.append({"part": "memory", "seqlen": seqlen, "peak_kib": peak, "base_kib": base})


def measured_peak(args):
    """GFLOP/s of multiply-adds, and the instruction set they and the kernels use."""
    run = subprocess.run([args.fma_peak, str(args.threads), "200"], capture_output=True, text=True, check=True)
    gflops, target = run.stdout.split()
    return float(gflops), target


def peak(args, results):
    print(
        f"Dense, float32, {args.heads} heads, {args.threads} threads, {measured_peak(args)[1]}; "
        "peak: float32 multiply-adds, measured in the same"
    )
    print(
        "rounds. Counted are the products alone, 4 S S d operations a head forward and 10 backward; "
        "medians over the rounds."
    )
    print(f"{'S':>6} {'d':>4} {'':9} {'ms':>9} {'GFLOP/s':>8} {'peak':>8} {'share':>6}")
    for seqlen in map(int, args.dense_seqlen.split(",")):
        for dim in (64, 128):
            peak_cell(args, results, seqlen, dim)


def peak_cell(args, results, seqlen, dim):
    ours = Ours(*draw(args.heads, seqlen, dim), threads=args.threads)
    ours.forward_backward()  # warm-up
    calls = {"forward": (ours.forward, 4), "backward": (ours.backward, 10)}
    rounds = {what: [] for what in calls}
    for _ in range(args.rounds):
        for what, (function, products) in calls.items():
            # As long as the measurement of the peak: a virtual machine's speed changes from one tenth of a second to
            # the next.
            before, taken, count = measured_peak(args)[0], 0.0, 0
            while taken < 0.2:
                taken, count = taken + seconds(function), count + 1
            after = measured_peak(args)[0]
            rounds[what].append(
                (taken / count, products * seqlen**2 * dim * args.heads * count / taken * 1e-9, (before + after) / 2)
            )
    for what, measured in rounds.items():
        ms = median(t for t, _, _ in measured) * 1e3
        gflops, top = median(g for _, g, _ in measured), median(p for _, _, p in measured)
        share = median(g / p for _, g, p in measured)
        print(f"{seqlen:6} {dim:4} {what:9} {ms:9.2f} {gflops:8.1f} {top:8.1f} {share:6.1%}", flush=True)
        results.append(
            {
                "part": "peak",
                "seqlen": seqlen,
                "head_dim": dim,
                "what": what,
                "ms": ms,
                "gflops": gflops,
                "peak_gflops": top,
                "share": share,
            }
        )


def all_partial(seqlen):
    """A mask whose tiles of 64 rows and 128 keys are all partial; a key hides one row, and the keys of a key
    tile go through the row tiles."""
    assert seqlen % 128 == 0 and seqlen <= 8192, "a key tile has 128 keys for as many row tiles"
    key = np.arange(seqlen, dtype=np.int32)
    row = 64 * (key % (seqlen // 64)) + 11
    return np.stack([row, row + 1, 0 * row, 0 * row], axis=-1).reshape(1, 1, seqlen, 4)


def partial(args, results):
    print(
        f"\nWhat element masks cost, {args.mask_heads} heads, float32: "
        "every tile partial, with hidden elements in each, over every tile full"
    )
    print(f"{'S':>6} {'d':>4} {'':9} {'full ms':>9} {'partial ms':>10} {'ratio':>6}")
    for dim in (64, 128):
        arrays = draw(args.mask_heads, 4096, dim)
        calls = {
            "full": Ours(*arrays, threads=args.threads),
            "partial": Ours(*arrays, all_partial(4096), threads=args.threads),
        }
        for ours in calls.values():
            ours.forward()
        for what in ("forward", "backward"):
            times = interleaved(
                {name: getattr(ours, what) for name, ours in calls.items()}, args.rounds, f"partial d={dim}"
            )
            cell = {
                "part": "partial",
                "seqlen": 4096,
                "head_dim": dim,
                "what": what,
                "full_ms": median(times["full"]) * 1e3,
                "partial_ms": median(times["partial"]) * 1e3,
                "ratio": ratio(times, "partial", "full"),
            }
            print(
                f"{4096:6} {dim:4} {what:9} {cell['full_ms']:9.1f} {cell['partial_ms']:10.1f} {cell['ratio']:6.3f}",
                flush=True,
            )
            results.append(cell)


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
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the dense part; comma-separated")
    parser.add_argument("--dense-seqlen", default="1024,4096", help="comma-separated")
    parser.add_argument("--mask-heads", type=int, default=2)
    parser.add_argument(
        "--flex",
        action="store_true",
        help="FlexAttention's forward too, which torch.compile has to build for each mask",
    )
    parser.add_argument("--mask-seqlen", type=int, default=8192)
    parser.add_argument("--mask-head-dim", type=int, default=64)
    parser.add_argument("--parts", default="dense,masks,memory", help="comma-separated")
    parser.add_argument(
        "--peak", action="store_true", help="the share of this machine's multiply-adds instead of any other part"
    )
    parser.add_argument(
        "--fma-peak", default=str(ROOT / "build/release/bin/fma_peak"), help="the program that measures them"
    )
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--peak-memory-of", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_memory_of:
        return peak_memory_of(args.peak_memory_of, args.threads)
    parts = ["peak"] if args.peak else args.parts.split(",")
    if {"dense", "masks"} & set(parts):
        import torch

        torch.set_num_threads(args.threads)
    results = []
    for part in parts:
        {"dense": dense, "masks": masks, "memory": memory, "partial": partial, "peak": peak}[part](args, results)
    if args.json:
        Path(args.json).write_text(
            json.dumps(
                {"threads": args.threads, "rounds": args.rounds, "heads": args.heads, "results": results}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    sys.exit(main())
