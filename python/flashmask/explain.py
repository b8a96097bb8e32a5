# SPDX-License-Identifier: Apache-2.0
"""explain: what a call of flashmask_attention would do, as text."""

import ctypes as C
import itertools
import json
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from . import capi, ops
from ._library import library_path
from .attention import call_mask, refuse_features
from .errors import UnsupportedError

__all__ = ["explain"]

_VECTORS = {(True, 1): "LTS", (True, 2): "LTS, LTE", (False, 2): "LTS, UTE", (False, 4): "LTS, LTE, UTS, UTE"}


def explain(
    query,
    key,
    value,
    startend_row_indices=None,
    *,
    causal=False,
    window_size=None,
    q_offset=None,
    softmax_scale=None,
    block_mask=None,
    deterministic=None,
    layout="bshd",
    dropout=0.0,
    return_softmax_lse=False,
    backend="auto",
    max_ctas=0,
    softcap=0.0,
    sink=None,
    q_pos=None,
    k_pos=None,
):
    """What flashmask_attention would do with these arguments, as text; attention itself is not run.

    Says what the mask is made of, how many tiles of 128 x 128 are full, partial and skipped, which backend and
    configuration takes the call, forward and backward, and, where none does, why, and the least that would have to
    change. A call that would raise is not an error here: the text says why.

    Makes the mask's plan, if it has none yet. On a GPU it waits for the mask's statistics, so it is a tool to look
    with, not a part of a training loop.
    """
    try:
        refuse_features(dropout, softcap, sink, q_pos, k_pos)
        mask = call_mask(query, key, value, startend_row_indices, causal, window_size, q_offset, block_mask, layout)
        if mask.device not in (None, query.device):
            raise ValueError(
                f"the mask is on {mask.device} and query on {query.device}; move it: mask.to(query.device)"
            )
        softmax_scale, deterministic, max_ctas = ops.read_options(softmax_scale, deterministic, backend, max_ctas)
        tensors = ops.autocast(query, key, value)
        call = _Call(
            *(x.transpose(1, 2) if layout == "bhsd" else x for x in tensors),
            query.device,
            backend,
            _is_deterministic(deterministic),
            softmax_scale,
            max_ctas,
        )
        return "\n".join(_lines(call, mask))
    except (UnsupportedError, ValueError, TypeError) as error:
        return f"refused   {error}"


def _is_deterministic(deterministic):
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


