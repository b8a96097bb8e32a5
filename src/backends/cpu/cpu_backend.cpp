// SPDX-License-Identifier: Apache-2.0
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "backends/cpu/cached_cpu.h"
#include "backends/cpu/cached_kernels.h"
#include "backends/cpu/threads.h"
#include "backends/cpu/tile_kernels.h"
#include "call/backend.h"
#include "call/sink_and_dropout.h"
#include "call/split_forward.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr const char* kNoFloat64 =
    "float64 is taken by backend 'reference' only; cast to float32 or ask for 'reference'";
constexpr const char* kNoDropoutOfSplits = "dropout is not taken beside split_size; leave out one of them";

/// The items that a pass hands out at most: row tiles of query heads, in a backward also key tiles of key heads.
int64_t most_items(const Problem& p) {
  const int64_t of_rows = p.batch * p.heads_q * ceil_div(p.seqlen_q, cpu::kTileRows);
  return p.is_backward ? std::max(of_rows, p.batch * p.heads_kv * ceil_div(p.seqlen_k, cpu::kTileKeys)) : of_rows;
}

/// True if the call adds up keys in splits: a backward has none.
bool has_splits(const Problem& p) { return p.features.split_size != 0 && !p.is_backward; }

/// A call's threads and what its workspace holds, in this order; each part begins on a cache line.
struct CpuCall {
  int64_t delta = 0, own_dq = 0, turn = 0, scratch = 0;
  int threads;

  explicit CpuCall(const Problem& p) : threads(cpu::thread_count(p.threads, most_items(p))) {
    if (p.is_backward) {
      const int64_t row_tiles = p.batch * p.heads_q * cpu::BackwardRows::row_tiles(p);
      // The largest part is a row of dq for each; with room to spare for the others.
      if (!checked_product(row_tiles, cpu::kTileRows * int64_t{sizeof(float)},
                           2 * round_up(p.head_dim, cpu::kMaxWidth)))
        throw_invalid("the backward of q ", describe(p.q), " needs a workspace of more than 2^63 bytes");
      delta = row_tiles * cpu::kTileRows * static_cast<int64_t>(sizeof(float));
      if (!cpu::BackwardRows::sums_in_dq(p)) own_dq = delta * cpu::BackwardRows::dq_stride(p);
      turn = round_up(row_tiles * static_cast<int64_t>(sizeof(int32_t)), kCacheLine);
    }
    scratch = has_splits(p) ? cpu::split_forward_scratch_floats(as_cached(p)) * int64_t{sizeof(float)}
                            : static_cast<int64_t>(cpu::scratch_bytes(p));
  }
  TileShape tile() const { return {cpu::kTileRows, cpu::kTileKeys}; }
  bool reads_plan(const Problem&) const { return true; }
  int64_t workspace_bytes() const { return shared() + threads * scratch; }
  void explain(const Problem& p, Explanation& e) const {
    e.configuration = message(cpu::kTileRows, "x", cpu::kTileKeys, " tiles, ", cpu::simd_target(), ", ", threads,
                              " threads, ", plan_source(p));
    if (has_splits(p)) e.configuration += message(", keys in splits of ", p.features.split_size);
  }
  void run(const Problem& p, std::byte* workspace) const;
  /// Before the threads' own scratch.
  int64_t shared() const { return delta + own_dq + turn; }
};

/// The workspace of a running call.
class Workspace {
 public:
  Workspace(const CpuCall& call, std::byte* base) : call_(call), base_(base) {}
  int threads() const { return call_.threads; }
  cpu::BackwardRows rows() const {
    std::byte* own_dq = base_ + call_.delta;
    return {reinterpret_cast<float*>(base_), reinterpret_cast<int32_t*>(own_dq + call_.own_dq),
            reinterpret_cast<float*>(own_dq)};
  }
  float* scratch(int thread) const { return reinterpret_cast<float*>(base_ + call_.shared() + thread * call_.scratch); }

 private:
  const CpuCall& call_;
  std::byte* base_;
};

/// Calls item(b, h, n-th tile, scratch) for every batch entry, head and tile on the workspace's threads, handing
/// out all heads' first tiles first and to each thread in ascending order, and sums up what the calls return.
template <typename Item>
int64_t for_each_item(int64_t batch, int64_t heads, int64_t tiles, const Workspace& workspace, const Item& item) {
  const int64_t sequences = batch * heads;
  int64_t executed = 0;
#pragma omp parallel for schedule(monotonic : dynamic, 1) num_threads(workspace.threads()) reduction(+ : executed)
  for (int64_t n = 0; n < tiles * sequences; ++n) {
    const int64_t sequence = n % sequences;
    executed += item(sequence / heads, sequence % heads, n / sequences, workspace.scratch(omp_get_thread_num()));
  }
  return executed;
}

