# SPDX-License-Identifier: Apache-2.0
"""The programs of the pages about other libraries run, each from top to bottom."""

import re
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "python"


@pytest.mark.parametrize("page", ["hugging-face", "trl", "verl"])
def test_page(page, capsys):
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    names = {}
    for n, snippet in enumerate(snippets):
        exec(compile(snippet, f"{page}, snippet {n}", "exec"), names)
    assert snippets
    if page == "verl":
        (shown,) = re.findall(r"# (\d+ tokens in \d+)", text)
        assert shown in capsys.readouterr().out
    if page == "trl":
        assert "[2, 80]) torch.Size([1, 92]" in capsys.readouterr().out
    torch._dynamo.reset()
