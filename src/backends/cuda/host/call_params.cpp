// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/host/call_params.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "backends/cuda/host/device.h"
#include "backends/cuda/host/error.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "plan/plan_buffer.h"

namespace flashmask::cuda {
namespace {

/// The parts of the call's plan, in device memory; null without a plan.
struct PlanParts {
  const std::byte* base;
  PlanLayout layout;

  explicit PlanParts(const Problem& p)
      : base(p.plan.data()), layout(p.plan.defined() ? p.plan.layout() : plan_layout(p.mask, p.device)) {}
  template <typename T>
  const T* at(int64_t offset) const {
    return base ? reinterpret_cast<const T*>(base + offset) : nullptr;
  }
};

}  // namespace

Sharing sharing(const Problem& p, int64_t batch, int64_t heads) {
  return {static_cast<uint32_t>(broadcast_group(p.batch, batch)),
          static_cast<uint32_t>(broadcast_group(p.heads_q, heads))};
}

namespace {

constexpr int64_t kLongest = int64_t{1} << 30;

/// Why the kernels cannot add the call's biases; empty if they can. They count their elements in 32 bits.
std::string alibi_refusal(const Problem& p) {
  constexpr int64_t kMost = int64_t{1} << 32;
  const MaskView& mask = p.mask;
  if (std::abs(mask.q_offset) > kLongest)
    return message("q_offset is ", mask.q_offset, "; with alibi_slopes it must be within ", -kLongest, " and ",
                   kLongest);
  if (mask.has_positions && p.features.softcap != 0)
    return "softcap and alibi_slopes come with positions; the kernels take two of the three";
  const TensorView& slopes = p.features.alibi_slopes;
  const int64_t last =
      (slopes.shape[0] - 1) * slopes.stride[0] + (slopes.rank == 2 ? (p.heads_q - 1) * slopes.stride[1] : 0);
  if (last >= kMost)
    return message("alibi_slopes is ", describe(slopes), "; its strides must reach less than 2^32 elements");
  if (mask.q_pos_batch * p.seqlen_q > kMost || mask.k_pos_batch * p.seqlen_k > kMost)
    return "with alibi_slopes the mask's positions must have less than 2^32 elements";
  return "";
}

}  // namespace

std::string lengths_refusal(const Problem& p) {
  for (const auto& [argument, n] : {std::pair{"seqlen_q", p.seqlen_q}, {"seqlen_k", p.seqlen_k}}) {
    if (n > kLongest) return message(argument, " is ", n, "; it must be at most ", kLongest);
  }
  return p.features.alibi_slopes.defined() ? alibi_refusal(p) : "";
}

Capability capability_of(const Problem& p) {
  if (p.gpu) return {p.gpu->compute_major, p.gpu->compute_minor};
  const DeviceProperties& d = device(p.device.index);
  return {d.major, d.minor};
}

int64_t multiprocessors(const Problem& p) {
  return p.gpu ? p.gpu->multiprocessors : device(p.device.index).multiprocessors;
}

int64_t most_ctas(const Problem& p) {
  const int64_t all = multiprocessors(p);
  return p.max_ctas > 0 ? std::min<int64_t>(p.max_ctas, all) : all;
}

MaskColumns mask_columns(const Problem& p) {
  const MaskView& mask = p.mask;
  if (mask.column_ptr) {
    const PlanLayout layout = plan_layout(mask);
    const int64_t of_head = layout.row_granules * 2 * layout.words_per_row;
    return {{}, {sharing(p, mask.batch(), mask.heads()), mask.heads() * of_head, of_head}};
  }
  const int64_t of_head = mask.seqlen_k * mask.bounds_stride;
  return {columns(mask, 0, 0),
          {sharing(p, mask.bounds_batch, mask.bounds_heads), mask.bounds_heads * of_head, of_head}};
}

DenseMask dense_mask(const Problem& p) {
  if (!p.dense.defined()) return {};
  return {.is_set = true,
          .visible = static_cast<const uint8_t*>(p.dense.data),
          .place = {sharing(p, p.dense.shape[0], p.dense.shape[1]), p.dense.stride[0], p.dense.stride[1]},
          .row_stride = p.dense.stride[2],
          .key_stride = p.dense.stride[3]};
}

ElementMask element_mask(const Problem& p) {
  if (p.dense.defined()) return ElementMask::kDense;
  const MaskView& mask = p.mask;
  if (mask.column_ptr) return ElementMask::kBits;
  const bool has_vectors = mask.lts || mask.lte || mask.uts || mask.ute;
  return has_vectors || compares_positions(mask) ? ElementMask::kColumns : ElementMask::kBand;
}

bool needs_plan(const Problem& p) { return !p.dense.defined(); }

RowPlanBits row_plan_bits(const Problem& p, int tile_rows) {
  const PlanParts plan(p);
  const PlanLayout& layout = plan.layout;
  return {.row_live = plan.at<uint32_t>(layout.row_live),
          .row_full = plan.at<uint32_t>(layout.row_full),
          .row_tile_order = plan.at<int32_t>(tile_rows == 192 ? layout.row_tile_order_192 : layout.row_tile_order_128),
          .words_per_row = static_cast<int32_t>(2 * layout.words_per_row),
          .row_granules = static_cast<int32_t>(layout.row_granules),
          .mask_heads = static_cast<uint32_t>(p.mask.heads()),
          .sharing = sharing(p, p.mask.batch(), p.mask.heads()),
          .in_runs = layout.in_runs()};
}

KeyPlanBits key_plan_bits(const Problem& p) {
  const PlanParts plan(p);
  const PlanLayout& layout = plan.layout;
  return {.key_live = plan.at<uint32_t>(layout.key_live),
          .key_full = plan.at<uint32_t>(layout.key_full),
          .row_live = plan.at<uint32_t>(layout.row_live),
          .key_order = plan.at<int32_t>(layout.key_order),
          .words_per_key = static_cast<int32_t>(2 * layout.words_per_key),
          .words_per_row = static_cast<int32_t>(2 * layout.words_per_row),
          .row_granules = static_cast<int32_t>(layout.row_granules),
          .mask_heads = static_cast<uint32_t>(p.mask.heads()),
          .sharing = sharing(p, p.mask.batch(), p.mask.heads()),
          .in_runs = layout.in_runs()};
}

BitTiles bit_tiles(const Problem& p) {
  if (!p.mask.column_ptr) return {};
  const PlanParts plan(p);
  const PlanLayout& layout = plan.layout;
  return {.row_live = plan.at<uint32_t>(layout.row_live),
          .row_full = plan.at<uint32_t>(layout.row_full),
          .before = plan.at<int32_t>(layout.tiles_before),
          .rows_of_keys = plan.at<uint2>(layout.tile_bits),
          .words_per_row = static_cast<int32_t>(2 * layout.words_per_row),
          .row_granules = static_cast<int32_t>(layout.row_granules)};
}

VisibleExtents visible_extents(const Problem& p) {
  const PlanParts plan(p);
  return {plan.at<VisibleExtent>(plan.layout.extents()), sharing(p, p.mask.batch(), p.mask.heads()).batch_entries};
}

TensorRows tensor_rows(const TensorView& t) {
  return {t.data, t.stride[0], t.stride[2], t.stride[1], static_cast<int32_t>(t.shape[3])};
}

bool has_product_scores(const Problem& p) { return p.features.softcap == 0 && !p.features.alibi_slopes.defined(); }

double score_unit(const Problem& p) {
  constexpr double kLeastOfBiases = 1e-30;  // which are divided by it; scores of no scale are as good as 0 beside them
  const double unit = p.features.softcap == 0 ? p.softmax_scale : p.features.softcap;
  return p.features.alibi_slopes.defined() ? std::max(unit, kLeastOfBiases) : unit;
}

float scale_log2(const Problem& p) {
  // A scale of 0 must not turn a hidden -inf into NaN; this one is as good as 0 for every finite score.
  constexpr double kLog2E = 1.4426950408889634, kSmallest = 1e-30;
  return static_cast<float>(std::max(score_unit(p) * kLog2E, kSmallest));
}

int64_t heads_per_l2_group(const Problem& p, int64_t l2_bytes) {
  const int64_t bytes = p.seqlen_k * (p.head_dim + p.head_dim_v) * static_cast<int64_t>(element_size(p.dtype));
  const int64_t kv_heads = std::max<int64_t>(1, l2_bytes / std::max<int64_t>(1, bytes));
  return std::min(kv_heads, p.batch * p.heads_kv) * p.group_size();
}

namespace {

AlibiParams alibi_params(const Problem& p) {
  const TensorView& slopes = p.features.alibi_slopes;
  if (!slopes.defined()) return {};
  const MaskView& mask = p.mask;
  return {.slopes = static_cast<const float*>(slopes.data),
          .batch_stride = slopes.rank == 2 ? static_cast<uint32_t>(slopes.stride[0]) : 0,
          .head_stride = static_cast<uint32_t>(slopes.stride[slopes.rank - 1]),
          .per_unit = static_cast<float>(1 / score_unit(p)),
          .q_pos = mask.has_positions ? mask.q_pos : nullptr,
          .k_pos = mask.has_positions ? mask.k_pos : nullptr,
          .q_pos_stride = mask.q_pos_batch > 1 ? static_cast<uint32_t>(mask.seqlen_q) : 0,
          .k_pos_stride = mask.k_pos_batch > 1 ? static_cast<uint32_t>(mask.seqlen_k) : 0,
          .last_row = static_cast<int32_t>(p.seqlen_q - 1),
          .last_key = static_cast<int32_t>(p.seqlen_k - 1)};
}

}  // namespace

FeatureParams feature_params(const Problem& p) {
  const Features& asked = p.features;
  FeatureParams params{};
  if (asked.softcap != 0) {
    // A factor of infinity would make a NaN of a product of 0; this one, too, caps every product that is not as good as
    // 0.
    constexpr double kMostFactor = 1e37;
    const double factor = std::min(p.softmax_scale / asked.softcap, kMostFactor);
    params.softcap = {static_cast<float>(asked.softcap), static_cast<float>(factor)};
  }
  if (asked.sink.defined())
    params.sink = {asked.sink.data, asked.sink.stride[0], asked.sink.dtype == DataType::kFloat32};
  const uint32_t threshold = dropout::threshold_of(asked.dropout.p);
  params.dropout = {threshold, static_cast<float>(dropout::scale_of(threshold)), asked.dropout.state};
  const MaskView& mask = p.mask;
  if (mask.column_ptr) return params;  // bit tiles have what positions hide
  params.positions = {position_band(mask, 0), mask.q_pos_batch > 1 ? mask.seqlen_q : 0,
                      mask.k_pos_batch > 1 ? mask.seqlen_k : 0};
  return params;
}

ScoreParams score_params(const Problem& p) { return {static_cast<int32_t>(p.mask.q_offset), alibi_params(p)}; }

ArrivalParams arrival_params(const Problem& p) {
  const Arrivals& a = p.arrivals;
  if (!a.defined()) return {};
  return {.needed = static_cast<const uint32_t*>(a.needed.data),
          .entry_stride = a.needed.shape[0] > 1 ? static_cast<uint32_t>(a.needed.stride[0]) : 0,
          .state = static_cast<uint32_t*>(a.state.data),
          .limit = wait_limit(a.timeout)};
}

void allow_shared_memory(const void* kernel, int bytes, int32_t device) {
  static std::mutex mutex;
  static std::vector<std::pair<const void*, int32_t>> allowed;
  const std::lock_guard lock(mutex);
  const std::pair key(kernel, device);
  if (std::find(allowed.begin(), allowed.end(), key) != allowed.end()) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute of a kernel");
  allowed.push_back(key);
}

}  // namespace flashmask::cuda
