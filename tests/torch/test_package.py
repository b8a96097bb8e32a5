# SPDX-License-Identifier: Apache-2.0
"""The package's top level: its version, and what its annotations promise (mypy: style.types)."""

import inspect
import re
from pathlib import Path

import flashmask
import pytest
import typed_use

SOURCE = Path(__file__).parents[2]


def test_the_version_is_that_of_the_header():
    header = (SOURCE / "include/flashmask/version.h").read_text()
    assert flashmask.__version__ == ".".join(re.findall(r"VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))
    assert "__version__" in dir(flashmask)


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        flashmask.nothing  # noqa: B018


def public(space):
    """(name, function) of what users call: functions of a module, methods and properties of a class."""
    names = getattr(space, "__all__", None) or [name for name in vars(space) if name[0] != "_"]
    for name in ["__init__"] * inspect.isclass(space) + names:
        value = inspect.getattr_static(space, name) if inspect.isclass(space) else getattr(space, name)
        value = value.fget if isinstance(value, property) else value
        if inspect.isroutine(value):
            yield name, value


@pytest.mark.parametrize("space", [flashmask, flashmask.masks, flashmask.Mask], ids=lambda space: space.__name__)
def test_every_parameter_and_result_is_annotated(space):
    functions = dict(public(space))
    assert len(functions) > 5
    for name, function in functions.items():
        signature = inspect.signature(function)
        parameters = {p.name: p.annotation for p in signature.parameters.values() if p.name != "self"}
        assert inspect.Parameter.empty not in [*parameters.values(), signature.return_annotation], name


def test_what_the_types_allow_runs():
    typed_use.right_use()
