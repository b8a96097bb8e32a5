# SPDX-License-Identifier: Apache-2.0
"""A stream that only reads: what the card's memory gives to kernels, in the run that measures them.

A block on each multiprocessor copies a share of the tensor into its shared memory, some chunks of 16 KB at a time, and
does nothing with them.
"""

import ctypes as C

import torch

from benchmarks.instruments.driver import Kernel

NAME, CHUNK = "flashmask_stream", 16384
STAGES = (3, 6, 12)  # chunks of a block that are on their way at a time
# A block takes chunks first to first + count. Step n waits for chunk n - stages, and asks for chunk n in its place. In
# the end the block adds count to `taken`.
PTX = f"""
.version 8.0
.target sm_90
.address_size 64
.extern .shared .align 128 .b8 places[];
.visible .entry {NAME}(.param .u64 source, .param .u32 chunks, .param .u32 stages, .param .u64 taken)
{{
  .reg .pred %is, %arrived;
  .reg .b32 %chunks, %stages, %share, %first, %count, %steps, %n, %turn, %parity;
  .reg .b32 %place, %places, %barrier, %barriers, %block, %blocks;
  .reg .b64 %from, %offset, %taken;
  ld.param.u64 %from, [source];
  ld.param.u32 %chunks, [chunks];
  ld.param.u32 %stages, [stages];
  ld.param.u64 %taken, [taken];
  cvta.to.global.u64 %from, %from;
  cvta.to.global.u64 %taken, %taken;

  mov.u32 %block, %ctaid.x;
  mov.u32 %blocks, %nctaid.x;
  add.u32 %share, %chunks, %blocks;
  sub.u32 %share, %share, 1;
  div.u32 %share, %share, %blocks;
  mul.lo.u32 %first, %share, %block;
  min.u32 %first, %first, %chunks;
  sub.u32 %count, %chunks, %first;
  min.u32 %count, %count, %share;
  setp.eq.u32 %is, %count, 0;
  @%is ret;
  mul.wide.u32 %offset, %first, {CHUNK};
  add.u64 %from, %from, %offset;

  mov.u32 %places, places;
  mad.lo.u32 %barriers, %stages, {CHUNK}, %places;
  mov.u32 %n, 0;
initialise:
  mad.lo.u32 %barrier, %n, 8, %barriers;
  mbarrier.init.shared::cta.b64 [%barrier], 1;
  add.u32 %n, %n, 1;
  setp.lt.u32 %is, %n, %stages;
  @%is bra initialise;
  fence.mbarrier_init.release.cluster;
  fence.proxy.async.shared::cta;

  add.u32 %steps, %count, %stages;
  mov.u32 %n, 0;
  mov.u32 %parity, 1;
round:
  mov.u32 %turn, 0;
  mov.u32 %place, %places;
  mov.u32 %barrier, %barriers;
step:
  setp.lt.u32 %is, %n, %stages;
  @%is bra ask;
wait:
  mbarrier.try_wait.parity.shared::cta.b64 %arrived, [%barrier], %parity;
  @!%arrived bra wait;
ask:
  setp.ge.u32 %is, %n, %count;
  @%is bra next;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%barrier], {CHUNK};
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%place], [%from], {CHUNK}, [%barrier];
  add.u64 %from, %from, {CHUNK};
next:
  add.u32 %n, %n, 1;
  setp.ge.u32 %is, %n, %steps;
  @%is bra end;
  add.u32 %place, %place, {CHUNK};
  add.u32 %barrier, %barrier, 8;
  add.u32 %turn, %turn, 1;
  setp.lt.u32 %is, %turn, %stages;
  @%is bra step;
  xor.b32 %parity, %parity, 1;
  bra round;
end:
  red.global.add.u32 [%taken], %count;
  ret;
}}
"""


def shared_bytes(stages):
    """Chunks, each with its barrier."""
    return stages * (CHUNK + 8)


class Stream:
    """Reads all of a contiguous tensor. Raises RuntimeError if a call would leave out a chunk."""

    def __init__(self, x, stages):
        self.x, self.stages, self.chunks = x, stages, x.numel() * x.element_size() // CHUNK
        self.bytes = self.chunks * CHUNK
        self.blocks = torch.cuda.get_device_properties(0).multi_processor_count
        self.taken = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.kernel = Kernel(PTX, NAME, shared_bytes(max(STAGES)))
        self()
        if (taken := int(self.taken)) != self.chunks:
            raise RuntimeError(f"a stream of {self.chunks} chunks took {taken}")

    def __call__(self, _=0):
        values = C.c_uint64(self.x.data_ptr()), C.c_uint32(self.chunks), C.c_uint32(self.stages)
        taken = C.c_uint64(self.taken.data_ptr())
        self.kernel.launch(self.blocks, shared_bytes(self.stages), *values, taken)
