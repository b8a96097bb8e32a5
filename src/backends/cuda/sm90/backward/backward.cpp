// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/backward/backward.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <span>
#include <utility>

#include "backends/cuda/common/kernel_info.h"
#include "backends/cuda/common/sequence.h"
#include "backends/cuda/common/tensor_map.h"
#include "backends/cuda/sm90/backward/instance.h"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/row_params.h"
#include "backends/cuda/sm90/common/host.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask::sm90 {
namespace grad {
namespace {

/// What the sequences that are worked on together read and add up for their rows should stay in this much of the L2
/// cache.
constexpr int64_t kSectionBytes = int64_t{16} << 20;
/// Deterministic mode under a sparse mask, see SectionSize: the most sequences, and how many tiles a multiprocessor
/// should have for each turn of a chain (a turn takes about as long as one and a half; the rest is because turns and
/// work do not come evenly).
constexpr int64_t kSparseSequences = 16, kTilesPerTurn = 4;
constexpr int64_t kMostItems = int64_t{1} << 30;
constexpr int64_t kAlignment = 256;

template <DataType dtype, std::size_t... row>
auto instances_of(std::index_sequence<row...>) {
  constexpr auto& tiles = kBackwardTiles;
  return std::array{backward_instance<dtype, tiles[row].head_dim, tiles[row].head_dim_v, tiles[row].consumers>()...};
}

/// The instances of an element type, a row of kBackwardTiles each; none if there are no kernels of it.
std::span<const BackwardInstance> instances(DataType dtype) {
  constexpr auto rows = std::make_index_sequence<std::size(kBackwardTiles)>();
  static const auto bf16 = instances_of<DataType::kBFloat16>(rows), f16 = instances_of<DataType::kFloat16>(rows);
  if (dtype == DataType::kBFloat16) return bf16;
  if (dtype == DataType::kFloat16) return f16;
  return {};
}

const BackwardInstance* find_instance(const Problem& p) {
  for (const BackwardInstance& i : instances(p.dtype)) {
    if (i.tile.head_dim == p.head_dim && i.tile.head_dim_v == p.head_dim_v) return &i;
  }
  return nullptr;
}

const BackwardInstance& instance_for(const Problem& p) { return *find_instance(p); }
const BackwardTile& tile_for(const Problem& p) { return instance_for(p).tile; }

int64_t row_tiles(const Problem& p) { return ceil_div(p.seqlen_q, tile_for(p).rows); }
int64_t key_tiles(const Problem& p) { return ceil_div(p.seqlen_k, tile_for(p).keys()); }
int64_t all_row_tiles(const Problem& p) { return p.batch * p.heads_q * row_tiles(p); }
int64_t all_key_tiles(const Problem& p) { return p.batch * p.heads_kv * key_tiles(p); }

/// How many items share a key head's query heads in a key tile: as few as give each multiprocessor an item. Of the
/// device and the shapes alone, so that neither the workspace nor the bits depend on more.
int64_t splits(const Problem& p) {
  const int64_t sms = multiprocessors(p), group = p.group_size();
  int64_t n = 1;
  while (n < group && (group % n != 0 || all_key_tiles(p) * n < sms)) ++n;
  return n;
}

std::string id_of_preprocess(const BackwardInstance& i) { return message(i.id, ".preprocess"); }
std::string id_of_split(const BackwardInstance& i) { return message(i.id, ".split"); }
std::string id_of_convert_dq(const BackwardInstance& i) { return message(i.id, ".convert_dq"); }
std::string id_of_reduce_dkv(const BackwardInstance& i) { return message(i.id, ".reduce_dkv"); }

/// What a call launches.
struct Launches {
  int64_t row_blocks, key_tiles, items;
  bool split;     ///< items share a key head's query heads: their parts of dk and dv are added up last
  bool converts;  ///< a single key tile gives dq itself

  explicit Launches(const Problem& p)
      : row_blocks(all_row_tiles(p)),
        key_tiles(all_key_tiles(p)),
        items(key_tiles * splits(p)),
        split(items > key_tiles),
        converts(grad::key_tiles(p) > 1) {}
};

/// Where everything lies in the workspace.
struct Layout {
  int64_t biases = 0, sums = 0, key_parts = 0, progress = 0, next = 0, section = 0, bytes = 0;

