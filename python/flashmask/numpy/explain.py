# SPDX-License-Identifier: Apache-2.0
"""explain: what a call of attention would do, as text."""

from .._core import ctypes_calls, explanation
from .._core.docstrings import composed
from .arrays import Numpy, in_bshd
from .attention import read_options
from .mask import as_mask


@composed
def explain(
    q,
    k,
    v,
    mask=None,
    *,
    causal=False,
    window_size=None,
    q_offset=None,
    block_mask=None,
    softmax_scale=None,
    layout="bshd",
    backend="auto",
    threads=0,
    softcap=0.0,
    sink=None,
    q_pos=None,
    k_pos=None,
    dropout=0.0,
    dropout_state=None,
):
    """
    {explain}
    """

    def prepare():
        arrays = in_bshd(layout, q=q, k=k, v=v)
        call_mask = as_mask(mask, *arrays[:2], causal, window_size, q_offset, block_mask, q_pos, k_pos)
        options = read_options(softmax_scale, backend, threads, softcap, sink, dropout, dropout_state)
        options["sink"] = None if sink is None else Numpy.array(options["sink"])
        del options["dropout_state"]
        call = explanation.Call(*map(Numpy.array, arrays), deterministic=True, needs_gradient=True, **options)
        fm_mask = ctypes_calls.mask_of(Numpy, call_mask)
        return explanation.Described(call, call_mask, fm_mask, explanation.host_tiles(fm_mask))

    return explanation.explain(prepare)
