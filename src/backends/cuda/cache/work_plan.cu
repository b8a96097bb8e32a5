// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/cache/work_plan.h"

#include <algorithm>

#include "backends/cuda/cache/classify_blocks.cuh"
#include "backends/cuda/cache/classify_levels.cuh"
#include "backends/cuda/cache/divide_work.cuh"
#include "backends/cuda/cache/merge_forest.cuh"
#include "backends/cuda/host/kernel_info.h"
#include "call/workspace.h"
#include "common/arithmetic.h"
#include "common/message.h"

using flashmask::CachedView, flashmask::cuda::CachedParams, flashmask::cuda::WorkPlan;

extern "C" __global__ void __launch_bounds__(flashmask::cuda::kClassifyCachedThreads, 2)
    flashmask_sm90_cache_blocks(const __grid_constant__ WorkPlan plan, const __grid_constant__ CachedView call,
                                int32_t half_words) {
  flashmask::cuda::classify_blocks(plan, call, half_words);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::kClassifyCachedThreads, 2)
    flashmask_sm90_cache_levels(const __grid_constant__ WorkPlan plan, const __grid_constant__ CachedView call,
                                int32_t half_words) {
  flashmask::cuda::classify_levels(plan, call, half_words);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::kForestMergeThreads)
    flashmask_sm90_cache_merge_bf16(const __grid_constant__ CachedParams params, int32_t columns) {
  flashmask::cuda::merge_forest<__nv_bfloat16>(params, columns);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::kForestMergeThreads)
    flashmask_sm90_cache_merge_f16(const __grid_constant__ CachedParams params, int32_t columns) {
  flashmask::cuda::merge_forest<__half>(params, columns);
}

extern "C" __global__ void __launch_bounds__(flashmask::cuda::kDivideThreads)
    flashmask_sm90_cache_shares(const __grid_constant__ WorkPlan plan, const __grid_constant__ CachedView call) {
  flashmask::cuda::divide_work(plan, call);
}

