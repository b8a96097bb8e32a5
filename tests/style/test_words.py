# SPDX-License-Identifier: Apache-2.0
"""Messages of the frontends' errors: no words stand twice."""

import ast
import collections
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "flashmask"
ENOUGH = 5  # words that are no turn of phrase


def clauses(module):
    """The constant parts of what a module raises, each clause by itself."""
    for statement in ast.walk(module):
        if isinstance(statement, ast.Raise):
            for node in ast.walk(statement):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield from (clause.strip(" ,.:") for clause in node.value.split(";"))


def test_no_front_repeats_what_another_says():
    places = collections.defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for clause in clauses(ast.parse(path.read_text(encoding="utf-8"))):
            if len(clause.split()) >= ENOUGH:
                places[clause].add(str(path.relative_to(PACKAGE)))
    assert len(places) > 20
    assert {clause: found for clause, found in places.items() if len(found) > 1} == {}
