# SPDX-License-Identifier: Apache-2.0
"""Implements `scripts/gpu-check all` on the first GPU of this machine: for each kernel set that the GPU takes, the
tests and then the measurements that fit it, each a process with a receipt of its own.

The library tells the sets by the GPU's compute capability. If the GPU takes the tiles of 163 KiB (`sm80`), the tiles of
99 KiB (`sm86`) are tested by themselves and measured beside them. Receipts go to $OUT, or to benchmarks/results/DEVICE.
The last one, all.json, has the device, the steps, and the missed bars. A run that was cut off goes on where it ended,
as long as device and library stay the same; --again begins anew.

Needs a Python with torch, numpy and pytest, and nvcc where no library was built.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from harness import kernels

from benchmarks import ROOT, cell_bars, receipts
from benchmarks.instruments import kernels_used
from benchmarks.masks import paper_masks

BENCH, TESTS = ("-m", "benchmarks.measure.gpu.bench"), ("-m", "tools.gpu.run_tests")
SHAPES = {(64, 64): 12, (128, 128): 12, (96, 96): 2, (192, 128): 2, (192, 192): 2, (256, 256): 2}  # masks: all, or two
SEQLENS = (8192, 32768)
# (GiB of memory, tokens of a case): a backward cell with its peers takes some 0.3 MiB a token.
TOKENS = ((60, 131072), (36, 65536), (15, 32768), (0, 8192))
TOPICS = {"plan": 0, "first": 0, "padding": 8, "maskcost": 15}  # the GiB that they need
SECONDS = {"tests": 300, "fwd": 8, "bwd": 15, "topic": 40}  # about; of cells for each mask
PATIENCE = 5  # times the limits of the tests' parts, which are for an H200
PASSED, MISSED, FAILED = "passed", "below a bar", "failed"


class Device(NamedTuple):
    name: str
    capability: tuple  # (8, 6)
    memory_gib: float

    @property
    def folder(self):
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


class Step(NamedTuple):
    """A process. `receipt`: the name of what it leaves."""

    kernels: str
    name: str
    words: list
    seconds: float
    receipt: str

    @property
    def label(self):
        return f"{self.kernels} {self.name}"


def device_here():
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA device: torch.cuda.is_available() is false")
    found = torch.cuda.get_device_properties(0)
    return Device(found.name, (found.major, found.minor), found.total_memory / 2**30)


# --- Steps -------------------------------------------------------------------------------------------


def steps_of(device, sets):
    """All of them, the tests first."""
    measured = [name for name in sets if name != receipts.SMALL or "sm80" not in sets]
    return [
        *(tests_of(name) for name in sets),
        *(step for name in measured for step in (*cells_of(name, device), *topics_of(name, device))),
    ]


def tests_of(name):
    words = [*TESTS, "--patience", str(PATIENCE), "--seconds", "3600"]
    return Step(name, "tests", words, SECONDS["tests"], receipts.of_set("tests", name))


def cells_of(name, device):
    tokens = next(tokens for memory, tokens in TOKENS if device.memory_gib >= memory)
    for (dim, dim_v), masks in SHAPES.items():
        for seqlen in (n for n in SEQLENS if n <= tokens):
            for op in ("fwd", "bwd"):
                case = {"op": op, "head_dim": dim, "head_dim_v": dim_v, "seqlen": seqlen, "arch": name}
                words = [*BENCH, "paper", "--op", op, "--head-dim", dim, "--head-dim-v", dim_v, "--seqlen", seqlen]
                words += ["--tokens", tokens, "--heads-kv", 4096 // dim]
                words += ["--masks", ",".join(paper_masks.NAMES if masks == 12 else ("full", "causal"))]
                receipt = receipts.stem_of(case)
                yield Step(name, f"cells {receipt}", [str(w) for w in words], masks * SECONDS[op], receipt)


def topics_of(name, device):
    for topic, memory in TOPICS.items():
        if device.memory_gib >= memory:
            yield Step(name, topic, [*BENCH, topic], SECONDS["topic"], receipts.of_set(topic, name))


# --- Running -----------------------------------------------------------------------------------------


def run_step(step, folder, dry_run):
    """Runs a step and returns its entry of all.json."""
    words = [*step.words, *(["--dry-run"] if dry_run else [])]
    environment = {**os.environ, kernels.SET_VARIABLE: step.kernels, "OUT": str(folder)}
    begin, now = time.monotonic(), time.time()
    status = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment).returncode
    return {
        "step": step.label,
        "command": f"{kernels.SET_VARIABLE}={step.kernels} {shlex.join(['python', *words])}",
        "seconds": round(time.monotonic() - begin, 1),
        "receipt": f"{step.receipt}.json",
        **outcome(step, status, folder, now),
    }


def outcome(step, status, folder, since):
    """How a process ended, by its status and the receipt that it wrote, and what that has of tests and bars."""
    path = folder / f"{step.receipt}.json"
    made = json.loads(path.read_text()) if path.exists() and path.stat().st_mtime >= since - 1 else {}
    tests = made.get("tests", {"passed": 0, "failed": 0})
    ended = made.get("complete", False) and not tests["failed"]
    state = PASSED if status == 0 else MISSED if ended and step.name != "tests" else FAILED
    missed = [c for c in made.get("figures", {}).get("checks", []) if not c["passed"]]
    return {"state": state, "tests": tests, "missed": missed}


def before(path, receipt):
    """{label: what ended} of an earlier run on this device with these kernels."""
    if not path.exists():
        return {}
    held = json.loads(path.read_text())
    same = all(held[name] == receipt[name] for name in ("device", "kernel_hashes"))
    return {step["step"]: step for step in held["figures"]["steps"] if same and step["state"] != FAILED}


def run_all(steps, receipt, folder, progress, done, dry_run=False):
    """Runs the steps that are not in `done`; the receipt grows with each, and keeps what else is done."""
    path, results = receipts.path_of(receipt, folder), dict(done)
    for number, step in enumerate(steps, 1):
        if step.label in done:
            result = done[step.label]
            print(f"== {number} of {len(steps)}: {step.label}: {result['state']} before", flush=True)
        else:
            print(f"== {number} of {len(steps)}: {step.label}", flush=True)
            result = run_step(step, folder, dry_run)
        results[step.label] = result
        receipt["figures"]["steps"] = list(results.values())
        receipt["tests"] = {n: sum(r["tests"][n] for r in results.values()) for n in ("passed", "failed")}
        receipts.write(receipt, path)
        progress.step(step.seconds, f"{step.label}: {result['state']}")
    receipt["complete"] = True
    receipts.write(receipt, path)
    return summary(receipt, path)


def summary(receipt, path):
    steps, tests = receipt["figures"]["steps"], receipt["tests"]
    for step in steps:
        print(f"{step['state']:12} {step['seconds']:7.1f} s  {step['step']}")
        print(
            "\n".join(f"    {line}" for line in cell_bars.check_lines(step["missed"])), end="\n" * bool(step["missed"])
        )
    failed, missed = (sum(step["state"] == state for step in steps) for state in (FAILED, MISSED))
    counts = f"{tests['passed']} tests and cells passed, {tests['failed']} failed"
    of_steps = f"{failed} of {len(steps)} steps failed, {missed} below a bar"
    verdict_word = "FAIL" if failed else "PASS"
    print(f"{verdict_word}  {receipt['device']}: {counts}; {of_steps}; receipts in {path.parent}")
    return 1 if failed else 0


# --- The command -------------------------------------------------------------------------------------


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kernels", type=lambda text: text.split(","), help="sets, comma-separated; default: all taken"
    )
    parser.add_argument("--only", help="steps whose name has this, such as tests, cells or d128")
    parser.add_argument("--list", action="store_true", help="show the steps, and run none")
    parser.add_argument("--again", action="store_true", help="also what an earlier run has done")
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def sets_of(arguments, device, library):
    taken = kernels.sets_on(library, device.capability)
    if not taken:
        capability = ".".join(map(str, device.capability))
        sys.exit(f"{library} has no kernels for {device.name}, compute capability {capability}")
    if unknown := sorted(set(arguments.kernels or ()) - set(taken)):
        sys.exit(f"--kernels has {', '.join(unknown)}; {device.name} takes {', '.join(taken)}")
    return arguments.kernels or taken


def main(words=None, device=None):
    arguments = parse_arguments(words)
    device, library = device or device_here(), kernels_used.library_path()
    sets = sets_of(arguments, device, library)
    steps = [step for step in steps_of(device, sets) if (arguments.only or "") in step.label]
    print(f"{device.name}, {device.memory_gib:.0f} GiB: kernels {', '.join(sets)}; {len(steps)} steps")
    if arguments.list:
        print("\n".join(f"{step.label:40} about {step.seconds:4.0f} s on an H200" for step in steps))
        return 0
    folder = Path(os.environ.get("OUT") or receipts.RESULTS / device.folder)
    receipt = receipt_of(device, sets, library, arguments.dry_run)
    receipt["command"] = shlex.join(["scripts/gpu-check", "all", *(sys.argv[1:] if words is None else words)])
    done = before(receipts.path_of(receipt, folder), receipt)
    if arguments.again:
        done = {label: result for label, result in done.items() if label not in {step.label for step in steps}}
    from benchmarks.instruments import timing

    progress = timing.Progress([step.seconds for step in steps])
    return run_all(steps, receipt, folder, progress, done, arguments.dry_run)


def receipt_of(device, sets, library, dry_run):
    if dry_run:
        environment, found = dict.fromkeys(("driver", "toolkit", "torch"), "none"), {"dry.run.kernel": "0" * 16}
    else:
        from benchmarks.instruments import timing

        built = receipts.Library(library)
        environment, found = {**timing.environment(), "toolkit": built.toolkit}, built.hashes
    receipt = receipts.new("all", {**environment, "device": device.name}, "")
    capability = ".".join(map(str, device.capability))
    receipt["figures"] = {"capability": capability, "memory_gib": round(device.memory_gib, 1), "kernel_sets": sets}
    return {**receipt, "dry_run": dry_run, "kernel_hashes": found}


if __name__ == "__main__":
    sys.exit(main())
