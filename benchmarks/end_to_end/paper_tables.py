# SPDX-License-Identifier: Apache-2.0
"""Tables 4 to 9 of the FlashMask paper: kernel times of twelve masks at 8K, 32K and 128K, head dims 128 and 64, forward
and backward, beside FlexAttention. They are the cells of benchmarks/measure/gpu/bench.py; here
one command measures those that no receipt has, or whose kernels have changed."""

import json
import os
import signal
import subprocess
import sys

from benchmarks import DATA, receipts
from benchmarks.masks import paper_masks

LENGTHS = (8192, 32768, 131072)
# Numbers of the paper's tables, in its order.
TABLES = {(128, 8192): 4, (128, 32768): 5, (128, 131072): 6, (64, 8192): 7, (64, 32768): 8, (64, 131072): 9}
SLICES = [(op, head_dim, seqlen) for head_dim, seqlen in TABLES for op in ("fwd", "bwd")]
PEER = "flex"
CLAIMS = DATA / "paper.json"


def stem(op, head_dim, seqlen):
    return receipts.stem_of({"op": op, "head_dim": head_dim, "head_dim_v": head_dim, "seqlen": seqlen})


def cells(receipt, at):
    """{mask: case} of a table's cells in a receipt."""
    op, head_dim, seqlen = at
    return {
        case["mask"]: case
        for case in (receipt or {}).get("cases", [])
        if case["heads"] == case["heads_kv"] and measured(case) and case["op"] == op
    }


def measured(case):
    """True if FlexAttention took part in the case's own run."""
    return PEER in case["peers"] and "recorded" not in case["peers"][PEER]


def missing(folders, library):
    """[(op, head_dim, seqlen, masks)] that are to be measured. A library says which cells are stale."""
    found = []
    for at in SLICES:
        file = f"{stem(*at)}.json"
        path = next((path / file for path in folders if (path / file).exists()), None)
        receipt = receipts.load(path) if path else None
        have = cells(receipt, at)
        if library and receipt:
            states = receipts.judge({file: receipt}, library)
            stale = [judged.case for judged in states if judged.state != receipts.FRESH]
            have = {mask: case for mask, case in have.items() if case not in stale}
        if masks := [mask for mask in paper_masks.NAMES if mask not in have]:
            found.append((*at, masks))
    return found


def words_of(slices):
    """The argument of run_slices.py that names the slices."""
    ungrouped = {head_dim: 4096 // head_dim for head_dim in (64, 128)}
    return ",".join(
        f"{op}:{head_dim}:{seqlen}:{'+'.join(masks)}:kv{ungrouped[head_dim]}" for op, head_dim, seqlen, masks in slices
    )


def count(slices):
    return sum(len(masks) for *_, masks in slices)


def measure(seconds, fresh):
    """Measures what is missing until the time is over; 0 if nothing is left, 3 if something is, 1 if a cell failed."""
    folders = (receipts.output_folder(), receipts.RESULTS)
    every = [(*at, list(paper_masks.NAMES)) for at in SLICES]
    slices = every if fresh else missing(folders, receipts.library_of())
    if not slices:
        print("PASS  tables: every cell is there")
        return 0
    print(f"tables: {count(slices)} cells in {len(slices)} slices", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.measure.gpu.run_slices", "--slices", words_of(slices), "--jobs", "2"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = 0
    left = missing(folders, receipts.library_of())
    print(f"----  {count(left)} cells are left: the same command goes on" if left else "PASS  tables")
    return 1 if status else 3 if left else 0


def claims():
    """The paper's own figures."""
    return json.loads(CLAIMS.read_text())
