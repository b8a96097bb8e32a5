# SPDX-License-Identifier: Apache-2.0
"""The drivers of the GPU measurements, without a GPU: which cells and contenders there are, what a receipt's case has,
which kernels it names, how cycles are counted and compared. Times here are invented."""

import argparse
import ctypes as C
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import fake_kernels
import invented
import pytest

from benchmarks import ROOT, cell_bars, peers, receipts
from benchmarks.instruments import kernels_used, medians
from benchmarks.masks import paper_masks
from benchmarks.measure.gpu import bench, cycles, paper, run_slices, slices


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """The driver's receipt of invented times."""
    monkeypatch.setenv("OUT", str(tmp_path))

    def run(*words):
        bench.main(["paper", "--dry-run", "--rounds", "3", *words])
        return json.loads(max(tmp_path.glob("*.json"), key=lambda path: path.stat().st_mtime_ns).read_text())

    return run


# --- Cells ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim, heads", [(64, 64), (128, 32)])
def test_by_default_all_masks_and_five_with_grouped_heads(dry_run, head_dim, heads):
    made = dry_run("--head-dim", str(head_dim))
    assert made["what"] == f"fwd-d{head_dim}-dv{head_dim}-8k" and made["tests"] == {"passed": 17, "failed": 0}
    assert [(c["mask"], c["heads"], c["heads_kv"]) for c in made["cases"]] == [
        *((mask, heads, heads) for mask in paper_masks.NAMES),
        *((mask, heads, 8) for mask in paper.GROUPED_MASKS),
    ]


def test_head_dims_of_their_own_for_q_and_v(dry_run):
    """21 heads of 192 are no multiple of 8 key heads: none are grouped."""
    made = dry_run("--head-dim", "192", "--head-dim-v", "128", "--op", "bwd")
    assert made["what"] == "bwd-d192-dv128-8k" and made["tests"] == {"passed": 12, "failed": 0}
    assert {(c["head_dim"], c["head_dim_v"], c["heads"], c["heads_kv"]) for c in made["cases"]} == {(192, 128, 21, 21)}
    of_both = paper.Cell("full", 8192, 192, "bwd", head_dim_v=128)
    assert of_both.flop == 2 * (3 * 192 + 2 * 128) * of_both.batch * 21 * 8192**2
    assert "d=192/128 " in of_both.label


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--masks", "causal,full"], [("causal", 32), ("full", 32)]),
        (["--heads-kv", "8"], [(mask, 8) for mask in paper.GROUPED_MASKS]),
        (["--masks", "qk_sparse", "--heads-kv", "32,4"], [("qk_sparse", 32), ("qk_sparse", 4)]),
    ],
)
def test_cells_that_are_asked_for(dry_run, words, expected):
    assert [(c["mask"], c["heads_kv"]) for c in dry_run(*words)["cases"]] == expected


@pytest.mark.parametrize(
    "words, text",
    [
        (["--heads-kv", "5"], "--heads-kv has 5; it must divide the query heads, 32"),
        (["--contenders", "fa4"], "unknown: fa4"),
        (["--op", "bwd", "--contenders", "dense"], "unknown: dense"),
        (["--op", "bwd", "--without", "dense,fa4"], "unknown: fa4"),
        (["--seqlen", "100"], "--seqlen is 100"),
    ],
)
def test_what_cannot_be_measured_is_refused(dry_run, words, text):
    with pytest.raises(SystemExit, match=text):
        dry_run(*words)


