// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/decode/decode.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "backends/cuda/cache/work_plan.h"
#include "backends/cuda/host/alignment.h"
#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device.h"
#include "backends/cuda/host/error.h"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/kernel_table.h"
#include "backends/cuda/sm90/common/column_blocks.h"
#include "backends/cuda/sm90/common/tensor_map.h"
#include "backends/cuda/sm90/decode/instance.h"
#include "backends/cuda/sm90/decode/params.h"
#include "backends/cuda/sm90/decode/tile_config.h"
#include "call/workspace.h"
#include "common/message.h"
#include "common/tensor_checks.h"

namespace flashmask::sm90 {
namespace {

using DecodeTable = cuda::KernelTable<kDecodeTiles, kDecodeVariants>;
using DecodeKernel = DecodeTable::Kernel;

/// Live blocks of a share, as far as there are, and those of a multiprocessor where units lie in many shares: fewer
/// take longer to merge than to read.
constexpr int32_t kLeastBlocks = 1, kSplitBlocks = 2;

std::string id_of(DataType dtype, const DecodeTile& tile) {
  return cuda::tile_kernel_id(kArch, "decode", dtype, tile.head_dim, tile.head_dim_v, 's', tile.slots);
}

const DecodeTable& table_of(DataType dtype) {
  return DecodeTable::of(dtype, id_of, []<DataType type, DecodeTile tile, int variant>() {
    return decode_kernel<type, tile.head_dim, tile.head_dim_v, tile.slots, variant>();
  });
}

const DecodeTile* tile_of(int64_t head_dim, int64_t head_dim_v) {
  return cuda::least_tile(kDecodeTiles, head_dim, head_dim_v);
}

/// The call's device and scores, as calls over tensors have them.
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

int32_t places(const Device& device, const DecodeTile& tile) {
  return cuda::device(device.index).multiprocessors * tile.ctas;
}

bool are_aligned(std::initializer_list<const TensorView*> tensors) {
  return std::ranges::all_of(tensors, [](const TensorView* t) { return cuda::alignment_refusal("", *t).empty(); });
}

/// Keys of a box of the tensor maps; 0: keys and values are gathered, since rows are not as TMA takes them, its boxes
/// would be slower, or there are none.
int box_keys(const CachedProblem& p, const DecodeTile& tile) {
  constexpr int64_t kLeastBox = 8;
  const int64_t slot_keys = cuda::kBlockKeys / tile.parts;
  const int64_t keys = p.has_tables() ? std::gcd(p.page_size, slot_keys) : slot_keys;
  const auto fits = [](const TensorView& t) { return t.num_elements() > 0 && tensor_map_refusal("", t).empty(); };
  return fits(p.cache.k) && fits(p.cache.v) && keys >= kLeastBox ? static_cast<int>(keys) : 0;
}

CallRows rows_of(const CachedProblem& p, const TensorView& t) {
  if (p.is_packed()) return {t.data, 0, t.stride[0], t.stride[1]};
  return {t.data, t.stride[0], t.stride[1], t.stride[2]};
}
CallRows pages_of(const TensorView& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2]}; }
CallRows lse_of(const CachedProblem& p) {
  const TensorView& t = p.lse;
  if (p.is_packed()) return {t.data, 0, t.stride[1], t.stride[0]};
  return {t.data, t.stride[0], t.stride[2], t.stride[1]};
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

/// Why the call is not taken whatever its head dims.
std::string refusal(const CachedProblem& p) {
  if (std::ranges::find(cuda::kDataTypes, p.dtype) == std::end(cuda::kDataTypes))
    return message("q is ", name(p.dtype), "; cast to bfloat16 or float16");
  if (p.cache_dtype != p.dtype)
    return message("the cache is ", name(p.cache_dtype), "; backend 'cpu' reads it, in host memory");
  if (p.batch_invariant) return "batch_invariant is set; backend 'cpu' gives it, in host memory";
  if (p.pages > INT32_MAX) return message("the cache has ", p.pages, " pages; it must have less than 2^31");
  constexpr int64_t kMostRequests = int64_t{1} << 20, kMostKeys = int64_t{1} << 30;
  if (p.batch > kMostRequests)
    return message("the call has ", p.batch, " requests; it must have at most ", kMostRequests);
  if (p.capacity > kMostKeys)
    return message("a request has room for ", p.capacity, " keys; it must be at most ", kMostKeys);
  if (std::string why = slopes_refusal(p); !why.empty()) return why;
  if (!p.plan) {
    if (std::string why = cuda::WorkPlanLayout::refusal(cuda::capacities_of(p)); !why.empty()) return why;
  }
  return "";
}

/// A call over a cache, configured.
struct DecodeCall {
  const DecodeKernel& kernel;
  const cuda::WorkPlaces work_places;

  explicit DecodeCall(const CachedProblem& p)
      : kernel(*table_of(p.dtype).find(*tile_of(p.head_dim, p.head_dim_v), {})),
        work_places(places_of(p.device, *kernel.tile)) {}

  static cuda::WorkPlaces places_of(const Device& device, const DecodeTile& tile) {
    return {places(device, tile), kLeastBlocks, kSplitBlocks * tile.ctas, tile.head_dim_v};
  }
  cuda::WorkPlanLayout own_plan(const CachedProblem& p) const { return {cuda::capacities_of(p), work_places}; }
  cuda::WorkPlan plan_of(const CachedProblem& p, std::byte* workspace) const {
    if (!p.plan) return own_plan(p).at(workspace, p);
    return cuda::WorkPlanLayout(p.plan->capacities, work_places).at(aligned(p.plan->buffer), p);
  }
  DecodeParams make_params(const CachedProblem& p, const cuda::WorkPlan& plan) const;
  void run(const CachedProblem& p, std::byte* workspace) const;
};

/// Division of numbers below 2^31: n / divisor is n * multiplier >> shift. With 2^l at least the divisor, the
/// multiplier is 2^(31 + l) / divisor rounded up, so it is too large by less than 1, and the quotient by less than n /
/// 2^(31 + l), which is below 1 / divisor.
std::pair<uint32_t, uint32_t> division_by(uint32_t divisor) {
  const auto l = static_cast<uint32_t>(std::bit_width(divisor - 1));
  return {static_cast<uint32_t>(((uint64_t{1} << (31 + l)) + divisor - 1) / divisor), 31 + l};
}

CUtensorMap map_of(int box_keys, const TensorView& t, int64_t dim, const char* argument) {
  // Keeps L2 from fetching beyond a line of a box: the rest comes with the next box, and twice costs 5 % of the
  // bandwidth.
  return tensor_map(t, blocks_to_the_end(dim), box_keys, 1, argument, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

DecodeParams DecodeCall::make_params(const CachedProblem& p, const cuda::WorkPlan& plan) const {
  const Problem common = common_part(p);
  const cuda::FeatureParams features = cuda::feature_params(common);
  DecodeParams params{};
  const int box = box_keys(p, *kernel.tile);
  params.gathers = box == 0;
  params.box_keys = std::max(box, 1);
  if (!params.gathers) {
    params.k = map_of(box, p.cache.k, p.head_dim, "cache.k");
    params.v = map_of(box, p.cache.v, p.head_dim_v, "cache.v");
  }
  params.k_rows = pages_of(p.cache.k);
  params.v_rows = pages_of(p.cache.v);
  params.keys_aligned = are_aligned({&p.cache.k, &p.cache.v});
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
  params.scale_log2 = cuda::scale_log2(common);
  params.score_of_bit = 1 / params.scale_log2;
  params.softcap = features.softcap;
  params.sink = features.sink;
  if (const TensorView& slopes = p.features.alibi_slopes; slopes.defined()) {
    const bool by_request = slopes.rank == 2;
    params.alibi.slopes = static_cast<const float*>(slopes.data);
    params.alibi.batch_stride = by_request ? static_cast<uint32_t>(slopes.stride[0]) : 0;
    params.alibi.head_stride = static_cast<uint32_t>(slopes.stride[by_request ? 1 : 0]);
    params.alibi.per_unit = static_cast<float>(1 / cuda::score_unit(common));
  }
  return params;
}

void DecodeCall::run(const CachedProblem& p, std::byte* workspace) const {
  const cuda::DeviceGuard guard(p.device.index);
  const auto stream = static_cast<cudaStream_t>(p.stream);
  const cuda::WorkPlan plan = plan_of(p, workspace);
  cuda::LaunchChain chain(stream, cuda::LaunchChain::kOverlapPrevious);
  if (!p.plan) cuda::launch_work_plan(plan, p, chain);
  DecodeParams params = make_params(p, plan);
  const auto& [entry, threads, shared_bytes] = kernel.compiled;
  cuda::allow_shared_memory(entry, shared_bytes, p.device.index);
  const int64_t ctas = p.max_ctas > 0 ? std::min<int64_t>(p.max_ctas, work_places.shares) : work_places.shares;
  void* arguments[] = {&params};
  chain.launch("launch of the decode kernel", entry, ctas, threads, shared_bytes, arguments);
}

/// The layout of plans with these capacities; throws if no kernel reads them.
cuda::WorkPlanLayout planned_layout(const CachedCapacities& c, const Device& device) {
  const DecodeTile* const tile = tile_of(c.head_dim, c.head_dim_v);
  if (!tile)
    throw_unsupported("head_dim ", c.head_dim, " with head_dim_v ", c.head_dim_v,
                      "; the kernels over caches take multiples of 8, at most 256 / 256");
  if (const std::string why = cuda::WorkPlanLayout::refusal(c); !why.empty()) throw_unsupported(why);
  return {c, DecodeCall::places_of(device, *tile)};
}

void explain(const CachedProblem& p, CachedExplanation& e) {
  const DecodeCall call(p);
  e.kernel = call.kernel.id;
  e.splits = message("live blocks of 128 keys in ", call.work_places.shares,
                     " equal shares, merged in ascending order by the last to arrive");
  const int box = box_keys(p, *call.kernel.tile);
  e.pages += box > 0 ? message(", copied in boxes of ", box, " keys by TMA") : ", gathered key by key";
}

}  // namespace

PreparedCached prepare_cached(const CachedProblem& p) {
  if (std::string why = refusal(p); !why.empty()) return Refusal{std::move(why)};
  if (!tile_of(p.head_dim, p.head_dim_v)) return cuda::head_dims_refusal(common_part(p), kDecodeTiles);
  const int64_t bytes = p.plan ? 0 : DecodeCall(p).own_plan(p).bytes();
  return CachedLaunch{bytes, explain, [](const CachedProblem& problem, std::byte* workspace) {
                        DecodeCall(problem).run(problem, workspace);
                      }};
}

std::size_t cached_plan_bytes(const CachedCapacities& capacities, const Device& device) {
  return padded_workspace(planned_layout(capacities, device).bytes());
}

void build_cached_plan(const CachedProblem& p, const CachedPlan& plan) {
  const cuda::DeviceGuard guard(p.device.index);
  const cuda::WorkPlanLayout layout = planned_layout(plan.capacities, p.device);
  if (plan.buffer.size() < padded_workspace(layout.bytes()))
    throw_invalid("the plan's buffer has ", plan.buffer.size(), " bytes; it needs ", padded_workspace(layout.bytes()),
                  " (cached_plan_bytes)");
  cuda::LaunchChain chain(static_cast<cudaStream_t>(p.stream), cuda::LaunchChain::kOverlapPrevious);
  cuda::launch_work_plan(layout.at(aligned(plan.buffer), p), p, chain);
}

std::vector<KernelInfo> decode_kernels() {
  std::vector<KernelInfo> all;
  for (const DataType dtype : cuda::kDataTypes) {
    table_of(dtype).for_each([&](const DecodeKernel& kernel) {
      all.push_back(cuda::named({.id = kernel.id,
                                 .op = "decode",
                                 .dtype = dtype,
                                 .head_dim = kernel.tile->head_dim,
                                 .head_dim_v = kernel.tile->head_dim_v,
                                 .tile = {cuda::kPackedRows, cuda::kBlockKeys},
                                 .threads = kernel.compiled.threads,
                                 .shared_bytes = kernel.compiled.shared_bytes}));
    });
  }
  return all;
}

}  // namespace flashmask::sm90
