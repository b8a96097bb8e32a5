# SPDX-License-Identifier: Apache-2.0
"""examples/long_context: loss and gradients over a mesh are those of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "long_context"))
import documents
import train

SCRIPT = Path(__file__).with_name("long_context_ranks.py")


def test_four_processes(tmp_path):
    """FSDP over 2 x 2 ranks, two of which share each sequence, and then a short training that says how fast it is."""
    receipt = tmp_path / "speed.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    said = subprocess.run(
        [*command, str(SCRIPT), str(receipt)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stdout.count("compared loss") == 4
    assert (
        " 50 %  step 1/2  loss " in said.stdout
        and "100 %  step 2/2" in said.stdout
        and " tokens/s  ETA 0:00" in said.stdout
    )
    told = json.loads(receipt.read_text(encoding="utf-8"))
    assert (told["device"], told["dp"], told["cp"], told["seqlen"]) == ("cpu", 2, 2, 500)
    assert told["tokens_per_second"] > 0 and len(told["losses"]) == 2
    assert f"compared loss {told['losses'][0]:.4f}" in said.stdout


@pytest.mark.long
def test_a_small_measurement(tmp_path):
    """benchmarks.context_parallel.long_context in its dry run."""
    command = [sys.executable, "-m", "benchmarks.context_parallel.long_context", "--device", "cpu", "--ranks", "2"]
    said = subprocess.run(
        [*command, "--steps", "2"],
        env={**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stdout.count("PASS") == 2 and "PASS  1024 tokens: " in said.stdout
    told = json.loads((tmp_path / "long-context.json").read_text(encoding="utf-8"))
    assert told["complete"] and [run["seqlen"] for run in told["figures"]["runs"]] == [512, 1024]


def test_batches():
    batch = documents.draw_batch(4096, 256, seed=1, device=torch.device("cpu"))
    again = documents.draw_batch(4096, 256, seed=1, device=torch.device("cpu"))
    starts = (batch.positions[0] == 0).nonzero().flatten()
    assert torch.equal(batch.ids, again.ids) and batch.mask.seqlen_q == 4096 and 2 < len(starts) < 256
    assert torch.equal(batch.labels == documents.IGNORED, batch.positions == 0)
    visible = batch.mask.to_dense()[0, 0]
    assert torch.equal(visible.sum(1), batch.positions[0] + 1)


def test_ranks_that_do_not_divide(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match="--cp is 3; it must divide the number of ranks, 4"):
        train.make_mesh(3, "cpu")
