# SPDX-License-Identifier: Apache-2.0
"""Cycles of every attention kernel, of one library or of two that take turns (--old): their ratio tells small changes
of a kernel apart.

The time of a kernel that power limits varies with the card, its temperature and what ran before; its cycles vary much
less. They are counted by Nsight Compute (ncu), one kernel at a time. The card may be shared, so ncu leaves its clock
alone (--clock-control none), and cycles of memory are not quite comparable from run to run: hence the turns, an order
that changes every time, and medians. Where ncu is missing or may not read the counters, the multiprocessors' own clocks
are read around each call (sm_clock.py), which counts a call's kernels together. The output says which it was. What
cycles do not show is power: fewer of them are not always less time.
"""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks import receipts
from benchmarks.instruments.kernels_used import case_of
from benchmarks.instruments.medians import middle, spread
from benchmarks.masks import paper_masks

SEQLEN, HIDDEN = 8192, 4096
HEAD_DIMS = (128, 64)
TWO_FORWARD_TILES = (64, 96, 128)  # head dims whose many row tiles run with three consumers, and few with two
MARK = "flashmask_mark"
COUNTERS = {
    "cycles": "sm__cycles_elapsed.max",
    "instructions": "sm__inst_executed.sum",
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
}
# Mask: batch entries of the large cases, a few milliseconds each.
MASKS = {"full": 2, "causal": 4, "causal_document": 8, "sliding_window": 8}
FEW_MASKS = ("full", "causal_document")
# Substrings of a line that gives the reason, the most telling first.
NO_COUNTERS = ("ERR_NVGPUCTRPERM", "==ERROR==", "Error", "error")
LEAST_SHARE = 0.1  # of its call's cycles: a kernel below it is shown and not judged


class Case(NamedTuple):
    """A call of one instance: `variant` is what its name ends in."""

    op: str
    dtype: str
    head_dim: int
    variant: str
    mask: str
    batch: int
    heads: int
    heads_kv: int
    deterministic: bool = False

    def label(self):
        return f"{self.op} {self.dtype} d{self.head_dim} {self.variant} {self.mask}"

    def case(self):
        dtype = {"bf16": "bfloat16", "f16": "float16"}[self.dtype]
        return case_of(self.op, self.head_dim, SEQLEN, self.batch, self.heads, self.heads_kv, self.mask, dtype)


def cases(ops=("fwd", "bwd"), head_dims=HEAD_DIMS, deterministic=False):
    """Every instance: consumers 2 and 3 of the forward (few row tiles, many), key heads split or not in the backward
    (few key tiles, many), in one of its modes."""
    found = []
    for op, (dtype, masks), head_dim in product(ops, (("bf16", MASKS), ("f16", FEW_MASKS)), head_dims):
        heads = HIDDEN // head_dim
        many, few = forward_variants(head_dim) if op == "fwd" else backward_variants(deterministic)
        mode = op == "bwd" and deterministic
        found += [Case(op, dtype, head_dim, many, mask, MASKS[mask], heads, heads, mode) for mask in masks]
        found += [Case(op, dtype, head_dim, *call, mode) for call in few]
    return found


def forward_variants(head_dim):
    """The variant of many row tiles, and (variant, mask, batch, heads, heads_kv) of few."""
    if head_dim not in TWO_FORWARD_TILES:
        return "c2", []
    return "c3", [("c2", mask, 1, 6, 6) for mask in FEW_MASKS]


def backward_variants(deterministic):
    many = "c2_deterministic" if deterministic else "c2"
    return many, [(f"{many}_split", mask, 1, 8, 1) for mask in FEW_MASKS]


def schedule(found, repetitions, libraries):
    """[(case, library)] in the order of measuring: libraries take turns, each first in every other repetition."""
    order = list(libraries)
    return [
        (case, library)
        for case in found
        for n in range(repetitions)
        for library in (order if n % 2 == 0 else order[::-1])
    ]


# --- Nsight Compute ---------------------------------------------------------------------------------


def find_ncu():
    return shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")


def ncu_words(ncu):
    return [
        ncu,
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--metrics",
        ",".join(COUNTERS.values()),
    ]


