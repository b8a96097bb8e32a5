# SPDX-License-Identifier: Apache-2.0
"""Mask: an attention mask in O(seqlen_k) memory, as numpy arrays."""

from __future__ import annotations

import ctypes as C
import dataclasses
from typing import Any

import numpy as np

from .._core import arguments, capi, ctypes_calls, explanation
from .._core.annotations import Window
from .._core.docstrings import composed
from .arrays import Array, Numpy


@composed
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """
    {mask}

    {positions}

    {interval_lists}

    bounds, positions and lists of int32 are borrowed, other bounds converted; a block mask is borrowed.

    Raises TypeError or ValueError if an argument is wrong.
    """

    seqlen_q: int
    seqlen_k: int
    _: dataclasses.KW_ONLY
    bounds: Array | None = None
    causal: bool = False
    window: Window = None
    q_offset: int | None = None
    block_mask: Array | None = None
    q_pos: Array | None = None
    k_pos: Array | None = None
    column_ptr: Array | None = None
    intervals: Array | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "seqlen_q": arguments.length("seqlen_q", self.seqlen_q),
            "seqlen_k": arguments.length("seqlen_k", self.seqlen_k),
            "causal": arguments.flag("causal", self.causal),
            "window": arguments.window("window", self.window),
            "q_offset": arguments.q_offset(self.q_offset),
        }
        if self.bounds is not None:
            checked["bounds"] = _int32("startend_row_indices", self.bounds, checked["seqlen_q"])
        if self.block_mask is not None:
            checked["block_mask"] = np.asarray(self.block_mask)
        for name in ("q_pos", "k_pos", "column_ptr", "intervals"):
            if (values := getattr(self, name)) is not None:
                checked[name] = np.asarray(values)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        capi.check(capi.load().fm_plan_bytes(C.byref(ctypes_calls.mask_of(Numpy, self)), C.byref(C.c_size_t())))

    @property
    def batch(self) -> int:
        """Batch entries of the mask: 1 (for all of the call's), or as many as the call has."""
        return self._wider(0, "bounds", "block_mask", "q_pos", "k_pos", "column_ptr")

    @property
    def heads(self) -> int:
        """Heads of the mask: 1 (for all of the call's), heads_kv or heads_q; the larger if its arrays have both."""
        return self._wider(1, "bounds", "block_mask", "column_ptr")

    def _wider(self, dim: int, *names: str) -> int:
        return max((x.shape[dim] for name in names if (x := getattr(self, name)) is not None), default=1)

    def replace(self, **changes: Any) -> Mask:
        """Returns a copy of the mask with some of the constructor's arguments replaced."""
        return dataclasses.replace(self, **changes)

    def to_dense(self) -> Array:
        """A bool array [batch, heads, seqlen_q, seqlen_k], True where row i sees key j."""
        visible = np.empty((self.batch, self.heads, self.seqlen_q, self.seqlen_k), np.bool_)
        fm_mask = ctypes_calls.mask_of(Numpy, self)
        capi.check(capi.load().fm_mask_to_dense(C.byref(fm_mask), C.byref(capi.tensor(visible))))
        return visible

    def __repr__(self) -> str:
        return f"Mask({self.seqlen_q}, {self.seqlen_k}: {explanation.describe(self)})"


def as_mask(
    mask: Any,
    q: Array,
    k: Array,
    causal: bool,
    window_size: Window,
    q_offset: int | None,
    block_mask: Any,
    q_pos: Any,
    k_pos: Any,
) -> Mask:
    """The Mask that the arguments mean."""
    if not isinstance(mask, Mask):
        window = arguments.window("window_size", window_size)
        band = {"causal": causal, "window": window, "q_offset": q_offset, "q_pos": q_pos, "k_pos": k_pos}
        return Mask(q.shape[1], k.shape[1], bounds=mask, block_mask=block_mask, **band)
    others = {"window_size": window_size, "q_offset": q_offset, "block_mask": block_mask}
    arguments.refuse_beside_mask(causal=causal or None, **others, q_pos=q_pos, k_pos=k_pos)
    arguments.check_mask_lengths(mask, q.shape[1], k.shape[1])
    return mask


def _int32(name: str, values: Any, seqlen_q: int) -> Array:
    """`values` as int32: those that need more bits are clamped to [0, seqlen_q] first, as they would be anyway."""
    values = np.asarray(values)
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name} is {values.dtype} {list(values.shape)}; it must be integers, not a dense mask")
    return values if values.dtype == np.int32 else values.clip(0, seqlen_q).astype(np.int32)
