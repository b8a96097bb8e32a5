# SPDX-License-Identifier: Apache-2.0
"""Receipts of invented figures, which stay in temporary folders."""

import json

import fake_kernels

from benchmarks.masks import paper_masks

HASHED = "Build cuda_13.0"
RECORDED = "2026-11-26"  # the date of ratios that are not of a case's own run
MASKS = paper_masks.NAMES


def library_file(folder, **changes):
    folder.mkdir(exist_ok=True)
    return fake_kernels.library_file(folder / "library.json", **changes)


def peer(ms, ours, plan):
    return {"ms": ms, "ms_spread": [0.9 * ms, 1.1 * ms], "rounds": 7, "ratio": ms / ours}


def case(library, mask="full", op="fwd", head_dim=128, seqlen=8192, heads_kv=None, arch="sm90", **peers):
    """A case whose kernels have the library's hashes; `peers`: their time over ours."""
    heads, live = 4096 // head_dim, 0.5
    flop = (4 if op == "fwd" else 10) * 131072 * 4096 * seqlen * live
    ours = flop / 6e11
    made = {
        "op": op,
        "arch": arch,
        "mask": mask,
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "seqlen": seqlen,
        "batch": 131072 // seqlen,
        "heads": heads,
        "heads_kv": heads_kv or heads,
        "dtype": "bfloat16",
        "live": live,
        "plan_ms": 0.01 * ours,
        "ours_ms": ours,
        "ours_tflops": flop / ours / 1e9,
        "peers": {name: peer(over * ours, ours, 0.01 * ours) for name, over in peers.items()},
    }
    hashes = fake_kernels.hashes(library)["kernels"]
    return {**made, "kernel_hashes": {name: hashes[name] for name in fake_kernels.kernels_of(library, made, arch)}}


def receipt(what, cases=(), **changes):
    return {
        "schema": 2,
        "kind": "gpu",
        "what": what,
        "date": "2026-01-02",
        "device": "H200",
        "multiprocessors": 132,
        "driver": "580",
        "toolkit": HASHED,
        "torch": "2.11",
        "command": "bench.py",
        "tests": {"passed": 1, "failed": 0},
        "figures": {},
        "cases": list(cases),
        **changes,
    }


def slice_of(library, op="fwd", head_dim=128, seqlen=8192, masks=MASKS, **changes):
    """The receipt of a slice of the benchmark."""

    def peers_of(mask):
        cudnn = {"cudnn": 1.1} if mask in ("full", "causal") else {}
        return {"flex": 1.6, **cudnn, **({"deterministic": 1.05} if op == "bwd" else {"dense": 5.0})}

    cases = [case(library, mask, op, head_dim, seqlen, **peers_of(mask)) for mask in masks]
    return receipt(f"{op}-d{head_dim}-dv{head_dim}-{seqlen // 1024}k", cases, **changes)


def mma_sync_slice(library, op="fwd", masks=MASKS, device="NVIDIA H200", **peers):
    """The receipt of a slice of sm80. Half of each mask is visible, and takes half of the full mask's time; `peers`:
    their time over ours."""
    over = {"fa2": 1.05, "flex": 0.8, "sdpa": 4.0, "sm86": 1.1, **({"deterministic": 1.05} if op == "bwd" else {})}
    over.update(peers)

    def made(mask):
        of_some = {} if mask in ("full", "causal") else {"fa2": None}
        found = case(library, mask, op, arch="sm80", **{n: r for n, r in {**over, **of_some}.items() if r})
        times = {n: 2 * found[n] for n in ("ours_ms", "plan_ms")}
        return {**found, **times, "live": 1.0} if mask == "full" else found

    return receipt(f"{op}-d128-dv128-8k-sm80", [made(mask) for mask in masks], device=device)


def topic(library, what, names, **figures):
    hashes = fake_kernels.hashes(library)["kernels"]
    return receipt(what, figures=figures, kernel_hashes={name: hashes[name] for name in names})


def put(folder, *receipts):
    folder.mkdir(exist_ok=True)
    for made in receipts:
        (folder / f"{made['what']}.json").write_text(json.dumps(made))
    return folder


def recorded(case, **peers):
    """The case beside peers that took no part in its run; `peers`: their last time over ours."""
    ours = case["ours_ms"]
    figures = {
        name: {"ms": over * ours, "ratio": over, "recorded": RECORDED, "device": "H100"} for name, over in peers.items()
    }
    return {**case, "peers": {**figures, **case["peers"]}}


def with_recorded_v3(made, **over_ours):
    """A receipt with FlashMask V3's last ratio of each direction in Hopper's cells of 8K and head dim 128."""

    def of_them(case):
        return (case["arch"], case["head_dim"], case["seqlen"], case["heads_kv"]) == ("sm90", 128, 8192, 32)

    cases = [recorded(c, flashmask_v3=over_ours[c["op"]]) if of_them(c) else c for c in made["cases"]]
    return {**made, "cases": cases}
