# SPDX-License-Identifier: Apache-2.0
"""Replaces python/harness/kernels.py in tests: a library is a JSON file {"toolkit", "kernels": {id: hash}, "split": its
backward is split, "refused": [head dims whose backward it does not run]}."""

import itertools
import json
import sys
from pathlib import Path

import harness

PLAN = ["sm90.plan.classify", "sm90.plan.extents", "sm90.plan.rank", "sm90.plan.transpose"]


def put_in_place(monkeypatch, fake=None):
    """`from harness import kernels` gives `fake`, or this module, until the test ends."""
    fake = fake or sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "harness.kernels", fake)
    monkeypatch.setattr(harness, "kernels", fake, raising=False)


def hashes(library):
    made = json.loads(Path(library).read_text())
    if not made["kernels"]:
        raise ValueError(f"{library}: holds no GPU kernels")
    return {"toolkit": made["toolkit"], "kernels": made["kernels"]}


def kernels_of(library, case, arch="sm90", multiprocessors=132, deterministic=False):
    """Kernels of a fake library; every set's are named for it."""
    name = f"{arch}.{case['op']}.bf16.d{case['head_dim']}.dv{case['head_dim_v']}"
    if case["op"] == "fwd":
        return [*PLAN, f"{name}.c3"]
    name, made = f"{name}.c2", json.loads(Path(library).read_text())
    if case["head_dim"] in made.get("refused", []):
        raise ValueError(f"head dim {case['head_dim']} is not run")
    parts = [
        ".split" if made.get("split") and not deterministic else "",
        ".preprocess",
        ".convert_dq",
        *[".reduce_dkv"] * (case["heads"] != case["heads_kv"]),
    ]
    return [*PLAN, *(f"{name}{part}" for part in parts)]


def default_library():
    return None


def library_file(path, toolkit="Build cuda_13.0", **changes):
    """A library of made-up kernels, `changes` among its fields."""
    names = list(PLAN)
    for dim, arch in itertools.product((64, 128), ("sm90", "sm80", "sm86")):
        names.append(f"{arch}.fwd.bf16.d{dim}.dv{dim}.c3")
        names += [
            f"{arch}.bwd.bf16.d{dim}.dv{dim}.c2{part}"
            for part in ("", ".split", ".preprocess", ".convert_dq", ".reduce_dkv")
        ]
    path.write_text(
        json.dumps({"toolkit": toolkit, "kernels": {name: f"{n:016x}" for n, name in enumerate(names, 1)}, **changes})
    )
    return path
