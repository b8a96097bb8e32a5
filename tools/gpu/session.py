# SPDX-License-Identifier: Apache-2.0
"""A run of `scripts/gpu-check tests`: its programs one by one within a time, what they say of themselves, and the
receipt that grows with it."""

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks import ROOT

TAIL = 3000  # characters of an output that are printed
KEPT = 30000  # characters of failures that a receipt keeps: all of a long run's
STOPPED = 124  # the status of a program whose time was over


class Clock:
    """Seconds that are left for everything."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds

    def left(self):
        return self.end - time.monotonic()


def visible_gpus():
    """The names that CUDA_VISIBLE_DEVICES has for the GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None and shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout
        return [str(n) for n in range(listed.count("GPU "))]
    return [name for name in (named or "").split(",") if name]


class Session:
    """The run, and the receipt that grows with it. Its programs see all GPUs; each finds another one first, which it
    computes on."""

    def __init__(self, receipt, seconds, patience=1):
        self.receipt, self.clock, self.patience = receipt, Clock(seconds), patience
        self.gpus, self.turn = visible_gpus(), itertools.count()
        self.figures = receipt["figures"]
        self.lock = threading.Lock()
        self.figures["parts"], self.figures["left_out"] = [], []

    def run(self, name, command, seconds, environment=None):
        """The result of a program, stopped when it or everything has had its time; None if there is none left."""
        seconds = min(seconds * self.patience, self.clock.left())
        if seconds < 1:
            return self.leave_out(name, "no time was left", failed=True)
        return run(name, command, seconds, {**self.next_gpu(), **(environment or {})})

    def next_gpu(self):
        """The environment of the next program."""
        if len(self.gpus) < 2:
            return {}
        first = next(self.turn) % len(self.gpus)
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[first:] + self.gpus[:first])}

    def leave_out(self, name, why, failed=False):
        print(f"-- {name}: left out: {why}", flush=True)
        with self.lock:
            self.figures["left_out"].append(f"{name}: {why}")
            self.receipt["tests"]["failed"] += failed

    def add(self, result, passed, failed, **more):
        part = {**{n: result[n] for n in ("name", "command", "seconds")}, "passed": passed, "failed": failed, **more}
        if result.get("status") == STOPPED:
            part["stopped"] = True
        if failed:
            part["output"] = result["output"][-KEPT:]
        with self.lock:
            self.receipt["tests"]["passed"] += passed
            self.receipt["tests"]["failed"] += failed
            self.figures["parts"].append(part)


def shown(command):
    """A command as anyone would type it in the repository."""
    words = [str(word).replace(f"{ROOT}/", "") for word in command]
    return shlex.join([Path(words[0]).name if Path(words[0]).is_absolute() else words[0], *words[1:]])


def run(name, command, seconds, environment=None):
    """{name, command, seconds, status, output}; a program that hangs is stopped with all that it started."""
    print(f"== {name}: {shown(command)}", flush=True)
    begin = time.monotonic()
    try:
        status, output = run_group(command, seconds, {**os.environ, **(environment or {})})
    except OSError as error:
        status, output = 126, str(error)
    result = {
        "name": name,
        "command": shown(command),
        "seconds": round(time.monotonic() - begin, 1),
        "status": status,
        "output": output,
    }
    if status:
        print(output[-TAIL:], flush=True)
    return result


def run_group(command, seconds, environment):
    """(exit status, output). A process group of its own: a tool may have started the program that holds the pipe."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return STOPPED, output + f"\nstopped after {seconds:.0f} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, output


# --- What programs say of themselves -----------------------------------------------------------------


def gtest_counts(result):
    """(passed, failed) of a GoogleTest program's brief output."""
    passed = sum(map(int, re.findall(r"\[  PASSED  \] (\d+) test", result["output"])))
    failed = sum(map(int, re.findall(r"^\s*(\d+) FAILED TESTS?", result["output"], re.M)))
    return passed, failed or int(result["status"] != 0)


def word_counts(result):
    """(passed, failed) of a program that ends with 'N passed, M failed'."""
    counts = re.findall(r"^(\d+) passed, (\d+) failed", result["output"], re.M)
    passed, failed = map(int, counts[-1]) if counts else (0, 0)
    return passed, failed or int(result["status"] != 0 or not counts)


def passed_cases(output):
    """[(kernel, mask)] of the cases that passed, whatever a tool printed between them."""
    line = re.compile(r"^(\w+) +head_dim +(\d+/\d+) *, (\d) consumers +(.+?) {2,}batch .*  ok:", re.M)
    return [(f"{element} {dims} x{consumers}", mask) for element, dims, consumers, mask in line.findall(output)]


def covered(output):
    """Lines 'kernels: masks' of the cases that passed; kernels with the same masks share one."""
    masks = {}
    for kernel, mask in passed_cases(output):
        masks.setdefault(kernel, {})[mask] = True
    kernels = {}
    for kernel, names in masks.items():
        kernels.setdefault(", ".join(names), []).append(kernel)
    return [f"{', '.join(names)}: {text}" for text, names in kernels.items()]


def sanitizer_errors(result):
    """Errors that compute-sanitizer counted; None if it did not come to counting them."""
    counts = re.findall(r"ERROR SUMMARY: (\d+) error", result["output"])
    counts += re.findall(r"RACECHECK SUMMARY: (\d+) hazard", result["output"])
    return sum(map(int, counts)) if counts else None


def pytest_counts(junit):
    """(passed, failed, skipped) from pytest's XML."""
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    total, failed, errors, skipped = (int(suite.get(n)) for n in ("tests", "failures", "errors", "skipped"))
    return total - failed - errors - skipped, failed + errors, skipped
