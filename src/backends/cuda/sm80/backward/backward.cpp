// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm80/backward/backward.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "backends/cuda/host/backward_tiles.h"
#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device_call.h"
#include "backends/cuda/host/dq_magnitudes.h"
#include "backends/cuda/host/error.h"
#include "backends/cuda/host/head_dims.h"
#include "backends/cuda/host/head_groups.h"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/kernel_table.h"
#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/masks/dense_extents.h"
#include "backends/cuda/sm80/backward/instance.h"
#include "backends/cuda/sm80/backward/params.h"
#include "call/sink_and_dropout.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask::sm80 {
namespace bwd {
namespace {

using BackwardTable = cuda::KernelTable<kBackwardTiles, kBackwardVariants>;
using BackwardKernel = BackwardTable::Kernel;

std::string id_of(DataType dtype, const BackwardTile& tile) {
  return cuda::tile_kernel_id(kArch, "bwd", dtype, tile.head_dim, tile.head_dim_v, 'k', tile.kilobytes);
}

/// The kernels over key tiles of an element type of kDataTypes.
const BackwardTable& table_of(DataType dtype) {
  return BackwardTable::of(dtype, id_of, []<DataType type, BackwardTile tile, int variant>() {
    return backward_kernel<type, tile.head_dim, tile.head_dim_v, tile.kilobytes, variant>();
  });
}

template <DataType dtype, std::size_t... row>
std::array<RowKernels, sizeof...(row)> make_row_kernels(std::index_sequence<row...>) {
  constexpr auto& tiles = kBackwardTiles;
  return {row_kernels<dtype, tiles[row].head_dim, tiles[row].head_dim_v, tiles[row].kilobytes>()...};
}
const RowKernels& row_kernels_of(DataType dtype, const BackwardTile& tile) {
  constexpr auto rows = std::make_index_sequence<std::size(kBackwardTiles)>();
  static const auto bf16 = make_row_kernels<DataType::kBFloat16>(rows),
                    f16 = make_row_kernels<DataType::kFloat16>(rows);
  return (dtype == DataType::kBFloat16 ? bf16 : f16)[static_cast<std::size_t>(&tile - kBackwardTiles)];
}
std::string preprocess_id(DataType dtype, const BackwardTile& tile) {
  return message(id_of(dtype, tile), ".preprocess");
}
std::string convert_dq_id(DataType dtype, const BackwardTile& tile) {
  return message(id_of(dtype, tile), ".convert_dq");
}

/// The variant that the call asks for over key tiles. Every kernel reads positions, sums dq up in either way and leaves
/// fp32 if asked to; a sink's weight is in lse.
cuda::Variant asked_variant(const Problem& p) {
  const cuda::Variant asked = cuda::asked_variant(p);
  return {.scores = asked.scores, .dropout = asked.dropout};
}

/// Selects the tiles that have a kernel for the call.
auto takes(const Problem& p) {
  return [&table = table_of(p.dtype), asked = asked_variant(p)](const BackwardTile& tile) {
    return table.find(tile, asked) != nullptr;
  };
}

/// Picks the kernel: the least tiles that hold the head dims, and the largest of them that fits; null if there is none.
const BackwardKernel* choose_kernel(const Problem& p, int kilobytes) {
  const BackwardTile* least = cuda::least_tile(kBackwardTiles, p.head_dim, p.head_dim_v, takes(p));
  if (!least) return nullptr;
  const cuda::Variant asked = asked_variant(p);
  const BackwardKernel* chosen = nullptr;
  for (const BackwardTile& tile : kBackwardTiles) {
    if (tile.head_dim != least->head_dim || tile.head_dim_v != least->head_dim_v) continue;
    if (tile.kilobytes > kilobytes || (chosen && tile.kilobytes <= chosen->tile->kilobytes)) continue;
    if (const BackwardKernel* kernel = table_of(p.dtype).find(tile, asked)) chosen = kernel;
  }
  return chosen;
}

/// Offsets of all parts of the workspace.
struct Layout {
  int64_t terms = 0, sums = 0, has_sums = 0, next = 0, extents = 0, magnitudes = 0, scales = 0, dk_parts = 0,
          dv_parts = 0, bytes = 0;

