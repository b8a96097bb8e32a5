// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/forward/forward.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <span>
#include <tuple>
#include <utility>

#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device_call.h"
#include "backends/cuda/host/error.h"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/sm90/common/column_blocks.h"
#include "backends/cuda/sm90/common/tensor_map.h"
#include "backends/cuda/sm90/forward/instance.h"
#include "backends/cuda/sm90/forward/params.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask::sm90 {
namespace {

/// Keys and values of the heads of an L2 group should stay in this much of the L2 cache.
constexpr int64_t kL2GroupBytes = int64_t{32} << 20;
constexpr int64_t kMostWorkTiles = int64_t{1} << 30;

enum class Variant { kPlain, kFeatured, kPartial };

template <Variant variant, DataType dtype, int head_dim, int head_dim_v, int consumers>
ForwardInstance instance_of() {
  if constexpr (variant == Variant::kPartial) {
    return partial_forward_instance<dtype, head_dim, head_dim_v, consumers>();
  } else {
    return forward_instance<dtype, head_dim, head_dim_v, consumers, variant == Variant::kFeatured>();
  }
}

template <Variant variant, DataType dtype, std::size_t... row>
auto instances_of(std::index_sequence<row...>) {
  constexpr auto& tiles = kForwardTiles;
  return std::array{instance_of<variant, dtype, tiles[row].head_dim, tiles[row].head_dim_v, tiles[row].consumers>()...};
}

template <Variant variant>
std::span<const ForwardInstance> instances_of(DataType dtype) {
  constexpr auto rows = std::make_index_sequence<std::size(kForwardTiles)>();
  static const auto bf16 = instances_of<variant, DataType::kBFloat16>(rows),
                    f16 = instances_of<variant, DataType::kFloat16>(rows);
  return dtype == DataType::kBFloat16 ? bf16 : f16;
}

/// The instances of an element type of kDataTypes, a row of kForwardTiles each.
std::span<const ForwardInstance> instances(DataType dtype, Variant variant) {
  if (variant == Variant::kPartial) return instances_of<Variant::kPartial>(dtype);
  return variant == Variant::kFeatured ? instances_of<Variant::kFeatured>(dtype) : instances_of<Variant::kPlain>(dtype);
}

Variant variant_of(const Problem& p) {
  if (p.features.partial_out) return Variant::kPartial;
  return cuda::asks_for_features(p) ? Variant::kFeatured : Variant::kPlain;
}

int64_t count_work_tiles(const Problem& p, int consumers) {
  return p.batch * p.heads_q * ceil_div(p.seqlen_q, 64 * consumers);
}

static_assert(std::ranges::is_sorted(kForwardTiles, {}, [](const ForwardTile& tile) {
  return std::tuple(tile.head_dim, tile.head_dim_v, tile.consumers);
}));

/// Of the smallest tiles that hold the call's head dims and take its dropout, the tallest that makes enough work tiles
/// to fill the device twice, otherwise the shortest; null if there is none.
const ForwardInstance* choose_instance(const Problem& p) {
  const ForwardTile* least = least_tile(kForwardTiles, p.head_dim, p.head_dim_v);
  if (!least) return nullptr;
  const ForwardInstance* chosen = nullptr;
  for (const ForwardInstance& i : instances(p.dtype, variant_of(p))) {
    if (i.tile.head_dim != least->head_dim || i.tile.head_dim_v != least->head_dim_v) continue;
    if (p.features.dropout.p != 0 && !i.tile.drops()) continue;
    if (!chosen || count_work_tiles(p, i.tile.consumers) >= 2 * cuda::multiprocessors(p)) chosen = &i;
  }
  return chosen;
}

std::string id_of_light(const ForwardInstance& i) { return message(i.id, ".light"); }

/// A forward pass, configured.
struct ForwardCall {
  const ForwardInstance* instance;
  int64_t work_tiles, ctas;

  ForwardCall(const Problem& p, const ForwardInstance& of)
      : instance(&of),
        work_tiles(count_work_tiles(p, of.tile.consumers)),
        ctas(std::min(work_tiles, cuda::most_ctas(p))) {}

