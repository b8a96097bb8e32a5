# SPDX-License-Identifier: Apache-2.0
"""The C interface of c_api.h as ctypes sees it: the library, its structs, and numpy arrays as fm_tensor.

Frontends that call the library through ctypes do so from here. It needs Python's standard library alone.
"""

import ctypes as C
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .errors import UnrepresentableMaskError, UnsupportedError

__all__ = [
    "BATCH_INVARIANT",
    "BFLOAT16",
    "BOOL",
    "CAUSAL",
    "COPY",
    "DETERMINISTIC",
    "DEVICE_CPU",
    "DTYPES",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "FLOAT8_CACHE",
    "FOREST",
    "FLOAT8_E4M3",
    "HAS_Q_OFFSET",
    "HAS_SCALE",
    "HAS_WINDOW",
    "INT32",
    "INT64",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "KEYS_IN_PAGES",
    "NO_DEVICE",
    "OK",
    "OUT_OF_MEMORY",
    "UINT8",
    "UNREPRESENTABLE",
    "UNSUPPORTED",
    "WAIT_FLAG",
    "WRITE_FLAG",
    "WRITE_SCALES",
    "AppendArgs",
    "Arrivals",
    "BackwardArgs",
    "CachedArgs",
    "CachedPlan",
    "Cells",
    "EarlyKeys",
    "ExecutedTiles",
    "ForwardArgs",
    "GpuModel",
    "KvCache",
    "Mask",
    "MaskParameter",
    "MaskParameters",
    "PeerHandle",
    "Placement",
    "Segments",
    "SequenceMask",
    "Settlement",
    "Statistics",
    "Tensor",
    "Transfer",
    "check",
    "cuda_device",
    "device_tensor",
    "dtype_name",
    "dtype_of",
    "library_path",
    "load",
    "make",
    "mask",
    "mask_of",
    "open_library",
    "tensor",
    "text_of",
]

np: Any
try:
    import numpy as np
except ImportError:  # the structs do without
    np = None

AnyStruct = TypeVar("AnyStruct", bound=C.Structure)

FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT32, BOOL, UINT8, INT64, FLOAT8_E4M3 = range(1, 10)
DETERMINISTIC, CAUSAL, HAS_Q_OFFSET, HAS_WINDOW, HAS_SCALE = (1 << n for n in range(5))
BATCH_INVARIANT, KEYS_IN_PAGES, WRITE_SCALES, FLOAT8_CACHE, FOREST = (1 << n for n in range(5, 10))
OK, INVALID_ARGUMENT, UNSUPPORTED, UNREPRESENTABLE, NO_DEVICE, OUT_OF_MEMORY, INTERNAL = range(7)
DEVICE_CPU = 0
COPY, WAIT_FLAG, WRITE_FLAG = range(3)
# By their names, which all libraries of arrays share.
DTYPES = {
    "float32": FLOAT32,
    "float64": FLOAT64,
    "bfloat16": BFLOAT16,
    "float16": FLOAT16,
    "int32": INT32,
    "bool": BOOL,
    "uint8": UINT8,
    "int64": INT64,
    "float8_e4m3fn": FLOAT8_E4M3,
}


def dtype_name(dtype: object) -> str:
    """The name of a numpy, torch or Paddle dtype, as "float32"."""
    return str(getattr(dtype, "name", dtype)).rpartition(".")[2].lower()


def dtype_of(dtype: object) -> int:
    """The number of a dtype, or of its name; KeyError for one that the library does not know."""
    if not getattr(dtype, "isnative", True):
        raise KeyError(f"{dtype!r} is not in this machine's byte order")
    return DTYPES[dtype_name(dtype)]


class Tensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("dtype", C.c_int32),
        ("ndim", C.c_int32),
        ("shape", C.c_int64 * 5),
        ("stride", C.c_int64 * 5),
    ]


class Mask(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("flags", C.c_uint32),
        ("seqlen_q", C.c_int64),
        ("seqlen_k", C.c_int64),
        ("q_offset", C.c_int64),
        ("window_left", C.c_int64),
        ("window_right", C.c_int64),
        ("bounds", Tensor),
        ("block_mask", Tensor),
        ("q_pos", Tensor),
        ("k_pos", Tensor),
        ("column_ptr", Tensor),
        ("intervals", Tensor),
    ]


class MaskParameter(C.Structure):
    _fields_ = [("name", C.c_char_p), ("vector", Tensor), ("number", C.c_int64)]


