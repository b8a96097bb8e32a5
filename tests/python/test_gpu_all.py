# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu-check all and the model of sm80's time, without a GPU: what a device is asked for, what the last receipt
has, and what the model makes of receipts."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "python"), str(Path(__file__).resolve().parent)]
import gpu_all  # noqa: E402
import invented  # noqa: E402
import sm80_model  # noqa: E402

A100 = gpu_all.Device("NVIDIA A100-SXM4-80GB", (8, 0), 79.3)
RTX = gpu_all.Device("NVIDIA GeForce RTX 3060", (8, 6), 11.8)


def test_a_device_is_asked_for_what_fits_it():
    steps = gpu_all.steps_of(A100, ["sm80", "sm86"])
    assert [s.label for s in steps[:3]] == ["sm80 tests", "sm86 tests", "sm80 cells fwd-d64-dv64-8k-sm80"]
    assert {s.kernels for s in steps[2:]} == {"sm80"}  # the small tiles are a contender there
    assert len([s for s in steps if "cells" in s.name]) == 24 and steps[-1].name == "maskcost"
    small = gpu_all.steps_of(RTX, ["sm86"])
    assert {s.kernels for s in small} == {"sm86"} and not [s for s in small if "32k" in s.name]
    assert "maskcost" not in {s.name for s in small} and A100.folder == "nvidia-a100-sxm4-80gb"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")  # for the progress
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu_all.kernels, "sets_on", lambda library, capability: ["sm80", "sm86"])
    monkeypatch.setattr(gpu_all.ran, "library_path", lambda: "ours.so")

    def run(*words):
        status = gpu_all.main(["--dry-run", "--only", "cells fwd-d96-dv96-8k", *words], A100)
        return status, json.loads((tmp_path / "all.json").read_text()), capsys.readouterr().out

    return run


def test_the_last_receipt_names_device_and_steps_and_a_second_run_goes_on(run, tmp_path):
    status, made, out = run()
    (step,) = made["figures"]["steps"]
    assert (status, made["device"], made["complete"]) == (0, A100.name, True)
    assert made["figures"]["capability"] == "8.0" and made["tests"] == {"passed": 2, "failed": 0}
    assert step["command"].startswith("FLASHMASK_KERNELS=sm80 benchmarks/gpu/bench.py paper --op fwd --head-dim 96")
    assert {c["arch"] for c in json.loads((tmp_path / step["receipt"]).read_text())["cases"]} == {"sm80"}
    assert step["state"] == "passed" and "== 1 of 1: sm80 cells fwd-d96-dv96-8k-sm80" in out and "PASS" in out
    _, again, out = run()
    assert "passed before" in out and again["figures"]["steps"] == made["figures"]["steps"]
    assert "passed before" not in run("--again")[2]


def test_a_missed_bar_is_no_failure_and_a_lost_receipt_is(tmp_path):
    step = gpu_all.Step("sm80", "cells", [], 1, "fwd")
    missed = {"name": "n", "passed": False}
    made = {"complete": True, "tests": {"passed": 1, "failed": 0}, "figures": {"checks": [missed]}}
    (tmp_path / "fwd.json").write_text(json.dumps(made))
    found = gpu_all.outcome(step, 1, tmp_path, 0)
    assert found["state"] == gpu_all.MISSED and found["missed"] == [missed]
    assert gpu_all.outcome(step, 1, tmp_path, 1e12)["state"] == gpu_all.FAILED  # of an earlier run
    assert gpu_all.outcome(step._replace(name="tests"), 1, tmp_path, 0)["state"] == gpu_all.FAILED


def test_a_receipt_without_cells_does_not_hide_the_summary(tmp_path):
    invented.put(tmp_path, invented.receipt("fwd-d64-dv64-8k-sm80"))
    assert gpu_all.model_lines(tmp_path)[0].startswith("not compared with the model: ")