  Layout(const Problem& p, const BackwardTile& tile, const cuda::BackwardTiles& tiles, int64_t splits,
         int64_t magnitude_blocks) {
    const int64_t rows = tiles.all_rows * tile.rows;
    terms = add(rows * static_cast<int64_t>(sizeof(RowTerms)));
    sums = add(rows * tile.head_dim * static_cast<int64_t>(sizeof(float)));
    has_sums = add(tiles.all_rows * static_cast<int64_t>(sizeof(uint32_t)));
    next = add(static_cast<int64_t>(sizeof(uint32_t)));
    if (!cuda::needs_plan(p)) extents = add(p.batch * static_cast<int64_t>(sizeof(VisibleExtent)));
    if (magnitude_blocks > 0) {
      magnitudes = add(magnitude_blocks * static_cast<int64_t>(sizeof(cuda::KeyMagnitudes)));
      scales = add(rows * static_cast<int64_t>(sizeof(float)));
    }
    if (splits == 1) return;
    const int64_t keys = p.batch * p.heads_kv * splits * p.seqlen_k;
    dk_parts = add(keys * p.head_dim * static_cast<int64_t>(sizeof(float)));
    dv_parts = add(keys * p.head_dim_v * static_cast<int64_t>(sizeof(float)));
  }

 private:
  int64_t add(int64_t size) {
    const int64_t at = bytes;
    bytes += round_up(size, kWorkspaceAlignment);
    return at;
  }
};

/// A backward, configured.
struct BackwardCall {
  const BackwardKernel* kernel;
  cuda::BackwardTiles tiles;
  int64_t splits, work_tiles, ctas;
  int64_t magnitude_blocks;  ///< above 0: dq is a sum of integers
  Layout layout;

  BackwardCall(const Problem& p, const BackwardKernel& of)
      : kernel(&of),
        tiles(p, of.tile->rows, of.tile->keys),
        splits(cuda::count_splits(p, tiles.all_keys)),
        work_tiles(tiles.all_keys * splits),
        ctas(std::min(work_tiles, cuda::most_ctas(p))),
        magnitude_blocks(cuda::magnitude_blocks(p)),
        layout(p, *of.tile, tiles, splits, magnitude_blocks) {}

  /// Work tiles leave parts of dk and dv, which are added up last.
  bool has_key_parts() const { return work_tiles > 0 && splits > 1; }

  TileShape tile() const { return {kernel->tile->plan_rows(), kGranuleKeys}; }
  int64_t workspace_bytes() const { return layout.bytes; }
  void explain(const Problem& p, Explanation& e) const;
  void run(const Problem& p, std::byte* workspace, unsigned long long* executed) const;
};

template <typename T>
T* at(std::byte* workspace, int64_t offset) {
  return reinterpret_cast<T*>(workspace + offset);
}

/// Magnitudes of the keys in the workspace; null where dq's sums are floats.
cuda::KeyMagnitudes* key_magnitudes(const BackwardCall& call, std::byte* workspace) {
  return call.magnitude_blocks > 0 ? at<cuda::KeyMagnitudes>(workspace, call.layout.magnitudes) : nullptr;
}

/// Rows of lse or dlse, [batch, heads, rows].
cuda::TensorRows vector_rows(const TensorView& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2], 1}; }

/// The plan's extents, or the ones that find_dense_extents writes.
cuda::VisibleExtents visible_extents(const Problem& p, const BackwardCall& call, std::byte* workspace) {
  if (cuda::needs_plan(p)) return cuda::visible_extents(p);
  return {at<VisibleExtent>(workspace, call.layout.extents), 1};
}

