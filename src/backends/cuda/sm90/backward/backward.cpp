// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/backward/backward.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <span>
#include <utility>

#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device_call.h"
#include "backends/cuda/host/dq_magnitudes.h"
#include "backends/cuda/host/error.h"
#include "backends/cuda/host/head_groups.h"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/sm90/backward/instance.h"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/row_params.h"
#include "backends/cuda/sm90/common/column_blocks.h"
#include "backends/cuda/sm90/common/tensor_map.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask::sm90 {
namespace bwd {
namespace {

constexpr int64_t kMostWorkTiles = int64_t{1} << 30;

template <DataType dtype, bool featured, const auto& tiles, std::size_t... row>
auto instances_of(std::index_sequence<row...>) {
  return std::array{
      backward_instance<dtype, tiles[row].head_dim, tiles[row].head_dim_v, tiles[row].consumers, featured>()...};
}

/// The instances of an element type of kDataTypes, a row of `tiles` each.
template <bool featured, const auto& tiles>
std::span<const BackwardInstance> instances_of(DataType dtype) {
  constexpr auto rows = std::make_index_sequence<std::size(tiles)>();
  static const auto bf16 = instances_of<DataType::kBFloat16, featured, tiles>(rows),
                    f16 = instances_of<DataType::kFloat16, featured, tiles>(rows);
  return dtype == DataType::kBFloat16 ? bf16 : f16;
}
std::span<const BackwardInstance> instances(DataType dtype, bool featured) {
  return featured ? instances_of<true, kFeaturedBackwardTiles>(dtype) : instances_of<false, kBackwardTiles>(dtype);
}

template <DataType dtype, std::size_t... row>
auto partial_instances_of(std::index_sequence<row...>) {
  constexpr auto& tiles = kBackwardTiles;
  return std::array{
      partial_backward_instance<dtype, tiles[row].head_dim, tiles[row].head_dim_v, tiles[row].consumers>()...};
}
/// As instances, without features.
std::span<const PartialInstance> partial_instances(DataType dtype) {
  constexpr auto rows = std::make_index_sequence<std::size(kBackwardTiles)>();
  static const auto bf16 = partial_instances_of<DataType::kBFloat16>(rows),
                    f16 = partial_instances_of<DataType::kFloat16>(rows);
  return dtype == DataType::kBFloat16 ? bf16 : f16;
}

/// The instance of the smallest tile that holds the call's head dims; null if none does.
template <const auto& tiles>
const BackwardInstance* find_instance(const Problem& p, std::span<const BackwardInstance> of_tiles) {
  const auto* least = least_tile(tiles, p.head_dim, p.head_dim_v);
  return least ? &of_tiles[static_cast<std::size_t>(least - tiles)] : nullptr;
}
const BackwardInstance* find_instance(const Problem& p) {
  const bool featured = cuda::asks_for_features(p);
  const std::span<const BackwardInstance> of_dtype = instances(p.dtype, featured);
  return featured ? find_instance<kFeaturedBackwardTiles>(p, of_dtype) : find_instance<kBackwardTiles>(p, of_dtype);
}

std::string id_of_light(const BackwardInstance& i) { return message(i.id, ".light"); }
std::string id_of_deterministic(const BackwardInstance& i) { return message(i.id, ".deterministic"); }
constexpr const char *kSplitSuffix = ".split", *kPreprocessSuffix = ".preprocess", *kConvertDqSuffix = ".convert_dq",
                     *kReduceDkvSuffix = ".reduce_dkv";

/// How many tiles a call has, of a head and in all; key_blocks: what the plan has of a head.
struct TileCounts {
  int64_t rows, key_blocks, keys, all_rows, all_keys;

