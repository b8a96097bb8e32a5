// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm80/forward/forward.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <span>
#include <utility>

#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device_call.h"
#include "backends/cuda/host/head_dims.h"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/sm80/common/shared_memory.h"
#include "backends/cuda/sm80/forward/instance.h"
#include "backends/cuda/sm80/forward/params.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask::sm80 {
namespace {

/// Keys and values of the heads of an L2 group should stay in this much of the L2 cache.
constexpr int64_t kL2GroupBytes = int64_t{16} << 20;
constexpr int64_t kMostWorkTiles = int64_t{1} << 30;

template <DataType dtype, std::size_t... row>
auto instances_of(std::index_sequence<row...>) {
  constexpr auto& tiles = kForwardTiles;
  return std::array{forward_instance<dtype, tiles[row].head_dim, tiles[row].head_dim_v, tiles[row].kilobytes>()...};
}

/// The instances of an element type of kDataTypes, a row of kForwardTiles each.
std::span<const ForwardInstance> instances(DataType dtype) {
  constexpr auto rows = std::make_index_sequence<std::size(kForwardTiles)>();
  static const auto bf16 = instances_of<DataType::kBFloat16>(rows), f16 = instances_of<DataType::kFloat16>(rows);
  return dtype == DataType::kBFloat16 ? bf16 : f16;
}

/// How much work of an instance a multiprocessor with `kilobytes` of shared memory has at a time: its warps, and the
/// CTAs that they belong to.
std::pair<int, int> resident(const ForwardInstance& i, int kilobytes) {
  constexpr int kRegisters = 64 * 1024, kRegistersOfThread = 256, kReservedBytes = 1024;
  const int ctas =
      std::min(kRegisters / (kRegistersOfThread * i.threads), kilobytes * 1024 / (i.shared_bytes + kReservedBytes));
  return {ctas * i.tile.warps, ctas};
}

/// Of the least tiles that hold the call's head dims and fit, the one of most warps that a multiprocessor holds, then
/// of most CTAs, then the largest; null if none holds them.
const ForwardInstance* choose_instance(const Problem& p, int kilobytes) {
  const ForwardTile* least = cuda::least_tile(kForwardTiles, p.head_dim, p.head_dim_v);
  if (!least) return nullptr;
  const auto [major, minor] = cuda::capability_of(p);
  const int shared = multiprocessor_kilobytes(major, minor);
  const ForwardInstance* chosen = nullptr;
  for (const ForwardInstance& i : instances(p.dtype)) {
    if (i.tile.head_dim != least->head_dim || i.tile.head_dim_v != least->head_dim_v) continue;
    if (i.tile.kilobytes > kilobytes) continue;
    const auto worth = [&](const ForwardInstance& of) { return std::pair(resident(of, shared), of.tile.kilobytes); };
    if (!chosen || worth(i) > worth(*chosen)) chosen = &i;
  }
  return chosen;
}

/// Tiles of a head: of 64 rows all that the plan's tiles of 128 have, in whose order they come, though the last one may
/// lie past the end.
int64_t tiles_of_head(const Problem& p, const ForwardTile& tile) {
  const int64_t rows_of_order = std::max(tile.rows, 128);
  return ceil_div(p.seqlen_q, rows_of_order) * (rows_of_order / tile.rows);
}

/// A forward pass, configured.
struct ForwardCall {
  const ForwardInstance* instance;
  int64_t work_tiles, ctas;

  ForwardCall(const Problem& p, const ForwardInstance& of)
      : instance(&of),
        work_tiles(p.batch * p.heads_q * tiles_of_head(p, of.tile)),
        ctas(p.max_ctas > 0 ? std::min<int64_t>(p.max_ctas, work_tiles) : work_tiles) {}

