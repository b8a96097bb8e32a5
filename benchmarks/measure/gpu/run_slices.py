# SPDX-License-Identifier: Apache-2.0
"""Several slices of the paper's benchmark (bench.py paper) at once: one measures while the others compile.

    python -m benchmarks.measure.gpu.run_slices --slices fwd:128:8192,fwd:128:32768,bwd:64:8192 --jobs 3
    python -m benchmarks.measure.gpu.run_slices --slices stale --longest 32768

Each slice is a process of its own with the receipt that `bench.py paper` writes. Only one of them uses the GPU at a
time (gpu_lock.py); what the others trace and compile meanwhile is FlexAttention. `stale` stands for all cells of the
kernel set in use whose receipt in benchmarks/results is of other machine code than the library's, the shortest first.
"""

import argparse
import multiprocessing
import multiprocessing.connection
import re
import sys

from benchmarks import receipts


def measure(words, semaphore):
    from benchmarks.instruments import gpu_lock
    from benchmarks.measure.gpu import bench

    gpu_lock.share(semaphore)
    try:
        sys.exit(bench.main(words))
    finally:
        gpu_lock.give()


STALE = "stale"
FORMS = (
    "op:head_dim:seqlen (head_dim/head_dim_v), :mask+mask behind it, :kvN for N key heads behind that or in its place"
)


def slice_of(text):
    """bench.py arguments for fwd:128:8192, bwd:192/128:8192:full+causal, fwd:64:8192:kv8 or fwd:64:8192:causal:kv8."""
    parts = text.split(":")
    heads_kv = ["--heads-kv", parts.pop()[2:]] if re.fullmatch(r"kv\d+", parts[-1]) else []
    if len(parts) not in (3, 4):
        raise argparse.ArgumentTypeError(f"'{text}' is not {FORMS}")
    parts[1], _, head_dim_v = parts[1].partition("/")
    words = zip(("--op", "--head-dim", "--seqlen", "--masks"), (part.replace("+", ",") for part in parts))
    of_v = ["--head-dim-v", head_dim_v] if head_dim_v else []
    return ["paper", *(word for pair in words for word in pair), *of_v, *heads_kv]


def slices_of(text):
    return text if text == STALE else [slice_of(part) for part in text.split(",")]


def stale_slices(found, library, arch, longest=None):
    """Slices of the cells of a kernel set in {file name: receipt} that are stale, up to a length."""
    masks = {}
    for _, case, state in receipts.judge(found, library):
        if case and case["arch"] == arch and state != receipts.FRESH and case["seqlen"] <= (longest or case["seqlen"]):
            sizes = tuple(case[name] for name in ("seqlen", "op", "head_dim", "head_dim_v", "heads_kv"))
            masks.setdefault(sizes, []).append(case["mask"])
    return [
        slice_of(f"{op}:{head_dim}/{head_dim_v}:{seqlen}:{'+'.join(names)}:kv{heads_kv}")
        for (seqlen, op, head_dim, head_dim_v, heads_kv), names in sorted(masks.items())
    ]


def stale_here(longest):
    """stale_slices of benchmarks/results, by the library and the device here."""
    from benchmarks.instruments import kernels_used

    library = kernels_used.here()
    found = stale_slices(receipts.load_folder(), library, library.arch, longest)
    print(f"{len(found)} slices of {library.arch} have stale cells", flush=True)
    return found


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--slices", type=slices_of, required=True, help=f"{STALE}, or slices with commas between, each {FORMS}"
    )
    parser.add_argument("--longest", type=int, help=f"longest sequence, with --slices {STALE}; default: any")
    parser.add_argument(
        "--jobs", type=int, default=3, help="slices at once; each holds one cell's tensors, up to 45 GiB"
    )
    arguments, rest = parser.parse_known_args(words)
    if arguments.longest and arguments.slices != STALE:
        parser.error(f"--longest is {arguments.longest}, which only --slices {STALE} takes")
    return arguments, rest


def run(slices, jobs):
    """The worst exit status. A process that died may have died with the turn, so all the others are ended."""
    context = multiprocessing.get_context("spawn")
    semaphore, waiting, running, worst = context.Semaphore(1), list(slices), {}, 0
    while waiting or running:
        while waiting and len(running) < jobs:
            process = context.Process(target=measure, args=(waiting.pop(0), semaphore))
            process.start()
            running[process.sentinel] = process
        for sentinel in multiprocessing.connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            worst = max(worst, abs(process.exitcode))
            if process.exitcode < 0:
                for other in running.values():
                    other.terminate()
                sys.exit(f"a slice was ended by signal {-process.exitcode}; the others were stopped")
    return worst


def main(words=None):
    arguments, rest = parse_arguments(words)
    slices = stale_here(arguments.longest) if arguments.slices == STALE else arguments.slices
    return run([slice_ + rest for slice_ in slices], arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
