# SPDX-License-Identifier: Apache-2.0
"""Context parallelism on the GPUs of one machine: time against one GPU, and against gathering all keys.

    scripts/gpu-check context-parallel                     # all cells on 2 GPUs; again, it goes on where it ended
    scripts/gpu-check context-parallel --ranks 4           # on 4, whose receipt is context-parallel-4.json
    python -m benchmarks.context_parallel.speed --device cpu   # a small dry run over gloo

The shapes are those of MARCO's table: 32K tokens in a batch of two and 128K; causal documents, documents, prefix-LM
documents; q / key heads 8/1, 32/4 and 64/8 of 128. In each cell all contenders (contenders.py) take turns, torch's
FlexAttention in those of 64/8 alone; a time is the slowest rank's, median over rounds. The bars apply to "auto", the
way that the cost model chooses, forward and backward together:

    speed-up over one GPU of 64/8, on 2 GPUs                  at least 1.9
    geometric mean of the speed-ups over one GPU              at least 1.93 on 2 GPUs; on 4, 3.5 at 32K and 3.85 at 128K
    cells, of 18, in which arrive is faster than gather       at least 15, on 2 GPUs
    fixed cost of gather: the time of its copies and messages less its bytes at the link's rate
                                                              at most 0.15 ms forward, 0.3 ms backward
    an all-gather that is waited for, torch's FlexAttention   slower in every cell that has them
    the fastest of the ways                                   at most 2 % faster
    received keys over the least that any exchange needs      at most 1.1
    the cost model's time with this run's rates               within 10 %
    out and gradients against one GPU's                       as near as rounding allows

The receipt, context-parallel.json, grows with each cell. NVLink multicast stays off (NCCL_NVLS_ENABLE=0).
"""

import argparse
import dataclasses
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from flashmask.context_parallel import Machine, place
from flashmask.context_parallel.attention import WAYS

from benchmarks import ROOT, receipts
from benchmarks.context_parallel import contenders
from benchmarks.context_parallel.bars import PEERS, both, joint_judgements, judgements, run_judgements
from benchmarks.context_parallel.placement import KINDS, document_mask
from benchmarks.instruments import kernels_used, timing
from benchmarks.instruments.orders import orders

LENGTHS = {"cuda": ((32768, 2), (131072, 1)), "cpu": ((1024, 2), (2048, 1))}
HEADS = {"cuda": ((8, 1), (32, 4), (64, 8)), "cpu": ((4, 1), (4, 2))}
HEAD_DIM = {"cuda": 128, "cpu": 16}
LINK_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
STEP_MS = {"cuda": 200, "cpu": 20}  # that a contender runs in a round
AHEAD_CYCLES = 100_000_000  # keep a GPU busy for some 50 ms, in which the host enqueues the calls
UNFINISHED = 3  # exit status


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=2, help="processes, a GPU each (2)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=8, help="after which no cell begins (8)")
    parser.add_argument("--peers", default="", help=f"some of {','.join(PEERS)} (all; no flex on the CPU)")
    parser.add_argument("--fresh", action="store_true", help="measure cells again that the receipt has")
    arguments = parser.parse_args(words)
    on_gpu = arguments.device == "cuda"
    arguments.peers = arguments.peers.split(",") if arguments.peers else PEERS[: 2 if on_gpu else 1]
    if unknown := set(arguments.peers) - set(PEERS):
        parser.error(f"--peers has {', '.join(sorted(unknown))}; it must be some of {', '.join(PEERS)}")
    if on_gpu and torch.cuda.device_count() < arguments.ranks:
        parser.error(f"--ranks is {arguments.ranks}; there are {torch.cuda.device_count()} GPUs (or --device cpu)")
    return arguments


def cells(device):
    for seqlen, batch in LENGTHS[device]:
        for heads in reversed(HEADS[device]):
            for kind in KINDS:
                yield {"seqlen": seqlen, "batch": batch, "mask": kind, "heads": heads[0], "heads_kv": heads[1]}


