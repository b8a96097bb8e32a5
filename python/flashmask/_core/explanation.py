# SPDX-License-Identifier: Apache-2.0
"""Explains calls in every frontend: the words, and the search for the nearest call that some backend takes.

A frontend describes its arrays (Array), its call (Call) and its mask (Described). Nothing here depends on the library
that the arrays belong to.
"""

from __future__ import annotations

import ctypes as C
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from . import call_options, capi
from .errors import UnsupportedError

_VECTORS = {(True, 1): "LTS", (True, 2): "LTS, LTE", (False, 2): "LTS, UTE", (False, 4): "LTS, LTE, UTS, UTE"}
AnyArgs = TypeVar("AnyArgs", bound=C.Structure)
_NOWHERE = 1 << 12  # the address of memory that will not be touched


@dataclass(frozen=True)
class Array:
    """An array, or with `pointer` None its form alone. `dtype` and `device` are names, as "float32" and "cuda:0"."""

    shape: tuple[int, ...]
    dtype: str
    device: str = ""
    stride: tuple[int, ...] | None = None  # None: contiguous
    pointer: int | None = None

    def described(self, name: str) -> capi.Tensor:
        """fm_tensor of the argument `name`."""
        try:
            number = capi.dtype_of(self.dtype)
        except KeyError:
            raise ValueError(
                f"{name} is {self.dtype} {list(self.shape)}; the dtypes that the library knows are "
                f"{', '.join(capi.DTYPES)}, in this machine's byte order"
            ) from None
        stride = None if 0 in self.shape else self.stride  # strides of no elements mean nothing
        return capi.device_tensor(self.pointer or _NOWHERE, number, self.shape, stride)

    def padded(self, dim: int) -> Array:
        return replace(self, shape=(*self.shape[:3], dim), stride=None)


@dataclass(frozen=True)
class Call:
    """A call as far as it decides which backend takes it. q, k and v are Arrays, BSHD.

    options: as call_options.make takes them, but tensors are Arrays or None.
    """

    q: Array
    k: Array
    v: Array
    needs_gradient: bool
    options: dict[str, Any]

    def map(self, function: Callable[[Array], Array]) -> Call:
        """The call with function(x) in place of q, k and v."""
        return replace(self, q=function(self.q), k=function(self.k), v=function(self.v))

    def replace_options(self, **options: Any) -> Call:
        return replace(self, options={**self.options, **options})

    def fm_options(self) -> call_options.Options:
        return call_options.make(**call_options.described(self.options, Array.described))

    def arguments(self, kind: type[AnyArgs], **fields: Any) -> AnyArgs:
        """fm_forward_args or fm_backward_args. Outputs are described, not allocated: nothing writes them."""
        batch, rows, heads, _ = self.q.shape
        out = Array((batch, rows, heads, self.v.shape[3]), self.q.dtype)
        lse = Array((batch, heads, rows), "float64" if self.q.dtype == "float64" else "float32")
        arrays = {"q": self.q, "k": self.k, "v": self.v, "out": out, "lse": lse}
        if kind is capi.BackwardArgs:
            arrays["dout"] = out
            arrays.update({f"d{name}": Array(arrays[name].shape, arrays[name].dtype) for name in "qkv"})
        return capi.make(kind, **{name: x.described(name) for name, x in arrays.items()}, **fields)


class Tiles(NamedTuple):
    """How many tiles of 128 x 128 a mask has of each kind."""

    full: int
    partial: int
    empty: int


def host_tiles(fm_mask: capi.Mask) -> Tiles:
    """The Tiles of a mask in host memory."""
    sums = capi.make(capi.Statistics)
    capi.check(capi.load().fm_mask_statistics(C.byref(fm_mask), C.byref(sums)))
    return Tiles(sums.full_tiles, sums.partial_tiles, sums.tiles - sums.full_tiles - sums.partial_tiles)


class Described(NamedTuple):
    """A call with its mask."""

    call: Call
    mask: object  # with the attributes of Mask
    fm_mask: capi.Mask
    tiles: Tiles
    plan: tuple[int | None, int] = (None, 0)  # its address and bytes; none: the call makes one
    owner: object = None  # owns the plan's memory


def explain(prepare: Callable[[], Described]) -> str:
    """The text of prepare()'s Described, or of what it refuses."""
    try:
        return "\n".join(_lines(prepare()))
    except (UnsupportedError, ValueError, TypeError) as error:
        return f"refused   {error}"


def _lines(described: Described) -> Iterator[str]:
    call = described.call
    for name, x in (("query", call.q), ("key", call.k), ("value", call.v)):
        yield f"{name:9} {list(x.shape)} {x.dtype} on {x.device}"
    yield f"mask      {describe(described.mask)}"
    full, partial, empty = described.tiles
    yield f"tiles     {full + partial + empty} of 128x128: {full} full, {partial} partial, {empty} skipped"
    forward = refusal(call, capi.ForwardArgs)
    if forward:
        yield from _refused("forward", call, capi.ForwardArgs, forward)
        return
    yield from _taken("forward", _explanation(described, capi.ForwardArgs))
    if not call.needs_gradient:
        yield "backward  not needed: no tensor requires a gradient"
    elif backward := refusal(call, capi.BackwardArgs):
        yield from _refused("backward", call, capi.BackwardArgs, backward)
    else:
        yield from _taken("backward", _explanation(described, capi.BackwardArgs))
        if call.options["deterministic"]:
            yield f"{'':9} the same bits in every run"


def _taken(direction: str, lines: Iterable[str]) -> Iterator[str]:
    for line, name in zip(lines, itertools.chain([direction], itertools.repeat(""))):
        yield f"{name:9} {line}"


