# SPDX-License-Identifier: Apache-2.0
"""Training by examples/long_context over all GPUs of a machine: tokens per second at 128K and 256K tokens.

    scripts/gpu-check long-context                                            # a model of 1.1 B parameters, over NCCL
    python -m benchmarks.context_parallel.long_context --device cpu --ranks 2    # a tiny one over gloo: a dry run

The receipt is long-context.json. A length fails if a loss is not finite, or no step but the first had the time.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import ROOT, receipts
from benchmarks.instruments import kernels_used, timing

EXAMPLE = ROOT / "examples" / "long_context" / "train.py"
LENGTHS = {"cuda": (131072, 262144), "cpu": (512, 1024)}
# Fields of the example's receipt that this one keeps.
SHAPE = ("seqlen", "parameters", "hidden", "heads", "kv_heads", "dp", "cp")
MEASURED = ("losses", "tokens_per_second", "peak_memory_gb")


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="processes (one for each GPU)")
    parser.add_argument("--steps", type=int, default=12, help="of each length; the first does not count (12)")
    parser.add_argument("--seconds", type=float, default=90, help="for the steps of a length (90)")
    arguments = parser.parse_args(words)
    if arguments.ranks < 2:
        parser.error(f"--ranks is {arguments.ranks}; it must be at least 2")
    return arguments


def train(seqlen, arguments, folder):
    """Runs the example with sequences of one length; returns SHAPE and MEASURED of its receipt."""
    written = Path(folder) / f"{seqlen}.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    options = {"seqlen": seqlen, "steps": arguments.steps, "seconds": arguments.seconds, "receipt": written}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    no_gpus = {"CUDA_VISIBLE_DEVICES": ""} if arguments.device == "cpu" else {}
    subprocess.run([*launcher, str(EXAMPLE), *words], check=True, env={**os.environ, **no_gpus})
    said = json.loads(written.read_text())
    return {name: said[name] for name in SHAPE + MEASURED}


def holds(run):
    """Tells if a length has a speed, and losses that are numbers."""
    return run["tokens_per_second"] is not None and all(math.isfinite(loss) for loss in run["losses"])


def begin_receipt(arguments, words):
    on_gpu = arguments.device == "cuda"
    environment = timing.environment() if on_gpu else {"device": "CPU", "driver": "none", "toolkit": "none"}
    environment["torch"] = torch.__version__
    command = shlex.join(["python", "-m", "benchmarks.context_parallel.long_context", *words])
    receipt = receipts.new("long-context", environment, command)
    receipt["kind"] = "gpu" if on_gpu else "cpu"
    receipt["figures"]["runs"] = []
    return receipt


def shapes_of(run):
    """Cases as receipts have them: a rank's rows, whose dk and dv have yet to be added up."""
    head_dim, rows = run["hidden"] // run["heads"], run["seqlen"] // run["cp"]
    for op, more in (("fwd", {}), ("bwd", {"partial": "rounded"})):
        yield kernels_used.case_of(op, head_dim, rows, 1, run["heads"], run["kv_heads"]) | more


def kernels_of(runs):
    """{toolkit, kernel_hashes} of the kernels that these runs' ranks take, with positions and without."""
    library = kernels_used.here()
    used = library.of_all(shape for run in runs for shape in shapes_of(run))
    hashes = {i: h for i, h in sorted(library.hashes.items()) if i.replace(".pos", "") in used}
    return {"toolkit": library.toolkit, "kernel_hashes": hashes}


def main(words=None):
    words = sys.argv[1:] if words is None else words
    arguments = parse(words)
    on_gpu = arguments.device == "cuda"
    receipt = begin_receipt(arguments, words)
    runs = receipt["figures"]["runs"]
    path = Path(os.environ.get("OUT") or (receipts.output_folder() if on_gpu else ROOT / "build")) / "long-context.json"
    with tempfile.TemporaryDirectory() as folder:
        for seqlen in LENGTHS[arguments.device]:
            runs.append(train(seqlen, arguments, folder))
            receipt["tests"] = {"passed": sum(map(holds, runs)), "failed": sum(not holds(run) for run in runs)}
            receipt["complete"] = len(runs) == len(LENGTHS[arguments.device])
            if on_gpu:
                receipt.update(kernels_of(runs))
            receipts.write(receipt, path)
    for run in runs:
        print(f"{'PASS' if holds(run) else 'FAIL'}  {run['seqlen']} tokens: {run['tokens_per_second']:,.0f} tokens/s")
    print(f"receipt {path}")
    return int(receipt["tests"]["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
