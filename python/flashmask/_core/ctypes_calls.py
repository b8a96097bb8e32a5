# SPDX-License-Identifier: Apache-2.0
"""forward, backward and builders of masks through the C interface, for the frontends that call it through ctypes.

q, k and v are BSHD views; `mask` is any object with the attributes of Mask, or None. The library checks its arguments,
so nothing here does.
"""

import ctypes as C
import math
from collections.abc import Callable
from typing import Any, Protocol

from . import call_options, capi, explanation


class HostFrontend(Protocol):
    """A frontend's arrays in host memory."""

    def empty_on_host(self, shape: Any, dtype: Any) -> Any:
        """A new array of a dtype's name."""

    def array(self, x: Any) -> explanation.Array:
        """Its description."""


class Frontend(HostFrontend, Protocol):
    """A frontend's arrays wherever calls run."""

    def empty(self, shape: Any, dtype: str, like: Any) -> Any:
        """A new array of a dtype's name where `like` is."""

    def place(self, x: Any) -> dict[str, Any]:
        """The fields of fm_options that say where x is."""


def forward(frontend: Frontend, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> tuple[Any, Any]:
    """(out, lse)."""
    out = frontend.empty((*q.shape[:3], v.shape[3]), frontend.array(q).dtype, q)
    lse_dtype = "float64" if frontend.array(q).dtype == "float64" else "float32"
    lse = frontend.empty((q.shape[0], q.shape[2], q.shape[1]), lse_dtype, q)
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    _run(frontend, "fm_forward", capi.ForwardArgs, arrays, mask, options)
    return out, lse


def backward(
    frontend: Frontend, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, mask: Any, **options: Any
) -> tuple[Any, ...]:
    """(dq, dk, dv), and dsink if the options have a sink. dlse: None if no gradient reaches lse."""
    inputs = {"dq": q, "dk": k, "dv": v}
    if options.get("sink") is not None:
        inputs["dsink"] = options["sink"]
    gradients = {name: frontend.empty(x.shape, frontend.array(x).dtype, x) for name, x in inputs.items()}
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, **gradients}
    if dlse is not None:
        arrays["dlse"] = dlse
    _run(frontend, "fm_backward", capi.BackwardArgs, arrays, mask, options)
    return tuple(gradients.values())


def dropout_mask(frontend: HostFrontend, state: Any, p: float, shape: tuple[int, ...]) -> Any:
    """bool of `shape` [batch, heads, seqlen_q, seqlen_k] in host memory. state: int64 or uint64 [2] there."""
    kept = frontend.empty_on_host(shape, "bool")
    described = frontend.array(kept).described("kept")
    capi.check(capi.load().fm_dropout_mask(p, frontend.array(state).pointer, C.byref(described)))
    return kept


def dropout_state(frontend: HostFrontend, state: Any) -> Any:
    """fm_options' pointer to it."""
    return C.cast(frontend.array(state).pointer or 0, C.POINTER(C.c_uint64))


def mask_of(frontend: HostFrontend, mask: Any) -> capi.Mask:
    """fm_mask of a mask, whose arrays have to stay."""
    return capi.mask_of(mask, lambda name, x: frontend.array(x).described(name))


def build_mask(
    frontend: HostFrontend,
    family: str,
    vectors: dict[str, Any],
    numbers: dict[str, int],
    has_order: bool,
    has_positions: bool = False,
) -> tuple[Any, ...]:
    """(bounds, order) of the mask of a family in host memory, and with positions (bounds, order, positions).

    order is None if there is none. Positions are those of rows and of keys.
    """
    empty = frontend.empty_on_host
    given = {name: frontend.array(x).described(name) for name, x in vectors.items()}
    fm_mask = capi.make(capi.Mask)
    parameters = mask_parameters(given, numbers)
    capi.check(capi.load().fm_mask_shape(family.encode(), C.byref(parameters), C.byref(fm_mask), None))
    shape = tuple(fm_mask.bounds.shape[:4])
    bounds, order = empty(shape, "int32"), empty(shape[:3], "int64") if has_order else None
    if has_order:
        parameters = mask_parameters({**given, "order_out": frontend.array(order).described("order_out")}, numbers)
    fm_mask.bounds.data = frontend.array(bounds).pointer
    positions = empty(tuple(fm_mask.q_pos.shape[:2]), "int32") if has_positions else None
    if has_positions:
        fm_mask.q_pos.data = fm_mask.k_pos.data = frontend.array(positions).pointer
    capi.check(capi.load().fm_mask_build(family.encode(), C.byref(parameters), C.byref(fm_mask), None))
    return (bounds, order, positions) if has_positions else (bounds, order)


