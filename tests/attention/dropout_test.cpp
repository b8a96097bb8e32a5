// SPDX-License-Identifier: Apache-2.0

// The weights that dropout keeps: the generator's known answers, the bits of an element written out once more,
// statistics, and that every backend drops exactly these.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "attention/compare.h"
#include "backends/cuda/fragments/dropout.cuh"
#include "common/dropout.h"
#include "families/families.h"
#include "flashmask/builders.h"
#include "support/expect_error.h"
#include "support/extent.h"

namespace flashmask::test {
namespace {

using State = std::array<uint64_t, 2>;

/// Known answers from Philox's authors (Random123, kat_vectors).
TEST(Philox, KnownAnswers) {
  const auto words = [](dropout::Words counter, dropout::Key key) {
    const dropout::Words w = dropout::philox(counter, key);
    return std::vector<uint32_t>(w.word, w.word + 4);
  };
  EXPECT_EQ(words({{0, 0, 0, 0}}, {0, 0}), (std::vector<uint32_t>{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  constexpr uint32_t kAll = 0xffffffff;
  EXPECT_EQ(words({{kAll, kAll, kAll, kAll}}, {kAll, kAll}),
            (std::vector<uint32_t>{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
  EXPECT_EQ(words({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, {0xa4093822, 0x299f31d0}),
            (std::vector<uint32_t>{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}));
}

/// Sixteen bits of an element, from what docs/features.md says of them.
uint32_t documented_bits(const State& state, uint64_t batch, uint64_t head, uint64_t row, uint64_t key) {
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  const auto high = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
  const dropout::Words of_offset =
      dropout::philox({{low(state[1]), high(state[1]), 0, 0}}, {low(state[0]), high(state[0])});
  // Without bit 3 of the row, and without bits 3 and 0 of the key.
  const uint64_t r = (row >> 4 << 3) | (row & 7), k = (key >> 4 << 2) | (key >> 1 & 3);
  const dropout::Words words =
      dropout::philox({{low(k), low(r), low(head), low(batch)}}, {of_offset.word[0], of_offset.word[1]});
  const uint32_t word = words.word[2 * (row >> 3 & 1) + (key >> 3 & 1)];
  return key & 1 ? word >> 16 : word & 0xffff;
}

/// Dropout draws as tensor cores' fragments hold them, for all lanes of a warp; in a transposed slab, two lanes combine
/// their draws.
class Fragments : public ::testing::Test {
 protected:
  static constexpr uint32_t kBatch = 3, kHead = 5, kRow = 64, kKey = 208, kThreshold = 20000;
  static constexpr State kState{0x123456789abcdef0, 77};
  static constexpr uint32_t kLanes = 32;

  /// The sixteens of batch entry kBatch of a part; rows and keys past the last one have no element.
  static constexpr uint32_t kSixteens = 19;
  static constexpr std::array<int32_t, kSixteens*(kBatch + 1)> kPart = [] {
    std::array<int32_t, kSixteens*(kBatch + 1)> part{};
    for (uint32_t n = 0; n < kSixteens; ++n) part[kBatch * kSixteens + n] = static_cast<int32_t>(n * 7 % 19 + 1000);
    return part;
  }();
  static constexpr dropout::Origins kWhole{},
      kOfPart{{kPart.data(), kSixteens, kSixteens - 1}, {kPart.data(), kSixteens, kSixteens - 1}, 40};

  static bool is_dropped(const dropout::Origins& origins, uint32_t row, uint32_t key) {
    const auto whole = [&](uint32_t n) {
      return origins.q.sixteens ? static_cast<uint32_t>(kPart[kBatch * kSixteens + n / 16]) * 16 + n % 16 : n;
    };
    return documented_bits(kState, kBatch, kHead + origins.first_head, whole(row), whole(key)) < kThreshold;
  }
  static bool is_there(const dropout::Origins& origins, uint32_t key) {
    return !origins.k.sixteens || key / 16 < kSixteens;
  }
  /// The numbers of those from `first` on.
  static auto sixteens(const dropout::Origin& origin, uint32_t first) {
    return [=](int n) { return origin.of(kBatch, first / 16 + static_cast<uint32_t>(n)); };
  }
  template <int kKeys>
  static void expect_slab(const dropout::Origins& origins) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const auto dropped = cuda::draw_slab<kKeys>(key(), kThreshold, kBatch, kHead + origins.first_head,
                                                  origins.q.of(kBatch, kRow / 16), sixteens(origins.k, kKey), lane);
      for (uint32_t i = 0; i < kKeys / 2; ++i) {
        const uint32_t row = kRow + lane / 4 + i / 2 % 2 * 8, column = kKey + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (!is_there(origins, column)) continue;
        EXPECT_EQ(dropped.row[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1, is_dropped(origins, row, column))
            << lane << " " << i;
      }
    }
  }
  template <int kRows>
  static void expect_transposed(const dropout::Origins& origins) {
    const auto draws = [&](uint32_t lane) {
      return cuda::draw_lane<kRows>(key(), kThreshold, kBatch, kHead + origins.first_head, sixteens(origins.q, kRow),
                                    origins.k.of(kBatch, kKey / 16), lane);
    };
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t word = cuda::join_dropped(draws(lane), draws(lane ^ 4), lane);
      for (uint32_t i = 0; i < kRows / 2; ++i) {
        const uint32_t row = kRow + i / 4 * 8 + lane % 4 * 2 + i % 2, column = kKey + lane / 4 + i / 2 % 2 * 8;
        EXPECT_EQ(word >> i & 1, is_dropped(origins, row, column)) << lane << " " << i;
      }
    }
  }

 private:
  static dropout::Key key() { return dropout::key_of(kState[0], kState[1]); }
};

TEST_F(Fragments, OfSlabsHaveTheDocumentedBits) {
  for (const dropout::Origins& origins : {kWhole, kOfPart}) {
    expect_slab<128>(origins);
    expect_slab<64>(origins);
  }
}

TEST_F(Fragments, OfTransposedSlabsHaveTheDocumentedBits) {
  for (const dropout::Origins& origins : {kWhole, kOfPart}) {
    expect_transposed<64>(origins);
    expect_transposed<32>(origins);
  }
}

double share_kept(double p) { return 1 - std::round(p * 65536) / 65536; }

std::vector<uint8_t> kept_by(const Dropout& dropout, int64_t batch, int64_t heads, int64_t rows, int64_t keys) {
  std::vector<uint8_t> kept(static_cast<std::size_t>(batch * heads * rows * keys), 7);
  dropout_mask(dropout, TensorView::contiguous(kept.data(), DataType::kUInt8, {batch, heads, rows, keys}));
  return kept;
}
std::vector<uint8_t> kept_by(const State& state, double p, int64_t batch, int64_t heads, int64_t rows, int64_t keys) {
  return kept_by({.p = p, .state = state.data()}, batch, heads, rows, keys);
}

/// A part of a whole of two batch entries: other keys in each of them, and query heads from the second on.
struct DrawnPart {
  static constexpr int64_t kRows = 37, kKeys = 53, kFirstHead = 1;
  std::vector<int32_t> rows{4, 0, 2}, keys{1, 5, 0, 3, 2, 0, 6, 4};

  Dropout of(const State& state, double p) {
    return {.p = p,
            .state = state.data(),
            .q_origin = TensorView::contiguous(rows.data(), DataType::kInt32, {1, 3}),
            .k_origin = TensorView::contiguous(keys.data(), DataType::kInt32, {2, 4}),
            .first_head = kFirstHead};
  }
  uint64_t row(uint64_t i) const { return static_cast<uint64_t>(rows[i / 16]) * 16 + i % 16; }
  uint64_t key(uint64_t b, uint64_t j) const { return static_cast<uint64_t>(keys[b * 4 + j / 16]) * 16 + j % 16; }
};

TEST(DropoutMask, OfAPartIsThatOfTheWhole) {
  DrawnPart part;
  const State state{3, 4};
  const auto kept = kept_by(part.of(state, 0.5), 2, 3, DrawnPart::kRows, DrawnPart::kKeys);
  const auto whole = kept_by(state, 0.5, 2, 4, 80, 112);
  std::size_t at = 0;
  for (uint64_t b = 0; b < 2; ++b) {
    for (uint64_t h = 0; h < 3; ++h) {
      for (uint64_t i = 0; i < DrawnPart::kRows; ++i) {
        for (uint64_t j = 0; j < DrawnPart::kKeys; ++j) {
          const uint64_t of_whole = ((b * 4 + h + DrawnPart::kFirstHead) * 80 + part.row(i)) * 112 + part.key(b, j);
          ASSERT_EQ(kept[at++], whole[of_whole]) << b << h << " " << i << " " << j;
        }
      }
    }
  }
}

TEST(DropoutMask, IsMadeOfTheDocumentedBits) {
  Random random(1);
  for (const double p : {0.001, 0.1, 0.5, 0.9}) {
    const State state{static_cast<uint64_t>(random.integer(INT64_MIN, INT64_MAX)),
                      static_cast<uint64_t>(random.integer(INT64_MIN, INT64_MAX))};
    const auto kept = kept_by(state, p, 2, 3, 70, 53);
    const auto threshold = static_cast<uint32_t>(std::lround(p * 65536));
    std::size_t at = 0;
    for (uint64_t b = 0; b < 2; ++b) {
      for (uint64_t h = 0; h < 3; ++h) {
        for (uint64_t i = 0; i < 70; ++i) {
          for (uint64_t j = 0; j < 53; ++j)
            ASSERT_EQ(kept[at++], documented_bits(state, b, h, i, j) >= threshold) << b << h << " " << i << " " << j;
        }
      }
    }
  }
}

/// The last elements of the longest sequences are as good as any.
TEST(DropoutMask, RowsAndKeysToTheLast) {
  const State state{5, 6};
  const dropout::Key key = dropout::key_of(5, 6);
  const dropout::Origins origins{};
  for (const uint32_t row : {0u, 0x7ffffffeu}) {
    for (const uint32_t j : {0u, 0x7ffffffeu, 0x7fffffffu}) {
      const auto words = dropout::draw(key, 0xffffffff, 7, origins.row_draw(0, row), origins.key_draw(0, j));
      EXPECT_EQ(dropout::bits_of(words, row, j), documented_bits(state, 0xffffffff, 7, row, j));
    }
  }
}

TEST(DropoutMask, ProbabilitiesAreRoundedToSixteenBits) {
  for (const auto& [p, threshold] : {std::pair{0.0, 0u},
                                     {0x1p-18, 0u},
                                     {0x1p-17, 1u},
                                     {0.1, 6554u},
                                     {0.5, 32768u},
                                     {0.99999, 65535u},
                                     {std::nextafter(1.0, 0.0), 65535u}}) {
    EXPECT_EQ(dropout::threshold_of(p), threshold) << p;
  }
  EXPECT_EQ(dropout::scale_of(0), 1);
  EXPECT_EQ(dropout::scale_of(32768), 2);
  EXPECT_EQ(dropout::scale_of(65535), 65536);
  const auto none = kept_by({1, 2}, 0x1p-18, 1, 1, 20, 20);
  EXPECT_EQ(std::count(none.begin(), none.end(), 1), 400);
}

TEST(DropoutMask, OfAnyStridesAndWhatIsRefused) {
  const State state{1, 2};
  const auto want = kept_by(state, 0.4, 1, 2, 9, 10);
  std::vector<uint8_t> memory(2000, 9);
  TensorView view = TensorView::contiguous(memory.data(), DataType::kBool, {1, 2, 9, 10});
  view.stride = {0, 1, 90, 7};
  dropout_mask({.p = 0.4, .state = state.data()}, view);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t i = 0; i < 9; ++i) {
      for (int64_t j = 0; j < 10; ++j)
        EXPECT_EQ(memory[static_cast<std::size_t>(h + 90 * i + 7 * j)],
                  want[static_cast<std::size_t>(h * 90 + i * 10 + j)]);
    }
  }
  EXPECT_EQ(memory[2], 9);

  const auto refused = [&](std::initializer_list<std::string> parts, Dropout dropout, auto change) {
    TensorView wrong = view;
    change(wrong);
    expect_invalid(parts, [&] { dropout_mask(dropout, wrong); });
  };
  const Dropout right{.p = 0.4, .state = state.data()};
  const auto nothing = [](TensorView&) {};
  refused({"dropout_p is 1", "less than 1"}, {.p = 1, .state = state.data()}, nothing);
  refused({"dropout_state is null", "0.4", "seed"}, {.p = 0.4}, nothing);
  refused({"dropout_state is not aligned to 8"},
          {.p = 0.4, .state = reinterpret_cast<const uint64_t*>(reinterpret_cast<const char*>(state.data()) + 4)},
          nothing);
  refused({"kept is float32", "bool or uint8"}, right, [](TensorView& t) { t.dtype = DataType::kFloat32; });
  refused({"kept is bool [1, 2, 9]"}, right, [](TensorView& t) { t.rank = 3; });
  refused({"kept has stride 0 in dimension 2"}, right, [](TensorView& t) { t.stride[2] = 0; });
  refused({"kept is on a CUDA device"}, right, [](TensorView& t) { t.device = {Device::Kind::kCuda, 0}; });
  refused({"kept", "pointer is null"}, right, [](TensorView& t) { t.data = nullptr; });
}

// --- statistics --------------------------------------------------------------------------------------

/// How far a chi-square variable of n degrees of freedom is off, in standard deviations of a normal one
/// (Wilson and Hilferty).
double deviation(double chi_square, double n) {
  return (std::cbrt(chi_square / n) - (1 - 2 / (9 * n))) / std::sqrt(2 / (9 * n));
}

/// Seeds are fixed, so a test that holds holds in every run; one in 3 million would not at first.
constexpr double kMost = 5;

double term(double count, double expected) { return (count - expected) * (count - expected) / expected; }

/// All values of 16 bits are as frequent, over 2^24 elements of several batch entries, heads, rows and keys.
TEST(DropoutStatistics, BitsAreUniform) {
  struct Shape {
    uint32_t batch, heads, rows, keys;
  };
  const std::vector<Shape> shapes{{64, 64, 64, 64}, {2, 2, 1024, 4096}, {1, 4, 4096, 1024}};
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{0x123456789abcdef}}) {
    for (const Shape& shape : shapes) {
      if (!test_long() && seed > 0 && &shape != &shapes[0]) continue;
      std::vector<int64_t> counts(65536);
      const dropout::Key key = dropout::key_of(seed, 3);
      for (uint32_t n = 0; n < shape.batch * shape.heads * shape.rows / 2; ++n) {
        const uint32_t sequence = n / (shape.rows / 2);
        for (uint32_t k = 0; k < shape.keys / 4; ++k) {
          const auto words =
              dropout::draw(key, sequence / shape.heads, sequence % shape.heads, n % (shape.rows / 2), k);
          for (const uint32_t word : words.word) {
            ++counts[word & 0xffff];
            ++counts[word >> 16];
          }
        }
      }
      double chi_square = 0;
      for (const int64_t count : counts) chi_square += term(static_cast<double>(count), 0x1p24 / 65536);
      EXPECT_LT(std::fabs(deviation(chi_square, 65535)), kMost) << seed;
    }
  }
}

/// How often two elements are kept, both or one of them.
class Pairs {
 public:
  void add(uint8_t a, uint8_t b) { ++counts_[static_cast<std::size_t>(2 * a + b)]; }
  /// Expects independence by chi-square, if each is kept with probability q.
  void expect_independent(double q, const std::string& what) const {
    const std::array<double, 4> share{(1 - q) * (1 - q), (1 - q) * q, q * (1 - q), q * q};
    double size = 0, chi_square = 0;
    for (const int64_t count : counts_) size += static_cast<double>(count);
    for (std::size_t n = 0; n < 4; ++n) chi_square += term(static_cast<double>(counts_[n]), size * share[n]);
    EXPECT_LT(std::fabs(deviation(chi_square, 3)), kMost) << what << ": chi-square " << chi_square;
  }

 private:
  std::array<int64_t, 4> counts_{};
};

/// The element that is so much further in the batch, the heads, the rows and the keys.
struct Step {
  std::string name;
  int64_t batch = 0, head = 0, row = 0, key = 0;
};

/// Elements beside each other, and those that share a draw, are independent; p is met.
TEST(DropoutStatistics, NeighboursAreIndependent) {
  const std::vector<Step> steps{
      {"key + 1", 0, 0, 0, 1},       {"key + 2", 0, 0, 0, 2},          {"key + 8", 0, 0, 0, 8},
      {"key + 16", 0, 0, 0, 16},     {"row + 1", 0, 0, 1, 0},          {"row + 8", 0, 0, 8, 0},
      {"row + 16", 0, 0, 16, 0},     {"row + 1, key + 1", 0, 0, 1, 1}, {"head + 1", 0, 1, 0, 0},
      {"batch + 1", 1, 0, 0, 0},     {"both + 1", 1, 1, 0, 0},         {"batch + 1, head - 1", 1, -1, 0, 0},
      {"head for row", 0, 1, -1, 0}, {"row for key", 0, 0, 16, -16}};
  const std::vector<double> probabilities = test_long() ? std::vector<double>{0.1, 0.5, 0.9} : std::vector<double>{0.1};
  constexpr int64_t kEdge = 16, kRows = 4096, kKeys = 1024;  // 2^24 elements in four sequences
  constexpr int64_t kAllRows = kRows + 2 * kEdge, kAllKeys = kKeys + 2 * kEdge;
  for (const double p : probabilities) {
    const auto kept = kept_by({42, 0}, p, 3, 4, kAllRows, kAllKeys);
    for (const Step& step : steps) {
      const int64_t further = ((step.batch * 4 + step.head) * kAllRows + step.row) * kAllKeys + step.key;
      Pairs pairs;
      for (int64_t sequence = 0; sequence < 4; ++sequence) {
        const int64_t b = sequence / 2, h = 1 + sequence % 2;
        for (int64_t i = kEdge; i < kEdge + kRows; ++i) {
          const uint8_t* row = kept.data() + ((b * 4 + h) * kAllRows + i) * kAllKeys;
          for (int64_t j = kEdge; j < kEdge + kKeys; ++j) pairs.add(row[j], row[j + further]);
        }
      }
      pairs.expect_independent(share_kept(p), step.name);
    }
  }
}

/// Adjacent or swapped seeds and offsets, and pairs of equal sum, give independent patterns.
TEST(DropoutStatistics, SeedsAndOffsetsAreIndependent) {
  const int64_t size = test_long() ? 64 : 32;  // 2^24 elements, or 2^20
  const auto pattern = [&](const State& state) { return kept_by(state, 0.2, size, size, size, size); };
  constexpr uint64_t k32 = uint64_t{1} << 32, k63 = uint64_t{1} << 63;
  const State first{42, 100};
  const auto kept = pattern(first);
  EXPECT_EQ(kept, pattern(first));
  for (const State& other :
       {State{43, 100}, State{42, 101}, State{43, 99}, State{41, 101}, State{100, 42}, State{42 + k32, 100},
        State{42, 100 + k32}, State{42 + k63, 100}, State{42, 100 + k63}, State{0, 0}}) {
    const auto others = pattern(other);
    Pairs pairs;
    for (std::size_t n = 0; n < kept.size(); ++n) pairs.add(kept[n], others[n]);
    pairs.expect_independent(share_kept(0.2), std::to_string(other[0]) + ", " + std::to_string(other[1]));
  }
}

// --- calls -------------------------------------------------------------------------------------------

constexpr State kState{0x9876543210, 17};

/// A call that shows its weights: values are unit vectors, so out[i][j] is the weight of key j.
Call<float> weights_call(int64_t rows, int64_t keys, double p, const std::string& backend) {
  Call<float> call(
      {.batch = 2, .seqlen_q = rows, .seqlen_k = keys, .heads_q = 4, .heads_kv = 2, .head_dim = 3, .head_dim_v = keys});
  std::fill(call.v.begin(), call.v.end(), 0.0f);
  for (std::size_t n = 0; n < call.v.size(); n += static_cast<std::size_t>(keys))
    call.v[n + n / static_cast<std::size_t>(2 * keys) % static_cast<std::size_t>(keys)] = 1;
  call.options.backend = backend;
  call.options.features.dropout = {.p = p, .state = kState.data()};
  return call;
}

/// Tests several tiles, cut off on both sides, whatever is visible.
TEST(Dropout, EveryBackendDropsThePattern) {
  for (const std::string backend : {"cpu", "reference"}) {
    for (const double p : {0.1, 0.5}) {
      for (const bool causal : {false, true}) {
        constexpr int64_t kRows = 213, kKeys = 197;
        Call<float> call = weights_call(kRows, kKeys, p, backend), without = call;
        std::vector<int32_t> sixteens{9, 1, 17, 3, 3, 0, 2, 40, 6, 7, 8, 1000000, 5, 4};
        Dropout& dropout = call.options.features.dropout;
        if (causal) {  // a part
          dropout.q_origin = TensorView::contiguous(sixteens.data(), DataType::kInt32, {1, 14});
          dropout.k_origin = TensorView::contiguous(sixteens.data() + 1, DataType::kInt32, {1, 13});
          dropout.first_head = 7;
        }
        without.options.features.dropout = {};
        call.mask = without.mask = causal ? masks::causal(kRows, kKeys, 0) : masks::full(kRows, kKeys);
        call.forward();
        without.forward();
        const auto kept = kept_by(dropout, 2, 4, kRows, kKeys);
        const auto scale = static_cast<float>(1 / share_kept(p));
        for (int64_t b = 0; b < 2; ++b) {
          for (int64_t h = 0; h < 4; ++h) {
            for (int64_t i = 0; i < kRows; ++i) {
              for (int64_t j = 0; j < kKeys; ++j) {
                const auto at = static_cast<std::size_t>(((b * kRows + i) * 4 + h) * kKeys + j);
                const bool is_kept = kept[static_cast<std::size_t>(((b * 4 + h) * kRows + i) * kKeys + j)] != 0;
                ASSERT_NEAR(call.out[at], is_kept ? scale * without.out[at] : 0, 2e-7 * scale)
                    << backend << " " << b << " " << h << " " << i << " " << j;
                ASSERT_EQ(call.out[at] > 0, is_kept && (!causal || j <= i));
              }
            }
          }
        }
        EXPECT_EQ(call.lse, without.lse) << "dropout comes after the softmax";
      }
    }
  }
}

/// The mean over many states equals the result without dropout.
TEST(Dropout, IsUnbiased) {
  constexpr int kStates = 3000;
  Call<float> call({.seqlen_q = 8, .seqlen_k = 40, .head_dim = 4, .head_dim_v = 4});
  call.forward();
  const std::vector<float> exact = call.out;
  std::vector<double> sum(exact.size()), squares(exact.size());
  for (uint64_t n = 0; n < kStates; ++n) {
    const State state{n, n * n};
    call.options.features.dropout = {.p = 0.3, .state = state.data()};
    call.forward();
    for (std::size_t at = 0; at < sum.size(); ++at) sum[at] += call.out[at], squares[at] += call.out[at] * call.out[at];
  }
  for (std::size_t at = 0; at < sum.size(); ++at) {
    const double mean = sum[at] / kStates, variance = squares[at] / kStates - mean * mean;
    EXPECT_LT(std::fabs(mean - exact[at]), kMost * std::sqrt(variance / kStates));
  }
}

/// Without a share to drop the state is not read, and every bit is that of a plain call.
TEST(Dropout, OfNothingChangesNothing) {
  for (const std::string backend : {"cpu", "reference"}) {
    Call<float> plain({.seqlen_q = 70, .seqlen_k = 90}), zero = plain, tiny = plain;
    zero.options.features.dropout.state = reinterpret_cast<const uint64_t*>(uintptr_t{0x10000});
    tiny.options.features.dropout = {.p = 0x1p-20, .state = kState.data()};
    for (Call<float>* call : {&plain, &zero, &tiny}) {
      call->options.backend = backend;
      call->run();
      EXPECT_TRUE(same_bits(*call, plain)) << backend;
    }
  }
}

/// A row that sees one key has weight 1 there, so whether it is dropped or not its scores have no gradient.
TEST(Dropout, RowsOfOneKeyHaveNoGradient) {
  Call<float> call({.batch = 2, .seqlen_q = 150, .seqlen_k = 150, .heads_q = 2, .head_dim = 16, .head_dim_v = 24});
  call.options.features.dropout = {.p = 0.3, .state = kState.data()};
  call.mask = masks::sliding_window(150, 150, 0, 0);
  call.run();
  EXPECT_EQ(max_value(call.dq), 0);
  EXPECT_EQ(max_value(call.dk), 0);
  EXPECT_GT(max_value(call.dv), 0);
}

TEST(Dropout, ACallNeedsAState) {
  for (const std::string backend : {"auto", "cpu", "reference"}) {
    Call<float> call({.seqlen_q = 4, .seqlen_k = 4});
    call.options.backend = backend;
    call.options.features.dropout.p = 0.25;
    // Explaining the call needs none.
    EXPECT_FALSE(explain(call.backward_args(), call.options).backend.empty());
    EXPECT_NO_THROW(backward_workspace(call.backward_args(), call.options));
    expect_invalid({"dropout_state is null", "0.25"}, [&] { call.forward(); });
    expect_invalid({"dropout_state is null", "0.25"}, [&] { call.backward(); });
    call.options.features.dropout.state =
        reinterpret_cast<const uint64_t*>(reinterpret_cast<const char*>(kState.data()) + 1);
    expect_invalid({"dropout_state is not aligned"}, [&] { call.forward(); });
  }
}

/// Calls without dropout do not read origins; others are told which of them is wrong.
TEST(Dropout, OriginsFitTheCall) {
  int32_t sixteens[4] = {};
  const TensorView wrong = TensorView::contiguous(sixteens, DataType::kInt32, {1, 4}),
                   floats = TensorView::contiguous(sixteens, DataType::kFloat32, {1, 3});
  const auto is_refused = [&](const Dropout& dropout, std::initializer_list<std::string> words) {
    for (const std::string backend : {"cpu", "reference"}) {
      Call<float> call({.seqlen_q = 40, .seqlen_k = 17});
      call.options.backend = backend;
      call.options.features.dropout = dropout;
      EXPECT_NO_THROW(call.run());
      call.options.features.dropout.p = 0.25;
      call.options.features.dropout.state = kState.data();
      expect_invalid(words, [&] { call.forward(); });
      expect_invalid(words, [&] { call.backward(); });
    }
  };
  is_refused({.q_origin = wrong}, {"dropout_q_origin is int32 [1, 4]", "[1, 3]", "ceil(seqlen_q / 16)"});
  is_refused({.q_origin = floats}, {"dropout_q_origin is float32 [1, 3]", "int32"});
  is_refused({.k_origin = wrong}, {"dropout_k_origin is int32 [1, 4]", "[1, 2]", "ceil(seqlen_k / 16)"});
  is_refused({.first_head = -1}, {"dropout_first_head is -1", "at least 0"});
  is_refused({.first_head = INT64_MAX}, {"dropout_first_head is 9223372036854775807", "at most"});
}

}  // namespace
}  // namespace flashmask::test
