# SPDX-License-Identifier: Apache-2.0
"""Cycles between two points of a stream, by the multiprocessors' own clocks: for where no counters may be read.

A marker kernel has one block on each multiprocessor, which writes that one's %clock64. The clocks of two
multiprocessors are not compared; the median over them of what passed on each is the result. The driver compiles the
kernel, so nothing else is needed.
"""

import ctypes as C

import torch

NAME = "flashmask_mark"
PTX = f"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry {NAME}(.param .u64 clocks)
{{
  .reg .b32 %multiprocessor;
  .reg .b64 %to, %offset, %now;
  ld.param.u64 %to, [clocks];
  cvta.to.global.u64 %to, %to;
  mov.u32 %multiprocessor, %smid;
  mul.wide.u32 %offset, %multiprocessor, 8;
  add.s64 %to, %to, %offset;
  mov.u64 %now, %clock64;
  st.global.u64 [%to], %now;
  ret;
}}
"""
MOST_MULTIPROCESSORS = 1024
SHARED_BYTES = 200 * 1024  # of a block: no two find room on one multiprocessor
MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SLEEP_CYCLES = 4_000_000


class Marks:
    """Marks on the current stream of the first device, and what passed between them."""

    def __init__(self, count=3):
        # Allocated by torch, so its context is there.
        self.clocks = torch.zeros((count, MOST_MULTIPROCESSORS), dtype=torch.int64, device="cuda")
        self.blocks = torch.cuda.get_device_properties(0).multi_processor_count
        self.cuda = C.CDLL("libcuda.so.1")
        module, self.function = C.c_void_p(), C.c_void_p()
        self.check(self.cuda.cuModuleLoadData(C.byref(module), C.c_char_p(PTX.encode())))
        self.check(self.cuda.cuModuleGetFunction(C.byref(self.function), module, C.c_char_p(NAME.encode())))
        self.check(self.cuda.cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED_SIZE, SHARED_BYTES))

    def check(self, status):
        if status != 0:
            text = C.c_char_p()
            self.cuda.cuGetErrorString(status, C.byref(text))
            raise RuntimeError(f"CUDA driver: {text.value.decode() if text.value else status}")

    def mark(self, row):
        argument = C.c_uint64(self.clocks[row].data_ptr())
        arguments = (C.c_void_p * 1)(C.addressof(argument))
        stream = C.c_void_p(torch.cuda.current_stream().cuda_stream)
        shape = self.blocks, 1, 1, 1, 1, 1
        self.check(self.cuda.cuLaunchKernel(self.function, *shape, SHARED_BYTES, stream, arguments, None))

    def cycles(self, call):
        """Cycles of the work that `call` enqueues, less the cycles between two adjacent marks. Waits for the work."""
        torch.cuda.synchronize()
        self.clocks.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)  # meanwhile the host enqueues the rest: the device never waits for it
        self.mark(0)
        call()
        self.mark(1)
        self.mark(2)
        torch.cuda.synchronize()
        return passed(self.clocks[0], self.clocks[1]) - passed(self.clocks[1], self.clocks[2])


def passed(before, after):
    """The median over the multiprocessors that wrote both."""
    both = (before > 0) & (after > 0)
    if not both.any():
        raise RuntimeError("no multiprocessor wrote its clock")
    return float((after - before)[both].double().median())
