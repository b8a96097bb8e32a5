# SPDX-License-Identifier: Apache-2.0
"""Readers of arguments that are torch tensors.

Each takes an argument's name and value, and returns the value in the one form that the rest works with, or raises a
TypeError or ValueError that names the argument, what was got and what is accepted. The contents of tensors on a device
are never read.
"""

import torch

from .._core import arguments
from ._torch_internals import is_fake, is_wrapped_by_transforms

# --- Tensors ------------------------------------------------------------------------------------------


def integers(name, values, device=None, shape=None):
    """An int32 or int64 tensor, from a tensor, which stays where it is, or from numbers or lists, which go to `device`.

    shape: what it has to be if a single number will not do, in words.
    """
    if not isinstance(values, torch.Tensor):
        values = _tensor_of(name, values, device)
    elif values.is_nested:
        raise TypeError(f"{name} is a nested tensor; it must be integers, in lists or a tensor of one length")
    is_right = not (values.dtype == torch.bool or values.dtype.is_floating_point or values.dtype.is_complex)
    arguments.check_vector(name, values, is_right, shape=shape)
    return values if values.dtype in (torch.int32, torch.int64) else values.to(torch.int64)


def _tensor_of(name, values, device):
    try:
        # Asked for integers, torch would cut fractions off.
        made = torch.tensor(values, device=device)
    except ValueError as error:
        raise arguments.ragged(name, error) from None
    except (TypeError, RuntimeError) as error:
        raise TypeError(*arguments.ragged(name, error).args) from None
    return made if made.numel() else made.to(torch.int64)


def flags(name, values, device=None):
    """A bool tensor, from a tensor or lists of bools, or of integers as C has them."""
    if not isinstance(values, torch.Tensor):
        values = _tensor_of(name, values, device)
    arguments.check_vector(name, values, not (values.dtype.is_floating_point or values.dtype.is_complex), "bools")
    return values.to(device, torch.bool)


def check_tensors(shape, **tensors):
    """Raises unless each is a dense tensor, of the dimensions that `shape` names (None: any), all on one device."""
    for name, x in tensors.items():
        check_dense(name, x, shape)
        if shape is not None:
            arguments.check_dimensions(name, x.shape, shape)
    check_one_device(**tensors)


def check_dense(name, x, shape=None):
    """TypeError unless it is a tensor, and neither nested nor sparse. shape: what it should be, in words."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {arguments.describe(x)}; it must be a torch.Tensor{f' {shape}' if shape else ''}")
    if x.is_nested or x.layout is not torch.strided:
        kind = arguments.describe(x) if x.is_nested else f"{arguments.describe(x)} of layout {x.layout}"
        advice = " (flashmask_varlen_func takes sequences packed one after the other)" if x.is_nested else ""
        raise TypeError(f"{name} is {kind}; it must be a dense tensor{f' {shape}' if shape else ''}{advice}")


def check_one_device(**tensors):
    """ValueError unless all tensors that are there are on one device."""
    there = [(name, x.device) for name, x in tensors.items() if x is not None]
    for name, device in there:
        if device != there[0][1]:
            raise arguments.elsewhere(name, device, *there[0])


# --- What host tensors hold ---------------------------------------------------------------------------


def check_holds(name, x):
    """ValueError if a tensor has a shape and no contents: one on meta, or a fake one."""
    if x.is_meta or is_fake(x):
        kind = "on meta" if x.is_meta else "a FakeTensor"
        raise ValueError(f"{name} is {kind}, without contents; they are looked at here, so it must have them")


def is_readable(tensor):
    """Tells if contents can be read for free: in host memory, and not while the code is traced or mapped."""
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return False
    return not is_wrapped_by_transforms(tensor)


def check_cu_seqlens(name, values, most, what):
    """ValueError unless they begin with 0, ascend and are at most `most`, which `what` names; if they can be read."""
    if not is_readable(values):
        return
    before = 0
    for n, end in enumerate(values.tolist()):
        if end < before or n == 0 and end != 0:
            raise ValueError(f"{name}[{n}] is {end}; {name} must begin with 0 and ascend")
        if end > most:
            raise ValueError(f"{name}[{n}] is {end}; it must be at most {what}, {most}")
        before = end
