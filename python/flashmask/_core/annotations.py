# SPDX-License-Identifier: Apache-2.0
"""Types in the signatures of all frontends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias


class Array(Protocol):
    """numpy's arrays, and tensors of torch and Paddle."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...


Layout: TypeAlias = Literal["bshd", "bhsd"]
Backend: TypeAlias = Literal["auto", "cpu", "cuda", "reference"]
Window: TypeAlias = tuple[int | None, int | None] | int | None
Integers: TypeAlias = Array | Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]
Flags: TypeAlias = Array | Sequence[bool] | Sequence[Sequence[bool]]
