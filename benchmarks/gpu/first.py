# SPDX-License-Identifier: Apache-2.0
"""Time to a first output: a fresh process that loads the library, plans and runs one call, beyond one that only creates a
CUDA context and the inputs. Bar: 0.3 s."""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

BAR_SECONDS = 0.3
SEQLEN, HEADS = 8192, 8


def child(head_dim, attend):
    """Prints the seconds from ready inputs to a finished output (or to nothing)."""
    import torch

    q, k, v = (torch.randn((1, SEQLEN, HEADS, head_dim), dtype=torch.bfloat16, device="cuda") for _ in range(3))
    lts = torch.full((1, 1, SEQLEN, 1), SEQLEN, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    if attend:
        from flashmask_torch import Forward, Mask, Plan

        mask = Mask(SEQLEN, SEQLEN, bounds=lts, causal=True)
        Forward(q, k, v, mask, plan=Plan(mask)).run()
        torch.cuda.synchronize()
    print(time.perf_counter() - begin)


def process(head_dim, attend):
    """(wall seconds of the process, seconds it printed)"""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, str(head_dim), str(int(attend))], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return time.perf_counter() - begin, float(done.stdout.split()[-1])


def run(arguments, receipt, save, progress_type):
    progress, figures, passed = progress_type([1] * 2 * arguments.rounds), [], True
    for head_dim in (128, 64):
        pairs = []
        for n in range(arguments.rounds):
            pairs.append((process(head_dim, True), process(head_dim, False)))
            progress.step(1, f"first call d={head_dim}: {n + 1} of {arguments.rounds}")
        inside, outside = median(a[1] for a, _ in pairs), median(a[0] - b[0] for a, b in pairs)
        figures.append({"head_dim": head_dim, "seconds": inside, "process_difference": outside, "passed": inside <= BAR_SECONDS})
        passed &= figures[-1]["passed"]
        print(f"{'PASS' if inside <= BAR_SECONDS else 'FAIL'}  d={head_dim:3} first output after {inside:.3f} s in the process, {outside:.3f} s by whole processes (bar {BAR_SECONDS} s)")
    receipt["figures"]["first"] = figures
    save()
    return passed


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    child(int(sys.argv[1]), sys.argv[2] == "1")