  explicit Layout(const Problem& p) {
    const int64_t tiles = all_row_tiles(p), rows = tiles * tile_for(p).rows;
    biases = add(rows * static_cast<int64_t>(sizeof(RowBias)));
    sums = add(rows * p.head_dim * 4);
    if (const int64_t n = splits(p); n > 1)
      key_parts = add(all_key_tiles(p) * n * 2 * tile_for(p).keys() * p.head_dim * 4);
    progress = add(tiles * 4);
    next = add(4);
    section = add(4);
  }

 private:
  int64_t add(int64_t size) {
    const int64_t at = bytes;
    bytes += round_up(size, kAlignment);
    return at;
  }
};

template <typename T>
T* at(std::byte* workspace, int64_t offset) {
  return reinterpret_cast<T*>(workspace + offset);
}

Rows rows_of(const TensorView& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2]}; }
/// Of lse or dlse, [batch, heads, rows].
Rows rows_of_vector(const TensorView& t) { return {t.data, t.stride[0], t.stride[2], t.stride[1]}; }

/// A dense mask has no plan: all tiles are live, and there are no bits that say so.
PlanBits bits_of_dense_mask(const Problem& p) {
  PlanBits bits{};
  bits.words_per_key = static_cast<int32_t>(ceil_div(row_tiles(p) * tile_for(p).rows, 64 * 32));
  bits.sharing = {1, 1};
  return bits;
}

PlanBits plan_bits(const Problem& p) {
  if (p.dense.defined()) return bits_of_dense_mask(p);
  const PlanLayout& layout = p.plan.layout();
  const std::byte* base = p.plan.data();
  const MaskView& mask = p.mask.view();
  return {.key_live = reinterpret_cast<const uint32_t*>(base + layout.key_live_bits),
          .key_full = reinterpret_cast<const uint32_t*>(base + layout.key_full_bits),
          .row_live = reinterpret_cast<const uint32_t*>(base + layout.row_live_bits),
          .key_order = reinterpret_cast<const int32_t*>(base + layout.key_order),
          .words_per_key = static_cast<int32_t>(2 * layout.words_per_key),
          .words_per_row = static_cast<int32_t>(2 * layout.words_per_row),
          .row_granules = static_cast<int32_t>(layout.row_granules),
          .mask_heads = static_cast<uint32_t>(mask.heads()),
          .sharing = sharing(p, mask.batch(), mask.heads())};
}

/// What the query heads of a head group read (q, dout) and add up (dq).
int64_t section_bytes_of_sequence(const Problem& p) {
  const int64_t of_row = p.head_dim * static_cast<int64_t>(2 * element_size(p.dtype) + sizeof(float));
  return std::max<int64_t>(1, p.group_size() / splits(p) * p.seqlen_q * of_row);
}

/// Head groups of batch entries that run together, so that what they read and add up stays at hand.
int64_t sequences_per_section(const Problem& p) {
  return std::clamp<int64_t>(kSectionBytes / section_bytes_of_sequence(p), 1, p.batch * p.heads_kv * splits(p));
}

/// Chosen on the device if the call is deterministic and has a plan.
SectionSize section_size(const Problem& p, const Layout& layout, std::byte* workspace) {
  if (!p.deterministic || p.dense.defined() || p.seqlen_q == 0 || p.seqlen_k == 0) return {};
  const PlanLayout& plan = p.plan.layout();
  const int64_t dense = sequences_per_section(p), all = p.batch * p.heads_kv * splits(p);
  return {.key_counts = reinterpret_cast<const int32_t*>(p.plan.data() + plan.key_counts),
          .row_counts = reinterpret_cast<const int32_t*>(p.plan.data() + plan.row_counts),
          .granules = static_cast<float>(plan.row_granules * plan.key_blocks),
          .granules_per_tile = static_cast<float>(tile_for(p).rows / kGranuleRows),
          .tiles_per_turn = static_cast<float>(kTilesPerTurn * multiprocessors(p)),
          .dense = static_cast<uint32_t>(dense),
          .most = static_cast<uint32_t>(std::min(all, kSparseSequences)),
          .result = at<uint32_t>(workspace, layout.section)};
}

/// softmax_scale as the scores take it. A row's bias is divided by it, so it is not 0: with the least that it may be,
/// all scores are as good as 0, too.
float score_scale(const Problem& p) {
  constexpr float kLeast = 1e-30f;
  const auto scale = static_cast<float>(p.softmax_scale);
  return std::abs(scale) < kLeast ? std::copysign(kLeast, scale) : scale;
}

