# SPDX-License-Identifier: Apache-2.0
"""explain: what a call of flashmask_attention would do, as text."""

from typing import Any

from .._core import ctypes_calls, explanation
from .._core.docstrings import composed
from .._core.signatures import takes_arguments_of
from .attention import flashmask_attention, read_call
from .dropout import read_state
from .tensors import Paddle


@composed
@takes_arguments_of(flashmask_attention)
def explain(given: dict[str, Any]) -> str:
    """
    {explain}
    """
    return explanation.explain(lambda: _described(**given))


def _described(
    query: Any,
    key: Any,
    value: Any,
    fixed_seed_offset: Any,
    rng_name: Any,
    return_softmax_lse: bool,
    return_seed_offset: bool,
    **others: Any,
) -> explanation.Described:
    call = read_call(query, key, value, **others)
    read_state(query, fixed_seed_offset, rng_name)
    described = explanation.Call(
        Paddle.array(query),
        Paddle.array(key),
        Paddle.array(value),
        needs_gradient=not all(x.stop_gradient for x in (query, key, value)),
        options={"backend": "auto", **call.options, **Paddle.place(query)},
    )
    fm_mask = ctypes_calls.mask_of(Paddle, call.mask)
    tiles = explanation.host_tiles(ctypes_calls.mask_of(Paddle, call.mask.on_host()))
    return explanation.Described(described, call.mask, fm_mask, tiles)