  TileCounts(const Problem& p, const BackwardTile& tile)
      : rows(ceil_div(p.seqlen_q, tile.rows)),
        key_blocks(ceil_div(p.seqlen_k, kGranuleKeys)),
        keys(key_blocks * (kGranuleKeys / tile.keys())),
        all_rows(p.batch * p.heads_q * rows),
        all_keys(p.batch * p.heads_kv * keys) {}
};

/// Where everything lies in the workspace.
struct Layout {
  int64_t biases = 0, sums = 0, key_parts = 0, progress = 0, next = 0, magnitudes = 0, bytes = 0;

  Layout(const BackwardTile& tile, const TileCounts& tiles, int64_t splits, bool has_key_parts,
         int64_t magnitude_blocks) {
    const int64_t rows = tiles.all_rows * tile.rows;
    biases = add(rows * static_cast<int64_t>(sizeof(RowBias)));
    sums = add(rows * tile.head_dim * 4);
    if (has_key_parts) key_parts = add(tiles.all_keys * splits * tile.keys() * (tile.head_dim + tile.head_dim_v) * 4);
    progress = add(tiles.all_rows * tile.dq_pieces() * 4);
    next = add(4);
    magnitudes = add(magnitude_blocks * static_cast<int64_t>(sizeof(cuda::KeyMagnitudes)));
  }

 private:
  int64_t add(int64_t size) {
    const int64_t at = bytes;
    bytes += round_up(size, kWorkspaceAlignment);
    return at;
  }
};

/// The row of kBackwardTiles that a tile is.
std::size_t row_of(const BackwardTile& tile) {
  const auto same = [&](const BackwardTile& row) {
    return row.head_dim == tile.head_dim && row.head_dim_v == tile.head_dim_v;
  };
  return static_cast<std::size_t>(std::ranges::find_if(kBackwardTiles, same) - std::begin(kBackwardTiles));
}

/// A backward, configured.
struct BackwardCall {
  const BackwardInstance* instance;
  const PartialInstance* partial;  ///< null: dk and dv are of the tensors' type
  TileCounts tiles;
  int64_t splits, work_tiles, ctas;
  Layout layout;

  BackwardCall(const Problem& p, const BackwardInstance& of)
      : instance(&of),
        partial(p.features.partial_out ? &partial_instances(p.dtype)[row_of(of.tile)] : nullptr),
        tiles(p, of.tile),
        splits(cuda::count_splits(p, tiles.all_keys)),
        work_tiles(tiles.all_keys * splits),
        ctas(std::min(work_tiles, cuda::most_ctas(p))),
        layout(of.tile, tiles, splits, has_key_parts(), cuda::magnitude_blocks(p)) {}

  /// Work tiles that share a key head's query heads leave parts of dk and dv, in fp32, that are added up last.
  bool has_key_parts() const { return work_tiles > 0 && splits > 1; }
  /// Work tiles leave fp32: parts, or dk and dv themselves.
  bool has_float_keys() const { return has_key_parts() || (work_tiles > 0 && partial); }
  /// out and dq are in fp32, too.
  static bool has_float_rows(const Problem& p) { return p.dq.dtype == DataType::kFloat32; }
  /// A sink needs none of its own: its weight is in lse.
  bool is_light(const Problem& p) const { return instance->light && compares_positions(p.mask); }
  bool is_deterministic(const Problem& p) const {
    return instance->deterministic && !is_light(p) && cuda::magnitude_blocks(p) > 0;
  }
  const void* kernel_of(const Problem& p) const {
    if (is_light(p)) return has_float_keys() ? instance->light_split : instance->light;
    if (is_deterministic(p)) return has_float_keys() ? instance->deterministic_split : instance->deterministic;
    return has_float_keys() ? instance->split : instance->kernel;
  }
  const void* preprocess_of(const Problem& p) const {
    return has_float_rows(p) ? partial->preprocess : instance->preprocess;
  }
  const void* convert_dq_of(const Problem& p) const {
    return has_float_rows(p) ? partial->convert_dq : instance->convert_dq;
  }
  const void* reduce_dkv() const { return partial ? partial->reduce_dkv : instance->reduce_dkv; }
  /// A single key tile gives dq itself, in the tensors' type, unless that is a sum of integers.
  bool converts(const Problem& p) const {
    return tiles.keys > 1 || (tiles.keys == 1 && (has_float_rows(p) || cuda::magnitude_blocks(p) > 0));
  }

