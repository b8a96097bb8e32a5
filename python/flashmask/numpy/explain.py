# SPDX-License-Identifier: Apache-2.0
"""explain: what a call of attention would do, as text."""

from typing import Any

from .._core import ctypes_calls, explanation
from .._core.annotations import Layout, Window
from .._core.call_options import TENSORS
from .._core.docstrings import composed
from .._core.signatures import takes_arguments_of
from .arrays import Array, Numpy, in_bshd
from .attention import attention, read_options
from .mask import as_mask


@composed
@takes_arguments_of(attention)
def explain(given: dict[str, Any]) -> str:
    """
    {explain}
    """
    return explanation.explain(lambda: _described(**given))


def _described(
    q: Array,
    k: Array,
    v: Array,
    mask: Any,
    causal: bool,
    window_size: Window,
    q_offset: int | None,
    block_mask: Any,
    layout: Layout,
    q_pos: Any,
    k_pos: Any,
    **options: Any,
) -> explanation.Described:
    q, k, v = in_bshd(layout, q=q, k=k, v=v)
    call_mask = as_mask(mask, q, k, causal, window_size, q_offset, block_mask, q_pos, k_pos)
    options = {**read_options(**options), "deterministic": True}
    del options["dropout_state"]
    options |= {x.name: Numpy.array(options[x.name]) for x in TENSORS if options.get(x.name) is not None}
    call = explanation.Call(Numpy.array(q), Numpy.array(k), Numpy.array(v), needs_gradient=True, options=options)
    fm_mask = ctypes_calls.mask_of(Numpy, call_mask)
    return explanation.Described(call, call_mask, fm_mask, explanation.host_tiles(fm_mask))
