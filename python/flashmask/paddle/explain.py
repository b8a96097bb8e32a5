# SPDX-License-Identifier: Apache-2.0
"""explain: what a call of flashmask_attention would do, as text."""

from .._core import ctypes_calls, explanation
from .._core.docstrings import composed
from .attention import read_call
from .dropout import read_state
from .tensors import Paddle


@composed
def explain(
    query,
    key,
    value,
    startend_row_indices=None,
    *,
    dropout=0.0,
    causal=False,
    window_size=None,
    return_softmax_lse=False,
    return_seed_offset=False,
    fixed_seed_offset=None,
    rng_name="",
    training=True,
    name=None,
    softmax_scale=None,
    block_mask=None,
):
    """
    {explain}
    """

    def prepare():
        band = causal, window_size
        call = read_call(
            query, key, value, startend_row_indices, *band, softmax_scale, block_mask, dropout, training, name
        )
        read_state(query, fixed_seed_offset, rng_name)
        described = explanation.Call(
            *map(Paddle.array, (query, key, value)),
            backend="auto",
            needs_gradient=not all(x.stop_gradient for x in (query, key, value)),
            **call.options,
            **Paddle.place(query),
        )
        fm_mask = ctypes_calls.mask_of(Paddle, call.mask)
        on_host = call.mask.on_host()
        return explanation.Described(
            described, call.mask, fm_mask, explanation.host_tiles(ctypes_calls.mask_of(Paddle, on_host))
        )

    return explanation.explain(prepare)
