// SPDX-License-Identifier: Apache-2.0
#include "verify/covering_cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>

#include "families/families.h"
#include "flashmask/attention.h"
#include "flashmask/status.h"
#include "verify/features.h"
#include "verify/random.h"

namespace flashmask::verify {
namespace {

constexpr uint64_t kSeed = 20241002;
constexpr std::size_t kAtLeast = 1536;
/// Multiply-adds of the forward's products that a case may take, unless two values cannot meet in less.
constexpr int64_t kBudget = 32'000'000;
/// Rows tried for every row of the list.
constexpr int kCandidates = 6;

constexpr std::array<std::pair<int64_t, int64_t>, 14> kLengths{{{1, 128},
                                                                {64, 192},
                                                                {128, 127},
                                                                {127, 128},
                                                                {239, 203},
                                                                {799, 211},
                                                                {113, 211},
                                                                {300, 300},
                                                                {1023, 1024},
                                                                {1024, 1023},
                                                                {2048, 2048},
                                                                {0, 0},
                                                                {0, 64},
                                                                {64, 0}}};
constexpr std::array<std::pair<int64_t, int64_t>, 6> kHeads{{{1, 1}, {4, 1}, {4, 4}, {6, 2}, {14, 1}, {16, 4}}};
/// head_dim, and the head_dim_v other than it.
constexpr std::array<std::pair<int64_t, int64_t>, 17> kHeadDims{{{8, 16},
                                                                 {16, 8},
                                                                 {24, 40},
                                                                 {32, 64},
                                                                 {40, 24},
                                                                 {64, 32},
                                                                 {72, 128},
                                                                 {80, 96},
                                                                 {96, 111},
                                                                 {111, 64},
                                                                 {112, 192},
                                                                 {128, 64},
                                                                 {136, 80},
                                                                 {160, 128},
                                                                 {192, 128},
                                                                 {224, 72},
                                                                 {256, 128}}};

enum Dimension : std::size_t {
  kBatch,
  kLength,
  kHead,
  kHeadDim,
  kHeadDimV,
  kFamily,
  kMaskHeads,
  kMaskBatch,
  kBlockMask,
  kDtype,
  kLayout,
  kDlse,
  kDout,
  kScale,
  kPlan,
  kFeatures,
  kDimensions
};

void require_known(int64_t head_dim) {
  std::string known;
  for (const auto& [dim, other] : kHeadDims) {
    if (dim == head_dim) return;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", dim);
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("head dim {} is not in the covering list; its head dims are {}", head_dim, known));
}

/// One value's index for each dimension.
using Row = std::array<int, kDimensions>;
constexpr int kUnset = -1;

/// The values of the dimensions that a caller may restrict.
struct Values {
  std::vector<std::pair<int64_t, int64_t>> head_dims;
  std::vector<DataType> dtypes;
  std::vector<Layout> layouts;
  std::vector<CaseFeatures> features;

  explicit Values(const CoveringValues& only)
      : dtypes(only.dtypes),
        layouts(only.layouts),
        features(only.features.empty() ? covering_combinations() : only.features) {
    for (const int64_t dim : only.head_dims) require_known(dim);
    const auto taken = [&](int64_t dim) {
      return only.head_dims.empty() ||
             std::find(only.head_dims.begin(), only.head_dims.end(), dim) != only.head_dims.end();
    };
    for (const auto& [dim, other] : kHeadDims) {
      if (taken(dim)) head_dims.emplace_back(dim, taken(other) ? other : dim);
    }
    if (dtypes.empty()) dtypes = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16};
    if (layouts.empty()) layouts = {Layout::kBshd, Layout::kBhsd, Layout::kPadded};
  }

