# SPDX-License-Identifier: Apache-2.0
"""The snippets of README, docs/python, docs/inference.md and docs/recipes run.

Those of a page are one program, from top to bottom; a recipe's begins with its command, for which FLASHMASK_COMMAND
names the program, and has a model. ```python is run, ```py (what needs a package that is not installed here) is only
shown; it has to be Python all the same. (tests/paddle runs that of from-paddlepaddle.)
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from devices import ON_CUDA, cpu_only

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {"hugging-face", "trl", "verl"}  # run by tests/integrations
ON_A_GPU = ROOT / "docs" / "python" / "cuda-graphs.md"
PAGES = sorted(
    page for page in (ROOT / "docs" / "python").glob("*.md") if page.stem not in ELSEWHERE and page != ON_A_GPU
)
RECIPES = sorted(page for page in (ROOT / "docs" / "recipes").glob("*.md") if page.stem != "README")


def snippets(page, language):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for of, block in blocks if of == language]


@cpu_only("the snippets' tensors are in host memory")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page):
    run(page, {})
    for snippet in snippets(page, "py"):
        ast.parse(snippet)


@cpu_only("caches are read on the CPU")
def test_the_page_of_inference():
    pytest.importorskip("flashmask.inference")
    run(ROOT / "docs" / "inference.md", {})


@pytest.mark.skipif(not ON_CUDA, reason="a graph is the device's")
def test_page_of_graphs():
    run(ON_A_GPU, {})


def test_page_of_graphs_is_python():
    assert all(ast.parse(snippet) for snippet in snippets(ON_A_GPU, "python"))


def test_the_readme(capsys):
    """Its example is for a GPU; without one it runs on the CPU."""
    names = {}
    run(ROOT / "README.md", names, {} if ON_CUDA else {'"cuda"': '"cpu"'})
    torch.testing.assert_close(names["out"].float().cpu(), names["on_cpu"], atol=0.02, rtol=0.02)
    assert names["q"].grad.isfinite().all() and "tiles" in capsys.readouterr().out


def run(page, names, replaced=None):
    """Runs the program of a page, which finds `names`, with other words for those of `replaced`."""
    torch.manual_seed(0)
    program = snippets(page, "python")
    assert program, f"{page} has no snippet that runs"
    for n, snippet in enumerate(program):
        for old, new in (replaced or {}).items():
            snippet = snippet.replace(old, new)
        exec(compile(snippet, f"{page.name}, snippet {n}", "exec"), names)


@cpu_only("the snippets' tensors are in host memory")
@pytest.mark.skipif("FLASHMASK_COMMAND" not in os.environ, reason="FLASHMASK_COMMAND is not set")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.long] * (page.stem in ("dpo", "reward-model"))) for page in RECIPES],
    ids=lambda page: page.stem,
)
def test_recipe(page, tmp_path, monkeypatch):
    from benchmarks.training.llama import Llama

    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (command,) = snippets(page, "sh")
    printed = subprocess.run(
        [os.environ["FLASHMASK_COMMAND"], *shlex.split(command)[1:]], check=True, capture_output=True, text=True
    ).stdout
    (shown,) = snippets(page, "")
    assert shown in printed
    run(page, {"model": Llama(layers=1, dim=64, heads_kv=1)})


def test_there_are_pages():
    assert {page.stem for page in PAGES} == {
        "README",
        "from-flash-attn",
        "from-flexattention",
        "from-paddlepaddle",
        "from-sdpa",
        "numpy",
    }
    assert {page.stem for page in RECIPES} == {"sft", "dpo", "reward-model", "tree"}


@pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=lambda page: page.stem)
def test_links_between_files(page):
    for target in re.findall(r"\]\(([^)#]+\.md)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).is_file(), target
