#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `scripts/gpu-check tests` runs: test programs and `flashmask verify` where they were built, then pytest tests/gpu.

Prints a short summary last and leaves a receipt with the tests passed and failed.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "gpu")]
import receipts  # noqa: E402

TAIL = 3000


def run(name, command, seconds):
    """{name, command, seconds, status, output}; a program that hangs is stopped."""
    print(f"== {name}: {shlex.join(map(str, command))}", flush=True)
    begin = time.monotonic()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=seconds, cwd=ROOT)
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, output = 124, (late.stdout or b"").decode(errors="replace") + f"\nstopped after {seconds:.0f} s"
    except OSError as error:
        status, output = 126, str(error)
    result = {"name": name, "command": shlex.join(map(str, command)), "seconds": round(time.monotonic() - begin, 1), "status": status, "output": output}
    if status:
        print(output[-TAIL:], flush=True)
    return result


def gtest_counts(result):
    """(passed, failed) of a GoogleTest program's brief output."""
    passed = sum(map(int, re.findall(r"\[  PASSED  \] (\d+) test", result["output"])))
    failed = sum(map(int, re.findall(r"^\s*(\d+) FAILED TESTS?", result["output"], re.M)))
    return passed, failed or int(result["status"] != 0)


def verify_counts(result):
    return (1, 0) if result["status"] == 0 else (0, 1)


def pytest_counts(junit):
    """(passed, failed, skipped) from pytest's XML."""
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    total, failed, errors, skipped = (int(suite.get(n)) for n in ("tests", "failures", "errors", "skipped"))
    return total - failed - errors - skipped, failed + errors, skipped


def programs(folder):
    return sorted(p for p in (folder / "tests").rglob("*") if p.is_file() and os.access(p, os.X_OK)) if (folder / "tests").is_dir() else []


def add(receipt, result, passed, failed):
    receipt["tests"]["passed"] += passed
    receipt["tests"]["failed"] += failed
    part = {"name": result["name"], "command": result["command"], "seconds": result["seconds"], "passed": passed, "failed": failed}
    if failed:
        part["output"] = result["output"][-TAIL:]
    receipt["figures"].setdefault("parts", []).append(part)


def run_programs(receipt, carry):
    for program in programs(carry):
        result = run(program.name, [program, "--gtest_brief=1"], 120)
        add(receipt, result, *gtest_counts(result))


def run_verify(receipt, carry, cases, covering):
    command = next((p for p in (carry / "flashmask", carry / "bin" / "flashmask") if p.exists()), None)
    if command:
        for extra in [["--cases", str(cases)]] + [["--covering"]] * covering:
            result = run(f"verify {extra[0]}", [command, "verify", "--backend", "cuda", *extra], 540)
            add(receipt, result, *verify_counts(result))


def run_pytest(receipt, words, junit):
    result = run("pytest", [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", "--durations=5", "tests/gpu", *words], 480)
    try:
        passed, failed, skipped = pytest_counts(junit)
    except (OSError, ElementTree.ParseError, AttributeError):
        passed, failed, skipped = 0, 1, 0
    add(receipt, result, passed, max(failed, int(result["status"] != 0)))
    receipt["figures"]["pytest_skipped"] = skipped
    print(result["output"][-TAIL // 2 :], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--carry", type=Path, default=ROOT / "build" / "gpu-carry", help="folder of test programs and the command built elsewhere")
    parser.add_argument("--cases", type=int, default=200, help="random cases of flashmask verify")
    parser.add_argument("--covering", action="store_true", help="also the covering list of flashmask verify (minutes)")
    parser.add_argument("--only", choices=("programs", "verify", "pytest"), action="append")
    parser.add_argument("pytest_words", nargs="*", help="for pytest, after --")
    arguments = parser.parse_args()
    only = arguments.only or ["programs", "verify", "pytest"]

    import timing  # needs torch

    receipt = receipts.new("tests", timing.environment(), shlex.join(["scripts/gpu-check", "tests", *sys.argv[1:]]))
    path = receipts.free_path(receipt)
    carry = arguments.carry if arguments.carry.is_absolute() else ROOT / arguments.carry
    if "programs" in only:
        run_programs(receipt, carry)
    if "verify" in only:
        run_verify(receipt, carry, arguments.cases, arguments.covering)
    if "pytest" in only:
        run_pytest(receipt, arguments.pytest_words, path.with_suffix(".xml"))
        path.with_suffix(".xml").unlink(missing_ok=True)
    receipt["complete"] = True
    receipts.write(receipt, path)
    return summary(receipt, path)


def summary(receipt, path):
    tests = receipt["tests"]
    for part in receipt["figures"].get("parts", []):
        print(f"{'FAIL' if part['failed'] else 'PASS'}  {part['name']:32} {part['passed']:6} passed {part['failed']:4} failed {part['seconds']:7.1f} s")
    good = tests["failed"] == 0 and tests["passed"] > 0
    print(f"{'PASS' if good else 'FAIL'}  {tests['passed']} passed, {tests['failed']} failed; receipt {path.name}, source {receipt['source_hash']}, {receipt['device']}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