  std::array<int, kDimensions> counts() const {
    std::array<int, kDimensions> counts{};
    counts.fill(2);
    counts[kBatch] = 9;
    counts[kLength] = kLengths.size();
    counts[kHead] = kHeads.size();
    counts[kHeadDim] = static_cast<int>(head_dims.size());
    counts[kFamily] = static_cast<int>(families().size()) + 1;
    counts[kMaskHeads] = counts[kBlockMask] = 3;
    counts[kDtype] = static_cast<int>(dtypes.size());
    counts[kLayout] = static_cast<int>(layouts.size());
    counts[kFeatures] = static_cast<int>(features.size());
    return counts;
  }
};

Case to_case(const Row& row, uint64_t seed, const Values& values) {
  const auto at = [&](Dimension d) { return static_cast<std::size_t>(std::max(row[d], 0)); };
  Case c;
  c.seed = seed;
  c.batch = static_cast<int64_t>(at(kBatch)) + 1;
  std::tie(c.seqlen_q, c.seqlen_k) = kLengths[at(kLength)];
  std::tie(c.heads_q, c.heads_kv) = kHeads[at(kHead)];
  c.head_dim = values.head_dims[at(kHeadDim)].first;
  c.head_dim_v = at(kHeadDimV) ? values.head_dims[at(kHeadDim)].second : c.head_dim;
  c.family = at(kFamily) < families().size() ? families()[at(kFamily)].name : kRandomMatrix;
  c.mask_heads = static_cast<MaskHeads>(at(kMaskHeads));
  c.mask_per_batch = at(kMaskBatch) != 0;
  c.block_mask = static_cast<BlockMask>(at(kBlockMask));
  c.dtype = values.dtypes[at(kDtype)];
  c.layout = values.layouts[at(kLayout)];
  c.dlse = at(kDlse) != 0;
  c.expanded_dout = at(kDout) != 0;
  if (at(kScale)) c.given_scale = 0.7 / std::sqrt(static_cast<double>(c.head_dim));
  c.ready_plan = at(kPlan) != 0;
  c.features = values.features[at(kFeatures)];
  return c;
}

/// The least that a row with these values can cost: dimensions that are not set cost nothing more (the first
/// batch, heads and head dim are the cheapest), and unset lengths nothing at all.
int64_t least_cost(const Row& row, const Values& values) {
  if (row[kLength] != kUnset) return to_case(row, 0, values).cost();
  Row shortest = row;
  shortest[kLength] = 0;
  return to_case(shortest, 0, values).cost();
}

/// True if a length is zero.
bool is_empty(const Row& row) {
  if (row[kLength] == kUnset) return false;
  const auto [seqlen_q, seqlen_k] = kLengths[static_cast<std::size_t>(row[kLength])];
  return seqlen_q == 0 || seqlen_k == 0;
}

template <typename Values>
void shuffle(Random& random, Values& values) {
  for (std::size_t n = values.size(); n > 1; --n)
    std::swap(values[n - 1], values[static_cast<std::size_t>(random.integer(0, static_cast<int64_t>(n) - 1))]);
}

/// Pairs of values that have met.
class Pairs {
 public:
  explicit Pairs(const std::array<int, kDimensions>& counts) {
    std::exclusive_scan(counts.begin(), counts.end(), first_.begin(), 0);
    values_ = first_.back() + counts.back();
    open_.assign(static_cast<std::size_t>(values_ * values_), false);
  }

  void open(Dimension d, int v, Dimension e, int w) {
    open_[index(d, v, e, w)] = true;
    waiting_.push_back({d, v, e, w});
  }
  bool is_open(std::size_t d, int v, std::size_t e, int w) const { return open_[index(d, v, e, w)]; }

  struct Pair {
    std::size_t d;
    int v;
    std::size_t e;
    int w;
  };
  /// The next pair that has not met; false if all have.
  bool next(Pair& pair) {
    while (at_ < waiting_.size() && !is_open(waiting_[at_].d, waiting_[at_].v, waiting_[at_].e, waiting_[at_].w)) ++at_;
    if (at_ == waiting_.size()) return false;
    pair = waiting_[at_];
    return true;
  }
  /// Draws the order in which next() gives the pairs.
  void mix_order(Random& random) { shuffle(random, waiting_); }

  /// Pairs that value v of dimension d would close with the values of the row that are set.
  int gain(const Row& row, std::size_t d, int v) const {
    int pairs = 0;
    for (std::size_t e = 0; e < kDimensions; ++e) pairs += e != d && row[e] != kUnset && is_open(d, v, e, row[e]);
    return pairs;
  }
  int gain(const Row& row) const {
    int pairs = 0;
    for (std::size_t d = 0; d < kDimensions; ++d) pairs += row[d] == kUnset ? 0 : gain(row, d, row[d]);
    return pairs / 2;
  }
  void close(const Row& row) {
    for (std::size_t d = 0; d < kDimensions; ++d) {
      for (std::size_t e = d + 1; e < kDimensions; ++e) {
        if (row[d] != kUnset && row[e] != kUnset) open_[index(d, row[d], e, row[e])] = false;
      }
    }
  }

 private:
  std::size_t index(std::size_t d, int v, std::size_t e, int w) const {
    if (d > e) return index(e, w, d, v);
    return static_cast<std::size_t>((first_[d] + v) * values_ + first_[e] + w);
  }

  std::array<int, kDimensions> first_{};
  int values_ = 0;
  std::vector<bool> open_;
  std::vector<Pair> waiting_;
  std::size_t at_ = 0;
};

class CoveringList {
 public:
  explicit CoveringList(const CoveringValues& only) : values_(only) {}

