# SPDX-License-Identifier: Apache-2.0
"""Receipts: what GPU runs leave behind in benchmarks/results.

`<op>-d<head_dim>-dv<head_dim_v>-<seqlen>.json` holds the measured cells of the paper's benchmark, `<topic>.json` what
any other measurement found, or the tests; of another kernel set than Hopper's, `...-sm80.json`. Schema 2:

    schema, kind ("gpu"), what (the file's stem), date, device, multiprocessors, driver, toolkit (nvcc's full build
    string), torch, command, tests {passed, failed}, figures (of a topic), kernel_hashes {id: hash} (of a topic: all
    kernels it ran), cases (of the benchmark)

    a case: op ("fwd", "bwd"), arch (the kernel set: "sm90", "sm80", "sm86"), mask, head_dim, head_dim_v, seqlen,
    batch, heads, heads_kv, dtype, live, plan_ms, ours_ms, ours_tflops, kernel_hashes {id: hash} (of every kernel it
    ran, the plan's too), peers {name: {ms, ratio, ...}}, run (only where another run than the header's measured it:
    what a header says of it), plan_run (only where yet another run measured plan_ms)

Times are medians over rounds in which the contenders took turns; `ratio` is the median of a peer's time over ours in
the same round, ours without the plan. Beside a median X stands X_spread, the middle half of the rounds: [first
quartile, third quartile]. Rounds themselves are not kept.

A peer that took no part in a cell's last run keeps its last ratio, beside our kernels of the date `recorded` on the
`device`. Its ms are that ratio times our new time.

Kernels of mma.sync are known by their code for 8.0, whichever of it, code for 8.6 and PTX the device ran: one build
makes all three of one source.

A receipt is judged by machine code, cell by cell (`judge`): a cell whose kernels have other hashes in the library, or
for which the library would run other kernels, is stale and says nothing about it. Hashes of another toolkit's library
cannot be compared. A cell has two measurements, of the plan and of attention with a ready plan; where only the
planner's kernels have changed, only the plan is measured again (`benchmarks/report/replan.py`).
"""

import contextlib
import datetime
import fcntl
import json
import os
from collections import Counter, namedtuple
from pathlib import Path

from benchmarks import ROOT

RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = 2
MULTIPROCESSORS = 132  # of an H100 SXM or H200
HOPPER = "sm90"  # the kernel set that names of files leave out
SMALL = "sm86"  # the tiles of at most 99 KiB, a peer of those of 163 KiB in cells of sm80
OUR_MODES = ("deterministic", "dense", SMALL)  # in a case's peers, though ours
# Header fields of the measuring run that a case's `run` keeps.
RUN_TEXTS = ("date", "device", "driver", "toolkit", "torch", "command")
RUN = (*RUN_TEXTS, "multiprocessors")
NUMBER = (int, float)
CASE_FIELDS = {
    "op": str,
    "arch": str,
    "mask": str,
    "head_dim": int,
    "head_dim_v": int,
    "seqlen": int,
    "batch": int,
    "heads": int,
    "heads_kv": int,
    "dtype": str,
    "live": NUMBER,
    "plan_ms": NUMBER,
    "ours_ms": NUMBER,
    "ours_tflops": NUMBER,
    "kernel_hashes": dict,
    "peers": dict,
}
IDENTITY = ("op", "arch", "head_dim", "head_dim_v", "seqlen", "mask", "dtype", "batch", "heads", "heads_kv")
FRESH, OTHER_TOOLKIT = "fresh", "other toolkit"


# --- Making ------------------------------------------------------------------------------------------


def new(what, environment, command):
    """A receipt to be filled. `what`: stem_of(...) for cells of the benchmark, otherwise the topic. `environment`:
    device, driver, toolkit, torch and, if it is not 132, multiprocessors. The caller adds kernel_hashes or, to `cases`,
    cases with theirs."""
    return {
        "schema": SCHEMA,
        "kind": "gpu",
        "what": what,
        "date": datetime.date.today().isoformat(),
        "multiprocessors": MULTIPROCESSORS,
        **environment,
        "command": command,
        "complete": False,
        "tests": {"passed": 0, "failed": 0},
        "figures": {},
        "cases": [],
    }


