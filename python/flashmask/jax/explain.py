# SPDX-License-Identifier: Apache-2.0
"""explain: what a call of dot_product_attention would do, as text."""

from typing import Any

import jax
import numpy as np

from .._core import capi, explanation
from .._core.docstrings import composed
from .._core.signatures import takes_arguments_of
from .attention import dot_product_attention, read_call


@composed
@takes_arguments_of(dot_product_attention)
def explain(given: dict[str, Any]) -> str:
    """
    {explain}

    Takes the arguments of dot_product_attention. Arrays that are traced are refused: their contents are not there yet.
    """
    return explanation.explain(lambda: _described_call(**given))


def _described_call(return_residual: bool, **given: Any) -> explanation.Described:
    options, arrays, call_mask, features = read_call(**given)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((arrays, call_mask, features))):
        raise TypeError("an array is traced; explain takes arrays whose contents are there")
    tensors = {name: _described(x) for name, x in features._asdict().items() if x is not None}
    tensors.pop("dropout_state", None)
    fields = {**options._asdict(), "device": _device(arrays[0]), **tensors}
    q, k, v = map(_described, arrays)
    call = explanation.Call(q, k, v, needs_gradient=True, options=fields)
    host = jax.tree.map(np.asarray, call_mask)
    tiles = explanation.host_tiles(capi.mask_of(host, lambda name, x: capi.tensor(x)))
    fm_mask = capi.mask_of(call_mask, lambda name, x: _described(x).described(name))
    return explanation.Described(call, call_mask, fm_mask, tiles)


def _described(x: jax.Array) -> explanation.Array:
    device = _device(x)
    name = f"cuda:{device - capi.cuda_device()}" if device else "cpu"
    return explanation.Array(tuple(x.shape), x.dtype.name, name, None, x.unsafe_buffer_pointer())


def _device(x: jax.Array) -> int:
    """fm_options' of where an array is."""
    (device,) = x.devices()
    return capi.DEVICE_CPU if device.platform == "cpu" else capi.cuda_device(device.local_hardware_id)
