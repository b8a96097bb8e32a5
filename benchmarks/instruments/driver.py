# SPDX-License-Identifier: Apache-2.0
"""Kernels of PTX text on the first device: CUDA's driver compiles them, so no toolkit is needed."""

import ctypes as C

import torch

MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel:
    """Needs a context: something that torch has allocated. `most_shared`: dynamic shared memory that a block may
    have."""

    def __init__(self, ptx, name, most_shared):
        self.cuda = C.CDLL("libcuda.so.1")
        module, self.function = C.c_void_p(), C.c_void_p()
        self.check(self.cuda.cuModuleLoadData(C.byref(module), C.c_char_p(ptx.encode())))
        self.check(self.cuda.cuModuleGetFunction(C.byref(self.function), module, C.c_char_p(name.encode())))
        self.check(self.cuda.cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED_SIZE, most_shared))

    def check(self, status):
        if status != 0:
            text = C.c_char_p()
            self.cuda.cuGetErrorString(status, C.byref(text))
            raise RuntimeError(f"CUDA driver: {text.value.decode() if text.value else status}")

    def launch(self, blocks, shared_bytes, *values):
        """Blocks of one thread on the current stream. `values`: the kernel's parameters, as values of ctypes."""
        arguments = (C.c_void_p * len(values))(*map(C.addressof, values))
        stream = C.c_void_p(torch.cuda.current_stream().cuda_stream)
        shape = blocks, 1, 1, 1, 1, 1
        self.check(self.cuda.cuLaunchKernel(self.function, *shape, shared_bytes, stream, arguments, None))
