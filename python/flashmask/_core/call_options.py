# SPDX-License-Identifier: Apache-2.0
"""Options of a call, each once: its place in fm_options, its default, how an argument is read, and its docstring."""

import ctypes as C
from collections.abc import Callable
from typing import Any, NamedTuple

from . import arguments, capi


class Option(NamedTuple):
    """A field of fm_options. read(name, value): the value of an argument, or the error that names it."""

    name: str
    ctype: Any
    default: Any = None
    read: Callable[[str, Any], Any] | None = None
    doc: str = ""


def _optional(read: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else read(name, value)


# Options in the order of fm_options. A frontend lists the ones that it takes in its signatures.
OPTIONS = (
    Option(
        "softmax_scale", C.c_double, None, _optional(arguments.number), "softmax_scale: default 1 / sqrt(head_dim)."
    ),
    Option("backend", C.c_char_p, "auto", arguments.string),
    Option("threads", C.c_int32, 0, arguments.count),
    Option("device", C.c_int32, 0),
    Option("stream", C.c_void_p),
    Option("executed_tiles", C.POINTER(capi.ExecutedTiles)),
    Option(
        "softcap",
        C.c_double,
        0.0,
        arguments.number,
        """\
softcap: scores, scaled, become softcap * tanh(score / softcap) before the mask is applied, as in Gemma 2
    (arXiv:2408.00118); 0: as they are.""",
    ),
    Option(
        "dropout_p",
        C.c_double,
        0.0,
        arguments.share,
        """\
dropout: the share of the attention weights that are set to zero at random, in [0, 1); the others are scaled by
    1 / (1 - dropout). Rounded to 16 bits. lse is that of all weights.""",
    ),
    Option("reserved", C.c_uint64 * 2),
    Option(
        "sink",
        capi.Tensor,
        None,
        None,
        """\
sink: [heads_q], float32 or the dtype of the queries: of each head the score of one more key, whose value is 0 and which
    every row sees, as in gpt-oss (arXiv:2508.10925). It is not scaled or capped. lse includes it: a row that sees no
    key gets 0, and lse = sink.""",
    ),
    Option("block_table", capi.Tensor),
    Option("partial_out", C.c_uint32, False, arguments.flag),
    Option("max_ctas", C.c_int32, 0, arguments.count),
    Option("allocate", C.c_void_p),
    Option("allocate_context", C.c_void_p),
    Option("kernels", C.c_char_p),
    Option("dropout_state", C.POINTER(C.c_uint64)),
)
_READERS = {option.name: option.read for option in OPTIONS if option.read}


class Options(C.Structure):
    """fm_options."""

    _fields_ = [
        ("struct_size", C.c_uint32),
        ("flags", C.c_uint32),
        *((option.name, option.ctype) for option in OPTIONS),
    ]


class AttentionOptions(NamedTuple):
    """Arguments of the operators of torch after the tensors of a call and its mask, in the order of their schemas
    (bindings/torch/schemas.h). Fields with defaults may be left out, from the last one on."""

    softmax_scale: float | None
    causal: bool
    q_offset: int | None
    window_left: int
    window_right: int
    deterministic: bool
    backend: str
    max_ctas: int = 0
    sink: Any = None
    q_pos: Any = None
    k_pos: Any = None
    dropout_state: Any = None
    dropout_p: float = 0.0
    softcap: float = 0.0
    partial_out: bool = False


def read(**given: Any) -> dict[str, Any]:
    """Options from arguments of their names; TypeError or ValueError naming the first that is wrong."""
    return {name: _READERS[name](name, value) for name, value in given.items()}


def make(
    *, softmax_scale: float | None = None, deterministic: bool = False, backend: str = "auto", **fields: Any
) -> Options:
    """fm_options in Python's terms: None is the default scale, `backend` a string."""
    return capi.make(
        Options,
        flags=(capi.DETERMINISTIC if deterministic else 0) | (0 if softmax_scale is None else capi.HAS_SCALE),
        softmax_scale=softmax_scale or 0.0,
        backend=backend.encode(),
        **fields,
    )