def short_length(seqlen):
    return f"{seqlen // 1024}K" if seqlen % 1024 == 0 else str(seqlen)


def of_set(what, arch):
    """The name of a receipt of a kernel set."""
    return what if arch == HOPPER else f"{what}-{arch}"


def set_of(name):
    """The kernel set in a receipt's name."""
    return next((arch for arch in ("sm80", SMALL) if name.endswith(f"-{arch}")), HOPPER)


def stem_of(case):
    """Stem of the file that holds a case."""
    sizes = f"d{case['head_dim']}-dv{case['head_dim_v']}-{short_length(case['seqlen']).lower()}"
    return of_set(f"{case['op']}-{sizes}", case.get("arch", HOPPER))


def output_folder():
    """$OUT if it is set, or benchmarks/results."""
    return Path(os.environ.get("OUT") or RESULTS)


def path_of(receipt, folder=None):
    """The file of a receipt, which other runs may have written to before."""
    return Path(folder or output_folder()) / f"{receipt['what']}.json"


def write(receipt, path):
    """Puts a receipt into its file. Cells of other identities that the file holds stay, with the run that measured
    them; so do ratios of peers that a new cell lacks. The file changes in one step, so a run that is cut short leaves
    the cells it finished, and processes may write to one file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent):
        part = path.with_suffix(".part")
        part.write_text(text_of({**receipt, "cases": merged_cases(path, receipt)}))
        part.replace(path)


@contextlib.contextmanager
def locked(folder):
    """Keeps other processes from writing receipts into the folder meanwhile."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def merged_cases(path, receipt):
    """The receipt's cases and those in the file that it has not, in the file's order."""
    before = json.loads(path.read_text()) if path.exists() else {}
    if not before.get("cases"):
        return receipt["cases"]
    if before.get("schema") != SCHEMA or bool(before.get("dry_run")) != bool(receipt.get("dry_run")):
        made = "invented" if receipt.get("dry_run") else "measured"
        raise ValueError(f"{path}: {made} cells of schema {SCHEMA} cannot be added to what is there")
    old = {identity(case): case for case in before["cases"]}
    cases = {cell: with_run(case, before, receipt) for cell, case in old.items()}
    for case in receipt["cases"]:
        earlier = old.get(identity(case))
        cases[identity(case)] = with_recorded(case, earlier, run_of(before, earlier)) if earlier else case
    return list(cases.values())


def with_recorded(case, earlier, run):
    """The case with the ratios of an earlier one of its cell, which this run measured, over peers that it lacks."""
    recorded = {}
    for peer, figures in earlier["peers"].items():
        if peer not in case["peers"] and peer not in OUR_MODES:
            ratio = figures.get("ratio") or figures["ms"] / earlier["ours_ms"]
            recorded[peer] = {
                "ms": ratio * case["ours_ms"],
                "ratio": ratio,
                "recorded": figures.get("recorded", run["date"]),
                "device": figures.get("device", run["device"]),
            }
    return {**case, "peers": {**case["peers"], **recorded}}


def with_run(case, before, receipt):
    """A case of the file, naming its own run if it is not the new header's."""
    run = run_of(before, case)
    case = {name: value for name, value in case.items() if name != "run"}
    return case if run == run_of(receipt, case) else {**case, "run": run}


def text_of(receipt):
    """JSON with a line for each case."""
    text = json.dumps({**receipt, "cases": []}, indent=1, allow_nan=False)
    lines = ",\n".join(f"  {json.dumps(case, allow_nan=False)}" for case in receipt["cases"])
    return (text.replace('"cases": []', f'"cases": [\n{lines}\n ]') if lines else text) + "\n"


# --- Reading -----------------------------------------------------------------------------------------


