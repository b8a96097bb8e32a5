// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/forward/forward.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device_call.h"
#include "backends/cuda/host/error.h"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/kernel_table.h"
#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/sm90/common/column_blocks.h"
#include "backends/cuda/sm90/common/tensor_map.h"
#include "backends/cuda/sm90/forward/instance.h"
#include "backends/cuda/sm90/forward/params.h"
#include "backends/cuda/sm90/tile_config.h"
#include "call/sink_and_dropout.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask::sm90 {
namespace {

/// Keys and values of the heads of an L2 group should stay in this much of the L2 cache.
constexpr int64_t kL2GroupBytes = int64_t{32} << 20;

using ForwardTable = cuda::KernelTable<kForwardTiles, kForwardVariants>;
using ForwardKernel = ForwardTable::Kernel;

std::string id_of(DataType dtype, const ForwardTile& tile) {
  return cuda::tile_kernel_id(kArch, "fwd", dtype, tile.head_dim, tile.head_dim_v, 'c', tile.consumers);
}

/// The kernels of an element type of kDataTypes.
const ForwardTable& table_of(DataType dtype) {
  return ForwardTable::of(dtype, id_of, []<DataType type, ForwardTile tile, int variant>() {
    return forward_kernel<type, tile.head_dim, tile.head_dim_v, tile.consumers, variant>();
  });
}

int64_t count_work_tiles(const Problem& p, int consumers) {
  return p.batch * p.heads_q * ceil_div(p.seqlen_q, 64 * consumers);
}

static_assert(std::ranges::is_sorted(kForwardTiles, {}, [](const ForwardTile& tile) {
  return std::tuple(tile.head_dim, tile.head_dim_v, tile.consumers);
}));

/// Predicate: does a tile have a kernel that takes the call?
auto takes(const Problem& p) {
  return [&table = table_of(p.dtype), asked = cuda::asked_variant(p)](const ForwardTile& tile) {
    return table.find(tile, asked) != nullptr;
  };
}

/// Picks the kernel: the smallest tile that holds the head dims; among them the tallest that still makes enough work
/// tiles to fill the device twice, else the shortest. Null if there is none.
const ForwardKernel* choose_kernel(const Problem& p) {
  const ForwardTile* least = least_tile(kForwardTiles, p.head_dim, p.head_dim_v, takes(p));
  if (!least) return nullptr;
  const cuda::Variant asked = cuda::asked_variant(p);
  const ForwardKernel* chosen = nullptr;
  for (const ForwardTile* tile = least; tile != std::end(kForwardTiles); ++tile) {
    if (tile->head_dim != least->head_dim || tile->head_dim_v != least->head_dim_v) break;
    const ForwardKernel* kernel = table_of(p.dtype).find(*tile, asked);
    if (!kernel) continue;
    if (!chosen || count_work_tiles(p, tile->consumers) >= 2 * cuda::multiprocessors(p)) chosen = kernel;
  }
  return chosen;
}

/// A forward pass, configured.
struct ForwardCall {
  const ForwardKernel* kernel;
  int64_t work_tiles, ctas;

  ForwardCall(const Problem& p, const ForwardKernel& of)
      : kernel(&of),
        work_tiles(count_work_tiles(p, of.tile->consumers)),
        ctas(std::min(work_tiles, cuda::most_ctas(p))) {}

  TileShape tile() const { return {kernel->tile->rows(), kernel->tile->keys}; }
  /// Holds the counter of work tiles; a call with a CTA for each needs none.
  int64_t workspace_bytes() const { return work_tiles > ctas ? 16 : 0; }
  void explain(const Problem& p, Explanation& e) const {
    e.arch = kArch;
    e.instance = kernel->id;
    e.padding_share = padding_share(*kernel->tile, p.head_dim, p.head_dim_v);
    if (work_tiles > 0) e.kernels.push_back(e.instance);
  }
  void run(const Problem& p, std::byte* workspace, unsigned long long* executed) const;
};

void set_mask(const Problem& p, const ForwardTile& tile, ForwardParams& params) {
  params.mask = cuda::mask_columns(p);
  params.dense = cuda::dense_mask(p);
  params.extents = cuda::visible_extents(p);
  params.bits = cuda::bit_tiles(p);
  params.element_mask = cuda::element_mask(p);
  params.plan = cuda::row_plan_bits(p, tile.rows());
}

ScoredForwardParams make_params(const Problem& p, const ForwardCall& call, uint32_t* counter,
                                unsigned long long* executed) {
  const ForwardTile& tile = *call.kernel->tile;
  const int rows = tile.rows(), qk_blocks = tile.one_copy ? tile.head_dim / 64 : 1,
            v_blocks = tile.one_copy ? tile.head_dim_v / 64 : 1;
  const ColumnBlocks of_qk = dim_blocks(tile, p.head_dim, tile.head_dim),
                     of_v = dim_blocks(tile, p.head_dim_v, tile.head_dim_v);
  ScoredForwardParams params{};
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
  params.scores = cuda::score_params(p);
  params.origins = origins_of(p.features.dropout);
  set_mask(p, tile, params);
  params.schedule.work_tiles = static_cast<uint32_t>(call.work_tiles);
  params.schedule.heads = static_cast<uint32_t>(p.batch * p.heads_q);
  params.schedule.heads_per_l2_group = static_cast<uint32_t>(cuda::heads_per_l2_group(p, kL2GroupBytes));
  params.schedule.tiles = static_cast<uint32_t>(ceil_div(p.seqlen_q, rows));
  params.arrivals = cuda::arrival_params(p);
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
  ScoredForwardParams params = make_params(p, *this, counter, executed);
  const auto& [entry, threads, shared_bytes] = kernel->compiled;
  cuda::allow_shared_memory(entry, shared_bytes, p.device.index);
  void* arguments[] = {&params};
  cuda::LaunchChain(stream, cuda::LaunchChain::kOverlapPrevious)
      .launch("launch of the forward kernel", entry, ctas, threads, shared_bytes, arguments);
}

}  // namespace

Prepared prepare_forward(const Problem& p) {
  const ForwardKernel* kernel = choose_kernel(p);
  if (!kernel) return head_dims_refusal(p, kForwardTiles, takes(p));
  if (std::string why = cuda::lengths_refusal(p); !why.empty()) return Refusal{std::move(why)};
  if (p.batch * p.heads_q > cuda::kMostWorkTiles || count_work_tiles(p, 2) > cuda::kMostWorkTiles)
    return Refusal{message("batch * heads_q * seqlen_q / 128 is ", count_work_tiles(p, 2), "; it must be at most ",
                           cuda::kMostWorkTiles)};
  return Launch(p, cuda::DeviceCall<ForwardCall>{ForwardCall(p, *kernel)});
}

std::vector<KernelInfo> forward_kernels() {
  std::vector<KernelInfo> all;
  for (const DataType dtype : cuda::kDataTypes) {
    table_of(dtype).for_each([&](const ForwardKernel& kernel) {
      all.push_back(cuda::table_kernel_info(kernel, "fwd", dtype, {kernel.tile->rows(), kernel.tile->keys}));
    });
  }
  return all;
}

}  // namespace flashmask::sm90
