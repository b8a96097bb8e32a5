# SPDX-License-Identifier: Apache-2.0
"""Masks put together from others, as the C++ library does it (mask.h, Composition)."""

import ctypes as C
from collections.abc import Iterable

import torch

from .._core import arguments, capi
from . import mask_forms, tensor_arguments
from .mask import BLOCK, Mask


def intersect(a: Mask, b: Mask) -> Mask:
    """The mask of what both a and b see, of the same lengths; batch entries and heads broadcast.

    A column's hidden rows are the union of both; the result keeps one band, or one band over positions. Always exact,
    with interval lists where a column needs more than two intervals. Reads the masks, as from_dense does. The result's
    tensors are where the masks' are, in host memory if these have none.
    """
    masks = _checked({"a": a, "b": b})
    return _compose("fm_mask_intersect", masks, a.seqlen_q, a.seqlen_k, lambda structs: map(C.byref, structs))


def concatenate(pieces: Iterable[Mask]) -> Mask:
    """The mask of a packed sequence: rows and keys of the masks one after another, which do not see each other.

    Always exact, with interval lists where a column needs more than two intervals. Pieces with a block mask have to
    begin at multiples of 128 (UnsupportedError). Reads the masks, as from_dense does. The result's tensors are where
    the masks' are, in host memory if these have none.
    """
    masks = _checked({f"pieces[{n}]": mask for n, mask in enumerate(arguments.sequence("pieces", pieces))})
    seqlen_q, seqlen_k = (sum(getattr(mask, name) for mask in masks) for name in ("seqlen_q", "seqlen_k"))
    pointers = C.c_void_p * len(masks)
    return _compose(
        "fm_mask_concatenate",
        masks,
        seqlen_q,
        seqlen_k,
        lambda structs: (pointers(*map(C.addressof, structs)), len(structs)),
    )


def crop(mask: Mask, rows: tuple[int, int] | None = None, keys: tuple[int, int] | None = None) -> Mask:
    """The mask of rows [begin, end) and keys [begin, end) alone; None: all. Always exact, and traceable.

    As mask.gather() with one segment of each, with its errors.
    """
    _checked({"mask": mask})
    rows = (0, mask.seqlen_q) if rows is None else rows
    return mask.gather([rows], None if keys is None else [keys])


def _checked(masks):
    """The masks, by name, as a list."""
    for name, mask in masks.items():
        if not isinstance(mask, Mask):
            raise TypeError(f"{name} is {arguments.describe(mask)}; it must be a flashmask.Mask")
    # Masks without tensors fit every device.
    tensor_arguments.check_one_device(**{f"{name}'s tensors": mask.some_tensor() for name, mask in masks.items()})
    return list(masks.values())


def _compose(function, masks, seqlen_q, seqlen_k, arguments):
    """The Mask that a function of the library makes of masks; arguments(structs): what it takes before `out`."""
    device = next((mask.device for mask in masks if mask.device is not None), None)
    batch, heads = (max((getattr(mask, name) for mask in masks), default=1) for name in ("batch", "heads"))
    rooms = {}
    if any(mask.block_mask is not None for mask in masks):
        blocks = (batch, heads, -(-seqlen_q // BLOCK), -(-seqlen_k // BLOCK))
        rooms["block_mask"] = torch.empty(blocks, dtype=torch.uint8, device="cpu")
    if any(mask.q_pos is not None for mask in masks):
        for name, length in (("q_pos", seqlen_q), ("k_pos", seqlen_k)):
            rooms[name] = torch.empty((batch, length), dtype=torch.int32, device="cpu")
    out = mask_forms.Vectors((batch, heads, seqlen_k), device, rooms)
    on_host = [mask_forms.on_host(mask) for mask in masks]  # has to live until the call is over
    structs = [mask_forms.mask_struct(mask) for mask in on_host]
    out.write(lambda struct: getattr(capi.load(), function)(*arguments(structs), C.byref(struct)))
    return Mask(**out.fields())


def gather_lists(mask, rows, keys):
    """Mask.gather of a mask with interval lists. rows, keys: segments within the mask, rows ascending."""
    pairs = [(C.c_int64 * (2 * len(x)))(*(end for segment in x for end in segment)) for x in (rows, keys)]
    segments = capi.make(capi.Segments, rows=pairs[0], row_count=len(rows), keys=pairs[1], key_count=len(keys))
    seqlen_q, seqlen_k = (sum(end - begin for begin, end in x) for x in (rows, keys))
    call = lambda structs: (*map(C.byref, structs), C.byref(segments))  # noqa: E731
    return _compose("fm_mask_gather", [mask], seqlen_q, seqlen_k, call)