class MaskParameters(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("count", C.c_uint32), ("items", C.POINTER(MaskParameter))]


class ExecutedTiles(C.Structure):
    _fields_ = [("forward", C.c_int64), ("backward_rows", C.c_int64), ("backward_keys", C.c_int64)]


_CALL: list[Any] = [("mask", C.POINTER(Mask)), ("plan", C.c_void_p), ("plan_bytes", C.c_size_t), ("dense_mask", Tensor)]


Allocate = C.CFUNCTYPE(C.c_void_p, C.c_void_p, C.c_size_t)  # fm_allocate


class Arrivals(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("reserved", C.c_uint32),
        ("needed", Tensor),
        ("state", Tensor),
        ("timeout", C.c_double),
    ]


class ForwardArgs(C.Structure):
    _fields_ = (
        [("struct_size", C.c_uint32), ("reserved", C.c_uint32)]
        + [(n, Tensor) for n in "q k v out lse".split()]
        + _CALL
        + [("arrivals", C.POINTER(Arrivals))]
    )


class EarlyKeys(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("reserved", C.c_uint32),
        ("dk", Tensor),
        ("dv", Tensor),
        ("event", C.c_void_p),
        ("stream", C.c_void_p),
    ]


class BackwardArgs(C.Structure):
    _fields_ = (
        [("struct_size", C.c_uint32), ("reserved", C.c_uint32)]
        + [(n, Tensor) for n in "q k v out lse dout dlse dq dk dv".split()]
        + _CALL
        + [("dsink", Tensor), ("early", C.POINTER(EarlyKeys))]
    )


class Statistics(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("reserved", C.c_uint32),
        *((name, C.c_int64) for name in "tile_rows tile_keys elements visible tiles full_tiles partial_tiles".split()),
    ]


class Cells(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("reserved", C.c_uint32),
        *((name, C.c_int64) for name in "batch head row_step key_step most_keys".split()),
        ("visible", C.c_void_p),
        ("elements", C.c_void_p),
        ("count", C.c_int64),
    ]


class Segments(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("reserved", C.c_uint32),
        ("rows", C.POINTER(C.c_int64)),
        ("row_count", C.c_int64),
        ("keys", C.POINTER(C.c_int64)),
        ("key_count", C.c_int64),
    ]


class Placement(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("scheme", C.c_uint32),
        ("ranks", C.c_int64),
        ("load_slack", C.c_double),
        ("unit", C.c_int64),
        ("units", C.c_int64),
        ("owner", C.c_void_p),
        ("owner_count", C.c_int64),
        ("live_tiles", C.c_void_p),
        ("received", C.c_void_p),
    ]


class GpuModel(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("compute_major", C.c_int32),
        ("compute_minor", C.c_int32),
        ("multiprocessors", C.c_int32),
    ]


class KvCache(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("reserved", C.c_uint32),
        *((n, Tensor) for n in "k v page_table page_indptr page_indices seqlens k_scale v_scale".split()),
    ]


class SequenceMask(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("flags", C.c_uint32),
        ("window_left", C.c_int64),
        ("window_right", C.c_int64),
        *((n, Tensor) for n in "bounds tail tail_lens tail_depth q_pos k_pos block_mask".split()),
    ]


class CachedPlan(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("flags", C.c_uint32),
        *((n, C.c_int64) for n in "max_batch max_rows max_keys max_total_keys".split()),
        *((n, C.c_int64) for n in "heads_q heads_kv head_dim head_dim_v split_size".split()),
        ("buffer", C.c_void_p),
        ("bytes", C.c_size_t),
        ("built_for", C.c_uint64 * 16),
    ]


class CachedArgs(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("flags", C.c_uint32),
        ("split_size", C.c_int64),
        *((n, Tensor) for n in "q out lse cu_seqlens_q".split()),
        ("cache", C.POINTER(KvCache)),
        ("mask", C.POINTER(SequenceMask)),
        ("plan", C.POINTER(CachedPlan)),
    ]


class AppendArgs(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("flags", C.c_uint32),
        *((n, Tensor) for n in "k v cu_seqlens slots bounds".split()),
        ("cache", C.POINTER(KvCache)),
        ("mask", C.POINTER(SequenceMask)),
    ]


PeerHandle = C.c_uint8 * 64


