// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/cache/cached_call.h"

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <iterator>
#include <tuple>
#include <utility>

#include "backends/cuda/host/alignment.h"
#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device.h"
#include "call/workspace.h"
#include "common/message.h"
#include "common/tensor_checks.h"

namespace flashmask::cuda {
namespace {

bool are_aligned(std::initializer_list<const TensorView*> tensors) {
  return std::ranges::all_of(tensors, [](const TensorView* t) { return alignment_refusal("", *t).empty(); });
}

CallRows rows_of(const CachedProblem& p, const TensorView& t) {
  if (p.is_packed()) return {t.data, 0, t.stride[0], t.stride[1]};
  return {t.data, t.stride[0], t.stride[1], t.stride[2]};
}
CallRows pages_of(const TensorView& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2]}; }
CacheScale scale_of(const TensorView& t) {
  return {static_cast<const float*>(t.data), t.stride[0], t.stride[1], t.stride[2]};
}
CallRows lse_of(const CachedProblem& p) {
  const TensorView& t = p.lse;
  if (p.is_packed()) return {t.data, 0, t.stride[1], t.stride[0]};
  return {t.data, t.stride[0], t.stride[2], t.stride[1]};
}

/// True if 16 bytes never reach from a row of the cache into the next.
bool has_whole_chunks(const CachedProblem& p) {
  const auto elements = 16 / static_cast<int64_t>(element_size(p.cache_dtype));
  return p.head_dim % elements == 0 && p.head_dim_v % elements == 0;
}

/// Why the kernels cannot count the elements of the call's slopes in 32 bits; empty if they can, or there are none.
std::string slopes_refusal(const CachedProblem& p) {
  const TensorView& slopes = p.features.alibi_slopes;
  if (!slopes.defined()) return "";
  int64_t last = 0;
  for (int d = 0; d < slopes.rank; ++d) last += (slopes.shape[d] - 1) * slopes.stride[d];
  if (last < int64_t{1} << 32) return "";
  return message("alibi_slopes is ", describe(slopes), "; its strides must reach less than 2^32 elements");
}

/// Why the plan has too few splits for a request; empty if it has enough, lists of pages say how long requests are,
/// which the host cannot see, or the plan is for other calls, which is said elsewhere.
std::string room_refusal(const CachedProblem& p) {
  if (!p.batch_invariant || !p.plan || p.cache.page_indptr.defined()) return "";
  const CachedCapacities& c = p.plan->capacities;
  if (!c.batch_invariant || c.split_size != p.split_size) return "";
  const int64_t splits = splits_of(c);
  if (p.splits() <= splits) return "";
  return message("batch_invariant is set, and a request has room for ", p.capacity, " keys, ", p.splits(),
                 " splits of split_size ", p.split_size, "; the plan's max_keys has ", splits);
}

/// Division of numbers below 2^31: n / divisor is n * multiplier >> shift. With 2^l at least the divisor, the
/// multiplier is 2^(31 + l) / divisor rounded up, so it is too large by less than 1, and the quotient by less than n /
/// 2^(31 + l), which is below 1 / divisor.
std::pair<uint32_t, uint32_t> division_by(uint32_t divisor) {
  const auto l = static_cast<uint32_t>(std::bit_width(divisor - 1));
  return {static_cast<uint32_t>(((uint64_t{1} << (31 + l)) + divisor - 1) / divisor), 31 + l};
}

}  // namespace

Problem common_part(const CachedProblem& p) {
  Problem common{};
  static_cast<CommonOptions&>(common) = p;
  common.device = p.device;
  common.batch = p.batch;
  common.heads_q = p.heads_q;
  common.head_dim = p.head_dim;
  common.head_dim_v = p.head_dim_v;
  return common;
}

std::string cached_refusal(const CachedProblem& p, int32_t packed_rows) {
  if (std::ranges::find(kDataTypes, p.dtype) == std::end(kDataTypes))
    return message("q is ", name(p.dtype), "; cast to bfloat16 or float16");
  if (p.pages > INT32_MAX) return message("the cache has ", p.pages, " pages; it must have less than 2^31");
  constexpr int64_t kMostRequests = int64_t{1} << 20, kMostKeys = int64_t{1} << 30;
  if (p.batch > kMostRequests)
    return message("the call has ", p.batch, " requests; it must have at most ", kMostRequests);
  if (p.capacity > kMostKeys)
    return message("a request has room for ", p.capacity, " keys; it must be at most ", kMostKeys);
  if (std::string why = slopes_refusal(p); !why.empty()) return why;
  if (std::string why = room_refusal(p); !why.empty()) return why;
  return p.plan ? "" : WorkPlanLayout::refusal(capacities_of(p), packed_rows);
}

