# SPDX-License-Identifier: Apache-2.0
"""The mask families, as flashmask.masks has them for torch, in host memory; each returns MaskArguments."""

from typing import Any, NamedTuple

import numpy as np
import paddle

from .._core import arguments, ctypes_calls
from .._core.docstrings import composed
from .._core.errors import UnrepresentableMaskError
from .._core.families import Builders, Form
from .mask import CallMask, IntervalLists
from .tensors import Paddle, checked_tensor


class MaskArguments(NamedTuple):
    """A mask as flashmask_attention takes it: flashmask_attention(q, k, v, **mask._asdict()).

    startend_row_indices: IntervalLists where none of the four forms of a tensor says what is hidden.
    """

    startend_row_indices: paddle.Tensor | IntervalLists
    causal: bool


class _Builder(Paddle):
    """The frontend of the builders."""

    @staticmethod
    def build(
        family: str, form: Form, vectors: dict[str, Any], numbers: dict[str, int], device: Any = None
    ) -> tuple[MaskArguments, Any]:
        bounds = order = None
        if form.has_lists:
            fields, order = ctypes_calls.build_lists(Paddle, family, vectors, numbers, form.has_order)
            return _arguments(fields), order
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
        )
        return MaskArguments(*ctypes_calls.to_startend(Paddle, mask)), order


def _arguments(fields: dict[str, Any]) -> MaskArguments:
    """The arguments that say what a Mask of these fields says."""
    mask: Any = CallMask(**fields)
    if mask.column_ptr is None:
        try:
            return MaskArguments(*ctypes_calls.to_startend(Paddle, mask))
        except UnrepresentableMaskError:  # a window beside two intervals, which no form has room for
            pass
    tensors = (paddle.to_tensor(x, place="cpu") for x in _with_window(mask, *_lists(mask)))
    return MaskArguments(IntervalLists(*tensors), False)


def _lists(mask: Any) -> tuple[Any, Any]:
    """numpy's column_ptr and intervals; of vectors, which are not causal, two intervals for each column."""
    if mask.column_ptr is not None:
        return mask.column_ptr.numpy(), mask.intervals.numpy()
    bounds = mask.bounds.numpy()
    if bounds.shape[3] == 2:
        lts, ute = bounds[..., 0], bounds[..., 1]
        bounds = np.stack((lts, np.full_like(lts, mask.seqlen_q), np.zeros_like(ute), ute), -1)
    return 2 * _columns_before(*bounds.shape[:3]), bounds.reshape(-1, 2)


def _columns_before(batch: int, heads: int, keys: int) -> Any:
    """int32 [batch, heads, keys + 1]: the columns before each, and before the end of its head."""
    return (np.arange(batch * heads).reshape(batch, heads, 1) * keys + np.arange(keys + 1)).astype(np.int32)


def _with_window(mask: CallMask, column_ptr: Any, intervals: Any) -> tuple[Any, Any]:
    """Lists that hide what the window hides, too: two more intervals for each column."""
    left, right = mask.window or (-1, -1)
    row = np.arange(mask.seqlen_k) - (mask.q_offset or 0)  # that stands at each key
    above = row * 0 if right == -1 else row - right
    below = row * 0 + mask.seqlen_q if left == -1 else row + left + 1
    window = np.stack((row * 0, above, below, row * 0 + mask.seqlen_q), 1).clip(0, mask.seqlen_q)
    first = column_ptr[..., :-1].reshape(-1)
    added = np.tile(window.astype(np.int32), (column_ptr[..., 0].size, 1)).reshape(-1, 2)
    batch, heads = column_ptr.shape[:2]
    more = 2 * _columns_before(batch, heads, mask.seqlen_k)
    return column_ptr + more, np.insert(intervals, np.repeat(first, 2), added, axis=0)


class _Masks(Builders[MaskArguments, paddle.Tensor]):
    @composed
    def from_dense(self, visible: paddle.Tensor) -> MaskArguments:
        """
        {from_dense}

        Reads the matrix, and returns tensors in host memory. The lengths of rows and keys may differ.
        """
        dense = checked_tensor("visible", visible).cpu()
        arguments.check_matrix(dense, dense.dtype in (paddle.bool, paddle.uint8))
        return _arguments(ctypes_calls.from_dense(Paddle, dense))


masks = _Masks(_Builder)