class Transfer(C.Structure):
    _fields_ = [
        ("kind", C.c_uint32),
        ("value", C.c_uint32),
        ("to", C.c_void_p),
        ("source", C.c_void_p),
        ("bytes", C.c_uint64),
    ]


class Settlement(C.Structure):
    _fields_ = [
        ("struct_size", C.c_uint32),
        ("epoch", C.c_uint32),
        ("pieces", C.c_uint32),
        ("peers", C.c_uint32),
        ("state", C.c_void_p),
        ("read_by_peers", C.c_void_p),
        ("read_flags", C.POINTER(C.c_void_p)),
        ("out", C.c_void_p),
        ("out_bytes", C.c_uint64),
        ("lse", C.c_void_p),
        ("lse_bytes", C.c_uint64),
        ("report", C.c_void_p),
        ("timeout", C.c_double),
    ]


def library_path(variable: str, name: str) -> Path:
    """The file that the environment variable names, or `name` beside the package; ImportError if it is not there."""
    path = Path(os.environ.get(variable) or Path(__file__).parents[1] / name)
    if not path.is_file():
        raise ImportError(
            f"{path} is not there. Install flashmask with `pip install .` from its source, "
            f"or set {variable} to a built {name}"
        )
    return path


_POINTER, _SIZE = C.c_void_p, C.c_size_t
_TEXT = [_POINTER, _SIZE, _POINTER]
_ARGUMENTS = {
    "fm_plan_bytes": [_POINTER, _POINTER],
    "fm_plan_device_bytes": [_POINTER, _POINTER, _POINTER, _POINTER],
    "fm_plan_count_bytes": [_POINTER, _POINTER, _SIZE, _POINTER, _POINTER],
    "fm_plan_build": [_POINTER, _POINTER, _SIZE, _POINTER],
    "fm_plan_validate": [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER],
    "fm_mask_shape": [C.c_char_p, _POINTER, _POINTER, _POINTER],
    "fm_mask_build": [C.c_char_p, _POINTER, _POINTER, _POINTER],
    "fm_mask_to_dense": [_POINTER, _POINTER],
    "fm_mask_from_dense": [_POINTER, _POINTER],
    "fm_mask_to_startend": [_POINTER, _POINTER],
    "fm_mask_gather": [_POINTER, _POINTER, _POINTER],
    "fm_mask_intersect": [_POINTER, _POINTER, _POINTER],
    "fm_mask_concatenate": [_POINTER, C.c_int64, _POINTER],
    "fm_mask_statistics": [_POINTER, _POINTER],
    "fm_mask_count_cells": [_POINTER, _POINTER],
    "fm_place": [_POINTER, C.c_int64, _POINTER],
    "fm_forward_workspace": [_POINTER, _POINTER, _POINTER],
    "fm_forward": [_POINTER, _POINTER, _SIZE, _POINTER],
    "fm_backward_workspace": [_POINTER, _POINTER, _POINTER],
    "fm_backward": [_POINTER, _POINTER, _SIZE, _POINTER],
    "fm_cached_forward_workspace": [_POINTER, _POINTER, _POINTER],
    "fm_cached_forward": [_POINTER, _POINTER, _SIZE, _POINTER],
    "fm_cached_plan_bytes": [_POINTER, _POINTER, _POINTER],
    "fm_cached_plan_build": [_POINTER, _POINTER, _POINTER],
    "fm_append_kv": [_POINTER, _POINTER],
    "fm_cached_validate": [_POINTER],
    "fm_explain_cached": [_POINTER, _POINTER, *_TEXT],
    "fm_peer_memory_create": [C.c_int32, _SIZE, _POINTER, _POINTER],
    "fm_peer_memory_open": [C.c_int32, _POINTER, _POINTER],
    "fm_peer_memory_release": [C.c_int32, _POINTER, C.c_int32],
    "fm_transfers_enqueue": [_POINTER, C.c_int64, C.c_int32, _POINTER],
    "fm_peers_signal": [_POINTER, C.c_int64, C.c_uint32, C.c_int32, _POINTER],
    "fm_peers_settle": [_POINTER, C.c_int32, _POINTER],
    "fm_dropout_mask": [C.c_double, _POINTER, _POINTER],
    "fm_explain": [_POINTER, _POINTER, *_TEXT],
    "fm_explain_backward": [_POINTER, _POINTER, *_TEXT],
    "fm_explain_json": [_POINTER, C.c_int, _POINTER, _POINTER, *_TEXT],
    "fm_kernels_json": _TEXT,
    "fm_mask_families_json": _TEXT,
}


