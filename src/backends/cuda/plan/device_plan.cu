// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/plan/device_plan.h"

#include <algorithm>

#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/plan/bit_tiles.cuh"
#include "backends/cuda/plan/classify.cuh"
#include "backends/cuda/plan/extents.cuh"
#include "backends/cuda/plan/lists.cuh"
#include "backends/cuda/plan/params.cuh"
#include "backends/cuda/plan/positions.cuh"
#include "backends/cuda/plan/rank.cuh"
#include "backends/cuda/plan/transpose.cuh"
#include "common/arithmetic.h"
#include "common/message.h"
#include "mask/content_hash.h"
#include "mask/host_only.h"
#include "plan/plan_buffer.h"

// The kernels, with names of their own for profilers and for whatever reads the library's code; see KernelInfo.
using PlanParams = flashmask::cuda::plan::Params;

extern "C" __global__ void __launch_bounds__(flashmask::cuda::plan::kClassifyThreads)
    flashmask_sm90_plan_classify(const __grid_constant__ PlanParams p) {
  flashmask::cuda::plan::classify<flashmask::cuda::plan::KeyBlockBits>(p);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::plan::kClassifyThreads)
    flashmask_sm90_plan_classify_runs(const __grid_constant__ PlanParams p) {
  flashmask::cuda::plan::classify<flashmask::cuda::plan::KeyBlockRuns>(p);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::plan::kReadThreads)
    flashmask_sm90_plan_lists(const __grid_constant__ PlanParams p) {
  flashmask::cuda::plan::read_lists(p);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::plan::kListThreads)
    flashmask_sm90_plan_classify_lists(const __grid_constant__ PlanParams p) {
  flashmask::cuda::plan::classify_lists(p);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::plan::kPositionThreads)
    flashmask_sm90_plan_positions(const __grid_constant__ PlanParams p,
                                  const __grid_constant__ flashmask::cuda::plan::PositionBand band) {
  flashmask::cuda::plan::positions(p, band);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::plan::kTransposeThreads)
    flashmask_sm90_plan_transpose(const __grid_constant__ PlanParams p, int32_t bands, int32_t slices) {
  flashmask::cuda::plan::transpose(p, bands, slices);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::plan::kTransposeThreads)
    flashmask_sm90_plan_transpose_runs(const __grid_constant__ PlanParams p, int32_t bands, int32_t slices) {
  flashmask::cuda::plan::transpose_runs(p, bands, slices);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::plan::kRankThreads)
    flashmask_sm90_plan_rank(const __grid_constant__ PlanParams p, int32_t blocks_per_mask) {
  flashmask::cuda::plan::rank(p, blocks_per_mask);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::plan::kExtentThreads)
    flashmask_sm90_plan_extents(const __grid_constant__ PlanParams p,
                                const __grid_constant__ flashmask::cuda::plan::PositionBand band,
                                int32_t blocks_per_mask, flashmask::VisibleExtent* extents) {
  flashmask::cuda::plan::extents<flashmask::PlanForm::kBits>(p, band, blocks_per_mask, extents);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::plan::kExtentThreads)
    flashmask_sm90_plan_extents_runs(const __grid_constant__ PlanParams p,
                                     const __grid_constant__ flashmask::cuda::plan::PositionBand band,
                                     int32_t blocks_per_mask, flashmask::VisibleExtent* extents) {
  flashmask::cuda::plan::extents<flashmask::PlanForm::kRuns>(p, band, blocks_per_mask, extents);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::plan::kNumberThreads)
    flashmask_sm90_plan_number_tiles(const __grid_constant__ PlanParams p) {
  flashmask::cuda::plan::number_tiles(p);
}

// Half of the blocks that could be resident, or the compiler spills registers to have them all.
extern "C" __global__ void __launch_bounds__(flashmask::cuda::plan::kListThreads, 8)
    flashmask_sm90_plan_write_tiles(const __grid_constant__ PlanParams p,
                                    const __grid_constant__ flashmask::cuda::plan::PositionBand band,
                                    flashmask::VisibleExtent* extents) {
  flashmask::cuda::plan::write_tiles(p, band, extents);
}