WorkPlanLayout own_plan(const CachedProblem& p, const WorkPlaces& places) { return {capacities_of(p), places}; }

WorkPlan plan_of(const CachedProblem& p, const WorkPlaces& places, std::byte* workspace) {
  if (!p.plan) return own_plan(p, places).at(workspace, p);
  return WorkPlanLayout(p.plan->capacities, places).at(aligned(p.plan->buffer), p);
}

CachedParams cached_params(const CachedProblem& p, const WorkPlan& plan) {
  const Problem common = common_part(p);
  const FeatureParams features = feature_params(common);
  CachedParams params{};
  params.gathers = true;
  params.box_keys = 1;
  params.k_rows = pages_of(p.cache.k);
  params.v_rows = pages_of(p.cache.v);
  params.keys_aligned = are_aligned({&p.cache.k, &p.cache.v}) && has_whole_chunks(p);
  params.rows_aligned = are_aligned({&p.q, &p.out});
  params.q = rows_of(p, p.q);
  params.out = rows_of(p, p.out);
  params.lse = lse_of(p);
  params.call = p.view;
  params.plan = plan;
  params.head_dim = static_cast<int32_t>(p.head_dim);
  params.head_dim_v = static_cast<int32_t>(p.head_dim_v);
  params.pages = static_cast<int32_t>(p.pages);
  params.page_size = static_cast<int32_t>(std::min<int64_t>(p.page_size, INT32_MAX));
  std::tie(params.page_multiplier, params.page_shift) =
      division_by(static_cast<uint32_t>(std::max(params.page_size, 1)));
  params.scale_log2 = scale_log2(common);
  params.score_of_bit = 1 / params.scale_log2;
  params.features = features;
  params.k_scale = scale_of(p.cache.k_scale);
  params.v_scale = scale_of(p.cache.v_scale);
  if (const TensorView& slopes = p.features.alibi_slopes; slopes.defined()) {
    const bool by_request = slopes.rank == 2;
    params.alibi.slopes = static_cast<const float*>(slopes.data);
    params.alibi.batch_stride = by_request ? static_cast<uint32_t>(slopes.stride[0]) : 0;
    params.alibi.head_stride = static_cast<uint32_t>(slopes.stride[by_request ? 1 : 0]);
    params.alibi.per_unit = static_cast<float>(1 / score_unit(common));
  }
  return params;
}

int64_t cached_ctas(const CachedProblem& p, const WorkPlaces& places) {
  return p.max_ctas > 0 ? std::min<int64_t>(p.max_ctas, places.shares) : places.shares;
}

WorkPlanLayout planned_layout(const CachedCapacities& c, const WorkPlaces& places) {
  if (const std::string why = WorkPlanLayout::refusal(c, places.packed_rows); !why.empty()) throw_unsupported(why);
  return {c, places};
}

void throw_head_dims(const CachedCapacities& c) {
  throw_unsupported("head_dim ", c.head_dim, " with head_dim_v ", c.head_dim_v,
                    "; the kernels over caches take multiples of 8, at most 256 / 256");
}

void build_plan(const CachedProblem& p, const CachedPlan& plan, const WorkPlanLayout& layout) {
  const DeviceGuard guard(p.device.index);
  if (plan.buffer.size() < padded_workspace(layout.bytes()))
    throw_invalid("the plan's buffer has ", plan.buffer.size(), " bytes; it needs ", padded_workspace(layout.bytes()),
                  " (cached_plan_bytes)");
  LaunchChain chain(static_cast<cudaStream_t>(p.stream), LaunchChain::kOverlapPrevious);
  launch_work_plan(layout.at(aligned(plan.buffer), p), p, chain);
}

std::string shares_text(const CachedProblem& p, const WorkPlaces& places) {
  const std::string tiles = message("tiles of up to ", places.packed_rows, " packed rows; ");
  if (has_levels(plan_capacities(p), places.packed_rows))
    return message(tiles, "each block of 128 keys for as many rows at once as costs least, live ones in ",
                   places.shares, " equal shares, merged in ascending order by a kernel behind");
  if (p.batch_invariant && places.packed_rows > kPackedRows)
    return message(tiles, "at multiples of ", p.split_size, " keys, row tiles dealt whole to ", places.shares,
                   " CTAs, each split folded into those before");
  if (p.batch_invariant)
    return message(tiles, "at multiples of ", p.split_size, " keys, whole splits in ", places.shares,
                   " shares of live blocks, folded in ascending order by the last to arrive");
  const char* const dealt =
      places.packed_rows > kPackedRows ? "row tiles dealt whole to CTAs or, where that is uneven, " : "";
  return message(tiles, dealt, "live blocks of 128 keys in ", places.shares,
                 " equal shares, merged in ascending order by the last to arrive");
}

}  // namespace flashmask::cuda
