// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/attention/mask_params.h"

namespace flashmask::sm80 {

/// A key block of 128 keys that a row tile sees; a bit for each of its row granules.
struct KeyBlock {
  int32_t index;
  uint32_t live, full;
};

/// The live key blocks of kGranules row granules of a mask, ascending, one after the other. The lanes of a warp walk
/// together; all warps of a CTA find the same.
template <int kGranules>
class LiveKeyBlocks {
 public:
  __device__ __forceinline__ LiveKeyBlocks(const cuda::RowPlanBits& plan, uint32_t mask, int32_t granule)
      : plan_(plan),
        granules_(min(kGranules, plan.row_granules - granule)),
        at_((static_cast<int64_t>(mask) * plan.row_granules + granule) * plan.words_per_row) {}

  /// The next one; false after the last.
  __device__ __forceinline__ bool next(KeyBlock& block) {
    while (bits_ == 0) {
      while (words_ == 0) {
        first_word_ += 32;
        if (first_word_ >= plan_.words_per_row) return false;
        load();
      }
      take_word(__ffs(words_) - 1);
      words_ &= words_ - 1;
    }
    const int bit = __ffs(bits_) - 1;
    bits_ &= bits_ - 1;
    block = {word_ * 32 + bit, 0, 0};
#pragma unroll
    for (int g = 0; g < kGranules; ++g) {
      block.live |= (live_[g] >> bit & 1) << g;
      block.full |= (full_[g] >> bit & 1) << g;
    }
    return true;
  }

 private:
  /// The lanes get 32 words of each granule's bits.
  __device__ __forceinline__ void load() {
    const int32_t word = first_word_ + static_cast<int32_t>(threadIdx.x % 32);
    uint32_t any = 0;
#pragma unroll
    for (int g = 0; g < kGranules; ++g) {
      const bool inside = g < granules_ && word < plan_.words_per_row;
      const int64_t at = at_ + static_cast<int64_t>(g) * plan_.words_per_row + word;
      lane_live_[g] = inside ? __ldg(plan_.row_live + at) : 0;
      lane_full_[g] = inside ? __ldg(plan_.row_full + at) : 0;
      any |= lane_live_[g];
    }
    words_ = __ballot_sync(0xffffffff, any != 0);
  }
  __device__ __forceinline__ void take_word(int lane) {
    word_ = first_word_ + lane;
#pragma unroll
    for (int g = 0; g < kGranules; ++g) {
      live_[g] = __shfl_sync(0xffffffff, lane_live_[g], lane);
      full_[g] = __shfl_sync(0xffffffff, lane_full_[g], lane);
      bits_ |= live_[g];
    }
  }

  const cuda::RowPlanBits& plan_;
  int32_t granules_;
  int64_t at_;
  int32_t first_word_ = -32, word_ = 0;
  uint32_t words_ = 0, bits_ = 0;
  uint32_t lane_live_[kGranules] = {}, lane_full_[kGranules] = {}, live_[kGranules] = {}, full_[kGranules] = {};
};

}  // namespace flashmask::sm80