def counted(output):
    """[(kernel, {counter: value})] in order, from ncu's CSV."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row["ID"].isdigit()]
    return [
        (
            row["Kernel Name"].split("(")[0],
            {name: float(row[counter].replace(",", "")) for name, counter in COUNTERS.items()},
        )
        for row in rows
    ]


def calls_of(kernels):
    """The kernels of each call: a marker is launched before it."""
    found = []
    for name, counts in kernels:
        if name == MARK:
            found.append([])
        elif found:
            found[-1].append((name, counts))
    return found


def why_refused(output):
    lines = [line.strip() for word in NO_COUNTERS for line in output.splitlines() if word in line]
    return lines[0] if lines else f"it counted nothing: {output.strip()[-300:]}"


# --- The measuring process --------------------------------------------------------------------------


def child_words(way, libraries, found, repetitions):
    request = {"way": way, "libraries": libraries, "cases": found, "repetitions": repetitions}
    return [sys.executable, "-m", "benchmarks.measure.gpu.cycles", json.dumps(request)]


def library_calls(path):
    """harness.calls over one library; another call with another path gives another module."""
    import importlib.util

    os.environ["FLASHMASK_LIBRARY"] = path
    source = importlib.util.find_spec("harness.calls").origin
    spec = importlib.util.spec_from_file_location(f"harness.calls of {path}", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepared(module, case, inputs, bounds, causal):
    """A call with its plan ready that ran once; None if the library refuses it."""
    mask = module.Mask(SEQLEN, SEQLEN, bounds=bounds, causal=causal)
    try:
        plan = module.Plan(mask)
        forward = module.Forward(*inputs[:3], mask, plan=plan).run()
        if case.op == "fwd":
            return forward
        return module.Backward(forward, inputs[3], plan=plan, deterministic=case.deterministic).run()
    except module.CallError as refusal:
        print(f"{case.label()}: {refusal}", file=sys.stderr, flush=True)
        return None


def inputs_of(case):
    import torch

    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[case.dtype]
    heads = (case.heads, case.heads_kv, case.heads_kv, case.heads)
    return [torch.randn((case.batch, SEQLEN, n, case.head_dim), dtype=dtype, device="cuda") for n in heads]


def child(request):
    """Measures; under ncu it only launches, a marker before each call. Otherwise prints a line of JSON for each."""
    import torch

    from benchmarks.instruments.sm_clock import Marks

    marks = Marks()
    modules = {name: library_calls(path) for name, path in request["libraries"].items()}
    for case in (Case(*fields) for fields in request["cases"]):
        indices, causal = paper_masks.paper_mask(case.mask, SEQLEN)
        bounds = None if indices is None else torch.from_numpy(indices).cuda()
        inputs = inputs_of(case)
        calls = {name: prepared(module, case, inputs, bounds, causal) for name, module in modules.items()}
        torch.cuda.synchronize()
        for _, library in schedule([case], request["repetitions"], modules):
            launch = calls[library].launch if calls[library] else lambda: None
            if request["way"] == "ncu":
                under_ncu(marks, launch)
            else:
                print(json.dumps(marks.cycles(launch) if calls[library] else None), flush=True)


def under_ncu(marks, launch):
    import torch

    torch.cuda.profiler.start()
    marks.mark(0)
    launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


# --- The command ------------------------------------------------------------------------------------


class Refused(Exception):
    """Why the counters could not be read."""


def run_ncu(libraries, found, repetitions, seconds):
    """[[(kernel, {counter: value}) of a call]] in the order of schedule()."""
    ncu = find_ncu()
    if not ncu:
        raise Refused("there is no ncu (Nsight Compute) on the path or in /usr/local/cuda/bin")
    words = [*ncu_words(ncu), *child_words("ncu", libraries, found, repetitions)]
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        raise Refused(f"ncu was not done after {seconds:.0f} s") from late
    calls, expected = calls_of(counted(result.stdout)), len(schedule(found, repetitions, libraries))
    if len(calls) != expected or not any(calls):
        raise Refused(why_refused(result.stdout + result.stderr))
    return calls


def run_marks(libraries, found, repetitions, seconds):
    words = child_words("marks", libraries, found, repetitions)
    result = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    if result.returncode != 0 or len(lines) != len(schedule(found, repetitions, libraries)):
        sys.exit(f"the measuring process ended with {result.returncode}:\n{result.stderr[-3000:]}")
    return [[] if cycles is None else [("whole call", {"cycles": cycles})] for cycles in lines]


def measured(arguments, libraries, found):
    """(calls in the order of schedule(), how they were counted)."""
    if arguments.way != "marks":
        try:
            run_ncu(libraries, found[:1], 1, arguments.seconds)  # what is refused is refused at once
            return run_ncu(libraries, found, arguments.repetitions, arguments.seconds), "Nsight Compute, clock not held"
        except Refused as why:
            if arguments.way == "ncu":
                sys.exit(f"ncu: {why}")
            refusal = f" ({why})"
    else:
        refusal = ""
    how = f"the multiprocessors' clocks between two marker kernels{refusal}"
    return run_marks(libraries, found, arguments.repetitions, arguments.seconds), how


def by_kernel(calls):
    """[(kernel, {counter: [value of each repetition]})] of one case and library; of the whole call if its kernels
    changed from one to the next."""
    names = [name for name, _ in calls[0]]
    if any([name for name, _ in call] != names for call in calls):
        calls = [[("whole call", {"cycles": sum(c["cycles"] for _, c in call)})] for call in calls]
        names = ["whole call"]
    return [
        (name, {counter: [call[n][1][counter] for call in calls] for counter in calls[0][n][1]})
        for n, name in enumerate(names)
    ]


def kernel_figures(name, counters):
    medians = {counter: middle(values) for counter, values in counters.items()}
    return {"kernel": name, **medians, "cycles_spread": spread(counters["cycles"])}


def figures_of(case, calls):
    """A case's figures: of each library its kernels, in the order they ran in, with medians. `calls`: {library: its
    calls}."""
    libraries = {}
    for library, of_library in calls.items():
        if all(of_library):
            libraries[library] = [kernel_figures(*kernel) for kernel in by_kernel(of_library)]
    return {**case._asdict(), "seqlen": SEQLEN, "libraries": libraries, "ratios": ratios_of(libraries)}


def ratios_of(libraries):
    """New over old, of medians: kernel by kernel where both run as many, else of the whole call."""
    if set(libraries) != {"new", "old"}:
        return []
    new, old = libraries["new"], libraries["old"]
    call = sum(k["cycles"] for k in new)
    if len(new) != len(old):
        return [{"kernel": "whole call", "ratio": call / sum(k["cycles"] for k in old), "share": 1.0}]
    return [
        {"kernel": n["kernel"], "ratio": n["cycles"] / o["cycles"], "share": n["cycles"] / call}
        for n, o in zip(new, old)
    ]


def grouped(found, libraries, repetitions, calls):
    """{case: {library: its calls}}"""
    together = {case: {library: [] for library in libraries} for case in found}
    for (case, library), call in zip(schedule(found, repetitions, libraries), calls, strict=True):
        together[case][library].append(call)
    return together


def report(figures):
    """Lines: every kernel, then the ratios' geometric mean and the worst of them."""
    judged = []
    for f in figures:
        label = Case(*(f[name] for name in Case._fields)).label()
        for kernel, ratio in zip(f["libraries"].get("new", []), f["ratios"] or [None] * 9):
            text = f"{label:36} {kernel['kernel']:52} {kernel['cycles'] / 1e6:8.3f} M cycles"
            if "instructions" in kernel:
                text += (
                    f", {kernel['instructions'] / 1e6:7.1f} M instructions, DRAM {kernel['dram_read'] / 1e9:.2f} "
                    f"GB read, {kernel['dram_written'] / 1e9:.2f} GB written"
                )
            if ratio:
                counts = ratio["share"] >= LEAST_SHARE
                judged += [(ratio["ratio"], f"{label} {ratio['kernel']}")] if counts else []
                text += f", new / old {ratio['ratio']:.4f}{'' if counts else ' (not judged: little of its call)'}"
            yield text
        missing = {"new", *([] if not f.get("compared") else ["old"])} - set(f["libraries"])
        yield from (f"{label:36} the {library} library does not take it" for library in sorted(missing))
    if judged:
        mean = math.exp(sum(math.log(ratio) for ratio, _ in judged) / len(judged))
        worst, where = max(judged)
        yield (
            f"new / old over {len(judged)} kernels and masks, below 1 is fewer cycles: geometric mean {mean:.4f}, "
            f"worst {worst:.4f} ({where})"
        )


