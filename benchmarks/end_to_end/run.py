# SPDX-License-Identifier: Apache-2.0
"""Training end to end: the FlashMask paper's results (arXiv:2410.01359, section 5 and appendix A) on one GPU.

    python -m benchmarks.end_to_end.run throughput   # tokens per second, first step, masks: figure 2
    python -m benchmarks.end_to_end.run memory       # against length, and the longest length: figures 4b, 7; table 2
    python -m benchmarks.end_to_end.run losses       # 100 steps, bit for bit: figure 3
    python -m benchmarks.end_to_end.run sparsity     # kernel time, 240 sequences in ten bins: figure 6
    python -m benchmarks.end_to_end.run tables       # every cell of tables 4 to 9, forward and backward
    python -m benchmarks.end_to_end.run list         # the processes that each makes, and about how long they take

Models of real shape with random weights are trained on packed synthetic documents (models.py, recipe.py), under one
attention after another (contenders.py), each in a process of its own (worker.py). Every result goes into a receipt as
soon as it is there: end-to-end-FIGURE.json in $OUT or benchmarks/results. A call ends within --seconds; the next one
takes the receipt up, from $OUT or benchmarks/results, and makes what is missing. Exit status: 0 if all is there and
every check holds, 1 if a check or a process fails, 3 if something is left to do.

Needs transformers, peft, and FLASHMASK_LIBRARY and FLASHMASK_TORCH_LIBRARY (`scripts/gpu-check end-to-end FIGURE` sets
them). --tiny: everything at its smallest, on the CPU unless --device says otherwise.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time

from benchmarks import ROOT, receipts
from benchmarks.end_to_end import figures, paper_tables

LEFT_TO_DO = 3
MEASURED_BY = ("device", "driver", "toolkit", "torch", "transformers", "kernel_hashes")  # what a receipt is one of
CACHE = ROOT / "build" / "end-to-end-cache"  # of the compilers of FlexAttention


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=[*figures.FIGURES, "tables", "list"])
    parser.add_argument("--seconds", type=float, default=570, help="for everything (570)")
    parser.add_argument("--only", default="", help="processes whose label contains this, as '1b ours' or 'sft'")
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        help="how many GPUs to use, with one process on each (1); contenders compared by time share a GPU",
    )
    parser.add_argument("--fresh", action="store_true", help="measure anew what the receipt has already")
    parser.add_argument("--tiny", action="store_true", help="at its smallest")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="cuda; with --tiny cpu")
    arguments = parser.parse_args(words)
    arguments.settings = figures.TINY if arguments.tiny else figures.Settings()
    if arguments.device:
        arguments.settings = arguments.settings._replace(device=arguments.device)
    if arguments.settings.device == "cpu" and not arguments.tiny and arguments.figure not in ("tables", "list"):
        parser.error("--device is cpu; without --tiny it must be cuda")
    if arguments.tiny and not os.environ.get("OUT"):
        parser.error("--tiny measures nothing worth keeping: set OUT to a folder for its receipt")
    return arguments


# --- Processes --------------------------------------------------------------------------------------


def environment_of(gpu):
    """Environment of a worker on the visible GPU with this index."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    more = {"CUDA_VISIBLE_DEVICES": visible.split(",")[gpu] if visible else str(gpu)}
    more |= {"TORCHINDUCTOR_CACHE_DIR": str(CACHE), "TRITON_CACHE_DIR": str(CACHE / "triton")}
    more |= {"HF_HUB_OFFLINE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **more}


class Worker:
    """A process of worker.py. It imports and draws what it needs from the start, and measures when it is told to."""

    def __init__(self, words, gpu=0):
        command = [sys.executable, "-m", "benchmarks.end_to_end.worker", json.dumps({**words, "waits": True})]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment_of(gpu), start_new_session=True
        )
        self.said = []
        self.reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True)
        self.reader.start()

    def results(self, seconds, take=lambda result: None):
        """Lets it measure and gives each result to `take`; ('' or why it failed, the last result)."""
        stop, last = threading.Timer(seconds, self.kill), None
        stop.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended; what it said tells why
                print("begin", file=self.process.stdin, flush=True)
            for line in self.process.stdout:
                if line.startswith("@"):
                    last = json.loads(line[1:])
                    take(last)
            status = self.process.wait()
        finally:
            late = not stop.is_alive()
            stop.cancel()
            self.end()
        if status == 0:
            return "", last
        return f"stopped after {seconds:.0f} s" if late else "".join(self.said)[-2000:] or f"exit status {status}", last

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self):
        if self.process.poll() is None:
            self.kill()
            self.process.wait()
        self.reader.join(5)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


