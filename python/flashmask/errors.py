# SPDX-License-Identifier: Apache-2.0
"""What the package raises beyond ValueError, TypeError and RuntimeError."""


class UnsupportedError(NotImplementedError):
    """The request is legal, but not something that any (or the chosen) backend does. The message says what is."""


class UnrepresentableMaskError(ValueError):
    """A mask that needs more than two hidden row intervals in a column.

    column: the first such key column (None if it is not known).
    """

    def __init__(self, message: str, column: int | None = None) -> None:
        super().__init__(message)
        self.column = column