DqSums dq_sums(const BackwardCall& call, std::byte* workspace) {
  return {.sums = at<float>(workspace, call.layout.sums),
          .has_sums = at<uint32_t>(workspace, call.layout.has_sums),
          .scales = at<float>(workspace, call.layout.scales),
          .fixed_point = call.magnitude_blocks > 0};
}

RowParams make_row_params(const Problem& p, const BackwardCall& call, std::byte* workspace) {
  return {.out = cuda::tensor_rows(p.out),
          .dout = cuda::tensor_rows(p.dout),
          .lse = vector_rows(p.lse),
          .dlse = p.dlse.defined() ? vector_rows(p.dlse) : cuda::TensorRows{},
          .dq = cuda::tensor_rows(p.dq),
          .float_rows = p.dq.dtype == DataType::kFloat32,
          .terms = at<RowTerms>(workspace, call.layout.terms),
          .dq_sums = dq_sums(call, workspace),
          .scales = cuda::row_scale_params(p, key_magnitudes(call, workspace)),
          .plan = cuda::key_plan_bits(p),
          .extents = visible_extents(p, call, workspace),
          .dense = !cuda::needs_plan(p),
          .next = at<uint32_t>(workspace, call.layout.next),
          .seqlen_q = static_cast<int32_t>(p.seqlen_q),
          .row_tiles = static_cast<uint32_t>(call.tiles.rows),
          .key_blocks = static_cast<uint32_t>(call.tiles.key_blocks),
          .heads = static_cast<uint32_t>(p.heads_q),
          .scale = p.scale()};
}

/// Parts of dk or dv in the workspace, [batch, head groups, seqlen_k, columns].
cuda::TensorRows parts_of(const Problem& p, const BackwardCall& call, float* first, int64_t columns) {
  const int64_t of_head = p.seqlen_k * columns;
  return {first, p.heads_kv * call.splits * of_head, of_head, columns, static_cast<int32_t>(columns)};
}

KeyParams make_key_params(const Problem& p, const BackwardCall& call, std::byte* workspace) {
  return {.dk = cuda::tensor_rows(p.dk),
          .dv = cuda::tensor_rows(p.dv),
          .float_keys = p.features.partial_out,
          .dk_parts = parts_of(p, call, at<float>(workspace, call.layout.dk_parts), p.head_dim),
          .dv_parts = parts_of(p, call, at<float>(workspace, call.layout.dv_parts), p.head_dim_v),
          .heads_kv = static_cast<uint32_t>(p.heads_kv),
          .splits = static_cast<uint32_t>(call.splits),
          .seqlen_k = static_cast<int32_t>(p.seqlen_k)};
}

SinkGradientParams make_sink_params(const Problem& p, const BackwardCall& call, std::byte* workspace) {
  return {.sink = cuda::feature_params(p).sink,
          .dsink = p.dsink.data,
          .dsink_stride = p.dsink.stride[0],
          .lse = vector_rows(p.lse),
          .terms = at<RowTerms>(workspace, call.layout.terms),
          .rows_of_head = call.tiles.rows * call.kernel->tile->rows,
          .batch = p.batch,
          .seqlen_q = static_cast<int32_t>(p.seqlen_q),
          .heads = static_cast<uint32_t>(p.heads_q)};
}

