# SPDX-License-Identifier: Apache-2.0
"""KvCache and SequenceMask: the keys of sequences, and what their rows see."""

from __future__ import annotations

import ctypes as C
import dataclasses
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from .._core import arguments, caches, capi, explanation
from .._core.annotations import Window
from .._core.docstrings import composed
from .._core.errors import UnsupportedError
from . import tensor_arguments
from .mask import Mask

CacheLayout: TypeAlias = Literal["NHD", "HND"]
KeyLayout: TypeAlias = Literal["auto", "sequences", "pages"]
Table: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
LAYOUTS = {"NHD": "[pages, page_size, heads_kv, dim]", "HND": "[pages, heads_kv, page_size, dim]"}
FOR_GOOD = 2**31 - 1  # a row that no sequence reaches
_OTHER_FLOAT8 = (torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz)
_TABLES = ("page_table", "page_indptr", "page_indices", "seqlens", "k_scale", "v_scale")


@composed
@dataclasses.dataclass(eq=False, repr=False)
class KvCache:
    """Keys and values of a batch of sequences, in pages or contiguous. Tensors are borrowed: what they hold when a
    call's work runs counts.

    k, v: [pages, page_size, heads_kv, head_dim] and [.., head_dim_v], any page_size, the last dimension contiguous;
        without page_table [batch, keys, heads_kv, ..]. The dtype of the queries, or float8_e4m3fn, for which uint8
        stands, too. As attributes they are in the layout "NHD".
    {page_table}
    k_scale, v_scale: what an element of a float8 cache is multiplied by: a number, or float32 of up to three dimensions
        that broadcast to [pages, page_size, heads_kv], in both layouts. None: 1.
    layout: of k and v, "NHD" as above or "HND", [pages, heads_kv, page_size, dim].

    An attribute may be set to another of its kind; the next use checks it.

    Raises TypeError or ValueError if an argument is no such tensor; a call checks shapes and dtypes.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_table: Table | None = None
    seqlens: torch.Tensor | None = None
    k_scale: torch.Tensor | float | None = None
    v_scale: torch.Tensor | float | None = None
    layout: CacheLayout = "NHD"
    _operands: ClassVar[tuple[Any, ...] | None] = None  # what operands() keeps

    def __post_init__(self) -> None:
        if arguments.choice("layout", self.layout, LAYOUTS) == "HND":
            self._check_keys(LAYOUTS["HND"])
            self.k, self.v, self.layout = self.k.transpose(1, 2), self.v.transpose(1, 2), "NHD"
        self.operands()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if self._operands is not None:
            object.__setattr__(self, "_operands", None)

    @property
    def batch(self) -> int:
        """Requests."""
        k, _, page_table, page_indptr, *_ = self.operands()
        if page_indptr is not None:
            return page_indptr.shape[0] - 1
        return (k if page_table is None else page_table).shape[0]

    def tables(self) -> dict[str, torch.Tensor]:
        """Tensors beside k and v that are there, by their names in the operators."""
        return {name: x for name, x in zip(_TABLES, self.operands()[2:]) if x is not None}

    def operands(self) -> tuple[Any, ...]:
        """k, v and the tables as the operators take them: checked once after an attribute was set."""
        made = self._operands
        if made is None:
            made = self._checked_operands()
            object.__setattr__(self, "_operands", made)
        return made

    def _checked_operands(self) -> tuple[Any, ...]:
        arguments.choice("layout", self.layout, ("NHD",))
        self._check_keys(LAYOUTS["NHD"])
        for name in ("k_scale", "v_scale"):
            if (scale := getattr(self, name)) is not None and not isinstance(scale, torch.Tensor):
                number = torch.full((), arguments.number(name, scale), dtype=torch.float32, device=self.k.device)
                setattr(self, name, number)
        tables = dict(zip(_TABLES, (*self._page_tables(), self.seqlens, self.k_scale, self.v_scale)))
        for name, x in tables.items():
            if x is not None:
                tensor_arguments.check_dense(name, x)
        tensor_arguments.check_one_device(k=self.k, v=self.v, **tables)
        return self.k, self.v, *tables.values()

    def _check_keys(self, shape: str) -> None:
        """TypeError, ValueError or UnsupportedError unless k and v are keys and values of this shape, in words."""
        for name, x in (("k", self.k), ("v", self.v)):
            tensor_arguments.check_dense(name, x, shape)
            arguments.check_dimensions(name, x.shape, shape)
            if x.dtype in _OTHER_FLOAT8:
                raise UnsupportedError(f"{name} is {x.dtype}; a cache of 8 bits is float8_e4m3fn")

    def _page_tables(self) -> tuple[Any, Any, Any]:
        """page_table, page_indptr and page_indices."""
        table: Any = self.page_table
        if not isinstance(table, (tuple, list)):
            return table, None, None
        if len(table) != 2:
            raise ValueError(f"page_table has {len(table)} entries; it must be a tensor or (indptr, indices)")
        indptr, indices = self.page_table = tuple(table)  # a list could change without being set
        return None, indptr, indices

    def validate(self) -> None:
        """Raises ValueError naming the first request and value that a call would clamp, or read as zeros.

        Reads lengths and tables on the host, and so waits for a device.
        """
        validate_call(self, None, None, None)

    def __repr__(self) -> str:
        return f"KvCache({self.batch} requests, k {arguments.describe(self.k)}, v {arguments.describe(self.v)})"


@composed
@dataclasses.dataclass(frozen=True, eq=False)
class SequenceMask:
    """A mask of sequences: which keys their rows see. Rows and keys count from the beginning of the *sequence*, so one
    mask serves prefill, every chunk, decode and verification. All tensors but block_mask are int32; all are on the
    cache's device and borrowed: a store into bounds hides a key from then on.

    {sequence_mask}

    Raises TypeError or ValueError if an argument is wrong in itself; a call checks shapes, and raises ValueError naming
    key_layout if they fit both layouts.
    """

    causal: bool = True
    window_size: Window = (-1, -1)
    bounds: torch.Tensor | None = None
    tail: torch.Tensor | None = None
    tail_lens: torch.Tensor | None = None
    tail_depth: torch.Tensor | None = None
    q_pos: torch.Tensor | None = None
    k_pos: torch.Tensor | None = None
    _: dataclasses.KW_ONLY
    block_mask: torch.Tensor | None = None
    key_layout: KeyLayout = "auto"
    _operands: ClassVar[tuple[Any, ...]] = ()  # what operands() begins with

    def __post_init__(self) -> None:
        object.__setattr__(self, "causal", arguments.flag("causal", self.causal))
        window = arguments.window("window_size", self.window_size) or (-1, -1)
        object.__setattr__(self, "window_size", window)
        arguments.choice("key_layout", self.key_layout, caches.KEY_LAYOUTS)
        for name, x in self.tensors().items():
            tensor_arguments.check_dense(name, x)
        tensors = (self.bounds, self.tail, self.tail_lens, self.tail_depth, self.q_pos, self.k_pos, self.block_mask)
        operands = (self.causal, *window, self.key_layout == "pages", *tensors)
        object.__setattr__(self, "_operands", operands)

    @classmethod
    def from_mask(cls, mask: Mask) -> SequenceMask:
        """The mask of sequences that a square training Mask of 1 or heads_kv heads says, and goes on saying past its
        end: keys past its columns see the band alone, and a bound that reaches its last row holds for good.

        Raises ValueError if it is not square, and UnsupportedError naming what a mask of sequences has not: a q_offset,
        positions, interval lists.
        """
        check_kind("mask", mask, Mask)
        if mask.seqlen_q != mask.seqlen_k:
            raise ValueError(f"mask is for {mask.seqlen_q} rows and {mask.seqlen_k} keys; it must be square")
        if mask.column_ptr is not None:
            raise UnsupportedError(
                "mask has interval lists (more than two hidden intervals in a column), which a mask of sequences "
                "has not"
            )
        refused = {"q_offset": mask.q_offset or None, "q_pos": mask.q_pos}
        for name, x in refused.items():
            if x is not None:
                raise UnsupportedError(
                    f"mask has a {name}, which a mask of sequences has not; write it as bounds (masks.from_dense)"
                )
        bounds = mask.bounds
        if bounds is not None:
            bounds = torch.where(bounds >= mask.seqlen_q, FOR_GOOD, bounds).to(torch.int32)
        window = mask.window or (-1, -1)
        return cls(mask.causal, window, bounds, block_mask=mask.block_mask, key_layout="sequences")

    def replace(self, **changes: Any) -> SequenceMask:
        """This mask with other arguments."""
        return dataclasses.replace(self, **changes)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are there, by their names."""
        names = "bounds tail tail_lens tail_depth q_pos k_pos block_mask".split()
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def layout_for(self, cache: KvCache, batch: int | None) -> str:
        """How bounds and k_pos lie in a call over the cache with so many requests, None if rows belong to none."""
        bounds, k_pos = (None if x is None else x.shape for x in (self.bounds, self.k_pos))
        return caches.key_layout(self.key_layout, bounds, k_pos, cache.k.shape, batch, cache.page_table is not None)

    def operands(self, cache: KvCache, batch: int | None) -> tuple[Any, ...]:
        """The mask as the operators take it."""
        if self.key_layout != "auto" or self.bounds is self.k_pos is None:
            return self._operands
        causal, left, right, _, *tensors = self._operands
        return causal, left, right, self.layout_for(cache, batch) == "pages", *tensors


