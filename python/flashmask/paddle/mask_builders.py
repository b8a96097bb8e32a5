# SPDX-License-Identifier: Apache-2.0
"""The mask families, as flashmask.masks has them for torch, in host memory; each returns MaskArguments."""

from typing import Any, NamedTuple

import paddle

from .._core import arguments, ctypes_calls
from .._core.families import Builders, Form
from .mask import CallMask
from .tensors import Paddle


class MaskArguments(NamedTuple):
    """A mask as flashmask_attention takes it: flashmask_attention(q, k, v, **mask._asdict())."""

    startend_row_indices: paddle.Tensor
    causal: bool


class _Builder(Paddle):
    """The frontend of the builders."""

    @staticmethod
    def build(
        family: str, form: Form, vectors: dict[str, Any], numbers: dict[str, int], device: Any = None
    ) -> tuple[MaskArguments, Any]:
        bounds = order = None
        if form.vectors == 0:
            rows, keys = form.rows, form.keys
        else:
            bounds, order = ctypes_calls.build_mask(Paddle, family, vectors, numbers, form.has_order)
            keys = bounds.shape[2]
            rows = form.rows_of(keys)
        mask = CallMask(
            arguments.length("seqlen_q", rows),
            arguments.length("seqlen_k", keys),
            bounds,
            form.causal,
            arguments.window("window", form.window),
            arguments.q_offset(form.q_offset),
            None,
        )
        return MaskArguments(*ctypes_calls.to_startend(Paddle, mask)), order


masks = Builders[MaskArguments, paddle.Tensor](_Builder)
