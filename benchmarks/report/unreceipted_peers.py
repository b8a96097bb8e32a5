# SPDX-License-Identifier: Apache-2.0
"""Other kernels next to ours, measured in runs that left no receipt: data/peers.json. A cell counts as long as the
library runs for it the attention kernels that were measured; the plan, which is below a hundredth of ours there, does
not decide."""

import json

from benchmarks import DATA, receipts

FILE = DATA / "peers.json"
CLEARLY = 0.985  # of our time: what is above it is level with ours


def case_of(cell, held, op):
    """The receipt's case that a cell would be."""
    heads = held["hidden"] // cell["head_dim"]
    return {
        "op": op,
        "arch": "sm90",
        "mask": cell["mask"],
        "head_dim": cell["head_dim"],
        "head_dim_v": cell["head_dim"],
        "seqlen": cell["seqlen"],
        "batch": held["tokens"] // cell["seqlen"],
        "heads": heads,
        "heads_kv": cell.get("heads_kv", heads),
        "dtype": held["dtype"],
        "peers": {"deterministic": {}} if "deterministic" in cell["over_ours"] else {},
    }


def state_of(cell, held, library):
    """State of a cell, as receipts.state_of gives it."""
    try:
        now = set().union(*(library.kernels_of(case_of(cell, held, op)) for op in ("fwd", "bwd")))
    except ValueError as error:
        return f"stale: {error}"
    now, _ = receipts.parts_of(now)
    return receipts.state_of({name: held["kernel_hashes"].get(name) for name in now}, held["toolkit"], library)


def counted(library, path=FILE):
    """(the file, its tables with only the cells that count; `marked` are those of kernels of another toolkit)"""
    held, found = json.loads(path.read_text()), []
    for table in held["tables"]:
        states = [(cell, state_of(cell, held, library)) for cell in table["cells"]]
        cells = [
            {**cell, "marked": state != receipts.FRESH}
            for cell, state in states
            if state in (receipts.FRESH, receipts.OTHER_TOOLKIT)
        ]
        found.append({**table, "cells": cells})
    return held, found


def pair_text(pair):
    """Forward / backward, or the only direction that was measured."""
    return " / ".join(f"{x:.2f}" for x in pair if x is not None) if pair else ""


def tables(library):
    """[(title, about, head, rows)] of what counts."""
    held, found = counted(library)
    return [table_of(table, held) for table in found if table["cells"]]


def table_of(table, held):
    peers = [name for name in held["names"] if any(name in cell["over_ours"] for cell in table["cells"])]
    both = any("best_of_both" in cell for cell in table["cells"])
    rows = [
        [
            shape_text(cell),
            cell["mask"] + " *" * cell["marked"],
            *(pair_text(cell["over_ours"].get(name)) for name in peers),
            *[best_text(cell, held)] * both,
        ]
        for cell in table["cells"]
    ]
    head = ["", "mask", *(held["names"][name] for name in peers), *["best, forward + backward"] * both]
    return table["title"], f"{table['about']} Its time over ours, forward / backward.", head, rows


def shape_text(cell):
    return f"d = {cell['head_dim']}, {receipts.short_length(cell['seqlen'])}"


def best_text(cell, held):
    return ", ".join(f"{ratio:.3f} {held['names'][name]}" for name, ratio in cell.get("best_of_both", {}).items())
