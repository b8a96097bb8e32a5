// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm80/forward/forward.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device_call.h"
#include "backends/cuda/host/head_dims.h"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/kernel_table.h"
#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/sm80/common/shared_memory.h"
#include "backends/cuda/sm80/forward/instance.h"
#include "backends/cuda/sm80/forward/params.h"
#include "call/sink_and_dropout.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask::sm80 {
namespace {

/// Keys and values of the heads of an L2 group should stay in this much of the L2 cache.
constexpr int64_t kL2GroupBytes = int64_t{16} << 20;

using ForwardTable = cuda::KernelTable<kForwardTiles, kForwardVariants>;
using ForwardKernel = ForwardTable::Kernel;

std::string id_of(DataType dtype, const ForwardTile& tile) {
  return cuda::tile_kernel_id(kArch, "fwd", dtype, tile.head_dim, tile.head_dim_v, 'k', tile.kilobytes);
}

/// The kernels of an element type of kDataTypes.
const ForwardTable& table_of(DataType dtype) {
  return ForwardTable::of(dtype, id_of, []<DataType type, ForwardTile tile, int variant>() {
    return forward_kernel<type, tile.head_dim, tile.head_dim_v, tile.kilobytes, variant>();
  });
}

/// How much work of a kernel a multiprocessor with `kilobytes` of shared memory has at a time: its warps, and the
/// CTAs that they belong to.
std::pair<int, int> resident(const ForwardKernel& kernel, int kilobytes) {
  constexpr int kRegisters = 64 * 1024, kRegistersOfThread = 256, kReservedBytes = 1024;
  const int ctas = std::min(kRegisters / (kRegistersOfThread * kernel.compiled.threads),
                            kilobytes * 1024 / (kernel.compiled.shared_bytes + kReservedBytes));
  return {ctas * kernel.tile->warps, ctas};
}

/// The variant that the call asks for; rows in fp32 are a branch of every kernel.
cuda::Variant asked_variant(const Problem& p) {
  cuda::Variant asked = cuda::asked_variant(p);
  asked.partial = false;
  return asked;
}

/// Picks the kernel: the least tiles that hold the head dims and fit; among them the one of most warps that a
/// multiprocessor holds, then of most CTAs, then the largest. Null if there is none.
const ForwardKernel* choose_kernel(const Problem& p, int kilobytes) {
  const ForwardTile* least = cuda::least_tile(kForwardTiles, p.head_dim, p.head_dim_v);
  if (!least) return nullptr;
  const auto [major, minor] = cuda::capability_of(p);
  const int shared = multiprocessor_kilobytes(major, minor);
  const cuda::Variant asked = asked_variant(p);
  const ForwardKernel* chosen = nullptr;
  for (const ForwardTile& tile : kForwardTiles) {
    if (tile.head_dim != least->head_dim || tile.head_dim_v != least->head_dim_v) continue;
    if (tile.kilobytes > kilobytes) continue;
    const ForwardKernel* kernel = table_of(p.dtype).find(tile, asked);
    const auto worth = [&](const ForwardKernel& of) { return std::pair(resident(of, shared), of.tile->kilobytes); };
    if (kernel && (!chosen || worth(*kernel) > worth(*chosen))) chosen = kernel;
  }
  return chosen;
}

/// Tiles of a head: of 64 rows all that the plan's tiles of 128 have, in whose order they come, though the last one may
/// lie past the end.
int64_t head_tiles(const Problem& p, const ForwardTile& tile) {
  const int64_t rows_of_order = std::max(tile.rows, 128);
  return ceil_div(p.seqlen_q, rows_of_order) * (rows_of_order / tile.rows);
}

/// A forward pass, configured.
struct ForwardCall {
  const ForwardKernel* kernel;
  int64_t work_tiles, ctas;

  ForwardCall(const Problem& p, const ForwardKernel& of)
      : kernel(&of),
        work_tiles(p.batch * p.heads_q * head_tiles(p, *of.tile)),
        ctas(p.max_ctas > 0 ? std::min<int64_t>(p.max_ctas, work_tiles) : work_tiles) {}

  TileShape tile() const { return {kernel->tile->rows, 128}; }
  int64_t workspace_bytes() const { return 0; }
  void explain(const Problem& p, Explanation& e) const {
    e.arch = kArch;
    e.instance = kernel->id;
    e.padding_share = cuda::padding_share(*kernel->tile, p.head_dim, p.head_dim_v);
    if (work_tiles > 0) e.kernels.push_back(e.instance);
  }
  void run(const Problem& p, std::byte* workspace, unsigned long long* executed) const;
};

FeaturedForwardParams make_params(const Problem& p, const ForwardCall& call, unsigned long long* executed) {
  const ForwardTile& tile = *call.kernel->tile;
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
  params.bits = cuda::bit_tiles(p);
  params.element_mask = cuda::element_mask(p);
  params.plan = cuda::row_plan_bits(p, tile.rows);
  params.extents = cuda::visible_extents(p);
  params.schedule = {.work_tiles = static_cast<uint32_t>(call.work_tiles),
                     .heads = static_cast<uint32_t>(p.batch * p.heads_q),
                     .heads_per_l2_group = static_cast<uint32_t>(cuda::heads_per_l2_group(p, kL2GroupBytes)),
                     .tiles = static_cast<uint32_t>(head_tiles(p, tile)),
                     .next = nullptr};
  params.executed = executed;
  params.features = cuda::feature_params(p);
  params.scores = cuda::score_params(p);
  params.origins = origins_of(p.features.dropout);
  return params;
}

void ForwardCall::run(const Problem& p, std::byte*, unsigned long long* executed) const {
  const FeaturedForwardParams params = make_params(p, *this, executed);
  const auto& [entry, threads, shared_bytes] = kernel->compiled;
  cuda::allow_shared_memory(entry, shared_bytes, p.device.index);
  const auto launch = [&, threads = threads, shared_bytes = shared_bytes]<typename Params>(const void* of,
                                                                                           const Params& arguments) {
    const auto typed = reinterpret_cast<void (*)(Params)>(const_cast<void*>(of));
    cuda::LaunchChain(cuda::stream_of(p))
        .launch("launch of the forward kernel", typed, ctas, threads, shared_bytes, arguments);
  };
  if (kernel->row->variant.has_features()) {
    launch(entry, params);
  } else {
    launch(entry, static_cast<const ForwardParams&>(params));
  }
}

}  // namespace

Prepared prepare_forward(const Problem& p, int kilobytes) {
  const ForwardKernel* kernel = choose_kernel(p, kilobytes);
  if (!kernel) return cuda::head_dims_refusal(p, kForwardTiles);
  if (std::string why = cuda::lengths_refusal(p); !why.empty()) return Refusal{std::move(why)};
  const ForwardCall call(p, *kernel);
  if (p.batch * p.heads_q > cuda::kMostWorkTiles || call.work_tiles > cuda::kMostWorkTiles)
    return Refusal{message("batch * heads_q * seqlen_q / ", kernel->tile->rows, " is ", call.work_tiles,
                           "; it must be at most ", cuda::kMostWorkTiles)};
  return Launch(p, cuda::DeviceCall<ForwardCall>{call});
}

std::vector<KernelInfo> forward_kernels() {
  std::vector<KernelInfo> all;
  for (const DataType dtype : cuda::kDataTypes) {
    table_of(dtype).for_each([&](const ForwardKernel& kernel) {
      all.push_back(cuda::table_kernel_info(kernel, "fwd", dtype, {kernel.tile->rows, 128}));
    });
  }
  return all;
}

}  // namespace flashmask::sm80
