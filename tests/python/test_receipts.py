# SPDX-License-Identifier: Apache-2.0
"""Receipts of GPU runs, the bars, the report and the hash of the sources; no GPU needed.

Figures here are invented and stay in temporary folders.
"""

import copy
import json
import os
import shutil
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "gpu")]
import bench  # noqa: E402
import charts  # noqa: E402
import cycles  # noqa: E402
import first  # noqa: E402
import paper_masks  # noqa: E402
import receipts  # noqa: E402
import report  # noqa: E402
import samples  # noqa: E402
import slices  # noqa: E402
import verdict  # noqa: E402


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """The driver's receipt of invented times."""
    monkeypatch.setenv("OUT", str(tmp_path / "dry"))

    def run(*words):
        status = bench.main(["paper", "--dry-run", "--rounds", "3", *words])
        files = sorted((tmp_path / "dry").glob("*.json"))
        return status, json.loads(files[-1].read_text())

    return run


@pytest.fixture
def receipt(dry_run):
    """One that would count as measured, if it were not invented."""
    return dry_run("--head-dim", "128", "--seqlen", "8192")[1] | {"dry_run": False}


def put(folder, name, receipt):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(receipt))


def test_committed_receipts_are_well_formed():
    """A malformed receipt fails; a stale one is only named."""
    found = receipts.load_folder()
    for name in receipts.stale(found):
        warnings.warn(f"stale: {name} is of sources {found[name]['source_hash']}, the tree is {receipts.source_hash()}", stacklevel=1)


def test_dry_run_fills_every_field_and_is_refused(dry_run, capsys, tmp_path):
    status, made = dry_run("--head-dim", "128", "--seqlen", "8192")
    assert status == 0 and made["complete"] and len(made["cases"]) == 12 and made["tests"] == {"passed": 12, "failed": 0}
    assert receipts.problems(made) == ["it comes from a dry run: its figures are invented"]
    assert [c["mask"] for c in made["cases"]] == paper_masks.NAMES
    full = made["cases"][0]
    assert (full["batch"], full["heads"], full["live"]) == (16, 32, 1.0)
    assert full["ours_tflops"] == pytest.approx(4 * 16 * 32 * 8192**2 * 128 / full["ours_ms"] / 1e9)
    assert set(full["peers"]) == {"flex", "cudnn", "dense", "plain"} and "cudnn" not in made["cases"][2]["peers"]
    assert full["peers"]["flex"]["ratio"] == pytest.approx(1.6) and full["peers"]["flex"]["ratio_with_plan"] == pytest.approx(1.6 / 1.01)
    output = capsys.readouterr().out
    assert "geometric mean over V3" in output and len(output) < 12000 and " det" not in output
    with pytest.raises(ValueError, match="dry run"):
        receipts.load(next((tmp_path / "dry").glob("*.json")))


def test_dry_run_of_the_backward(dry_run, capsys):
    status, made = dry_run("--op", "bwd", "--head-dim", "128", "--seqlen", "8192")
    assert made["complete"] and len(made["cases"]) == 12 and made["tests"] == {"passed": 12, "failed": 0} and made["what"] == "bwd-d128-8k"
    assert receipts.problems(made) == ["it comes from a dry run: its figures are invented"]
    full = made["cases"][0]
    assert full["op"] == "bwd" and full["ours_tflops"] == pytest.approx(10 * 16 * 32 * 8192**2 * 128 / full["ours_ms"] / 1e9)
    assert set(full["peers"]) == {"deterministic", "flex", "cudnn"} and "cudnn" not in made["cases"][2]["peers"]
    assert full["peers"]["deterministic"]["ratio"] == pytest.approx(1.05)
    names = [c["name"] for c in made["figures"]["checks"]]
    assert len(names) == 4 and [c["bar"] for c in made["figures"]["checks"]] == [1.0, 1.05, 1.09, 1.09]
    assert status == int(not all(c["passed"] for c in made["figures"]["checks"]))
    table = capsys.readouterr().out.split("\n")
    assert table[0].split()[-1] == "det" and table[1].split()[-1] == "1.05"
    with pytest.raises(SystemExit, match="unknown: dense"):
        dry_run("--op", "bwd", "--contenders", "flex,dense")


