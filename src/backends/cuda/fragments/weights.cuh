// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/feature_params.h"
#include "backends/cuda/fragments/dropout.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

/// The policy Weights says which weights the product P V takes; a row's sum, and so lse, is over all. This policy
/// takes all. A policy is made from the kernel's parameters, and has
///   kMayDrop: whether it ever leaves one out, and if so
///   drops(): whether it does in this call;
///   scale(): the factor of the others, 1 without dropout;
///   draw(batch, head, row, key): the dropped weights of a warp's slab from (row, key) on;
///   draw_transposed(batch, head, row, key): the dropped weights of a transposed slab.
struct AllWeights {
  static constexpr bool kMayDrop = false;

  template <typename Params>
  __device__ __forceinline__ explicit AllWeights(const Params&) {}
};

/// The numbers of sixteens from a slab's first one on, one in each lane of the warp: no address is kept for them. The
/// whole warp calls it.
class LaneSixteens {
 public:
  __device__ __forceinline__ LaneSixteens(const dropout::Origin& origin, uint32_t batch, uint32_t first, uint32_t lane)
      : own_(origin.of(batch, first / 16 + lane % 8)) {}
  __device__ __forceinline__ uint32_t operator()(int n) const { return __shfl_sync(0xffffffff, own_, n); }

 private:
  uint32_t own_;
};

/// Takes the weights that dropout keeps, if the call has dropout. They are scaled with the row, at the end.
class KeptWeights {
 public:
  static constexpr bool kMayDrop = true;

  template <typename Params>
  __device__ __forceinline__ explicit KeptWeights(const Params& p) : dropout_(p.features.dropout), origins_(p.origins) {
    const dropout::Key key = dropout_.key();
    key_ = {ptx::uniform(key.low), ptx::uniform(key.high)};
  }

  __device__ __forceinline__ bool drops() const { return dropout_.is_set(); }
  __device__ __forceinline__ float scale() const { return dropout_.scale; }
  // The whole warp calls these.
  template <int kKeys>
  __device__ __forceinline__ DroppedBits draw(uint32_t batch, uint32_t head, uint32_t row, uint32_t key) const {
    const uint32_t lane = ptx::reload_lane();
    return draw_slab<kKeys>(key_, dropout_.threshold, batch, origins_.first_head + head, origins_.q.of(batch, row / 16),
                            LaneSixteens(origins_.k, batch, key, lane), lane);
  }
  template <int kRows>
  __device__ __forceinline__ DroppedOfKeys<kRows> draw_transposed(uint32_t batch, uint32_t head, uint32_t row,
                                                                  uint32_t key) const {
    using Dropped = DroppedOfKeys<kRows>;
    const uint32_t lane = ptx::reload_lane();
    Dropped dropped;
#pragma unroll
    for (uint32_t i = 0; i < Dropped::kWords; ++i) {
      const LaneSixteens rows(origins_.q, batch, row + i * Dropped::kRowsOfWord, lane);
      const uint32_t own = draw_lane<Dropped::kRowsOfWord>(key_, dropout_.threshold, batch, origins_.first_head + head,
                                                           rows, origins_.k.of(batch, key / 16), lane);
      dropped.word[i] = join_dropped(own, __shfl_xor_sync(0xffffffff, own, 4), lane);
    }
    return dropped;
  }

 private:
  const DropoutParams& dropout_;
  const dropout::Origins& origins_;
  dropout::Key key_;
};

/// Stands in for DroppedBits if no weight is dropped.
struct NoneDropped {};
template <int kSteps>
__device__ __forceinline__ void leave_out(const NoneDropped&, int, uint32_t (&)[kSteps][4]) {}

/// Zeroes the dropped weights of one half of a tile's keys, in the layout of the product's operand.
template <int kSteps>
__device__ __forceinline__ void leave_out(const DroppedBits& dropped, int half_of_keys, uint32_t (&p)[kSteps][4]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int j = 0; j < 2 * kSteps; ++j) {
      // Follows the order of the bits, so that the compiler turns several at a time into predicates.
      const int bit = 2 * (half_of_keys * 2 * kSteps + j);
      uint32_t& pair = p[j / 2][j % 2 * 2 + row];
      if (dropped.row[row] & 1u << bit) pair &= 0xffff0000;
      if (dropped.row[row] & 2u << bit) pair &= 0x0000ffff;
    }
  }
}

/// Zeroes the values in a fragment of a transposed slab whose weights are dropped: `x` has kValues of them, from kFirst
/// on.
template <int kFirst, int kRows, int kValues>
__device__ __forceinline__ void leave_out(const DroppedOfKeys<kRows>& dropped, float (&x)[kValues]) {
  constexpr int kOfWord = DroppedOfKeys<kRows>::kRowsOfWord / 2;
  static_assert(kFirst % kOfWord + kValues <= kOfWord, "they have one word");
  // Opaque, as otherwise the bits, one by one, would be kept in registers for the next call.
  const uint32_t bits = ptx::opaque(dropped.word[kFirst / kOfWord]);
#pragma unroll
  for (int i = 0; i < kValues; ++i) ptx::zero_if(bits & 1u << (kFirst % kOfWord + i), x[i]);
}

}  // namespace flashmask::cuda
