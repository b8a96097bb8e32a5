# SPDX-License-Identifier: Apache-2.0
"""Every `flashmask` command and C++ snippet of README and docs, as a reader would type it, and every link.

FLASHMASK_COMMAND names the command, FLASHMASK_LIBRARY the library, CXX the compiler.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The recipes' commands run with their programs, in tests/torch.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Shorter commands, as tests lack a reader's time; tests/conformance checks the covering list.
SHORTER = {"--cases 500": "--cases 5", "bench --seqlen 8192": "bench --seqlen 512", "--covering": "--covering --list"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# Placeholders (capitals, dots, brackets) are no commands.
INLINE = re.compile(r"`(flashmask [a-z]+ [^`]*)`")
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]{3,}\b|[<>\[\]{}]")


def commands_of(text):
    for language, block in FENCE.findall(text):
        if language in ("", "sh"):
            yield from (
                line.removeprefix("$ ") for line in block.splitlines() if re.match(r"(\$ )?flashmask [a-z]", line)
            )
    yield from (words for words in INLINE.findall(FENCE.sub("", text)) if not PLACEHOLDER.search(words))


def all_commands():
    found = {}
    for page in PAGES:
        for command in commands_of(page.read_text(encoding="utf-8")):
            found.setdefault(command.split("   #")[0].strip(), page.name)
    return [pytest.param(command, id=f"{page}: {command}") for command, page in found.items()]


def snippets():
    return [
        block
        for language, block in FENCE.findall((ROOT / "docs" / "cpp.md").read_text(encoding="utf-8"))
        if language == "cpp"
    ]


def linking_pages():
    others = [
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "tests/README.md")
    ]
    return [*others, *sorted((ROOT / "docs").rglob("*.md"))]


def anchor_of(heading):
    """Makes an anchor as GitHub does: words in lower case, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors_of(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {anchor_of(heading) for heading in re.findall(r"^#+ +(.*)$", text, re.M)}


@pytest.mark.parametrize("page", linking_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'<img src="([^"]+)"', text)]
    for target in (target for target in targets if not target.startswith("http")):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), target


def test_the_index_has_every_page():
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", index.read_text(encoding="utf-8"))
    }
    have_an_index = ("contributing", "decisions", "recipes", "python", "performance")
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page.parent.name not in have_an_index}
    assert pages - linked == {index}


def tiles_of(kernel_set, direction):
    """The rows of a table of tile_config.h, as their numbers and flags; features are named by constants."""
    table = (ROOT / "src" / "backends" / "cuda" / kernel_set / "tile_config.h").read_text(encoding="utf-8")
    rows = re.findall(rf"^ *{direction}Tile\{{(\d.*)\}}", table, re.M)
    return [[json.loads(value) for value in row.split(", ") if value[0] != "k"] for row in rows]


def rows_of(page, first_cell):
    """The cells of the table rows of a page of docs/kernels that begin with such a cell."""
    text = (ROOT / "docs" / "kernels" / page).read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip(" |").split("|")] for line in text.splitlines() if "|" in line]
    return [row for row in rows if re.fullmatch(first_cell, row[0])]


