# SPDX-License-Identifier: Apache-2.0
"""Puts the planner's times of results/plan.json into the benchmark's cells, after a change of the planner alone.

A cell is two measurements: attention with a ready plan, and the plan. Where only the planner's kernels have changed,
the first one still holds, and `scripts/gpu-check plan` measures the second for every mask and length of the benchmark.
A cell that ran other planner kernels gets the new time, the new hashes and, as its `plan_run`, the run of plan.json.
"""

import argparse
import sys
from pathlib import Path

from benchmarks import receipts


def plans_of(receipt):
    """{(mask, seqlen): what a cell has of its plan's time}; a cell has one mask for all batch entries and heads."""
    return {
        (plan["mask"], plan["seqlen"]): {
            "plan_ms": plan["graph_us"] / 1e3,
            "plan_ms_spread": [us / 1e3 for us in plan["graph_us_spread"]],
        }
        for plan in receipt["figures"]["plan"]
        if plan["batch"] == 1
    }


def replanned(case, receipt, plans):
    """The case with the plan of the receipt; itself if it ran those kernels or there is no such plan."""
    attention, planner = receipts.parts_of(case["kernel_hashes"])
    hashes = receipt["kernel_hashes"]
    figures = plans.get((case["mask"], case["seqlen"]))
    if figures is None or {name: case["kernel_hashes"][name] for name in planner} == hashes:
        return case
    kept = {name: case["kernel_hashes"][name] for name in sorted(attention)}
    run = {name: receipt[name] for name in receipts.RUN}
    return {**case, **figures, "kernel_hashes": {**kept, **hashes}, "plan_run": run}


def replan(folder):
    """Lines that say what changed."""
    found = receipts.load_folder(folder)
    if "plan.json" not in found:
        raise ValueError(f"{folder} has no plan.json; `scripts/gpu-check plan` writes it")
    plans = plans_of(found["plan.json"])
    for name, held in found.items():
        cases = [replanned(case, found["plan.json"], plans) for case in held["cases"]]
        changed = sum(new is not old for new, old in zip(cases, held["cases"]))
        if changed:
            receipts.write({**held, "cases": cases}, Path(folder) / name)
            most = max(new["plan_ms"] / old["plan_ms"] for new, old in zip(cases, held["cases"]))
            yield f"{name}: {changed} plans, their time at most {most:.2f} of what it was"


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=receipts.RESULTS, help="the receipts' folder")
    try:
        print("\n".join(replan(parser.parse_args(words).results)) or "every cell has the plan of plan.json's kernels")
    except ValueError as error:
        sys.exit(f"replan: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
