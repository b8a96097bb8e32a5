# SPDX-License-Identifier: Apache-2.0
"""tools/gpu/run_tests.py: which steps run beside each other, and that nothing of what they find is lost."""

import argparse
import json
import threading
import time
from pathlib import Path

import pytest

from tools.gpu import run_tests

RUNS = {
    "programs": "run_programs",
    "refused": "run_refused",
    "verify": "run_verify",
    "pytest": "run_pytest_in_shares",
    "torch": "run_torch",
    "jax": "run_jax",
    "large": "run_large",
    "stress": "run_stress",
    "sanitize": "run_sanitizers",
    "caches": "run_caches",
    "overhead": "run_overhead",
    "jax_speed": "run_jax_speed",
}


@pytest.fixture
def session():
    return run_tests.Session({"figures": {}, "tests": {"passed": 0, "failed": 0}}, 60)


def run(session, only=None, sanitize=True):
    arguments = argparse.Namespace(
        only=only,
        sanitize=sanitize,
        cases=0,
        covering=False,
        pytest_words=[],
        stress_library=None,
        stress_links=None,
        sanitize_seconds=1,
    )
    run_tests.run_steps(session, arguments, Path("carry"))


def replace_steps(monkeypatch, events, torch):
    """Every step says when it begins; that of the PyTorch package's tests runs `torch` and says when it ends."""
    for name, function in RUNS.items():
        monkeypatch.setattr(run_tests, function, lambda *_, name=name, **__: events.append(name))
    monkeypatch.setattr(run_tests, "run_cases", lambda _, __, direction: events.append(direction))

    def run_torch(*_):
        torch()
        events.append("torch ended")

    monkeypatch.setattr(run_tests, "run_torch", run_torch)


def test_lanes_run_beside_each_other_and_the_host_s_time_is_taken_alone(monkeypatch, session):
    events, all_begun = [], threading.Barrier(len(run_tests.LANES), timeout=10)
    replace_steps(monkeypatch, events, all_begun.wait)

    def first_lane_step(name):
        def step(*_, **__):
            all_begun.wait()
            events.append(name)

        return step

    def first_cases(_, __, direction):
        if direction == "forward":
            all_begun.wait()
        events.append(direction)

    for name in ("jax", "stress", "verify"):
        monkeypatch.setattr(run_tests, RUNS[name], first_lane_step(name))
    monkeypatch.setattr(run_tests, "run_cases", first_cases)
    run(session, only=run_tests.STEPS)
    assert events[-4:] == ["large", "caches", "overhead", "jax_speed"] and "torch ended" in events
    for lane in (["stress", "sanitize"], ["forward", "backward", "refused", "programs"], ["verify", "pytest"]):
        assert [name for name in events if name in lane] == lane


def test_programs_that_no_cpu_runs_are_first(tmp_path):
    (tmp_path / "tests").mkdir()
    for name in ("attention_contract", "gpu_plan", "plan_rules", "gpu_allocations", run_tests.REFUSED):
        (tmp_path / "tests" / name).touch(mode=0o755)
    names = [path.name for path in run_tests.programs(tmp_path)]
    assert names == ["gpu_allocations", "gpu_plan", "attention_contract", "plan_rules"]


def test_random_calls_over_caches_are_shared_among_processes_and_none_is_drawn_twice(session, tmp_path):
    program = tmp_path / "flashmask"
    program.write_text('#!/bin/sh\necho "$@"\necho "${9} passed, 0 failed, 1 skipped"\n')
    program.chmod(0o755)
    run_tests.run_caches(session, tmp_path, 10)
    parts = session.figures["parts"]
    assert session.receipt["tests"] == {"passed": 12, "failed": 0} and len(parts) == run_tests.CACHE_PROCESSES
    assert len({part["command"] for part in parts}) == len(parts)
    run_tests.run_caches(session, tmp_path / "empty", 10)
    assert session.figures["left_out"] == ["caches: there is no flashmask command"]


def test_random_cases_count_up_to_the_process_that_fails(session, tmp_path, monkeypatch):
    program = tmp_path / "flashmask"
    program.write_text('#!/bin/sh\necho "$2 passed, ${FAILED:-0} failed"\nexit ${FAILED:-0}\n')
    program.chmod(0o755)
    run_tests.run_random_cases(session, [program], run_tests.VERIFY_CASES + 10, 5)
    assert session.receipt["tests"] == {"passed": run_tests.VERIFY_CASES + 10, "failed": 0}
    seeds = [part["command"].split("--seed ")[1] for part in session.figures["parts"]]
    assert len(set(seeds)) == 2
    monkeypatch.setenv("FAILED", "1")
    run_tests.run_random_cases(session, [program], 3 * run_tests.VERIFY_CASES, 5)
    assert len(session.figures["parts"]) == 3 and session.receipt["tests"]["failed"] == 1


