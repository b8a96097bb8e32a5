# SPDX-License-Identifier: Apache-2.0
"""The mask of a call."""

from __future__ import annotations

from typing import NamedTuple

import paddle


class CallMask(NamedTuple):
    """The mask of one call: the attributes of Mask."""

    seqlen_q: int
    seqlen_k: int
    bounds: paddle.Tensor | None
    causal: bool
    window: tuple[int, int] | None
    q_offset: int | None
    block_mask: paddle.Tensor | None

    def tensors(self) -> list[paddle.Tensor]:
        return [x for x in (self.bounds, self.block_mask) if x is not None]

    def on_host(self) -> CallMask:
        bounds, block_mask = (x if x is None else x.cpu() for x in (self.bounds, self.block_mask))
        return self._replace(bounds=bounds, block_mask=block_mask)
