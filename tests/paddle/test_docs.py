# SPDX-License-Identifier: Apache-2.0
"""The Paddle part of docs/python/from-paddlepaddle.md runs: its ```py snippets. tests/torch runs the rest."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python" / "from-paddlepaddle.md"


def test_page(capsys):
    program = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names = {}
    for n, snippet in enumerate(program):
        exec(compile(snippet, f"{PAGE.name}, snippet {n}", "exec"), names)
    assert "forward   backend: cpu" in capsys.readouterr().out
    assert len(names["losses"]) == 10