def check_kind(name: str, value: Any, kind: type) -> None:
    """TypeError unless the value is of the kind."""
    if not isinstance(value, kind):
        advice = "; SequenceMask.from_mask makes one of a Mask" if isinstance(value, Mask) else ""
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a {kind.__name__}{advice}")


def validate_call(
    cache: KvCache, mask: SequenceMask | None, q: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None
) -> None:
    """ValueError naming the first request and value that the call would clamp, or read as zeros. Waits for a device."""
    args, keep = call_struct(cache, mask, q, cu_seqlens_q)
    capi.check(capi.load().fm_cached_validate(C.byref(args)))
    del keep


def call_struct(
    cache: KvCache,
    mask: SequenceMask | None,
    q: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    on_host: bool = True,
) -> tuple[Any, list[torch.Tensor]]:
    """(fm_cached_args, what it refers to) for questions about a call, with small tensors copied to host memory, or
    none. q None: one row a request.
    """
    keep: list[torch.Tensor] = []

    def described(name: str, x: torch.Tensor, copied: bool = True) -> capi.Tensor:
        pointer = None
        if not on_host and not x.is_meta:
            pointer = x.data_ptr()
        elif copied:
            keep.append(x.detach().cpu())
            x, pointer = keep[-1], keep[-1].data_ptr()
        return explanation.Array(tuple(x.shape), capi.dtype_name(x.dtype), "cpu", x.stride(), pointer).described(name)

    k = cache.operands()[0]
    dtype = k.dtype if k.element_size() > 1 else torch.float32
    if q is None:
        q = torch.empty(cache.batch, 0, cache.k.shape[2], cache.k.shape[3], dtype=dtype, device="meta")
    out = torch.empty(*q.shape[:-1], cache.v.shape[3], dtype=q.dtype, device="meta")
    tables = {name: described(name, x) for name, x in cache.tables().items()}
    kv = {name: described(f"cache.{name}", getattr(cache, name), False) for name in ("k", "v")}
    rows = {"q": described("q", q, False), "out": described("out", out, False)}
    if cu_seqlens_q is not None:
        rows["cu_seqlens_q"] = described("cu_seqlens_q", cu_seqlens_q)
    args = capi.make(capi.CachedArgs, **rows, cache=C.pointer(capi.make(capi.KvCache, **kv, **tables)))
    if mask is not None:
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        causal, left, right, in_pages, *_ = mask.operands(cache, batch)
        flags = capi.HAS_WINDOW | (capi.CAUSAL if causal else 0) | (capi.KEYS_IN_PAGES if in_pages else 0)
        tensors = {name: described(name, x) for name, x in mask.tensors().items()}
        window = {"window_left": left, "window_right": right}
        args.mask = C.pointer(capi.make(capi.SequenceMask, flags=flags, **window, **tensors))
    return args, keep