namespace flashmask::cuda {

int64_t splits_of(const CachedCapacities& c) {
  if (!c.batch_invariant) return 1;
  const int64_t keys = c.max_total_keys > 0 ? std::min(c.max_keys, c.max_total_keys) : c.max_keys;
  return std::max<int64_t>(ceil_div(keys, c.split_size), 1);
}

namespace {

constexpr int64_t kKeysOfWord = kBlockKeys * kBlocksOfWord;

/// Rows of a tile of packed rows, and tiles that a row takes.
int64_t tile_rows(int64_t group, int64_t packed_rows) { return std::max<int64_t>(packed_rows / group, 1); }
int64_t head_parts(int64_t group, int64_t packed_rows) { return ceil_div(group, packed_rows); }

/// Slots for the row tiles of any rows that fit.
int64_t tile_slots(const CachedCapacities& c, int64_t packed_rows) {
  const int64_t group = c.heads_q / c.heads_kv, parts = head_parts(group, packed_rows);
  if (parts == 1) return c.max_rows / tile_rows(group, packed_rows) + c.max_batch;
  return checked_product(c.max_rows, parts).value_or(INT64_MAX);
}

/// True if more than a band and tail bits says which blocks are live.
bool has_classes(const CachedProblem& p) {
  const SequenceMaskView& m = p.mask;
  return m.bounds.defined() || m.block_mask.defined() || m.q_pos.defined() ||
         (m.tail_depth.defined() && band_reads_depth(p.diagonal_lo, p.diagonal_hi));
}

/// Keys of a request that get class bits. One of many lists of pages could have all pages; bits for that would be
/// quadratic in the requests.
int64_t classified_keys(const CachedProblem& p) {
  if (!has_classes(p)) return 0;
  if (!p.cache.page_indptr.defined()) return p.capacity;
  constexpr int64_t kLeast = int64_t{1} << 17;
  return std::min(p.capacity, std::max(4 * ceil_div(p.capacity, std::max<int64_t>(p.batch, 1)), kLeast));
}

/// Rows of a forest's tiles, of so many packed rows, that are whole tiles of `rows` each.
int64_t level_rows(int64_t group, int64_t packed_rows, int64_t rows) {
  return std::max(tile_rows(group, packed_rows) / rows, int64_t{1}) * rows;
}

/// Why the results of splits are too many; empty if they are not.
std::string splits_refusal(const CachedCapacities& c, int64_t slots) {
  constexpr int64_t kMostListed = INT32_MAX, kMostDim = 256;
  constexpr int64_t kMostBytes = int64_t{1} << 40;  // so kernels count rows of all splits in 32 bits
  const int64_t splits = splits_of(c);
  const auto listed = checked_product(slots, splits, c.heads_kv);
  const auto bytes = checked_product(c.max_rows, c.heads_q, splits, split_floats(kMostDim), 4);
  if (listed && *listed <= kMostListed && bytes && *bytes <= kMostBytes) return "";
  return message("batch_invariant is set, and ", c.max_rows, " rows of ", c.heads_q, " query heads with ", splits,
                 " splits of ", c.split_size,
                 " keys have too many partial results; row tiles, key heads and splits must be below 2^31, and results "
                 "at most 2^40 bytes: raise split_size, or give a plan whose max_keys is a request's");
}

/// Why a forest's plan is too large; empty if it is not. Each row is in three tiles, with results of its own and a
/// list of bits for each word of blocks.
std::string forest_refusal(const CachedCapacities& c) {
  constexpr int64_t kMostRows = int64_t{1} << 27, kMostBytes = int64_t{1} << 40;
  const auto rows = checked_product(c.max_rows, c.heads_q);
  const auto bytes = checked_product(3, c.max_rows, c.heads_kv, ceil_div(c.max_keys, kKeysOfWord), 8);
  if (rows && *rows <= kMostRows && bytes && *bytes <= kMostBytes) return "";
  return message("a forest's plan for ", c.max_rows, " rows of ", c.heads_q, " query heads and ", c.max_keys,
                 " keys is too large; rows times query heads must be at most 2^27, and the bits of blocks of 128 keys, "
                 "three for each row and key head, at most 2^40 bytes");
}

}  // namespace

bool has_levels(const CachedCapacities& c, int32_t packed_rows) {
  return c.forest && c.heads_q / c.heads_kv <= std::min(packed_rows, kMiddlePackedRows);
}

int64_t WorkPlanLayout::take(int64_t bytes) {
  const int64_t at = bytes_;
  bytes_ += round_up(bytes, kWorkspaceAlignment);
  return at;
}

std::string WorkPlanLayout::refusal(const CachedCapacities& c, int32_t packed_rows) {
  constexpr int64_t kMost = INT32_MAX, kMostBytes = int64_t{1} << 40;
  if (has_levels(c, packed_rows)) return forest_refusal(c);
  if (c.max_rows <= kMost && c.max_batch <= kMost) {
    const int64_t slots = tile_slots(c, packed_rows);
    const auto bytes = checked_product(slots, c.heads_kv, ceil_div(c.max_keys, kKeysOfWord), 8);
    if (slots <= kMost / c.heads_kv && bytes && *bytes <= kMostBytes)
      return c.batch_invariant && packed_rows <= kPackedRows ? splits_refusal(c, slots) : "";
  }
  return message("a plan for ", c.max_batch, " requests, ", c.max_rows, " rows, ", c.max_keys,
                 " keys of a request and ", c.heads_kv,
                 " key heads is too large; row tiles times key heads must be below 2^31, and its bits of "
                 "blocks of 128 keys at most 2^40 bytes");
}

WorkPlanLayout::WorkPlanLayout(const CachedCapacities& c, const WorkPlaces& places)
    : places_(places),
      tile_slots_(tile_slots(c, places.packed_rows)),
      group_(c.heads_q / c.heads_kv),
      heads_kv_(c.heads_kv),
      split_blocks_(c.batch_invariant ? c.split_size / kBlockKeys : 0),
      splits_(splits_of(c)),
      listed_splits_(places.packed_rows > kPackedRows ? 1 : splits_),
      split_rows_(c.max_rows * c.heads_q) {
  if (has_levels(c, places.packed_rows))
    set_levels(c.max_rows, ceil_div(c.max_rows, std::max<int64_t>(c.max_batch, 1)));
  words_ = ceil_div(c.max_keys, kKeysOfWord);
  const int64_t lists = tile_slots_ * heads_kv_, bits = lists * words_ * 4, shares = places.shares;
  shares_ = take(shares * static_cast<int64_t>(sizeof(Share)));
  arrived_ = take((c.batch_invariant ? lists : shares) * 4);
  tiles_ = take(tile_slots_ * listed_splits_ * static_cast<int64_t>(sizeof(RowTile)));
  live_ = take(lists * listed_splits_ * 4);
  live_bits_ = take(bits);
  full_bits_ = take(bits);
  results_ = take(c.forest ? lists * static_cast<int64_t>(sizeof(UnitResults)) : 0);
  partials_ = take(partial_results(c) * 4);
}

void WorkPlanLayout::set_levels(int64_t rows, int64_t rows_of_request) {
  const int64_t small = std::clamp<int64_t>(rows_of_request, 1, tile_rows(group_, kMiddlePackedRows)),
                middle = level_rows(group_, kMiddlePackedRows, small),
                tall = level_rows(group_, places_.packed_rows, middle);
  int64_t slots = 0, results = 0;
  int n = 0;
  for (const int64_t tile : {tall, middle, small}) {
    const int64_t own = ceil_div(rows, tile), packed = tile * group_;
    levels_[n++] = {static_cast<int32_t>(tile), static_cast<int32_t>(packed), static_cast<int32_t>(slots),
                    static_cast<int32_t>(own), static_cast<int32_t>(results)};
    slots += own;
    results += (own * heads_kv_ + places_.shares) * packed;
  }
  tile_slots_ = slots;
  split_rows_ = results;
}

int64_t WorkPlanLayout::partial_results(const CachedCapacities& c) const {
  if (levels_[0].rows > 0) return split_rows_ * split_floats(places_.head_dim_v);
  const int64_t of_shares = int64_t{places_.shares} * partial_floats(places_.tile_rows, places_.head_dim_v);
  if (!c.batch_invariant) return 2 * of_shares;
  return places_.packed_rows > kPackedRows ? of_shares : splits_ * split_rows_ * split_floats(places_.head_dim_v);
}

WorkPlan WorkPlanLayout::at(std::byte* memory, const CachedProblem& p) const {
  const bool is_forest = levels_[0].rows > 0;
  return {.shares = reinterpret_cast<Share*>(memory + shares_),
          .arrived = reinterpret_cast<uint32_t*>(memory + arrived_),
          .tiles = reinterpret_cast<RowTile*>(memory + tiles_),
          .live = reinterpret_cast<int32_t*>(memory + live_),
          .live_bits = reinterpret_cast<uint32_t*>(memory + live_bits_),
          .full_bits = reinterpret_cast<uint32_t*>(memory + full_bits_),
          .results = reinterpret_cast<UnitResults*>(memory + results_),
          .partials = reinterpret_cast<float*>(memory + partials_),
          .words = static_cast<int32_t>(words_),
          .mask_heads = differs_by_head(p.mask) ? static_cast<int32_t>(heads_kv_) : 1,
          .most_shares = places_.shares,
          .least_blocks = places_.least_blocks,
          .split_blocks = places_.split_blocks,
          .tile_slots = static_cast<int32_t>(tile_slots_),
          .rows_of_tile = static_cast<int32_t>(tile_rows(group_, places_.packed_rows)),
          .head_parts = static_cast<int32_t>(head_parts(group_, places_.packed_rows)),
          .group = static_cast<int32_t>(group_),
          .heads_kv = static_cast<int32_t>(heads_kv_),
          .has_classes = is_forest || has_classes(p),
          .invariant_blocks = static_cast<int32_t>(split_blocks_),
          .last_split = static_cast<int32_t>((listed_splits_ - 1) * split_blocks_),
          .splits = static_cast<int32_t>(splits_),
          .split_rows = static_cast<int32_t>(split_rows_),
          .packed_rows = places_.packed_rows,
          .levels = {levels_[0], levels_[1], levels_[2]}};
}

CachedCapacities capacities_of(const CachedProblem& p) {
  return {.max_batch = p.batch,
          .max_rows = p.total_rows(),
          .max_keys = p.batch_invariant ? p.capacity : classified_keys(p),
          .heads_q = p.heads_q,
          .heads_kv = p.heads_kv,
          .head_dim = p.head_dim,
          .head_dim_v = p.head_dim_v,
          .batch_invariant = p.batch_invariant,
          .split_size = p.split_size,
          .float8 = p.has_float8()};
}

CachedCapacities plan_capacities(const CachedProblem& p) { return p.plan ? p.plan->capacities : capacities_of(p); }

void launch_work_plan(const WorkPlan& plan, const CachedProblem& p, LaunchChain& chain) {
  if (plan.has_classes) {
    const int64_t blocks = std::min<int64_t>(plan.words * kBlocksOfWord, ceil_div(p.capacity, int64_t{kBlockKeys})),
                  half_words = ceil_div(blocks, int64_t{kClassifyWarps});
    // Requests have row tiles enough for so many CTAs on average; one that has more goes round.
    const int64_t chunks = ceil_div(int64_t{plan.tile_slots}, kClassifyTiles * std::max<int64_t>(p.batch, 1));
    const int threads = 32 * static_cast<int>(std::min<int64_t>(blocks, kClassifyWarps));
    const bool is_forest = plan.is_forest();
    chain.launch("launch of the kernel that classifies a cache's blocks",
                 is_forest ? &flashmask_sm90_cache_levels : &flashmask_sm90_cache_blocks,
                 half_words * (is_forest ? plan.levels[0].slots : p.batch * chunks), threads,
                 threads * kClassifyCachedBytes, plan, p.view, static_cast<int32_t>(half_words));
  }
  chain.launch("launch of the kernel that divides work over a cache", &flashmask_sm90_cache_shares, 1, kDivideThreads,
               plan, p.view);
}

void launch_forest_merge(const CachedParams& params, const CachedProblem& p, int32_t columns, LaunchChain& chain) {
  if (!params.plan.is_forest()) return;
  chain.launch("launch of the kernel that merges a forest's results",
               p.dtype == DataType::kBFloat16 ? &flashmask_sm90_cache_merge_bf16 : &flashmask_sm90_cache_merge_f16,
               ceil_div(p.total_rows() * p.heads_q, int64_t{kForestMergeWarps}), kForestMergeThreads, params, columns);
}

std::vector<KernelInfo> work_plan_kernels() {
  return {named({.id = "sm90.cache.blocks", .op = "cache", .threads = kClassifyCachedThreads}),
          named({.id = "sm90.cache.levels", .op = "cache", .threads = kClassifyCachedThreads}),
          named({.id = "sm90.cache.shares", .op = "cache", .threads = kDivideThreads}),
          named({.id = "sm90.cache.merge_bf16", .op = "cache", .threads = kForestMergeThreads}),
          named({.id = "sm90.cache.merge_f16", .op = "cache", .threads = kForestMergeThreads})};
}

}  // namespace flashmask::cuda