def test_receipts_are_judged_by_the_hash_of_their_direction(dry_run):
    backward, forward = dry_run("--op", "bwd", "--masks", "full")[1], dry_run("--masks", "full")[1]
    assert (forward["source_hash"], backward["source_hash"]) == (receipts.source_hash("forward"), receipts.source_hash("backward"))
    assert receipts.stale({"a": forward, "b": backward}) == []
    swapped = {"a": {**forward, "source_hash": backward["source_hash"]}, "b": {**backward, "source_hash": forward["source_hash"]}}
    assert receipts.stale(swapped) == ["a", "b"]
    assert receipts.stale({"old": {"source_hash": forward["source_hash"]}}) == []  # from before there were two
    assert "direction is 'up'" in receipts.problems({**forward, "direction": "up"})


@pytest.mark.parametrize("path, decides", [("cmake/install/install.cmake", False), ("cmake/install/new.cmake", False),
                                           ("include/flashmask/model_masks.h", False), ("cmake/FlashmaskCuda.cmake", True),
                                           ("src/CMakeLists.txt", True), ("src/plan/plan.cpp", True)])
def test_what_the_hash_of_the_sources_is_made_of(tmp_path, path, decides):
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    for folder in ("cmake", "include", "src"):
        shutil.copytree(ROOT / folder, tmp_path / folder)

    def hashes():
        words = [ROOT / "scripts" / "source-hash"]
        return [subprocess.run([*words, direction], env={**os.environ, "FLASHMASK_SOURCE": str(tmp_path)}, check=True, capture_output=True).stdout
                for direction in ("forward", "backward")]

    before = hashes()
    with open(tmp_path / path, "a") as file:
        file.write("\n")
    assert [now != then for now, then in zip(hashes(), before)] == [decides, decides]