def identity(case):
    """The values that tell a cell from all others."""
    return tuple(case[name] for name in IDENTITY)


def run_of(receipt, case):
    """The run that measured a case."""
    return {name: case.get("run", receipt)[name] for name in RUN}


def is_plan_kernel(name):
    """True if an id names a kernel of the planner."""
    return name.split(".")[1] == "plan"


def parts_of(ids):
    """Splits ids into attention's and the planner's."""
    return {i for i in ids if not is_plan_kernel(i)}, {i for i in ids if is_plan_kernel(i)}


def number_problems(case, where):
    for name in ("plan_ms", "ours_ms", "ours_tflops"):
        if not case[name] > 0:
            yield f"{where}: {name} is {case[name]}, not a positive number"
    if not 0 < case["live"] <= 1:
        yield f"{where}: live is {case['live']}, not a share"
    for peer, figures in case["peers"].items():
        if not isinstance(figures, dict) or not isinstance(figures.get("ms"), NUMBER) or not figures["ms"] > 0:
            yield f"{where}: peer {peer} has no ms"
        elif "recorded" in figures and not all(isinstance(figures.get(n), str) for n in ("recorded", "device")):
            yield f"{where}: peer {peer}: recorded and device are not texts"


def hash_problems(hashes, where):
    texts = hashes.values() if isinstance(hashes, dict) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        yield f"{where} names no kernels with their hashes"


def run_problems(run, where):
    wrong = [name for name in RUN_TEXTS if not isinstance(run.get(name), str) or not run[name]]
    yield from (f"{where}{name} is missing or not a text" for name in wrong)
    if not isinstance(run.get("multiprocessors"), int) or run["multiprocessors"] < 1:
        yield f"{where}multiprocessors is {run.get('multiprocessors')!r}"


def case_problems(case, where):
    if not isinstance(case, dict):
        yield f"{where} is not an object"
        return
    wrong = [
        name
        for name, kind in CASE_FIELDS.items()
        if not isinstance(case.get(name), kind) or isinstance(case.get(name), bool)
    ]
    yield from (f"{where}: {name} is {case.get(name)!r}" for name in wrong)
    if wrong:
        return
    if case["op"] not in ("fwd", "bwd"):
        yield f"{where}: op is {case['op']!r}"
    yield from number_problems(case, where)
    yield from hash_problems(case["kernel_hashes"], f"{where}: kernel_hashes")
    for name in {"run", "plan_run"} & case.keys():
        yield from run_problems(case[name], f"{where}: {name}: ")


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
    if not isinstance(receipt.get("what"), str) or not receipt["what"]:
        found.append("what is missing or not a text")
    found += run_problems(receipt, "")
    tests = receipt.get("tests")
    if not isinstance(tests, dict) or not all(isinstance(tests.get(n), int) for n in ("passed", "failed")):
        found.append("tests has no passed and failed")
    cases = receipt.get("cases")
    if not isinstance(cases, list):
        return found + ["cases is not a list"]
    if not cases:
        found += hash_problems(receipt.get("kernel_hashes"), "kernel_hashes")
    in_cases = [problem for n, case in enumerate(cases) for problem in case_problems(case, f"case {n}")]
    return found + (in_cases or among_cases(receipt))


def among_cases(receipt):
    """Problems between cases that are right one by one."""
    twice = [key for key, count in Counter(map(identity, receipt["cases"])).items() if count > 1]
    misplaced = {stem_of(case) for case in receipt["cases"]} - {receipt.get("what")}
    return [
        *(f"a cell is there twice: {key}" for key in twice),
        *(f"what is {receipt.get('what')!r}, and a case belongs to {stem}" for stem in sorted(misplaced)),
    ]


def load(path):
    """The receipt in a file; ValueError says what is wrong with it."""
    path = Path(path)
    try:
        receipt = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    found = problems(receipt)
    if not found and receipt["what"] != path.stem:
        found = [f"the file of {receipt['what']} is {receipt['what']}.json"]
    if found:
        raise ValueError(f"{path}: " + "; ".join(found[:5]))
    return receipt


