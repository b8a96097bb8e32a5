# SPDX-License-Identifier: Apache-2.0
"""flashmask_attention, with the arguments and results of paddle.nn.functional's."""

from dataclasses import dataclass, replace
from typing import Any

import paddle
from paddle import Tensor

from .._core import arguments, call_options, ctypes_calls
from .._core.docstrings import composed
from .._core.errors import UnsupportedError
from .dropout import read_state
from .mask import CallMask, IntervalLists
from .tensors import Paddle, checked_tensor


@composed
def flashmask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    startend_row_indices: Tensor | IntervalLists | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: tuple[int, int] | int | None = None,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    fixed_seed_offset: Tensor | None = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
    softmax_scale: float | None = None,
    block_mask: Tensor | None = None,
) -> Any:
    """paddle.nn.functional.flashmask_attention: the same arguments, defaults and results, honoured or refused.

    query [batch, seqlen_q, heads_q, head_dim], key [batch, seqlen_k, heads_kv, head_dim] and value [batch, seqlen_k,
    heads_kv, head_dim_v] on one device, of one dtype: float32, bfloat16 or float16 on the CPU, bfloat16 or float16 on
    CUDA. heads_q is a multiple of heads_kv. Any strides, but the last dimension contiguous: nothing is copied.

    startend_row_indices:
        {startend_row_indices}
        Or IntervalLists of
        {interval_lists}
    causal: row i sees keys j <= i + seqlen_k - seqlen_q: the last row is aligned with the last key.
    window_size: (left, right) or an int for both: row i sees i - left <= j <= i + right, and with causal no later key.
        The lengths must be equal, as they must be for Paddle's function.
    {block_mask}
    {softmax_scale}
    {dropout_p}
    training: False is dropout=0.
    fixed_seed_offset: int64 [2], a seed and an offset, which select the dropped weights (dropout_mask), in host memory
        or where query is; the backward drops the same weights. None: drawn from Paddle's generator of query's device.
    rng_name: draws them from the generator that Paddle knows by this name (set_random_seed_generator) instead.
    name: anything but None raises UnsupportedError.

    Returns out, in query's dtype, [batch, seqlen_q, heads_q, head_dim_v]. With return_softmax_lse, return_seed_offset
    or both, a list of out and what was asked for: lse float32 [batch, heads_q, seqlen_q], natural logarithm, and the
    seed and offset, int64 [2], where query is. Gradients flow through out and lse, once, and have the same bits in
    every run on the CPU, on CUDA under FLAGS_cudnn_deterministic.
    {hidden_rows}

    It also takes calls that Paddle's kernels cannot do: float32, a head_dim other than 128 with block_mask, block_mask
    without startend_row_indices, and startend_row_indices with window_size (a key is visible if neither hides it).

    {raises}
    Paddle passes errors of the backward on as the text of an OSError, for example after an in-place change of a tensor
    that it needs. paddle.grad has to ask for the gradients of all of query, key and value that are not constant.
    """
    band = causal, window_size
    call = read_call(query, key, value, startend_row_indices, *band, softmax_scale, block_mask, dropout, training, name)
    draw = read_state(query, fixed_seed_offset, rng_name)
    with_lse = arguments.flag("return_softmax_lse", return_softmax_lse)
    with_state = arguments.flag("return_seed_offset", return_seed_offset)
    state = draw() if with_state or call.drops else None
    out, lse = _Attention.apply(query, key, value, replace(call, dropout_state=state if call.drops else None))
    results = [out, *([lse] if with_lse else []), *([state] if with_state else [])]
    return results if len(results) > 1 else out


@dataclass(frozen=True)
class _Call:
    """Arguments of a call beside query, key and value."""

    mask: CallMask
    options: dict[str, Any]  # softmax_scale, deterministic and dropout_p
    dropout_state: Tensor | None = None

    @property
    def drops(self) -> bool:
        return self.options["dropout_p"] != 0

    def tensors(self) -> list[Tensor]:
        return self.mask.tensors() + [x for x in (self.dropout_state,) if x is not None]


