# SPDX-License-Identifier: Apache-2.0
"""Options of a call, each once: its place in fm_options, its default, how an argument is read, and its docstring."""

import ctypes as C
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

from . import arguments, capi
from .errors import UnsupportedError


class Option(NamedTuple):
    """A field of fm_options.

    read(name, value): the value of an argument, or the error that names it. feature: a row of
    include/flashmask/options.def, which every operator takes. shape: of a tensor, in words; has_gradient: it has one.
    """

    name: str
    ctype: Any
    default: Any = None
    read: Callable[[str, Any], Any] | None = None
    doc: str = ""
    feature: bool = False
    shape: str = ""
    has_gradient: bool = False


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
        feature=True,
    ),
    Option(
        "dropout_p",
        C.c_double,
        0.0,
        arguments.share,
        """\
dropout: the share of the attention weights that are set to zero at random, in [0, 1); the others are scaled by
    1 / (1 - dropout). Rounded to 16 bits. lse is that of all weights.""",
        feature=True,
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
        feature=True,
        shape="[heads_q]",
        has_gradient=True,
    ),
    Option("partial_out", C.c_uint32, False, arguments.flag, feature=True),
    Option("max_ctas", C.c_int32, 0, arguments.count),
    Option("allocate", C.c_void_p),
    Option("allocate_context", C.c_void_p),
    Option("kernels", C.c_char_p),
    Option("dropout_state", C.POINTER(C.c_uint64)),
    Option(
        "alibi_slopes",
        capi.Tensor,
        None,
        None,
        """\
alibi_slopes: float32 [heads_q] or [batch, heads_q]: scores, scaled and capped, are lowered by slope * |row - key|, as
    in ALiBi (arXiv:2108.12409), where a row stands at its index + q_offset, or both at q_pos and k_pos. No gradient
    flows to the slopes.""",
        feature=True,
        shape="[heads_q] or [batch, heads_q]",
    ),
    Option(
        "split_size",
        C.c_int64,
        0,
        lambda name, value: 0 if value is None else arguments.count(name, value),
        """\
split_size: the forward adds up keys in splits of this many, a multiple of 128, as calls over a cache do: with their
    split_size a row has the bits that it has there (docs/inference.md, Equal bits). None or 0: no splits. On the CPU,
    without dropout. Gradients differ by rounding alone.""",
        feature=True,
    ),
    Option("max_mask_bytes", C.c_int64, 0, arguments.bytes_at_most),
    Option("dropout_q_origin", capi.Tensor),
    Option("dropout_k_origin", capi.Tensor),
    Option("dropout_first_head", C.c_int64, 0),
)
_READERS = {option.name: option.read for option in OPTIONS if option.read}
# Features as the operators of torch and JAX take them: tensors, numbers, flags.
TENSORS = tuple(option for option in OPTIONS if option.feature and option.ctype is capi.Tensor)
NUMBERS = tuple(option for option in OPTIONS if option.feature and option.ctype in (C.c_double, C.c_int64))
FLAGS = tuple(option for option in OPTIONS if option.feature and option.ctype is C.c_uint32)


class Options(C.Structure):
    """fm_options."""

    _fields_ = [
        ("struct_size", C.c_uint32),
        ("flags", C.c_uint32),
        *((option.name, option.ctype) for option in OPTIONS),
    ]


def record(name: str, *required: str, **optional: Any) -> Any:
    """A NamedTuple of fields that are known when the program runs, the optional ones with their defaults."""
    make_tuple: Any = namedtuple
    return make_tuple(name, (*required, *optional), defaults=optional.values())


# Tensors that say which weights dropout keeps: the state, and the places of the call's rows and keys in a whole.
DROPOUT_TENSORS = ("dropout_state", "dropout_q_origin", "dropout_k_origin")
# Arguments of the operators of torch after the tensors of a call and its mask, in the order of their schemas
# (bindings/torch/schemas.h). Fields with defaults may be left out, from the last one on.
AttentionOptions = record(
    "AttentionOptions",
    *("softmax_scale", "causal", "q_offset", "window_left", "window_right", "deterministic", "backend"),
    **{"max_ctas": 0, "q_pos": None, "k_pos": None, "column_ptr": None, "intervals": None},
    **dict.fromkeys(DROPOUT_TENSORS),
    **{option.name: option.default for option in (*TENSORS, *NUMBERS, *FLAGS)},
    dropout_first_head=0,
)


def read(**given: Any) -> dict[str, Any]:
    """Options from arguments of their names; TypeError or ValueError naming the first that is wrong."""
    return {name: _READERS[name](name, value) for name, value in given.items()}


def refuse_features(features: dict[str, Any], why: str) -> None:
    """UnsupportedError naming the first feature that is asked for, and why not; TypeError naming what is no feature."""
    defaults = {option.name: option.default for option in (*TENSORS, *NUMBERS)} | {"dropout": 0.0}
    for name, value in features.items():
        if name not in defaults:
            raise TypeError(f"{name} is no argument of this function")
        if value is not None and not (isinstance(value, (int, float)) and value == defaults[name]):
            raise UnsupportedError(f"{name} is {arguments.describe(value)}; {why}")


def described(options: dict[str, Any], describe: Callable[[Any, str], capi.Tensor]) -> dict[str, Any]:
    """`options` with describe(tensor, name), an fm_tensor, in place of each tensor; None is left out."""
    names = {option.name for option in TENSORS}
    given = {name: value for name, value in options.items() if name not in names or value is not None}
    return {name: describe(value, name) if name in names else value for name, value in given.items()}


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