def test_a_case_has_medians_spreads_and_its_kernels(dry_run):
    case = dry_run("--op", "bwd", "--masks", "document")["cases"][0]
    assert (case["arch"], case["op"], case["mask"], case["dtype"]) == ("sm90", "bwd", "document", "bfloat16")
    assert (case["head_dim"], case["head_dim_v"], case["heads"], case["heads_kv"]) == (128, 128, 32, 32)
    assert case["kernel_hashes"] == {"sm90.bwd.bf16.d128.dv128": "0" * 16}
    assert set(case["peers"]) == {"deterministic", "flashmask_v3", "fa3", "flex"} and case["left_out"] == {}
    v3 = case["peers"]["flashmask_v3"]
    assert (v3["ratio"], v3["rounds"]) == (pytest.approx(1.15), 3)
    assert cell_bars.ratio_to(case, "flashmask_v3") == pytest.approx(1.15 / 1.01)  # the plan is ours, too
    assert case["ours_ms_spread"][0] < case["ours_ms"] < case["ours_ms_spread"][1]
    assert case["matmul"]["tflops"] == pytest.approx(700 / 1.01)  # the middle round takes 1 % longer than the first
    assert not [name for name in json.dumps(case).split('"') if "samples" in name]


def test_a_case_says_which_contender_was_left_out(dry_run, capsys):
    case = dry_run("--heads-kv", "8", "--masks", "full")["cases"][0]
    assert case["left_out"] == {"fa3": "invented"} and "fa3" not in case["peers"]
    assert "----  fa3: invented" in capsys.readouterr().out


@pytest.mark.parametrize("arch, small", [("sm80", {"sm86"}), ("sm86", set())])
def test_another_kernel_set_has_receipts_and_contenders_of_its_own(dry_run, tmp_path, monkeypatch, arch, small):
    of_hopper = dry_run("--masks", "causal")["what"]
    monkeypatch.setenv("FLASHMASK_KERNELS", arch)
    made = dry_run("--masks", "causal,document", "--tokens", "32768")
    causal, document = made["cases"]
    assert (made["what"], causal["arch"], causal["batch"]) == (f"{of_hopper}-{arch}", arch, 4)
    assert {path.stem for path in tmp_path.glob("*.json")} == {of_hopper, made["what"]}
    assert causal["kernel_hashes"] == {f"{arch}.fwd.bf16.d128.dv128": "0" * 16}
    assert set(causal["peers"]) == {"fa2", "flex", "sdpa"} | small
    assert set(document["peers"]) == {"flex", "sdpa"} | small
    backward = dry_run("--op", "bwd", "--masks", "full")["cases"][0]
    assert set(backward["peers"]) == {"deterministic", "fa2", "flex", "sdpa"} | small
    assert set(dry_run("--masks", "full", "--contenders", "flex")["cases"][-1]["peers"]) == {"flex"}


def test_slices_with_grouped_heads(capsys):
    assert slices.slices_of("fwd:128:8192:kv8,bwd:64:8192:full+causal:kv8") == [
        ["paper", "--op", "fwd", "--head-dim", "128", "--seqlen", "8192", "--heads-kv", "8"],
        ["paper", "--op", "bwd", "--head-dim", "64", "--seqlen", "8192", "--masks", "full,causal", "--heads-kv", "8"],
    ]
    (of_two_dims,) = slices.slices_of("bwd:192/128:8192:full")
    assert of_two_dims[3:5] == ["--head-dim", "192"] and of_two_dims[-2:] == ["--head-dim-v", "128"]
    with pytest.raises(SystemExit):
        run_slices.parse_arguments(["--slices", "fwd:kv8"])
    assert "'fwd:kv8' is not op:head_dim:seqlen" in capsys.readouterr().err


