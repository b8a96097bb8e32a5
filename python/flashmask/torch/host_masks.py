# SPDX-License-Identifier: Apache-2.0
"""Masks in host memory, as the C interface reads and writes them.

A mask here is any object with Mask's attributes; results are the arguments of a new Mask.
"""

import ctypes as C

import torch

from .._core import capi, ctypes_calls, explanation
from . import tensor_arguments

BLOCK = 128  # rows and keys of one block of a block mask


# --- Read by the library ------------------------------------------------------------------------------


def on_host(mask):
    """The mask in host memory; ValueError if there is nothing to read."""
    for x in mask._tensors():
        tensor_arguments.check_holds("the mask", x)
    return mask.cpu()


def mask_struct(mask):
    """Valid as long as the mask lives, which is in host memory."""
    return capi.mask_of(mask, lambda _, x: tensor(x))


def tensor(x):
    return capi.device_tensor(x.data_ptr(), capi.dtype_of(x.dtype), tuple(x.shape), x.stride())


# --- Written by it ------------------------------------------------------------------------------------


class HostTensors:
    """The frontend that ctypes_calls asks for tensors in host memory."""

    @staticmethod
    def empty_on_host(shape, dtype):
        made = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        tensor_arguments.check_holds("the mask", made)
        return made

    @staticmethod
    def array(x):
        return explanation.Array(tuple(x.shape), capi.dtype_name(x.dtype), "cpu", x.stride(), x.data_ptr())


class Vectors(ctypes_calls.MaskSpace):
    """A mask that the library writes in host memory, for a device."""

    def __init__(self, shape, device, arrays=None):
        self._device = device
        super().__init__(HostTensors, shape, arrays)

    def bounds(self):
        """Copies the written vectors to the device; None without vectors."""
        written = super().bounds()
        return None if written is None else written.to(self._device, copy=True)

    def fields(self):
        return on_device(super().fields(), self._device)


def on_device(fields, device):
    """A mask's fields with their tensors on `device`."""
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in fields.items()}


def compose(function, masks, seqlen_q, seqlen_k, arguments):
    """The arguments of the Mask that a function of the library makes of others.

    arguments(structs): those that the function takes before `out`.
    """
    device = next((mask.device for mask in masks if mask.device is not None), None)
    batch, heads = (max((getattr(mask, name) for mask in masks), default=1) for name in ("batch", "heads"))
    rooms = {}
    if any(mask.block_mask is not None for mask in masks):
        blocks = (batch, heads, -(-seqlen_q // BLOCK), -(-seqlen_k // BLOCK))
        rooms["block_mask"] = torch.empty(blocks, dtype=torch.uint8, device="cpu")
    if any(mask.q_pos is not None for mask in masks):
        for name, length in (("q_pos", seqlen_q), ("k_pos", seqlen_k)):
            rooms[name] = torch.empty((batch, length), dtype=torch.int32, device="cpu")
    out = Vectors((batch, heads, seqlen_k), device, rooms)
    read = [on_host(mask) for mask in masks]  # has to live until the call is over
    structs = [mask_struct(mask) for mask in read]
    out.write(lambda struct: getattr(capi.load(), function)(*arguments(structs), C.byref(struct)))
    return out.fields()
