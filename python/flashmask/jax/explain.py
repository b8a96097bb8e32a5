# SPDX-License-Identifier: Apache-2.0
"""explain: what a call of dot_product_attention would do, as text."""

import inspect

import jax
import numpy as np

from .. import _explain, capi
from .._docs import composed
from .attention import dot_product_attention, read_call


@composed
def explain(query, key, value, mask=None, **arguments):
    """
    {explain}

    Takes the arguments of dot_product_attention. Arrays that are traced are refused: their contents are not there yet.
    """
    given = inspect.signature(dot_product_attention).bind(query, key, value, mask, **arguments)
    given.apply_defaults()
    del given.arguments["return_residual"]  # decides nothing

    def prepare():
        options, arrays, call_mask = read_call(**given.arguments)
        if any(isinstance(x, jax.core.Tracer) for x in (*arrays, call_mask.bounds, call_mask.block_mask)):
            raise TypeError("an array is traced; explain takes arrays whose contents are there")
        call = _explain.Call(
            *map(_described, arrays), needs_gradient=True, device=_device(arrays[0]), **options._asdict()
        )
        host = {name: _on_host(getattr(call_mask, name)) for name in ("bounds", "block_mask")}
        host_mask = capi.mask_of(_Parts(call_mask, **host), lambda name, x: capi.tensor(x))
        fm_mask = capi.mask_of(call_mask, lambda name, x: _described(x).described(name))
        return _explain.Described(call, call_mask, fm_mask, _explain.host_tiles(host_mask))

    return _explain.explain(prepare)


class _Parts:
    """A mask with other arrays."""

    def __init__(self, mask, bounds, block_mask):
        self.seqlen_q, self.seqlen_k, self.causal = mask.seqlen_q, mask.seqlen_k, mask.causal
        self.window, self.q_offset = mask.window, mask.q_offset
        self.bounds, self.block_mask = bounds, block_mask


def _on_host(x):
    return None if x is None else np.asarray(x)


def _described(x):
    device = _device(x)
    name = f"cuda:{device - capi.cuda_device()}" if device else "cpu"
    return _explain.Array(tuple(x.shape), x.dtype.name, name, None, x.unsafe_buffer_pointer())


def _device(x):
    """fm_options' of where an array is."""
    (device,) = x.devices()
    return capi.DEVICE_CPU if device.platform == "cpu" else capi.cuda_device(device.local_hardware_id)