def test_a_dry_run_never_writes_into_the_repository(monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    with pytest.raises(SystemExit, match="OUT"):
        bench.main(["paper", "--dry-run"])


def test_selected_masks_and_contenders(dry_run):
    status, made = dry_run("--head-dim", "64", "--seqlen", "131072", "--masks", "causal,document", "--contenders", "flex")
    assert [c["mask"] for c in made["cases"]] == ["causal", "document"] and all(set(c["peers"]) == {"flex"} for c in made["cases"])
    assert made["what"] == "fwd-d64-128k" and status == 0  # no bar reaches head dim 64 at 128K
    with pytest.raises(SystemExit, match="unknown: nonsense"):
        dry_run("--masks", "nonsense")


@pytest.mark.parametrize("change, words", [
    (lambda r: r.pop("source_hash"), "source_hash"),
    (lambda r: r.update(schema=2), "schema is 2"),
    (lambda r: r.update(kind="cpu"), "kind"),
    (lambda r: r.update(tests={"passed": 1}), "tests"),
    (lambda r: r.update(cases={}), "cases is not a list"),
    (lambda r: r["cases"][1].pop("mask"), "case 1: mask is None"),
    (lambda r: r["cases"][1].update(ours_ms=0), "ours_ms is 0"),
    (lambda r: r["cases"][1].update(plan_ms=float("nan")), "plan_ms is nan"),
    (lambda r: r["cases"][1].update(live=1.5), "live is 1.5"),
    (lambda r: r["cases"][1].update(op="both"), "op is 'both'"),
    (lambda r: r["cases"][1]["peers"].update(flex={}), "peer flex has no ms"),
])
def test_malformed_receipts_are_refused(receipt, tmp_path, change, words):
    assert receipts.problems(receipt) == []
    change(receipt)
    put(tmp_path / "bad", "r.json", receipt)
    with pytest.raises(ValueError, match=words):
        receipts.load_folder(tmp_path / "bad")


def test_receipts_merge_and_go_stale(receipt, tmp_path):
    later = copy.deepcopy(receipt)
    later["cases"] = later["cases"][:1]
    later["cases"][0]["ours_ms"] = 123.0
    put(tmp_path / "r", "a.json", receipt)
    put(tmp_path / "r", "b.json", later)
    put(tmp_path / "r", "c.json", {**later, "source_hash": "0" * 16})
    found = receipts.load_folder(tmp_path / "r")
    assert receipts.stale(found, receipt["source_hash"]) == ["c.json"]
    merged = receipts.merge([found["a.json"], found["b.json"]])
    assert len(merged) == 12 and merged[0]["ours_ms"] == 123.0


def test_masks_are_shown_in_the_papers_order_whichever_run_they_are_of(receipt):
    first, rest = ({**receipt, "cases": receipt["cases"][part]} for part in (slice(5), slice(5, None)))
    (shape, cases), = report.by_shape(receipts.merge([rest, first]))
    assert shape == ("fwd", 128, 8192) and [case["mask"] for case in cases] == paper_masks.NAMES


def test_receipts_never_replace_each_other(receipt, tmp_path):
    for expected in ("", "-2", "-3"):
        path = receipts.free_path(receipt, tmp_path / "new")
        assert path.name == f"{receipt['date']}-fwd-d128-8k{expected}.json"
        receipts.write(receipt, path)


def test_runs_that_begin_together_have_a_receipt_each(receipt, tmp_path):
    folder = tmp_path / "new"
    first, second = receipts.free_path(receipt, folder), receipts.free_path(receipt, folder)
    assert first != second
    for path in (second, first):
        receipts.write(receipt, path)
    assert sorted(folder.iterdir()) == sorted((first, second))


def with_flex_ratio(receipt, of_v3, cudnn):
    """Every cell at `of_v3` times V3's ratio to FlexAttention, and `cudnn` times cuDNN."""
    v3 = verdict.v3_ratios()
    for case in receipt["cases"]:
        case["peers"]["flex"]["ratio_with_plan"] = of_v3 * v3[case["head_dim"], case["seqlen"], case["mask"]]
        if "cudnn" in case["peers"]:
            case["peers"]["cudnn"]["ratio_with_plan"] = cudnn
    return verdict.checks(verdict.rows_of(receipt["cases"]))


@pytest.mark.parametrize("of_v3, cudnn, passed", [(1.2, 1.06, [1, 1, 1, 1]), (1.1, 1.06, [1, 0, 1, 1]), (0.99, 1.04, [0, 0, 0, 0])])
def test_bars(receipt, of_v3, cudnn, passed):
    found = with_flex_ratio(receipt, of_v3, cudnn)
    assert [c["passed"] for c in found] == list(map(bool, passed)) and [c["bar"] for c in found] == [1.0, 1.15, 1.05, 1.05]
    assert found[0]["got"] == pytest.approx(of_v3) and found[1]["got"] == pytest.approx(of_v3)
    assert [line[:4] for line in verdict.check_lines(found)] == [("FAIL", "PASS")[p] for p in passed]


def test_a_missing_peer_is_a_dash(receipt):
    for case in receipt["cases"]:
        case["peers"] = {}
    rows = verdict.rows_of(receipt["cases"])
    assert rows[0]["flex"] is None and rows[0]["v3"] is None and verdict.checks(rows) == []
    assert verdict.table(rows)[1].split()[-4:] == ["-", "1.20", "-", "-"]


def test_v3_file_names_its_source_and_covers_the_cells():
    held = json.loads(verdict.V3_FILE.read_text())
    assert "9985af5" in held["source"] and "H200" in held["source"]
    cells = {(c["head_dim"], c["seqlen"], c["mask"]) for c in held["cells"]}
    for bars in verdict.V3_BARS.values():
        assert cells == {(d, s, m) for d, (seqlens, *_) in bars.items() for s in seqlens for m in paper_masks.NAMES}
    assert len(held["cells"]) == len(cells) and all(1 < c[name] < 4 for c in held["cells"] for name in verdict.V3_RATIO.values())


def sparsity_figures():
    points = [{"kind": kind, "live": n / 20, "ms": 5.0 * n + 1} for n in range(1, 21) for kind, *_ in report.KINDS]
    intercept, slope, r2 = samples.line_fit([p["live"] for p in points], [p["ms"] for p in points])
    assert (intercept, slope, r2) == (pytest.approx(1), pytest.approx(100), pytest.approx(1))
    fit = {"intercept_ms": intercept, "slope_ms": slope, "r2": r2, "samples": len(points), "intercept_share": intercept / 101}
    return {"seqlen": 32768, "head_dim": 128, "batch": 4, "heads": 32, "full_ms": 101.0, "points": points, "fits": {"all": fit}}


def test_report_is_one_page_without_outside_resources(receipt, tmp_path):
    put(tmp_path / "r", "a.json", {**receipt, "device": "<device>"})
    put(tmp_path / "r", "b.json", {**receipt, "cases": [], "figures": {"sparsity": sparsity_figures()}})
    put(tmp_path / "r", "old.json", {**receipt, "source_hash": "0" * 16})
    words = ["--results", str(tmp_path / "r"), "--html", str(tmp_path / "page.html"), "--svg", str(tmp_path / "svg"), "--hash", receipt["source_hash"]]
    assert report.main(words) == 0
    page = (tmp_path / "page.html").read_text()
    for words in ("&lt;device&gt;", "shared question", "FlashMask V3 (derived)", "1 receipts of other sources are not shown: old.json"):
        assert words in page
    for outside in ("<script", "src=", "href=", "@import", "url("):
        assert outside not in page
    assert page.count("http") == page.count("http://www.w3.org/2000/svg")
    drawn = {p.name: p.read_text() for p in (tmp_path / "svg").iterdir()}
    assert set(drawn) == {"gpu-forward-d128-8k.svg", "gpu-sparsity.svg", "gpu-mask-memory.svg"}
    for svg in drawn.values():
        ElementTree.fromstring(svg)
    bars = drawn["gpu-forward-d128-8k.svg"]
    assert bars.count("flashmask (plan included):") == 12 and bars.count("cuDNN:") == 2 and bars.count("FlashMask V3 (derived):") == 12
    assert drawn["gpu-sparsity.svg"].count("<circle") == 60


def test_report_of_both_directions(dry_run, tmp_path):
    """Each is judged by its own hash; one left by another tree is not shown."""
    backward, forward = (dry_run("--op", op)[1] | {"dry_run": False} for op in ("bwd", "fwd"))
    put(tmp_path / "r", "f.json", forward)
    put(tmp_path / "r", "b.json", backward)
    put(tmp_path / "r", "old.json", {**backward, "source_hash": "0" * 16})
    assert report.main(["--results", str(tmp_path / "r"), "--html", str(tmp_path / "page.html"), "--svg", str(tmp_path / "svg")]) == 0
    page = (tmp_path / "page.html").read_text()
    for words in (forward["source_hash"], backward["source_hash"], "1 receipts of other sources are not shown: old.json", "time, deterministic",
                  "Forward, d=128 S=8192 full: over cuDNN", "Backward, d=128 S=8192 full: over cuDNN", "<h2>Forward and backward, head dim 128, 8K</h2>",
                  "Forward and backward, d=128 S=8192: geometric mean over V3"):
        assert words in page
    assert "Forward and backward, d=128 S=8192 full: over cuDNN" not in page
    drawn = {p.name: p.read_text() for p in (tmp_path / "svg").iterdir()}
    assert set(drawn) == {"gpu-forward-d128-8k.svg", "gpu-backward-d128-8k.svg", "gpu-total-d128-8k.svg", "gpu-mask-memory.svg"}
    counts = [drawn[f"gpu-{name}-d128-8k.svg"].count("flashmask, deterministic:") for name in ("forward", "backward")]
    assert counts == [0, 12] and "Backward, head dim 128, 8K tokens" in drawn["gpu-backward-d128-8k.svg"]


def test_totals_are_sums_of_times(dry_run):
    backward, forward = (dry_run("--op", op, "--masks", "causal,document")[1]["cases"] for op in ("bwd", "fwd"))
    cases = verdict.with_totals(forward + backward[:1])
    assert len(cases) == 4 and verdict.with_totals(forward) == forward
    total = cases[3]
    assert (total["op"], total["mask"]) == ("total", "causal") and set(total["peers"]) == {"flex", "cudnn", "deterministic"}
    ours = forward[0]["ours_ms"] + backward[0]["ours_ms"]
    assert total["ours_ms"] == pytest.approx(ours) and total["plan_ms"] == forward[0]["plan_ms"]
    assert total["ours_tflops"] == pytest.approx(forward[0]["ours_tflops"])  # invented as equal
    v3 = sum(case["peers"]["flex"]["ms"] / verdict.v3_ratios(op)[128, 8192, "causal"] for op, case in (("fwd", forward[0]), ("bwd", backward[0])))
    row = verdict.row_of(total)
    assert row["v3"] == pytest.approx(v3 / (ours + forward[0]["plan_ms"])) and row["deterministic"] > 1
    names = [c["name"] for c in verdict.checks([row], "total")]
    assert names == ["d=128 S=8192: geometric mean over V3"]


def test_report_without_receipts_says_so(tmp_path):
    (tmp_path / "none").mkdir()
    report.main(["--results", str(tmp_path / "none"), "--html", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "computed, not measured" in page and "Memory of one mask" in page and "<h2>Bars" not in page


def test_report_names_a_malformed_receipt(tmp_path):
    put(tmp_path / "r", "broken.json", {"schema": 1})
    with pytest.raises(SystemExit, match="broken.json"):
        report.main(["--results", str(tmp_path / "r"), "--html", str(tmp_path / "page.html")])


def test_tiles_of_an_axis():
    assert charts.ticks(576) == [0, 200, 400, 600] and charts.ticks(101)[-1] >= 101 and charts.ticks(0.7)[-1] >= 0.7


def source_hash_of(folder, *words):
    return subprocess.run([folder / "scripts" / "source-hash", *words], check=True, capture_output=True, text=True).stdout.strip()


def test_source_hash_of_the_forward_leaves_out_the_backward():
    forward, backward = (set(source_hash_of(ROOT, direction, "--list").split("\n")) for direction in ("forward", "backward"))
    assert forward == set(source_hash_of(ROOT, "--list").split("\n")) < backward
    assert {Path(name).parent.as_posix() for name in backward - forward} == {"src/backends/cuda/sm90/backward"}
    assert source_hash_of(ROOT) == source_hash_of(ROOT, "forward") != source_hash_of(ROOT, "backward")


def test_source_hash_follows_contents_alone(tmp_path):
    """The same without .git, with other times and with files that decide nothing; another one for any listed file changed."""
    listed = source_hash_of(ROOT, "--list").split("\n")
    assert {"CMakeLists.txt", "include/flashmask/plan.h", "src/plan/plan.cpp", "src/mask/rules.h", "src/backends/registry.cpp"} <= set(listed)
    assert not [f for f in listed if f.startswith(("tests/", "tools/", "src/backends/cpu/", "src/backends/reference/", "src/inspect/"))]
    for name in [*listed, "scripts/source-hash"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "scripts/source-hash").chmod(0o755)
    first = source_hash_of(tmp_path)
    (tmp_path / "src/plan/notes.md").write_text("nothing")
    (tmp_path / "src/plan/__pycache__").mkdir()
    (tmp_path / "src/plan/__pycache__/a.pyc").write_text("nothing")
    assert len(first) == 16 and source_hash_of(tmp_path) == first
    (tmp_path / "src/plan/plan.cpp").write_text((tmp_path / "src/plan/plan.cpp").read_text() + "\n")
    second = source_hash_of(tmp_path)
    (tmp_path / "src/backends/cuda/sm90").mkdir(parents=True, exist_ok=True)
    (tmp_path / "src/backends/cuda/sm90/new.cuh").write_text("")
    assert len({first, second, source_hash_of(tmp_path)}) == 3


NCU_CSV = '''==PROF== Connected
"ID","Kernel Name","sm__cycles_elapsed.max","sm__inst_executed.sum","dram__bytes_read.sum","dram__bytes_write.sum"
"","","cycle","inst","byte","byte"
"0","backward_kernel","15,351,588","2,044,054,940","1522698240","1,010,499,584"
"1","backward_kernel","7","8","9","10"
==PROF== Disconnected
'''


def test_slices_are_named_in_words(capsys):
    assert slices.slices_of("fwd:128:8192,bwd:64:32768:full+causal") == [
        ["paper", "--op", "fwd", "--head-dim", "128", "--seqlen", "8192"],
        ["paper", "--op", "bwd", "--head-dim", "64", "--seqlen", "32768", "--masks", "full,causal"]]
    with pytest.raises(SystemExit):
        slices.parse_arguments(["--slices", "fwd:128"])
    assert "'fwd:128' is not op:head_dim:seqlen" in capsys.readouterr().err


@pytest.mark.parametrize("inside, beyond, passed", [(0.01, 0.29, True), (0.01, 0.31, False), (0.31, -0.2, False)])
def test_first_output_is_judged_by_whole_processes_and_inside(inside, beyond, passed):
    rounds = [{0: (5.0 + n, 0.0), 64: (5.0 + n + beyond, inside)} for n in range(3)]
    figures = first.figures_of(64, rounds)
    assert figures["passed"] is passed and figures["seconds"] == inside and figures["process_difference"] == pytest.approx(beyond)


def test_what_nsight_compute_counted_is_read():
    assert cycles.counted(NCU_CSV) == [
        {"cycles": 15351588, "instructions": 2044054940, "dram_read": 1522698240, "dram_written": 1010499584},
        {"cycles": 7, "instructions": 8, "dram_read": 9, "dram_written": 10}]
    assert cycles.counted("==ERROR== ERR_NVGPUCTRPERM") == []
