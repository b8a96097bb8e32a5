# SPDX-License-Identifier: Apache-2.0
"""FlashMask for PaddlePaddle: flashmask_attention as in paddle.nn.functional, on CPU tensors too.

    from flashmask.paddle import flashmask_attention
    out = flashmask_attention(q, k, v, startend_row_indices, causal=True)

Tested on CPU tensors. CUDA tensors take the same path (their device, their current stream), but no test has run there.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

try:
    import paddle
except ImportError as error:
    raise ImportError("flashmask.paddle needs PaddlePaddle 3.3 or later: pip install paddlepaddle") from error

from . import _calls, _explain, _values, capi
from ._docs import composed
from ._families import Builders
from .errors import UnrepresentableMaskError, UnsupportedError

__all__ = [
    "MaskArguments",
    "UnrepresentableMaskError",
    "UnsupportedError",
    "dropout_mask",
    "explain",
    "flashmask_attention",
    "masks",
]


@composed
def flashmask_attention(
    query,
    key,
    value,
    startend_row_indices=None,
    *,
    dropout=0.0,
    causal=False,
    window_size=None,
    return_softmax_lse=False,
    return_seed_offset=False,
    fixed_seed_offset=None,
    rng_name="",
    training=True,
    name=None,
    softmax_scale=None,
    block_mask=None,
):
    """paddle.nn.functional.flashmask_attention: the same arguments, defaults and results, honoured or refused.

    query [batch, seqlen_q, heads_q, head_dim], key [batch, seqlen_k, heads_kv, head_dim] and value [batch, seqlen_k,
    heads_kv, head_dim_v] on one device, of one dtype: float32, bfloat16 or float16 on the CPU, bfloat16 or float16 on
    CUDA. heads_q is a multiple of heads_kv. Any strides, but the last dimension contiguous: nothing is copied.

    startend_row_indices:
        {startend_row_indices}
    causal: row i sees keys j <= i + seqlen_k - seqlen_q: the last row stands at the last key.
    window_size: (left, right) or an int for both: row i sees i - left <= j <= i + right, and with causal no later key.
        The lengths must be equal, as they must be for Paddle's function.
    {block_mask}
    {softmax_scale}
    {dropout}
    training: False is dropout=0.
    fixed_seed_offset: int64 [2], a seed and an offset, which say what is dropped (dropout_mask), in host memory or
        where query is; the backward drops the same. None: drawn from Paddle's generator of query's device.
    rng_name: draws them from the generator that Paddle knows by this name (set_random_seed_generator) instead.
    name: anything but None raises UnsupportedError.

    Returns out, in query's dtype, [batch, seqlen_q, heads_q, head_dim_v]. With return_softmax_lse, return_seed_offset
    or both, a list of out and what was asked for: lse float32 [batch, heads_q, seqlen_q], natural logarithm, and the
    seed and offset, int64 [2], where query is. Gradients flow through out and lse, once, and have the same bits in
    every run on the CPU, on CUDA under FLAGS_cudnn_deterministic.
    {hidden_rows}

    What Paddle's kernels cannot do is taken as well: float32, a head_dim other than 128 with block_mask, block_mask
    without startend_row_indices, and startend_row_indices with window_size (a key is visible if neither hides it).

    {raises}
    What the backward raises, as after a change in place of a tensor that it needs, Paddle passes on as the text of an
    OSError. paddle.grad has to ask for the gradients of all of query, key and value that are not constant.
    """
    band = causal, window_size
    call = _call(query, key, value, startend_row_indices, *band, softmax_scale, block_mask, dropout, training, name)
    draw = _seed_offset(query, fixed_seed_offset, rng_name)
    with_lse = _values.flag("return_softmax_lse", return_softmax_lse)
    with_state = _values.flag("return_seed_offset", return_seed_offset)
    state = draw() if with_state or call.drops else None
    out, lse = _Attention.apply(query, key, value, replace(call, dropout_state=state if call.drops else None))
    results = [out, *([lse] if with_lse else []), *([state] if with_state else [])]
    return results if len(results) > 1 else out


@composed
def explain(
    query,
    key,
    value,
    startend_row_indices=None,
    *,
    dropout=0.0,
    causal=False,
    window_size=None,
    return_softmax_lse=False,
    return_seed_offset=False,
    fixed_seed_offset=None,
    rng_name="",
    training=True,
    name=None,
    softmax_scale=None,
    block_mask=None,
):
    """
    {explain}
    """

    def prepare():
        band = causal, window_size
        call = _call(query, key, value, startend_row_indices, *band, softmax_scale, block_mask, dropout, training, name)
        _seed_offset(query, fixed_seed_offset, rng_name)
        described = _explain.Call(
            *map(_Paddle.array, (query, key, value)),
            backend="auto",
            needs_gradient=not all(x.stop_gradient for x in (query, key, value)),
            **call.options,
            **_Paddle.place(query),
        )
        fm_mask = _calls.mask_of(_Paddle, call.mask)
        on_host = call.mask.on_host()
        return _explain.Described(described, call.mask, fm_mask, _explain.host_tiles(_calls.mask_of(_Paddle, on_host)))

    return _explain.explain(prepare)


class _Mask(NamedTuple):
    """The mask of one call: the attributes of Mask."""

    seqlen_q: int
    seqlen_k: int
    bounds: paddle.Tensor | None
    causal: bool
    window: tuple | None
    q_offset: int | None
    block_mask: paddle.Tensor | None

    def tensors(self):
        return [x for x in (self.bounds, self.block_mask) if x is not None]

    def on_host(self):
        bounds, block_mask = (x if x is None else x.cpu() for x in (self.bounds, self.block_mask))
        return self._replace(bounds=bounds, block_mask=block_mask)


@dataclass(frozen=True)
class _Call:
    """What a call says beside query, key and value."""

    mask: _Mask
    options: dict  # softmax_scale, deterministic and dropout_p
    dropout_state: paddle.Tensor | None = None

    @property
    def drops(self):
        return self.options["dropout_p"] != 0

    def tensors(self):
        return self.mask.tensors() + [x for x in (self.dropout_state,) if x is not None]


class _Attention(paddle.autograd.PyLayer):
    """(out, lse) of query, key, value and a _Call, and their gradients."""

    @staticmethod
    def forward(ctx, query, key, value, call):
        options = {**call.options, "dropout_state": call.dropout_state}
        out, lse = _calls.forward(_Paddle, query, key, value, call.mask, **options)
        saved = query, key, value, out, lse
        ctx.save_for_backward(*saved)
        ctx.call, ctx.versions = call, _versions(*saved, *call.tensors())
        ctx.is_constant = [x.stop_gradient for x in (query, key, value)]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if paddle.is_grad_enabled():
            raise _values.no_second_derivatives()
        saved = ctx.saved_tensor()
        call = ctx.call
        if ctx.versions != _versions(*saved, *call.tensors()):
            raise RuntimeError(
                "a tensor of flashmask_attention (query, key, value, out, lse, startend_row_indices, block_mask or "
                "fixed_seed_offset) was changed in place before the backward, which needs it as it was"
            )
        dout = paddle.zeros_like(saved[3]) if dout is None else dout
        options = {**call.options, "dropout_state": call.dropout_state}
        gradients = _calls.backward(_Paddle, dout, dlse, *saved, call.mask, **options)
        return tuple(None if constant else x for x, constant in zip(gradients, ctx.is_constant))


def _versions(*tensors):
    """How often each has changed in place."""
    return [x.inplace_version for x in tensors]


def _call(
    query, key, value, startend_row_indices, causal, window_size, softmax_scale, block_mask, dropout, training, name
):
    """The _Call that the arguments mean, or the exception of the first one that is wrong or not implemented."""
    if not paddle.in_dynamic_mode():
        raise UnsupportedError("Paddle is in static mode; flashmask_attention runs in dynamic mode alone")
    _values.refuse_unsupported(name=(name, None))
    for label, x in (("query", query), ("key", key), ("value", value)):
        _values.check_dimensions(label, _tensor(label, x).shape, _values.LAYOUTS["bshd"])
    mask = _Mask(
        query.shape[1],
        key.shape[1],
        None if startend_row_indices is None else _tensor("startend_row_indices", startend_row_indices),
        _values.flag("causal", causal),
        _window(window_size, query.shape[1], key.shape[1]),
        None,
        None if block_mask is None else _block_mask(_tensor("block_mask", block_mask)),
    )
    tensors = {"key": key, "value": value, "startend_row_indices": startend_row_indices, "block_mask": block_mask}
    for label, x in tensors.items():
        if x is not None and str(x.place) != str(query.place):
            raise _values.elsewhere(label, x.place, "query", query.place)
    scale = None if softmax_scale is None else _values.number("softmax_scale", softmax_scale)
    p = _values.share("dropout", dropout) if _values.flag("training", training) else 0.0
    return _Call(mask, {"softmax_scale": scale, "deterministic": _is_deterministic(query), "dropout_p": p})


def _seed_offset(query, fixed_seed_offset, rng_name):
    """A function that gives a call's state of dropout, where query is; until it is called nothing is drawn."""
    if not isinstance(rng_name, str):
        raise TypeError(f"rng_name is {_values.given(rng_name)}; it must be a string")
    if fixed_seed_offset is not None:
        state = _checked_state("fixed_seed_offset", fixed_seed_offset)
        if not state.place.is_cpu_place() and str(state.place) != str(query.place):
            raise ValueError(
                f"fixed_seed_offset is on {state.place} and query on {query.place}; it must be there or in host memory"
            )
        return lambda: state.to(query.place)
    if rng_name == "":
        return lambda: paddle.empty([2], dtype="int64", device=query.place).random_()
    try:
        generator = paddle.base.core.get_random_seed_generator(rng_name)
    except RuntimeError:
        raise ValueError(
            f"rng_name is {rng_name!r}; Paddle has no generator of that name. set_random_seed_generator of "
            "paddle.base.core makes one; fleet's tracker of states needs no rng_name within its rng_state(name)"
        ) from None
    return lambda: paddle.to_tensor([generator.random() >> 1 for _ in range(2)], dtype="int64", place=query.place)


