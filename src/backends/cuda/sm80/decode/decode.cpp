// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm80/decode/decode.h"

#include <algorithm>
#include <string>
#include <utility>

#include "backends/cuda/cache/cached_call.h"
#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device.h"
#include "backends/cuda/host/head_dims.h"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/kernel_table.h"
#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/sm80/common/shared_memory.h"
#include "backends/cuda/sm80/decode/instance.h"
#include "backends/cuda/sm80/decode/tile_config.h"
#include "call/workspace.h"
#include "common/message.h"
#include "common/tensor_checks.h"

namespace flashmask::sm80 {
namespace {

using DecodeTable = cuda::KernelTable<kDecodeTiles, kDecodeVariants>;
using DecodeKernel = DecodeTable::Kernel;

std::string id_of(DataType dtype, const DecodeTile& tile) {
  return cuda::tile_kernel_id(kArch, "decode", dtype, tile.head_dim, tile.head_dim_v, 'k', tile.kilobytes);
}

const DecodeTable& table_of(DataType dtype) {
  return DecodeTable::of(dtype, id_of, []<DataType type, DecodeTile tile, int variant>() {
    return decode_kernel<type, tile.head_dim, tile.head_dim_v, tile.kilobytes, variant>();
  });
}

/// The least tile that holds the head dims, with the most shared memory that fits; null if there is none.
const DecodeTile* tile_of(int64_t head_dim, int64_t head_dim_v, int kilobytes) {
  const DecodeTile* const least = cuda::least_tile(kDecodeTiles, head_dim, head_dim_v);
  if (!least) return nullptr;
  const DecodeTile* chosen = nullptr;
  for (const DecodeTile& tile : kDecodeTiles) {
    const bool is_alike = tile.head_dim == least->head_dim && tile.head_dim_v == least->head_dim_v;
    if (is_alike && tile.kilobytes <= kilobytes && (!chosen || chosen->kilobytes < tile.kilobytes)) chosen = &tile;
  }
  return chosen;
}

const DecodeKernel& kernel_of(DataType dtype, const DecodeTile& tile, bool float8 = false) {
  return *table_of(dtype).find(tile, {.float8 = float8});
}

/// CTAs that a multiprocessor of the device holds.
int resident_ctas(const cuda::DeviceProperties& device, const DecodeKernel& kernel) {
  constexpr int kReservedBytes = 1024;
  const int bytes = multiprocessor_kilobytes(device.major, device.minor) * 1024;
  return std::min(DecodeTile::kMostCtas, bytes / (kernel.compiled.shared_bytes + kReservedBytes));
}

/// Places of a tile's kernels. Plans, which do not know a cache's type, serve all of them; with a cache of e4m3 as
/// many CTAs fit.
cuda::WorkPlaces places_of(const Device& device, const DecodeTile& tile) {
  const cuda::DeviceProperties& properties = cuda::device(device.index);
  const int ctas = resident_ctas(properties, kernel_of(DataType::kBFloat16, tile));
  return {properties.multiprocessors * ctas,
          cuda::kLeastBlocks,
          cuda::kSplitBlocks * ctas,
          cuda::kPackedRows,
          cuda::kPackedRows,
          tile.head_dim_v};
}

/// The layout of plans with these capacities; throws if no kernel reads them.
cuda::WorkPlanLayout planned_layout(const CachedCapacities& c, const Device& device, int kilobytes) {
  const DecodeTile* const tile = tile_of(c.head_dim, c.head_dim_v, kilobytes);
  if (!tile) cuda::throw_head_dims(c);
  return cuda::planned_layout(c, places_of(device, *tile));
}

/// Why the kernels cannot count the elements of a page of the cache's tensors in 32 bits; empty if they can.
std::string page_refusal(const CachedProblem& p) {
  for (const auto& [name, t] : {std::pair{"cache.k", &p.cache.k},
                                {"cache.v", &p.cache.v},
                                {"cache.k_scale", &p.cache.k_scale},
                                {"cache.v_scale", &p.cache.v_scale}}) {
    int64_t last = 0, least = 0;
    for (int d = 1; d < t->rank; ++d) {
      last += (t->shape[d] - 1) * t->stride[d];
      least = std::min(least, t->stride[d]);
    }
    if (t->num_elements() > 0 && (last >> 32 != 0 || least < 0))
      return message(name, " is ", describe(*t), "; strides of a page must reach less than 2^32 elements, forwards");
  }
  return "";
}

/// A call over a cache, configured.
template <int kKilobytes>
struct DecodeCall {
  const DecodeKernel& kernel;
  const cuda::WorkPlaces work_places;

