# SPDX-License-Identifier: Apache-2.0
"""Time to a first output, in a fresh process.

A process that loads the library, plans and runs one call is compared with one that only creates a CUDA context and the
inputs, from ready inputs to its end: importing torch takes seconds, which scatter more than the bar. Bar: 0.3 s, for
this difference and for the seconds to the finished output.
"""

import subprocess
import sys
import time
from statistics import median

from benchmarks.instruments.kernels_used import case_of

BAR_SECONDS = 0.3
SEQLEN, HEADS = 8192, 8
HEAD_DIMS = (128, 64)
CHILD = [sys.executable, "-m", "benchmarks.measure.gpu.time_to_first_output"]


def child(head_dim):
    """Prints a line when the inputs are ready, then the seconds to a finished output; makes no call without a head
    dim."""
    import torch

    q, k, v = (torch.randn((1, SEQLEN, HEADS, head_dim or 128), dtype=torch.bfloat16, device="cuda") for _ in range(3))
    lts = torch.full((1, 1, SEQLEN, 1), SEQLEN, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    print("ready", flush=True)
    begin = time.perf_counter()
    if head_dim:
        from harness.calls import Forward, Mask, Plan

        mask = Mask(SEQLEN, SEQLEN, bounds=lts, causal=True)
        Forward(q, k, v, mask, plan=Plan(mask)).run()
        torch.cuda.synchronize()
    print(time.perf_counter() - begin)


def process(head_dim):
    """(seconds of the process from ready inputs to its end, seconds it printed)"""
    with subprocess.Popen([*CHILD, str(head_dim)], stdout=subprocess.PIPE, text=True) as started:
        started.stdout.readline()
        begin = time.perf_counter()
        said, _ = started.communicate()
        seconds = time.perf_counter() - begin
    if started.returncode != 0:
        raise RuntimeError(f"the process with a first call ended with status {started.returncode}")
    return seconds, float(said.split()[-1])


def rotated(items, n):
    """Rotates items so that each comes first in turn: a process finds warm caches after one like it."""
    n %= len(items)
    return (*items[n:], *items[:n])


def figures_of(head_dim, rounds):
    """Figures of rounds, each {head dim, or 0 without a call: what `process` gives}."""
    inside = median(times[head_dim][1] for times in rounds)
    outside = median(times[head_dim][0] - times[0][0] for times in rounds)
    return {
        "head_dim": head_dim,
        "seconds": inside,
        "process_difference": outside,
        "passed": max(inside, outside) <= BAR_SECONDS,
    }


def kernel_hashes(arguments):
    return arguments.kernels.of_all([case_of("fwd", d, SEQLEN, 1, HEADS, mask="causal") for d in HEAD_DIMS])


def run(arguments, receipt, save, progress_type):
    progress, rounds = progress_type([1] * arguments.rounds), []
    for n in range(arguments.rounds):
        rounds.append({head_dim: process(head_dim) for head_dim in rotated((0, *HEAD_DIMS), n)})
        progress.step(1, f"first calls: {n + 1} of {arguments.rounds}")
    figures = [figures_of(head_dim, rounds) for head_dim in HEAD_DIMS]
    for f in figures:
        print(
            f"{'PASS' if f['passed'] else 'FAIL'}  d={f['head_dim']:3} "
            f"first output after {f['seconds']:.3f} s in the process, "
            f"{f['process_difference']:.3f} s to its end beside one without a call (bar {BAR_SECONDS} s)"
        )
    receipt["figures"]["first"] = figures
    save()
    return all(f["passed"] for f in figures)


if __name__ == "__main__":
    child(int(sys.argv[1]))