def test_pages_name_the_head_dims_that_there_are_kernels_for():
    *most, last = sorted({head_dim for head_dim, *_ in tiles_of("sm90", "Forward")})
    words = f"head_dim {', '.join(map(str, most))} or {last}"
    for page in ("README.md", "docs/python/README.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert words in text, f"{page} does not say {words}"


def test_the_pages_of_the_kernels_have_their_tiles():
    """Checks all rows of forward.md, the wide tiles' head dims of backward-wide.md, the backward's rows of sm80.md."""
    of_forward = [
        (f"{head_dim} / {head_dim_v}", f"{64 * warpgroups} x {keys}, {warpgroups}")
        for head_dim, head_dim_v, warpgroups, keys, *_ in tiles_of("sm90", "Forward")
    ]
    shown = [(row[0], tile) for row in rows_of("forward.md", r"\d+ / \d+") for tile in row[1].split("; ")]
    assert sorted(shown) == sorted(of_forward)

    wide = {f"{tile[0]} / {tile[1]}" for tile in tiles_of("sm90", "Backward") if tile[10]}
    assert {row[0] for row in rows_of("backward-wide.md", r"\d+ / \d+")} == wide

    of_sm80 = {}
    for head_dim, head_dim_v, kilobytes, rows, keys, *_ in tiles_of("sm80", "Backward"):
        pair = f"{head_dim}" if head_dim == head_dim_v else f"{head_dim} / {head_dim_v}"
        of_sm80.setdefault(pair, {})[kilobytes] = f"{rows} x {keys}"
    shown = rows_of("sm80.md", r"\d+( / \d+)?")
    assert {row[0]: {163: row[1].split(",")[0], 99: row[3].split(",")[0]} for row in shown} == of_sm80


def test_the_pictures_of_the_architecture_are_the_scripts():
    words = [sys.executable, str(ROOT / "scripts" / "draw-architecture"), "--check"]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of a reader: the examples, and data of their own."""
    path = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "examples", path / "examples")
    shutil.copy(ROOT / "examples" / "data" / "sft.jsonl", path / "data.jsonl")
    return path


def test_the_documents_have_commands():
    commands = [c.values[0] for c in all_commands()]
    for name in ("run", "show", "verify", "bench", "info"):
        assert any(c.startswith(f"flashmask {name}") for c in commands), f"no document shows flashmask {name}"


@pytest.mark.parametrize("command", all_commands())
def test_commands(command, folder):
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    words = [os.environ["FLASHMASK_COMMAND"], *shlex.split(command, comments=True)[1:]]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


def compiled(source, folder, name):
    program, library = folder / name, Path(os.environ["FLASHMASK_LIBRARY"])
    (folder / f"{name}.cpp").write_text(source, encoding="utf-8")
    words = [
        os.environ.get("CXX", "c++"),
        "-std=c++20",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{ROOT / 'include'}",
        f"{name}.cpp",
        str(library),
        f"-Wl,-rpath,{library.parent}",
        "-o",
        str(program),
    ]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return program


def test_the_cpp_quick_start(folder):
    first = snippets()[0]
    include, body = first.split("using namespace flashmask;\n")
    program = compiled(
        f"""#include <cmath>
#include <cstdint>
#include <iostream>
#include <vector>
{include}
int main() {{
  using namespace flashmask;
  const int64_t batch = 1, heads_q = 2, heads_kv = 1, numbers = 4096 * 128;
  std::vector<uint16_t> q(heads_q * numbers), k(heads_kv * numbers), out(heads_q * numbers);
  std::vector<uint16_t> v(heads_kv * numbers, 0x3f80);  // ones
  std::vector<float> lse(heads_q * 4096);
  const auto run = [&](void* q, void* k, void* v, void* out, void* lse) {{
{body}
  }};
  run(q.data(), k.data(), v.data(), out.data(), lse.data());
  for (const uint16_t x : out) if (x != 0x3f80) return 1;  // means of ones
  // The row that sees the whole first document, with equal scores.
  return std::abs(lse[899] - std::log(900.f)) > 1e-4f;
}}
""",
        folder,
        "quick_start",
    )
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0
    assert "tiles" in result.stdout


def test_the_cpp_snippet_for_gpus_compiles(folder):
    compiled(
        f"""#include <cstddef>
#include <span>
#include <flashmask/flashmask.h>
using namespace flashmask;
void run(ForwardArgs args, void* lts, std::span<std::byte> plan_memory, std::span<std::byte> workspace, void* stream) {{
{snippets()[1]}
}}
int main() {{}}
""",
        folder,
        "on_gpu",
    )


def test_the_cpp_snippet_over_a_cache(folder):
    program = compiled(
        f"""#include <cstdint>
#include <vector>
#include <flashmask/flashmask.h>
using namespace flashmask;
int main() {{
  const int64_t batch = 2, heads_q = 4, heads_kv = 2, pages = 6, max_pages = 3;
  std::vector<uint16_t> rows(batch * heads_q * 128), keys(pages * 16 * heads_kv * 128), results(rows.size());
  std::vector<uint16_t> values(keys.size(), 0x3f80);  // ones
  std::vector<int32_t> pages_of = {{5, 0, 3, 1, 2, 4}}, lengths = {{40, 7}};
  void *q = rows.data(), *k = keys.data(), *v = values.data(), *out = results.data();
  void *table = pages_of.data(), *seqlens = lengths.data();
{snippets()[2]}
  for (const uint16_t x : results) if (x != 0x3f80) return 1;  // means of ones
}}
""",
        folder,
        "over_a_cache",
    )
    assert subprocess.run([program]).returncode == 0
