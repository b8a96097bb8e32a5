# SPDX-License-Identifier: Apache-2.0
"""Mask: an attention mask in O(seqlen_k) memory, as a pytree of JAX arrays."""

from __future__ import annotations

import ctypes as C
import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .._core import arguments, capi
from .._core.annotations import Window
from .._core.docstrings import composed

_LEAVES = ("bounds", "block_mask", "column_ptr", "intervals")
_STATIC = ("seqlen_q", "seqlen_k", "causal", "window", "q_offset")
_FIELDS = ("seqlen_q", "seqlen_k", "bounds", "causal", "window", "q_offset", "block_mask", "column_ptr", "intervals")


@jax.tree_util.register_pytree_with_keys_class
@composed
class Mask:
    """
    {mask}

    jax.nn's is_causal is causal=True and q_offset=0.

    {interval_lists}

    The arrays are the leaves of a pytree, and may be traced; the rest is static. So a jitted function that
    takes a mask is traced once for masks of the same lengths.

    Raises TypeError or ValueError if an argument is wrong; the shapes of the arrays are checked by the call that uses
    them.
    """

    seqlen_q: int
    seqlen_k: int
    bounds: jax.Array | None
    causal: bool
    window: tuple[int, int] | None
    q_offset: int | None
    block_mask: jax.Array | None
    column_ptr: jax.Array | None
    intervals: jax.Array | None

    def __init__(
        self,
        seqlen_q: int,
        seqlen_k: int,
        *,
        bounds: Any = None,
        causal: bool = False,
        window: Window = None,
        q_offset: int | None = None,
        block_mask: Any = None,
        column_ptr: Any = None,
        intervals: Any = None,
    ) -> None:
        seqlen_q = arguments.length("seqlen_q", seqlen_q)
        self._set(
            seqlen_q=seqlen_q,
            seqlen_k=arguments.length("seqlen_k", seqlen_k),
            bounds=None if bounds is None else _checked_bounds(bounds, seqlen_q),
            causal=arguments.flag("causal", causal),
            window=arguments.window("window", window),
            q_offset=arguments.q_offset(q_offset),
            block_mask=None if block_mask is None else _checked_block_mask(block_mask),
            column_ptr=_checked_list("column_ptr", column_ptr, "intervals", intervals),
            intervals=_checked_list("intervals", intervals, "column_ptr", column_ptr),
        )

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise arguments.does_not_change(name)

    def __delattr__(self, name: str) -> NoReturn:
        raise arguments.does_not_change()

    def replace(self, **changes: Any) -> Mask:
        """Returns a copy of the mask with some of the constructor's arguments replaced."""
        return Mask(**{**{name: getattr(self, name) for name in _FIELDS}, **changes})

    def __reduce__(self) -> Any:
        return functools.partial(Mask, **{name: getattr(self, name) for name in _FIELDS}), ()

    def to_dense(self) -> jax.Array:
        """A bool array [batch, heads, seqlen_q, seqlen_k], True where row i sees key j: what jax.nn takes as a mask.

        Made on the host, also within jit.
        """
        of_heads = [x for x in (self.bounds, self.block_mask, self.column_ptr) if x is not None]
        wider = (max((x.shape[d] for x in of_heads), default=1) for d in (0, 1))
        visible = jax.ShapeDtypeStruct((*wider, self.seqlen_q, self.seqlen_k), jnp.bool_)
        write = functools.partial(self._dense, visible.shape)
        leaves = [getattr(self, name) for name in _LEAVES]
        return jax.pure_callback(write, visible, *leaves, vmap_method="sequential")

    def _dense(self, shape: tuple[int, ...], *leaves: Any) -> Any:
        arrays = [x if x is None else np.ascontiguousarray(x) for x in leaves]
        host = Mask.tree_unflatten(self.tree_flatten_with_keys()[1], arrays)
        mask, visible = capi.mask_of(host, lambda _, x: capi.tensor(x)), np.empty(shape, np.bool_)
        capi.check(capi.load().fm_mask_to_dense(C.byref(mask), C.byref(capi.tensor(visible))))
        return visible

    def __repr__(self) -> str:
        given = {name: getattr(self, name) for name in _FIELDS[2:]}
        parts = [f"{name}={_shown(value)}" for name, value in given.items() if value is not None and value is not False]
        return f"Mask({', '.join((str(self.seqlen_q), str(self.seqlen_k), *parts))})"

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        children = tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in _LEAVES)
        return children, tuple(getattr(self, name) for name in _STATIC)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> Mask:
        """Takes any leaves, as a tree map may put anything there; so nothing is checked."""
        mask = object.__new__(cls)
        mask._set(**dict(zip(_STATIC, static)), **dict(zip(_LEAVES, leaves)))
        return mask


def _shown(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)


def _checked_bounds(bounds: Any, seqlen_q: int) -> jax.Array:
    """`bounds` as an int32 array, its values, where they need more bits, clamped first as they would be anyway."""
    if not hasattr(bounds, "dtype"):
        raise TypeError(f"startend_row_indices is {arguments.describe(bounds)}; it must be an array of int32")
    if not jnp.issubdtype(bounds.dtype, jnp.integer) or bounds.dtype == jnp.uint8:
        raise TypeError(
            f"startend_row_indices is {bounds.dtype} {list(bounds.shape)}; "
            "it must be int32 [batch, heads, seqlen_k, n], not a dense mask"
        )
    if bounds.dtype != jnp.int32:
        bounds = bounds.clip(0, seqlen_q).astype(jnp.int32)
    return jnp.asarray(bounds)


def _checked_list(name: str, x: Any, other: str, others: Any) -> jax.Array | None:
    """`x` as an array of int32, which comes with another one."""
    if x is None:
        if others is not None:
            raise ValueError(f"{name} is None and {other} is given; they come together")
        return None
    if not hasattr(x, "dtype") or x.dtype != jnp.int32:
        raise TypeError(f"{name} is {arguments.describe(x)}; it must be an array of int32")
    return jnp.asarray(x)


def _checked_block_mask(block_mask: Any) -> jax.Array:
    """`block_mask` as an array of bool or uint8."""
    if not hasattr(block_mask, "dtype") or block_mask.dtype not in (jnp.bool_, jnp.uint8, jnp.int32):
        raise TypeError(f"block_mask is {arguments.describe(block_mask)}; it must be an array of bool, uint8 or int32")
    return jnp.asarray(block_mask != 0 if block_mask.dtype == jnp.int32 else block_mask)