def _checked_state(name, x):
    """Contiguous."""
    _values.check_state(name, x, _tensor(name, x).dtype == paddle.int64 and x.shape == [2])
    return x.contiguous()


def _tensor(name, x):
    if not isinstance(x, paddle.Tensor):
        raise TypeError(f"{name} is {_values.given(x)}; it must be a paddle.Tensor")
    return x


def _window(window_size, seqlen_q, seqlen_k):
    """(left, right), or None. Paddle has no word for an open side, and no alignment of unequal lengths."""
    if window_size is None:
        return None
    pair = tuple(window_size) if isinstance(window_size, (tuple, list)) else (window_size, window_size)
    for side in pair:
        _values.integer("window_size", side, 0)
    if seqlen_q != seqlen_k:
        raise ValueError(
            f"window_size is {window_size}, and there are {seqlen_q} query rows and {seqlen_k} keys; "
            "with a window there must be as many of both"
        )
    return _values.window("window_size", pair)


def _block_mask(block_mask):
    """The block mask as the library reads it: on CUDA in bytes."""
    is_int32_on_gpu = block_mask.place.is_gpu_place() and block_mask.dtype == paddle.int32
    return block_mask != 0 if is_int32_on_gpu else block_mask


def _is_deterministic(x):
    if not x.place.is_gpu_place():
        return True  # as the CPU always is
    flag = "FLAGS_cudnn_deterministic"
    return bool(paddle.get_flags([flag])[flag])