def workers_of(jobs, clock, gpu=0):
    """(job, its Worker) of the jobs that there is time for: the next one's imports while one measures."""
    ahead = None
    try:
        for job, after in zip(jobs, [*jobs[1:], None]):
            worker, ahead = ahead, None
            if job.seconds <= clock.left():
                worker = worker or Worker(job.words, gpu)
                ahead = Worker(after.words, gpu) if after else None
                yield job, worker
            elif worker:
                worker.end()
    finally:
        if ahead:
            ahead.end()


def surroundings(figure, settings):
    """The receipt's header, of a process of its own: this one leaves the GPU alone."""
    cases = []
    for model, seqlen in sorted(figure.shapes(settings)):
        head_dim, heads, heads_kv = figures.MODEL_HEADS[model]
        cases += [(op, head_dim, seqlen, 1, heads, heads_kv) for op in ("fwd", "bwd")]
    if figure.name == "sparsity":
        head_dim, heads = settings.sparsity_head_dim, settings.sparsity_heads
        cases += [(op, head_dim, settings.sparsity_seqlen, 1, heads) for op in ("fwd", "bwd")]
    why, found = Worker({"figure": "environment", "device": settings.device, "cases": cases}).results(300)
    return found or sys.exit(f"the environment is not known: {why}")


# --- Receipts ---------------------------------------------------------------------------------------


def receipt_of(figure, arguments, command):
    """A receipt to go on with, or a new one."""
    header = surroundings(figure, arguments.settings)
    receipt = receipts.new(figures.topic(figure.name), header, command)
    receipt["kind"] = "gpu" if arguments.settings.device == "cuda" else "cpu"
    receipt["figures"] = {"settings": arguments.settings._asdict(), "results": [], "checks": []}
    if not arguments.fresh and (before := earlier(receipt)):
        differ = [name for name in MEASURED_BY if before.get(name) != receipt[name]]
        if differ:
            sys.exit(
                f"{receipt['what']}.json is of another {differ[0]} ({short(before.get(differ[0]))}; here "
                f"{short(receipt[differ[0]])}); --fresh measures everything anew"
            )
        kept = [r for r in before["figures"]["results"] if "failed" not in r]
        receipt["figures"]["results"] = kept
    return receipt


def short(value):
    return str(value)[:80]


def earlier(receipt):
    """The receipt of a call before, from $OUT or, if there is none, from benchmarks/results."""
    paths = [receipts.path_of(receipt)]
    if receipt["kind"] == "gpu":
        paths.append(receipts.path_of(receipt, receipts.RESULTS))
    path = next((path for path in paths if path.exists()), None)
    return json.loads(path.read_text()) if path else None


def keep(receipt, figure):
    """Writes the receipt with its checks."""
    checks = receipt["figures"]["checks"] = figure.checks(receipt["figures"]["results"])
    passed = sum(c["passed"] for c in checks)
    failed = len(checks) - passed + sum("failed" in r for r in receipt["figures"]["results"])
    receipt["tests"] = {"passed": passed, "failed": failed}
    receipts.write(receipt, receipts.path_of(receipt))


# --- The command ------------------------------------------------------------------------------------


class Clock:
    """Tracks the time left and the progress of the work."""

    def __init__(self, begin, seconds, jobs):
        self.begin, self.end = begin, begin + seconds
        self.total, self.done, self.guard = sum(job.seconds for job in jobs) or 1, 0.0, threading.Lock()

    def left(self):
        return self.end - time.monotonic()

    def did(self, seconds):
        """Counts seconds of the jobs as done."""
        with self.guard:
            self.done += seconds

    def say(self, text):
        spent, share = time.monotonic() - self.begin, self.done / self.total
        rest = f"{spent * (1 - share) / share:4.0f} s left" if share else "     ? left"
        print(f"[{share:4.0%} {spent:4.0f} s, {rest}] {text}", file=sys.stderr, flush=True)


def lanes_of(jobs, count):
    """`count` lists of about the same length, each in the order of `jobs`. Jobs beside each other share one."""
    groups = {}
    for n, job in enumerate(jobs):
        groups.setdefault(job.beside or n, []).append((n, job))
    lanes = [[] for _ in range(count)]
    length = lambda lane: sum(job.seconds for _, job in lane)  # noqa: E731
    for group in sorted(groups.values(), key=length, reverse=True):
        min(lanes, key=length).extend(group)
    return [[job for _, job in sorted(lane, key=lambda pair: pair[0])] for lane in lanes]