def describe(mask: Any) -> str:
    """The parts of a mask in words."""
    parts = ["causal"] if mask.causal else []
    if mask.window is not None:
        left, right = ("any" if side == -1 else side for side in mask.window)
        parts.append(f"window of {left} keys before and {right} after the row's own")
    if mask.bounds is not None:
        batch, heads, _, vectors = mask.bounds.shape
        parts.append(f"{_VECTORS[mask.causal, vectors]} of each key, batch {batch}, heads {heads}")
    if mask.column_ptr is not None:
        batch, heads, ends = mask.column_ptr.shape
        count = mask.intervals.shape[0]
        size = 4 * batch * heads * ends + 8 * count
        parts.append(f"lists of {count} hidden intervals, {size} bytes, batch {batch}, heads {heads}")
    if mask.block_mask is not None:
        parts.append(f"block mask {list(mask.block_mask.shape)}")
    q_pos = getattr(mask, "q_pos", None)  # some frontends lack it
    if q_pos is not None:
        parts.append(f"q_pos {list(q_pos.shape)} and k_pos {list(mask.k_pos.shape)} in place of rows and keys")
    elif mask.causal or mask.window is not None:
        parts.append(f"row 0 at key {mask.seqlen_k - mask.seqlen_q if mask.q_offset is None else mask.q_offset}")
    return "; ".join(parts) or "none: every row sees every key"


# --- The library's word ---------------------------------------------------------------------------


def _head_dims() -> list[int]:
    """Head dims that the library has GPU kernels for, with v as wide as k."""
    status, text = capi.text_of(capi.load().fm_kernels_json)
    capi.check(status)
    found = {
        (kernel["head_dim"], kernel["head_dim_v"]) for kernel in json.loads(text)["kernels"] if kernel["op"] != "plan"
    }
    return sorted(dim for dim, dim_v in found if dim == dim_v)


def _explanation(described: Described, kind: type[C.Structure]) -> list[str]:
    """Lines of fm_explain or fm_explain_backward for a call that a backend takes."""
    library = capi.load()
    explain_call = library.fm_explain if kind is capi.ForwardArgs else library.fm_explain_backward
    plan, plan_bytes = described.plan
    arguments = described.call.arguments(kind, mask=C.pointer(described.fm_mask), plan=plan, plan_bytes=plan_bytes)
    status, text = capi.text_of(explain_call, C.byref(arguments), C.byref(described.call.fm_options()))
    capi.check(status)
    return text.splitlines()


def refusal(call: Call, kind: type[C.Structure]) -> str:
    """Why no backend takes a call of these shapes, or "".

    The mask is left out: its contents would be read, and it decides nothing here.
    Raises ValueError if no backend ever could.
    """
    library, size = capi.load(), C.c_size_t()
    query = library.fm_forward_workspace if kind is capi.ForwardArgs else library.fm_backward_workspace
    status = query(C.byref(call.arguments(kind)), C.byref(call.fm_options()), C.byref(size))
    if status in (capi.UNSUPPORTED, capi.NO_DEVICE):
        return library.fm_last_error().decode()
    capi.check(status)
    return ""


# --- The nearest call that some backend takes ---------------------------------------------------------


def _padded_to(dim: int) -> Callable[[Call], Call]:
    return lambda call: call.map(lambda x: x.padded(dim))


def _alternatives(call: Call) -> Iterator[tuple[str, Callable[[Call], Call]]]:
    """(what to do, the call after it), the smallest changes first."""
    if call.options["backend"] != "auto":
        yield "leave backend at 'auto'", lambda c: c.replace_options(backend="auto")
    if call.q.dtype == "float64":
        yield "cast query, key and value to float32", lambda c: c.map(lambda x: replace(x, dtype="float32"))
    if call.q.dtype not in ("bfloat16", "float16"):
        yield "cast query, key and value to bfloat16", lambda c: c.map(lambda x: replace(x, dtype="bfloat16"))
    longest = max(call.q.shape[3], call.v.shape[3])
    # The kernels take multiples of 8 between their own, too.
    for dim in sorted({-(-longest // 8) * 8, *_head_dims()}):
        if dim >= longest and {call.q.shape[3], call.v.shape[3]} != {dim}:
            yield (
                f"pad head_dim with zeros to {dim}, "
                f"pass softmax_scale={call.q.shape[3]}**-0.5 and cut the result to head_dim_v",
                _padded_to(dim),
            )
    if call.options.get("split_size"):
        yield "leave out split_size", lambda c: c.replace_options(split_size=0)
    yield "make query, key and value contiguous", lambda c: c.map(lambda x: replace(x, stride=None))
    if call.options.get("device", capi.DEVICE_CPU) != capi.DEVICE_CPU:
        yield "move everything to the CPU", lambda c: c.replace_options(device=capi.DEVICE_CPU, stream=None)
    yield "pass backend='reference' (slow)", lambda c: c.replace_options(backend="reference")


def _refused(direction: str, call: Call, kind: type[C.Structure], reason: str) -> Iterator[str]:
    yield f"{direction:9} refused: {reason}"
    shapes = call.map(lambda x: replace(x, pointer=None))
    changes = list(_alternatives(shapes))
    for count in (1, 2, 3):
        for chosen in itertools.combinations(changes, count):
            changed = shapes
            for _, change in chosen:
                changed = change(changed)
            if not refusal(changed, kind):
                yield f"nearest   {'; '.join(what for what, _ in chosen)}"
                return
    yield "nearest   none"
