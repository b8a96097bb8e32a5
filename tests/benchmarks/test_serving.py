# SPDX-License-Identifier: Apache-2.0
"""The driver of transformers' continuous batching: a small model's answers on the CPU, and figures of invented ones."""

import json
import os
from argparse import Namespace

import pytest

from benchmarks.measure.gpu import bench, serving
from benchmarks.peers import LeftOut
from benchmarks.report import decode_page


class Workload:
    """Answers at invented speeds, which rise from call to call."""

    def __init__(self, **speeds):
        self.speeds, self.calls = speeds, []

    def answers(self, attention):
        name = next(name for name, own in serving.CONTENDERS.items() if own == attention)
        if name not in self.speeds:
            raise LeftOut("it is not there") if name == "fa3" else RuntimeError("no memory\nat all")
        self.calls.append(name)
        return self.speeds[name] + self.calls.count(name), [[1, 2, 3], [4, 5, 6 if name == "ours" else 7]]


def test_contenders_take_turns_and_are_compared_with_ours():
    workload, progress = Workload(ours=300, sdpa=100), bench.QuietProgress([])
    answers, first, left_out = serving.first_answers(workload, serving.CONTENDERS)
    assert first == {"ours": 301, "sdpa": 101}
    assert left_out == {"eager": "RuntimeError: no memory", "fa2": "RuntimeError: no memory", "fa3": "it is not there"}
    speeds = serving.speeds_of(workload, answers, 3, progress)
    assert speeds == {"ours": [302, 303, 304], "sdpa": [102, 103, 104]}
    ours, sdpa = (serving.figures_of(name, speeds, answers) for name in speeds)
    assert ours == {"contender": "ours", "rounds": 3, "tokens_per_s": 303, "tokens_per_s_spread": [302.5, 303.5]}
    assert sdpa["ours_over"] == 303 / 103 and sdpa["agreement"] == 5 / 6
    assert serving.line_of(sdpa).endswith("ours 2.94 times as fast, 83% of the tokens alike")


def test_answers_agree_up_to_the_first_token_that_differs():
    assert serving.agreement([[1, 2, 3, 4]], [[1, 9, 3, 4]]) == 1 / 4
    with pytest.raises(ValueError, match="shorter"):
        serving.agreement([[1, 2]], [[1]])


def test_kernels_that_may_have_run():
    ids = ["sm90.cache.blocks", "sm90.decode.bf16.d64.dv64.c1"]
    others = ["sm90.fwd.bf16.d64.dv64.c3", "sm90.decode.fp16.d64.dv64.c1", "sm90.decode.bf16.d128.dv128.c1"]
    assert list(serving.own_hashes(dict.fromkeys(ids + others, "0"))) == ids


def test_a_dry_run_answers_on_the_cpu(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    if "FLASHMASK_TORCH_LIBRARY" not in os.environ:
        pytest.skip("FLASHMASK_TORCH_LIBRARY is not set")
    monkeypatch.setenv("OUT", str(tmp_path))
    assert bench.main(["serving", "--dry-run", "--rounds", "1", "--contenders", "ours", "sdpa", "eager"]) == 0
    receipt = json.loads((tmp_path / "serving.json").read_text())
    figures = receipt["figures"]["serving"]
    assert receipt["dry_run"] and receipt["kernel_hashes"] == {} and figures["left_out"] == {}
    assert [cell["contender"] for cell in figures["cells"]] == ["ours", "sdpa", "eager"]
    assert [cell["agreement"] for cell in figures["cells"][1:]] == [1, 1]
    assert (figures["requests"], figures["answer_tokens"], figures["num_blocks"]) == (5, 4, 6)
    page = "\n".join(decode_page.serving({"serving": receipt}))
    assert "| flashmask | " in page and page.count("| 100.0 % |") == 2 and "did not take part" not in page
    assert decode_page.serving({}) == []


def test_a_measurement_takes_the_model_and_graphs_that_are_asked_for(monkeypatch):
    workload = pytest.importorskip("transformers") and pytest.importorskip("benchmarks.measure.gpu.serving_workload")
    made = []
    monkeypatch.setattr(workload, "Workload", lambda *given, **batching: made.append((given, batching)))
    serving.workload_of(Namespace(dry_run=False, no_graphs=True, requests=256))
    serving.workload_of(Namespace(dry_run=False, no_graphs=False, requests=2))
    (given, batching), (_, others) = made
    assert given == (serving.MODEL, 256, (32, 1024), 128, "cuda")
    assert batching["use_cuda_graph"] is False and others["use_cuda_graph"] is None