def told(result):
    """A result in a line."""
    for word in ("refused", "failed"):
        if word in result:
            return f"{word}: {str(result[word]).strip().splitlines()[-1][:160]}"
    if "out_of_memory" in result:
        return "out of memory"
    parts = {
        "step_ms": lambda x: f"{x:.0f} ms a step",
        "tokens_per_second": lambda x: f"{x:,.0f} tokens/s",
        "first_step_s": lambda x: f"first {x:.1f} s",
        "peak_bytes": lambda x: f"{x / 2**30:.1f} GiB",
        "mask_bytes": lambda x: f"mask {x / 2**20:.2f} MiB",
        "longest": lambda x: f"longest {x}",
        "losses": lambda x: f"loss {x[0]:.4f} -> {x[-1]:.4f}",
        "points": lambda x: f"{len(x)} sequences",
    }
    return ", ".join(show(result[name]) for name, show in parts.items() if result.get(name) is not None)


def todo(figure, settings, receipt, only=""):
    """The jobs that are left, without the tasks that are there."""
    have = {figure.key_of(r) for r in receipt["figures"]["results"] if "failed" not in r}
    for job in figure.jobs(settings):
        missing = [(task, key) for task, key in zip(job.words["tasks"], job.keys) if key not in have]
        if missing and only in job.label:
            words = {**job.words, "tasks": [task for task, _ in missing], "device": settings.device}
            share = len(missing) / len(job.keys)
            yield job._replace(words=words, keys=tuple(key for _, key in missing), seconds=job.seconds * share)


def run_job(job, worker, figure, receipt, clock):
    """Runs a job; what it did not come to is put down as failed."""
    is_cold = "filled" if CACHE.exists() and any(CACHE.iterdir()) else "empty"
    came = set()

    def take(result):
        if figure.name == "throughput":
            result["compiler_cache"] = is_cold
        came.add(figure.key_of(result))
        clock.did(job.seconds / len(job.keys))
        with clock.guard:
            receipt["figures"]["results"].append(result)
            keep(receipt, figure)
            clock.say(f"{' '.join(map(str, figure.key_of(result)))}: {told(result)}")

    why, _ = worker.results(clock.left(), take)
    for key in job.keys:
        if key not in came and clock.left() > 0:
            take({**dict(zip(figure.key, key)), "failed": why})


def measure(figure, arguments, command):
    begin, settings = time.monotonic(), arguments.settings
    receipt = receipt_of(figure, arguments, command)
    jobs = list(todo(figure, settings, receipt, arguments.only))
    clock = Clock(begin, arguments.seconds, jobs)
    clock.say(f"{figure.name}: {len(jobs)} processes, about {sum(job.seconds for job in jobs):.0f} s")

    def run_lane(gpu, lane):
        for job, worker in workers_of(lane, clock, gpu):
            run_job(job, worker, figure, receipt, clock)

    with concurrent.futures.ThreadPoolExecutor(arguments.gpus) as pool:
        list(pool.map(run_lane, range(arguments.gpus), lanes_of(jobs, arguments.gpus)))
    receipt["complete"] = not list(todo(figure, settings, receipt))
    keep(receipt, figure)
    return summary(receipt, len(list(todo(figure, settings, receipt, arguments.only))))


def summary(receipt, left):
    for c in receipt["figures"]["checks"]:
        bar = f"{'at most' if c.get('most') else 'at least'} {c['bar']:g}"
        print(f"{'PASS' if c['passed'] else 'FAIL'}  {c['name']}: {c['got']:.3f} ({bar})")
    if left:
        print(f"----  {left} processes are left: the same command goes on with them")
    failed = receipt["tests"]["failed"]
    print(f"{'FAIL' if failed else 'PASS'}  receipt {receipt['what']}.json: {receipt['device']}")
    return 1 if failed else LEFT_TO_DO if left else 0


def show_list(arguments):
    for name, figure in figures.FIGURES.items():
        jobs = list(figure.jobs(arguments.settings))
        print(f"{name}: {len(jobs)} processes, about {sum(job.seconds for job in jobs):.0f} s")
        for job in jobs:
            print(f"  {job.seconds:4.0f} s  {job.label}")
    slices = paper_tables.missing((receipts.RESULTS,), None)
    print(f"tables: {len(slices)} of {len(paper_tables.SLICES)} slices without a complete receipt")
    return 0


def main(words=None):
    words = sys.argv[1:] if words is None else words
    arguments = parse(words)
    if arguments.figure == "list":
        return show_list(arguments)
    if arguments.figure == "tables":
        return paper_tables.measure(arguments.seconds, arguments.fresh)
    command = shlex.join(["python", "-m", "benchmarks.end_to_end.run", *words])
    return measure(figures.FIGURES[arguments.figure], arguments, command)


if __name__ == "__main__":
    sys.exit(main())