  static bool is_featured(const Problem& p) { return cuda::asks_for_features(p) || cuda::asks_for_light_features(p); }
  TileShape tile() const { return {instance->tile.rows, 128}; }
  int64_t workspace_bytes() const { return 0; }
  void explain(const Problem& p, Explanation& e) const {
    e.arch = kArch;
    e.instance = is_featured(p) ? instance->featured_id : instance->id;
    e.padding_share = cuda::padding_share(instance->tile, p.head_dim, p.head_dim_v);
    if (work_tiles > 0) e.kernels.push_back(e.instance);
  }
  void run(const Problem& p, std::byte* workspace, unsigned long long* executed) const;
};

FeaturedForwardParams make_params(const Problem& p, const ForwardCall& call, unsigned long long* executed) {
  const ForwardTile& tile = call.instance->tile;
  FeaturedForwardParams params{};
  params.q = cuda::tensor_rows(p.q);
  params.k = cuda::tensor_rows(p.k);
  params.v = cuda::tensor_rows(p.v);
  params.out = cuda::tensor_rows(p.out);
  params.float_out = p.features.partial_out;
  params.lse = static_cast<float*>(p.lse.data);
  params.lse_batch_stride = p.lse.stride[0];
  params.lse_head_stride = p.lse.stride[1];
  params.lse_row_stride = p.lse.stride[2];
  params.seqlen_q = static_cast<int32_t>(p.seqlen_q);
  params.seqlen_k = static_cast<int32_t>(p.seqlen_k);
  params.key_blocks = static_cast<int32_t>(ceil_div(p.seqlen_k, int64_t{128}));
  params.heads_q = static_cast<uint32_t>(p.heads_q);
  params.query_heads_per_kv_head = static_cast<uint32_t>(p.group_size());
  params.scale_log2 = cuda::scale_log2(p);
  params.score_of_bit = 1 / params.scale_log2;
  params.mask = cuda::mask_columns(p);
  params.dense = cuda::dense_mask(p);
  params.element_mask = cuda::element_mask(p);
  if (!params.dense.given) params.plan = cuda::row_plan_bits(p, tile.rows);
  params.extents = cuda::visible_extents(p);
  params.schedule = {.work_tiles = static_cast<uint32_t>(call.work_tiles),
                     .heads = static_cast<uint32_t>(p.batch * p.heads_q),
                     .heads_per_l2_group = static_cast<uint32_t>(cuda::heads_per_l2_group(p, kL2GroupBytes)),
                     .tiles = static_cast<uint32_t>(tiles_of_head(p, tile)),
                     .next = nullptr};
  params.executed = executed;
  params.features = cuda::feature_params(p);
  return params;
}

void ForwardCall::run(const Problem& p, std::byte*, unsigned long long* executed) const {
  const FeaturedForwardParams params = make_params(p, *this, executed);
  cuda::LaunchChain chain(cuda::stream_of(p));
  const auto launch = [&](auto kernel, const auto& arguments) {
    cuda::allow_shared_memory(reinterpret_cast<const void*>(kernel), instance->shared_bytes, p.device.index);
    chain.launch("launch of the forward kernel", kernel, ctas, instance->threads, instance->shared_bytes, arguments);
  };
  if (is_featured(p)) {
    launch(instance->featured, params);
  } else {
    launch(instance->kernel, static_cast<const ForwardParams&>(params));
  }
}

}  // namespace

Prepared prepare_forward(const Problem& p, int kilobytes) {
  const ForwardInstance* instance = choose_instance(p, kilobytes);
  if (!instance) return cuda::head_dims_refusal(p, kForwardTiles);
  if (std::string why = cuda::lengths_refusal(p); !why.empty()) return Refusal{std::move(why)};
  const ForwardCall call(p, *instance);
  if (p.batch * p.heads_q > kMostWorkTiles || call.work_tiles > kMostWorkTiles)
    return Refusal{message("batch * heads_q * seqlen_q / ", instance->tile.rows, " is ", call.work_tiles,
                           "; it must be at most ", kMostWorkTiles)};
  return Launch(p, cuda::DeviceCall<ForwardCall>{call});
}

std::vector<KernelInfo> forward_kernels() {
  std::vector<KernelInfo> all;
  for (const DataType dtype : cuda::kDataTypes) {
    for (const ForwardInstance& i : instances(dtype)) {
      for (const char* id : {i.id, i.featured_id}) {
        all.push_back(cuda::named({.id = id,
                                   .op = "fwd",
                                   .dtype = dtype,
                                   .head_dim = i.tile.head_dim,
                                   .head_dim_v = i.tile.head_dim_v,
                                   .tile = {i.tile.rows, 128},
                                   .threads = i.threads,
                                   .shared_bytes = i.shared_bytes}));
      }
    }
  }
  return all;
}

}  // namespace flashmask::sm80