  TileShape tile() const { return {instance->tile.rows, kGranuleKeys}; }
  int64_t workspace_bytes() const { return layout.bytes; }
  void explain(const Problem& p, Explanation& e) const;
  void run(const Problem& p, std::byte* workspace, unsigned long long* executed) const;
};

template <typename T>
T* at(std::byte* workspace, int64_t offset) {
  return reinterpret_cast<T*>(workspace + offset);
}

Rows rows_of(const TensorView& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2]}; }
/// Of lse or dlse, [batch, heads, rows].
Rows rows_of_vector(const TensorView& t) { return {t.data, t.stride[0], t.stride[2], t.stride[1]}; }

/// A dense mask has no plan: all tiles are live, and there are no bits that say so.
PlanBits bits_of_dense_mask(const BackwardCall& call) {
  PlanBits bits{};
  bits.words_per_key = static_cast<int32_t>(ceil_div(call.tiles.rows * call.instance->tile.rows, 64 * 32));
  bits.sharing = {1, 1};
  return bits;
}

PlanBits plan_bits(const Problem& p, const BackwardCall& call) {
  return p.dense.defined() ? bits_of_dense_mask(call) : cuda::key_plan_bits(p);
}

/// softmax_scale as the scores take it. A row's bias is divided by it, so it is not 0: with the least that it may be,
/// all scores are as good as 0, too.
float score_scale(const Problem& p) {
  constexpr float kLeast = 1e-30f;
  const auto scale = static_cast<float>(p.softmax_scale);
  return std::max(scale, kLeast);
}

RowParams make_row_params(const Problem& p, const BackwardCall& call, std::byte* workspace) {
  const Layout& layout = call.layout;
  return {.out = rows_of(p.out),
          .dout = rows_of(p.dout),
          .lse = rows_of_vector(p.lse),
          .dlse = p.dlse.defined() ? rows_of_vector(p.dlse) : Rows{},
          .head_dim_v = static_cast<int32_t>(p.head_dim_v),
          .dq_columns = columns_of(call.instance->tile, p.head_dim, call.instance->tile.head_dim),
          .biases = at<RowBias>(workspace, layout.biases),
          .dq_sums = {.out = rows_of(p.dq),
                      .sums = at<float>(workspace, layout.sums),
                      .progress = at<uint32_t>(workspace, layout.progress),
                      .fixed_point = cuda::magnitude_blocks(p) > 0},
          .plan = plan_bits(p, call),
          .dense = p.dense.defined(),
          .next = at<uint32_t>(workspace, layout.next),
          .scales = cuda::row_scale_params(p, at<cuda::KeyMagnitudes>(workspace, layout.magnitudes)),
          .seqlen_q = static_cast<int32_t>(p.seqlen_q),
          .row_tiles = static_cast<uint32_t>(call.tiles.rows),
          .key_blocks = static_cast<uint32_t>(call.tiles.key_blocks),
          .heads = static_cast<uint32_t>(p.heads_q),
          .softmax_scale = static_cast<float>(p.softmax_scale),
          .score_scale = score_scale(p)};
}

SinkGradientParams make_sink_params(const Problem& p, const BackwardCall& call, std::byte* workspace) {
  return {.sink = cuda::feature_params(p).sink,
          .dsink = p.dsink.data,
          .dsink_stride = p.dsink.stride[0],
          .lse = rows_of_vector(p.lse),
          .biases = at<RowBias>(workspace, call.layout.biases),
          .are_terms = cuda::asks_for_features(p),
          .rows_of_head = call.tiles.rows * call.instance->tile.rows,
          .batch = p.batch,
          .seqlen_q = static_cast<int32_t>(p.seqlen_q),
          .heads = static_cast<uint32_t>(p.heads_q)};
}

