# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_tests.py: which steps run beside each other, and that nothing of what they find is lost."""

import argparse
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import gpu_tests  # noqa: E402

RUNS = {"programs": "run_programs", "verify": "run_verify", "pytest": "run_pytest", "torch": "run_torch", "stress": "run_stress",
        "sanitize": "run_sanitizers", "overhead": "run_overhead"}


@pytest.fixture
def session():
    return gpu_tests.Session({"figures": {}, "tests": {"passed": 0, "failed": 0}}, 60)


def run(session, only=None, sanitize=True):
    arguments = argparse.Namespace(only=only, sanitize=sanitize, cases=0, covering=False, pytest_words=[], stress_library=None, stress_links=None,
                                   sanitize_seconds=1)
    gpu_tests.run_steps(session, arguments, Path("carry"))


def replace_steps(monkeypatch, events, torch):
    """Every step says when it begins; that of the PyTorch package's tests runs `torch` and says when it ends."""
    for name, function in RUNS.items():
        monkeypatch.setattr(gpu_tests, function, lambda *_, name=name, **__: events.append(name))
    monkeypatch.setattr(gpu_tests, "run_cases", lambda _, __, direction: events.append(direction))

    def run_torch(*_):
        torch()
        events.append("torch ended")

    monkeypatch.setattr(gpu_tests, "run_torch", run_torch)


def test_the_package_s_tests_run_beside_the_steps_before_the_host_s_time(monkeypatch, session):
    events, sanitized = [], threading.Event()
    replace_steps(monkeypatch, events, lambda: sanitized.wait(10))
    monkeypatch.setattr(gpu_tests, "run_sanitizers", lambda *_: (events.append("sanitize"), sanitized.set()))
    run(session)
    assert events == ["programs", "forward", "backward", "verify", "pytest", "stress", "sanitize", "torch ended", "overhead"]


def test_a_step_that_breaks_beside_the_others_is_not_lost(monkeypatch, session):
    def broken():
        raise RuntimeError("broken")

    replace_steps(monkeypatch, [], broken)
    with pytest.raises(RuntimeError, match="broken"):
        run(session)


def test_only_some_steps(monkeypatch, session):
    events = []
    replace_steps(monkeypatch, events, lambda: None)
    run(session, only=["torch", "sanitize"], sanitize=False)
    assert events == ["torch ended"]


class SlowCounts(dict):
    """Lets other threads run between a count's reading and its writing."""

    def __getitem__(self, key):
        value = super().__getitem__(key)
        time.sleep(0.001)
        return value


def test_counts_of_threads_add_up(session):
    session.receipt["tests"] = SlowCounts(session.receipt["tests"])
    result = {"name": "a", "command": "b", "seconds": 1, "output": "", "status": 0}
    threads = [threading.Thread(target=lambda: [session.add(result, 2, 1) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.receipt["tests"] == {"passed": 40, "failed": 20} and len(session.figures["parts"]) == 20


def test_what_is_missing_is_named(session, monkeypatch, tmp_path):
    for variable in gpu_tests.TORCH_LIBRARIES:
        monkeypatch.delenv(variable, raising=False)
    gpu_tests.run_torch(session, tmp_path, [])
    gpu_tests.run_overhead(session, tmp_path)
    assert session.figures["left_out"] == ["torch: there is no libflashmask_torch.so (FLASHMASK_TORCH_LIBRARY names one)",
                                           "torch: overhead: there is no libflashmask_torch.so (FLASHMASK_TORCH_LIBRARY names one)"]
