# SPDX-License-Identifier: Apache-2.0
"""KvCache and SequenceMask as pytrees: the keys of sequences, and what their rows see."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._core import arguments, caches
from .._core.annotations import Window
from .._core.docstrings import composed


def _arrays(named: dict[str, Any]) -> dict[str, jax.Array]:
    """The values that are there, as arrays: a number is float32."""
    is_number = lambda x: isinstance(x, (int, float))
    return {name: jnp.asarray(x, jnp.float32 if is_number(x) else None) for name, x in named.items() if x is not None}


@composed
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v", "page_table", "seqlens", "k_scale", "v_scale"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class KvCache:
    """Keys and values of a batch of sequences, in pages or contiguous.

    k, v: [pages, page_size, heads_kv, head_dim] and [.., head_dim_v], any page_size; without page_table [batch, keys,
        heads_kv, ..]. The dtype of the queries, or float8_e4m3fn, for which uint8 stands, too.
    {page_table}
    k_scale, v_scale: what an element of a float8 cache is multiplied by: a number, or float32 of up to three dimensions
        that broadcast to [pages, page_size, heads_kv]. None: 1.

    All are leaves of a pytree. Calls check shapes and dtypes.
    """

    k: jax.Array
    v: jax.Array
    page_table: Any = None
    seqlens: jax.Array | None = None
    k_scale: Any = None
    v_scale: Any = None

    def __post_init__(self) -> None:
        caches.check_page_table(self.page_table)

    def replace(self, **changes: Any) -> KvCache:
        """This cache with other arrays."""
        return dataclasses.replace(self, **changes)

    def tensors(self) -> dict[str, Any]:
        """The arrays that are there, by their names in a call."""
        named = {"cache.k": self.k, "cache.v": self.v}
        if isinstance(self.page_table, (tuple, list)):
            named["page_indptr"], named["page_indices"] = self.page_table
        else:
            named["page_table"] = self.page_table
        return _arrays({**named, **{name: getattr(self, name) for name in ("seqlens", "k_scale", "v_scale")}})


_TENSORS = ("bounds", "tail", "tail_lens", "tail_depth", "q_pos", "k_pos", "block_mask")


@composed
@functools.partial(
    jax.tree_util.register_dataclass, data_fields=list(_TENSORS), meta_fields=["causal", "window_size", "key_layout"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class SequenceMask:
    """A mask of sequences: which keys their rows see. Rows and keys count from the beginning of the *sequence*, so one
    mask serves prefill, every chunk, decode and verification. All arrays but block_mask are int32.

    {sequence_mask}

    The arrays are leaves of a pytree; the rest is static.

    Raises TypeError or ValueError if an argument is wrong in itself; a call checks shapes.
    """

    causal: bool = True
    window_size: Window = (-1, -1)
    bounds: Any = None
    tail: Any = None
    tail_lens: Any = None
    tail_depth: Any = None
    q_pos: Any = None
    k_pos: Any = None
    _: dataclasses.KW_ONLY
    block_mask: Any = None
    key_layout: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "causal", arguments.flag("causal", self.causal))
        window = arguments.window("window_size", self.window_size) or (-1, -1)
        object.__setattr__(self, "window_size", window)
        arguments.choice("key_layout", self.key_layout, caches.KEY_LAYOUTS)

    def replace(self, **changes: Any) -> SequenceMask:
        """This mask with other arguments."""
        return dataclasses.replace(self, **changes)

    def tensors(self) -> dict[str, Any]:
        """The arrays that are there, by their names in a call."""
        return _arrays({name: getattr(self, name) for name in _TENSORS})

    def layout_for(self, cache: KvCache, batch: int) -> str:
        """How bounds and k_pos lie in a call over the cache with so many requests."""
        bounds, k_pos = (None if x is None else x.shape for x in (self.bounds, self.k_pos))
        return caches.key_layout(self.key_layout, bounds, k_pos, cache.k.shape, batch, cache.page_table is not None)
