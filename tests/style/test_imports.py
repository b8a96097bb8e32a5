# SPDX-License-Identifier: Apache-2.0
"""Imports within the Python package: none leads to a floor above, none in a circle.

Imports in functions and under TYPE_CHECKING count like all others.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "python"
PACKAGE = "flashmask"

# Rooms by floors, the highest first; "" is the package itself. A module imports from its own room and floors below.
FLOORS = (
    ("",),
    ("integrations",),
    ("context_parallel",),
    ("inference", "masks", "ops", "varlen"),
    ("jax", "numpy", "paddle", "torch"),
    ("capi", "errors"),
    ("_core",),
)


def module_name(path):
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in (SOURCES / PACKAGE).rglob("*.py")}


def imported(folder, source):
    """Modules of the package that a source in a folder, ("flashmask", "torch"), imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            names = {f"{module}.{name.name}" for name in node.names}
            yield from names & MODULES.keys()
            if names - MODULES.keys() and module in MODULES:
                yield module


@pytest.fixture(scope="module")
def graph():
    """{module: the modules that it imports}"""
    return {
        name: set(imported(path.relative_to(SOURCES).parts[:-1], path.read_text(encoding="utf-8")))
        for name, path in MODULES.items()
    }


def room(module):
    return (*module.split("."), "")[1]


def floor(module):
    return next(n for n, rooms in enumerate(FLOORS) if room(module) in rooms)


def test_every_module_has_a_floor():
    assert {room(module) for module in MODULES} == {room for rooms in FLOORS for room in rooms}


def test_imports_lead_down(graph):
    arrows = [(module, other) for module, others in graph.items() for other in others]
    assert [arrow for arrow in arrows if room(arrow[0]) != room(arrow[1]) and floor(arrow[0]) >= floor(arrow[1])] == []


def test_no_imports_in_a_circle(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")


def test_imports_of_every_kind_count():
    source = """
from . import mask, ops
from .mask import Mask
from .._core.errors import UnsupportedError
if TYPE_CHECKING:
    import flashmask.masks
def f():
    from flashmask import Mask, varlen
    import torch
"""
    names = ("torch.mask", "torch.ops", "_core.errors", "masks", "varlen")
    assert set(imported(("flashmask", "torch"), source)) == {"flashmask", *(f"flashmask.{name}" for name in names)}
