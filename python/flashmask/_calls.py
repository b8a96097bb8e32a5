# SPDX-License-Identifier: Apache-2.0
"""forward and backward through the C interface, for the fronts that call it through ctypes.

A front is a module or class with three functions: empty(shape, dtype, like), a new array of that dtype's name where
`like` is; array(x), its _explain.Array; and place(x), what fm_options says of where x is. q, k and v are BSHD views;
`mask` is any object with the attributes of Mask, or None. The library checks what it is given, so nothing here does.
"""

import ctypes as C

from . import capi


def forward(front, q, k, v, mask, **options):
    """(out, lse)."""
    out = front.empty((*q.shape[:3], v.shape[3]), front.array(q).dtype, q)
    lse_dtype = "float64" if front.array(q).dtype == "float64" else "float32"
    lse = front.empty((q.shape[0], q.shape[2], q.shape[1]), lse_dtype, q)
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    _run(front, "fm_forward", capi.ForwardArgs, arrays, mask, options)
    return out, lse


def backward(front, dout, dlse, q, k, v, out, lse, mask, **options):
    """(dq, dk, dv). dlse: None if no gradient reaches lse."""
    gradients = [front.empty(x.shape, front.array(x).dtype, x) for x in (q, k, v)]
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, **dict(zip(("dq", "dk", "dv"), gradients))}
    if dlse is not None:
        arrays["dlse"] = dlse
    _run(front, "fm_backward", capi.BackwardArgs, arrays, mask, options)
    return tuple(gradients)


def mask_of(front, mask):
    """fm_mask of a mask, whose arrays have to stay."""
    return capi.mask_of(mask, lambda name, x: front.array(x).described(name))


def _run(front, name, kind, arrays, mask, options):
    args = capi.make(kind, **{name: front.array(x).described(name) for name, x in arrays.items()})
    if mask is not None:
        args.mask = C.pointer(mask_of(front, mask))
    call_options = capi.options(**options, **front.place(arrays["q"]))
    library, size = capi.load(), C.c_size_t()
    capi.check(getattr(library, name + "_workspace")(C.byref(args), C.byref(call_options), C.byref(size)))
    workspace = front.empty((size.value,), "uint8", arrays["q"])
    capi.check(getattr(library, name)(C.byref(args), front.array(workspace).pointer, size, C.byref(call_options)))
