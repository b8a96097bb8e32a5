# SPDX-License-Identifier: Apache-2.0
"""The rooms of benchmarks/, which import downwards alone."""

import ast

import pytest

from benchmarks import ROOT

# Each imports only from those behind it.
ROOMS = (
    "report",
    "end_to_end",
    "training",
    "context_parallel",
    "measure.gpu",
    "measure",
    "peers",
    "masks",
    "instruments",
    "cell_bars",
    "charts",
    "receipts",
)
FOLDER = ROOT / "benchmarks"


def room_of(module):
    """The room that has a module of the package; None for the package itself."""
    return next((room for room in ROOMS if f"{module}.".startswith(f"benchmarks.{room}.")), None)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_rooms_import_downwards(path):
    room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = {room_of(module) for module in imported(path)} - {None, room}
    assert not [other for other in found if room is None or ROOMS.index(other) < ROOMS.index(room)]


def test_every_folder_is_a_room():
    folders = {path.parent.relative_to(FOLDER) for path in FOLDER.rglob("*.py")}
    assert {".".join(folder.parts) for folder in folders} - {""} <= set(ROOMS)