def test_slices_of_stale_cells(tmp_path, monkeypatch, capsys):
    """Only the kernel set's, the shortest first; the masks of a slice in the receipt's order."""
    fake_kernels.put_in_place(monkeypatch)
    file = invented.library_file(tmp_path)
    made = [
        invented.slice_of(file, "fwd", 64, 32768, ["full", "document"]),
        invented.slice_of(file, "bwd", 64, 8192, ["full", "document", "causal"]),
        invented.slice_of(file, "fwd", 128, 8192, ["full"]),
        invented.mma_sync_slice(file, masks=["full"]),
    ]
    made[1]["cases"].append(invented.case(file, "causal", "bwd", 64, heads_kv=8))
    for receipt in made:
        for case in receipt["cases"]:
            stale = case["head_dim"] == 64 and case["mask"] != "document" or case["arch"] == "sm80"
            case["kernel_hashes"] |= {name: "old" for name in case["kernel_hashes"] if stale}
    found = {f"{receipt['what']}.json": receipt for receipt in made}
    library = receipts.Library(file)
    short = slices.slices_of("bwd:64/64:8192:causal:kv8,bwd:64/64:8192:full+causal:kv64")
    (long,) = slices.slices_of("fwd:64/64:32768:full:kv64")
    assert slices.stale_slices(found, library, "sm90") == [*short, long]
    assert slices.stale_slices(found, library, "sm90", 8192) == short
    (of_sm80,) = slices.stale_slices(found, library, "sm80")
    assert of_sm80[2:7] == ["fwd", "--head-dim", "128", "--seqlen", "8192"]
    assert run_slices.parse_arguments(["--slices", "stale"])[0].slices == slices.STALE
    with pytest.raises(SystemExit):
        run_slices.parse_arguments(["--slices", "fwd:64:8192", "--longest", "8192"])
    assert "--longest is 8192, which only --slices stale takes" in capsys.readouterr().err


@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_contenders_of_either_op_are_left_out(dry_run, op):
    default, left = ({"fwd": {"cudnn", "dense", "plain"}, "bwd": {"cudnn"}}[op], {"flex", "fa3", "flashmask_v3"})
    words = ["--op", op, "--masks", "full", "--without", ",".join([*left, "deterministic"])]
    assert set(dry_run(*words)["cases"][0]["peers"]) == default


def test_flex_is_compiled_for_the_cells_that_are_measured():
    from benchmarks.measure.gpu import compile_flex

    arguments = compile_flex.parse_arguments(["--slices", "fwd:64:8192,bwd:192/128:8192:full+causal"])
    *forward, full, causal = compile_flex.cells_of(arguments)
    of_paper = argparse.Namespace(
        op="fwd", head_dim=64, head_dim_v=64, seqlen=8192, tokens=paper.TOKENS, masks=None, heads_kv=None
    )
    assert [cell.label for cell in forward] == [cell.label for cell in paper.cells_of(of_paper)]
    assert (full.op, full.label) == ("bwd", "d=192/128 S=8192 full") and causal.causal


# --- Samples ----------------------------------------------------------------------------------------


def test_samples_are_told_by_middle_and_middle_half():
    values = [4.0, None, 1.0, 2.0, 3.0, 5.0]
    assert medians.time_figures(values) == {"ms": 3.0, "ms_spread": [2.0, 4.0], "rounds": 5}
    assert medians.spread([7.0, None]) == [7.0, 7.0]
    found = medians.ratio_figures("ratio", [2.0, 9.0, 6.0, 8.0], [1.0, None, 2.0, 2.0])
    assert found == {"ratio": 3.0, "ratio_spread": [2.5, 3.5]}  # ratios of rounds, not of medians: 2, 3 and 4


# --- Kernels ----------------------------------------------------------------------------------------

HASHES = {
    "sm90.fwd.bf16.d128.dv128.c3": "a1",
    "sm90.fwd.bf16.d64.dv64.c3": "a2",
    "sm90.bwd.bf16.d128.dv128.c2": "b1",
    "sm90.bwd.bf16.d128.dv128.c2.ordered": "b2",
    "sm90.plan.classify": "p1",
    "sm80.fwd.bf16.d128.dv128.c3": "s1",
    "sm86.fwd.bf16.d128.dv128.c3": "s2",
}


