# SPDX-License-Identifier: Apache-2.0
"""The mask families, as flashmask.masks has them for torch."""

from .._core import ctypes_calls
from .._core.families import Builders
from .arrays import Numpy
from .mask import Mask


class _Builder(Numpy):
    """The frontend of the builders."""

    @staticmethod
    def build(family, form, vectors, numbers, device=None):
        if form.vectors == 0:
            return Mask(form.rows, form.keys, causal=form.causal, window=form.window, q_offset=form.q_offset), None
        built = ctypes_calls.build_mask(
            Numpy, family, vectors, numbers, family == "block_diffusion", form.has_positions
        )
        bounds, order, *positions = built
        keys = bounds.shape[2]
        places = dict.fromkeys(("q_pos", "k_pos"), *positions)
        return Mask(form.rows_of(keys), keys, bounds=bounds, causal=form.causal, window=form.window, **places), order


masks = Builders(_Builder)