  std::vector<Case> make() {
    add_rows(all_pairs(/*again=*/false), SIZE_MAX);
    // Again and again in other combinations, but for values that cost much or nothing.
    while (rows_.size() < kAtLeast) add_rows(all_pairs(/*again=*/true), kAtLeast);
    std::vector<Case> cases;
    for (const Row& row : rows_) cases.push_back(to_case(row, mix(kSeed, cases.size()), values_));
    return cases;
  }

 private:
  Pairs all_pairs(bool again) {
    Pairs pairs(counts_);
    for (std::size_t d = 0; d < dimensions_; ++d) {
      for (std::size_t e = d + 1; e < dimensions_; ++e) {
        for (int v = 0; v < counts_[d]; ++v) {
          for (int w = 0; w < counts_[e]; ++w) {
            if (again && !worth_repeating(pair_row({d, v, e, w}))) continue;
            pairs.open(static_cast<Dimension>(d), v, static_cast<Dimension>(e), w);
          }
        }
      }
    }
    pairs.mix_order(random_);
    return pairs;
  }

  bool worth_repeating(const Row& row) const { return !is_empty(row) && least_cost(row, values_) <= kBudget; }

  /// Adds rows until every pair has met or there are `most` rows.
  void add_rows(Pairs pairs, std::size_t most) {
    for (Pairs::Pair pair; rows_.size() < most && pairs.next(pair);) {
      Row best = fill(pair, pairs);
      for (int n = 1; n < kCandidates; ++n) {
        const Row candidate = fill(pair, pairs);
        if (pairs.gain(candidate) > pairs.gain(best)) best = candidate;
      }
      pairs.close(best);
      rows_.push_back(best);
    }
  }

  static Row pair_row(const Pairs::Pair& pair) {
    Row row;
    row.fill(kUnset);
    row[pair.d] = pair.v;
    row[pair.e] = pair.w;
    return row;
  }

  /// A row with this pair in which every other dimension, in a random order, takes the value that closes
  /// most pairs among those the budget allows.
  Row fill(const Pairs::Pair& pair, const Pairs& pairs) {
    Row row = pair_row(pair);
    const int64_t budget = std::max(kBudget, least_cost(row, values_));
    std::vector<std::size_t> order(dimensions_);
    std::iota(order.begin(), order.end(), std::size_t{0});
    shuffle(random_, order);
    for (const std::size_t d : order) {
      if (row[d] == kUnset) row[d] = best_value(row, d, budget, pairs);
    }
    return row;
  }

  int best_value(Row row, std::size_t d, int64_t budget, const Pairs& pairs) {
    int best = kUnset, best_gain = -1;
    const auto start = static_cast<int>(random_.integer(0, counts_[d] - 1));  // ties go to a random value
    for (int n = 0; n < counts_[d]; ++n) {
      row[d] = (start + n) % counts_[d];
      if (least_cost(row, values_) > budget) continue;
      const int gain = pairs.gain(row, d, row[d]);
      if (d == kLength && gain == 0 && is_empty(row)) continue;  // not as a filler
      if (gain > best_gain) {
        best = row[d];
        best_gain = gain;
      }
    }
    return best == kUnset ? 0 : best;  // the first value is the cheapest of every dimension that costs
  }

  const Values values_;
  const std::array<int, kDimensions> counts_ = values_.counts();
  /// Leaves out features if there is one value, so that the list stays as it was before features existed.
  const std::size_t dimensions_ = counts_[kFeatures] > 1 ? kDimensions : kFeatures;
  Random random_{kSeed};
  std::vector<Row> rows_;
};

}  // namespace

CoveringValues cuda_values() {
  CoveringValues values{.layouts = {Layout::kBshd, Layout::kBhsd, Layout::kAligned},
                        .features = covering_features("cuda")};
  int64_t widest = 0;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.dtype == DataType::kNone) continue;  // kernels of plans and of dense masks
    if (std::find(values.dtypes.begin(), values.dtypes.end(), kernel.dtype) == values.dtypes.end())
      values.dtypes.push_back(kernel.dtype);
    if (kernel.head_dim == kernel.head_dim_v) widest = std::max<int64_t>(widest, kernel.head_dim);
  }
  // Between the kernels' own they run in the next wider ones.
  for (const auto& [dim, other] : kHeadDims) {
    if (dim <= widest && dim % 8 == 0) values.head_dims.push_back(dim);
  }
  return values;
}

std::vector<CaseFeatures> covering_features(const std::string& backend) {
  std::vector<CaseFeatures> taken = covering_combinations();
  std::erase_if(taken, [refused = refused_features(backend)](const CaseFeatures& features) {
    return asks_for_any(features, refused);
  });
  return taken;
}

std::vector<Case> covering_cases(const CoveringValues& values) { return CoveringList(values).make(); }

}  // namespace flashmask::verify