def test_sets_that_a_device_does_not_take_are_refused(run):
    with pytest.raises(SystemExit, match="--kernels has sm90; NVIDIA A100-SXM4-80GB takes sm80, sm86"):
        run("--kernels", "sm90")


# --- The model -------------------------------------------------------------------------------------------


def test_the_model_reads_every_tile_and_stays_below_the_peak():
    for device in sm80_model.DEVICES.values():
        peak = device.multiprocessors * device.ghz * device.mma_flop / 1e3
        for kind, op in (("ForwardTile", "fwd"), ("BackwardTile", "bwd")):
            for dim, dim_v, kilobytes, *_ in sm80_model.rows_of(kind):
                tile = sm80_model.tile_of(device, op, dim, dim_v, kilobytes)
                assert tile[:2] == (dim, dim_v) and tile[2] <= kilobytes
                assert op == "fwd" or tile[2] == kilobytes
                case = sm80_model.full_case(op, dim, dim_v)
                rate = sm80_model.flop(case) / sm80_model.milliseconds(device, case, "sm86") / 1e9
                assert 0.2 * peak < rate < peak
    assert len(sm80_model.rows_of("BackwardTile")) == 12 and len(sm80_model.rows_of("ForwardTile")) >= 8


def test_the_model_is_held_to_receipts(tmp_path):
    assert "unchecked" in sm80_model.compared(tmp_path)[0] and "few" in sm80_model.refitted(tmp_path)[0]
    file = invented.library_file(tmp_path / "library")
    made = invented.mma_sync_slice(file, masks=["full", "document"], device="NVIDIA A100-SXM4-80GB")
    case = made["cases"][0]
    for off, word in ((1.05, "PASS"), (1.2, "FAIL")):
        case["ours_ms"] = sm80_model.milliseconds(sm80_model.DEVICES["A100"], case, "sm80") / off
        case["peers"]["sm86"]["ms"] = sm80_model.milliseconds(sm80_model.DEVICES["A100"], case, "sm86") / off
        *lines, last = sm80_model.compared(invented.put(tmp_path / "r", made))
        assert [line.split()[0] for line in lines] == ["sm80", "sm86"]
        assert all(line.endswith(f"{off:.3f}") for line in lines)
        assert last.startswith(f"{word}  model: error of every cell: {off - 1:.3f} (bar at most 0.10)")
    assert sm80_model.device_of("NVIDIA A10") is sm80_model.DEVICES["A10"]


def test_a_multiprocessor_holds_as_many_forward_tiles_as_fit():
    def held(name, dim, kilobytes=99):
        device = sm80_model.DEVICES[name]
        return sm80_model.ctas(device, sm80_model.tile_of(device, "fwd", dim, dim, kilobytes))

    assert [held(name, 128) for name in ("H100", "A100", "L4")] == [2, 2, 2]
    assert [held(name, 64) for name in ("H100", "A100", "L4")] == [2, 2, 1]  # by shared memory, as the next
    assert [held(name, 256) for name in ("H100", "A100", "L4")] == [2, 1, 1]
    assert [held(name, 192, 163) for name in ("H100", "A100")] == [2, 2]
    # On an A100 one of eight warps, as two of four do not fit.
    assert [held(name, 256, 163) for name in ("H100", "A100")] == [2, 1]


def test_refitting_finds_the_constants_that_made_the_times():
    made = sm80_model.Fitted(unhidden=0.4, barrier=200, dq=0.05, query_tile=9000)
    cells = []
    for op in ("fwd", "bwd"):
        for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
            case, device = sm80_model.full_case(op, *dims), sm80_model.DEVICES["H100"]
            cells.append(sm80_model.Cell(device, case, "sm80", sm80_model.milliseconds(device, case, "sm80", made)))
    assert sm80_model.refit(cells) == pytest.approx(made)
    assert {round(cell.error(made), 9) for cell in cells} == {1}
