# SPDX-License-Identifier: Apache-2.0
"""A library's kernels: their ids, the hashes of their machine code, and which of them a call runs. Without a GPU."""

import ctypes as C
import json
import os
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from flashmask import capi
from harness import cubin, kernels

ROOT = Path(__file__).resolve().parents[2]

LIBRARY = kernels.default_library()
WITH_KERNELS = LIBRARY is not None and bool(kernels.table_of(LIBRARY))
needs_kernels = pytest.mark.skipif(not WITH_KERNELS, reason="the library was built without CUDA")
CASE = {
    "op": "fwd",
    "dtype": "bfloat16",
    "batch": 16,
    "seqlen": 8192,
    "heads": 32,
    "heads_kv": 32,
    "head_dim": 128,
    "head_dim_v": 128,
}
SMALL = {**CASE, "batch": 1, "seqlen": 128, "heads": 8, "heads_kv": 2}
PLAN = ["sm90.plan.classify", "sm90.plan.transpose", "sm90.plan.rank", "sm90.plan.extents"]


def explain_in_host_memory(**options):
    """Reads fm_explain_json's explanation of a small call on host tensors."""
    options = capi.make(capi.Options, **options)
    q = np.zeros((1, 4, 1, 8), np.float32)
    arguments = capi.make(capi.ForwardArgs, q=q, k=q, v=q, out=q, lse=np.zeros((1, 1, 4), np.float32))
    status, text = capi.text_of(capi.load().fm_explain_json, C.byref(arguments), C.c_int(0), C.byref(options), None)
    assert status == capi.OK
    return json.loads(text)


def test_the_explanation_is_json():
    found = explain_in_host_memory()
    assert (
        found["backend"] == "cpu"
        and found["tile"] == {"rows": 64, "keys": 128}
        and found["live_tiles"] == found["tiles"] == 1
    )
    assert found["instance"] == "" and found["kernels"] == [] and found["padding_share"] == 0
    assert any(line.startswith("cuda: ") for line in found["rejected"])
    assert found["features"] == []


def test_the_explanation_names_the_features_asked_for():
    found = explain_in_host_memory(softcap=30.0, sink=np.zeros(1, np.float32), dropout_p=0.1)
    assert found["features"] == ["softcap", "dropout", "sink"] and found["backend"] == "cpu"


@needs_kernels
def test_ids_say_what_kernels_are_for():
    table = {info["id"]: info for info in kernels.table_of(LIBRARY)}
    assert set(PLAN) <= set(table)
    main = table["sm90.bwd.bf16.d128.dv128.c2"]
    assert (
        main["arch"] == "sm90"
        and main["symbol"] == "flashmask_sm90_bwd_bf16_d128_dv128_c2"
        and main["tile"]["keys"] == 128
    )
    assert (main["op"], main["dtype"], main["head_dim"], main["head_dim_v"]) == ("bwd", "bfloat16", 128, 128)
    assert table["sm90.fwd.f16.d64.dv64.c3"]["tile"]["rows"] == 192
    assert table["sm90.plan.rank"]["dtype"] is None and table["sm90.plan.rank"]["op"] == "plan"
    assert all(info["threads"] > 0 for info in table.values())


@needs_kernels
def test_every_kernel_has_a_hash():
    found = kernels.hashes(LIBRARY)
    assert found["toolkit"].startswith("Build cuda_")
    table = kernels.table_of(LIBRARY)
    assert set(found["kernels"]) == {info["id"] for info in table} | {f"{info['arch']}.masks" for info in table}
    assert all(re.fullmatch("[0-9a-f]{16}", value) for value in found["kernels"].values())
    # No two kernels of this library are the same code, but for what prepares and converts rows of the same head dim.
    of_rows = (".preprocess", ".convert_dq", ".reduce_dkv")
    others = [value for kernel, value in found["kernels"].items() if not kernel.endswith(of_rows)]
    assert len(set(others)) == len(others)


@needs_kernels
def test_the_hash_counts_what_a_kernel_is_launched_with():
    info = next(i for i in kernels.table_of(LIBRARY) if i["id"] == "sm90.fwd.bf16.d64.dv64.c2")
    digests = cubin.kernel_digests(LIBRARY)
    of = [
        kernels._hash({**info, **change}, digests, LIBRARY)
        for change in ({}, {"threads": 1}, {"shared_bytes": 1}, {"tile": {"rows": 1, "keys": 1}})
    ]
    assert len(set(of)) == len(of)


