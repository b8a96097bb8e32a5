# SPDX-License-Identifier: Apache-2.0
"""The snippets of docs/jax.md run, as one program from top to bottom, and the example trains."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from dense_reference import ON_GPU

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(ON_GPU, reason="the snippets' arrays are float32")
def test_page(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "jax.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert "dot_product_attention" in program
    exec(compile(program, "docs/jax.md", "exec"), {"__name__": "docs"})


def test_example():
    command = [sys.executable, ROOT / "examples" / "train_jax.py", "--seqlen", "128", "--rows", "2", "--steps", "11"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 3 and losses[0] > 5 and losses[-1] < 3.3
    assert said.count("compiling") == 1