KeyRows key_rows(const Problem& p, const BackwardCall& call) {
  const BackwardTile& tile = call.instance->tile;
  return {.dk = rows_of(p.dk),
          .dv = rows_of(p.dv),
          .dk_columns = columns_of(tile, p.head_dim, tile.head_dim),
          .dv_columns = columns_of(tile, p.head_dim_v, tile.head_dim_v)};
}

KeyParams make_key_params(const Problem& p, const BackwardCall& call, std::byte* workspace) {
  return {.to = key_rows(p, call),
          .parts = at<float>(workspace, call.layout.key_parts),
          .heads_kv = static_cast<uint32_t>(p.heads_kv),
          .splits = static_cast<uint32_t>(call.splits),
          .key_tiles = static_cast<uint32_t>(call.tiles.keys),
          .seqlen_k = static_cast<int32_t>(p.seqlen_k),
          .softmax_scale = static_cast<float>(p.softmax_scale)};
}

FeaturedBackwardParams make_params(const Problem& p, const BackwardCall& call, const RowParams& rows,
                                   std::byte* workspace, unsigned long long* executed) {
  const BackwardTile& tile = call.instance->tile;
  const ColumnBlocks of_qk = blocks_of_rows(tile, p.head_dim, tile.head_dim),
                     of_v = blocks_of_rows(tile, p.head_dim_v, tile.head_dim_v);
  const int qk_box = tile.one_copy ? tile.head_dim / 64 : 1, v_box = tile.one_copy ? tile.head_dim_v / 64 : 1;
  const int64_t head_groups = p.heads_kv * call.splits;
  constexpr float kLog2E = 1.44269504f;
  FeaturedBackwardParams params{};
  // Without rows nothing of them is loaded, but the maps have to be valid.
  params.q = tensor_map(p.seqlen_q > 0 ? p.q : p.k, of_qk, tile.rows, qk_box, "q");
  params.dout = tensor_map(p.seqlen_q > 0 ? p.dout : p.v, of_v, tile.rows, v_box, "dout");
  params.k = tensor_map(p.k, of_qk, tile.keys(), qk_box, "k");
  params.v = tensor_map(p.v, of_v, tile.keys(), v_box, "v");
  if (!call.has_float_rows(p)) params.dq = tensor_map(p.seqlen_q > 0 ? p.dq : p.k, of_qk, 16, 1, "dq");
  if (!call.partial) {
    params.keys.maps.dk = tensor_map(p.dk, of_qk, 16, qk_box, "dk");
    params.keys.maps.dv = tensor_map(p.dv, of_v, 16, v_box, "dv");
  }
  params.biases = rows.biases;
  params.dq_sums = rows.dq_sums;
  params.seqlen_q = static_cast<int32_t>(p.seqlen_q);
  params.seqlen_k = static_cast<int32_t>(p.seqlen_k);
  params.row_tiles = static_cast<int32_t>(call.tiles.rows);
  params.heads_q = static_cast<uint32_t>(p.heads_q);
  params.head_groups = static_cast<uint32_t>(head_groups);
  params.query_heads_per_group = static_cast<uint32_t>(p.heads_q / head_groups);
  params.splits = static_cast<uint32_t>(call.splits);
  if (call.has_key_parts()) {
    params.key_parts = at<float>(workspace, call.layout.key_parts);
  } else if (call.partial) {
    params.keys.rows = key_rows(p, call);
  }
  params.softmax_scale = rows.softmax_scale;
  params.features = cuda::feature_params(p);
  const float softcap = params.features.softcap.softcap;
  params.scale_log2 = (softcap != 0 ? softcap : rows.score_scale) * kLog2E;
  params.plan = rows.plan;
  params.mask = cuda::mask_columns(p);
  params.dense = cuda::dense_mask(p);
  const int64_t together = cuda::head_groups_for_rounds(p, call.splits, call.tiles.keys);
  params.schedule = {.work_tiles = static_cast<uint32_t>(call.work_tiles),
                     .heads = static_cast<uint32_t>(p.batch * head_groups),
                     .heads_per_l2_group = static_cast<uint32_t>(together),
                     .tiles = static_cast<uint32_t>(call.tiles.keys),
                     .next = rows.next};
  params.first_sorted = params.schedule.heads - std::min(params.schedule.heads, params.schedule.heads_per_l2_group);
  params.executed = executed;
  return params;
}

