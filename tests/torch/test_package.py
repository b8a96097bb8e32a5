# SPDX-License-Identifier: Apache-2.0
"""The package's top level: its version, its public modules, and what its annotations promise (mypy: style.types)."""

import importlib.util
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


@pytest.mark.parametrize(
    "name", ["capi", "context_parallel", "errors", "integrations.collators", "masks", "ops", "varlen"]
)
def test_public_modules(name):
    module = importlib.import_module(f"flashmask.{name}")
    assert all(hasattr(module, public) for public in getattr(module, "__all__", ()))


def public(space):
    """(name, function) of what users call: functions of a module, methods and properties of a class."""
    names = getattr(space, "__all__", None) or [name for name in dir(space) if name[0] != "_"]
    for name in ["__init__"] * inspect.isclass(space) + names:
        value = inspect.getattr_static(space, name) if inspect.isclass(space) else getattr(space, name)
        value = getattr(value, "fget", None) or getattr(value, "func", None) or value  # properties, cached or not
        if inspect.isroutine(value) and not inspect.isbuiltin(value):
            yield name, value


def spaces():
    yield from (flashmask, flashmask.Mask, flashmask.context_parallel.Placement, flashmask.context_parallel.LocalMask)
    for name in ("masks", "ops", "varlen", "capi", "context_parallel", "integrations.collators"):
        yield importlib.import_module(f"flashmask.{name}")
    if importlib.util.find_spec("transformers"):
        yield importlib.import_module("flashmask.integrations.transformers")


@pytest.mark.parametrize("space", spaces(), ids=lambda space: space.__name__)
def test_every_parameter_and_result_is_annotated(space):
    functions = dict(public(space))
    assert functions
    for name, function in functions.items():
        signature = inspect.signature(function)
        parameters = {p.name: p.annotation for p in signature.parameters.values() if p.name != "self"}
        assert inspect.Parameter.empty not in [*parameters.values(), signature.return_annotation], name


def test_what_the_types_allow_runs():
    typed_use.right_use()
