# SPDX-License-Identifier: Apache-2.0
"""Receipts: what a GPU run leaves behind, one JSON file for each run.

A receipt names the device, the software, the hash of the sources (scripts/source-hash) and the command, then the tests
passed and failed and the measured cases. It is stale when its hash is not the tree's: then its figures say nothing about it. The hash
is the forward's or, where `direction` says so, the backward's.
"""

import datetime
import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = 1
TEXTS = ("kind", "what", "date", "device", "driver", "toolkit", "torch", "source_hash", "command")
CASE_FIELDS = {"op": str, "mask": str, "head_dim": int, "head_dim_v": int, "seqlen": int, "batch": int, "heads": int, "heads_kv": int, "dtype": str,
               "live": (int, float), "plan_ms": (int, float), "ours_ms": (int, float), "ours_tflops": (int, float), "peers": dict}


DIRECTIONS = ("forward", "backward")


def source_hash(direction="forward"):
    return subprocess.run([ROOT / "scripts" / "source-hash", direction], check=True, capture_output=True, text=True).stdout.strip()


def direction_of(receipt):
    """Whose source hash the receipt is judged by."""
    return receipt.get("direction", "forward")


def new(what, environment, command, direction="forward"):
    """`environment`: device, driver, toolkit, torch."""
    return {"schema": SCHEMA, "kind": "gpu", "what": what, "direction": direction, "date": datetime.date.today().isoformat(), **environment,
            "source_hash": source_hash(direction), "command": command, "complete": False, "tests": {"passed": 0, "failed": 0}, "cases": [], "figures": {}}


def number_problems(case, where):
    for name in ("plan_ms", "ours_ms", "ours_tflops"):
        if not case[name] > 0:
            yield f"{where}: {name} is {case[name]}, not a positive number"
    if not 0 < case["live"] <= 1:
        yield f"{where}: live is {case['live']}, not a share"
    for peer, figures in case["peers"].items():
        if not isinstance(figures, dict) or not isinstance(figures.get("ms"), (int, float)) or not figures["ms"] > 0:
            yield f"{where}: peer {peer} has no ms"


def case_problems(case, where):
    if not isinstance(case, dict):
        yield f"{where} is not an object"
        return
    wrong = [name for name, kind in CASE_FIELDS.items() if not isinstance(case.get(name), kind) or isinstance(case.get(name), bool)]
    yield from (f"{where}: {name} is {case.get(name)!r}" for name in wrong)
    if not wrong:
        if case["op"] not in ("fwd", "bwd"):
            yield f"{where}: op is {case['op']!r}"
        yield from number_problems(case, where)


def problems(receipt):
    """Everything that is wrong with a receipt, as sentences."""
    if not isinstance(receipt, dict):
        return ["it is not an object"]
    found = []
    if receipt.get("schema") != SCHEMA:
        found.append(f"schema is {receipt.get('schema')!r}, not {SCHEMA}")
    if receipt.get("kind") != "gpu":
        found.append(f"kind is {receipt.get('kind')!r}, not 'gpu'")
    if receipt.get("dry_run"):
        found.append("it comes from a dry run: its figures are invented")
    found += [f"{name} is missing or not a text" for name in TEXTS if not isinstance(receipt.get(name), str) or not receipt.get(name)]
    if direction_of(receipt) not in DIRECTIONS:
        found.append(f"direction is {receipt['direction']!r}")
    tests = receipt.get("tests")
    if not isinstance(tests, dict) or not all(isinstance(tests.get(n), int) for n in ("passed", "failed")):
        found.append("tests has no passed and failed")
    cases = receipt.get("cases")
    if not isinstance(cases, list):
        return found + ["cases is not a list"]
    for n, case in enumerate(cases):
        found += case_problems(case, f"case {n}")
    return found


def load(path):
    """The receipt in a file; ValueError says what is wrong with it."""
    try:
        receipt = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    found = problems(receipt)
    if found:
        raise ValueError(f"{path}: " + "; ".join(found[:5]))
    return receipt


def load_folder(folder=RESULTS):
    """{file name: receipt}, by name."""
    return {path.name: load(path) for path in sorted(Path(folder).glob("*.json"))}


def stale(receipts, tree_hash=None):
    """Names of the receipts that another tree left; `tree_hash` in place of this tree's, whatever the direction."""
    hashes = {direction: tree_hash or source_hash(direction) for direction in DIRECTIONS}
    return [name for name, receipt in receipts.items() if receipt["source_hash"] != hashes[direction_of(receipt)]]


def cell_of(case):
    return case["op"], case["head_dim"], case["seqlen"], case["mask"], case["dtype"]


def merge(receipts):
    """Cases of many receipts, in order; of one cell measured twice, the later file's."""
    cells = {}
    for receipt in receipts:
        for case in receipt["cases"]:
            cells[cell_of(case)] = case
    return list(cells.values())


def output_folder():
    """$OUT if it is set, or benchmarks/results."""
    return Path(os.environ.get("OUT") or RESULTS)


def free_path(receipt, folder=None):
    """A new file <date>-<what>.json; -2, -3, ... if there is one already, or another process has been given it."""
    folder = Path(folder or output_folder())
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{receipt['date']}-{receipt['what']}"
    names = [f"{stem}.json"] + [f"{stem}-{n}.json" for n in range(2, 1000)]
    return next(folder / name for name in names if claimed(folder / name))


def claimed(path):
    """Whether the file is this process's to write: nobody has it, or waits to, as its .part says."""
    if path.exists():
        return False
    try:
        part_of(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    if path.exists():  # written since
        part_of(path).unlink()
        return False
    return True


def part_of(path):
    return Path(path).with_suffix(".part")


def write(receipt, path):
    """Replaces the file in one step: a run that is cut short leaves the cases it finished."""
    part = part_of(path)
    part.write_text(json.dumps(receipt, indent=1, allow_nan=False) + "\n")
    part.replace(path)
