// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/backward/backward.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <type_traits>
#include <utility>

#include "backends/cuda/host/backward_tiles.h"
#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device_call.h"
#include "backends/cuda/host/dq_magnitudes.h"
#include "backends/cuda/host/error.h"
#include "backends/cuda/host/head_groups.h"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/kernel_table.h"
#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/masks/dense_extents.h"
#include "backends/cuda/sm90/backward/instance.h"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/row_params.h"
#include "backends/cuda/sm90/common/column_blocks.h"
#include "backends/cuda/sm90/common/tensor_map.h"
#include "backends/cuda/sm90/tile_config.h"
#include "call/sink_and_dropout.h"
#include "common/arithmetic.h"
#include "common/message.h"
#include "mask/host_only.h"

namespace flashmask::sm90 {
namespace bwd {
namespace {

constexpr int kCtasOfCluster = 2;
/// Fewest query rows whose halves save more than adding up dk and dv costs: with one round of work tiles, with two, and
/// with two under a mask with contents, as they may make all work tiles as short as a window's.
constexpr int64_t kLeastOfOneRound = 1024, kLeastOfTwoRounds = 2048, kLeastUnderContents = 4096;

using BackwardTable = cuda::KernelTable<kBackwardTiles, kBackwardVariants>;
using BackwardKernel = BackwardTable::Kernel;

std::string id_of(DataType dtype, const BackwardTile& tile) {
  return cuda::tile_kernel_id(kArch, "bwd", dtype, tile.head_dim, tile.head_dim_v, 'c', tile.consumers);
}

/// The kernels over tiles of an element type of kDataTypes.
const BackwardTable& table_of(DataType dtype) {
  return BackwardTable::of(dtype, id_of, []<DataType type, BackwardTile tile, int variant>() {
    return backward_kernel<type, tile.head_dim, tile.head_dim_v, tile.consumers, variant>();
  });
}

/// Units that have kernels before and after a tile's, and the ends of these kernels' ids.
constexpr std::pair<Unit, const char*> kRowUnits[] = {{kPlain, ""}, {kFeatures, ".features"}, {kPartial, ".partial"}};

template <DataType dtype, std::size_t row, Unit unit>
RowKernels make_row_kernels() {
  constexpr BackwardTile tile = kBackwardTiles[row];
  if constexpr (unit != kFeatures || tile.features != kNone) {
    return row_kernels<dtype, tile.head_dim, tile.head_dim_v, tile.consumers, unit>();
  } else {
    return {};
  }
}
template <DataType dtype, std::size_t... row>
auto make_row_kernels(std::index_sequence<row...>) {
  return std::array{std::array{make_row_kernels<dtype, row, kPlain>(), make_row_kernels<dtype, row, kFeatures>(),
                               make_row_kernels<dtype, row, kPartial>()}...};
}

/// The kernels before and after the ones over a tile's; null where the tile has none of the unit.
const RowKernels& row_kernels_of(DataType dtype, const BackwardTile& tile, Unit unit) {
  constexpr auto rows = std::make_index_sequence<std::size(kBackwardTiles)>();
  static const auto bf16 = make_row_kernels<DataType::kBFloat16>(rows),
                    f16 = make_row_kernels<DataType::kFloat16>(rows);
  return (dtype == DataType::kBFloat16
              ? bf16
              : f16)[static_cast<std::size_t>(&tile - kBackwardTiles)][static_cast<std::size_t>(unit)];
}

std::string row_kernel_id(DataType dtype, const BackwardTile& tile, Unit unit, const char* kernel) {
  return message(id_of(dtype, tile), kRowUnits[static_cast<std::size_t>(unit)].second, kernel);
}
constexpr const char *kPreprocess = ".preprocess", *kConvertDq = ".convert_dq", *kReduceDkv = ".reduce_dkv";

/// The variant that the call needs of the kernel over tiles. A sink's weight is in lse; other kernels handle fp32 rows.
/// A call that may have only one CTA at a time takes the kernel with positions where its own would run in pairs.
cuda::Variant asked_variant(const Problem& p, const BackwardTile& tile, bool has_float_keys) {
  cuda::Variant asked = cuda::asked_variant(p);
  asked.sink = asked.partial = false;
  asked.split = has_float_keys;
  asked.positions |= tile.runs_in_pairs(asked.sum, asked.split) && cuda::most_ctas(p) < kCtasOfCluster;
  return asked;
}

/// True if the mask has one diagonal, and so work tiles from all rows to few.
bool is_triangle(const MaskView& mask) { return (mask.diagonal_lo == INT32_MIN) != (mask.diagonal_hi == INT32_MAX); }

/// True if two CTAs may share each work tile's rows: half of the multiprocessors would have none, or the longest would
/// outlast all others. The host sees no more of a mask's contents than that there are some.
bool may_share_rows(const Problem& p, int64_t work_tiles) {
  const int64_t multiprocessors = cuda::multiprocessors(p);
  if (work_tiles > multiprocessors || cuda::most_ctas(p) < kCtasOfCluster) return false;
  if (work_tiles * kCtasOfCluster <= multiprocessors) return p.seqlen_q >= kLeastOfOneRound;
  return is_triangle(p.mask) && p.seqlen_q >= (has_contents(p.mask) ? kLeastUnderContents : kLeastOfTwoRounds);
}

/// The kernel over tiles in which the call runs. Kernels of features, and of parts of dk and dv, share no rows.
const BackwardKernel* kernel_of(const Problem& p, const BackwardTile& tile, int64_t work_tiles, bool has_float_keys) {
  const BackwardTable& table = table_of(p.dtype);
  cuda::Variant asked = asked_variant(p, tile, has_float_keys);
  asked.shares_rows = may_share_rows(p, work_tiles);
  const BackwardKernel* kernel = table.find(tile, asked);
  if (kernel) return kernel;
  asked.shares_rows = false;
  return table.find(tile, asked);
}

/// True if the kernel runs in pairs of CTAs that divide dq's columns.
bool runs_in_pairs(const BackwardKernel& kernel) {
  return kernel.tile->runs_in_pairs(kernel.row->variant.sum, kernel.row->variant.split);
}

/// Predicate: does a tile have kernels that take the call? The row kernels of partial results fold terms into scores,
/// which have to be plain products.
auto takes(const Problem& p) {
  return [&p, &table = table_of(p.dtype)](const BackwardTile& tile) {
    const cuda::Variant asked = asked_variant(p, tile, false);
    const bool has_rows = !p.features.partial_out || !(asked.scores || asked.dropout);
    return has_rows && table.find(tile, asked) != nullptr;
  };
}

/// Counters of work tiles: of a launch over all key tiles, or of early ones and of the others.
constexpr int64_t kCounters = 2;

/// Offsets into the workspace.
struct Layout {
  int64_t biases = 0, sums = 0, key_parts = 0, progress = 0, next = 0, magnitudes = 0, extents = 0, bytes = 0;

