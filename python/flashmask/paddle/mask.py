# SPDX-License-Identifier: Apache-2.0
"""The mask of a call."""

from __future__ import annotations

from typing import NamedTuple

import paddle


class IntervalLists(NamedTuple):
    """Hidden row intervals of each column, any number of them."""

    column_ptr: paddle.Tensor
    intervals: paddle.Tensor


class CallMask(NamedTuple):
    """The mask of one call: the attributes of Mask."""

    seqlen_q: int
    seqlen_k: int
    bounds: paddle.Tensor | None
    causal: bool
    window: tuple[int, int] | None
    q_offset: int | None
    block_mask: paddle.Tensor | None = None
    column_ptr: paddle.Tensor | None = None
    intervals: paddle.Tensor | None = None

    def _present(self) -> dict[str, paddle.Tensor]:
        names = ("bounds", "block_mask", "column_ptr", "intervals")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def tensors(self) -> list[paddle.Tensor]:
        return list(self._present().values())

    def on_host(self) -> CallMask:
        return self._replace(**{name: x.cpu() for name, x in self._present().items()})