  bool is_light(const Problem& p) const { return instance->light && cuda::asks_for_light_features(p); }
  TileShape tile() const { return {instance->tile.rows(), instance->tile.keys}; }
  /// Holds the counter of work tiles; a call with a CTA for each needs none.
  int64_t workspace_bytes() const { return work_tiles > ctas ? 16 : 0; }
  void explain(const Problem& p, Explanation& e) const {
    e.arch = kArch;
    e.instance = is_light(p) ? id_of_light(*instance) : instance->id;
    e.padding_share = padding_share(instance->tile, p.head_dim, p.head_dim_v);
    if (work_tiles > 0) e.kernels.push_back(e.instance);
  }
  void run(const Problem& p, std::byte* workspace, unsigned long long* executed) const;
};

void set_mask(const Problem& p, const ForwardInstance& instance, ForwardParams& params) {
  params.mask = cuda::mask_columns(p);
  params.dense = cuda::dense_mask(p);
  params.element_mask = cuda::element_mask(p);
  if (!params.dense.given) params.plan = cuda::row_plan_bits(p, instance.tile.rows());
}

PartialForwardParams make_params(const Problem& p, const ForwardCall& call, uint32_t* counter,
                                 unsigned long long* executed) {
  const ForwardTile& tile = call.instance->tile;
  const int rows = tile.rows(), qk_blocks = tile.one_copy ? tile.head_dim / 64 : 1,
            v_blocks = tile.one_copy ? tile.head_dim_v / 64 : 1;
  const ColumnBlocks of_qk = blocks_of_rows(tile, p.head_dim, tile.head_dim),
                     of_v = blocks_of_rows(tile, p.head_dim_v, tile.head_dim_v);
  PartialForwardParams params{};
  params.q = tensor_map(p.q, of_qk, rows, qk_blocks, "q");
  // Without keys nothing is loaded, but the maps have to be valid.
  params.k = tensor_map(p.seqlen_k > 0 ? p.k : p.q, of_qk, tile.keys, qk_blocks, "k");
  params.v = p.seqlen_k > 0 ? tensor_map(p.v, of_v, tile.keys / tile.v_parts, v_blocks, "v") : params.k;
  params.out = p.features.partial_out ? params.q : tensor_map(p.out, of_v, 16, 1, "out");
  params.out_columns = columns_of(tile, p.head_dim_v, tile.head_dim_v);
  params.out_rows = cuda::tensor_rows(p.out);
  params.lse = static_cast<float*>(p.lse.data);
  params.lse_batch_stride = p.lse.stride[0];
  params.lse_head_stride = p.lse.stride[1];
  params.lse_row_stride = p.lse.stride[2];
  params.seqlen_q = static_cast<int32_t>(p.seqlen_q);
  params.seqlen_k = static_cast<int32_t>(p.seqlen_k);
  params.heads_q = static_cast<uint32_t>(p.heads_q);
  params.query_heads_per_kv_head = static_cast<uint32_t>(p.group_size());
  params.key_blocks = static_cast<int32_t>(ceil_div(p.seqlen_k, tile.keys));
  params.scale_log2 = cuda::scale_log2(p);
  params.score_of_bit = 1 / params.scale_log2;
  params.features = cuda::feature_params(p);
  set_mask(p, *call.instance, params);
  params.schedule.work_tiles = static_cast<uint32_t>(call.work_tiles);
  params.schedule.heads = static_cast<uint32_t>(p.batch * p.heads_q);
  params.schedule.heads_per_l2_group = static_cast<uint32_t>(cuda::heads_per_l2_group(p, kL2GroupBytes));
  params.schedule.tiles = static_cast<uint32_t>(ceil_div(p.seqlen_q, rows));
  params.schedule.next = counter;
  params.executed = executed;
  return params;
}

void ForwardCall::run(const Problem& p, std::byte* workspace, unsigned long long* executed) const {
  const cudaStream_t stream = cuda::stream_of(p);
  uint32_t* counter = nullptr;
  if (work_tiles > ctas) {
    counter = reinterpret_cast<uint32_t*>(workspace);
    cuda::check(cudaMemsetAsync(counter, 0, sizeof(*counter), stream), "cudaMemsetAsync of the work tile counter");
  }
  // Kernels without partial results, or without features, read the first part of it.
  PartialForwardParams params = make_params(p, *this, counter, executed);
  const void* kernel = is_light(p) ? instance->light : instance->kernel;
  cuda::allow_shared_memory(kernel, instance->shared_bytes, p.device.index);
  void* arguments[] = {&params};
  cuda::LaunchChain(stream, cuda::LaunchChain::kOverlapPrevious)
      .launch("launch of the forward kernel", kernel, ctas, instance->threads, instance->shared_bytes, arguments);
}

}  // namespace

Prepared prepare_forward(const Problem& p) {
  const ForwardInstance* instance = choose_instance(p);
  if (!instance) return head_dims_refusal(p, kForwardTiles);
  if (std::string why = cuda::lengths_refusal(p); !why.empty()) return Refusal{std::move(why)};
  if (p.batch * p.heads_q > kMostWorkTiles || count_work_tiles(p, 2) > kMostWorkTiles)
    return Refusal{message("batch * heads_q * seqlen_q / 128 is ", count_work_tiles(p, 2), "; it must be at most ",
                           kMostWorkTiles)};
  return Launch(p, cuda::DeviceCall<ForwardCall>{ForwardCall(p, *instance)});
}

std::vector<KernelInfo> forward_kernels() {
  std::vector<KernelInfo> all;
  for (const DataType dtype : cuda::kDataTypes) {
    for (const Variant variant : {Variant::kPlain, Variant::kFeatured, Variant::kPartial}) {
      for (const ForwardInstance& i : instances(dtype, variant)) {
        for (const std::string& id : {std::string(i.id), id_of_light(i)}) {
          if (id != i.id && !i.light) continue;
          all.push_back(cuda::named({.id = id,
                                     .op = "fwd",
                                     .dtype = dtype,
                                     .head_dim = i.tile.head_dim,
                                     .head_dim_v = i.tile.head_dim_v,
                                     .tile = {i.tile.rows(), i.tile.keys},
                                     .threads = i.threads,
                                     .shared_bytes = i.shared_bytes}));
        }
      }
    }
  }
  return all;
}

}  // namespace flashmask::sm90
