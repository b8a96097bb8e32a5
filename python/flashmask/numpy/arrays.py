# SPDX-License-Identifier: Apache-2.0
"""numpy's arrays as the C interface takes them, and the checks of arguments that are arrays."""

import numpy as np

from .._core import arguments, explanation


class Numpy:
    """The frontend that ctypes_calls and families ask for arrays."""

    has_positions = True

    @staticmethod
    def empty(shape, dtype, like):
        if dtype == like.dtype.name:
            dtype = like.dtype  # of a name that only ml_dtypes knows
        return _in_memory_as(like, dtype) if shape == like.shape else np.empty(shape, dtype)

    @staticmethod
    def array(x):
        size = x.dtype.itemsize
        if any(stride % size for stride in x.strides):
            raise ValueError(f"an array {x.dtype} {list(x.shape)} has strides {x.strides} bytes, not whole elements")
        dtype = x.dtype.name if x.dtype.isnative else x.dtype.str
        return explanation.Array(x.shape, dtype, "cpu", tuple(stride // size for stride in x.strides), x.ctypes.data)

    @staticmethod
    def place(_):
        return {}

    empty_on_host = staticmethod(np.empty)

    @staticmethod
    def integers(name, value, device, shape=None):
        if device not in (None, "cpu"):
            raise ValueError(f"device is {device!r}; numpy's arrays are in host memory")
        values = numbers_of(name, value)
        arguments.check_vector(name, values, not values.size or values.dtype.kind in "iu", shape=shape)
        return values.astype(np.int64, copy=False)

    @classmethod
    def flags(cls, name, value, device):
        values = numbers_of(name, value)
        arguments.check_vector(name, values, not values.size or values.dtype.kind in "iub", "bools")
        return cls.integers(name, (values != 0).astype(np.int32), device)


def _in_memory_as(like, dtype):
    """A dense array, its dimensions in memory in the order of `like`'s strides, but the last one innermost.

    numpy's empty_like puts a dimension that is broadcast, whose stride is 0, within the last.
    """
    outer = sorted(range(like.ndim - 1), key=lambda d: like.strides[d], reverse=True)
    order = (*outer, like.ndim - 1)
    return np.empty([like.shape[d] for d in order], dtype).transpose(np.argsort(order))


def numbers_of(name, value):
    try:
        return np.asarray(value)
    except ValueError as error:
        raise arguments.ragged(name, error) from None


def checked_array(name, x):
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is {arguments.given(x)}; it must be a numpy array")
    return x


def in_bshd(layout, **arrays):
    """The arrays as BSHD views."""
    shape = arguments.LAYOUTS[arguments.choice("layout", layout, arguments.LAYOUTS)]
    for name, x in arrays.items():
        arguments.check_dimensions(name, checked_array(name, x).shape, shape)
    return [in_layout(layout, x) for x in arrays.values()]


def in_layout(layout, x):
    return x.swapaxes(1, 2) if layout == "bhsd" else x
