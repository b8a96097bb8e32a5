# SPDX-License-Identifier: Apache-2.0
"""Exceptions beyond ValueError, TypeError and RuntimeError; flashmask.errors by their public name."""


class UnsupportedError(NotImplementedError):
    """The request is legal, but the chosen backend, or every one, lacks it. The message says what is supported."""

    __module__ = "flashmask.errors"


class UnrepresentableMaskError(ValueError):
    """A mask that needs more than two hidden row intervals in a column.

    column: the first such key column (None if it is not known).
    """

    __module__ = "flashmask.errors"

    def __init__(self, message: str, column: int | None = None) -> None:
        super().__init__(message)
        self.column = column
