# SPDX-License-Identifier: Apache-2.0
"""The mask families, as flashmask.masks has them for torch, in host memory; each returns MaskArguments."""

from typing import NamedTuple

import paddle

from .._core import arguments, ctypes_calls
from .._core.families import Builders
from .mask import CallMask
from .tensors import Paddle


class MaskArguments(NamedTuple):
    """A mask as flashmask_attention takes it: flashmask_attention(q, k, v, **mask._asdict())."""

    startend_row_indices: paddle.Tensor
    causal: bool


class _Builder(Paddle):
    """The frontend of the builders."""

    @staticmethod
    def build(family, form, vectors, numbers, device=None):
        if form.vectors == 0:
            lengths = arguments.length("seqlen_q", form.rows), arguments.length("seqlen_k", form.keys)
            band = form.causal, arguments.window("window", form.window), arguments.q_offset(form.q_offset)
            mask, order = CallMask(*lengths, None, *band, None), None
        else:
            bounds, order = ctypes_calls.build_mask(Paddle, family, vectors, numbers, family == "block_diffusion")
            keys = bounds.shape[2]
            mask = CallMask(form.rows_of(keys), keys, bounds, form.causal, form.window, None, None)
        return MaskArguments(*ctypes_calls.to_startend(Paddle, mask)), order


masks = Builders(_Builder)
