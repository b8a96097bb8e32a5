# SPDX-License-Identifier: Apache-2.0
"""Files of `flashmask run --out`, read by the safetensors package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = os.environ.get("FLASHMASK_COMMAND")
EXAMPLES = os.environ.get("FLASHMASK_EXAMPLES")


@pytest.mark.skipif(not COMMAND, reason="the flashmask command is not built")
@pytest.mark.parametrize("task", ["pretrain", "sft", "dpo", "rm", "tree"])
def test_packed_file(task, tmp_path):
    packed = tmp_path / "packed.safetensors"
    subprocess.run(
        [
            COMMAND,
            "run",
            "--input",
            f"{EXAMPLES}/{task}.jsonl",
            "--task",
            task,
            "--seqlen",
            "2048",
            "--limit-sequences",
            "3",
            "--heads",
            "1",
            "--kv-heads",
            "1",
            "--head-dim",
            "8",
            "--dense-seconds",
            "0",
            "--out",
            packed,
        ],
        check=True,
        capture_output=True,
    )
    check = subprocess.run(
        [sys.executable, Path(__file__).with_name("check_safetensors.py"), packed], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout + check.stderr