def load_folder(folder=RESULTS):
    """{file name: receipt}, by name."""
    return {path.name: load(path) for path in sorted(Path(folder).glob("*.json"))}


# --- Judging -----------------------------------------------------------------------------------------


class Library:
    """The kernels of a built library: their `hashes`, the `toolkit` they are of, and which of them a call runs."""

    def __init__(self, path):
        from harness import kernels  # asks a built library, which reading receipts needs not

        self.path, self.ids = Path(path), kernels.kernels_of
        found = kernels.hashes(self.path)
        self.toolkit, self.hashes = found["toolkit"], found["kernels"]

    def kernels_of(self, case, multiprocessors=MULTIPROCESSORS):
        """Ids of the kernels that a case runs: its plan's, its own, and those of the deterministic mode and of the
        small tiles if they were peers. ValueError if the library takes no such call."""
        peers = case.get("peers", {})
        modes = (False, True) if "deterministic" in peers else (False,)
        found = self.in_modes(case, modes, multiprocessors)
        return found | self.in_modes({**case, "arch": SMALL}, (False,), multiprocessors) if SMALL in peers else found

    def in_modes(self, case, modes, multiprocessors):
        """Ids of the kernels that a case runs in some modes, True for the deterministic one."""
        return {
            name
            for deterministic in modes
            for name in self.ids(
                self.path,
                case,
                arch=case.get("arch", HOPPER),
                multiprocessors=multiprocessors,
                deterministic=deterministic,
            )
        }


def library_of(path=None):
    """The Library at a path; by default where kernels.default_library() finds one, None if it finds none. ValueError if
    it has no CUDA kernels that could be read."""
    if path is None:
        from harness import kernels

        path = kernels.default_library()
    return Library(path) if path else None


Judgement = namedtuple("Judgement", ["file", "case", "state"])


def state_of(recorded, toolkit, library, now=None):
    """State of `recorded` kernels {id: hash}: "fresh", "other toolkit" or "stale: " and ids that differ.
    `now`: the ids that would run today, if known."""
    if toolkit != library.toolkit:
        return OTHER_TOOLKIT
    differ = {name for name, text in recorded.items() if library.hashes.get(name) != text}
    differ |= set() if now is None else set(now) ^ set(recorded)
    return f"stale: {few_of(sorted(differ))}" if differ else FRESH


def few_of(ids, most=4):
    """The first `most` ids, and how many others there are."""
    others = len(ids) - most
    return ", ".join(ids[:most]) + (f" and {others} more" if others > 0 else "")


def case_state(case, run, library):
    try:
        now = library.kernels_of(case, run["multiprocessors"])
    except ValueError as error:
        return f"stale: {error}"
    found = []
    for ids, ids_now, by in zip(parts_of(case["kernel_hashes"]), parts_of(now), (run, case.get("plan_run", run))):
        found.append(state_of({i: case["kernel_hashes"][i] for i in ids}, by["toolkit"], library, ids_now))
    return next((state for state in found if state != FRESH), FRESH)


def judge(found, library):
    """A Judgement (file, case, state) of every cell in {file name: receipt} and, with None as its case, of every
    topic."""
    judged = []
    for name, receipt in found.items():
        for case in receipt["cases"]:
            judged.append(Judgement(name, case, case_state(case, run_of(receipt, case), library)))
        if not receipt["cases"]:
            judged.append(Judgement(name, None, state_of(receipt["kernel_hashes"], receipt["toolkit"], library)))
    return judged


def label_of(case):
    """A cell in words."""
    grouped = f" {case['heads']}/{case['heads_kv']} heads" if case["heads"] != case["heads_kv"] else ""
    of_set = "" if case["arch"] == HOPPER else f"{case['arch']} "
    return f"{of_set}{case['op']} d={case['head_dim']} {short_length(case['seqlen'])}{grouped} {case['mask']}"
