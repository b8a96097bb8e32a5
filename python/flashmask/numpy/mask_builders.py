# SPDX-License-Identifier: Apache-2.0
"""The mask families, as flashmask.masks has them for torch."""

from typing import Any

import numpy as np

from .._core import arguments, ctypes_calls
from .._core.docstrings import composed
from .._core.families import Builders, Form
from .arrays import Array, Numpy
from .mask import Mask


class _Builder(Numpy):
    """The frontend of the builders."""

    @staticmethod
    def build(
        family: str, form: Form, vectors: dict[str, Any], numbers: dict[str, int], device: Any = None
    ) -> tuple[Mask, Array | None]:
        if form.has_lists:
            fields, order = ctypes_calls.build_lists(Numpy, family, vectors, numbers, form.has_order)
            return Mask(**fields), order
        if form.vectors == 0:
            return Mask(**form.band()), None
        built = ctypes_calls.build_mask(Numpy, family, vectors, numbers, form.has_order, form.has_positions)
        bounds, order, *positions = built
        keys = bounds.shape[2]
        places = dict.fromkeys(("q_pos", "k_pos"), *positions)
        return Mask(form.rows_of(keys), keys, bounds=bounds, causal=form.causal, window=form.window, **places), order


class _Masks(Builders[Mask, Array]):
    @composed
    def from_dense(self, visible: Array) -> Mask:
        """
        {from_dense}
        """
        visible = np.asarray(visible)
        arguments.check_matrix(visible, visible.dtype in (np.bool_, np.uint8))
        return Mask(**ctypes_calls.from_dense(Numpy, visible))


masks = _Masks(_Builder)