RowParams make_row_params(const Problem& p, const Layout& layout, std::byte* workspace) {
  return {.out = rows_of(p.out),
          .dout = rows_of(p.dout),
          .lse = rows_of_vector(p.lse),
          .dlse = p.dlse.defined() ? rows_of_vector(p.dlse) : Rows{},
          .biases = at<RowBias>(workspace, layout.biases),
          .row_gradients = {.out = rows_of(p.dq),
                            .sums = at<float>(workspace, layout.sums),
                            .progress = at<uint32_t>(workspace, layout.progress),
                            .in_order = p.deterministic},
          .plan = plan_bits(p),
          .dense = p.dense.defined(),
          .next = at<uint32_t>(workspace, layout.next),
          .section = section_size(p, layout, workspace),
          .seqlen_q = static_cast<int32_t>(p.seqlen_q),
          .row_tiles = static_cast<uint32_t>(row_tiles(p)),
          .key_tiles = static_cast<uint32_t>(key_tiles(p)),
          .heads = static_cast<uint32_t>(p.heads_q),
          .scale = static_cast<float>(p.softmax_scale),
          .score_scale = score_scale(p)};
}

KeyParams make_key_params(const Problem& p, const Layout& layout, std::byte* workspace) {
  return {.dk = rows_of(p.dk),
          .dv = rows_of(p.dv),
          .parts = at<float>(workspace, layout.key_parts),
          .heads_kv = static_cast<uint32_t>(p.heads_kv),
          .splits = static_cast<uint32_t>(splits(p)),
          .key_tiles = static_cast<uint32_t>(key_tiles(p)),
          .seqlen_k = static_cast<int32_t>(p.seqlen_k),
          .scale = static_cast<float>(p.softmax_scale)};
}

BackwardParams make_params(const Problem& p, const RowParams& rows, float* key_parts, unsigned long long* executed) {
  const BackwardTile& tile = tile_for(p);
  const int blocks = tile.head_dim / 64;
  const int64_t head_groups = p.heads_kv * splits(p);
  constexpr float kLog2E = 1.44269504f;
  BackwardParams params{};
  // Without rows nothing of them is loaded, but the maps have to be valid.
  params.q = cuda::tensor_map(p.seqlen_q > 0 ? p.q : p.k, tile.rows, blocks, "q");
  params.dout = cuda::tensor_map(p.seqlen_q > 0 ? p.dout : p.k, tile.rows, blocks, "dout");
  params.dq = cuda::tensor_map(p.seqlen_q > 0 ? p.dq : p.dk, 16, 1, "dq");
  params.k = cuda::tensor_map(p.k, tile.keys(), blocks, "k");
  params.v = cuda::tensor_map(p.v, tile.keys(), blocks, "v");
  params.dk = cuda::tensor_map(p.dk, 16, blocks, "dk");
  params.dv = cuda::tensor_map(p.dv, 16, blocks, "dv");
  params.biases = rows.biases;
  params.row_gradients = rows.row_gradients;
  params.seqlen_q = static_cast<int32_t>(p.seqlen_q);
  params.seqlen_k = static_cast<int32_t>(p.seqlen_k);
  params.row_tiles = static_cast<int32_t>(row_tiles(p));
  params.heads_q = static_cast<uint32_t>(p.heads_q);
  params.head_groups = static_cast<uint32_t>(head_groups);
  params.query_heads_per_group = static_cast<uint32_t>(p.heads_q / head_groups);
  params.splits = static_cast<uint32_t>(splits(p));
  params.key_parts = key_parts;
  params.scale = rows.scale;
  params.scale_log2 = rows.score_scale * kLog2E;
  params.plan = rows.plan;
  params.mask = mask_columns(p);
  params.dense = dense_mask(p);
  params.schedule = {.items = static_cast<uint32_t>(all_key_tiles(p) * splits(p)),
                     .sequences = static_cast<uint32_t>(p.batch * head_groups),
                     .sequences_per_section = static_cast<uint32_t>(sequences_per_section(p)),
                     .tiles = static_cast<uint32_t>(key_tiles(p)),
                     .next = rows.next};
  params.sequences_per_section = rows.section.result;
  params.executed = executed;
  return params;
}

}  // namespace
}  // namespace grad

