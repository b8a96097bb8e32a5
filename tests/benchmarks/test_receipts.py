# SPDX-License-Identifier: Apache-2.0
"""Receipts of GPU runs: what is committed, how they are written, merged and judged, and the bars; no GPU needed.

Figures here are invented and stay in temporary folders. The library they are judged by is a JSON file
(fake_kernels.py).
"""

import json
import multiprocessing
import os
import warnings
from types import SimpleNamespace

import fake_kernels
import invented
import pytest

from benchmarks import cell_bars, receipts
from benchmarks.masks import paper_masks
from benchmarks.report import replan, unreceipted_peers

COMMITTED = receipts.load_folder()
FWD, BWD = "sm90.fwd.bf16.d128.dv128.c3", "sm90.bwd.bf16.d128.dv128.c2"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A made-up library; kernels.py answers for it."""
    fake_kernels.put_in_place(monkeypatch)
    return invented.library_file(tmp_path)


# --- What is committed -------------------------------------------------------------------------------


def test_committed_receipts_are_there_and_well_formed():
    """Loading has refused what is not; here it is what they are of."""
    cells = [receipts.identity(case) for receipt in COMMITTED.values() for case in receipt["cases"]]
    assert len(cells) == len(set(cells))
    assert {(op, d, s) for op, _, d, _, s, *_ in cells} >= {("fwd", 128, 8192), ("bwd", 128, 8192)}
    assert not [path.name for path in receipts.RESULTS.iterdir() if path.suffix not in (".json", "")]


def tested_library():
    """The library that ctest names; without CUDA kernels there is nothing to judge by."""
    path = os.environ.get("FLASHMASK_LIBRARY")
    if not path:
        pytest.skip("FLASHMASK_LIBRARY is not set")
    try:
        return receipts.library_of(path)
    except ValueError as error:
        pytest.skip(str(error))


def test_committed_receipts_that_are_stale_are_named():
    """A stale cell does not fail: it says nothing of the library, and the report leaves it out."""
    judged = receipts.judge(COMMITTED, tested_library())
    for file, case, state in judged:
        if state != receipts.FRESH:
            warnings.warn(f"{file}{': ' + receipts.label_of(case) if case else ''} is {state}", stacklevel=1)
    assert len(judged) == sum(max(1, len(receipt["cases"])) for receipt in COMMITTED.values())


def test_figures_without_receipts_name_their_source():
    held = json.loads(unreceipted_peers.FILE.read_text())
    assert "9985af5" in held["source"] and "H200" in held["source"] and "side by side" in held["what"]
    assert held["kernel_hashes"]


def test_committed_cells_have_v3_measured_or_recorded():
    cases = [case for receipt in COMMITTED.values() for case in receipt["cases"]]
    found = [c["peers"].get("flashmask_v3") for c in cases if c["arch"] == "sm90" and c["head_dim"] in (128, 64)]
    assert found and all(v3 and 0.9 < v3["ratio"] < 2 for v3 in found)


# --- Well-formed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda r: r.pop("toolkit"), "toolkit"),
        (lambda r: r.update(schema=1), "schema is 1, not 2"),
        (lambda r: r.update(kind="cpu"), "kind"),
        (lambda r: r.update(dry_run=True), "dry run"),
        (lambda r: r.update(multiprocessors=None), "multiprocessors is None"),
        (lambda r: r.update(tests={"passed": 1}), "tests"),
        (lambda r: r.update(cases={}), "cases is not a list"),
        (lambda r: r.update(cases=[]), "kernel_hashes names no kernels"),
        (lambda r: r["cases"][1].pop("mask"), "case 1: mask is None"),
        (lambda r: r["cases"][1].pop("arch"), "case 1: arch is None"),
        (lambda r: r["cases"][1].update(ours_ms=0), "ours_ms is 0"),
        (lambda r: r["cases"][1].update(plan_ms=float("nan")), "plan_ms is nan"),
        (lambda r: r["cases"][1].update(live=1.5), "live is 1.5"),
        (lambda r: r["cases"][1].update(op="both"), "op is 'both'"),
        (lambda r: r["cases"][1].update(kernel_hashes={}), "case 1: kernel_hashes names no kernels"),
        (lambda r: r["cases"][1].update(kernel_hashes={"a": 1}), "case 1: kernel_hashes names no kernels"),
        (lambda r: r["cases"][1].update(run={"date": "x"}), "case 1: run: device is missing"),
        (lambda r: r["cases"][1]["peers"].update(flex={}), "peer flex has no ms"),
        (lambda r: r["cases"][1]["peers"]["flex"].update(recorded=3), "peer flex: recorded and device are not"),
        (lambda r: r["cases"][1].update(mask="full"), "a cell is there twice"),
        (lambda r: r["cases"][1].update(seqlen=32768), "a case belongs to fwd-d128-dv128-32k"),
    ],
)
def test_malformed_receipts_are_refused(file, tmp_path, change, words):
    made = invented.slice_of(file)
    assert receipts.problems(made) == []
    change(made)
    with pytest.raises(ValueError, match=words):
        receipts.load_folder(invented.put(tmp_path / "bad", made))


def test_a_file_has_the_name_of_what_is_in_it(file, tmp_path):
    folder = invented.put(tmp_path / "r", invented.slice_of(file))
    (folder / "fwd-d128-dv128-8k.json").rename(folder / "2026-01-02-rest.json")
    with pytest.raises(ValueError, match="is fwd-d128-dv128-8k.json"):
        receipts.load_folder(folder)


# --- Judged ------------------------------------------------------------------------------------------


def states_of(made, library, **changes):
    """{(op, head_dim, mask) or topic: state} of receipts in the library with other fields."""
    held = json.loads(library.read_text())
    library.write_text(json.dumps({**held, **changes, "kernels": {**held["kernels"], **changes.get("kernels", {})}}))
    judged = receipts.judge({f"{r['what']}.json": r for r in made}, receipts.library_of(library))
    return {
        (case["op"], case["head_dim"], case["mask"]) if case else name.removesuffix(".json"): state
        for name, case, state in judged
    }


@pytest.fixture
def made(file):
    """A few cells and two topics."""
    cells = [
        invented.slice_of(file, op, head_dim, masks=["full", "causal"])
        for op in ("fwd", "bwd")
        for head_dim in (128, 64)
    ]
    return [
        *cells,
        invented.topic(file, "plan", fake_kernels.PLAN),
        invented.topic(file, "maskcost", [FWD, *fake_kernels.PLAN]),
    ]


def test_receipts_of_the_same_kernels_are_fresh(file, made):
    found = states_of(made, file)
    assert len(found) == 10 and set(found.values()) == {"fresh"}


@pytest.mark.parametrize(
    "kernel, stale",
    [
        (FWD, {("fwd", 128, "full"), ("fwd", 128, "causal"), "maskcost"}),
        ("sm90.bwd.bf16.d64.dv64.c2.convert_dq", {("bwd", 64, "full"), ("bwd", 64, "causal")}),
        ("sm90.bwd.bf16.d128.dv128.c2.split", set()),  # no cell runs it
        ("sm90.bwd.bf16.d128.dv128.c2.reduce_dkv", set()),  # nor this, without grouped heads
    ],
)
def test_a_changed_kernel_makes_exactly_its_cells_stale(file, made, kernel, stale):
    found = states_of(made, file, kernels={kernel: "new"})
    assert {key for key, state in found.items() if state == f"stale: {kernel}"} == stale
    assert {state for key, state in found.items() if key not in stale} == {"fresh"}


def test_the_plans_kernels_are_every_cells(file, made):
    assert set(states_of(made, file, kernels={"sm90.plan.rank": "new"}).values()) == {"stale: sm90.plan.rank"}


def test_a_cell_for_which_other_kernels_would_run_is_stale(file, made):
    """The library splits its backward now: but for the deterministic mode, which the cells ran too."""
    found = states_of(made, file, split=True)
    assert found["bwd", 128, "full"] == f"stale: {BWD}.split" and found["fwd", 128, "full"] == found["plan"] == "fresh"
    for receipt in made:
        for case in receipt["cases"]:
            case["peers"].pop("deterministic", None)
    assert states_of(made, file, split=True)["bwd", 128, "full"] == f"stale: {BWD}, {BWD}.split"


def test_a_stale_cell_names_a_few_kernels():
    library = SimpleNamespace(toolkit="13.0", hashes={})
    assert receipts.state_of(dict.fromkeys("fedcba", "old"), "13.0", library) == "stale: a, b, c, d and 2 more"
    assert receipts.state_of(dict.fromkeys("dcba", "old"), "13.0", library) == "stale: a, b, c, d"


def test_a_new_instance_in_the_library_leaves_everything_fresh(file, made):
    assert set(states_of(made, file, kernels={"sm90.fwd.bf16.d256.dv256.c2": "new"}).values()) == {"fresh"}


def test_a_kernel_that_is_gone_makes_its_cells_stale(file, made):
    held = json.loads(file.read_text())
    del held["kernels"][FWD]
    file.write_text(json.dumps(held))
    found = states_of(made, file)
    assert found["fwd", 128, "full"] == found["maskcost"] == f"stale: {FWD}" and found["fwd", 64, "full"] == "fresh"


def test_another_toolkits_hashes_are_not_compared(file, made):
    made[0]["cases"][1]["run"] = {**receipts.run_of(made[0], made[0]["cases"][1]), "toolkit": "Build cuda_13.1"}
    found = states_of(made, file, toolkit="Build cuda_13.1", kernels={"sm90.plan.rank": "new"})
    assert found["fwd", 128, "full"] == found["plan"] == "other toolkit"
    assert found["fwd", 128, "causal"] == "stale: sm90.plan.rank"


def test_a_cell_that_the_library_refuses_is_stale(file, made):
    found = states_of(made, file, refused=[64])
    assert found["bwd", 64, "full"] == "stale: head dim 64 is not run"
    assert found["bwd", 128, "full"] == found["fwd", 64, "full"] == "fresh"


def test_a_library_without_cuda_kernels_judges_nothing(file):
    file.write_text(json.dumps({"toolkit": "", "kernels": {}}))
    with pytest.raises(ValueError, match="holds no GPU kernels"):
        receipts.library_of(file)
    assert receipts.library_of() is None


# --- Written -----------------------------------------------------------------------------------------


def test_a_run_replaces_its_cells_and_keeps_the_others(file, tmp_path):
    first = invented.slice_of(file, masks=["full", "causal", "document"], date="2026-01-01", command="first")
    grouped = invented.case(file, "causal", heads_kv=8)
    cases = [invented.case(file, "causal", flex=2.0), grouped, invented.case(file, "qk_sparse")]
    second = invented.receipt(first["what"], cases, command="second")
    path = receipts.path_of(first, tmp_path / "r")
    assert path.name == "fwd-d128-dv128-8k.json" == f"{receipts.stem_of(grouped)}.json"
    for run in (first, second, second):
        receipts.write(run, path)
    found = receipts.load(path)
    cells = [(c["mask"], c["heads_kv"], receipts.run_of(found, c)["command"], "run" in c) for c in found["cases"]]
    assert cells == [
        ("full", 32, "first", True),
        ("causal", 32, "second", False),
        ("document", 32, "first", True),
        ("causal", 8, "second", False),
        ("qk_sparse", 32, "second", False),
    ]
    assert found["cases"][0]["run"]["date"] == "2026-01-01" and found["command"] == "second"
    assert found["cases"][1]["peers"]["flex"]["ratio"] == pytest.approx(2.0)
    receipts.write({**second, "cases": []}, path)  # a run that failed before its first cell
    assert len(receipts.load(path)["cases"]) == 5 and list(path.parent.iterdir()) == [path]


def test_a_peer_that_is_left_out_keeps_its_last_ratio(file, tmp_path):
    """With the date and device of its last run, also over more than one run without it; modes of ours do not."""
    path = tmp_path / "fwd-d128-dv128-8k.json"
    contenders = {"flex": 2.0, "deterministic": 1.1, "dense": 3.0, "sm86": 1.2}
    for date, found in (("2026-01-01", contenders), ("2026-02-01", {"cudnn": 1.5}), ("2026-03-01", {"cudnn": 1.6})):
        case = invented.case(file, "causal", **found)
        case["ours_ms"] *= 2
        receipts.write(invented.receipt("fwd-d128-dv128-8k", [case], date=date), path)
    (kept,) = receipts.load(path)["cases"]
    flex, device = kept["peers"].pop("flex"), {"device": "H200"}
    assert flex == {
        "ms": pytest.approx(2.0 * kept["ours_ms"]),
        "ratio": pytest.approx(2.0),
        **device,
        "recorded": "2026-01-01",
    }
    assert set(kept["peers"]) == {"cudnn"} and "recorded" not in kept["peers"]["cudnn"]
    receipts.write(invented.receipt("fwd-d128-dv128-8k", [invented.case(file, "causal", flex=1.9)]), path)
    assert "recorded" not in receipts.load(path)["cases"][0]["peers"]["flex"]


def test_a_dry_run_is_not_mixed_with_measured_cells(file, tmp_path):
    path = receipts.path_of(invented.slice_of(file), tmp_path / "r")
    receipts.write(invented.slice_of(file), path)
    with pytest.raises(ValueError, match="cannot be added"):
        receipts.write({**invented.slice_of(file), "dry_run": True}, path)


def test_a_topic_is_replaced(file, tmp_path):
    path = receipts.path_of({"what": "plan"}, tmp_path)
    for number in (1, 2):
        receipts.write(invented.topic(file, "plan", fake_kernels.PLAN, plan=number), path)
    assert receipts.load(path)["figures"] == {"plan": 2}


def write_many(receipt, path, masks):
    for mask in masks:
        receipts.write({**receipt, "cases": [c for c in receipt["cases"] if c["mask"] == mask]}, path)


def test_processes_that_write_at_once_lose_nothing(file, tmp_path):
    made, path = invented.slice_of(file), tmp_path / "fwd-d128-dv128-8k.json"
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=write_many, args=(made, path, paper_masks.NAMES[n::3])) for n in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert sorted(c["mask"] for c in receipts.load(path)["cases"]) == sorted(paper_masks.NAMES)


def test_a_new_receipt_has_what_its_file_needs(monkeypatch, tmp_path):
    environment = {"device": "H200", "driver": "1", "toolkit": "Build cuda_13.0", "torch": "2.11"}
    made = receipts.new("plan", environment, "bench.py plan")
    assert receipts.problems(made) == ["kernel_hashes names no kernels with their hashes"]
    assert made["multiprocessors"] == 132
    assert receipts.new("plan", {**environment, "multiprocessors": 114}, "")["multiprocessors"] == 114
    monkeypatch.setenv("OUT", str(tmp_path))
    assert receipts.path_of(made) == tmp_path / "plan.json"


# --- A planner that has changed alone ----------------------------------------------------------------


def planned(library, date="2026-01-02"):
    """plan.json: 3 us everywhere."""
    plans = [
        {"mask": mask, "seqlen": 8192, "batch": n, "graph_us": 3.0 * n, "graph_us_spread": [2.5, 3.5]}
        for mask in ("full", "causal")
        for n in (1, 16)
    ]
    return {**invented.topic(library, "plan", fake_kernels.PLAN, plan=plans), "date": date}


def test_only_the_plan_of_a_cell_is_measured_anew(file, tmp_path, capsys):
    before = invented.slice_of(file, masks=["full", "causal", "document"])
    held = json.loads(file.read_text())
    file.write_text(json.dumps({**held, "kernels": {**held["kernels"], "sm90.plan.rank": "new"}}))
    folder = invented.put(tmp_path / "r", before, planned(file, date="2026-02-03"))
    assert replan.main(["--results", str(folder)]) == 0
    assert "fwd-d128-dv128-8k.json: 2 plans" in capsys.readouterr().out
    after = receipts.load(folder / "fwd-d128-dv128-8k.json")
    states = [state for *_, state in receipts.judge({"r": after}, receipts.library_of(file))]
    assert states == ["fresh", "fresh", "stale: sm90.plan.rank"]  # no plan of the document was measured
    for old, new in zip(before["cases"], after["cases"][:2]):
        assert new["plan_ms"] == 0.003 and new["plan_ms_spread"] == [0.0025, 0.0035]
        assert new["plan_run"]["date"] == "2026-02-03" and receipts.run_of(after, new)["date"] == "2026-01-02"
        assert new["ours_ms"] == old["ours_ms"] and new["peers"] == old["peers"]
    assert replan.main(["--results", str(folder)]) == 0
    assert "every cell has the plan" in capsys.readouterr().out


def test_attention_of_a_replanned_cell_is_judged_by_its_own_run(file):
    made = invented.slice_of(file, masks=["full"])
    case = made["cases"][0]
    case["plan_run"] = {**receipts.run_of(made, case), "toolkit": "Build cuda_13.1"}
    assert states_of([made], file)["fwd", 128, "full"] == "other toolkit"
    assert states_of([made], file, kernels={FWD: "new"})["fwd", 128, "full"] == f"stale: {FWD}"
    del case["plan_run"]["date"]
    assert receipts.problems(made) == ["case 0: plan_run: date is missing or not a text"]


def test_without_a_measured_plan_nothing_is_replanned(file, tmp_path):
    with pytest.raises(SystemExit, match="has no plan.json"):
        replan.main(["--results", str(invented.put(tmp_path / "r", invented.slice_of(file)))])


# --- The bars ----------------------------------------------------------------------------------------


def with_v3(receipt, ratio, cudnn):
    """Every cell with FlashMask V3 beside it, at this ratio, and cuDNN at that."""
    for case in receipt["cases"]:
        with_plan = 1 + case["plan_ms"] / case["ours_ms"]
        case["peers"]["flashmask_v3"] = {"ms": 1.0, "ratio": ratio * with_plan}
        if "cudnn" in case["peers"]:
            case["peers"]["cudnn"]["ratio"] = cudnn * with_plan
    return cell_bars.checks(cell_bars.rows_of(receipt["cases"]))


@pytest.mark.parametrize(
    "v3, cudnn, passed", [(1.2, 1.06, [1, 1, 1, 1]), (1.1, 1.06, [1, 0, 1, 1]), (0.99, 1.04, [0, 0, 0, 0])]
)
def test_bars(file, v3, cudnn, passed):
    made = invented.slice_of(file)
    found = with_v3(made, v3, cudnn)
    assert [c["passed"] for c in found] == list(map(bool, passed))
    assert [c["bar"] for c in found] == [1.0, 1.15, 1.05, 1.05]
    assert found[0]["got"] == pytest.approx(v3) and found[1]["got"] == pytest.approx(v3)
    assert [line[:4] for line in cell_bars.check_lines(found)] == [("FAIL", "PASS")[p] for p in passed]
    grouped = invented.case(file, "causal", heads_kv=8, flashmask_v3=0.1, cudnn=0.1)  # grouped heads have no bars
    assert cell_bars.checks(cell_bars.rows_of([*made["cases"], grouped])) == found


def test_bars_of_hoppers_deterministic_backward_and_of_256_over_fa3(file):
    """Median, each cell, each cell with grouped heads; full and causal alone beside FlashAttention-3."""
    ratios = zip(("full", "causal", "document"), (1.05, 1.06, 1.2))
    cases = [invented.case(file, mask, "bwd", deterministic=ratio, fa3=1.0) for mask, ratio in ratios]
    grouped = invented.case(file, "full", "bwd", heads_kv=8, deterministic=1.13, fa3=0.5)
    cases, grouped = [{**case, "head_dim": 256} for case in cases], {**grouped, "head_dim": 256}
    found = cell_bars.checks(cell_bars.rows_of([*cases, grouped], "bwd"), "bwd")
    assert [(c["name"].split(": ")[1], c["bar"], c["passed"]) for c in found] == [
        ("over FA3", 1.0, False),  # the plan counts as ours
        ("over FA3", 1.0, False),
        ("deterministic, median", 1.07, True),
        ("deterministic, every cell", 1.18, False),
        ("deterministic, every cell", 1.12, False),
    ]
    assert [c["got"] for c in found[2:]] == [1.06, 1.2, 1.13]
    assert cell_bars.checks(cell_bars.rows_of([*cases, grouped], "fwd")) == []


BARS_OF_MMA_SYNC = [1.2, 0.75, 3.0]  # the visible share, FlexAttention, SDPA
BARS_OVER_FA2 = {"fwd": [0.88, 0.96], "bwd": [0.88, 0.97]}


@pytest.mark.parametrize(
    "op, peers, missed",
    [
        ("fwd", {}, []),
        ("bwd", {}, []),
        ("fwd", {"fa2": 0.95}, [0.96]),
        ("bwd", {"fa2": 0.965}, [0.97]),
        ("fwd", {"fa2": 0.87}, [0.88, 0.96]),
        ("fwd", {"flex": 0.7, "sdpa": 2.9}, [0.75, 3.0]),
        ("bwd", {"sm86": 1.2, "deterministic": 1.08}, [1.07]),
        ("bwd", {"deterministic": 1.19}, [1.07, 1.18]),
    ],
)
def test_bars_of_the_kernels_of_mma_sync(file, op, peers, missed):
    made = invented.mma_sync_slice(
        file, op, **{n: r * 1.01 if r < 1 or n in ("fa2", "sdpa") else r for n, r in peers.items()}
    )
    found = cell_bars.checks(cell_bars.rows_of(made["cases"], op), op)
    assert [c["bar"] for c in found] == BARS_OVER_FA2[op] + BARS_OF_MMA_SYNC + [1.07, 1.18] * (op == "bwd")
    assert [c["bar"] for c in found if not c["passed"]] == missed
    assert all(c["name"].startswith("sm80: ") for c in found)
    assert cell_bars.fa2_checks([{**r, "head_dim": 256} for r in cell_bars.rows_of(made["cases"], op)], "") == []
    hopper = invented.slice_of(file, op)["cases"]
    both = cell_bars.checks(cell_bars.rows_of([*hopper, *made["cases"]], op), op)
    assert both == cell_bars.checks(cell_bars.rows_of(hopper, op), op) + found


def test_a_mask_may_take_its_visible_share_and_a_fifth(file):
    made = invented.mma_sync_slice(file, masks=["full", "document", "qk_sparse"])
    slow, thin = made["cases"][1:]
    slow["ours_ms"] *= 1.3
    thin.update(live=0.05)  # too little to be judged
    (found,) = (c for c in cell_bars.checks(cell_bars.rows_of(made["cases"])) if c["bar"] == cell_bars.SHARE_BAR)
    assert not found["passed"] and found["got"] == pytest.approx(1.31 / 1.01)
    assert "worst d=128 S=8192 document, 1 cells" in found["detail"]
    assert "(bar at most 1.20)" in cell_bars.check_lines([found])[0]
    slow["ours_ms"] /= 1.3
    assert all(
        c["passed"] for c in cell_bars.checks(cell_bars.rows_of(made["cases"])) if c["bar"] == cell_bars.SHARE_BAR
    )
    assert cell_bars.table(cell_bars.rows_of(made["cases"]))[0].split()[-5:] == ["/Flex", "/FA2", "/SDPA", "99", "KiB"]


def test_a_recorded_ratio_counts_as_a_measured_one_and_has_a_date(file):
    own = invented.case(file, "causal", flashmask_v3=1.5)
    recorded = invented.recorded(invented.case(file, "causal"), flashmask_v3=1.2)
    assert cell_bars.row_of(own)["v3"] == pytest.approx(1.5 / 1.01)  # the plan counts as ours
    assert cell_bars.row_of(recorded)["v3"] == pytest.approx(1.2 / 1.01)
    found = cell_bars.recorded
    assert found([own], "flashmask_v3") == found([recorded], "flex") == ([], [])
    assert found([own, recorded], "flashmask_v3") == ([invented.RECORDED], ["H100"])


def test_a_missing_peer_is_a_dash(file):
    made = [invented.case(file, mask) for mask in paper_masks.NAMES]
    rows = cell_bars.rows_of(made)
    assert rows[0]["flex"] is None and rows[0]["v3"] is None and cell_bars.checks(rows) == []
    heads, line, *_ = cell_bars.table(rows)
    assert heads.split()[-3:] == ["/Flex", "/V3", "/cuDNN"] and line.split()[-3:] == ["-"] * 3


def test_totals_are_sums_of_times(file):
    forward, backward = (
        [invented.recorded(case, flashmask_v3=v3) for case in invented.slice_of(file, op, masks=masks)["cases"]]
        for op, v3, masks in (("fwd", 1.2, ["causal", "document"]), ("bwd", 1.1, ["causal", "document"]))
    )
    cases = cell_bars.with_totals(forward + backward[:1])
    assert len(cases) == 4 and cell_bars.with_totals(forward) == forward
    assert len(cell_bars.with_totals([*forward, invented.case(file, "causal", "bwd", heads_kv=8)])) == 3  # other heads
    total = cases[3]
    assert (total["op"], total["mask"]) == ("total", "causal")
    assert set(total["peers"]) == {"flex", "cudnn", "deterministic", "flashmask_v3"}
    ours = forward[0]["ours_ms"] + backward[0]["ours_ms"]
    assert total["ours_ms"] == pytest.approx(ours) and total["plan_ms"] == forward[0]["plan_ms"]
    assert total["ours_tflops"] == pytest.approx(forward[0]["ours_tflops"])  # invented as equal
    row = cell_bars.row_of(total)
    v3 = 1.2 * forward[0]["ours_ms"] + 1.1 * backward[0]["ours_ms"]
    assert row["v3"] == pytest.approx(v3 / (ours + forward[0]["plan_ms"])) and row["deterministic"] > 1
    assert [c["name"] for c in cell_bars.checks([row], "total")] == ["d=128 S=8192: geometric mean over V3"]