ScoredBackwardParams make_params(const Problem& p, const BackwardCall& call, std::byte* workspace,
                                 unsigned long long* executed) {
  constexpr double kLog2E = 1.4426950408889634;
  const int64_t head_groups = p.heads_kv * call.splits;
  const KeyParams keys = make_key_params(p, call, workspace);
  ScoredBackwardParams params{};
  params.q = cuda::tensor_rows(p.q);
  params.k = cuda::tensor_rows(p.k);
  params.v = cuda::tensor_rows(p.v);
  params.dout = cuda::tensor_rows(p.dout);
  params.dk = call.has_key_parts() ? keys.dk_parts : keys.dk;
  params.dv = call.has_key_parts() ? keys.dv_parts : keys.dv;
  params.float_keys = call.has_key_parts() || keys.float_keys;
  params.terms = at<RowTerms>(workspace, call.layout.terms);
  params.dq = dq_sums(call, workspace);
  params.seqlen_q = static_cast<int32_t>(p.seqlen_q);
  params.seqlen_k = static_cast<int32_t>(p.seqlen_k);
  params.row_tiles = static_cast<int32_t>(call.tiles.rows);
  params.key_blocks = static_cast<int32_t>(call.tiles.key_blocks);
  params.heads_q = static_cast<uint32_t>(p.heads_q);
  params.head_groups = static_cast<uint32_t>(head_groups);
  params.query_heads_per_group = static_cast<uint32_t>(p.heads_q / head_groups);
  params.splits = static_cast<uint32_t>(call.splits);
  params.scale = p.scale();
  params.scale_log2 = static_cast<float>(cuda::score_unit(p) * kLog2E);
  params.plan = cuda::key_plan_bits(p);
  params.extents = visible_extents(p, call, workspace);
  params.mask = cuda::mask_columns(p);
  params.dense = cuda::dense_mask(p);
  params.bits = cuda::bit_tiles(p);
  params.schedule = {.work_tiles = static_cast<uint32_t>(call.work_tiles),
                     .heads = static_cast<uint32_t>(p.batch * head_groups),
                     .heads_per_l2_group = static_cast<uint32_t>(cuda::head_groups_in_l2(p, call.splits)),
                     .tiles = static_cast<uint32_t>(call.tiles.keys),
                     .next = at<uint32_t>(workspace, call.layout.next)};
  params.executed = executed;
  params.features = cuda::feature_params(p);
  params.scores = cuda::score_params(p);
  params.origins = origins_of(p.features.dropout);
  return params;
}

void BackwardCall::explain(const Problem& p, Explanation& e) const {
  e.arch = kArch;
  e.instance = kernel->id;
  e.padding_share = cuda::padding_share(*kernel->tile, p.head_dim, p.head_dim_v);
  if (!cuda::needs_plan(p)) e.kernels.emplace_back(cuda::kDenseExtents);
  if (magnitude_blocks > 0) e.kernels.push_back(magnitude_instance(p.dtype).id);
  if (tiles.all_rows > 0) e.kernels.push_back(preprocess_id(p.dtype, *kernel->tile));
  if (work_tiles > 0) e.kernels.push_back(e.instance);
  if (work_tiles > 0 && tiles.all_rows > 0) e.kernels.push_back(convert_dq_id(p.dtype, *kernel->tile));
  if (has_key_parts()) e.kernels.push_back(reduce_instance(p.dtype).id);
  if (p.dsink.defined()) e.kernels.push_back(sink_instance(p.dtype).id);
}