class MaskSpace:
    """A mask that the library writes, and the arrays in host memory that it brings.

    shape: batch, heads and seqlen_k. arrays: for other tensors that the result may have, by their fields; the lists of
    columns that need more than two intervals are added.
    """

    def __init__(self, frontend: HostFrontend, shape: Any, arrays: dict[str, Any] | None = None) -> None:
        self._frontend, self._shape, self._arrays = frontend, tuple(shape), dict(arrays or {})
        self._bounds = frontend.empty_on_host((*self._shape, 4), "int32")
        self._describe()

    def _describe(self) -> None:
        given = {"bounds": self._bounds, **self._arrays}
        self.struct: Any = capi.make(
            capi.Mask, **{name: self._frontend.array(x).described(name) for name, x in given.items()}
        )

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        self._arrays[name] = self._frontend.empty_on_host(shape, "int32")
        self._describe()

    def write(self, call: Callable[[Any], int]) -> None:
        """Calls call(struct), again with space for interval lists if the mask turns out to need them."""
        status = call(self.struct)
        if status == capi.UNREPRESENTABLE and "column_ptr" not in self._arrays:
            self.add_column_ptr()
            status = call(self.struct)
        if status == capi.OK and self.struct.intervals.dtype and not self.struct.intervals.data:
            self._add("intervals", tuple(self.struct.intervals.shape[:2]))
            status = call(self.struct)
        capi.check(status)

    def add_column_ptr(self) -> None:
        batch, heads, seqlen_k = self._shape
        self._add("column_ptr", (batch, heads, seqlen_k + 1))

    def bounds(self) -> Any:
        """The written vectors, a part of a larger array; None without vectors."""
        if not self.struct.bounds.dtype:
            return None
        shape = (*self._shape, self.struct.bounds.shape[3])
        return self._bounds.reshape([-1])[: math.prod(shape)].reshape(shape)

    def fields(self) -> dict[str, Any]:
        """The arguments of the Mask that was written."""
        mask = self.struct
        return {
            **{name: x for name, x in self._arrays.items() if getattr(mask, name).dtype},
            "seqlen_q": mask.seqlen_q,
            "seqlen_k": mask.seqlen_k,
            "bounds": self.bounds(),
            "causal": bool(mask.flags & capi.CAUSAL),
            "window": (mask.window_left, mask.window_right) if mask.flags & capi.HAS_WINDOW else None,
            "q_offset": mask.q_offset if mask.flags & capi.HAS_Q_OFFSET else None,
        }


def build_lists(
    frontend: HostFrontend, family: str, vectors: dict[str, Any], numbers: dict[str, int], has_order: bool
) -> tuple[dict[str, Any], Any]:
    """(the arguments of the Mask, order) of a family whose form has lists, in host memory.

    The mask has vectors if they say it, otherwise interval lists. order: as of build_mask.
    """
    given = {name: frontend.array(x).described(name) for name, x in vectors.items()}
    shaped = capi.make(capi.Mask)
    parameters = mask_parameters(given, numbers)
    capi.check(capi.load().fm_mask_shape(family.encode(), C.byref(parameters), C.byref(shaped), None))
    space = MaskSpace(frontend, shaped.bounds.shape[:3])
    space.add_column_ptr()
    order = frontend.empty_on_host(tuple(shaped.bounds.shape[:3]), "int64") if has_order else None
    if has_order:
        parameters = mask_parameters({**given, "order_out": frontend.array(order).described("order_out")}, numbers)
    space.write(lambda struct: capi.load().fm_mask_build(family.encode(), C.byref(parameters), C.byref(struct), None))
    return space.fields(), order


