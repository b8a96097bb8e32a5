// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/cache/split_forward.h"

#include <string>
#include <utility>

#include "backends/cuda/cache/work.h"
#include "call/split_forward.h"
#include "common/message.h"

namespace flashmask::cuda {
namespace {

/// The vectors of a mask that are there, in the order of a cache's: LTS, then LTE, or UTE, or LTE, UTS and UTE.
struct Vectors {
  const int32_t* first;
  int64_t step;  ///< elements from one to the next
  int count;
};

/// True if the mask's vectors are those of one tensor; then `found` has them.
bool find_vectors(const MaskView& m, Vectors& found) {
  found = {m.lts, 0, 0};
  if (!m.lts) return !m.lte && !m.uts && !m.ute;
  const int32_t* const all[] = {m.lts, m.lte, m.uts, m.ute};
  const int32_t* before = nullptr;
  for (const int32_t* vector : all) {
    if (!vector) continue;
    if (found.count == 1) found.step = vector - before;
    if (found.count > 1 && vector - before != found.step) return false;
    before = vector;
    ++found.count;
  }
  return found.count == 1 || (found.count == 2 && !m.uts) || found.count == 4;
}

TensorView bounds_of(const MaskView& m, const Vectors& vectors) {
  TensorView t = TensorView::contiguous(vectors.first, DataType::kInt32,
                                        {m.bounds_batch, m.bounds_heads, m.seqlen_k, vectors.count});
  t.stride[0] = m.bounds_heads * m.seqlen_k * m.bounds_stride;
  t.stride[1] = m.seqlen_k * m.bounds_stride;
  t.stride[2] = m.bounds_stride;
  t.stride[3] = vectors.step;
  return t;
}

/// Positions [own batch, length], by batch entry.
TensorView positions_of(const int32_t* data, int64_t own_batch, int64_t batch, int64_t length) {
  TensorView t = TensorView::contiguous(data, DataType::kInt32, {batch, length});
  if (own_batch == 1) t.stride[0] = 0;
  return t;
}

std::string heads_refusal(const Problem& p, const char* name, int64_t heads) {
  if (heads == 1 || heads == p.heads_kv) return "";
  return message("split_size is ", p.features.split_size, " and ", name, " has ", heads, " heads; it must have 1 or ",
                 p.heads_kv, ", those of keys");
}

/// Why a call over a cache cannot have the forward's mask; empty if it can.
std::string mask_refusal(const Problem& p) {
  const MaskView& m = p.mask;
  const auto refused = [&](const auto&... why) {
    return message("split_size is ", p.features.split_size, " and ", why...);
  };
  if (p.features.dropout.p != 0) return refused("dropout ", p.features.dropout.p, "; leave out one of them");
  if (p.features.partial_out) return refused("partial_out is set; leave out one of them");
  if (p.executed_tiles) return refused("executed_tiles is set; on a GPU tiles are not counted");
  if (p.seqlen_q != p.seqlen_k)
    return refused("q has ", p.seqlen_q, " rows and k ", p.seqlen_k, "; a GPU's have to be as many");
  if (m.q_offset != 0) return refused("q_offset ", m.q_offset, "; row 0 has to be that of key 0 on a GPU");
  if (p.dense.defined()) return refused("the mask is dense; give one of row intervals");
  if (m.column_ptr) return refused("the mask has interval lists; give one of at most two intervals in a column");
  if (Vectors vectors; !find_vectors(m, vectors))
    return refused("the mask's vectors are not those of one tensor [.., 1, 2 or 4], LTS first");
  if (std::string why = heads_refusal(p, "the mask", m.bounds_heads); !why.empty()) return why;
  return heads_refusal(p, "block_mask", m.block_heads);
}

/// The forward as a call over a cache, its mask included.
CachedProblem cached_problem(const Problem& p) {
  const MaskView& m = p.mask;
  CachedProblem c = as_cached(p);
  c.batch_invariant = true;
  if (m.diagonal_lo != INT32_MIN) c.diagonal_lo = m.diagonal_lo;
  if (m.diagonal_hi != INT32_MAX) c.diagonal_hi = m.diagonal_hi;
  Vectors vectors;
  find_vectors(m, vectors);
  c.mask.causal = !m.ute;  // says what the vectors are, as the diagonals have the band
  if (vectors.count > 0) c.mask.bounds = bounds_of(m, vectors);
  if (m.block_mask) {
    const auto blocks = [](int64_t length) { return (length + kBlockMaskSize - 1) / kBlockMaskSize; };
    c.mask.block_mask = TensorView::contiguous(m.block_mask, DataType::kUInt8,
                                               {m.block_batch, m.block_heads, blocks(m.seqlen_q), blocks(m.seqlen_k)});
  }
  if (m.has_positions) {
    c.mask.q_pos = positions_of(m.q_pos, m.q_pos_batch, p.batch, m.seqlen_q);
    c.mask.k_pos = positions_of(m.k_pos, m.k_pos_batch, p.batch, m.seqlen_k);
  }
  c.view = view_of(c);
  return c;
}

struct SplitForward {
  const char* arch;
  CachedLaunch launch;

  TileShape tile() const { return {kTallPackedRows, kBlockKeys}; }
  bool reads_plan(const Problem&) const { return false; }
  int64_t workspace_bytes() const { return launch.workspace_bytes; }
  void explain(const Problem& p, Explanation& e) const {
    CachedExplanation cached;
    launch.explain(cached_problem(p), cached);
    e.arch = arch;
    e.instance = cached.kernel;
    e.kernels = {cached.kernel};
    e.configuration = message("kernels over caches, keys in splits of ", p.features.split_size, ", ", cached.splits);
  }
  void run(const Problem& p, std::byte* workspace) const { launch.run(cached_problem(p), workspace); }
};

}  // namespace

Prepared prepare_split_forward(const KernelSet& set, const Problem& p) {
  if (!set.has_equal_bits)
    return Refusal{message("split_size is ", p.features.split_size, "; kernels '", set.name,
                           "' do not take it: a row's bits there depend on how many rows a call has")};
  if (std::string why = mask_refusal(p); !why.empty()) return Refusal{std::move(why)};
  PreparedCached prepared = set.prepare_cached(cached_problem(p));
  if (auto* refusal = std::get_if<Refusal>(&prepared)) return std::move(*refusal);
  return Launch(p, SplitForward{set.name, std::get<CachedLaunch>(prepared)});
}

}  // namespace flashmask::cuda