# --- Masks --------------------------------------------------------------------------------------------


class MaskArguments(NamedTuple):
    """A mask as flashmask_attention takes it: flashmask_attention(q, k, v, **mask._asdict())."""

    startend_row_indices: paddle.Tensor
    causal: bool


class _Paddle:
    """What _calls and the builders of masks ask of a frontend."""

    @staticmethod
    def empty(shape, dtype, like):
        return paddle.empty(list(shape), dtype=dtype, device=like.place)

    @staticmethod
    def array(x):
        device = f"cuda:{x.place.gpu_device_id()}" if x.place.is_gpu_place() else "cpu"
        return _explain.Array(tuple(x.shape), capi.dtype_name(x.dtype), device, tuple(x.strides), x.data_ptr())

    @staticmethod
    def place(x):
        if x.place.is_cpu_place():
            return {}
        if not x.place.is_gpu_place():
            raise UnsupportedError(f"query is on {x.place}; flashmask runs on CPU and CUDA tensors")
        index = x.place.gpu_device_id()
        stream = paddle.device.current_stream(paddle.CUDAPlace(index)).stream_base.cuda_stream
        return {"device": capi.cuda_device(index), "stream": stream}

    @staticmethod
    def empty_on_host(shape, dtype):
        return paddle.empty(list(shape), dtype=dtype, device="cpu")

    @staticmethod
    def integers(name, value, device, shape=None):
        values = _numbers(name, value, device)
        _values.check_vector(name, values, values.dtype in (paddle.int64, paddle.int32), shape=shape)
        return values

    @staticmethod
    def flags(name, value, device):
        values = _numbers(name, value, device)
        _values.check_vector(name, values, values.dtype in (paddle.bool, paddle.int64, paddle.int32), "bools")
        return values.astype("int32")

    @staticmethod
    def build(family, form, vectors, numbers, device=None):
        if form.vectors == 0:
            lengths = _values.length("seqlen_q", form.rows), _values.length("seqlen_k", form.keys)
            band = form.causal, _values.window("window", form.window), _values.q_offset(form.q_offset)
            mask, order = _Mask(*lengths, None, *band, None), None
        else:
            bounds, order = _calls.build_mask(_Paddle, family, vectors, numbers, family == "block_diffusion")
            keys = bounds.shape[2]
            mask = _Mask(form.rows_of(keys), keys, bounds, form.causal, form.window, None, None)
        return MaskArguments(*_calls.to_startend(_Paddle, mask)), order


def _numbers(name, value, device):
    """A tensor in host memory."""
    if device is not None and str(device) not in ("cpu", "Place(cpu)"):
        raise ValueError(f"device is {device}; masks are built in host memory, from where Tensor.to() moves them")
    try:
        values = value.cpu() if isinstance(value, paddle.Tensor) else paddle.to_tensor(value, place="cpu")
    except ValueError as error:
        raise _values.ragged(name, error) from None
    return values if values.size else values.astype("int64")


# The mask families, as flashmask.masks has them for torch, in host memory; each returns MaskArguments.
masks = Builders(_Paddle)


# --- Dropout ------------------------------------------------------------------------------------------


@composed
def dropout_mask(state, p, batch, heads, seqlen_q, seqlen_k):
    """
    {dropout_mask}

    The result is in host memory. state: fixed_seed_offset of the call, or what it returned with return_seed_offset.
    """
    lengths = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    shape = tuple(_values.length(name, x) for name, x in lengths.items())
    return _calls.dropout_mask(_Paddle, _checked_state("state", state).cpu(), _values.share("p", p), shape)