def from_dense(frontend: HostFrontend, visible: Any) -> dict[str, Any]:
    """The arguments of the Mask of bools or uint8 in host memory, [(batch, heads,) seqlen_q, seqlen_k]."""
    visible = visible if visible.ndim == 4 else visible[None, None]
    described = frontend.array(visible).described("visible")
    space = MaskSpace(frontend, (visible.shape[0], visible.shape[1], visible.shape[3]))
    space.write(lambda struct: capi.load().fm_mask_from_dense(C.byref(described), C.byref(struct)))
    return space.fields()


def to_startend(frontend: HostFrontend, mask: Any) -> tuple[Any, bool]:
    """(startend_row_indices, causal) of a mask in host memory: the smallest of the four forms that says the same."""
    fm_mask = mask_of(frontend, mask)
    batch, heads = fm_mask.bounds.shape[:2] if fm_mask.bounds.ndim else (1, 1)
    out = MaskSpace(frontend, (batch, heads, mask.seqlen_k))
    capi.check(capi.load().fm_mask_to_startend(C.byref(fm_mask), C.byref(out.struct)))
    return out.bounds(), bool(out.struct.flags & capi.CAUSAL)


def mask_parameters(vectors: dict[str, capi.Tensor], numbers: dict[str, int]) -> capi.MaskParameters:
    """fm_mask_parameters: vectors are fm_tensor by name, numbers ints."""
    items = [capi.MaskParameter(name=name.encode(), vector=x) for name, x in vectors.items()]
    items += [capi.MaskParameter(name=name.encode(), number=x) for name, x in numbers.items()]
    return capi.make(capi.MaskParameters, count=len(items), items=(capi.MaskParameter * len(items))(*items))


def _run(
    frontend: Frontend, name: str, kind: type[C.Structure], arrays: dict[str, Any], mask: Any, options: dict[str, Any]
) -> None:
    args: Any = capi.make(kind, **{name: frontend.array(x).described(name) for name, x in arrays.items()})
    if mask is not None:
        args.mask = C.pointer(mask_of(frontend, mask))
    run(frontend, name, args, arrays["q"], options)


def run(frontend: Frontend, name: str, args: Any, like: Any, options: dict[str, Any]) -> None:
    """Calls a function of the library that computes where `like` is, in workspace that it asks for.

    args: its struct, whose arrays have to stay. `options` as call_options.make takes them, but tensors and
    `dropout_state` are arrays or None.
    """
    options = call_options.described(options, lambda x, name: frontend.array(x).described(name))
    if (state := options.pop("dropout_state", None)) is not None:
        options["dropout_state"] = dropout_state(frontend, state)
    request = _Request(frontend, like)
    context = id(request)
    fm_options = call_options.make(**options, **frontend.place(like), allocate=_ALLOCATE, allocate_context=context)
    _requests[context] = request
    try:
        status = getattr(capi.load(), name)(C.byref(args), None, 0, C.byref(fm_options))
    finally:
        del _requests[context]
    if request.error is not None:
        raise request.error
    capi.check(status)


class _Request:
    """A call's request for its workspace, which it makes when it knows the size."""

    def __init__(self, frontend: Frontend, like: Any) -> None:
        self.frontend, self.like = frontend, like
        self.memory: Any = None
        self.error: Exception | None = None


_requests: dict[int, _Request] = {}  # key: fm_options' allocate_context


def _allocate(context: int, size: int) -> int | None:
    request = _requests[context]
    try:
        request.memory = request.frontend.empty((size,), "uint8", request.like)
        return request.frontend.array(request.memory).pointer
    except Exception as error:  # exceptions cannot pass through C
        request.error = error
        return None


_callback = capi.Allocate(_allocate)
_ALLOCATE = C.cast(_callback, C.c_void_p)  # once: each would stay until the garbage collector runs
