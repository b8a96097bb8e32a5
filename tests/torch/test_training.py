# SPDX-License-Identifier: Apache-2.0
"""benchmarks.training at its smallest: records, packing, two steps of each attention, receipt and chart.

FLASHMASK_COMMAND names the `flashmask` program, which packs; without it the runs are skipped.
"""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from devices import DEVICE

from benchmarks.training import packed_text, train

SMALL = ["--seqlen", "1024", "--sequences", "3", "--layers", "2", "--dim", "128", "--steps", "2"]


@pytest.mark.skipif("FLASHMASK_COMMAND" not in os.environ, reason="FLASHMASK_COMMAND is not set")
@pytest.mark.parametrize("task, batch", [("sft", 2), pytest.param("tree", 1, marks=pytest.mark.long)])
def test_skipping_changes_no_bit_of_training(task, batch, tmp_path):
    """Runs in a process of its own, as its modes are global in torch."""
    words = ["--folder", tmp_path, "--tasks", task, "--device", DEVICE.type, "--batch", str(batch), *SMALL]
    environment = {**os.environ, "OUT": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.training", *words], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    receipt = json.loads((tmp_path / "training.json").read_text())
    figures = receipt["figures"]["tasks"][task]
    assert receipt["complete"] and receipt["tests"] == {"passed": 4, "failed": 0} and all(figures["checks"].values())
    assert figures["losses"]["skipping"] == figures["losses"]["dense"] and len(figures["losses"]["dense"]) == 2
    ElementTree.parse(tmp_path / "training.svg")


def made_up(losses, weights, empty=0.6):
    """The checks of figures that say so; the third run is the first one's."""
    figures = {"losses": dict(zip(train.ATTENTIONS, (*losses, losses[0]))), "tiles": {"least_empty_share": empty}}
    return list(train.checks(figures, dict(zip(train.ATTENTIONS, [[torch.tensor(x)] for x in weights]))).values())


def test_the_comparison_notices_the_last_bit():
    last = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0)).item()
    assert made_up(([3.0, 2.0], [3.0, 2.0]), (1.0, 1.0)) == [True] * 4
    assert made_up(([3.0, 2.0], [3.0, last]), (1.0, 1.0)) == [False, True, True, True]
    assert made_up(([3.0, 2.0], [3.0, 2.0]), (2.0, last)) == [True, False, True, True]
    assert made_up(([3.0, 2.0], [3.0, 2.0]), (1.0, 1.0), 0.4) == [True, True, False, True]
    assert made_up(([2.0, 3.0], [2.0, 3.0]), (1.0, 1.0)) == [True, True, True, False]
    assert made_up(([3.0, float("nan")], [3.0, float("nan")]), (1.0, 1.0))[0] is False


@pytest.mark.parametrize("task", packed_text.RECORDS)
def test_records_are_real_text_and_fit(task):
    made = list(packed_text.records(task, 1024, 4))
    assert made == list(packed_text.records(task, 1024, 4))  # equal in every run
    texts = [text for record in made for text in texts_of(record)]
    assert len(texts) == packed_text.RECORDS[task][0] * len(made) and all(
        1024 // 64 <= len(text) <= 1024 // 16 for text in texts
    )
    everything = "".join(packed_text.texts())
    assert all(text in everything for text in texts)
    assert 0.8 * 4096 < sum(len(text.encode()) + 2 for text in texts) <= 4096


def texts_of(value):
    if isinstance(value, str):
        return [value]
    return [text for part in (value.values() if isinstance(value, dict) else value) for text in texts_of(part)]


@pytest.mark.parametrize(
    "words, text",
    [
        (["--tasks", "sft,ppo"], "--tasks has ppo; it must be some of sft, dpo, rm, tree"),
        (["--steps", "1"], "--steps is 1"),
        (["--dim", "100"], "--dim is 100; it must be a multiple of 64"),
        (["plot"], "takes a receipt"),
        (["train", "x"], "takes a receipt"),
    ],
)
def test_wrong_words(words, text, capsys):
    with pytest.raises(SystemExit):
        train.parse([*words, "--device", "cpu"])
    assert text in capsys.readouterr().err
