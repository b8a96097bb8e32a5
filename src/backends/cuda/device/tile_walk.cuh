// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/plan_bits.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

/// Walks the live key blocks of one query tile of kGranules row granules, 32 words of each granule's bits at a time.
/// Lane l of the calling warp holds word `first_word + l`; f's bits of granule g are at g * kSpacing.
template <int kGranules, int kSpacing, typename PlanBits>
class RowTileWalk {
 public:
  __device__ __forceinline__ RowTileWalk(const PlanBits& plan, uint32_t mask, int32_t row_tile)
      : plan_(plan), mask_(mask), first_(row_tile * kGranules) {}

  __device__ __forceinline__ void load(int32_t first_word) {
    const int64_t line = static_cast<int64_t>(mask_) * plan_.row_granules + first_;
    const int32_t word = first_word + static_cast<int32_t>(threadIdx.x % 32), words = plan_.words_per_row;
    any_ = 0;
    read_granules(plan_, [&](const auto& read) {
#pragma unroll
      for (int g = 0; g < kGranules; ++g) {
        const bool inside = first_ + g < plan_.row_granules && word < words;
        live_[g] = inside ? read(plan_.row_live, line + g, words, word) : 0;
        full_[g] = inside ? read(plan_.row_full, line + g, words, word) : 0;
        any_ |= live_[g];
      }
    });
  }
  /// Live key blocks among the loaded words.
  __device__ __forceinline__ int32_t count() const { return __reduce_add_sync(0xffffffff, __popc(any_)); }

  /// Calls f(key block, live, full), a bit for each granule, for the live key blocks among the loaded words, ascending.
  template <typename F>
  __device__ __forceinline__ void for_each(int32_t first_word, F&& f) const {
    for (uint32_t words = __ballot_sync(0xffffffff, any_ != 0); words; words &= words - 1) {
      const int lane = __ffs(words) - 1;
      uint32_t live[kGranules], full[kGranules];
#pragma unroll
      for (int g = 0; g < kGranules; ++g) {
        live[g] = __shfl_sync(0xffffffff, live_[g], lane);
        full[g] = __shfl_sync(0xffffffff, full_[g], lane);
      }
      for (uint32_t bits = __shfl_sync(0xffffffff, any_, lane); bits; bits &= bits - 1) {
        const int bit = __ffs(bits) - 1;
        uint32_t live_here = 0, full_here = 0;
#pragma unroll
        for (int g = 0; g < kGranules; ++g) {
          live_here |= (live[g] >> bit & 1) << (kSpacing * g);
          full_here |= (full[g] >> bit & 1) << (kSpacing * g);
        }
        f((first_word + lane) * 32 + bit, live_here, full_here);
      }
    }
  }

 private:
  const PlanBits& plan_;
  uint32_t mask_;
  int32_t first_;  ///< granule
  uint32_t live_[kGranules], full_[kGranules], any_ = 0;
};

}  // namespace flashmask::cuda
