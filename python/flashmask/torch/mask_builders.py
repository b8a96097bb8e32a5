# SPDX-License-Identifier: Apache-2.0
"""The frontend that families asks for torch tensors, and for masks by flashmask::build_mask."""

import torch

from .._core import arguments, ctypes_calls, families
from .._core.errors import UnrepresentableMaskError
from . import host_masks, operators, tensor_arguments
from ._torch_internals import assert_async
from .mask import Mask

integers, flags = tensor_arguments.integers, tensor_arguments.flags
has_positions = True

_operator = torch.ops.flashmask.build_mask
families.families()  # a trace cannot read them


def build(family, form, vectors, numbers, device=None):
    """(Mask, order). Waits for nothing: what is wrong on a device is an assertion in its work."""
    if form.vectors == 0 and not form.has_lists:
        return Mask(**form.band()), None
    tensors = list(vectors.values())
    device = tensors[0].device if tensors else torch.empty(0, device=device).device
    if form.vectors == 0:
        return _build_lists(family, form, vectors, numbers, device)
    try:
        return _build_vectors(family, form, vectors, numbers, tensors, device)
    except UnrepresentableMaskError:
        if not form.has_lists or torch.compiler.is_compiling():
            raise
        return _build_lists(family, form, vectors, numbers, device)


@torch.compiler.disable  # numbers alone do not say the lists' lengths
def _build_lists(family, form, vectors, numbers, device):
    """In host memory, from where the mask goes to the device."""
    fields, order = ctypes_calls.build_lists(host_masks.HostTensors, family, vectors, numbers, form.has_order)
    return Mask(**host_masks.on_device(fields, device)), order


def _build_vectors(family, form, vectors, numbers, tensors, device):
    arguments = (
        family,
        tensors,
        ",".join((*vectors, *numbers)),
        list(numbers.values()),
        [_keys(form, vectors), form.vectors, int(form.has_order), int(form.has_positions)],
        form.misfit is not None,
        device,
    )
    # Without tensors there is nothing that says `meta` to the dispatcher.
    bounds, order, unfit, positions = operators.call(_build_fake if device.type == "meta" else _operator, *arguments)
    if unfit.shape[0]:
        assert_async((unfit == 0).all(), form.misfit)
    keys = bounds.shape[2]
    places = {"q_pos": positions, "k_pos": positions} if form.has_positions else {}
    return Mask(form.rows_of(keys), keys, bounds=bounds, causal=form.causal, window=form.window, **places), order


def _keys(form, vectors):
    """The mask's keys, or -1 where the library reads them off tensors in host memory."""
    if form.keys is not None:
        return form.keys
    for name, x in vectors.items():
        if not tensor_arguments.is_readable(x):
            raise arguments.missing_seqlen(name, f"it is on {x.device}, or the code is being compiled")
    return -1


@torch.library.register_fake("flashmask::build_mask")
def _build_fake(family, vectors, names, numbers, shape, checked, device):
    tensor_arguments.check_one_device(**dict(zip(names.split(","), vectors)))
    batch = heads = 1
    for name, x in zip(names.split(","), vectors):
        leading = x.shape[: x.ndim - families.own_dimensions(family, name)]
        batch = leading[0] if len(leading) > 0 and leading[0] != 1 else batch
        heads = leading[1] if len(leading) > 1 and leading[1] != 1 else heads
    keys, count, orders, places = shape
    return (
        torch.empty((batch, heads, keys, count), dtype=torch.int32, device=device),
        torch.empty((batch, heads, keys * orders), dtype=torch.int64, device=device),
        torch.empty(int(checked and device.type == "cuda"), dtype=torch.int32, device=device),
        torch.empty((batch, keys * places), dtype=torch.int32, device=device),
    )


@torch.library.register_vmap("flashmask::build_mask")
def _build_vmap(info, in_dims, family, vectors, *others):
    """One mask after the other."""
    pick = lambda x, dim, n: x if dim is None else x.select(dim, n)  # noqa: E731
    built = [
        _operator(family, [pick(x, dim, n) for x, dim in zip(vectors, in_dims[1])], *others)
        for n in range(info.batch_size)
    ]
    return tuple(map(torch.stack, zip(*built))), (0, 0, 0, 0)
