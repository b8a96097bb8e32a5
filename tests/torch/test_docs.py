# SPDX-License-Identifier: Apache-2.0
"""The snippets of docs/python run. Those of a page are one program, from top to bottom.

```python is run, ```py (what needs a package that is not installed here) is only shown; it has to be Python all the same.
"""

import ast
import re
from pathlib import Path

import pytest
import torch
from devices import cpu_only

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "python").glob("*.md"))


def snippets(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@cpu_only("the snippets' tensors are in host memory")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page):
    torch.manual_seed(0)
    program = snippets(page, "python")
    assert program, f"{page} has no snippet that runs"
    names = {}
    for n, snippet in enumerate(program):
        exec(compile(snippet, f"{page.name}, snippet {n}", "exec"), names)
    for snippet in snippets(page, "py"):
        ast.parse(snippet)


def test_there_are_pages():
    assert {page.stem for page in PAGES} == {"README", "from-flash-attn", "from-flexattention", "from-paddlepaddle", "from-sdpa"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_files(page):
    for target in re.findall(r"\]\(([^)#]+\.md)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).is_file(), target