  Layout(const Problem& p, const BackwardTile& tile, const cuda::BackwardTiles& tiles, int64_t splits,
         bool has_key_parts, int64_t magnitude_blocks) {
    const int64_t rows = tiles.all_rows * tile.rows;
    biases = add(rows * static_cast<int64_t>(sizeof(RowBias)));
    sums = add(rows * tile.head_dim * 4);
    if (has_key_parts) key_parts = add(tiles.all_keys * splits * tile.keys() * (tile.head_dim + tile.head_dim_v) * 4);
    progress = add(tiles.all_rows * tile.dq_pieces() * 4);
    next = add(kCounters * 4);
    magnitudes = add(magnitude_blocks * static_cast<int64_t>(sizeof(cuda::KeyMagnitudes)));
    if (magnitude_blocks > 0 && !cuda::needs_plan(p))
      extents = add(p.batch * static_cast<int64_t>(sizeof(VisibleExtent)));
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
  const BackwardTile* tile_row;
  cuda::BackwardTiles tiles;
  int64_t splits, work_tiles;
  int64_t magnitude_blocks;  ///< above 0: dq is a sum of integers
  bool is_partial;           ///< dk and dv are in fp32
  bool has_float_rows;       ///< out and dq are in fp32, too
  const BackwardKernel* kernel;
  int cluster;  ///< CTAs of a cluster of the kernel's; divides `ctas`
  int64_t ctas;
  Layout layout;

  BackwardCall(const Problem& p, const BackwardTile& tile)
      : tile_row(&tile),
        tiles(p, tile.rows, tile.keys()),
        splits(p.early.defined() ? 1 : cuda::count_splits(p, tiles.all_keys)),
        work_tiles(tiles.all_keys * splits),
        magnitude_blocks(cuda::magnitude_blocks(p)),
        is_partial(p.features.partial_out),
        has_float_rows(p.dq.dtype == DataType::kFloat32),
        kernel(kernel_of(p, tile, work_tiles, has_float_keys())),
        cluster(shares_rows() || runs_in_pairs(*kernel) ? kCtasOfCluster : 1),
        ctas(std::min(work_tiles * (shares_rows() ? cluster : 1), cuda::most_ctas(p) / cluster * cluster)),
        layout(p, tile, tiles, splits, has_key_parts(), magnitude_blocks) {}

  /// True if work tiles share a key head's query heads: they leave fp32 parts of dk and dv, which are added up last.
  bool has_key_parts() const { return work_tiles > 0 && splits > 1; }
  /// True if work tiles write fp32: parts, or dk and dv themselves.
  bool has_float_keys() const { return has_key_parts() || (work_tiles > 0 && is_partial); }
  /// True if a cluster has each work tile, half of its rows each of the CTAs.
  bool shares_rows() const { return kernel->row->variant.shares_rows; }
  /// The units of the kernels over rows, and over the parts of dk and dv.
  Unit row_unit() const { return has_float_rows ? kPartial : kernel->row->unit; }
  Unit key_unit() const { return is_partial ? kPartial : kernel->row->unit; }
  /// True if convert_dq runs: a single key tile writes dq itself, in the tensors' type, unless dq is a sum of integers.
  bool converts() const { return tiles.keys > 1 || (tiles.keys == 1 && (has_float_rows || magnitude_blocks > 0)); }

  TileShape tile() const { return {tile_row->rows, kGranuleKeys}; }
  int64_t workspace_bytes() const { return layout.bytes; }
  void explain(const Problem& p, Explanation& e) const;
  void run(const Problem& p, std::byte* workspace, unsigned long long* executed) const;

 private:
  /// Launches the kernel over the key tiles.
  void run_key_tiles(cuda::LaunchChain& chain, ScoredBackwardParams& params) const;
  /// Launches it twice, over the early key tiles and over the others.
  void run_early_first(const Problem& p, ScoredBackwardParams& params) const;
};

template <typename T>
T* at(std::byte* workspace, int64_t offset) {
  return reinterpret_cast<T*>(workspace + offset);
}

/// Magnitudes of the keys in the workspace; null where dq's sums are floats.
cuda::KeyMagnitudes* key_magnitudes(const BackwardCall& call, std::byte* workspace) {
  return call.magnitude_blocks > 0 ? at<cuda::KeyMagnitudes>(workspace, call.layout.magnitudes) : nullptr;
}

/// Extents of the keys that dq's unit is taken from: the plan's, or the ones that find_dense_extents writes, so that a
/// dense mask has the bits of the mask that it equals.
cuda::VisibleExtents key_extents(const Problem& p, const BackwardCall& call, std::byte* workspace) {
  if (cuda::needs_plan(p)) return cuda::visible_extents(p);
  return {at<VisibleExtent>(workspace, call.layout.extents), 1};
}

Rows rows_of(const TensorView& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2]}; }
/// Rows of float32 as if `keys` others came before them.
Rows rows_before(const TensorView& t, int64_t keys) {
  Rows rows = rows_of(t);
  rows.data = static_cast<float*>(t.data) - keys * t.stride[1];
  return rows;
}
/// Rows of lse or dlse, [batch, heads, rows].
Rows vector_rows(const TensorView& t) { return {t.data, t.stride[0], t.stride[2], t.stride[1]}; }

/// score_unit, kept above 0, as a row's bias is divided by it. With the least value all scores are as good as 0, too.
float score_scale(const Problem& p) { return std::max(static_cast<float>(cuda::score_unit(p)), 1e-30f); }

RowParams make_row_params(const Problem& p, const BackwardCall& call, std::byte* workspace) {
  const Layout& layout = call.layout;
  return {.out = rows_of(p.out),
          .dout = rows_of(p.dout),
          .lse = vector_rows(p.lse),
          .dlse = p.dlse.defined() ? vector_rows(p.dlse) : Rows{},
          .head_dim_v = static_cast<int32_t>(p.head_dim_v),
          .dq_columns = columns_of(*call.tile_row, p.head_dim, call.tile_row->head_dim),
          .biases = at<RowBias>(workspace, layout.biases),
          .dq_sums = {.out = rows_of(p.dq),
                      .sums = at<float>(workspace, layout.sums),
                      .progress = at<uint32_t>(workspace, layout.progress),
                      .fixed_point = call.magnitude_blocks > 0},
          .plan = cuda::key_plan_bits(p),
          .extents = cuda::visible_extents(p),
          .dense = !cuda::needs_plan(p),
          .next = at<uint32_t>(workspace, layout.next),
          .scales = cuda::row_scale_params(p, key_magnitudes(call, workspace)),
          .seqlen_q = static_cast<int32_t>(p.seqlen_q),
          .row_tiles = static_cast<uint32_t>(call.tiles.rows),
          .key_blocks = static_cast<uint32_t>(call.tiles.key_blocks),
          .heads = static_cast<uint32_t>(p.heads_q),
          .scale = p.scale(),
          .score_scale = score_scale(p),
          .folds_delta = !call.kernel->row->variant.dropout,
          .in_pairs = runs_in_pairs(*call.kernel)};
}

SinkGradientParams make_sink_params(const Problem& p, const BackwardCall& call, std::byte* workspace) {
  return {.sink = cuda::feature_params(p).sink,
          .dsink = p.dsink.data,
          .dsink_stride = p.dsink.stride[0],
          .lse = vector_rows(p.lse),
          .biases = at<RowBias>(workspace, call.layout.biases),
          .are_terms = call.kernel->row->variant.dropout,
          .rows_of_head = call.tiles.rows * call.tile_row->rows,
          .batch = p.batch,
          .seqlen_q = static_cast<int32_t>(p.seqlen_q),
          .heads = static_cast<uint32_t>(p.heads_q)};
}

KeyRows key_rows(const Problem& p, const BackwardCall& call) {
  const BackwardTile& tile = *call.tile_row;
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
          .scale = p.scale()};
}

ScoredBackwardParams make_params(const Problem& p, const BackwardCall& call, const RowParams& rows,
                                 std::byte* workspace, unsigned long long* executed) {
  const BackwardTile& tile = *call.tile_row;
  const ColumnBlocks of_qk = dim_blocks(tile, p.head_dim, tile.head_dim),
                     of_v = dim_blocks(tile, p.head_dim_v, tile.head_dim_v);
  const int qk_box = tile.one_copy ? tile.head_dim / 64 : 1, v_box = tile.one_copy ? tile.head_dim_v / 64 : 1;
  const int64_t head_groups = p.heads_kv * call.splits;
  constexpr float kLog2E = 1.44269504f;
  ScoredBackwardParams params{};
  // Without rows nothing is loaded through their maps, but the maps have to be valid.
  params.q = tensor_map(p.seqlen_q > 0 ? p.q : p.k, of_qk, tile.rows, qk_box, "q");
  params.dout = tensor_map(p.seqlen_q > 0 ? p.dout : p.v, of_v, tile.rows, v_box, "dout");
  params.k = tensor_map(p.k, of_qk, tile.keys(), qk_box, "k");
  params.v = tensor_map(p.v, of_v, tile.keys(), v_box, "v");
  if (!call.has_float_rows) params.dq = tensor_map(p.seqlen_q > 0 ? p.dq : p.k, of_qk, 16, 1, "dq");
  if (!call.is_partial) {
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
  }
  if (call.has_float_keys()) {
    params.keys.rows = {call.is_partial && !call.has_key_parts() ? key_rows(p, call) : KeyRows{}, 0,
                        static_cast<int32_t>(call.tiles.keys)};
  }
  params.scale = rows.scale;
  params.features = cuda::feature_params(p);
  params.scores = cuda::score_params(p);
  params.origins = origins_of(p.features.dropout);
  params.scale_log2 = rows.score_scale * kLog2E;
  params.plan = rows.plan;
  params.mask = cuda::mask_columns(p);
  params.dense = cuda::dense_mask(p);
  params.extents = rows.extents;
  params.bits = cuda::bit_tiles(p);
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
  e.instance = kernel->id;
  e.padding_share = padding_share(*tile_row, p.head_dim, p.head_dim_v);
  const auto id = [&](Unit unit, const char* of) { return row_kernel_id(p.dtype, *tile_row, unit, of); };
  if (magnitude_blocks > 0 && !cuda::needs_plan(p)) e.kernels.emplace_back(cuda::kDenseExtents);
  if (magnitude_blocks > 0) e.kernels.push_back(magnitude_instance(p.dtype).id);
  if (tiles.all_rows > 0) e.kernels.push_back(id(row_unit(), kPreprocess));
  if (work_tiles > 0) e.kernels.push_back(e.instance);
  if (converts() && tiles.all_rows > 0) e.kernels.push_back(id(row_unit(), kConvertDq));
  if (has_key_parts()) e.kernels.push_back(id(key_unit(), kReduceDkv));
  if (p.dsink.defined()) e.kernels.push_back(sink_instance(p.dtype).id);
}

void BackwardCall::run_key_tiles(cuda::LaunchChain& chain, ScoredBackwardParams& params) const {
  void* arguments[] = {&params};
  const auto& [entry, threads, shared_bytes] = kernel->compiled;
  chain.launch("launch of the backward kernel", entry, ctas, threads, shared_bytes, arguments, cluster);
}

/// A stream's work so far, for others to wait for.
class Mark {
 public:
  Mark() { cuda::check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate"); }
  ~Mark() { cudaEventDestroy(event_); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  void let_wait(cudaStream_t waiting, cudaStream_t for_stream) const {
    cuda::check(cudaEventRecord(event_, for_stream), "cudaEventRecord");
    cuda::check(cudaStreamWaitEvent(waiting, event_, 0), "cudaStreamWaitEvent");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Early tiles come first, by priority, and take every multiprocessor; the others' blocks follow as these end, so that
// none is idle.
void BackwardCall::run_early_first(const Problem& p, ScoredBackwardParams& params) const {
  const cudaStream_t stream = cuda::stream_of(p), early_stream = static_cast<cudaStream_t>(p.early.stream);
  const auto first_tile = static_cast<int32_t>(p.first_early_key() / tile_row->keys());
  ScoredBackwardParams early = params;
  KeyTileRows& rows = early.keys.rows;
  // Rows count from the call's first key, whichever tensor has them.
  rows.dk = rows_before(p.early.dk, p.first_early_key());
  rows.dv = rows_before(p.early.dv, p.first_early_key());
  rows.first_tile = first_tile;
  ++early.schedule.next;
  params.keys.rows.end_tile = first_tile;
  const Mark mark;
  mark.let_wait(early_stream, stream);
  cuda::LaunchChain beside(early_stream), chain(stream);
  run_key_tiles(beside, early);
  cuda::check(cudaEventRecord(static_cast<cudaEvent_t>(p.early.event), early_stream), "cudaEventRecord of early keys");
  run_key_tiles(chain, params);
  mark.let_wait(stream, early_stream);
}

void BackwardCall::run(const Problem& p, std::byte* workspace, unsigned long long* executed) const {
  RowParams rows = make_row_params(p, *this, workspace);
  void* row_arguments[] = {&rows};
  const cudaStream_t stream = cuda::stream_of(p);
  if (magnitude_blocks > 0 && !cuda::needs_plan(p))
    cuda::find_dense_extents(p, at<VisibleExtent>(workspace, layout.extents));
  if (p.early.defined())
    cuda::check(cudaMemsetAsync(rows.next, 0, kCounters * sizeof(*rows.next), stream),
                "cudaMemsetAsync of the counters");
  cuda::LaunchChain chain(stream, cuda::LaunchChain::kOverlapPrevious);
  const int64_t blocks = tiles.all_rows;
  // Without rows there is no block to clear the counter.
  if (blocks == 0)
    cuda::check(cudaMemsetAsync(rows.next, 0, sizeof(*rows.next), stream), "cudaMemsetAsync of the work tile counter");
  if (magnitude_blocks > 0) {
    cuda::KeyMagnitudeParams keys =
        cuda::key_magnitude_params(p, key_magnitudes(*this, workspace), key_extents(p, *this, workspace));
    void* arguments[] = {&keys};
    chain.launch("launch of the keys' magnitudes", magnitude_instance(p.dtype).kernel, magnitude_blocks, kRowThreads, 0,
                 arguments);
  }
  const RowKernels& of_rows = row_kernels_of(p.dtype, *tile_row, row_unit());
  chain.launch("launch of the backward's preprocessing", of_rows.preprocess, blocks, kRowThreads, 0, row_arguments);
  if (work_tiles > 0) {
    cuda::allow_shared_memory(kernel->compiled.entry, kernel->compiled.shared_bytes, p.device.index);
    ScoredBackwardParams params = make_params(p, *this, rows, workspace, executed);
    if (p.early.defined()) {
      run_early_first(p, params);
      chain = cuda::LaunchChain(stream);
    } else {
      run_key_tiles(chain, params);
    }
  }
  if (converts())
    chain.launch("launch of the backward's conversion", of_rows.convert_dq, blocks, kRowThreads, 0, row_arguments);
  if (has_key_parts()) {
    KeyParams keys = make_key_params(p, *this, workspace);
    void* arguments[] = {&keys};
    chain.launch("launch of the backward's sum over query heads",
                 row_kernels_of(p.dtype, *tile_row, key_unit()).reduce_dkv, 2 * tiles.all_keys, kRowThreads, 0,
                 arguments);
  }
  if (p.dsink.defined()) {
    SinkGradientParams sink = make_sink_params(p, *this, workspace);
    void* arguments[] = {&sink};
    chain.launch("launch of the sink's gradient", sink_instance(p.dtype).kernel, p.heads_q, kRowThreads, 0, arguments);
  }
}

/// The kernels of a tile.
void add_kernels(DataType dtype, const BackwardTile& tile, std::vector<KernelInfo>& all) {
  const auto add_pass = [&](std::string id, TileShape shape) {
    all.push_back(cuda::tile_kernel_info(std::move(id), "bwd", dtype, tile, shape, kRowThreads));
  };
  for (const auto& [unit, suffix] : kRowUnits) {
    if (!row_kernels_of(dtype, tile, unit).preprocess) continue;
    add_pass(row_kernel_id(dtype, tile, unit, kPreprocess), {tile.rows, 0});
    add_pass(row_kernel_id(dtype, tile, unit, kConvertDq), {tile.rows, 0});
    add_pass(row_kernel_id(dtype, tile, unit, kReduceDkv), {0, kGranuleKeys});
  }
  table_of(dtype).for_each([&](const BackwardKernel& kernel) {
    if (kernel.tile == &tile) all.push_back(cuda::table_kernel_info(kernel, "bwd", dtype, {tile.rows, kGranuleKeys}));
  });
}

}  // namespace
}  // namespace bwd

Prepared prepare_backward(const Problem& p) {
  using namespace bwd;
  const BackwardTile* tile = least_tile(kBackwardTiles, p.head_dim, p.head_dim_v, takes(p));
  if (!tile) return head_dims_refusal(p, kBackwardTiles, takes(p));
  if (std::string why = cuda::lengths_refusal(p); !why.empty()) return Refusal{std::move(why)};
  if (std::string why = cuda::tiles_refusal(p, tile->rows, tile->keys()); !why.empty()) return Refusal{std::move(why)};
  return Launch(p, cuda::DeviceCall<BackwardCall>{BackwardCall(p, *tile)});
}

std::vector<KernelInfo> backward_kernels() {
  using namespace bwd;
  std::vector<KernelInfo> all;
  for (const DataType dtype : cuda::kDataTypes) {
    for (const BackwardTile& tile : kBackwardTiles) add_kernels(dtype, tile, all);
    for (const char* id : {magnitude_instance(dtype).id, sink_instance(dtype).id})
      all.push_back(cuda::named({.id = id, .op = "bwd", .dtype = dtype, .tile = {0, 0}, .threads = kRowThreads}));
  }
  return all;
}

}  // namespace flashmask::sm90
