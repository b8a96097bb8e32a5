// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/decode/decode.h"

#include <cuda_runtime_api.h>

#include <iterator>
#include <numeric>
#include <string>
#include <utility>

#include "backends/cuda/cache/cached_call.h"
#include "backends/cuda/cache/work_plan.h"
#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device.h"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/kernel_table.h"
#include "backends/cuda/sm90/common/column_blocks.h"
#include "backends/cuda/sm90/common/tensor_map.h"
#include "backends/cuda/sm90/decode/instance.h"
#include "backends/cuda/sm90/decode/params.h"
#include "backends/cuda/sm90/decode/tile_config.h"
#include "call/workspace.h"
#include "common/message.h"

namespace flashmask::sm90 {
namespace {

using DecodeTable = cuda::KernelTable<kDecodeTiles, kDecodeVariants>;
using DecodeKernel = DecodeTable::Kernel;

std::string id_of(DataType dtype, const DecodeTile& tile) {
  return cuda::tile_kernel_id(kArch, "decode", dtype, tile.head_dim, tile.head_dim_v, 'c', tile.consumers);
}

const DecodeTable& table_of(DataType dtype) {
  return DecodeTable::of(dtype, id_of, []<DataType type, DecodeTile tile, int variant>() {
    return decode_kernel<type, tile.head_dim, tile.head_dim_v, tile.consumers, variant>();
  });
}

/// True if requests have more packed rows than that on average.
bool has_more_rows(const CachedCapacities& c, int64_t rows) {
  return c.max_rows * (c.heads_q / c.heads_kv) > rows * c.max_batch;
}

/// Average packed rows of a request up to which the kernels of mma.sync read a cache of e4m3: numbers that few rows use
/// are better converted in registers.
constexpr int64_t kFewFloat8Rows = 32;

/// The tile for calls of some capacities; null if none has the head dims. It may not depend on the call itself, as its
/// plan lists the rows of each tile. A forest has blocks of keys that many rows see, however few a request has.
const DecodeTile* tile_of(const CachedCapacities& c) {
  const DecodeTile* const least = cuda::least_tile(kDecodeTiles, c.head_dim, c.head_dim_v);
  const bool has_many = c.forest || has_more_rows(c, c.float8 ? kFewFloat8Rows : cuda::kPackedRows);
  if (!least || !has_many) return least;
  const DecodeTile* const tall = least + 1;
  const bool is_there =
      tall != std::end(kDecodeTiles) && tall->head_dim == least->head_dim && tall->head_dim_v == least->head_dim_v;
  return is_there ? tall : least;
}
const DecodeTile* tile_of(const CachedProblem& p) { return tile_of(cuda::plan_capacities(p)); }

/// Packed rows of a tile. Where requests have few, it has only as many as the kernel spreads: more take longer, whether
/// they see its keys or not.
int32_t packed_rows(const CachedCapacities& c, const DecodeTile& tile) {
  const int32_t few = tile.spread_rows();
  return few == 0 || c.forest || has_more_rows(c, few) ? tile.rows() : few;
}

int32_t multiprocessors_of(const CachedProblem& p) {
  return p.gpu ? p.gpu->multiprocessors : cuda::device(p.device.index).multiprocessors;
}

/// Keys of a box of the tensor maps; 0: keys and values are gathered, since rows are not as TMA takes them, its boxes
/// would be slower, or there are none.
int box_keys(const CachedProblem& p, const DecodeTile& tile) {
  constexpr int64_t kLeastBox = 8;
  const int64_t copied_keys = tile.copied_keys(p.has_float8());
  const int64_t keys = p.has_tables() ? std::gcd(p.page_size, copied_keys) : copied_keys;
  const auto fits = [](const TensorView& t) { return t.num_elements() > 0 && tensor_map_refusal("", t).empty(); };
  return fits(p.cache.k) && fits(p.cache.v) && keys >= kLeastBox ? static_cast<int>(keys) : 0;
}

/// A call over a cache, configured.
struct DecodeCall {
  const DecodeKernel& kernel;
  const cuda::WorkPlaces work_places;

  explicit DecodeCall(const CachedProblem& p)
      : kernel(*table_of(p.dtype).find(*tile_of(p), {.float8 = p.has_float8()})),
        work_places(places_of(multiprocessors_of(p), cuda::plan_capacities(p), *kernel.tile)) {}

