# SPDX-License-Identifier: Apache-2.0
"""Cycles between two points of a stream, by the multiprocessors' own clocks: for where no counters may be read.

A marker kernel has one block on each multiprocessor, which writes that one's %clock64. The clocks of two
multiprocessors are not compared; the median over them of what passed on each is the result. The driver compiles the
kernel, so nothing else is needed.
"""

import ctypes as C

import torch

from benchmarks.instruments.driver import Kernel

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
SLEEP_CYCLES = 4_000_000


class Marks:
    """Marks on the current stream of the first device, and what passed between them."""

    def __init__(self, count=3):
        # Allocated by torch, so its context is there.
        self.clocks = torch.zeros((count, MOST_MULTIPROCESSORS), dtype=torch.int64, device="cuda")
        self.blocks = torch.cuda.get_device_properties(0).multi_processor_count
        self.kernel = Kernel(PTX, NAME, SHARED_BYTES)

    def mark(self, row):
        self.kernel.launch(self.blocks, SHARED_BYTES, C.c_uint64(self.clocks[row].data_ptr()))

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
