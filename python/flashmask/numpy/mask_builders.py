# SPDX-License-Identifier: Apache-2.0
"""The mask families, as flashmask.masks has them for torch."""

from typing import Any

from .._core import ctypes_calls
from .._core.families import Builders, Form
from .arrays import Array, Numpy
from .mask import Mask


class _Builder(Numpy):
    """The frontend of the builders."""

    @staticmethod
    def build(
        family: str, form: Form, vectors: dict[str, Any], numbers: dict[str, int], device: Any = None
    ) -> tuple[Mask, Array | None]:
        if form.vectors == 0:
            return Mask(**form.band()), None
        built = ctypes_calls.build_mask(Numpy, family, vectors, numbers, form.has_order, form.has_positions)
        bounds, order, *positions = built
        keys = bounds.shape[2]
        places = dict.fromkeys(("q_pos", "k_pos"), *positions)
        return Mask(form.rows_of(keys), keys, bounds=bounds, causal=form.causal, window=form.window, **places), order


masks = Builders[Mask, Array](_Builder)
