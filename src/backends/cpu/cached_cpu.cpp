// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu/cached_cpu.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "backends/cpu/cached_kernels.h"
#include "backends/cpu/threads.h"
#include "backends/cpu/tile_kernels.h"

namespace flashmask::cpu {
namespace {

/// Memory for the states of splits that threads work on at once; beyond it a thread folds the splits of its rows one
/// after another, in the same order and so with the same bits.
constexpr int64_t kMostStateBytes = int64_t{64} << 20;

int64_t floats_per_row(const CachedProblem& p) { return SoftmaxState::floats_per_row(p.head_dim_v); }

/// A call's threads and what its workspace holds, in this order: states of splits, and each thread's scratch.
struct CpuCachedCall {
  bool divides_sequences;
  int threads;
  int64_t states = 0, scratch;

  explicit CpuCachedCall(const CachedProblem& p) {
    const auto bytes =
        checked_product(p.total_rows(), p.heads_q, floats_per_row(p), p.splits(), int64_t{sizeof(float)});
    const int64_t tiles = ceil_div(p.total_rows() * p.group_size(), PackedRows::kMost) + p.batch;
    const auto items = checked_product(tiles, p.heads_kv, std::max<int64_t>(p.splits(), 1));
    const int most = thread_count(p.threads, items.value_or(INT64_MAX));
    divides_sequences = most > 1 && bytes && *bytes <= kMostStateBytes && p.splits() > 1;
    threads = divides_sequences ? most : thread_count(p.threads, tiles * p.heads_kv);
    if (divides_sequences) states = round_up(*bytes, 64);
    // Beside the kernel's own, the sum of splits and one of them.
    const int64_t floats = cached_scratch_floats(p) + 2 * PackedRows::kMost * floats_per_row(p);
    scratch = floats * static_cast<int64_t>(sizeof(float));
  }
  int64_t bytes() const { return states + threads * scratch; }
};

/// The requests' tiles of packed rows.
struct Items {
  std::vector<Sequence> sequences;
  std::vector<PackedRows> tiles;

  /// Neighbouring heads of few rows go together, for their keys lie together, as long as `least` threads have work.
  Items(const CachedProblem& p, int64_t least) {
    int64_t alone = 0;
    for (int64_t b = 0; b < p.batch; ++b)
      alone += ceil_div(sequences.emplace_back(p, b).rows().count * p.group_size(), PackedRows::kMost) * p.heads_kv;
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t own = sequences[static_cast<std::size_t>(b)].rows().count * p.group_size();
      for (int64_t first = 0; first < own; first += PackedRows::kMost) {
        const int64_t count = std::min(PackedRows::kMost, own - first);
        const int64_t together =
            std::clamp<int64_t>(std::min(PackedRows::kMost / count, most_together(p, alone, least)), 1, p.heads_kv);
        for (int64_t hk = 0; hk < p.heads_kv; hk += together)
          tiles.push_back(
              {b, hk, std::min(together, p.heads_kv - hk), first, count, p.group_size(), hk * p.group_size()});
      }
    }
  }
  const Sequence& sequence(const PackedRows& rows) const { return sequences[static_cast<std::size_t>(rows.b)]; }
  int64_t splits(const CachedProblem& p, const PackedRows& rows) const {
    return ceil_div(sequence(rows).keys(), p.split_size);
  }

 private:
  static int64_t most_together(const CachedProblem& p, int64_t alone, int64_t least) {
    return std::max<int64_t>(alone * std::max<int64_t>(p.splits(), 1) / std::max<int64_t>(least, 1), 1);
  }
};

class Run {
 public:
  Run(const CachedProblem& p, std::byte* workspace)
      : p_(p), call_(p), items_(p, call_.threads > 1 ? 2 * call_.threads : 0), workspace_(workspace) {}

  void all() const {
    if (call_.divides_sequences) {
      for_each(static_cast<int64_t>(items_.tiles.size()) * p_.splits(), [&](int64_t n, float* scratch) {
        const PackedRows& rows = items_.tiles[static_cast<std::size_t>(n / p_.splits())];
        if (const int64_t split = n % p_.splits(); split < items_.splits(p_, rows))
          run_split(rows, split, state_of(rows, split), scratch);
      });
    }
    for_each(static_cast<int64_t>(items_.tiles.size()),
             [&](int64_t n, float* scratch) { finish(items_.tiles[static_cast<std::size_t>(n)], scratch); });
  }

 private:
  template <typename Item>
  void for_each(int64_t count, const Item& item) const {
#pragma omp parallel for schedule(dynamic, 1) num_threads(call_.threads)
    for (int64_t n = 0; n < count; ++n)
      item(n, reinterpret_cast<float*>(workspace_ + call_.states + omp_get_thread_num() * call_.scratch));
  }

  void run_split(const PackedRows& rows, int64_t split, const SoftmaxState& state, float* scratch) const {
    const Sequence& sequence = items_.sequence(rows);
    const int64_t begin = split * p_.split_size;
    cached_split(p_, sequence, rows, begin, std::min(begin + p_.split_size, sequence.keys()), state, scratch);
  }

  /// The state that a thread of the first pass left.
  SoftmaxState state_of(const PackedRows& rows, int64_t split) const {
    const int64_t before = p_.is_packed() ? items_.sequence(rows).rows().begin : rows.b * p_.rows;
    const int64_t row = before * p_.heads_q + rows.first * p_.heads_kv + rows.hk * rows.count;
    float* const at =
        reinterpret_cast<float*>(workspace_) + (split * p_.total_rows() * p_.heads_q + row) * floats_per_row(p_);
    return SoftmaxState::in(at, rows.total(), p_.head_dim_v);
  }

  void finish(const PackedRows& rows, float* scratch) const {
    float* const own = scratch + cached_scratch_floats(p_);
    const int64_t count = rows.total();
    const SoftmaxState sum = SoftmaxState::in(own, count, p_.head_dim_v),
                       part = SoftmaxState::in(own + PackedRows::kMost * floats_per_row(p_), count, p_.head_dim_v);
    sum.clear(count);
    for (int64_t split = 0; split < items_.splits(p_, rows); ++split) {
      if (!call_.divides_sequences) run_split(rows, split, part, scratch);
      fold_state(sum, call_.divides_sequences ? state_of(rows, split) : part, count, p_.head_dim_v);
    }
    store_rows(p_, items_.sequence(rows), rows, sum);
  }

  const CachedProblem& p_;
  const CpuCachedCall call_;
  const Items items_;
  std::byte* workspace_;
};

void explain(const CachedProblem& p, CachedExplanation& e) {
  const CpuCachedCall call(p);
  e.kernel =
      message(PackedRows::kMost, " packed rows x ", 64, " keys, ", simd_target(), ", ", call.threads, " threads");
  e.splits =
      message(p.split_size, " keys each, ", call.divides_sequences ? "divided among threads" : "one after another",
              ", added up in ascending order");
}

}  // namespace

CachedLaunch cached_launch(const CachedProblem& p) {
  return {CpuCachedCall(p).bytes(), explain,
          [](const CachedProblem& problem, std::byte* workspace) { Run(problem, workspace).all(); }};
}

}  // namespace flashmask::cpu
