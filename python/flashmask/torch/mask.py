# SPDX-License-Identifier: Apache-2.0
"""Mask: an attention mask in O(seqlen_k) memory, as tensors on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .._core import arguments
from .._core.annotations import Window
from .._core.docstrings import composed
from . import mask_forms, mask_gather, mask_pictures
from ._torch_internals import pytree
from .annotations import Device
from .host_masks import BLOCK

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# The constructor's arguments.
_TENSORS = ("bounds", "block_mask", "q_pos", "k_pos", "column_ptr", "intervals")
_FIELDS = ("seqlen_q", "seqlen_k", "causal", "window", "q_offset", *_TENSORS)

_FORMS = """accepted are
  causal=True    [batch, heads, seqlen_k, 1]  LTS
  causal=True    [batch, heads, seqlen_k, 2]  LTS, LTE
  causal=False   [batch, heads, seqlen_k, 2]  LTS, UTE
  causal=False   [batch, heads, seqlen_k, 4]  LTS, LTE, UTS, UTE
of dtype int32 or int64; batch and heads may be 1. Column j is hidden from the rows \
LTS[j] <= i < LTE[j] and UTS[j] <= i < UTE[j]"""


@composed
class Mask:
    """
    {mask}

    {positions}

    {interval_lists}

    Tensors that have to be converted or made contiguous are copied, others are borrowed: they must not change in place
    once plan() was called, and later calls raise if they did.

    Raises TypeError or ValueError if the arguments disagree. The tensors' contents are not read.
    """

    seqlen_q: int
    seqlen_k: int
    bounds: torch.Tensor | None
    causal: bool
    window: tuple[int, int] | None
    q_offset: int | None
    block_mask: torch.Tensor | None
    q_pos: torch.Tensor | None
    k_pos: torch.Tensor | None
    column_ptr: torch.Tensor | None
    intervals: torch.Tensor | None

    def __init__(
        self,
        seqlen_q: int,
        seqlen_k: int,
        *,
        bounds: torch.Tensor | None = None,
        causal: bool = False,
        window: Window = None,
        q_offset: int | None = None,
        block_mask: torch.Tensor | None = None,
        q_pos: torch.Tensor | None = None,
        k_pos: torch.Tensor | None = None,
        column_ptr: torch.Tensor | None = None,
        intervals: torch.Tensor | None = None,
    ) -> None:
        seqlen_q, seqlen_k = arguments.length("seqlen_q", seqlen_q), arguments.length("seqlen_k", seqlen_k)
        causal = arguments.flag("causal", causal)
        set_field = object.__setattr__
        set_field(self, "seqlen_q", seqlen_q)
        set_field(self, "seqlen_k", seqlen_k)
        set_field(self, "bounds", None if bounds is None else _checked_bounds(bounds, seqlen_q, seqlen_k, causal))
        set_field(self, "causal", causal)
        set_field(self, "window", arguments.window("window", window))
        set_field(self, "q_offset", arguments.q_offset(q_offset))
        set_field(
            self, "block_mask", None if block_mask is None else _checked_block_mask(block_mask, seqlen_q, seqlen_k)
        )
        q_pos, k_pos = _checked_positions(q_pos, k_pos, self)
        set_field(self, "q_pos", q_pos)
        set_field(self, "k_pos", k_pos)
        column_ptr, intervals = _checked_lists(column_ptr, intervals, self)
        set_field(self, "column_ptr", column_ptr)
        set_field(self, "intervals", intervals)
        set_field(self, "_plans", {})
        if len(self._tensors()) > 1:
            _check_together(self)

    def __setattr__(self, name, value):
        raise arguments.does_not_change(name)

    def __delattr__(self, name):
        raise arguments.does_not_change()

    def __getstate__(self):
        return self._fields()  # without plans: a copy's tensors count their changes anew

    def __setstate__(self, state):
        """Checked as by the constructor, for a file may hold anything."""
        self.__init__(**{name: value for name, value in state.items() if name != "_plans"})  # older files have _plans

    @property
    def batch(self) -> int:
        """Batch entries of the mask: 1 (for all of the call's), or as many as the call has."""
        return max([x.shape[0] for x in self._tensors() if x is not self.intervals], default=1)

    @property
    def heads(self) -> int:
        """Heads of the mask: 1 (for all of the call's), heads_kv or heads_q; the larger if its tensors have both."""
        of_heads = (self.bounds, self.column_ptr, self.block_mask)
        return max([x.shape[1] for x in of_heads if x is not None], default=1)

    @property
    def shape(self) -> torch.Size:
        """The shape of to_dense(): batch, heads, seqlen_q, seqlen_k."""
        return torch.Size((self.batch, self.heads, self.seqlen_q, self.seqlen_k))

    @property
    def ndim(self) -> int:
        """4, as of to_dense()."""
        return 4

    @property
    def device(self) -> torch.device | None:
        """The device of the tensors; None without any: such a mask fits every device."""
        tensors = self._tensors()
        return tensors[0].device if tensors else None

    def some_tensor(self) -> torch.Tensor | None:
        """One of its tensors; None without any."""
        return next(iter(self._tensors()), None)

    def _tensors(self):
        every = (self.bounds, self.block_mask, self.q_pos, self.k_pos, self.column_ptr, self.intervals)
        return [x for x in every if x is not None]

    def _with_tensors(self, change):
        """Returns a copy with change(x) in place of each tensor x, or this mask if no tensor changes."""
        changed = {name: change(x) for name in _TENSORS if (x := getattr(self, name)) is not None}
        return self if all(x is getattr(self, name) for name, x in changed.items()) else self.replace(**changed)

    def replace(self, **changes: Any) -> Mask:
        """Returns a copy of the mask with some of the constructor's arguments replaced."""
        return Mask(**{**self._fields(), **changes})

    def _fields(self):
        """The constructor's arguments."""
        return {name: getattr(self, name) for name in _FIELDS}

    def gather(self, rows: Iterable[tuple[int, int]], keys: Iterable[tuple[int, int]] | None = None) -> Mask:
        """The mask of some rows and keys, each one segment after another: of a process that holds a part of a sequence.

        rows: [(begin, end), ...], ascending; keys: the same in any order, or None: all. Always exact, and traceable.

        A bound becomes the number of gathered rows before it. A band stays a band if rows and keys are one run each.
        Over several runs it becomes row intervals, if the columns have room for them; otherwise a band over positions.
        A mask with interval lists is read in host memory, which a trace cannot.
        Raises ValueError naming the segment, and UnsupportedError if the mask has a block mask and a segment does not
        begin at a multiple of 128, or ends elsewhere and is not the last.
        """
        return mask_gather.gather(self, rows, keys)

    def to(self, device: Device, non_blocking: bool = False) -> Mask:
        """Returns a copy of the mask with its tensors on `device`, or this mask if they are there already."""
        return self._with_tensors(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Mask:
        """Returns a copy of the mask in pinned host memory, so that to(device, non_blocking=True) does not wait.

        A DataLoader with pin_memory=True calls it.
        """
        return self._with_tensors(lambda x: x.pin_memory())

    def contiguous(self) -> Mask:
        """This mask: its tensors are contiguous."""
        return self

    def cpu(self) -> Mask:
        """Returns the mask with its tensors in host memory."""
        return self.to("cpu")

    def cuda(self, device: Device | None = None, non_blocking: bool = False) -> Mask:
        """Returns the mask with its tensors on a CUDA device, the current one by default."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    # --- The plan ---------------------------------------------------------------------------------

    def plan(self, device: Device | None = None, *, max_mask_bytes: int | None = None) -> torch.Tensor:
        """The plan: a uint8 tensor that says which tiles to skip, made once and shared by all layers and directions.

        device: for a mask without tensors; otherwise it can only be the tensors' device.
        max_mask_bytes: most bytes that interval lists and their plan may take, or UnsupportedError. Default: what the
            environment variable FLASHMASK_MAX_MASK_BYTES says, or else a quarter of the memory of the device, on the
            CPU of the machine's. A plan that is made stays the mask's, whatever a later call allows.

        It is made on the current stream; with interval lists on a GPU it has the bits of their partial tiles, too, and
        waits until these are counted. A plan of more than 4 MiB (one mask of 256K tokens) waits likewise, and is in
        runs of tiles, in memory linear in the length, if rows and keys have few of them. Raises RuntimeError if a
        tensor of the mask changed in place since. While a graph is traced or captured, making the plan becomes part of
        the graph, so that it follows the contents at every run.
        """
        if torch.compiler.is_compiling():
            return self._make_plan(self._plan_device(device), max_mask_bytes)
        return self._plan_in_eager_mode(device, max_mask_bytes)

    def _plan_in_eager_mode(self, device, max_mask_bytes=None):
        made = self._plans.get(device)
        if made is None or made[0] and torch.cuda.is_current_stream_capturing():
            return self._make_plan(self._plan_device(device), max_mask_bytes)
        for tensor, version in made[2]:
            if tensor._version != version:
                raise RuntimeError(
                    "a tensor of this Mask was changed in place after its plan was made; the plan no longer fits. "
                    "Make a new Mask from the changed tensor (mask.replace()), "
                    "or leave the tensor as it is until the last backward is done"
                )
        return made[1]

    def _make_plan(self, device, max_mask_bytes):
        from . import operators  # loads them, which nothing else here needs

        if torch.compiler.is_compiling() or device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return operators.make_plan(self, device, max_mask_bytes=max_mask_bytes)
        if device in self._plans:  # asked for under another name of the device
            return self.plan(device)
        with torch.inference_mode(False):  # or a later backward could not save it
            plan = operators.make_plan(self, device, counted=True, max_mask_bytes=max_mask_bytes)
        if type(plan) is torch.Tensor:  # not a trace's stand-in, which is of no use afterwards
            self._plans[device] = (device.type == "cuda", plan, self._versions())
        return plan

    def _versions(self):
        """The tensors and how often each has changed in place; those of inference mode do not count their changes."""
        return [(x, x._version) for x in self._tensors() if not x.is_inference()]

    def _plan_device(self, device):
        own = self.device
        device = own if device is None else torch.device(device)
        if device is None:
            raise ValueError(
                "this mask has no tensors and fits every device: say which one its plan is for, plan(device)"
            )
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if own is not None and own != device:
            raise ValueError(
                f"the mask is on {own} and its plan was asked for on {device}; "
                f"move the mask first: mask.to({str(device)!r})"
            )
        return device

    # --- Other forms ------------------------------------------------------------------------------

    def to_dense(self) -> torch.Tensor:
        """A bool tensor [batch, heads, seqlen_q, seqlen_k], True where row i sees key j.

        torch's scaled_dot_product_attention takes it. It is on the device of the mask's tensors, in host memory if
        there are none.
        """
        return mask_forms.visible_rows(self, 0, self.seqlen_q)

    def to_startend(self) -> tuple[torch.Tensor, bool]:
        """(startend_row_indices, causal): the smallest of FlashMask's four forms that says exactly the same.

        startend_row_indices is int32 [batch, heads, seqlen_k, 1, 2 or 4]. The band is folded in if the form cannot hold
        it. Reads the contents, so on a GPU it waits for them. Raises UnrepresentableMaskError naming the first column
        that fits no form, and ValueError for a mask with a block mask, which FlashMask takes as an argument of its own.
        """
        if self.block_mask is not None:
            raise ValueError(
                "startend_row_indices cannot hold a block mask: take mask.replace(block_mask=None) "
                "and pass the block mask on its own"
            )
        return mask_forms.to_startend(self)

    def to_block_mask(self, heads: int | None = None, batch: int | None = None) -> BlockMask:
        """Converts the mask to torch.nn.attention.flex_attention's BlockMask of 128 x 128 blocks, to compare with it.

        batch, heads: of the BlockMask; by default the mask's own. A 1 is broadcast by FlexAttention itself, to any
        batch and heads; for a mask of heads_kv pass heads_q, which it divides.
        """
        batch = self.batch if batch is None else arguments.integer("batch", batch, 1)
        heads = self.heads if heads is None else arguments.integer("heads", heads, 1)
        return mask_forms.to_block_mask(self, batch, heads)

    def stats(self) -> mask_forms.MaskStats:
        """MaskStats: visible elements, and how many tiles of 128 x 128 are full, partial and empty.

        Exact, over all batch entries and heads; with positions, tiles are classified as they run, by minima and maxima.
        Time is linear in the lengths and the number of tiles. On a GPU it waits for the result.
        """
        return mask_forms.statistics(self)

    # --- Pictures ---------------------------------------------------------------------------------

    def plot(self, batch: int = 0, head: int = 0, max_cells: int = 128) -> str:
        """A picture of one batch entry and head as an SVG string, at most 300 KB at any length.

        Tiles of 128 x 128 are grey if skipped, blue if full, and amber if partial, darker where more is visible. Longer
        masks are downsampled; max_cells: longest side in cells, up to 128.
        """
        return mask_pictures.svg(self, batch, head, max_cells)

    def _repr_svg_(self):
        return self.plot()

    def __repr__(self):
        return mask_pictures.text(self)


def as_mask(
    value, seqlen_q, seqlen_k, causal=False, window_size=None, q_offset=None, block_mask=None, q_pos=None, k_pos=None
):
    """Returns the Mask that an attention call's arguments describe.

    value: None, a Mask, or a tensor as FlashMask's startend_row_indices (see Mask.bounds). A Mask brings its own band,
    block mask and positions, so the other arguments must be left out with it. Raises TypeError or ValueError naming the
    argument and what is accepted.
    """
    if isinstance(value, Mask):
        others = {"window_size": window_size, "q_offset": q_offset, "block_mask": block_mask}
        if causal or any(x is not None for x in (*others.values(), q_pos, k_pos)):
            arguments.refuse_beside_mask(causal=causal or None, **others, q_pos=q_pos, k_pos=k_pos)
        arguments.check_mask_lengths(value, seqlen_q, seqlen_k)
        return value
    if value is not None and not isinstance(value, torch.Tensor):
        raise arguments.not_a_mask("startend_row_indices", value)
    window = arguments.window("window_size", window_size)
    return Mask(
        seqlen_q,
        seqlen_k,
        bounds=value,
        causal=causal,
        window=window,
        q_offset=q_offset,
        block_mask=block_mask,
        q_pos=q_pos,
        k_pos=k_pos,
    )


def _checked_bounds(bounds, seqlen_q, seqlen_k, causal):
    """`bounds` as int32 and contiguous."""
    if not isinstance(bounds, torch.Tensor):
        raise TypeError(
            f"startend_row_indices is a {type(bounds).__name__}; it must be a tensor. {_FORMS.capitalize()}"
        )
    what = f"startend_row_indices is {bounds.dtype} {list(bounds.shape)}"
    if bounds.dtype in (torch.bool, torch.uint8) or bounds.dtype.is_floating_point:
        raise TypeError(f"{what}: a dense mask goes through flashmask.masks.from_dense(). {_FORMS.capitalize()}")
    if bounds.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{what}; {_FORMS}")
    if bounds.ndim != 4:
        raise ValueError(f"{what}; {_FORMS}")
    batch, heads, columns, vectors = bounds.shape
    if vectors not in ((1, 2) if causal else (2, 4)):
        raise ValueError(f"{what} and causal is {bool(causal)}; {_FORMS}")
    if columns != seqlen_k:
        raise ValueError(f"{what}: it has {columns} columns, but there are {seqlen_k} keys; {_FORMS}")
    if batch < 1 or heads < 1:
        raise ValueError(f"{what}: batch and heads must be at least 1; {_FORMS}")
    if bounds.dtype == torch.int64:
        # Values are clamped to [0, seqlen_q] anyway, so clamping them first changes nothing and no value is out of
        # int32's range.
        bounds = bounds.clamp(0, seqlen_q).to(torch.int32)
    return bounds.contiguous()


def _checked_block_mask(block_mask, seqlen_q, seqlen_k):
    """`block_mask` as bool or uint8 and contiguous."""
    if not isinstance(block_mask, torch.Tensor):
        raise TypeError(f"block_mask is a {type(block_mask).__name__}; it must be a tensor")
    shape = (-(-seqlen_q // BLOCK), -(-seqlen_k // BLOCK))
    if (
        block_mask.dtype not in (torch.bool, torch.uint8, torch.int32)
        or block_mask.ndim != 4
        or tuple(block_mask.shape[2:]) != shape
    ):
        raise ValueError(
            f"block_mask is {block_mask.dtype} {list(block_mask.shape)}; it must be bool, uint8 or int32 "
            f"[batch or 1, heads or 1, {shape[0]}, {shape[1]}], a flag for each block of {BLOCK} x {BLOCK}"
        )
    if block_mask.shape[0] < 1 or block_mask.shape[1] < 1:
        raise ValueError(f"block_mask is {list(block_mask.shape)}; batch and heads must be at least 1")
    return (block_mask != 0 if block_mask.dtype == torch.int32 else block_mask).contiguous()


def _checked_positions(q_pos, k_pos, mask):
    """Returns both positions as int32 and contiguous, or neither."""
    if q_pos is None and k_pos is None:
        return None, None
    checked = []
    for name, x, other, length in (("q_pos", q_pos, "k_pos", mask.seqlen_q), ("k_pos", k_pos, "q_pos", mask.seqlen_k)):
        if x is None:
            raise ValueError(f"{name} is None and {other} is given; positions of rows and of keys come together")
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor")
        if x.dtype != torch.int32:
            raise TypeError(f"{name} is {x.dtype} {list(x.shape)}; it must be int32 [batch or 1, {length}]")
        if x.ndim != 2 or x.shape[0] < 1 or x.shape[1] != length:
            raise ValueError(f"{name} is {list(x.shape)}; it must be int32 [batch or 1, {length}]")
        checked.append(x.contiguous())
    if mask.q_offset is not None:
        raise ValueError(f"q_offset is {mask.q_offset}; it must be None with q_pos and k_pos, which take its place")
    return checked


def _checked_lists(column_ptr, intervals, mask):
    """Returns interval lists as contiguous tensors, or neither."""
    if column_ptr is None and intervals is None:
        return None, None
    heads = f"[batch or 1, heads or 1, {mask.seqlen_k + 1}]"
    for name, x, other, shape in (
        ("column_ptr", column_ptr, "intervals", heads),
        ("intervals", intervals, "column_ptr", "[n, 2]"),
    ):
        if x is None:
            raise ValueError(f"{name} is None and {other} is given; they come together")
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor")
        if x.dtype != torch.int32:
            raise TypeError(f"{name} is {x.dtype} {list(x.shape)}; it must be int32 {shape}")
    if column_ptr.ndim != 3 or 0 in column_ptr.shape[:2] or column_ptr.shape[2] != mask.seqlen_k + 1:
        raise ValueError(f"column_ptr is {list(column_ptr.shape)}; it must be int32 {heads}")
    if intervals.ndim != 2 or intervals.shape[1] != 2:
        raise ValueError(f"intervals is {list(intervals.shape)}; it must be int32 [n, 2], pairs of begin and end")
    if mask.bounds is not None:
        raise ValueError("bounds and column_ptr are both given; a mask has one of them")
    return column_ptr.contiguous(), intervals.contiguous()


_WORDS = {
    "bounds": "the bounds",
    "block_mask": "the block mask",
    "q_pos": "q_pos",
    "k_pos": "k_pos",
    "column_ptr": "column_ptr",
    "intervals": "intervals",
}


def _check_together(mask):
    tensors = [(words, x) for name, words in _WORDS.items() if (x := getattr(mask, name)) is not None]
    for n, (name, x) in enumerate(tensors):
        for other, y in tensors[:n]:
            if x.device != y.device:
                raise ValueError(
                    f"{other} {'are' if other == 'the bounds' else 'is'} on {y.device} and {name} is on {x.device}; "
                    "they must be on one device"
                )
            of_batch = mask.intervals is not x and mask.intervals is not y
            if of_batch and x.shape[0] != y.shape[0] and 1 not in (x.shape[0], y.shape[0]):
                raise ValueError(
                    f"batch of {other} is {y.shape[0]} and of {name} {x.shape[0]}; they must be equal, or one of them 1"
                )
    columns = mask.column_ptr if mask.bounds is None else mask.bounds
    if columns is None or mask.block_mask is None:
        return
    heads = columns.shape[1], mask.block_mask.shape[1]
    if max(heads) % min(heads):
        raise ValueError(
            f"heads of the bounds is {heads[0]} and of the block mask {heads[1]}; "
            "each must be 1, heads_kv or heads_q, so one divides the other"
        )


# --- Pytree: the tensors are the leaves -----------------------------------------------------------


# Masks taken apart, by their context and the identities of their tensors: one put together again from the same parts,
# as a wrapper of a module does with its arguments in every layer, shares the plan.
_taken_apart: weakref.WeakValueDictionary[Any, Mask] = weakref.WeakValueDictionary()


def _flatten(mask):
    tensors = mask._tensors()
    present = tuple(getattr(mask, name) is not None for name in _TENSORS)
    context = (mask.seqlen_q, mask.seqlen_k, mask.causal, mask.window, mask.q_offset, present)
    if not torch.compiler.is_compiling():
        _taken_apart[_identity(tensors, context)] = mask
    return tensors, context


def _flatten_with_keys(mask):
    tensors, context = _flatten(mask)
    names = [name for name, here in zip(_TENSORS, context[-1]) if here]
    return [(pytree.GetAttrKey(name), x) for name, x in zip(names, tensors)], context


def _unflatten(tensors, context):
    """Takes any leaves, as tree_map may put anything there; so nothing is checked."""
    *values, present = context
    leaves = iter(tensors)
    mask = object.__new__(Mask)
    for name, value in zip(("seqlen_q", "seqlen_k", "causal", "window", "q_offset"), values):
        object.__setattr__(mask, name, value)
    for name, here in zip(_TENSORS, present):
        object.__setattr__(mask, name, next(leaves) if here else None)
    object.__setattr__(mask, "_plans", {} if torch.compiler.is_compiling() else _original_plans(mask, context))
    return mask


def _identity(tensors, context):
    return str(context), *map(id, tensors)  # as text, for lengths may be symbols, which have no hash


def _original_plans(mask, context):
    """The plans of the mask of the same tensors that was taken apart, if it is still there.

    Identities alone could be those of others by now.
    """
    same = _taken_apart.get(_identity(mask._tensors(), context))
    if same is None or any(getattr(same, name) is not getattr(mask, name) for name in _TENSORS):
        return {}
    return same._plans


torch.serialization.add_safe_globals([Mask])  # so that torch.load(weights_only=True) takes one
if pytree is not None:
    pytree.register_pytree_node(
        Mask, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys, serialized_type_name="flashmask.Mask"
    )
