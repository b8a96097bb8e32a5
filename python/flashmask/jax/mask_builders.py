# SPDX-License-Identifier: Apache-2.0
"""The mask families, built from JAX's arrays by flashmask_build_mask.

Lists and numpy's arrays are in host memory: their masks are built there at once, and wrong values raise. JAX's arrays,
which may be traced, are read on their device when the program runs.
"""

import ctypes as C
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import arguments, call_options, capi, ctypes_calls, explanation
from .._core.docstrings import composed
from .._core.families import Builders, Form
from . import library
from .mask import Mask
from .xla_calls import varying_alike

_CUDA = 1  # fm_options' first device: there nothing is read, so shapes alone can be asked for


class _Jax:
    """The frontend that families and ctypes_calls ask for arrays."""

    @staticmethod
    def empty_on_host(shape: Any, dtype: Any) -> Any:
        return np.empty(shape, dtype)

    @staticmethod
    def array(x: Any) -> explanation.Array:
        """Describes an array: numpy's, which are contiguous, with their contents; JAX's by their form alone."""
        return explanation.Array(x.shape, x.dtype.name, pointer=x.ctypes.data if isinstance(x, np.ndarray) else None)

    @staticmethod
    def integers(name: str, value: Any, device: Any = None, shape: str | None = None) -> Any:
        array = _array(name, value)
        is_right = not array.size or jnp.issubdtype(array.dtype, jnp.integer)
        arguments.check_vector(name, array, is_right, shape=shape)
        if isinstance(array, np.ndarray):
            return np.ascontiguousarray(array, np.int64)
        return array if array.dtype.name in ("int32", "int64") else array.astype(jnp.int32)

    @classmethod
    def flags(cls, name: str, value: Any, device: Any = None) -> Any:
        array = _array(name, value)
        is_right = not array.size or jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == bool
        arguments.check_vector(name, array, is_right, "bools")
        return cls.integers(name, (array != 0).astype(np.int32))

    @classmethod
    def build(
        cls, family: str, form: Form, vectors: dict[str, Any], numbers: dict[str, int], device: Any = None
    ) -> tuple[Mask, jax.Array | None]:
        """(Mask, order). Lists go to `device`, or where JAX puts new arrays."""
        if form.vectors == 0 and not form.has_lists:
            return Mask(**form.band()), None
        is_on_host = all(isinstance(x, np.ndarray) for x in vectors.values())
        if is_on_host and form.has_lists:
            fields, order = ctypes_calls.build_lists(cls, family, vectors, numbers, form.has_order)
            return _put(Mask(**fields), device), _put(order, device)
        if is_on_host:
            made = ctypes_calls.build_mask(cls, family, vectors, numbers, form.has_order)
            bounds, order = _put(made, device)
        else:
            _check_length(form, vectors)
            names, values = "".join(f"{name}," for name in (*vectors, *numbers)), tuple(numbers.values())
            bounds, order = _build(family, names, values, form.has_order, *map(jnp.asarray, vectors.values()))
        keys = bounds.shape[2]
        return Mask(form.rows_of(keys), keys, bounds=bounds, causal=form.causal, window=form.window), order


def _put(arrays: Any, device: Any) -> Any:
    is_place = isinstance(device, (jax.Device, jax.sharding.Sharding))
    return jax.device_put(arrays, device if is_place else None)


class _Masks(Builders[Mask, jax.Array]):
    @composed
    def from_dense(self, visible: Any) -> Mask:
        """
        {from_dense}

        Reads the matrix, so that it cannot be traced.
        """
        if isinstance(visible, jax.core.Tracer):
            raise TypeError(f"visible is traced, {visible.dtype} {list(visible.shape)}; from_dense reads its contents")
        dense = _array("visible", visible)
        arguments.check_matrix(dense, dense.dtype in (jnp.bool_, jnp.uint8))
        return Mask(**ctypes_calls.from_dense(_Jax, np.ascontiguousarray(dense)))


# The mask families, as flashmask.masks has them for torch.
masks = _Masks(_Jax)


def _array(name: str, value: Any) -> Any:
    """JAX's array, or numpy's of numbers and lists."""
    if isinstance(value, jax.Array):
        return value
    try:
        return np.asarray(value)
    except ValueError as error:
        raise arguments.ragged(name, error) from None


def _check_length(form: Form, vectors: dict[str, Any]) -> None:
    for name, x in vectors.items():
        if form.keys is None and not isinstance(x, np.ndarray):
            raise arguments.missing_seqlen(name, "it is an array of JAX")


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _build(family: str, names: str, numbers: tuple[int, ...], has_order: bool, *vectors: Any) -> Any:
    """(bounds, order), where the vectors are; order is None if there is none."""
    shape = _shape(family, names.split(",")[:-1], numbers, vectors)
    results = [jax.ShapeDtypeStruct(shape, jnp.int32)]
    if has_order:
        results.append(jax.ShapeDtypeStruct((*shape[:3], 2), jnp.int32))  # the two halves of int64
    function = jax.ffi.ffi_call("flashmask_build_mask", results, vmap_method="sequential")
    made = function(*vectors, family=family, names=names, numbers=np.asarray(numbers, np.int64))
    bounds, *order = varying_alike(*made, *vectors)[: len(results)]
    return bounds, order[0][..., 0] if has_order else None


def _shape(family: str, names: list[str], numbers: tuple[int, ...], vectors: Any) -> tuple[int, ...]:
    """Returns the shape of the bounds, by the shapes of the vectors; raises if the vectors are invalid."""
    given = {name: _Jax.array(x).described(name) for name, x in zip(names, vectors)}
    parameters = ctypes_calls.mask_parameters(given, dict(zip(names[len(vectors) :], numbers)))
    mask, options = capi.make(capi.Mask), call_options.make(device=_CUDA)
    capi.check(library.load().fm_mask_shape(family.encode(), C.byref(parameters), C.byref(mask), C.byref(options)))
    return tuple(mask.bounds.shape[:4])