std::string backward_refusal(const Problem& p) {
  using namespace grad;
  if (std::string why = head_dims_refusal(p, kBackwardTiles); !why.empty()) return why;
  if (std::string why = lengths_refusal(p); !why.empty()) return why;
  const BackwardTile& tile = tile_for(p);
  struct Count {
    const char* what;
    int64_t tile, tiles;
  };
  for (const Count& c : {Count{"batch * heads_q * seqlen_q / ", tile.rows, all_row_tiles(p)},
                         Count{"batch * heads_kv * seqlen_k / ", tile.keys(), all_key_tiles(p)},
                         Count{"batch * heads_q * seqlen_k / ", tile.keys(), all_key_tiles(p) * p.group_size()}}) {
    if (c.tiles > kMostItems)
      return message(c.what, c.tile, " is about ", c.tiles, "; the backward takes at most ", kMostItems);
  }
  return "";
}

void describe_backward(const Problem& p, Explanation& e) {
  using namespace grad;
  const BackwardInstance& instance = instance_for(p);
  const Launches launches(p);
  e.tile = {instance.tile.rows, instance.tile.keys()};
  e.instance = launches.split ? id_of_split(instance) : instance.id;
  if (launches.row_blocks > 0) e.kernels.push_back(id_of_preprocess(instance));
  if (launches.items > 0) e.kernels.push_back(e.instance);
  if (launches.converts && launches.row_blocks > 0) e.kernels.push_back(id_of_convert_dq(instance));
  if (launches.split) e.kernels.push_back(id_of_reduce_dkv(instance));
}

std::vector<KernelInfo> backward_kernels() {
  using namespace grad;
  std::vector<KernelInfo> all;
  for (const DataType dtype : kDataTypes) {
    for (const BackwardInstance& i : instances(dtype)) {
      const auto add = [&](std::string id, TileShape tile, int threads, int shared_bytes) {
        all.push_back(cuda::named({.id = std::move(id),
                                   .op = "bwd",
                                   .dtype = dtype,
                                   .head_dim = i.tile.head_dim,
                                   .head_dim_v = i.tile.head_dim_v,
                                   .tile = tile,
                                   .threads = threads,
                                   .shared_bytes = shared_bytes}));
      };
      const TileShape tile{i.tile.rows, i.tile.keys()}, rows{tile.rows, 0}, keys{0, tile.keys};
      add(id_of_preprocess(i), rows, kRowThreads, 0);
      add(i.id, tile, i.threads, i.shared_bytes);
      add(id_of_split(i), tile, i.threads, i.shared_bytes);
      add(id_of_convert_dq(i), rows, kRowThreads, 0);
      add(id_of_reduce_dkv(i), keys, kRowThreads, 0);
    }
  }
  return all;
}

std::size_t backward_workspace(const Problem& p) { return static_cast<std::size_t>(grad::Layout(p).bytes); }

void backward(const Problem& p, std::byte* workspace, unsigned long long* executed) {
  using namespace grad;
  const BackwardInstance& instance = instance_for(p);
  const Layout layout(p);
  RowParams rows = make_row_params(p, layout, workspace);
  void* row_arguments[] = {&rows};
  const auto stream = static_cast<cudaStream_t>(p.stream);
  cuda::Sequence sequence(stream, cuda::Sequence::kOverlapPrevious);
  const Launches launches(p);
  const int64_t blocks = launches.row_blocks;
  // Without rows there is no block to clear the counter.
  if (blocks == 0)
    cuda::check(cudaMemsetAsync(rows.next, 0, sizeof(*rows.next), stream), "cudaMemsetAsync of the item counter");
  sequence.launch("launch of the backward's preprocessing", instance.preprocess, blocks, kRowThreads, 0, row_arguments);
  if (launches.items > 0) {
    const void* kernel = launches.split ? instance.split : instance.kernel;
    allow_shared_memory(kernel, instance.shared_bytes, p.device.index);
    BackwardParams params = make_params(p, rows, at<float>(workspace, layout.key_parts), executed);
    void* arguments[] = {&params};
    sequence.launch("launch of the backward kernel", kernel, std::min(launches.items, most_ctas(p)), instance.threads,
                    instance.shared_bytes, arguments);
  }
  if (launches.converts)
    sequence.launch("launch of the backward's conversion", instance.convert_dq, blocks, kRowThreads, 0, row_arguments);
  if (!launches.split) return;
  KeyParams keys = make_key_params(p, layout, workspace);
  void* key_arguments[] = {&keys};
  sequence.launch("launch of the backward's sum over query heads", instance.reduce_dkv, 2 * launches.key_tiles,
                  kRowThreads, 0, key_arguments);
}

}  // namespace flashmask::sm90