  static cuda::WorkPlaces places_of(int32_t multiprocessors, const CachedCapacities& c, const DecodeTile& tile) {
    return {multiprocessors * tile.ctas, cuda::kLeastBlocks, cuda::kSplitBlocks * tile.ctas,
            packed_rows(c, tile),        tile.rows(),        tile.head_dim_v};
  }
  DecodeParams make_params(const CachedProblem& p, const cuda::WorkPlan& plan) const;
  void run(const CachedProblem& p, std::byte* workspace) const;
};

CUtensorMap map_of(int box_keys, const TensorView& t, int64_t dim, const char* argument) {
  // Keeps L2 from fetching beyond a line of a box: the rest comes with the next box, and twice costs 5 % of the
  // bandwidth.
  return tensor_map(t, blocks_to_the_end(dim), box_keys, 1, argument, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

/// q with its heads within rows: [batch or 1, heads, rows, head_dim].
TensorView rows_by_head(const CachedProblem& p) {
  TensorView t = p.q;
  if (p.is_packed()) {
    t.rank = 4;
    for (int d = 3; d > 0; --d) t.shape[d] = t.shape[d - 1], t.stride[d] = t.stride[d - 1];
    t.shape[0] = 1;
    t.stride[0] = 0;
  }
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

/// Sets the boxes that the rows of a tall tile come in, if TMA takes them.
void set_query_boxes(const CachedProblem& p, const DecodeTile& tile, DecodeParams& params) {
  const auto group = static_cast<int32_t>(p.group_size());
  const TensorView q = rows_by_head(p);
  if (tile.consumers == 1 || group > tile.rows() || !tensor_map_refusal("", q).empty()) return;
  const int32_t rows = tile.rows() / group;
  params.query_boxes =
      tensor_map(q, blocks_to_the_end(p.head_dim), group, 1, "q", CU_TENSOR_MAP_L2_PROMOTION_L2_256B, rows);
  params.query_box_rows = rows * group;
}

DecodeParams DecodeCall::make_params(const CachedProblem& p, const cuda::WorkPlan& plan) const {
  DecodeParams params{};
  static_cast<cuda::CachedParams&>(params) = cuda::cached_params(p, plan);
  set_query_boxes(p, *kernel.tile, params);
  const int box = box_keys(p, *kernel.tile);
  if (box == 0) return params;
  params.gathers = false;
  params.box_keys = box;
  params.k = map_of(box, p.cache.k, p.head_dim, "cache.k");
  params.v = map_of(box, p.cache.v, p.head_dim_v, "cache.v");
  return params;
}

void DecodeCall::run(const CachedProblem& p, std::byte* workspace) const {
  const cuda::DeviceGuard guard(p.device.index);
  const cuda::WorkPlan plan = cuda::plan_of(p, work_places, workspace);
  cuda::LaunchChain chain(static_cast<cudaStream_t>(p.stream), cuda::LaunchChain::kOverlapPrevious);
  if (!p.plan) cuda::launch_work_plan(plan, p, chain);
  DecodeParams params = make_params(p, plan);
  const auto& [entry, threads, shared_bytes] = kernel.compiled;
  cuda::allow_shared_memory(entry, shared_bytes, p.device.index);
  void* arguments[] = {&params};
  chain.launch("launch of the decode kernel", entry, cuda::cached_ctas(p, work_places), threads, shared_bytes,
               arguments);
  cuda::launch_forest_merge(params, p, work_places.head_dim_v, chain);
}

/// The layout of plans with these capacities; throws if no kernel reads them.
cuda::WorkPlanLayout planned_layout(const CachedCapacities& c, const Device& device) {
  const DecodeTile* const tile = tile_of(c);
  if (!tile) cuda::throw_head_dims(c);
  return cuda::planned_layout(c, DecodeCall::places_of(cuda::device(device.index).multiprocessors, c, *tile));
}

void explain(const CachedProblem& p, CachedExplanation& e) {
  const DecodeCall call(p);
  e.kernel = call.kernel.id;
  e.splits = cuda::shares_text(p, call.work_places);
  const int box = box_keys(p, *call.kernel.tile);
  e.pages += box > 0 ? message(", copied in boxes of ", box, " keys by TMA") : ", gathered key by key";
}

/// Why the kernels read no cache of e4m3 in calls of these capacities; empty if they do, or the cache is another.
std::string float8_refusal(const CachedCapacities& c) {
  if (!c.float8) return "";
  std::string why;
  if (c.batch_invariant) {
    why = "with batch_invariant";
  } else if (!has_more_rows(c, kFewFloat8Rows)) {
    why = message("with room for ", c.max_rows, " rows of ", c.heads_q / c.heads_kv, " heads a key head in ",
                  c.max_batch, " requests, at most ", kFewFloat8Rows, " each,");
  } else if (const DecodeTile* const tile = tile_of(c); !tile || tile->copies == 0) {
    why = message("with head_dim ", c.head_dim, " and head_dim_v ", c.head_dim_v);
  } else {
    return "";
  }
  return message("the cache is ", name(DataType::kFloat8E4M3), "; ", why, " kernels 'sm80' read it: leave kernels '",
                 kArch, "' (FLASHMASK_KERNELS or Options::kernels) out");
}

}  // namespace

bool reads_float8(const CachedCapacities& capacities) { return float8_refusal(capacities).empty(); }

PreparedCached prepare_cached(const CachedProblem& p) {
  const DecodeTile* const tile = tile_of(p);
  const CachedCapacities capacities = cuda::plan_capacities(p);
  if (std::string why = cuda::cached_refusal(p, tile ? packed_rows(capacities, *tile) : cuda::kPackedRows);
      !why.empty())
    return Refusal{std::move(why)};
  if (std::string why = float8_refusal(capacities); !why.empty()) return Refusal{std::move(why)};
  if (!tile) return cuda::head_dims_refusal(cuda::common_part(p), kDecodeTiles);
  const int64_t bytes = p.plan ? 0 : cuda::own_plan(p, DecodeCall(p).work_places).bytes();
  return CachedLaunch{bytes, explain, [](const CachedProblem& problem, std::byte* workspace) {
                        DecodeCall(problem).run(problem, workspace);
                      }};
}

std::size_t cached_plan_bytes(const CachedCapacities& capacities, const Device& device) {
  return padded_workspace(planned_layout(capacities, device).bytes());
}

void build_cached_plan(const CachedProblem& p, const CachedPlan& plan) {
  cuda::build_plan(p, plan, planned_layout(plan.capacities, p.device));
}

std::vector<KernelInfo> decode_kernels() {
  std::vector<KernelInfo> all;
  for (const DataType dtype : cuda::kDataTypes) {
    table_of(dtype).for_each([&](const DecodeKernel& kernel) {
      all.push_back(cuda::table_kernel_info(kernel, "decode", dtype, {kernel.tile->rows(), cuda::kBlockKeys}));
    });
  }
  return all;
}

}  // namespace flashmask::sm90