def test_every_file_of_the_package_s_tests_is_in_one_share(monkeypatch, session, tmp_path):
    files, begun = [], threading.Barrier(run_tests.TORCH_SHARES, timeout=10)

    def run_pytest(_, name, words, seconds, environment, share):
        begun.wait()
        files.extend(share)

    monkeypatch.setattr(run_tests, "run_pytest", run_pytest)
    (tmp_path / run_tests.TORCH_LIBRARIES["FLASHMASK_TORCH_LIBRARY"]).touch()
    run_tests.run_torch(session, tmp_path, [])
    there = [str(path.relative_to(run_tests.ROOT)) for path in run_tests.ROOT.glob("tests/torch/test_*.py")]
    assert sorted(files) == sorted(there)


def test_shares_of_the_package_s_tests_take_about_equally_long():
    """By the seconds that are known; and a file that is gone is not among those."""
    seconds = [sum(map(run_tests.torch_seconds, share)) for share in run_tests.torch_shares()]
    assert max(seconds) - min(seconds) <= run_tests.TORCH_SECONDS
    assert all((run_tests.ROOT / "tests" / "torch" / name).exists() for name in run_tests.LONG_TORCH_FILES)


def test_every_test_is_in_one_share(monkeypatch, session, tmp_path):
    """Also with fewer tests than shares, and after -k."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(11))\ndef test_it(n): pass\ndef test_other(): pass\n"
    )
    run = lambda *words: run_tests.run_pytest_in_shares(session, "it", 5, words, 60, files=[tmp_path / "test_it.py"])
    run()
    parts = session.figures["parts"]
    assert sorted(part["name"] for part in parts) == [f"it {n}" for n in range(1, 6)]
    assert sorted(part["passed"] for part in parts) == [2, 2, 2, 3, 3]
    run("-k", "other")
    assert session.receipt["tests"] == {"passed": 13, "failed": 0}


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


def test_failures_are_kept_with_what_follows_them(session):
    output = "FAILED case 3\n" + "skipped 1: a reason\n" * 1000
    session.add({"name": "verify", "command": "verify", "seconds": 1.0, "output": output}, 5, 1)
    assert session.figures["parts"][-1]["output"].startswith("FAILED case 3")


def test_a_program_that_was_stopped_is_told_from_one_that_failed(session, capsys):
    for name, command in (("slow", ["sleep", "60"]), ("wrong", ["false"])):
        session.add(session.run(name, command, 1), 0, 1)
    assert run_tests.summary(session.receipt | {"device": "A GPU"}, Path("tests.json")) == 1
    slow, wrong = capsys.readouterr().out.splitlines()[-3:-1]
    assert slow.startswith("FAIL  slow") and slow.endswith("when its time was over")
    assert wrong.startswith("FAIL  wrong") and wrong.endswith(" s")


def test_what_is_missing_is_named(session, monkeypatch, tmp_path):
    for variable in run_tests.TORCH_LIBRARIES:
        monkeypatch.delenv(variable, raising=False)
    run_tests.run_torch(session, tmp_path, [])
    monkeypatch.delenv("FLASHMASK_JAX_LIBRARY", raising=False)
    run_tests.run_overhead(session, tmp_path)
    run_tests.run_jax(session, tmp_path, [])
    run_tests.run_jax_speed(session, tmp_path)
    assert session.figures["left_out"] == [
        "torch: there is no libflashmask_torch.so (FLASHMASK_TORCH_LIBRARY names one)",
        "torch: overhead: there is no libflashmask_torch.so (FLASHMASK_TORCH_LIBRARY names one)",
        "jax: there is no libflashmask_jax.so (FLASHMASK_JAX_LIBRARY names one)",
        "jax: speed: there is no libflashmask_jax.so (FLASHMASK_JAX_LIBRARY names one)",
    ]


def test_ratios_of_speed_are_judged_one_by_one_and_kept(session):
    rows = [{"what": "host", "ratio": 0.5}, {"what": "speed", "ratio": 1.0}, {"what": "speed", "ratio": 0.98}]
    result = {"name": "a", "command": "b", "seconds": 1, "status": 1, "output": "a warning\n"}
    run_tests.add_jax_speed(session, result | {"output": json.dumps({"bar": 1.0, "rows": rows})})
    assert session.receipt["tests"] == {"passed": 1, "failed": 1} and session.figures["jax_speed"]["rows"] == rows
    run_tests.add_jax_speed(session, result)
    assert session.receipt["tests"] == {"passed": 1, "failed": 2}


# --- Sanitizers -------------------------------------------------------------------------------------

WORKS = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors"


@pytest.fixture
def carry(tmp_path, monkeypatch):
    """A folder with the programs, and a compute-sanitizer that writes down what it is asked and says $SAID."""
    for name in (*run_tests.CASES.values(), run_tests.REFUSED):
        (tmp_path / name).touch()
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nprintf "%b\\n" "$SAID"\necho "3 passed, 0 failed"\n'
        "exit ${STATUS:-0}\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(run_tests, "find_sanitizer", lambda: str(tool))
    return tmp_path


def asked(carry):
    """[(tool, program, its options)] of each time."""
    lines = [line.split() for line in (carry / "asked").read_text().splitlines()]
    kept = [[word for word in line if word.startswith((str(carry), "--probe", "--quick"))] for line in lines]
    return [
        (line[line.index("--tool") + 1], *(word.replace(f"{carry}/", "") for word in words))
        for line, words in zip(lines, kept)
    ]


def test_sanitizers_run_where_a_probe_shows_that_they_work(session, carry, monkeypatch):
    monkeypatch.setenv("SAID", WORKS)
    run_tests.run_sanitizers(session, carry, 5)
    first, *rest = asked(carry)
    assert first == ("memcheck", "gpu_forward_cases", "--probe")
    assert ("memcheck", "gpu_forward_cases") in rest and ("racecheck", "gpu_backward_cases", "--quick") in rest
    assert [line for line in rest if "gpu_refused_calls" in line] == [("memcheck", "gpu_refused_calls")]
    assert session.receipt["tests"] == {"passed": 3 * len(rest), "failed": 0}


def test_sanitizers_watch_both_directions_at_once(session, carry, monkeypatch):
    monkeypatch.setenv("SAID", WORKS)
    both = threading.Barrier(2, timeout=10)
    directions = []
    monkeypatch.setattr(run_tests, "sanitize", lambda *words: directions.append((words[2], both.wait())))
    run_tests.run_sanitizers(session, carry, 5)
    assert {name for name, _ in directions} == {"forward", "backward"}


def test_sanitizers_watch_calls_over_caches(session, carry, monkeypatch):
    monkeypatch.setenv("SAID", WORKS)
    (carry / "flashmask").touch()
    run_tests.run_sanitizers(session, carry, 5)
    watched = [line for line in asked(carry) if "flashmask" in line]
    assert watched == [(tool, "flashmask") for tool in run_tests.CACHE_TOOLS]


@pytest.mark.parametrize(
    "said, status",
    [
        ("========= Error: Device not supported", 1),
        ("CUDA error 999 at the first allocation", 0),
        ("========= ERROR SUMMARY: 1 error", 99),
        ("", 77),
    ],
)
def test_a_machine_that_refuses_them_is_no_failure(session, carry, monkeypatch, said, status):
    monkeypatch.setenv("SAID", said)
    monkeypatch.setenv("STATUS", str(status))
    run_tests.run_sanitizers(session, carry, 5)
    assert len(asked(carry)) == 1 and session.receipt["tests"] == {"passed": 0, "failed": 0}
    (why,) = session.figures["left_out"]
    assert why.startswith("sanitizers: compute-sanitizer does not work on this machine") and said.strip("= ") in why


def test_no_time_for_them_is_a_failure(carry, monkeypatch):
    monkeypatch.setenv("SAID", WORKS)
    late = run_tests.Session({"figures": {}, "tests": {"passed": 0, "failed": 0}}, 0)
    run_tests.run_sanitizers(late, carry, 5)
    assert late.receipt["tests"]["failed"] > 0 and not (carry / "asked").exists()


def test_where_they_work_what_they_find_fails(session, carry, monkeypatch):
    monkeypatch.setenv("SAID", "========= Invalid __global__ read\n========= ERROR SUMMARY: 2 errors")
    words = [carry / run_tests.REFUSED]
    run_tests.sanitize_with(session, str(carry / "compute-sanitizer"), "memcheck", "refused", words, 5)
    assert session.receipt["tests"] == {"passed": 3, "failed": 2}


def test_programs_take_turns_with_the_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,GPU-a")
    session = run_tests.Session({"figures": {}, "tests": {"passed": 0, "failed": 0}}, 60)
    results = [session.run("shown", ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], 5) for _ in range(4)]
    assert [result["output"].strip() for result in results] == ["2,5,GPU-a", "5,GPU-a,2", "GPU-a,2,5", "2,5,GPU-a"]


def test_refused_calls_are_counted(session, tmp_path):
    program = tmp_path / run_tests.REFUSED
    run_tests.run_refused(session, tmp_path)
    assert session.figures["left_out"] == ["refused calls: there is no gpu_refused_calls"]
    program.write_text("#!/bin/sh\necho 'FAILED: no data (q): it was taken'\necho '140 passed, 1 failed'\nexit 1\n")
    program.chmod(0o755)
    run_tests.run_refused(session, tmp_path)
    assert session.receipt["tests"] == {"passed": 140, "failed": 1} and run_tests.programs(tmp_path) == []
