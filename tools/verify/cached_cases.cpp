// SPDX-License-Identifier: Apache-2.0
#include "verify/cached_cases.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "verify/random.h"

namespace flashmask::verify {
namespace {

constexpr int64_t kLargestCost = 6'000'000;
constexpr std::array<int64_t, 5> kPageSizes{1, 3, 16, 64, 128};

template <typename T, std::size_t N>
T pick(Random& random, const std::array<T, N>& values) {
  return values[static_cast<std::size_t>(random.integer(0, static_cast<int64_t>(N) - 1))];
}

/// True in `percent` of the draws.
bool chance(Random& random, int64_t percent) { return random.integer(0, 99) < percent; }

/// Requests without keys, short ones, ones around the edges of pages and tiles, and now and then of several splits.
int64_t draw_keys(Random& random) {
  const int64_t kind = random.integer(0, 99);
  if (kind < 8) return 0;
  if (kind < 30) return random.integer(1, 20);
  if (kind < 55) return 64 * random.integer(1, 6) + random.integer(-2, 2);
  if (kind < 90) return random.integer(1, 500);
  return random.integer(500, 2600);
}

/// Mostly decoding, drafts and chunks; sometimes a whole prefill, or more rows than keys.
int64_t draw_rows(Random& random, int64_t keys) {
  const int64_t kind = random.integer(0, 99);
  if (kind < 35) return 1;
  if (kind < 65) return random.integer(0, 16);
  if (kind < 85) return random.integer(1, 70);
  if (kind < 93) return std::min<int64_t>(keys, 200);
  return keys + random.integer(1, 9);
}

int64_t draw_head_dim(Random& random) {
  constexpr std::array<int64_t, 7> kCommon{8, 32, 64, 80, 128, 192, 256};
  return random.flip() ? pick(random, kCommon) : random.integer(1, 256);
}

void draw_shape(Random& random, CachedCase& c) {
  const int64_t batch = random.integer(1, 5);
  c.packed = chance(random, 65);
  c.keys.clear();
  c.rows.clear();
  for (int64_t b = 0; b < batch; ++b) {
    c.keys.push_back(draw_keys(random));
    c.rows.push_back(c.packed || b == 0 ? draw_rows(random, c.keys.back()) : c.rows[0]);
  }
  c.heads_kv = random.integer(1, 3);
  c.heads_q = c.heads_kv * pick(random, std::array<int64_t, 9>{1, 1, 2, 3, 4, 5, 7, 8, 16});
  c.head_dim = draw_head_dim(random);
  c.head_dim_v = chance(random, 60) ? c.head_dim : draw_head_dim(random);
}

/// Fewer heads, then shorter requests, until the case is small enough.
void shrink(CachedCase& c) {
  while (c.cost() > kLargestCost) {
    if (c.heads_kv > 1) {
      c.heads_q -= c.group_size();
      --c.heads_kv;
      continue;
    }
    for (int64_t& n : c.keys) n = n * 3 / 4;
    for (int64_t& m : c.rows) m = m * 3 / 4;
  }
}

void draw_cache(Random& random, CachedCase& c) {
  c.tables = pick(random, std::array{CacheTables::kContiguous, CacheTables::kTable, CacheTables::kTable,
                                     CacheTables::kLists, CacheTables::kLists});
  c.page_size = pick(random, kPageSizes);
  c.layout = pick(random, std::array{Layout::kBshd, Layout::kBhsd, Layout::kPadded});
  c.dtype = pick(random, std::array{DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16});
  c.float8 = chance(random, 25);
  c.bad = c.has_tables() && chance(random, 15);
  if (!c.bad && c.has_tables() && chance(random, 15)) c.shared = random.integer(1, 300);
  if (!c.float8) return;
  constexpr std::array kShapes{ScaleShape::kNone, ScaleShape::kTensor, ScaleShape::kHead,
                               ScaleShape::kPage, ScaleShape::kToken,  ScaleShape::kTokenHead};
  c.k_scale = pick(random, kShapes);
  c.v_scale = pick(random, kShapes);
}

void draw_positions(Random& random, CachedCase& c) {
  if (chance(random, 15)) c.positions = random.flip() ? CachedPositions::kRows : CachedPositions::kRowsAndKeys;
  if (!chance(random, 35)) return;
  c.tail = chance(random, 60) ? random.integer(1, 20) : random.integer(1, kMaxTail);
  c.tail_lens = random.flip();
  c.tail_depth = random.flip();
  if (c.tail_depth) c.positions = CachedPositions::kNone;
  if (c.positions == CachedPositions::kRows) c.positions = CachedPositions::kRowsAndKeys;
}

void draw_mask(Random& random, CachedCase& c) {
  c.causal = chance(random, 75);
  if (chance(random, 30)) c.window.left = random.integer(0, 300);
  if (chance(random, 15)) c.window.right = random.integer(0, 100);
  if (chance(random, 45)) c.vectors = c.causal ? random.integer(1, 2) : 2 * random.integer(1, 2);
  c.vectors_by_head = random.flip();
  c.key_layout = random.flip() ? KeyLayout::kPages : KeyLayout::kSequences;
  c.vectors_by_request = c.key_layout == KeyLayout::kPages || random.flip();
  c.short_columns = c.key_layout == KeyLayout::kSequences && chance(random, 30);
  draw_positions(random, c);
  if (!chance(random, 20)) return;
  c.blocks = random.flip() ? CachedBlocks::kKeys : CachedBlocks::kRowsAndKeys;
  c.blocks_by_head = random.flip();
}

void draw_options(Random& random, CachedCase& c) {
  c.sink = chance(random, 25);
  for (const CaseFeature& feature : score_features()) {
    if (chance(random, feature.percent)) feature.draw(random, c.features);
  }
  if (chance(random, 25)) c.given_scale = (0.4 + random.real()) / std::sqrt(static_cast<double>(c.head_dim));
  c.split_size = pick(random, std::array<int64_t, 4>{128, 256, 1024, 1024});
}

/// Changes a case to one that kernels of the cuda backend take.
void fit_to_cuda(CachedCase& c) {
  if (c.dtype == DataType::kFloat32) c.dtype = c.seed % 2 == 0 ? DataType::kBFloat16 : DataType::kFloat16;
  for (int64_t* dim : {&c.head_dim, &c.head_dim_v}) *dim = (*dim + 7) / 8 * 8;
  c.batch_invariant = c.seed / 2 % 2 == 0;
  shrink(c);
}

/// A case's value in each dimension of the covering list, as a small number.
using Values = std::vector<std::size_t>;
constexpr std::size_t kMostValues = 8;

std::size_t place_among(int64_t value, std::initializer_list<int64_t> ends) {
  return static_cast<std::size_t>(std::ranges::count_if(ends, [value](int64_t end) { return value >= end; }));
}

Values values_in(const CachedCase& c) {
  const auto has = [&](const auto& holds) {
    for (std::size_t b = 0; b < c.keys.size(); ++b) {
      if (holds(c.keys[b], c.rows[b])) return std::size_t{1};
    }
    return std::size_t{0};
  };
  const auto number = [](auto value) { return static_cast<std::size_t>(value); };
  Values values{number(c.tables),
                place_among(c.page_size, {3, 16, 64, 128}),
                number(c.packed),
                number(c.shared_keys() > 0),
                number(c.bad),
                place_among(c.group_size(), {2, 3, 5, 8, 16}),
                place_among(c.head_dim, {16, 64, 128, 192, 256}),
                number(c.head_dim == c.head_dim_v),
                place_among(static_cast<int64_t>(c.dtype), {3, 4}) + 3 * number(c.float8),
                number(c.k_scale),
                number(c.v_scale),
                number(c.layout),
                number(c.causal),
                number(c.window.left >= 0) + 2 * number(c.window.right >= 0),
                number(c.vectors),
                number(c.vectors_by_head) + 2 * number(c.vectors_by_request),
                number(c.key_layout) + 2 * number(c.short_columns),
                number(c.positions),
                place_among(c.tail, {1, 33}),
                number(c.tail_lens) + 2 * number(c.tail_depth),
                number(c.blocks) + 3 * number(c.blocks_by_head),
                number(c.sink),
                has([](int64_t n, int64_t) { return n == 0; }),
                has([](int64_t n, int64_t m) { return m > n; }),
                has([&](int64_t n, int64_t) { return n > 2 * c.split_size; }) + 2 * number(c.batch_invariant)};
  for (const CaseFeature& feature : score_features()) values.push_back(number(feature.kind(c.features)));
  return values;
}

/// Pairs of values of different dimensions that have met in a case.
class Meetings {
 public:
  explicit Meetings(std::size_t dimensions) : side_(dimensions * kMostValues), met_(side_ * side_) {}

