# SPDX-License-Identifier: Apache-2.0
"""KvCache and SequenceMask: the keys of sequences, and what their rows see."""

from __future__ import annotations

import ctypes as C
import dataclasses
from typing import Any, Literal, TypeAlias

import numpy as np

from .._core import arguments, caches, call_options, capi, explanation
from .._core.annotations import Window
from .._core.docstrings import composed
from .arrays import Array, Numpy, checked_array

CacheLayout: TypeAlias = Literal["NHD", "HND"]
KeyLayout: TypeAlias = Literal["auto", "sequences", "pages"]
_LAYOUTS = {"NHD": "[pages, page_size, heads_kv, dim]", "HND": "[pages, heads_kv, page_size, dim]"}
_SEQUENCES = ("tail", "tail_lens", "tail_depth", "q_pos", "block_mask")


@composed
@dataclasses.dataclass(eq=False, repr=False)
class KvCache:
    """Keys and values of a batch of sequences, in pages or contiguous. All arrays are borrowed: what they hold when a
    call runs counts.

    k, v: [pages, page_size, heads_kv, head_dim] and [.., head_dim_v], any page_size, the last dimension contiguous;
        without page_table [batch, keys, heads_kv, ..]. The dtype of the queries, or ml_dtypes.float8_e4m3fn, for which
        uint8 stands, too. As attributes they are in the layout "NHD".
    {page_table}
    k_scale, v_scale: what an element of a float8 cache is multiplied by: a number, or float32 of up to three dimensions
        that broadcast to [pages, page_size, heads_kv], in both layouts. None: 1.
    layout: of k and v, "NHD" as above or "HND", [pages, heads_kv, page_size, dim].

    Raises TypeError or ValueError if an argument is wrong by its shape or dtype.
    """

    k: Array
    v: Array
    page_table: Array | tuple[Array, Array] | None = None
    seqlens: Array | None = None
    k_scale: Array | float | None = None
    v_scale: Array | float | None = None
    layout: CacheLayout = "NHD"

    def __post_init__(self) -> None:
        layout = arguments.choice("layout", self.layout, _LAYOUTS)
        for name in ("k", "v"):
            x = checked_array(name, getattr(self, name))
            arguments.check_dimensions(name, x.shape, _LAYOUTS[layout])
            setattr(self, name, x.swapaxes(1, 2) if layout == "HND" else x)
        for name in ("k_scale", "v_scale"):
            if (scale := getattr(self, name)) is not None and not isinstance(scale, np.ndarray):
                setattr(self, name, np.array(arguments.number(name, scale), np.float32))
        caches.check_page_table(self.page_table)
        self.layout = "NHD"
        self.arrays()
        fm_args, fm_options = self._a_call(), call_options.make(backend="reference")
        capi.check(
            capi.load().fm_cached_forward_workspace(C.byref(fm_args), C.byref(fm_options), C.byref(C.c_size_t()))
        )

    @property
    def batch(self) -> int:
        """Requests."""
        if isinstance(self.page_table, (tuple, list)):
            return max(self.page_table[0].shape[0] - 1, 0) if self.page_table[0].ndim else 0
        table = self.k if self.page_table is None else self.page_table
        return table.shape[0] if table.ndim else 0

    def validate(self) -> None:
        """Raises ValueError naming the first request and value that a call would clamp, or read as zeros."""
        capi.check(capi.load().fm_cached_validate(C.byref(self._a_call())))

    def arrays(self) -> dict[str, Array]:
        """The arrays that are there, by their names in fm_kv_cache."""
        table: Any = self.page_table
        is_pair = isinstance(table, (tuple, list))
        tables = dict(zip(("page_indptr", "page_indices"), table)) if is_pair else {"page_table": table}
        named = {**tables, "seqlens": self.seqlens, "k_scale": self.k_scale, "v_scale": self.v_scale}
        others = {name: checked_array(name, x) for name, x in named.items() if x is not None}
        return {"k": self.k, "v": self.v, **others}

    def struct(self) -> Any:
        """A pointer to fm_kv_cache, whose arrays have to stay."""
        return C.pointer(capi.make(capi.KvCache, **_described(self.arrays(), "cache.")))

    def _a_call(self) -> capi.CachedArgs:
        """fm_cached_args of a call without memory, which has the cache's shapes."""
        dtype = Numpy.array(self.k).dtype
        dtype = "float32" if dtype in ("uint8", "float8_e4m3fn") else dtype
        q = explanation.Array((self.batch, 0, self.k.shape[2], self.k.shape[3]), dtype)
        out = explanation.Array((*q.shape[:3], self.v.shape[3]), dtype)
        return capi.make(capi.CachedArgs, q=q.described("q"), out=out.described("out"), cache=self.struct())

    def __repr__(self) -> str:
        return f"KvCache({self.batch} requests, k {arguments.describe(self.k)}, v {arguments.describe(self.v)})"


@composed
@dataclasses.dataclass(frozen=True, eq=False)
class SequenceMask:
    """A mask of sequences: which keys their rows see. Rows and keys count from the beginning of the *sequence*, so one
    mask serves prefill, every chunk and decode. All arrays but block_mask are int32, and all are borrowed.

    {sequence_mask}

    Raises TypeError or ValueError if an argument is wrong in itself; a call checks shapes, and raises ValueError naming
    key_layout if they fit both layouts.
    """

    causal: bool = True
    window_size: Window = (-1, -1)
    bounds: Array | None = None
    tail: Array | None = None
    tail_lens: Array | None = None
    tail_depth: Array | None = None
    q_pos: Array | None = None
    k_pos: Array | None = None
    _: dataclasses.KW_ONLY
    block_mask: Array | None = None
    key_layout: KeyLayout = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "causal", arguments.flag("causal", self.causal))
        object.__setattr__(self, "window_size", arguments.window("window_size", self.window_size) or (-1, -1))
        arguments.choice("key_layout", self.key_layout, caches.KEY_LAYOUTS)
        self.arrays()

    def arrays(self) -> dict[str, Array]:
        """The arrays that are there, by their names."""
        named = {name: getattr(self, name) for name in ("bounds", "k_pos", *_SEQUENCES)}
        return {name: checked_array(name, x) for name, x in named.items() if x is not None}

    def struct(self, cache: KvCache, batch: int | None) -> Any:
        """A pointer to fm_sequence_mask of a call over the cache with so many requests, None if rows belong to none."""
        arrays = self.arrays()
        bounds, k_pos = (arrays[name].shape if name in arrays else None for name in ("bounds", "k_pos"))
        has_tables = cache.page_table is not None
        layout = caches.key_layout(self.key_layout, bounds, k_pos, cache.k.shape, batch, has_tables)
        left, right = arguments.window("window_size", self.window_size) or (-1, -1)
        flags = capi.HAS_WINDOW | (capi.CAUSAL if self.causal else 0) | (capi.KEYS_IN_PAGES if layout == "pages" else 0)
        window = {"window_left": left, "window_right": right}
        return C.pointer(capi.make(capi.SequenceMask, flags=flags, **window, **_described(arrays)))


def _described(arrays: dict[str, Array], prefix: str = "") -> dict[str, capi.Tensor]:
    named = {name: prefix + name if name in "kv" else name for name in arrays}
    return {name: Numpy.array(x).described(named[name]) for name, x in arrays.items()}