class _Attention(paddle.autograd.PyLayer):
    """(out, lse) of query, key, value and a _Call, and their gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        options = {**call.options, "dropout_state": call.dropout_state}
        out, lse = ctypes_calls.forward(Paddle, query, key, value, call.mask, **options)
        saved = query, key, value, out, lse
        ctx.save_for_backward(*saved)
        ctx.call, ctx.versions = call, _versions(*saved, *call.tensors())
        ctx.is_constant = [x.stop_gradient for x in (query, key, value)]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        dout, dlse = gradients
        if paddle.is_grad_enabled():
            raise arguments.no_second_derivatives()
        saved: list[Any] = ctx.saved_tensor()
        call = ctx.call
        if ctx.versions != _versions(*saved, *call.tensors()):
            raise RuntimeError(
                "a tensor of flashmask_attention (query, key, value, out, lse, startend_row_indices, block_mask or "
                "fixed_seed_offset) was changed in place before the backward, which needs it as it was"
            )
        q, k, v, out, lse = saved
        dout = paddle.zeros_like(out) if dout is None else dout
        options = {**call.options, "dropout_state": call.dropout_state}
        made = ctypes_calls.backward(Paddle, dout, dlse, q, k, v, out, lse, call.mask, **options)
        return tuple(None if constant else x for x, constant in zip(made, ctx.is_constant))


def _versions(*tensors: Tensor) -> list[int]:
    """How often each has changed in place."""
    return [x.inplace_version for x in tensors]


def read_call(
    query: Any,
    key: Any,
    value: Any,
    startend_row_indices: Any,
    causal: Any,
    window_size: Any,
    softmax_scale: Any,
    block_mask: Any,
    dropout: Any,
    training: Any,
    name: Any,
) -> _Call:
    """The _Call that the arguments mean, or the exception of the first one that is wrong or not implemented."""
    if not paddle.in_dynamic_mode():
        raise UnsupportedError("Paddle is in static mode; flashmask_attention runs in dynamic mode alone")
    arguments.refuse_unsupported(name=(name, None))
    for label, x in (("query", query), ("key", key), ("value", value)):
        arguments.check_dimensions(label, checked_tensor(label, x).shape, arguments.LAYOUTS["bshd"])
    lists = startend_row_indices if isinstance(startend_row_indices, IntervalLists) else None
    bounds = startend_row_indices if lists is None else None
    mask = CallMask(
        query.shape[1],
        key.shape[1],
        None if bounds is None else checked_tensor("startend_row_indices", bounds),
        arguments.flag("causal", causal),
        _window(window_size, query.shape[1], key.shape[1]),
        None,
        None if block_mask is None else _block_mask(checked_tensor("block_mask", block_mask)),
        **{} if lists is None else {name: checked_tensor(name, x) for name, x in lists._asdict().items()},
    )
    tensors = {"key": key, "value": value, "startend_row_indices": bounds, "block_mask": block_mask}
    tensors |= {} if lists is None else lists._asdict()
    for label, x in tensors.items():
        if x is not None and str(x.place) != str(query.place):
            raise arguments.elsewhere(label, x.place, "query", query.place)
    options = call_options.read(softmax_scale=softmax_scale)
    p = arguments.share("dropout", dropout) if arguments.flag("training", training) else 0.0
    return _Call(mask, {**options, "deterministic": _is_deterministic(query), "dropout_p": p})


def _window(window_size: Any, seqlen_q: int, seqlen_k: int) -> tuple[int, int] | None:
    """(left, right), or None. Paddle has no word for an open side, and no alignment of unequal lengths."""
    if window_size is None:
        return None
    pair = tuple(window_size) if isinstance(window_size, (tuple, list)) else (window_size, window_size)
    for side in pair:
        arguments.integer("window_size", side, 0)
    if seqlen_q != seqlen_k:
        raise ValueError(
            f"window_size is {window_size}, and there are {seqlen_q} query rows and {seqlen_k} keys; "
            "with a window there must be as many of both"
        )
    return arguments.window("window_size", pair)


def _block_mask(block_mask: Tensor) -> Tensor:
    """The block mask as the library reads it: on CUDA in bytes."""
    is_int32_on_gpu = block_mask.place.is_gpu_place() and block_mask.dtype == paddle.int32
    return block_mask != 0 if is_int32_on_gpu else block_mask


def _is_deterministic(x: Tensor) -> bool:
    if not x.place.is_gpu_place():
        return True  # the CPU always is
    flag = "FLAGS_cudnn_deterministic"
    return bool(paddle.get_flags([flag])[flag])