  std::size_t count_new(const Values& values) const {
    std::size_t count = 0;
    for_each(values, [&](std::size_t pair) { count += !met_[pair]; });
    return count;
  }
  void add(const Values& values) {
    for_each(values, [&](std::size_t pair) { met_[pair] = true; });
  }

 private:
  template <typename F>
  void for_each(const Values& values, const F& f) const {
    for (std::size_t d = 0; d < values.size(); ++d) {
      for (std::size_t e = 0; e < d; ++e) f((d * kMostValues + values[d]) * side_ + e * kMostValues + values[e]);
    }
  }

  std::size_t side_;
  std::vector<bool> met_;
};

}  // namespace

CachedCase random_cached_case(uint64_t seed, int64_t index, std::string_view backend) {
  constexpr uint64_t kCachedStream = 0x6361636865;
  Random random(mix(mix(seed, kCachedStream), static_cast<uint64_t>(index)));
  CachedCase c;
  c.seed = mix(mix(seed, static_cast<uint64_t>(index)), kCachedStream);
  draw_shape(random, c);
  shrink(c);
  draw_cache(random, c);
  draw_mask(random, c);
  draw_options(random, c);
  constexpr uint64_t kOneInRefused = 16;  // some go on showing what is refused
  if (backend == "cuda" && c.seed % kOneInRefused != 0) fit_to_cuda(c);
  return c;
}

std::vector<CachedCase> covering_cached_cases(std::string_view backend) {
  constexpr uint64_t kSeed = 20261128;
  constexpr std::size_t kDrawn = 800, kMost = 64;
  std::vector<CachedCase> drawn;
  std::vector<Values> values;
  for (std::size_t n = 0; n < kDrawn; ++n) {
    drawn.push_back(random_cached_case(kSeed, static_cast<int64_t>(n), backend));
    values.push_back(values_in(drawn.back()));
  }
  std::vector<CachedCase> cases;
  Meetings meetings(values[0].size());
  while (cases.size() < kMost) {
    std::size_t best = 0, most = 0;
    for (std::size_t n = 0; n < kDrawn; ++n) {
      const std::size_t count = meetings.count_new(values[n]);
      if (count > most) best = n, most = count;
    }
    if (most == 0) break;
    meetings.add(values[best]);
    cases.push_back(drawn[best]);
  }
  return cases;
}

}  // namespace flashmask::verify
