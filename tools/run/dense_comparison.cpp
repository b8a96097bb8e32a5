// SPDX-License-Identifier: Apache-2.0
#include "run/dense_comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "cli/progress.h"

namespace flashmask::run {
namespace {

constexpr int64_t kMostMaskBytes = int64_t{2} << 30;       ///< for one sequence's dense mask
constexpr int64_t kMaskBytesPerCall = int64_t{256} << 20;  ///< for the dense masks of one call

bool same_bits(const Tensor& a, const Tensor& b, int64_t count) {
  const auto x = a.bytes(count), y = b.bytes(count);
  if (std::memcmp(x.data(), y.data(), x.size()) == 0) return true;
  for (int64_t at = 0; at < count * a.stride(); ++at) {
    if (a.at(at) != b.at(at)) return false;
  }
  return true;
}

/// Number of sequences to compare, with the reason if not all of them.
std::pair<int64_t, std::string> sequences_to_compare(const RunOptions& options, const Packed& packed,
                                                     const MaskedFigures& masked) {
  if (options.dense_seconds == 0) return {0, "left out, as --dense-seconds is 0"};
  if (packed.seqlen > kMostMaskBytes / packed.seqlen) {
    return {0, fmt::format("left out: one sequence's dense mask would take {:.1f} GiB",
                           static_cast<double>(packed.seqlen) * static_cast<double>(packed.seqlen) * 0x1p-30)};
  }
  const double tile =
      masked.seconds.attention() / static_cast<double>(std::max<int64_t>(masked.statistics.live_tiles(), 1));
  const double sequence = tile * static_cast<double>(masked.statistics.tiles) / static_cast<double>(masked.sequences);
  const double fitting = options.dense_seconds / std::max(sequence, 1e-9);
  if (fitting >= static_cast<double>(masked.sequences)) return {masked.sequences, ""};
  const auto sequences = std::max<int64_t>(1, static_cast<int64_t>(fitting));
  if (sequences == masked.sequences) return {sequences, ""};
  return {sequences, fmt::format("the dense run would take about {} on all {} sequences; --dense-seconds is {:g}",
                                 cli::duration_text(sequence * static_cast<double>(masked.sequences)), masked.sequences,
                                 options.dense_seconds)};
}

}  // namespace

bool DenseFigures::equal() const {
  return std::all_of(equality.begin(), equality.end(), [](const Equality& e) { return e.equal; });
}

DenseFigures compare_with_dense(const RunOptions& options, const Packed& packed, const Projections& projections,
                                const MaskedFigures& masked) {
  DenseFigures figures;
  std::tie(figures.sequences, figures.note) = sequences_to_compare(options, packed, masked);
  if (figures.sequences == 0) return figures;

  const int64_t fitting = std::max<int64_t>(1, kMaskBytesPerCall / (packed.seqlen * packed.seqlen));
  const int64_t batch = std::min({masked.batch_size, fitting, figures.sequences});
  Workbench bench(options, packed, projections, batch);
  Outputs sparse = bench.make_outputs(), dense = bench.make_outputs();
  figures.equality = {{"out", true}, {"lse", true}, {"dq", true}, {"dk", true}, {"dv", true}};
  cli::Progress progress("comparison with dense masks", figures.sequences * Workbench::kWorkPerSequence, false);
  for (int64_t first = 0; first < figures.sequences; first += batch) {
    const int64_t count = std::min(batch, figures.sequences - first);
    const Mask mask = packed.mask(first, first + count);
    const std::vector<uint8_t> visible = to_dense(mask);
    bench.load(first, count);
    bench.progress = {};
    figures.masked += bench.run(mask, sparse);
    bench.progress = [&](int64_t parts) { progress.advance(parts); };
    figures.dense += bench.run_dense(visible, dense);
    const std::pair<const Tensor*, const Tensor*> results[] = {{&sparse.out, &dense.out},
                                                               {&sparse.lse, &dense.lse},
                                                               {&sparse.dq, &dense.dq},
                                                               {&sparse.dk, &dense.dk},
                                                               {&sparse.dv, &dense.dv}};
    for (std::size_t r = 0; r < figures.equality.size(); ++r) {
      figures.equality[r].equal = figures.equality[r].equal && same_bits(*results[r].first, *results[r].second, count);
    }
  }
  return figures;
}

}  // namespace flashmask::run
