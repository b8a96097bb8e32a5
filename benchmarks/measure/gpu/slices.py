# SPDX-License-Identifier: Apache-2.0
"""Slices of the paper's benchmark, as its drivers are asked for them: in words, or those whose receipts are stale."""

import argparse
import re

from benchmarks import receipts

STALE = "stale"
FORMS = (
    "op:head_dim:seqlen (head_dim/head_dim_v), :mask+mask behind it, :kvN for N key heads behind that or in its place"
)


def slice_of(text):
    """bench.py arguments for fwd:128:8192, bwd:192/128:8192:full+causal, fwd:64:8192:kv8 or fwd:64:8192:causal:kv8."""
    parts = text.split(":")
    heads_kv = ["--heads-kv", parts.pop()[2:]] if re.fullmatch(r"kv\d+", parts[-1]) else []
    if len(parts) not in (3, 4):
        raise argparse.ArgumentTypeError(f"'{text}' is not {FORMS}")
    parts[1], _, head_dim_v = parts[1].partition("/")
    words = zip(("--op", "--head-dim", "--seqlen", "--masks"), (part.replace("+", ",") for part in parts))
    of_v = ["--head-dim-v", head_dim_v] if head_dim_v else []
    return ["paper", *(word for pair in words for word in pair), *of_v, *heads_kv]


def slices_of(text):
    return text if text == STALE else [slice_of(part) for part in text.split(",")]


def stale_slices(found, library, arch, longest=None):
    """Slices of a kernel set's stale cells in {file name: receipt}, up to a length, the shortest first."""
    masks = {}
    for _, case, state in receipts.judge(found, library):
        if case and case["arch"] == arch and state != receipts.FRESH and case["seqlen"] <= (longest or case["seqlen"]):
            sizes = tuple(case[name] for name in ("seqlen", "op", "head_dim", "head_dim_v", "heads_kv"))
            masks.setdefault(sizes, []).append(case["mask"])
    return [
        slice_of(f"{op}:{head_dim}/{head_dim_v}:{seqlen}:{'+'.join(names)}:kv{heads_kv}")
        for (seqlen, op, head_dim, head_dim_v, heads_kv), names in sorted(masks.items())
    ]


def stale_here(longest):
    """stale_slices of benchmarks/results, by the library and the device here."""
    from benchmarks.instruments import kernels_used

    library = kernels_used.here()
    found = stale_slices(receipts.load_folder(), library, library.arch, longest)
    print(f"{len(found)} slices of {library.arch} have stale cells", flush=True)
    return found


def add_arguments(parser):
    parser.add_argument(
        "--slices", type=slices_of, required=True, help=f"{STALE}, or slices with commas between, each {FORMS}"
    )
    parser.add_argument("--longest", type=int, help=f"longest sequence, with --slices {STALE}; default: any")


def check_arguments(parser, arguments):
    if arguments.longest and arguments.slices != STALE:
        parser.error(f"--longest is {arguments.longest}, which only --slices {STALE} takes")


def chosen(arguments):
    """bench.py arguments of each slice asked for."""
    return stale_here(arguments.longest) if arguments.slices == STALE else arguments.slices
