// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "backends/cuda/device/launch_overlap.cuh"
#include "flashmask/plan.h"
#include "mask/view.h"
#include "plan/plan_header.h"
#include "plan/runs.h"

namespace flashmask::cuda::plan {

/// How the masks of a plan share vectors or block masks: so many neighbours of a batch and of heads each (see
/// broadcast_group), which have `heads` heads.
struct Sharing {
  int32_t batch_group, head_group, heads;
};

/// A mask for the planner's kernels, as MaskView has it, but without a band over positions.
struct PlanMask {
  int64_t seqlen_q, seqlen_k;
  int32_t diagonal_lo, diagonal_hi;
  int64_t bounds_batch, bounds_heads;
  const int32_t* lts;
  const int32_t* lte;
  const int32_t* uts;
  const int32_t* ute;
  int64_t bounds_stride;
  int64_t block_batch, block_heads;
  const uint8_t* block_mask;
  const int32_t* q_pos;
  const int32_t* k_pos;
  const int32_t* column_ptr;
  const int32_t* intervals;
  int32_t listed_intervals;
};

/// The band over positions, and how many neighbours of the masks' batch share positions of rows, and of keys.
struct PositionBand {
  int32_t lo, hi;  ///< as rules::PositionBand's
  int32_t q_group, k_group;
};

/// Parameters of every kernel of the planner. Granules and key blocks are counted in int32 (there are at most 2^25),
/// elements of a part of the buffer in int64.
struct Params {
  PlanMask mask;
  PlanLayout layout;
  PlanHeader header;  ///< its hash is the mask's frame; the device adds the contents
  std::byte* buffer;
  int32_t heads;  ///< heads of the mask as a whole
  int32_t row_granules, key_blocks;
  Sharing bounds, blocks;

  template <typename T>
  __device__ T* at(int64_t offset) const {
    return reinterpret_cast<T*>(buffer + offset);
  }
};

/// A line of a plan in runs: `offset` is of the lines live or full.
__device__ inline GranuleRun* line_runs(const Params& p, int64_t offset, int64_t line) {
  return p.at<GranuleRun>(offset) + line * kLineRuns;
}

/// Ends a line of so many granules.
__device__ inline void finish_line(const Params& p, RunWriter& line, int32_t granules) {
  if (const int32_t runs = line.finish(granules); runs > kLineRuns) atomicMax(p.at<int32_t>(p.layout.most_runs), runs);
}

/// Word number `word` of the granules of a key block, by its number over all masks.
template <PlanForm kForm>
__device__ uint32_t key_block_word(const Params& p, int64_t offset, int64_t key_block, int32_t word) {
  if constexpr (kForm == PlanForm::kRuns) return runs_word<uint32_t>(line_runs(p, offset, key_block), word * 32);
  return p.at<uint32_t>(offset)[key_block * p.layout.words_per_key * 2 + word];
}

/// Which of the vectors or block masks serve mask `m`, and whether `m` is the first mask that they serve, so that
/// something can be done once for each of them.
struct Own {
  int32_t index;
  bool first;
};

__device__ inline Own own_of(const Params& p, int32_t m, const Sharing& sharing) {
  const int32_t b = m / p.heads, h = m % p.heads;
  const int32_t own_b = b / sharing.batch_group, own_h = h / sharing.head_group;
  return {own_b * sharing.heads + own_h, b == own_b * sharing.batch_group && h == own_h * sharing.head_group};
}

}  // namespace flashmask::cuda::plan
