# SPDX-License-Identifier: Apache-2.0
"""numpy's arrays as the C interface takes them, and the checks of arguments that are arrays."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .._core import arguments, explanation
from .._core.annotations import Layout

Array: TypeAlias = NDArray[Any]


class Numpy:
    """The frontend that ctypes_calls and families ask for arrays."""

    has_positions = True

    @staticmethod
    def empty(shape: Any, dtype: Any, like: Array) -> Array:
        if dtype == like.dtype.name:
            dtype = like.dtype  # its name may be known to ml_dtypes alone
        return _in_memory_as(like, dtype) if shape == like.shape else np.empty(shape, dtype)

    @staticmethod
    def array(x: Array) -> explanation.Array:
        size = x.dtype.itemsize
        if any(stride % size for stride in x.strides):
            raise ValueError(f"an array {x.dtype} {list(x.shape)} has strides {x.strides} bytes, not whole elements")
        dtype = x.dtype.name if x.dtype.isnative else x.dtype.str
        return explanation.Array(x.shape, dtype, "cpu", tuple(stride // size for stride in x.strides), x.ctypes.data)

    @staticmethod
    def place(_: object) -> dict[str, Any]:
        return {}

    @staticmethod
    def empty_on_host(shape: Any, dtype: Any) -> Array:
        return np.empty(shape, dtype)

    @staticmethod
    def integers(name: str, value: Any, device: Any = None, shape: str | None = None) -> Array:
        if device not in (None, "cpu"):
            raise ValueError(f"device is {device!r}; numpy's arrays are in host memory")
        values = numbers_of(name, value)
        arguments.check_vector(name, values, not values.size or values.dtype.kind in "iu", shape=shape)
        return values.astype(np.int64, copy=False)

    @classmethod
    def flags(cls, name: str, value: Any, device: Any = None) -> Array:
        values = numbers_of(name, value)
        arguments.check_vector(name, values, not values.size or values.dtype.kind in "iub", "bools")
        return cls.integers(name, (values != 0).astype(np.int32), device)


def _in_memory_as(like: Array, dtype: Any) -> Array:
    """A dense array, its dimensions in memory in the order of `like`'s strides, but the last one innermost.

    numpy's empty_like puts a dimension that is broadcast, whose stride is 0, within the last.
    """
    outer = sorted(range(like.ndim - 1), key=lambda d: like.strides[d], reverse=True)
    order = (*outer, like.ndim - 1)
    return np.empty([like.shape[d] for d in order], dtype).transpose(np.argsort(order))


def numbers_of(name: str, value: Any) -> Array:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise arguments.ragged(name, error) from None


def checked_array(name: str, x: Any) -> Array:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is {arguments.describe(x)}; it must be a numpy array")
    return x


def in_bshd(layout: Layout, **arrays: Any) -> list[Array]:
    """The arrays as BSHD views."""
    shape = arguments.LAYOUTS[arguments.choice("layout", layout, arguments.LAYOUTS)]
    for name, x in arrays.items():
        arguments.check_dimensions(name, checked_array(name, x).shape, shape)
    return [in_layout(layout, x) for x in arrays.values()]


def in_layout(layout: Layout, x: Array) -> Array:
    return x.swapaxes(1, 2) if layout == "bhsd" else x