@pytest.fixture
def library(monkeypatch):
    """A library whose deterministic backward is another kernel."""
    read = []

    def hashes(path):
        read.append(path)
        return {"toolkit": "13.0", "kernels": HASHES}

    def kernels_of(path, case, arch="sm90", multiprocessors=132, deterministic=False):
        dims = f"bf16.d{case['head_dim']}.dv{case['head_dim_v']}"
        own = f"{arch}.{case['op']}.{dims}.{'c3' if case['op'] == 'fwd' else 'c2'}{'.ordered' if deterministic else ''}"
        return [own, "sm90.plan.classify"]

    fake = types.SimpleNamespace(hashes=hashes, kernels_of=kernels_of, default_library=lambda: Path("ours.so"))
    fake_kernels.put_in_place(monkeypatch, fake)
    return read


def test_a_case_names_the_kernels_of_its_modes(library, monkeypatch):
    kernels = kernels_used.Kernels(132)
    case = paper.Cell("causal", 8192, 128, "bwd").case()
    assert kernels.of(case) == {"sm90.plan.classify": "p1", "sm90.bwd.bf16.d128.dv128.c2": "b1"}
    assert kernels.of(case, (False, True)) == {**kernels.of(case), "sm90.bwd.bf16.d128.dv128.c2.ordered": "b2"}
    assert kernels.of_all([kernels_used.case_of("fwd", d, 2048, 1, 8) for d in (64, 128)]) == {
        "sm90.plan.classify": "p1",
        "sm90.fwd.bf16.d128.dv128.c3": "a1",
        "sm90.fwd.bf16.d64.dv64.c3": "a2",
    }
    assert kernels.of_plan() == {"sm90.plan.classify": "p1"} and kernels.toolkit == "13.0"
    assert library == [Path("ours.so")]  # read once
    monkeypatch.setattr(sys.modules["harness.kernels"], "default_library", lambda: None)
    with pytest.raises(SystemExit, match="there is no library"):
        kernels_used.Kernels()


def test_a_measured_case_has_the_hashes_of_both_modes(library):
    cell = paper.Cell("full", 8192, 128, "bwd")
    times = {name: [1.0, 2.0] for name in ("ours", "plan", "deterministic")}

    def ids():
        return set(paper.receipt_case(cell, times, {}, {}, {}, kernels_used.Kernels())["kernel_hashes"])

    fast = {"sm90.plan.classify", "sm90.bwd.bf16.d128.dv128.c2"}
    assert ids() == {*fast, "sm90.bwd.bf16.d128.dv128.c2.ordered"}
    del times["deterministic"]
    assert ids() == fast


def test_a_case_of_another_set_has_its_kernels_and_those_of_the_small_tiles(library):
    kernels, cell = kernels_used.Kernels(132, "sm80"), paper.Cell("full", 8192, 128)
    assert kernels.of(cell.case()) == {"sm90.plan.classify": "p1", "sm80.fwd.bf16.d128.dv128.c3": "s1"}
    times = {name: [1.0, 2.0] for name in ("ours", "plan", "sm86")}
    case = paper.receipt_case(cell, times, {}, {}, {}, kernels)
    assert case["kernel_hashes"] == {**kernels.of(cell.case()), "sm86.fwd.bf16.d128.dv128.c3": "s2"}
    assert set(kernels.kernels_of(case)) == set(case["kernel_hashes"])  # as it is judged


def test_topics_name_the_kernels_they_run(library):
    """Checks the topics whose modules load without a library; the others use equal words."""
    from benchmarks.measure.gpu import time_to_first_output

    arguments = argparse.Namespace(kernels=kernels_used.Kernels(), op=["fwd"])
    expected = {name: text for name, text in HASHES.items() if name.startswith(("sm90.fwd.", "sm90.plan."))}
    assert time_to_first_output.kernel_hashes(arguments) == expected
    assert len(cycles.cases(["fwd"])) == 20 and len(cycles.cases()) == 40