@functools.cache
def load() -> C.CDLL:
    """The library, with the types of its functions: FLASHMASK_LIBRARY, or libflashmask.so beside the package, as it is
    at the first call.

    Raises ImportError if there is none.
    """
    return open_library()


def open_library() -> C.CDLL:
    """Opens the library anew: a process may have several. An older library may lack some of the functions."""
    library = C.CDLL(str(library_path("FLASHMASK_LIBRARY", "libflashmask.so")))
    library.fm_abi_version.restype = C.c_uint32
    library.fm_version.restype = library.fm_last_error.restype = C.c_char_p
    for name, types in _ARGUMENTS.items():
        if hasattr(library, name):
            getattr(library, name).argtypes = types
    if hasattr(library, "fm_last_error_column"):
        library.fm_last_error_column.restype = C.c_int64
    return library


# Statuses that are missing here raise RuntimeError.
_RAISED: dict[int, Callable[[str], Exception]] = {
    INVALID_ARGUMENT: ValueError,
    UNSUPPORTED: UnsupportedError,
    UNREPRESENTABLE: lambda message: UnrepresentableMaskError(message, load().fm_last_error_column()),
    OUT_OF_MEMORY: MemoryError,
}


def check(status: int) -> None:
    """Raises what the calling thread's last call failed with, if `status` says that it did."""
    if status != OK:
        raise _RAISED.get(status, RuntimeError)(load().fm_last_error().decode())


def tensor(array: Any) -> Tensor:
    t = Tensor()
    t.data = array.ctypes.data
    t.dtype = dtype_of(array.dtype)
    t.ndim = array.ndim
    for d in range(array.ndim):
        t.shape[d] = array.shape[d]
        t.stride[d] = array.strides[d] // array.itemsize
    return t


def cuda_device(index: int = 0) -> int:
    """The value of Options.device for a CUDA device."""
    return 1 + index


def device_tensor(pointer: int | None, dtype: int, shape: Sequence[int], stride: Sequence[int] | None = None) -> Tensor:
    """A tensor in device memory: `dtype` is one of FLOAT32 and so on, strides count elements (None: contiguous)."""
    t = Tensor(data=pointer, dtype=dtype, ndim=len(shape))
    contiguous = 1
    for d in reversed(range(len(shape))):
        t.shape[d] = shape[d]
        t.stride[d] = contiguous if stride is None else stride[d]
        contiguous *= max(shape[d], 1)
    return t


def make(struct: type[AnyStruct], **fields: Any) -> AnyStruct:
    s: Any = struct()
    s.struct_size = C.sizeof(struct)
    for name, value in fields.items():
        setattr(s, name, tensor(value) if np is not None and isinstance(value, np.ndarray) else value)
    return s


def text_of(function: Callable[..., int], *arguments: Any) -> tuple[int, str]:
    """(status, text) of a function such as fm_explain, which takes a buffer last."""
    length = C.c_size_t()
    status = function(*arguments, None, 0, C.byref(length))
    if status != OK:
        return status, ""
    buffer = C.create_string_buffer(length.value + 1)
    status = function(*arguments, buffer, len(buffer), None)
    return status, buffer.value.decode()


def mask(seqlen_q: int, seqlen_k: int, **fields: Any) -> Mask:
    return make(Mask, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **fields)


def mask_of(mask: Any, describe: Callable[[str, Any], Tensor]) -> Mask:
    """fm_mask of the Mask of any frontend; describe(name, x) is fm_tensor of its tensors, which have to stay."""
    flags = (
        (CAUSAL if mask.causal else 0)
        | (0 if mask.q_offset is None else HAS_Q_OFFSET)
        | (0 if mask.window is None else HAS_WINDOW)
    )
    left, right = mask.window or (-1, -1)
    tensors = {"bounds": ("startend_row_indices", mask.bounds), "block_mask": ("block_mask", mask.block_mask)}
    others = ("q_pos", "k_pos", "column_ptr", "intervals")
    tensors |= {name: (name, getattr(mask, name, None)) for name in others}  # some masks lack them
    return make(
        Mask,
        flags=flags,
        seqlen_q=mask.seqlen_q,
        seqlen_k=mask.seqlen_k,
        q_offset=mask.q_offset or 0,
        window_left=left,
        window_right=right,
        **{field: describe(name, x) for field, (name, x) in tensors.items() if x is not None},
    )