@needs_kernels
def test_the_command_prints_the_hashes():
    printed = subprocess.run([ROOT / "scripts/kernel-hash", LIBRARY], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == kernels.hashes(LIBRARY)


@needs_kernels
def test_the_command_compares_code_whatever_it_is_called():
    result = subprocess.run(
        [ROOT / "scripts/kernel-hash", LIBRARY, "--same-code-as", LIBRARY], capture_output=True, text=True, check=True
    )
    count = len(cubin.kernel_digests(LIBRARY))  # kernels of attention and plans, and kernels that build masks
    assert count > len(kernels.table_of(LIBRARY))
    assert result.stdout.startswith(f"{count} of {count} kernels are the same code")


def test_a_file_without_kernels_is_named(tmp_path):
    (tmp_path / "text").write_text("no library")
    result = subprocess.run([ROOT / "scripts/kernel-hash", tmp_path / "text"], capture_output=True, text=True)
    assert result.returncode != 0 and "kernel-hash: " in result.stderr and "ELF" in result.stderr


# --- Which kernels a call runs -----------------------------------------------------------------------


PARTIAL = [f"sm90.bwd.bf16.d128.dv128.c2{part}" for part in (".partial.preprocess", ".split", ".partial.convert_dq")]


@needs_kernels
@pytest.mark.parametrize(
    "case, expected",
    [
        (CASE, ["sm90.fwd.bf16.d128.dv128.c3"]),
        (SMALL, ["sm90.fwd.bf16.d128.dv128.c2"]),
        ({**CASE, "op": "bwd"}, [f"sm90.bwd.bf16.d128.dv128.c2{part}" for part in (".preprocess", "", ".convert_dq")]),
        (
            {**SMALL, "op": "bwd"},
            [f"sm90.bwd.bf16.d128.dv128.c2{part}" for part in (".preprocess", ".split", ".reduce_dkv")],
        ),
        (
            {**CASE, "op": "bwd", "deterministic": True},
            ["sm90.bwd.bf16.magnitudes"]
            + [f"sm90.bwd.bf16.d128.dv128.c2{part}" for part in (".preprocess", ".deterministic", ".convert_dq")],
        ),
        ({**CASE, "partial": "float32"}, ["sm90.fwd.bf16.d128.dv128.c3.sink.pos.partial"]),
        ({**CASE, "op": "bwd", "partial": "float32"}, PARTIAL),
        (
            {**SMALL, "op": "bwd", "partial": "float32"},  # one key tile, whose query heads are split
            [*PARTIAL, "sm90.bwd.bf16.d128.dv128.c2.partial.reduce_dkv"],
        ),
        (
            {**CASE, "op": "bwd", "partial": "rounded"},
            [f"sm90.bwd.bf16.d128.dv128.c2{part}" for part in (".preprocess", ".split", ".convert_dq")],
        ),
    ],
)
def test_a_case_says_its_kernels(case, expected):
    case, deterministic = dict(case), case.get("deterministic", False)
    case.pop("deterministic", None)
    assert kernels.kernels_of(LIBRARY, case, deterministic=deterministic) == PLAN + expected
    around = (".magnitudes", ".preprocess", ".convert_dq", ".reduce_dkv")
    explanation = kernels.explain(LIBRARY, case, deterministic=deterministic)
    assert explanation["instance"] == next(k for k in expected if not k.endswith(around))


@needs_kernels
def test_a_larger_gpu_takes_smaller_tiles():
    case = {**CASE, "batch": 1, "seqlen": 2048}
    assert kernels.kernels_of(LIBRARY, case, multiprocessors=132)[-1].endswith(".c3")
    assert kernels.kernels_of(LIBRARY, case, multiprocessors=1000)[-1].endswith(".c2")


@needs_kernels
@pytest.mark.parametrize("change, why", [({"head_dim": 100}, "head_dim 100"), ({"dtype": "float32"}, "float32")])
def test_what_is_not_taken_is_named(change, why):
    with pytest.raises(ValueError, match=why):
        kernels.kernels_of(LIBRARY, {**CASE, **change})


@needs_kernels
def test_another_architecture_is_named():
    found = kernels.explain(LIBRARY, CASE, "sm90", capability=(8, 0))
    assert found["backend"] != "cuda" and any("has 8.0" in why or "8.0;" in why for why in found["rejected"])


@needs_kernels
def test_a_gpu_takes_the_sets_that_are_meant_for_it(monkeypatch):
    built = {info["arch"] for info in kernels.table_of(LIBRARY) if info["op"] != "plan"}
    taken = {(9, 0): kernels.SETS, (8, 0): ("sm80", "sm86"), (8, 9): ("sm86",), (12, 0): ("sm86",), (7, 5): ()}
    for capability, names in taken.items():
        expected = [name for name in names if name in built or (name == "sm86" and "sm80" in built)]
        assert kernels.sets_on(LIBRARY, capability) == expected
    if built == {"sm80", "sm90"}:
        monkeypatch.setenv("FLASHMASK_KERNELS", "sm86")  # for calls that name no kernels
        assert kernels.kernels_of(LIBRARY, CASE)[-1] == "sm90.fwd.bf16.d128.dv128.c3"
        of_set = [kernels.kernels_of(LIBRARY, CASE, arch)[-1] for arch in ("sm80", "sm86")]
        assert of_set == ["sm80.fwd.bf16.d128.dv128.k163", "sm80.fwd.bf16.d128.dv128.k99"]


def test_the_set_in_use_is_the_one_that_is_named_or_the_first(monkeypatch):
    def explain(library, case, arch, capability):
        if arch == "sm90":
            raise ValueError("not built")
        return {"backend": "cuda" if arch == "sm86" or capability == (8, 0) else "cpu"}

    monkeypatch.setattr(kernels, "explain", explain)
    monkeypatch.delenv("FLASHMASK_KERNELS", raising=False)
    assert kernels.set_in_use("l.so", (8, 0)) == "sm80" and kernels.set_in_use("l.so", (8, 6)) == "sm86"
    monkeypatch.setenv("FLASHMASK_KERNELS", "sm90")
    assert kernels.set_in_use("l.so", (9, 0)) == "sm90"
    monkeypatch.setenv("FLASHMASK_KERNELS", "auto")
    assert kernels.set_in_use("l.so", (8, 0)) == "sm80"
    monkeypatch.setattr(kernels, "explain", lambda *_, **__: {"backend": "cpu"})
    with pytest.raises(ValueError, match="no kernels for compute capability 7.5"):
        kernels.set_in_use("l.so", (7, 5))


# --- What changes a hash, and what does not -----------------------------------------------------------


PLAN_OBJECT = "src/CMakeFiles/flashmask.dir/backends/cuda/plan/device_plan.cu.o"
FORWARD_OBJECT = "src/backends/cuda/CMakeFiles/flashmask_sm90.dir/sm90/forward/flashmask_sm90_fwd_d64_dv64_c2.cu.o"


class Rebuilt:
    """A copy of the sources, whose edits are compiled with this build's own commands."""

    def __init__(self, folder):
        self.folder, self.build = folder, LIBRARY.resolve().parents[1]
        if not (self.build / "build.ninja").exists():
            pytest.skip(f"{LIBRARY} is not in the folder it was built in, so the commands that built it are not known")
        for part in ("src", "include"):
            shutil.copytree(ROOT / part, folder / part)

    def edit(self, pattern, replacement, *names):
        """Replaces a regular expression in files below src/, in all of them if none is named; it has to occur."""
        files = [self.folder / "src" / name for name in names] or [
            p for p in (self.folder / "src").rglob("*") if p.suffix in {".cuh", ".cu", ".h", ".inl"}
        ]
        edits = [(path, *re.subn(pattern, replacement, path.read_text(), flags=re.M)) for path in files]
        assert sum(count for *_, count in edits), pattern
        for path, text, count in edits:
            if count:
                path.write_text(text)

    def move(self, old, new):
        """Moves a header; what includes it follows."""
        (self.folder / "src" / new).parent.mkdir(exist_ok=True)
        (self.folder / "src" / old).rename(self.folder / "src" / new)
        self.edit(re.escape(f'"{old}"'), f'"{new}"')

    def compile(self, target):
        """{symbol: digest} of an object file built anew from the copy."""
        line = subprocess.run(
            ["ninja", "-C", self.build, "-t", "commands", target], capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]
        built = self.folder / Path(target).name
        line = (
            line.replace(f"{ROOT}/src", f"{self.folder}/src")
            .replace(f"{ROOT}/include", f"{self.folder}/include")
            .replace(target, str(built))
        )
        # nvcc crashes under the sanitizer's library, which tests of a sanitized build preload.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        result = subprocess.run(shlex.split(line), cwd=self.build, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return {symbol: digest for (_, symbol), digest in cubin.kernel_digests(built).items()}


def digests_now(symbols):
    return {symbol: digest for (_, symbol), digest in cubin.kernel_digests(LIBRARY).items() if symbol in symbols}


@needs_kernels
@pytest.mark.long
def test_comments_names_and_places_leave_hashes_alone(tmp_path):
    copy = Rebuilt(tmp_path)
    copy.edit(
        r"\A",
        "// A comment\n// of two lines.\n",
        "backends/cuda/plan/transpose.cuh",
        "backends/cuda/sm90/forward/consumer.cuh",
    )
    copy.edit(r"\binit_barriers\b", "set_up_barriers")
    copy.edit(r"\bwrite_header\b", "put_header")
    copy.move("backends/cuda/fragments/softmax.cuh", "backends/cuda/fragments/moved/online_softmax.cuh")
    with ThreadPoolExecutor() as pool:
        built = {
            symbol: digest
            for part in pool.map(copy.compile, (PLAN_OBJECT, FORWARD_OBJECT))
            for symbol, digest in part.items()
        }
    assert {symbol.split("_")[2] for symbol in built} == {"plan", "fwd"}
    assert built == digests_now(built)


@needs_kernels
@pytest.mark.long
def test_a_changed_instruction_makes_one_kernel_stale(tmp_path):
    copy = Rebuilt(tmp_path)
    copy.edit(r"if \(count > 0\) atomicAdd", "if (count > 1) atomicAdd", "backends/cuda/plan/transpose.cuh")
    built = copy.compile(PLAN_OBJECT)
    now = digests_now(built)
    assert [symbol for symbol in now if built[symbol] != now[symbol]] == ["flashmask_sm90_plan_transpose"]
