// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/attention/dropout.cuh"
#include "backends/cuda/attention/features.h"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

/// The policy Weights says which weights the product P V takes; a row's sum, and so lse, is of all. This one takes all
/// of them. A policy is made from the kernel's parameters, and has
///   kMayDrop: whether it ever leaves one out, and if so
///   drops(): whether it does in this call;
///   draw(p, batch, head, row, key): which, of a warp's slab from (row, key) on.
struct AllWeights {
  static constexpr bool kMayDrop = false;

  template <typename Params>
  __device__ __forceinline__ explicit AllWeights(const Params&) {}
};

/// Those that dropout keeps, if the call has it. They are scaled with the row, at the end.
class KeptWeights {
 public:
  static constexpr bool kMayDrop = true;

  template <typename Params>
  __device__ __forceinline__ explicit KeptWeights(const Params& p) : threshold_(p.features.dropout.threshold) {
    const dropout::Key key = p.features.dropout.key();
    key_ = {ptx::uniform(key.low), ptx::uniform(key.high)};
  }

  __device__ __forceinline__ bool drops() const { return threshold_ > 0; }
  template <int kKeys>
  __device__ __forceinline__ DroppedBits draw(uint32_t batch, uint32_t head, uint32_t row, uint32_t key) const {
    return dropped_of_slab<kKeys>(key_, threshold_, batch, head, row, key, ptx::lane_anew());
  }

 private:
  const uint32_t& threshold_;
  dropout::Key key_;
};

/// Where no weight is dropped, as DroppedBits.
struct NoneDropped {};
template <int kSteps>
__device__ __forceinline__ void leave_out(const NoneDropped&, int, uint32_t (&)[kSteps][4]) {}

/// Zeros for the dropped ones among the weights of one half of a tile's keys, in the layout of the product's operand.
template <int kSteps>
__device__ __forceinline__ void leave_out(const DroppedBits& dropped, int half_of_keys, uint32_t (&p)[kSteps][4]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int j = 0; j < 2 * kSteps; ++j) {
      // In the order of the bits, so that the compiler turns several at a time into predicates.
      const int bit = 2 * (half_of_keys * 2 * kSteps + j);
      uint32_t& pair = p[j / 2][j % 2 * 2 + row];
      if (dropped.row[row] & 1u << bit) pair &= 0xffff0000;
      if (dropped.row[row] & 2u << bit) pair &= 0x0000ffff;
    }
  }
}

}  // namespace flashmask::cuda