void BackwardCall::explain(const Problem& p, Explanation& e) const {
  e.arch = kArch;
  e.instance = is_light(p)           ? id_of_light(*instance)
               : is_deterministic(p) ? id_of_deterministic(*instance)
                                     : instance->id;
  if (has_float_keys()) e.instance = message(e.instance, kSplitSuffix);
  e.padding_share = padding_share(instance->tile, p.head_dim, p.head_dim_v);
  const char* const of_rows = has_float_rows(p) ? partial->id : instance->id;
  if (cuda::magnitude_blocks(p) > 0) e.kernels.push_back(magnitude_instance(p.dtype).id);
  if (tiles.all_rows > 0) e.kernels.push_back(message(of_rows, kPreprocessSuffix));
  if (work_tiles > 0) e.kernels.push_back(e.instance);
  if (converts(p) && tiles.all_rows > 0) e.kernels.push_back(message(of_rows, kConvertDqSuffix));
  if (has_key_parts()) e.kernels.push_back(message(partial ? partial->id : instance->id, kReduceDkvSuffix));
  if (p.dsink.defined()) e.kernels.push_back(sink_instance(p.dtype).id);
}

void BackwardCall::run(const Problem& p, std::byte* workspace, unsigned long long* executed) const {
  RowParams rows = make_row_params(p, *this, workspace);
  void* row_arguments[] = {&rows};
  const cudaStream_t stream = cuda::stream_of(p);
  cuda::LaunchChain chain(stream, cuda::LaunchChain::kOverlapPrevious);
  const int64_t blocks = tiles.all_rows;
  // Without rows there is no block to clear the counter.
  if (blocks == 0)
    cuda::check(cudaMemsetAsync(rows.next, 0, sizeof(*rows.next), stream), "cudaMemsetAsync of the work tile counter");
  if (const int64_t of_keys = cuda::magnitude_blocks(p); of_keys > 0) {
    cuda::KeyMagnitudeParams keys =
        cuda::key_magnitude_params(p, at<cuda::KeyMagnitudes>(workspace, layout.magnitudes));
    void* arguments[] = {&keys};
    chain.launch("launch of the keys' magnitudes", magnitude_instance(p.dtype).kernel, of_keys, kRowThreads, 0,
                 arguments);
  }
  chain.launch("launch of the backward's preprocessing", preprocess_of(p), blocks, kRowThreads, 0, row_arguments);
  if (work_tiles > 0) {
    const void* kernel = kernel_of(p);
    cuda::allow_shared_memory(kernel, instance->shared_bytes, p.device.index);
    // The plain kernels read the first part of it.
    FeaturedBackwardParams params = make_params(p, *this, rows, workspace, executed);
    void* arguments[] = {&params};
    chain.launch("launch of the backward kernel", kernel, ctas, instance->threads, instance->shared_bytes, arguments);
  }
  if (converts(p))
    chain.launch("launch of the backward's conversion", convert_dq_of(p), blocks, kRowThreads, 0, row_arguments);
  if (has_key_parts()) {
    KeyParams keys = make_key_params(p, *this, workspace);
    void* arguments[] = {&keys};
    chain.launch("launch of the backward's sum over query heads", reduce_dkv(), 2 * tiles.all_keys, kRowThreads, 0,
                 arguments);
  }
  if (p.dsink.defined()) {
    SinkGradientParams sink = make_sink_params(p, *this, workspace);
    void* arguments[] = {&sink};
    chain.launch("launch of the sink's gradient", sink_instance(p.dtype).kernel, p.heads_q, kRowThreads, 0, arguments);
  }
}

