# SPDX-License-Identifier: Apache-2.0
"""Exceptions of all frontends, beyond ValueError, TypeError and RuntimeError."""

from ._core.errors import UnrepresentableMaskError, UnsupportedError

__all__ = ["UnrepresentableMaskError", "UnsupportedError"]