def label(cell):
    return f"{receipts.short_length(cell['seqlen'])} {cell['mask']} {cell['heads']}/{cell['heads_kv']}"


# --- Measuring --------------------------------------------------------------------------------------


class Clock:
    """Times of phases that the device does one after the other."""

    def __init__(self, device):
        self.on_gpu, self.marks = device.type == "cuda", []

    def mark(self):
        if self.on_gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def phases(self):
        """ms between marks."""
        if self.on_gpu:
            self.marks[-1].synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:])]
        return [1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:])]


def slowest(values, device):
    """The largest of all ranks, each."""
    values = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.tolist()


def run(layer, repeats, device):
    """ms of a forward and a backward, and of the host until it has enqueued each; of the slowest rank."""
    dist.barrier()
    clock, host = Clock(device), [0.0, 0.0]
    if clock.on_gpu and getattr(layer, "ahead", False):
        torch.cuda._sleep(AHEAD_CYCLES)
    clock.mark()
    for _ in range(repeats):
        for n, phase in enumerate((layer.forward, layer.backward)):
            begin = time.perf_counter()
            phase()
            host[n] += 1e3 * (time.perf_counter() - begin)
            clock.mark()
    phases = clock.phases()
    times = [sum(phases[n::2]) / repeats for n in (0, 1)]
    return slowest([*times, *(x / repeats for x in host)], device)


def measure(layers, rounds, device):
    """{name: figures}: medians over rounds in which all take turns."""
    repeats = {}
    for name, layer in layers.items():
        run(layer, 1, device)
        repeats[name] = max(1, min(20, round(STEP_MS[device.type] / sum(run(layer, 1, device)[:2]))))
    samples = {name: [] for name in layers}
    for order in orders(layers, rounds):
        for name in order:
            samples[name].append(run(layers[name], repeats[name], device))
    names = ("forward_ms", "backward_ms", "forward_host_ms", "backward_host_ms")
    return {
        name: {n: round(statistics.median(values), 4) for n, values in zip(names, zip(*taken))}
        for name, taken in samples.items()
    }