/// Row tiles in one item of the forward: fewer than could be where threads would go without work.
int64_t row_tiles_at_once(const Problem& p, int64_t row_tiles, int threads) {
  const int64_t for_all_threads = p.batch * p.heads_q * row_tiles / (int64_t{4} * threads);
  return std::clamp(for_all_threads, int64_t{1}, cpu::kRowTilesAtOnce);
}

void forward(const Problem& p, const Workspace& workspace) {
  const int64_t row_tiles = ceil_div(p.seqlen_q, cpu::kTileRows);
  const int64_t at_once = row_tiles_at_once(p, row_tiles, workspace.threads()), items = ceil_div(row_tiles, at_once);
  const int64_t executed =
      for_each_item(p.batch, p.heads_q, items, workspace, [&](int64_t b, int64_t h, int64_t n, float* scratch) {
        // The last rows first: where masks are causal they have most work. Any order gives the same bits.
        const int64_t first = (items - 1 - n) * at_once;
        return cpu::forward_rows(p, b, h, first, std::min(first + at_once, row_tiles), scratch);
      });
  if (p.executed_tiles) p.executed_tiles->forward += executed;
}

/// The forward with split_size. A cache's products read keys for one row tile at a time.
void split_forward(const Problem& p, const Workspace& workspace) {
  const CachedProblem cached = as_cached(p);
  const int64_t row_tiles = ceil_div(p.seqlen_q, cpu::kTileRows);
  const int64_t executed =
      for_each_item(p.batch, p.heads_q, row_tiles, workspace, [&](int64_t b, int64_t h, int64_t n, float* scratch) {
        return cpu::split_forward_rows(p, cached, b, h, row_tiles - 1 - n, scratch);
      });
  if (p.executed_tiles) p.executed_tiles->forward += executed;
}

/// The sink's score has a gradient as every other, P (dP - delta), but its value, and so its dP, is 0. Summed in one
/// order, so with any threads the same bits.
double dsink_of(const Problem& p, const cpu::BackwardRows& shared, int64_t h) {
  const double sink = sink_of(p, h);
  double sum = 0;
  for (int64_t b = 0; b < p.batch && sink != -std::numeric_limits<double>::infinity(); ++b) {
    for (int64_t i = 0; i < p.seqlen_q; ++i) {
      const double lse = load_element(p.lse, lse_offset(p.lse, b, h, i));
      sum -= std::exp(sink - lse) * shared.delta_of(p, b, h, i / cpu::kTileRows)[i % cpu::kTileRows];
    }
  }
  return sum;
}

void backward(const Problem& p, const Workspace& workspace) {
  const cpu::BackwardRows rows = workspace.rows();
  const int64_t row_tiles = ceil_div(p.seqlen_q, cpu::kTileRows), key_tiles = ceil_div(p.seqlen_k, cpu::kTileKeys);
  for_each_item(p.batch, p.heads_q, row_tiles, workspace, [&](int64_t b, int64_t h, int64_t r, float* scratch) {
    cpu::prepare_backward(p, rows, b, h, r, scratch);
    return 0;
  });
  const int64_t executed = for_each_item(
      p.batch, p.heads_kv, key_tiles, workspace,
      [&](int64_t b, int64_t hk, int64_t c, float* scratch) { return cpu::backward_keys(p, rows, b, hk, c, scratch); });
  for_each_item(p.batch, p.heads_q, row_tiles, workspace, [&](int64_t b, int64_t h, int64_t r, float*) {
    cpu::store_dq(p, rows, b, h, r);
    return 0;
  });
  if (p.dsink.defined()) {
    for_each_item(1, p.heads_q, 1, workspace, [&](int64_t, int64_t h, int64_t, float*) {
      store_dsink(p, h, dsink_of(p, rows, h));
      return 0;
    });
  }
  if (!p.executed_tiles) return;
  p.executed_tiles->backward_rows += executed;
  p.executed_tiles->backward_keys += executed;
}

void CpuCall::run(const Problem& p, std::byte* workspace) const {
  const Workspace own(*this, workspace);
  if (p.is_backward) return backward(p, own);
  has_splits(p) ? split_forward(p, own) : forward(p, own);
}

class CpuBackend final : public Backend {
 public:
  std::string_view name() const override { return "cpu"; }
  bool takes_split_size() const override { return true; }
  BackendInfo info() const override {
    return {"cpu", true, message(cpu::simd_target(), ", ", cpu::default_threads(), " threads")};
  }
  Prepared prepare(const Problem& p) const override {
    if (const char* why = host_refusal(p)) return Refusal{why};
    if (p.dtype == DataType::kFloat64) return Refusal{kNoFloat64};
    if (p.features.split_size != 0 && p.features.dropout.p != 0) return Refusal{kNoDropoutOfSplits};
    return Launch(p, CpuCall(p));
  }
  PreparedCached prepare_cached(const CachedProblem& p) const override {
    if (const char* why = host_refusal(p.device, p.stream)) return Refusal{why};
    if (p.dtype == DataType::kFloat64) return Refusal{kNoFloat64};
    return cpu::cached_launch(p);
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace flashmask