def test_what_a_process_does_before_its_inputs_are_ready_does_not_count(monkeypatch):
    from benchmarks.measure.gpu import time_to_first_output

    says = "import sys, time; time.sleep(2); print('ready', flush=True); time.sleep(0.5); print(sys.argv[1])"
    monkeypatch.setattr(time_to_first_output, "CHILD", [sys.executable, "-c", says])
    seconds, printed = time_to_first_output.process(64)
    assert 0.2 < seconds < 2 and printed == 64
    monkeypatch.setattr(time_to_first_output, "CHILD", [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="status 3"):
        time_to_first_output.process(64)


# --- Peers ------------------------------------------------------------------------------------------


def test_a_peer_is_found_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHMASK_PEERS", str(tmp_path))
    with pytest.raises(peers.LeftOut, match=f"there is no libfa3.so in {tmp_path}"):
        peers.library("fa3")
    (tmp_path / "libfa3.so").touch()
    assert peers.library("fa3") == tmp_path / "libfa3.so"
    with pytest.raises(peers.LeftOut, match=f"there is no libfmv3.so or libdew_flash_attn3.so in {tmp_path}"):
        peers.library("flashmask_v3", "fa3_xla")
    (tmp_path / "libdew_flash_attn3.so").touch()
    assert peers.library("fa3_xla", "fa3") == tmp_path / "libdew_flash_attn3.so"
    monkeypatch.delenv("FLASHMASK_PEERS")
    assert peers.folder() == ROOT / "build" / "peers"


@pytest.mark.parametrize("file", ["libfa3.so", "libdew_flash_attn3.so"])
def test_what_is_no_library_of_this_torch_is_left_out(tmp_path, monkeypatch, file):
    pytest.importorskip("torch")
    from benchmarks.peers import fa3

    monkeypatch.setenv("FLASHMASK_PEERS", str(tmp_path))
    fa3.load.cache_clear()
    (tmp_path / file).write_bytes(b"no library")
    with pytest.raises(peers.LeftOut, match="torch .* does not load it"):
        fa3.load()


@pytest.mark.parametrize(
    "mask, dims, text",
    [
        ("full", (96, 96), "no kernels of head dims 96 and 96"),
        ("causal", (128, 64), "no kernels of head dims 128 and 64"),
        ("document", (192, 128), "no kernels of head dims 192 and 128"),
        ("full", (192, 192), "does not load it"),  # the call would take it
    ],
)
def test_head_dims_that_fa3_was_not_built_for_are_left_out(tmp_path, monkeypatch, mask, dims, text):
    torch = pytest.importorskip("torch")
    from benchmarks.peers import fa3

    monkeypatch.setenv("FLASHMASK_PEERS", str(tmp_path))
    (tmp_path / "libfa3.so").write_bytes(b"no library")
    q, k, v = (torch.zeros(1, 128, 2, d) for d in (dims[0], *dims))
    with pytest.raises(peers.LeftOut, match=text):
        fa3.Forward(mask, q, k, v)


# --- Cycles -----------------------------------------------------------------------------------------

NCU_CSV = """==PROF== Connected
"ID","Kernel Name","sm__cycles_elapsed.max","sm__inst_executed.sum","dram__bytes_read.sum","dram__bytes_write.sum"
"","","cycle","inst","byte","byte"
"0","flashmask_mark","7","8","9","10"
"1","flashmask_sm90_bwd_bf16_d128_dv128_c2_preprocess","51,588","54,940","240","584"
"2","flashmask_sm90_bwd_bf16_d128_dv128_c2","15,351,588","2,044,054,940","1522698240","1,010,499,584"
"3","flashmask_mark","7","8","9","10"
"4","flashmask_sm90_fwd_bf16_d128_dv128_c3","7","8","9","10"
"5","flashmask_mark","7","8","9","10"
==PROF== Disconnected
"""


def test_what_nsight_compute_counted_is_read_call_by_call():
    calls = cycles.calls_of(cycles.counted(NCU_CSV))
    assert [[name for name, _ in call] for call in calls] == [
        ["flashmask_sm90_bwd_bf16_d128_dv128_c2_preprocess", "flashmask_sm90_bwd_bf16_d128_dv128_c2"],
        ["flashmask_sm90_fwd_bf16_d128_dv128_c3"],
        [],
    ]
    assert calls[0][1][1] == {
        "cycles": 15351588,
        "instructions": 2044054940,
        "dram_read": 1522698240,
        "dram_written": 1010499584,
    }
    assert cycles.calls_of(cycles.counted("==ERROR== ERR_NVGPUCTRPERM")) == []


def test_each_library_of_a_comparison_is_loaded(tmp_path, monkeypatch):
    library = os.environ["FLASHMASK_LIBRARY"]
    other = shutil.copy(library, tmp_path / "other.so")
    monkeypatch.setenv("FLASHMASK_LIBRARY", library)
    handles = [cycles.library_calls(str(path)).lib._handle for path in (library, other, library)]
    assert handles[0] == handles[2] != handles[1]


def test_ncu_leaves_the_clock_alone():
    words = cycles.ncu_words("ncu")
    assert words[words.index("--clock-control") + 1] == "none"


def test_every_instance_is_counted():
    found = {(c.op, c.dtype, c.head_dim, c.variant) for c in cycles.cases()}
    assert found == {
        (op, dtype, d, variant)
        for op, variants in (("fwd", ("c2", "c3")), ("bwd", ("c2", "c2_split")))
        for dtype in ("bf16", "f16")
        for d in (64, 128)
        for variant in variants
    }


def test_the_library_runs_the_instances_that_the_cases_are_named_for():
    """Asked of the library itself, if it has kernels."""
    pytest.importorskip("harness.kernels")
    try:
        library = kernels_used.Kernels()
    except Exception as error:  # a build without CUDA
        pytest.skip(str(error))
    for case in [*cycles.cases(), *cycles.cases(head_dims=(96, 192, 256)), *cycles.cases(["bwd"], (64, 256), True)]:
        name = f"sm90.{case.op}.{case.dtype}.d{case.head_dim}.dv{case.head_dim}.{case.variant.replace('_', '.')}"
        assert name in library.of(case.case(), (case.deterministic,)), case
    assert {"sm90.plan.classify", "sm90.plan.rank"} < set(library.of_plan())
    assert not any("list" in name or "positions" in name for name in library.of_plan())


def test_libraries_take_turns_in_changing_order():
    case = cycles.cases()[0]
    order = [library for _, library in cycles.schedule([case], 3, {"new": "a", "old": "b"})]
    assert order == ["new", "old", "old", "new", "new", "old"]


def call(**kernels):
    return [(name, {"cycles": value}) for name, value in kernels.items()]


def test_ratios_are_of_medians_kernel_by_kernel():
    case = cycles.cases()[0]
    new = [call(a=10, b=900), call(a=12, b=990), call(a=11, b=930)]
    old = [call(x=20, y=1000), call(x=20, y=900), call(x=20, y=1100)]
    figures = cycles.figures_of(case, {"new": new, "old": old})
    assert figures["libraries"]["new"][1] == {"kernel": "b", "cycles": 930, "cycles_spread": [915, 960]}
    assert [(r["kernel"], r["ratio"]) for r in figures["ratios"]] == [("a", 0.55), ("b", 0.93)]
    lines = list(cycles.report([{**figures, "compared": True}]))
    assert "not judged" in lines[0] and lines[-1].startswith("new / old over 1 kernels")
    assert "geometric mean 0.9300, worst 0.9300 (fwd bf16 d128 c3 full b)" in lines[-1]
    fused = cycles.figures_of(case, {"new": [call(ab=950)] * 3, "old": old})
    assert fused["ratios"] == [{"kernel": "whole call", "ratio": 950 / 1020, "share": 1.0}]


def test_a_call_that_one_library_refuses_is_named():
    figures = cycles.figures_of(cycles.cases()[0], {"new": [call(a=1)], "old": [[]]})
    lines = list(cycles.report([{**figures, "compared": True}]))
    assert figures["ratios"] == [] and any("the old library does not take it" in line for line in lines)


@pytest.fixture
def arguments(monkeypatch):
    monkeypatch.setattr(cycles, "asked", lambda _: [cycles.Case("fwd", "bf16", 128, "c3", "full", 2, 32, 32)])
    kernels = types.SimpleNamespace(path="new.so")
    return argparse.Namespace(kernels=kernels, old=None, op=["fwd"], repetitions=2, way="auto", seconds=5)


def test_without_counters_the_multiprocessors_clocks_are_read_and_the_output_says_so(arguments, monkeypatch, capsys):
    monkeypatch.setattr(cycles, "find_ncu", lambda: "ncu")
    ran_words = []

    def run(words, **_):
        ran_words.append(words)
        if words[0] == "ncu":
            return types.SimpleNamespace(stdout="==ERROR== ERR_NVGPUCTRPERM - no permission\n", stderr="", returncode=1)
        return types.SimpleNamespace(stdout="100.0\n104.0\n", stderr="", returncode=0)

    monkeypatch.setattr(cycles.subprocess, "run", run)
    receipt = {"figures": {}}
    assert cycles.run(arguments, receipt, lambda: None, None)
    figures = receipt["figures"]["cycles"]
    assert figures["counted_by"].startswith("the multiprocessors' clocks")
    assert "ERR_NVGPUCTRPERM" in figures["counted_by"]
    expected = {"kernel": "whole call", "cycles": 102.0, "cycles_spread": [101.0, 103.0]}
    assert figures["cases"][0]["libraries"]["new"] == [expected]
    assert len(ran_words) == 2  # ncu was refused at the first case
    assert "ERR_NVGPUCTRPERM" in capsys.readouterr().out
    arguments.way = "ncu"
    with pytest.raises(SystemExit, match="ERR_NVGPUCTRPERM"):
        cycles.run(arguments, receipt, lambda: None, None)


def test_with_counters_they_are_read(arguments, monkeypatch, capsys):
    monkeypatch.setattr(cycles, "find_ncu", lambda: "ncu")
    head, *rows = [line for line in NCU_CSV.splitlines() if line.startswith('"')]

    def run(words, **_):
        request = json.loads(words[-1])
        count = request["repetitions"] * len(request["libraries"]) * len(request["cases"])
        output = "\n".join([head, rows[0], *[rows[1], rows[5]] * count])
        return types.SimpleNamespace(stdout=output, stderr="", returncode=0)

    monkeypatch.setattr(cycles.subprocess, "run", run)
    receipt = {"figures": {}}
    cycles.run(arguments, receipt, lambda: None, None)
    figures = receipt["figures"]["cycles"]
    assert figures["counted_by"] == "Nsight Compute, clock not held"
    assert figures["cases"][0]["libraries"]["new"][0]["kernel"] == "flashmask_sm90_fwd_bf16_d128_dv128_c3"


@pytest.mark.parametrize("name", ["sm_clock", "stream"])
def test_kernels_of_instruments_assemble(tmp_path, name):
    pytest.importorskip("torch")
    module = importlib.import_module(f"benchmarks.instruments.{name}")
    of_python = ROOT.glob("build/venv/lib/python3*/site-packages/nvidia/cu13/bin/ptxas")
    ptxas = shutil.which("ptxas") or next(of_python, None)
    if not ptxas:
        pytest.skip("no ptxas")
    (tmp_path / "kernel.ptx").write_text(module.PTX)
    subprocess.run([ptxas, "-arch=sm_90", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"], check=True)


def test_profiles_know_the_marker_kernel():
    pytest.importorskip("torch")
    from benchmarks.instruments import sm_clock

    assert sm_clock.NAME == cycles.MARK


def test_what_passed_is_the_median_over_multiprocessors_that_wrote_both():
    torch = pytest.importorskip("torch")
    from benchmarks.instruments import sm_clock

    before, after = torch.tensor([100, 5000, 0, 70, 9, 0]), torch.tensor([160, 5050, 90, 0, 79, 0])
    assert sm_clock.passed(before, after) == 60
    with pytest.raises(RuntimeError, match="no multiprocessor"):
        sm_clock.passed(torch.zeros(6, dtype=torch.int64), after)


class Driver:
    """CUDA's driver, as far as a mark needs it: every launch takes 10 cycles, and writes three multiprocessors' clocks,
    which have nothing to do with each other."""

    def __init__(self):
        self.clock = 1000

    def __getattr__(self, name):
        return lambda *_: 0

    def cuLaunchKernel(self, function, *words):
        *shape, shared, stream, arguments, extra = words
        assert shape == [3, 1, 1, 1, 1, 1] and shared > 114 * 1024 and extra is None
        self.clock += 10
        clocks = C.cast(C.cast(arguments[0], C.POINTER(C.c_uint64))[0], C.POINTER(C.c_int64))
        for multiprocessor, offset in ((0, 0), (2, 5_000), (700, 90_000)):
            clocks[multiprocessor] = self.clock + offset
        return 0


@pytest.fixture
def driver(monkeypatch):
    torch = pytest.importorskip("torch")
    from benchmarks.instruments import sm_clock

    made = Driver()
    monkeypatch.setattr(sm_clock.C, "CDLL", lambda _: made)
    monkeypatch.setattr(torch, "zeros", functools.partial(lambda zeros, *a, device, **k: zeros(*a, **k), torch.zeros))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(multi_processor_count=3))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(cuda_stream=0))
    for name in ("synchronize", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return made


def test_cycles_of_a_call_are_without_those_of_the_marks(driver):
    from benchmarks.instruments import sm_clock

    def call():
        driver.clock += 12345

    assert sm_clock.Marks().cycles(call) == 12345 and sm_clock.Marks().cycles(lambda: None) == 0


def test_the_measuring_process_measures_in_the_order_of_the_schedule(driver, monkeypatch, capsys):
    torch = pytest.importorskip("torch")

    class CallError(RuntimeError):
        pass

    def library(path):
        def call(*inputs, plan, deterministic=False):
            if path == "old.so" and plan.causal:
                raise CallError("head_dim 128 is not taken")
            takes = {"new.so": 100, "old.so": 200}[path]
            made = types.SimpleNamespace(launch=lambda: setattr(driver, "clock", driver.clock + takes))
            made.run = lambda: made
            return made

        def mask(*_, **fields):
            return types.SimpleNamespace(**fields)

        return types.SimpleNamespace(
            Mask=mask, Plan=lambda mask: mask, Forward=call, Backward=call, CallError=CallError
        )

    monkeypatch.setattr(cycles, "library_calls", library)
    monkeypatch.setattr(cycles, "inputs_of", lambda case: [None] * 4)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    found = [case for case in cycles.cases() if (case.dtype, case.head_dim) == ("f16", 64)]
    libraries = {"new": "new.so", "old": "old.so"}
    cycles.child({"way": "marks", "libraries": libraries, "cases": found, "repetitions": 2})
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    of_case = {"full": [100, 200, 200, 100], "causal_document": [100, None, None, 100]}
    assert len(lines) == len(cycles.schedule(found, 2, libraries))
    assert lines == [n for case in found for n in of_case[case.mask]]
    profiled = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: profiled.append(driver.clock))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: profiled.append(driver.clock))
    cycles.child({"way": "ncu", "libraries": {"new": "new.so"}, "cases": found[:1], "repetitions": 1})
    assert profiled[1] - profiled[0] == 110 and capsys.readouterr().out == ""  # a mark and a call