def link_rate(device, size):
    """Bytes/s that a rank takes in from its neighbour while it sends as many."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def exchange():
        operations = [dist.P2POp(dist.isend, out, (rank + 1) % ranks), dist.P2POp(dist.irecv, into, (rank - 1) % ranks)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    for _ in range(3):
        exchange()
    dist.barrier()
    clock = Clock(device)
    clock.mark()
    for _ in range(10):
        exchange()
    clock.mark()
    return 10 * size / (slowest([sum(clock.phases())], device)[0] / 1e3)


def errors(layers, placement, rank, device):
    """{way: the largest error of out, dq, dk and dv against one process', over the largest value}."""
    want = [placement.shard(x, rank).float() for x in layers["one"].results()]
    largest = slowest([x.abs().max().item() for x in want], device)
    found = {}
    for way in contenders.OURS:
        if way in layers:
            off = [(x.float() - y).abs().max().item() for x, y in zip(layers[way].results(), want)]
            found[way] = max(e / m for e, m in zip(slowest(off, device), largest))
    return found


def measure_cell(cell, arguments, rank, device, link):
    torch.manual_seed(1)
    mask = document_mask(cell["mask"], cell["seqlen"], range(cell["batch"]))
    heads, d = (cell["heads"], cell["heads_kv"]), HEAD_DIM[arguments.device]
    placement = place(mask, arguments.ranks, heads=heads, head_dim=d)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    shape = mask.batch, cell["seqlen"]
    tensors = [torch.randn(*shape, h, d, dtype=dtype, device=device) for h in (heads[0], *heads[1:] * 2, heads[0])]
    local, found = contenders.layers(mask, placement, rank, tensors, arguments.peers)
    del tensors
    layers = {name: layer for name, layer in found.items() if not isinstance(layer, str)}
    received, times = max(placement.received_rows()), measure(layers, arguments.rounds, device)
    figures = {
        **cell,
        "head_dim": d,
        "auto": local.way(heads, d),
        "fastest": min((way for way in WAYS if way in times), key=lambda way: both(times[way])),
        "received_keys": int(slowest([local.received_keys], device)[0]),
        "least_received_keys": received,
        "errors": errors(layers, placement, rank, device),
        "times": times,
        "missing": {name: why for name, why in found.items() if isinstance(why, str)},
    }
    bytes_of_key = heads[1] * 2 * d * dtype.itemsize
    figures["keeps_keys"] = local.keeps_keys
    figures.update(fixed_costs(figures, figures["received_keys"] * bytes_of_key, link))
    figures["predicted_ms"] = predicted(placement, figures, link)
    return figures


def fixed_costs(figures, size, link):
    """ms of gather that are neither kernels nor bytes. Backward gradients leave in fp32, twice the bytes, and keys and
    values come again unless they are kept."""
    exchange, wire = figures["times"]["exchange"], 1e3 * size / link
    return {
        f"fixed_{phase}_ms": round(exchange[f"{phase}_ms"] - times * wire, 4)
        for phase, times in (("forward", 1), ("backward", 2 if figures["keeps_keys"] else 3))
    }


def predicted(placement, figures, link):
    """ms of each way by the cost model, with one GPU's rates and the link's as measured here."""
    one, heads = figures["times"]["one"], placement.heads
    tile = placement.unit * min(placement.unit, 128)
    flops = 4 * sum(placement.loads()) * tile * placement.head_dim * heads[0] / placement.masks[0].heads
    machine = dataclasses.replace(
        Machine(),
        forward_flops=flops / (one["forward_ms"] / 1e3),
        backward_flops=2.5 * flops / (one["backward_ms"] / 1e3),
        link=link,
        gpus_per_node=max(8, placement.world_size),
    )
    return {way: round(1e3 * c.total, 4) for way, c in placement.costs(machine=machine).items()}


# --- Printing ---------------------------------------------------------------------------------------


def lines(cell, device, ranks):
    one = both(cell["times"]["one"])
    yield f"{label(cell)}, auto: {cell['auto']}"
    for name, times in cell["times"].items():
        yield (
            f"  {name:11} {times['forward_ms']:9.3f} + {times['backward_ms']:9.3f} ms = {both(times):9.3f} ms, "
            f"{one / both(times):5.2f} x one; the host {times['forward_host_ms']:.3f} + {times['backward_host_ms']:.3f}"
        )
    yield from (f"  {name:11} not measured: {why}" for name, why in cell["missing"].items())
    yield from verdicts(judgements(cell, device, ranks))


def verdicts(judged):
    return (f"  {'PASS' if holds else 'FAIL'}  {what}: {figure:.4g} (bar {bar})" for what, figure, bar, holds in judged)


# --- The run ----------------------------------------------------------------------------------------


def run_rank(rank, arguments, words, meeting, done):
    """Runs one process; rank 0 writes the receipt."""
    warnings.simplefilter("ignore", FutureWarning)
    on_gpu = arguments.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    options = {}
    if on_gpu:  # as docs/context-parallel.md advises
        nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options = {"device_id": device, "pg_options": nccl}
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=arguments.ranks, **options)
    begin = time.monotonic()
    link = link_rate(device, LINK_BYTES[arguments.device])
    receipt = None if rank else begin_receipt(arguments, words, link)
    todo = [cell for cell in cells(arguments.device) if label(cell) not in done]
    for n, cell in enumerate(todo):
        # All ranks have to decide alike, or they would wait for each other.
        spent = slowest([time.monotonic() - begin], device)[0]
        if n and spent * (n + 1) / n > 60 * arguments.minutes:
            break
        figures = measure_cell(cell, arguments, rank, device, link)
        if on_gpu:
            torch.cuda.empty_cache()
        if rank == 0:
            add(receipt, figures, arguments)
    dist.barrier()
    dist.destroy_process_group()