def add_arguments(parser):
    parser.add_argument("--op", type=lambda t: t.split(","), default=["fwd", "bwd"], help="fwd, bwd or both")
    parser.add_argument(
        "--head-dims",
        type=lambda text: tuple(int(dim) for dim in text.split(",")),
        default=HEAD_DIMS,
        help="comma-separated; default: 128,64",
    )
    parser.add_argument("--deterministic", action="store_true", help="the backward's other mode")
    parser.add_argument("--old", type=Path, help="another build of the library, to take turns with $FLASHMASK_LIBRARY")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--way",
        choices=("auto", "ncu", "marks"),
        default="auto",
        help="auto: ncu where it may read the counters, else marks",
    )
    parser.add_argument("--seconds", type=float, default=500, help="the most that the measuring process may take")


def check_arguments(arguments):
    if unknown := set(arguments.op) - {"fwd", "bwd"}:
        sys.exit(f"--op has {', '.join(sorted(unknown))}; it must be fwd, bwd or fwd,bwd")
    if arguments.repetitions < 1:
        sys.exit(f"--repetitions is {arguments.repetitions}; it must be at least 1")
    if arguments.old and not arguments.old.exists():
        sys.exit(f"--old: there is no {arguments.old}")


def kernel_hashes(arguments):
    """Hashes of attention's kernels alone, as the plans are ready."""
    found = {}
    for case in asked(arguments):
        found.update(arguments.kernels.of(case.case(), (case.deterministic,)))
    return {name: text for name, text in found.items() if not receipts.is_plan_kernel(name)}


def asked(arguments):
    return cases(arguments.op, arguments.head_dims, arguments.deterministic)


def run(arguments, receipt, save, progress_type):
    libraries = {"new": str(arguments.kernels.path), **({"old": str(arguments.old.resolve())} if arguments.old else {})}
    found = asked(arguments)
    calls, how = measured(arguments, libraries, found)
    together = grouped(found, libraries, arguments.repetitions, calls)
    figures = [{**figures_of(case, of_case), "compared": bool(arguments.old)} for case, of_case in together.items()]
    receipt["figures"]["cycles"] = {"counted_by": how, "repetitions": arguments.repetitions, "cases": figures}
    save()
    print(f"cycles by {how}; medians of {arguments.repetitions}")
    print("\n".join(report(figures)))
    return True


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