/// Why the kernels cannot count the call's tiles in 32 bits; empty if they can.
std::string counts_refusal(const Problem& p, const BackwardTile& tile, const TileCounts& tiles) {
  struct Count {
    const char* what;
    int64_t tile, tiles;
  };
  for (const Count& c : {Count{"batch * heads_q * seqlen_q / ", tile.rows, tiles.all_rows},
                         Count{"batch * heads_kv * seqlen_k / ", tile.keys(), tiles.all_keys},
                         Count{"batch * heads_q * seqlen_k / ", tile.keys(), tiles.all_keys * p.group_size()}}) {
    if (c.tiles > kMostWorkTiles)
      return message(c.what, c.tile, " is about ", c.tiles, "; the backward takes at most ", kMostWorkTiles);
  }
  return "";
}

void add_kernels(const BackwardInstance& i, const PartialInstance* partial, std::vector<KernelInfo>& all) {
  const auto add = [&](std::string id, TileShape tile, int threads, int shared_bytes) {
    all.push_back(cuda::named({.id = std::move(id),
                               .op = "bwd",
                               .dtype = i.dtype,
                               .head_dim = i.tile.head_dim,
                               .head_dim_v = i.tile.head_dim_v,
                               .tile = tile,
                               .threads = threads,
                               .shared_bytes = shared_bytes}));
  };
  const TileShape tile{i.tile.rows, kGranuleKeys}, rows{tile.rows, 0}, keys{0, tile.keys};
  const auto add_rows_and_keys = [&](const char* id) {
    add(message(id, kPreprocessSuffix), rows, kRowThreads, 0);
    add(message(id, kConvertDqSuffix), rows, kRowThreads, 0);
    add(message(id, kReduceDkvSuffix), keys, kRowThreads, 0);
  };
  add_rows_and_keys(i.id);
  if (partial) add_rows_and_keys(partial->id);
  std::vector<std::string> ids{i.id};
  if (i.deterministic) ids.push_back(id_of_deterministic(i));
  if (i.light) ids.push_back(id_of_light(i));
  for (const std::string& id : ids) {
    add(id, tile, i.threads, i.shared_bytes);
    add(message(id, kSplitSuffix), tile, i.threads, i.shared_bytes);
  }
}

}  // namespace
}  // namespace bwd

Prepared prepare_backward(const Problem& p) {
  using namespace bwd;
  const BackwardInstance* instance = find_instance(p);
  if (!instance)
    return cuda::asks_for_features(p) ? head_dims_refusal(p, kFeaturedBackwardTiles)
                                      : head_dims_refusal(p, kBackwardTiles);
  if (std::string why = cuda::lengths_refusal(p); !why.empty()) return Refusal{std::move(why)};
  if (std::string why = counts_refusal(p, instance->tile, TileCounts(p, instance->tile)); !why.empty())
    return Refusal{std::move(why)};
  return Launch(p, cuda::DeviceCall<BackwardCall>{BackwardCall(p, *instance)});
}

std::vector<KernelInfo> backward_kernels() {
  using namespace bwd;
  std::vector<KernelInfo> all;
  for (const DataType dtype : cuda::kDataTypes) {
    for (const bool featured : {false, true}) {
      for (const BackwardInstance& i : instances(dtype, featured))
        add_kernels(i, featured ? nullptr : &partial_instances(dtype)[row_of(i.tile)], all);
    }
    for (const char* id : {magnitude_instance(dtype).id, sink_instance(dtype).id})
      all.push_back(cuda::named({.id = id, .op = "bwd", .dtype = dtype, .tile = {0, 0}, .threads = kRowThreads}));
  }
  return all;
}

}  // namespace flashmask::sm90
