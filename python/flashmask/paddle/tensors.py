# SPDX-License-Identifier: Apache-2.0
"""Paddle's tensors as the C interface takes them."""

from typing import Any

import paddle
from paddle import Tensor

from .._core import arguments, capi, explanation
from .._core.errors import UnsupportedError


class Paddle:
    """The frontend that ctypes_calls and families ask for arrays."""

    @staticmethod
    def empty(shape: Any, dtype: Any, like: Tensor) -> Tensor:
        return paddle.empty(list(shape), dtype=dtype, device=like.place)

    @staticmethod
    def array(x: Tensor) -> explanation.Array:
        device = f"cuda:{x.place.gpu_device_id()}" if x.place.is_gpu_place() else "cpu"
        return explanation.Array(tuple(x.shape), capi.dtype_name(x.dtype), device, tuple(x.strides), x.data_ptr())

    @staticmethod
    def place(x: Tensor) -> dict[str, Any]:
        if x.place.is_cpu_place():
            return {}
        if not x.place.is_gpu_place():
            raise UnsupportedError(f"query is on {x.place}; flashmask runs on CPU and CUDA tensors")
        index = x.place.gpu_device_id()
        stream: Any = paddle.device.current_stream(paddle.CUDAPlace(index)).stream_base
        return {"device": capi.cuda_device(index), "stream": stream.cuda_stream}

    @staticmethod
    def empty_on_host(shape: Any, dtype: Any) -> Tensor:
        return paddle.empty(list(shape), dtype=dtype, device="cpu")

    @staticmethod
    def integers(name: str, value: Any, device: Any = None, shape: str | None = None) -> Tensor:
        values = _numbers(name, value, device)
        arguments.check_vector(name, values, values.dtype in (paddle.int64, paddle.int32), shape=shape)
        return values

    @staticmethod
    def flags(name: str, value: Any, device: Any = None) -> Tensor:
        values = _numbers(name, value, device)
        arguments.check_vector(name, values, values.dtype in (paddle.bool, paddle.int64, paddle.int32), "bools")
        return values.astype("int32")


def _numbers(name: str, value: Any, device: Any) -> Tensor:
    """A tensor in host memory."""
    if device is not None and str(device) not in ("cpu", "Place(cpu)"):
        raise ValueError(f"device is {device}; masks are built in host memory, from where Tensor.to() moves them")
    try:
        values = value.cpu() if isinstance(value, paddle.Tensor) else paddle.to_tensor(value, place="cpu")
    except ValueError as error:
        raise arguments.ragged(name, error) from None
    return values if values.size else values.astype("int64")


def checked_tensor(name: str, x: Any) -> Tensor:
    if not isinstance(x, paddle.Tensor):
        raise TypeError(f"{name} is {arguments.describe(x)}; it must be a paddle.Tensor")
    return x