@dataclass(frozen=True)
class _Call:
    """What decides which backend takes a call. q, k and v are BSHD.

    Where only shapes count they may be meta tensors, whatever `device` says.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    device: torch.device
    backend: str
    deterministic: bool
    softmax_scale: float | None
    max_ctas: int

    def map(self, function):
        """The call with function(x) in place of q, k and v."""
        return replace(self, q=function(self.q), k=function(self.k), v=function(self.v))

    def options(self):
        flags = (capi.DETERMINISTIC if self.deterministic else 0) | (
            0 if self.softmax_scale is None else capi.HAS_SCALE
        )
        device = (
            0
            if self.device.type == "cpu"
            else capi.cuda_device(torch.cuda.current_device() if self.device.index is None else self.device.index)
        )
        threads = torch.get_num_threads() if self.device.type == "cpu" else 0
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None
        return _struct(
            capi.Options,
            flags=flags,
            softmax_scale=self.softmax_scale or 0.0,
            backend=self.backend.encode(),
            threads=threads,
            device=device,
            stream=stream,
            max_ctas=self.max_ctas,
        )

    def arguments(self, struct, **fields):
        """fm_forward_args or fm_backward_args. Outputs are described, not allocated: nothing writes them."""
        batch, rows, heads, _ = self.q.shape
        lse_dtype = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        out = _described((batch, rows, heads, self.v.shape[3]), self.q.dtype)
        q, k, v = (
            _described(x.shape, x.dtype, x.stride(), None if x.is_meta else x.data_ptr())
            for x in (self.q, self.k, self.v)
        )
        fields.update(q=q, k=k, v=v, out=out, lse=_described((batch, heads, rows), lse_dtype))
        if struct is capi.BackwardArgs:
            fields["dout"] = out
            fields.update(
                {f"d{name}": _described(x.shape, x.dtype) for name, x in (("q", self.q), ("k", self.k), ("v", self.v))}
            )
        return _struct(struct, **fields)


def _lines(call, mask):
    for name, x in (("query", call.q), ("key", call.k), ("value", call.v)):
        yield f"{name:9} {list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"
    yield f"mask      {_describe(mask)}"
    stats = mask.stats()
    yield (
        f"tiles     {stats.tiles} of 128x128: "
        f"{stats.full_tiles} full, {stats.partial_tiles} partial, {stats.empty_tiles} skipped"
    )
    refusal = _refusal(call, capi.ForwardArgs)
    if refusal:
        yield from _refused("forward", call, capi.ForwardArgs, refusal)
        return
    yield from _taken("forward", _explanation(call, mask, capi.ForwardArgs))
    if not any(x.requires_grad for x in (call.q, call.k, call.v)):
        yield "backward  not needed: neither query nor key nor value requires a gradient"
    elif refusal := _refusal(call, capi.BackwardArgs):
        yield from _refused("backward", call, capi.BackwardArgs, refusal)
    else:
        yield from _taken("backward", _explanation(call, mask, capi.BackwardArgs))
        if call.deterministic:
            yield f"{'':9} the same bits in every run"


def _taken(direction, lines):
    for line, name in zip(lines, itertools.chain([direction], itertools.repeat(""))):
        yield f"{name:9} {line}"


def _describe(mask):
    """The parts of a mask in words."""
    parts = ["causal"] if mask.causal else []
    if mask.window is not None:
        left, right = ("any" if side == -1 else side for side in mask.window)
        parts.append(f"window of {left} keys before and {right} after the row's own")
    if mask.bounds is not None:
        batch, heads, _, vectors = mask.bounds.shape
        parts.append(f"{_VECTORS[mask.causal, vectors]} of each key, batch {batch}, heads {heads}")
    if mask.block_mask is not None:
        parts.append(f"block mask {list(mask.block_mask.shape)}")
    if mask.causal or mask.window is not None:
        parts.append(f"row 0 at key {mask.seqlen_k - mask.seqlen_q if mask.q_offset is None else mask.q_offset}")
    return "; ".join(parts) or "none: every row sees every key"


# --- The library's word ---------------------------------------------------------------------------


def _library():
    # The operators need the library, so a look into theirs finds the functions of the one that is in use.
    library = C.CDLL(str(library_path("FLASHMASK_TORCH_LIBRARY", "libflashmask_torch.so")))
    library.fm_last_error.restype = C.c_char_p
    return library


def _checked(library, status):
    if status != capi.OK:
        raise ValueError(library.fm_last_error().decode())


def _head_dims():
    """Those that the library has GPU kernels of, with v as wide as k."""
    library = _library()
    status, text = capi.text_of(library.fm_kernels_json)
    _checked(library, status)
    found = {
        (kernel["head_dim"], kernel["head_dim_v"]) for kernel in json.loads(text)["kernels"] if kernel["op"] != "plan"
    }
    return sorted(dim for dim, dim_v in found if dim == dim_v)


def _explanation(call, mask, struct):
    """Lines of fm_explain or fm_explain_backward for a call that a backend takes."""
    library = _library()
    explain_call = library.fm_explain if struct is capi.ForwardArgs else library.fm_explain_backward
    plan = mask.plan(call.device)
    mask_struct = _mask_struct(mask)
    arguments = call.arguments(struct, mask=C.pointer(mask_struct), plan=plan.data_ptr(), plan_bytes=plan.numel())
    status, text = capi.text_of(explain_call, C.byref(arguments), C.byref(call.options()))
    _checked(library, status)
    return text.splitlines()


def _refusal(call, struct):
    """Why no backend takes a call of these shapes, or "".

    The mask is left out: its contents would be read, and it decides nothing here.
    Raises ValueError if no backend ever could.
    """
    library, size = _library(), C.c_size_t()
    query = library.fm_forward_workspace if struct is capi.ForwardArgs else library.fm_backward_workspace
    status = query(C.byref(call.arguments(struct)), C.byref(call.options()), C.byref(size))
    if status in (capi.UNSUPPORTED, capi.NO_DEVICE):
        return library.fm_last_error().decode()
    _checked(library, status)
    return ""


def _mask_struct(mask):
    flags = (
        (capi.CAUSAL if mask.causal else 0)
        | (0 if mask.q_offset is None else capi.HAS_Q_OFFSET)
        | (0 if mask.window is None else capi.HAS_WINDOW)
    )
    left, right = mask.window or (-1, -1)
    tensors = {
        name: _described(x.shape, x.dtype, x.stride(), x.data_ptr())
        for name, x in (("bounds", mask.bounds), ("block_mask", mask.block_mask))
        if x is not None
    }
    return _struct(
        capi.Mask,
        flags=flags,
        seqlen_q=mask.seqlen_q,
        seqlen_k=mask.seqlen_k,
        q_offset=mask.q_offset or 0,
        window_left=left,
        window_right=right,
        **tensors,
    )


def _struct(kind, **fields):
    return kind(struct_size=C.sizeof(kind), **fields)


def _described(shape, dtype, stride=None, pointer=None):
    """fm_tensor; without a pointer, of memory that will not be touched."""
    try:
        number = capi.dtype_of(dtype)
    except KeyError:
        raise UnsupportedError(
            f"{dtype} is not supported; query, key and value must be bfloat16, float16, float32 or float64"
        ) from None
    return capi.device_tensor(pointer or 1 << 12, number, tuple(shape), stride)


# --- The nearest call that some backend takes ---------------------------------------------------------


def _alternatives(call):
    """(what to do, the call after it), the smallest changes first."""
    if call.backend != "auto":
        yield "leave backend at 'auto'", lambda c: replace(c, backend="auto")
    if call.q.dtype == torch.float64:
        yield "cast query, key and value to float32", lambda c: c.map(lambda x: x.to(torch.float32))
    if call.q.dtype not in (torch.bfloat16, torch.float16):
        yield "cast query, key and value to bfloat16", lambda c: c.map(lambda x: x.to(torch.bfloat16))
    longest = max(call.q.shape[3], call.v.shape[3])
    for dim in _head_dims():
        if dim >= longest and {call.q.shape[3], call.v.shape[3]} != {dim}:
            yield (
                f"pad head_dim with zeros to {dim}, "
                f"pass softmax_scale={call.q.shape[3]}**-0.5 and cut the result to head_dim_v",
                lambda c, dim=dim: c.map(lambda x: F.pad(x, (0, dim - x.shape[3]))),
            )
    yield (
        "make query, key and value contiguous",
        lambda c: c.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta")),
    )
    if call.device.type != "cpu":
        yield "move everything to the CPU", lambda c: replace(c, device=torch.device("cpu"))
    yield "pass backend='reference' (slow)", lambda c: replace(c, backend="reference")


def _refused(direction, call, struct, refusal):
    yield f"{direction:9} refused: {refusal}"
    shapes = call.map(lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))
    changes = list(_alternatives(shapes))
    for count in (1, 2, 3):
        for chosen in itertools.combinations(changes, count):
            changed = shapes
            for _, change in chosen:
                changed = change(changed)
            if not _refusal(changed, struct):
                yield f"nearest   {'; '.join(what for what, _ in chosen)}"
                return
    yield "nearest   none"