void BackwardCall::run(const Problem& p, std::byte* workspace, unsigned long long* executed) const {
  const cudaStream_t stream = cuda::stream_of(p);
  // A chain for each kernel: none begins before the one before has ended, which only code for later devices can wait
  // for.
  const auto launch = [&](const char* what, auto entry, int64_t blocks, int threads, int shared_bytes,
                          const auto& arguments) {
    cuda::LaunchChain(stream).launch(what, entry, blocks, threads, shared_bytes, arguments);
  };
  const RowParams rows = make_row_params(p, *this, workspace);
  // Without rows there is no block to clear the counter.
  if (tiles.all_rows == 0)
    cuda::check(cudaMemsetAsync(rows.next, 0, sizeof(*rows.next), stream), "cudaMemsetAsync of the work tile counter");
  if (!cuda::needs_plan(p)) cuda::find_dense_extents(p, at<VisibleExtent>(workspace, layout.extents));
  if (magnitude_blocks > 0)
    launch("launch of the keys' magnitudes", magnitude_instance(p.dtype).kernel, magnitude_blocks, cuda::kRowThreads, 0,
           cuda::key_magnitude_params(p, key_magnitudes(*this, workspace), visible_extents(p, *this, workspace)));
  const RowKernels& of_rows = row_kernels_of(p.dtype, *kernel->tile);
  launch("launch of the backward's preprocessing", of_rows.preprocess, tiles.all_rows, cuda::kRowThreads, 0, rows);
  if (work_tiles > 0) {
    const auto& [entry, threads, shared_bytes] = kernel->compiled;
    cuda::allow_shared_memory(entry, shared_bytes, p.device.index);
    const auto launch_kernel = [&, threads = threads, shared_bytes = shared_bytes]<typename Params>(
                                   const void* of, const Params& params) {
      launch("launch of the backward kernel", reinterpret_cast<void (*)(Params)>(const_cast<void*>(of)), ctas, threads,
             shared_bytes, params);
    };
    const ScoredBackwardParams params = make_params(p, *this, workspace, executed);
    if (kernel->row->variant.scores) {
      launch_kernel(entry, params);
    } else {
      launch_kernel(entry, static_cast<const BackwardParams&>(params));
    }
    launch("launch of the backward's conversion", of_rows.convert_dq, tiles.all_rows, cuda::kRowThreads, 0, rows);
  }
  if (has_key_parts())
    launch("launch of the backward's sum over query heads", reduce_instance(p.dtype).kernel,
           2 * p.batch * p.heads_kv * ceil_div(p.seqlen_k, int64_t{KeyParams::kReducedKeys}), cuda::kRowThreads, 0,
           make_key_params(p, *this, workspace));
  if (p.dsink.defined())
    launch("launch of the sink's gradient", sink_instance(p.dtype).kernel, p.heads_q, cuda::kRowThreads, 0,
           make_sink_params(p, *this, workspace));
}

/// The kernels of a tile.
void add_kernels(DataType dtype, const BackwardTile& tile, std::vector<KernelInfo>& all) {
  const auto add_pass = [&](std::string id) {
    all.push_back(cuda::tile_kernel_info(std::move(id), "bwd", dtype, tile, {tile.rows, 0}, cuda::kRowThreads));
  };
  add_pass(preprocess_id(dtype, tile));
  table_of(dtype).for_each([&](const BackwardKernel& kernel) {
    if (kernel.tile == &tile)
      all.push_back(cuda::table_kernel_info(kernel, "bwd", dtype, {tile.plan_rows(), kGranuleKeys}));
  });
  add_pass(convert_dq_id(dtype, tile));
}

}  // namespace
}  // namespace bwd

Prepared prepare_backward(const Problem& p, int kilobytes) {
  using namespace bwd;
  const BackwardKernel* kernel = choose_kernel(p, kilobytes);
  if (!kernel) return cuda::head_dims_refusal(p, kBackwardTiles, takes(p));
  if (std::string why = cuda::lengths_refusal(p); !why.empty()) return Refusal{std::move(why)};
  const BackwardTile& tile = *kernel->tile;
  if (std::string why = cuda::tiles_refusal(p, tile.rows, tile.keys); !why.empty()) return Refusal{std::move(why)};
  return Launch(p, cuda::DeviceCall<BackwardCall>{BackwardCall(p, *kernel)});
}

std::vector<KernelInfo> backward_kernels() {
  using namespace bwd;
  std::vector<KernelInfo> all;
  for (const DataType dtype : cuda::kDataTypes) {
    for (const BackwardTile& tile : kBackwardTiles) add_kernels(dtype, tile, all);
    for (const char* id : {magnitude_instance(dtype).id, reduce_instance(dtype).id, sink_instance(dtype).id}) {
      all.push_back(cuda::named({.id = id, .op = "bwd", .dtype = dtype, .tile = {0, 0}, .threads = cuda::kRowThreads}));
    }
  }
  return all;
}

}  // namespace flashmask::sm80