namespace flashmask::cuda {
namespace {

/// How many blocks each kernel has.
struct Grids {
  int64_t classify, list_words, bands, slices, transpose, rank_per_mask, rank, extents_per_mask, extents;

  explicit Grids(const PlanLayout& layout) {
    const int64_t masks = layout.batch * layout.heads;  // fits: PlanLayout has checked larger products
    classify = std::max<int64_t>(masks * layout.key_blocks, 1);
    list_words = layout.has_bits() ? masks * layout.key_blocks * 2 * layout.words_per_key : 0;
    bands = ceil_div(layout.row_granules, plan::kBandRows);
    slices = ceil_div(layout.key_blocks, plan::kSliceKeys);
    transpose = masks * bands * (layout.in_runs() ? 1 : slices);
    rank_per_mask = 0;
    for (int n = 0; n < plan::kOrders; ++n) rank_per_mask += plan::order_of(layout, n).blocks();
    rank = masks * rank_per_mask + 1;
    extents_per_mask = ceil_div(layout.seqlen_k, int64_t{plan::kExtentKeys});
    extents = masks * extents_per_mask;
    for (const int64_t blocks : {masks, classify, list_words, transpose, rank}) {
      if (blocks <= INT32_MAX) continue;
      throw_unsupported(
          "a plan for batch ", layout.batch, ", heads ", layout.heads, ", seqlen_q ", layout.seqlen_q, " and seqlen_k ",
          layout.seqlen_k,
          " is too large to be made on the device: batch * heads * ceil(seqlen_q / 6144) * ceil(seqlen_k / ",
          "16384), batch * heads * ceil(seqlen_k / 128) and batch * heads * ceil(seqlen_q / 1024) must be below 2^31",
          layout.has_bits() ? ", and so must 2 * batch * heads * ceil(seqlen_q / 4096) * ceil(seqlen_k / 128)" : "");
    }
  }
};

plan::Sharing sharing(const PlanLayout& all, int64_t own_batch, int64_t own_heads) {
  return {static_cast<int32_t>(broadcast_group(all.batch, own_batch)),
          static_cast<int32_t>(broadcast_group(all.heads, own_heads)), static_cast<int32_t>(own_heads)};
}

plan::PlanMask plan_mask(const MaskView& mask) {
  const Diagonals open;
  return {mask.seqlen_q,
          mask.seqlen_k,
          mask.has_positions ? open.lo : mask.diagonal_lo,
          mask.has_positions ? open.hi : mask.diagonal_hi,
          mask.bounds_batch,
          mask.bounds_heads,
          mask.lts,
          mask.lte,
          mask.uts,
          mask.ute,
          mask.bounds_stride,
          mask.block_batch,
          mask.block_heads,
          mask.block_mask,
          mask.q_pos,
          mask.k_pos,
          mask.column_ptr,
          mask.intervals,
          static_cast<int32_t>(mask.listed_intervals)};
}

plan::PositionBand position_band(const MaskView& mask, const PlanLayout& layout) {
  if (!mask.has_positions) return {};
  return {mask.diagonal_lo, mask.diagonal_hi, static_cast<int32_t>(broadcast_group(layout.batch, mask.q_pos_batch)),
          static_cast<int32_t>(broadcast_group(layout.batch, mask.k_pos_batch))};
}

}  // namespace

std::vector<KernelInfo> plan_kernels(PlanVariant variant) {
  std::vector<KernelInfo> all;
  const auto add = [&all](const char* id, int threads) {
    all.push_back(named({.id = id, .op = "plan", .threads = threads}));
  };
  if (variant.lists) {
    add("sm90.plan.lists", plan::kReadThreads);
    add("sm90.plan.classify_lists", plan::kListThreads);
  } else {
    add(variant.runs ? "sm90.plan.classify_runs" : "sm90.plan.classify", plan::kClassifyThreads);
  }
  if (variant.positions) add("sm90.plan.positions", plan::kPositionThreads);
  add(variant.runs ? "sm90.plan.transpose_runs" : "sm90.plan.transpose", plan::kTransposeThreads);
  add("sm90.plan.rank", plan::kRankThreads);
  if (variant.lists) {
    add("sm90.plan.number_tiles", plan::kNumberThreads);
    add("sm90.plan.write_tiles", plan::kListThreads);
  } else {
    add(variant.runs ? "sm90.plan.extents_runs" : "sm90.plan.extents", plan::kExtentThreads);
  }
  return all;
}

void launch_plan(const MaskView& mask, std::byte* buffer, cudaStream_t stream) {
  launch_plan(mask, plan_layout(mask, Device{Device::Kind::kCuda, 0}), buffer, stream);
}

void launch_plan(const MaskView& mask, const PlanLayout& layout, std::byte* buffer, cudaStream_t stream) {
  if (has_contents(mask) && mask.device.kind != Device::Kind::kCuda)
    throw_invalid("the mask's vectors are in host memory; a plan made on a CUDA device needs them there");
  const Grids grids(layout);
  const plan::Params params{plan_mask(mask),
                            layout,
                            plan_header(layout, content_hash::frame(mask)),
                            buffer,
                            static_cast<int32_t>(layout.heads),
                            static_cast<int32_t>(layout.row_granules),
                            static_cast<int32_t>(layout.key_blocks),
                            sharing(layout, mask.bounds_batch, mask.bounds_heads),
                            sharing(layout, mask.block_batch, mask.block_heads)};
  const plan::PositionBand band = position_band(mask, layout);
  auto* const extents = reinterpret_cast<VisibleExtent*>(buffer + layout.extents());
  const int64_t sums = layout.extents() - layout.most_runs + layout.batch * static_cast<int64_t>(sizeof(VisibleExtent));
  check(cudaMemsetAsync(buffer + layout.most_runs, 0, static_cast<std::size_t>(sums), stream),
        "cudaMemsetAsync of the plan's extents");
  const auto bands = static_cast<int32_t>(grids.bands), slices = static_cast<int32_t>(grids.slices);
  LaunchChain chain(stream);
  if (layout.has_bits()) {
    chain.launch("launch of the plan's lists", flashmask_sm90_plan_lists, grids.classify, plan::kReadThreads, params);
    chain.launch("launch of the plan's classification", flashmask_sm90_plan_classify_lists, grids.list_words,
                 plan::kListThreads, params);
  } else {
    chain.launch("launch of the plan's classification",
                 layout.in_runs() ? flashmask_sm90_plan_classify_runs : flashmask_sm90_plan_classify, grids.classify,
                 plan::kClassifyThreads, params);
  }
  if (mask.has_positions)
    chain.launch("launch of the plan's positions", flashmask_sm90_plan_positions, grids.classify,
                 plan::kPositionThreads, params, band);
  chain.launch("launch of the plan's transpose",
               layout.in_runs() ? flashmask_sm90_plan_transpose_runs : flashmask_sm90_plan_transpose, grids.transpose,
               plan::kTransposeThreads, params, bands, slices);
  chain.launch("launch of the plan's orders", flashmask_sm90_plan_rank, grids.rank, plan::kRankThreads, params,
               static_cast<int32_t>(grids.rank_per_mask));
  if (layout.has_bits()) {
    chain.launch("launch of the plan's numbers of tiles", flashmask_sm90_plan_number_tiles, 1, plan::kNumberThreads,
                 params);
    chain.launch("launch of the plan's tiles", flashmask_sm90_plan_write_tiles, grids.list_words, plan::kListThreads,
                 params, band, extents);
  } else {
    chain.launch("launch of the plan's extents",
                 layout.in_runs() ? flashmask_sm90_plan_extents_runs : flashmask_sm90_plan_extents, grids.extents,
                 plan::kExtentThreads, params, band, static_cast<int32_t>(grids.extents_per_mask), extents);
  }
}

}  // namespace flashmask::cuda
