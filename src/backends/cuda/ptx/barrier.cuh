// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/address.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::ptx {

/// PTX ISA, "mbarrier.init". Follow with fence_barrier_init and a barrier of the CTA.
__device__ __forceinline__ void barrier_init(uint64_t& barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
/// PTX ISA, "fence.mbarrier_init" and "fence.proxy.async": makes initialised barriers known to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// PTX ISA, "mbarrier.arrive".
__device__ __forceinline__ void arrive(uint64_t& barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(shared_address(&barrier)) : "memory");
}
/// One arrival for the warp, after what all of its lanes have done.
__device__ __forceinline__ void arrive_once(uint64_t& barrier) {
  __syncwarp();
  if (is_leader()) arrive(barrier);
}
/// PTX ISA, "mbarrier.arrive.expect_tx".
__device__ __forceinline__ void arrive_expect(uint64_t& barrier, uint32_t bytes) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 state, [%0], %1;}" ::"r"(
                   shared_address(&barrier)),
               "r"(bytes)
               : "memory");
}
/// PTX ISA, "mbarrier.try_wait": until the phase of this parity is complete.
__device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) {
  uint32_t complete;
  do {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                 : "=r"(complete)
                 : "r"(shared_address(&barrier)), "r"(parity)
                 : "memory");
  } while (!complete);
}

/// PTX ISA, "bar.sync": barrier `id` (1 to 15) among `threads` threads.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// PTX ISA, "bar.arrive".
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// PTX ISA, "ld.acquire" at device scope: what the thread that wrote the value had done before is visible afterwards.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}
/// PTX ISA, "red.release" at device scope: a thread that acquires the sum sees what this thread did before.
__device__ __forceinline__ void add_release(uint32_t* global, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

/// PTX ISA, "setmaxnreg": every warp of the warpgroup executes it; needs __launch_bounds__(threads, 1).
template <int kRegisters>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Position in a ring of `kStages` buffers: one register instead of two. Unless kStages is a power of two, it is wrong
/// once the count wraps around: 2^32 buffers in one launch, of at least 64 keys each, take more than an hour.
template <int kStages>
struct RingPosition {
  uint32_t count = 0;
  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  /// Parity of the phase that its "full" barrier is in; its "empty" barrier is one behind.
  __device__ __forceinline__ uint32_t phase() const { return count / kStages & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};

}  // namespace flashmask::ptx
