# SPDX-License-Identifier: Apache-2.0
"""Masks put together from others, as the C++ library does it (mask.h, Composition)."""

import ctypes as C
from collections.abc import Iterable

from .._core import arguments
from . import host_masks, tensor_arguments
from .mask import Mask


def intersect(a: Mask, b: Mask) -> Mask:
    """The mask of what both a and b see, of the same lengths; batch entries and heads broadcast.

    A column's hidden rows are the union of both; the result keeps one band, or one band over positions. Always exact,
    with interval lists where a column needs more than two intervals. Reads the masks, as from_dense does. The result's
    tensors are where the masks' are, in host memory if these have none.
    """
    masks = _checked({"a": a, "b": b})
    refer = lambda structs: map(C.byref, structs)  # noqa: E731
    return Mask(**host_masks.compose("fm_mask_intersect", masks, a.seqlen_q, a.seqlen_k, refer))


def concatenate(pieces: Iterable[Mask]) -> Mask:
    """The mask of a packed sequence: rows and keys of the masks one after another, which do not see each other.

    Always exact, with interval lists where a column needs more than two intervals. Pieces with a block mask have to
    begin at multiples of 128 (UnsupportedError). Reads the masks, as from_dense does. The result's tensors are where
    the masks' are, in host memory if these have none.
    """
    masks = _checked({f"pieces[{n}]": mask for n, mask in enumerate(arguments.sequence("pieces", pieces))})
    seqlen_q, seqlen_k = (sum(getattr(mask, name) for mask in masks) for name in ("seqlen_q", "seqlen_k"))
    pointers = C.c_void_p * len(masks)
    point = lambda structs: (pointers(*map(C.addressof, structs)), len(structs))  # noqa: E731
    return Mask(**host_masks.compose("fm_mask_concatenate", masks, seqlen_q, seqlen_k, point))


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