  explicit DecodeCall(const CachedProblem& p) : DecodeCall(p, *tile_of(p.head_dim, p.head_dim_v, kKilobytes)) {}

  static void explain(const CachedProblem& p, CachedExplanation& e) {
    const DecodeCall call(p);
    e.kernel = call.kernel.id;
    e.splits = cuda::shares_text(p, call.work_places);
    e.pages += ", gathered key by key";
  }
  static void run(const CachedProblem& p, std::byte* workspace) { DecodeCall(p).launch(p, workspace); }

 private:
  DecodeCall(const CachedProblem& p, const DecodeTile& tile)
      : kernel(kernel_of(p.dtype, tile, p.cache_dtype != p.dtype)), work_places(places_of(p.device, tile)) {}

  void launch(const CachedProblem& p, std::byte* workspace) const {
    const cuda::DeviceGuard guard(p.device.index);
    const auto stream = static_cast<cudaStream_t>(p.stream);
    const cuda::WorkPlan plan = cuda::plan_of(p, work_places, workspace);
    if (!p.plan) {
      cuda::LaunchChain chain(stream, cuda::LaunchChain::kOverlapPrevious);
      cuda::launch_work_plan(plan, p, chain);
    }
    const auto& [entry, threads, shared_bytes] = kernel.compiled;
    cuda::allow_shared_memory(entry, shared_bytes, p.device.index);
    // Begins a chain of its own: code for 8.0 does not wait inside for the kernel before it.
    cuda::LaunchChain chain(stream);
    const auto typed = reinterpret_cast<void (*)(cuda::CachedParams)>(const_cast<void*>(entry));
    const cuda::CachedParams params = cuda::cached_params(p, plan);
    chain.launch("launch of the decode kernel", typed, cuda::cached_ctas(p, work_places), threads, shared_bytes,
                 params);
    cuda::launch_forest_merge(params, p, work_places.head_dim_v, chain);
  }
};

}  // namespace

template <int kKilobytes>
PreparedCached prepare_cached(const CachedProblem& p) {
  using Call = DecodeCall<kKilobytes>;
  if (std::string why = cuda::cached_refusal(p); !why.empty()) return Refusal{std::move(why)};
  if (std::string why = page_refusal(p); !why.empty()) return Refusal{std::move(why)};
  if (!tile_of(p.head_dim, p.head_dim_v, kKilobytes))
    return cuda::head_dims_refusal(cuda::common_part(p), kDecodeTiles);
  const int64_t bytes = p.plan ? 0 : cuda::own_plan(p, Call(p).work_places).bytes();
  return CachedLaunch{bytes, Call::explain, Call::run};
}

template <int kKilobytes>
std::size_t cached_plan_bytes(const CachedCapacities& capacities, const Device& device) {
  return padded_workspace(planned_layout(capacities, device, kKilobytes).bytes());
}

template <int kKilobytes>
void build_cached_plan(const CachedProblem& p, const CachedPlan& plan) {
  cuda::build_plan(p, plan, planned_layout(plan.capacities, p.device, kKilobytes));
}

template PreparedCached prepare_cached<kSmallKilobytes>(const CachedProblem&);
template PreparedCached prepare_cached<kLargeKilobytes>(const CachedProblem&);
template std::size_t cached_plan_bytes<kSmallKilobytes>(const CachedCapacities&, const Device&);
template std::size_t cached_plan_bytes<kLargeKilobytes>(const CachedCapacities&, const Device&);
template void build_cached_plan<kSmallKilobytes>(const CachedProblem&, const CachedPlan&);
template void build_cached_plan<kLargeKilobytes>(const CachedProblem&, const CachedPlan&);

std::vector<KernelInfo> decode_kernels() {
  std::vector<KernelInfo> all;
  for (const DataType dtype : cuda::kDataTypes) {
    table_of(dtype).for_each([&](const DecodeKernel& kernel) {
      all.push_back(cuda::table_kernel_info(kernel, "decode", dtype, {cuda::kPackedRows, 64}));
    });
  }
  return all;
}

}  // namespace flashmask::sm80
