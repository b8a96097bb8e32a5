# SPDX-License-Identifier: Apache-2.0
"""Cases that differ in their masks alone, in the order in which pages show them, and what they are called."""

from benchmarks.masks import paper_masks
from benchmarks.receipts import HOPPER, of_set, short_length

OPS = {"fwd": "Forward", "bwd": "Backward", "total": "Total"}
IN_WORDS = {**OPS, "total": "Forward and backward"}
SHAPE = ("head_dim", "head_dim_v", "seqlen", "batch", "heads", "heads_kv")


def is_grouped(case):
    return case["heads"] != case["heads_kv"]


def by_shape(cases):
    """Lists of cases of one kernel set and shape: Hopper's kernels first, then the forward, then the largest head dim,
    then heads that are not grouped. The masks are in the paper's order, whichever run measured them."""

    def place(case):
        first = (
            case["arch"] != HOPPER,
            case["arch"],
            list(OPS).index(case["op"]),
            -case["head_dim"],
            -case["head_dim_v"],
            is_grouped(case),
        )
        return *first, case["seqlen"], *(case[name] for name in SHAPE)

    shapes = {}
    for case in sorted(cases, key=lambda case: (*place(case), paper_masks.NAMES.index(case["mask"]))):
        shapes.setdefault(place(case), []).append(case)
    return list(shapes.values())


def chart_name(case):
    values = f"-dv{case['head_dim_v']}" if case["head_dim_v"] != case["head_dim"] else ""
    grouped = f"-kv{case['heads_kv']}" if is_grouped(case) else ""
    sizes = f"d{case['head_dim']}{values}-{short_length(case['seqlen']).lower()}{grouped}"
    return of_set(f"{OPS[case['op']].lower()}-{sizes}", case["arch"])


def heads_text(case):
    grouped = f" for {case['heads_kv']} key heads" if is_grouped(case) else ""
    return f"{case['heads']} heads{grouped}"


def shape_text(case):
    values = f", of values {case['head_dim_v']}" if case["head_dim_v"] != case["head_dim"] else ""
    grouped = f", {heads_text(case)}" if is_grouped(case) else ""
    kernels = "" if case["arch"] == HOPPER else f"{case['arch']}: "
    sizes = f"head dim {case['head_dim']}{values}, {short_length(case['seqlen'])}{grouped}"
    return f"{kernels}{IN_WORDS[case['op']]}, {sizes}"
