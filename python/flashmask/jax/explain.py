# SPDX-License-Identifier: Apache-2.0
"""explain: what a call of dot_product_attention would do, as text."""

import numpy as np

from .. import _explain, capi
from .._docs import composed
from .attention import Call


@composed
def explain(query, key, value, mask=None, *, return_residual=False, **arguments):
    """
    {explain}

    The arguments are those of dot_product_attention; none may be traced.
    """

    def prepare():
        call = Call.read(query, key, value, mask, **arguments)
        (device,) = call.q.devices()
        place, number = "cpu", capi.DEVICE_CPU
        if device.platform == "gpu":
            place, number = f"cuda:{device.local_hardware_id}", capi.cuda_device(device.local_hardware_id)
        arrays = (_explain.Array(x.shape, x.dtype.name, place) for x in call[:3])
        described = _explain.Call(*arrays, needs_gradient=True, device=number, **call.options._asdict())
        kept = [np.ascontiguousarray(x) for x in (call.mask.bounds, call.mask.block_mask) if x is not None]
        host = iter(kept)
        fm_mask = capi.mask_of(call.mask, lambda name, _: capi.tensor(next(host)))
        return _explain.Described(described, call.mask, fm_mask, _explain.host_tiles(fm_mask), owner=kept)

    return _explain.explain(prepare)
