# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu-check all without a GPU: what a device is asked for, and what the last receipt has."""

import json

import pytest

from tools.gpu import run_all

A100 = run_all.Device("NVIDIA A100-SXM4-80GB", (8, 0), 79.3)
RTX = run_all.Device("NVIDIA GeForce RTX 3060", (8, 6), 11.8)


def test_a_device_is_asked_for_what_fits_it():
    steps = run_all.steps_of(A100, ["sm80", "sm86"])
    assert [s.label for s in steps[:3]] == ["sm80 tests", "sm86 tests", "sm80 cells fwd-d64-dv64-8k-sm80"]
    assert {s.kernels for s in steps[2:]} == {"sm80"}  # the small tiles are a contender there
    assert len([s for s in steps if "cells" in s.name]) == 24 and steps[-1].name == "maskcost"
    small = run_all.steps_of(RTX, ["sm86"])
    assert {s.kernels for s in small} == {"sm86"} and not [s for s in small if "32k" in s.name]
    assert "maskcost" not in {s.name for s in small} and A100.folder == "nvidia-a100-sxm4-80gb"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")  # the progress needs it
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(run_all.kernels, "sets_on", lambda library, capability: ["sm80", "sm86"])
    monkeypatch.setattr(run_all.kernels_used, "library_path", lambda: "ours.so")

    def run(*words):
        status = run_all.main(["--dry-run", "--only", "cells fwd-d96-dv96-8k", *words], A100)
        return status, json.loads((tmp_path / "all.json").read_text()), capsys.readouterr().out

    return run


def test_the_last_receipt_names_device_and_steps_and_a_second_run_goes_on(run, tmp_path):
    status, made, out = run()
    (step,) = made["figures"]["steps"]
    assert (status, made["device"], made["complete"]) == (0, A100.name, True)
    assert made["figures"]["capability"] == "8.0" and made["tests"] == {"passed": 2, "failed": 0}
    assert step["command"].startswith(
        "FLASHMASK_KERNELS=sm80 python -m benchmarks.measure.gpu.bench paper --op fwd --head-dim 96"
    )
    assert {c["arch"] for c in json.loads((tmp_path / step["receipt"]).read_text())["cases"]} == {"sm80"}
    assert step["state"] == "passed" and "== 1 of 1: sm80 cells fwd-d96-dv96-8k-sm80" in out and "PASS" in out
    _, again, out = run()
    assert "passed before" in out and again["figures"]["steps"] == made["figures"]["steps"]
    assert "passed before" not in run("--again")[2]


def test_a_missed_bar_is_no_failure_and_a_lost_receipt_is(tmp_path):
    step = run_all.Step("sm80", "cells", [], 1, "fwd")
    missed = {"name": "n", "passed": False}
    made = {"complete": True, "tests": {"passed": 1, "failed": 0}, "figures": {"checks": [missed]}}
    (tmp_path / "fwd.json").write_text(json.dumps(made))
    found = run_all.outcome(step, 1, tmp_path, 0)
    assert found["state"] == run_all.MISSED and found["missed"] == [missed]
    assert run_all.outcome(step, 1, tmp_path, 1e12)["state"] == run_all.FAILED  # left by an earlier run
    assert run_all.outcome(step._replace(name="tests"), 1, tmp_path, 0)["state"] == run_all.FAILED


def test_sets_that_a_device_does_not_take_are_refused(run):
    with pytest.raises(SystemExit, match="--kernels has sm90; NVIDIA A100-SXM4-80GB takes sm80, sm86"):
        run("--kernels", "sm90")
