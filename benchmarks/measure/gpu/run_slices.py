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
import sys

from benchmarks.measure.gpu import slices


def measure(words, semaphore):
    from benchmarks.instruments import gpu_lock
    from benchmarks.measure.gpu import bench

    gpu_lock.share(semaphore)
    try:
        sys.exit(bench.main(words))
    finally:
        gpu_lock.give()


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    slices.add_arguments(parser)
    parser.add_argument(
        "--jobs", type=int, default=3, help="slices at once; each holds one cell's tensors, up to 45 GiB"
    )
    arguments, rest = parser.parse_known_args(words)
    slices.check_arguments(parser, arguments)
    return arguments, rest


def run(commands, jobs):
    """The worst exit status. A process that died may have died with the turn, so all the others are ended."""
    context = multiprocessing.get_context("spawn")
    semaphore, waiting, running, worst = context.Semaphore(1), list(commands), {}, 0
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
    return run([words + rest for words in slices.chosen(arguments)], arguments.jobs)


if __name__ == "__main__":
    sys.exit(main())
