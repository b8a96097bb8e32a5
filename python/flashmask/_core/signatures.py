# SPDX-License-Identifier: Apache-2.0
"""Functions that take the arguments of another one."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def takes_arguments_of(
    function: Callable[Arguments, object],
) -> Callable[[Callable[[dict[str, Any]], Result]], Callable[Arguments, Result]]:
    """A decorator of body(given): gives it the signature of `function`, and all arguments by name, with defaults."""
    signature = inspect.signature(function)

    def decorator(body: Callable[[dict[str, Any]], Result]) -> Callable[Arguments, Result]:
        @functools.wraps(body)
        def call(*positional: Arguments.args, **named: Arguments.kwargs) -> Result:
            try:
                given = signature.bind(*positional, **named)
            except TypeError as error:
                raise TypeError(f"{body.__name__}() {error}") from None
            given.apply_defaults()
            return body(given.arguments)

        result = inspect.signature(body).return_annotation
        call.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
        return call

    return decorator