def begin_receipt(arguments, words, link):
    """The receipt so far, or a new one."""
    on_gpu = arguments.device == "cuda"
    environment = timing.environment() if on_gpu else {"device": "CPU", "driver": "none", "toolkit": "none"}
    environment["torch"] = torch.__version__
    command = shlex.join(["python", "-m", "benchmarks.context_parallel.speed", *words])
    receipt = receipts.new(path_of(arguments).stem, environment, command)
    receipt["kind"] = "gpu" if on_gpu else "cpu"
    kept = [] if arguments.fresh else cells_of(arguments)
    held = {"ranks": arguments.ranks, "link_gb_s": round(link / 1e9, 2), "cells": kept}
    receipt["figures"]["context_parallel"] = held
    if on_gpu:
        library = kernels_used.here()
        of_shapes = library.of_all(run_shapes(arguments.ranks))
        # A rank's rows of a mask may have a band over positions.
        plain = lambda i: i.replace(".sink.pos", "").replace(".pos", "")
        hashes = {i: h for i, h in sorted(library.hashes.items()) if i in of_shapes or plain(i) in of_shapes}
        receipt.update(toolkit=library.toolkit, kernel_hashes=hashes)
    return receipt


def run_shapes(ranks):
    """Cases as receipts have them: one GPU's, those of a rank's rows, and of a rank's heads."""
    for cell in cells("cuda"):
        for rows, share in ((1, 1), (ranks, 1), (1, ranks)):
            heads = cell["heads"] // share, max(cell["heads_kv"] // share, 1)
            for op, partial in (
                ("fwd", None),
                ("bwd", None),
                ("fwd", "float32"),
                ("bwd", "float32"),
                ("bwd", "rounded"),
            ):
                case = kernels_used.case_of(op, HEAD_DIM["cuda"], cell["seqlen"] // rows, cell["batch"], *heads)
                yield case if partial is None else {**case, "partial": partial}


def path_of(arguments):
    """Path of the receipt, that of two ranks or of others; a run on the CPU writes to build/, not to the receipts."""
    folder = receipts.output_folder() if arguments.device == "cuda" else ROOT / "build" / "context-parallel"
    of_ranks = "" if arguments.ranks == 2 else f"-{arguments.ranks}"
    return Path(os.environ.get("OUT") or folder) / f"context-parallel{of_ranks}.json"


def cells_of(arguments):
    """The receipt's cells, if it has as many ranks."""
    path = path_of(arguments)
    held = json.loads(path.read_text())["figures"]["context_parallel"] if path.exists() else {"ranks": None}
    return held["cells"] if held["ranks"] == arguments.ranks else []


def add(receipt, figures, arguments):
    held = receipt["figures"]["context_parallel"]["cells"]
    held.append(figures)
    receipt["complete"] = len(held) == len(list(cells(arguments.device)))
    judged = list(run_judgements(held, arguments.device, arguments.ranks, receipt["complete"]))
    receipt["tests"] = {"passed": sum(x[3] for x in judged), "failed": sum(not x[3] for x in judged)}
    receipts.write(receipt, path_of(arguments))
    print("\n".join(lines(figures, arguments.device, arguments.ranks)), flush=True)
    if receipt["complete"] and arguments.device == "cuda":
        print("\n".join(["all cells", *verdicts(joint_judgements(held, arguments.ranks))]), flush=True)


def main(words=None):
    words = sys.argv[1:] if words is None else words
    arguments = parse(words)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    done = [] if arguments.fresh else [label(cell) for cell in cells_of(arguments)]
    with tempfile.TemporaryDirectory() as folder:
        shared = arguments, words, str(Path(folder) / "meeting"), done
        torch.multiprocessing.spawn(run_rank, shared, nprocs=arguments.ranks)
    receipt = json.loads(path_of(arguments).read_text())
    tests, held = receipt["tests"], receipt["figures"]["context_parallel"]["cells"]
    every = len(list(cells(arguments.device)))
    print(f"{len(held)} of {every} cells; {tests['passed']} bars held, {tests['failed']} missed: {path_of(arguments)}")
    if not receipt["complete"]:
        print("not all cells are measured: run it again, and it goes on")
        return UNFINISHED
    return int(tests["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
