# SPDX-License-Identifier: Apache-2.0
"""dropout_mask, which attention weights a call with dropout keeps; and the states that say so."""

from typing import Any

import numpy as np

from .._core import arguments, ctypes_calls
from .._core.docstrings import composed
from .arrays import Array, Numpy, checked_array


@composed
def dropout_mask(state: Array, p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Array:
    """
    {dropout_mask}
    """
    lengths = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    shape = tuple(arguments.length(name, x) for name, x in lengths.items())
    return ctypes_calls.dropout_mask(Numpy, checked_state(state), arguments.share("p", p), shape)


def checked_state(x: Any) -> Array:
    is_right = checked_array("dropout_state", x).shape == (2,) and x.dtype in (np.int64, np.uint64)
    arguments.check_state("dropout_state", x, is_right, "int64 or uint64")
    return np.ascontiguousarray(x).view(np.int64)
