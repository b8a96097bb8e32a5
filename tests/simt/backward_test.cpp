// SPDX-License-Identifier: Apache-2.0

// Tests of mma.sync's backward beyond `flashmask verify`: equal bits with any number of CTAs, offsets of more than 32
// bits, partial results that round to the ordinary call's, calls that split query heads, and values that are not
// finite, very large or very small in dq's fixed-point sums, with the scales of these sums.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/sm80/backward/instance.h"
#include "common/element.h"
#include "common/random.h"
#include "flashmask/attention.h"
#include "flashmask/builders.h"
#include "flashmask/visible_extent.h"

namespace flashmask {
namespace {

constexpr Device kDevice{Device::Kind::kCuda, 0};

/// Address space of zeros that takes memory only where touched.
class Pages {
 public:
  explicit Pages(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (data_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Pages() { munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  void* data() const { return data_; }

 private:
  std::size_t bytes_;
  void* data_;
};

struct Sizes {
  int64_t batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v;
};

/// A tensor [batch, seqlen, heads, columns] whose rows lie `row_stride` elements apart.
class Rows {
 public:
  Rows(DataType dtype, int64_t batch, int64_t seqlen, int64_t heads, int64_t columns, int64_t row_stride)
      : pages_(static_cast<std::size_t>(batch * seqlen * row_stride) * element_size(dtype)) {
    view = TensorView::contiguous(pages_.data(), dtype, {batch, seqlen, heads, columns});
    view.stride = {seqlen * row_stride, row_stride, columns, 1};
    view.device = kDevice;
  }

  TensorView view;

  void fill(Random& random) {
    for_each([&](int64_t at) { store_element(view, at, 2 * random.real() - 1); });
  }
  void poison() {
    for_each([&](int64_t at) { store_element(view, at, std::numeric_limits<double>::quiet_NaN()); });
  }
  /// Leaves values that bfloat16 has.
  void round() {
    for_each([&](int64_t at) { store_element(view, at, bfloat16_to_float(rounded(at))); });
  }
  /// Values as bfloat16.
  std::vector<uint16_t> bits() const {
    std::vector<uint16_t> all;
    for_each([&](int64_t at) { all.push_back(rounded(at)); });
    return all;
  }

 private:
  uint16_t rounded(int64_t at) const { return float_to_bfloat16(static_cast<float>(load_element(view, at))); }
  template <typename F>
  void for_each(const F& f) const {
    for (int64_t b = 0; b < view.shape[0]; ++b) {
      for (int64_t s = 0; s < view.shape[1]; ++s) {
        for (int64_t n = 0; n < view.shape[2] * view.shape[3]; ++n) f(b * view.stride[0] + s * view.stride[1] + n);
      }
    }
  }

  Pages pages_;
};

/// Results in bfloat16, to which partial ones are rounded.
struct Results {
  std::vector<uint16_t> out, dq, dk, dv;
  bool operator==(const Results&) const = default;
};

struct Inputs {
  TensorView q, k, v, dout;
};
using Change = std::function<void(const Inputs&)>;

/// A forward and a backward under a mask. `far`: tensors' rows lie so far apart that offsets exceed 2^31. `change` may
/// write to the inputs.
Results run(const Sizes& s, const Options& options, const Mask& mask, bool far = false, const Change& change = {}) {
  const auto tensor = [&](DataType dtype, int64_t seqlen, int64_t heads, int64_t columns) {
    return std::make_unique<Rows>(dtype, s.batch, seqlen, heads, columns, far ? int64_t{1} << 24 : heads * columns);
  };
  const auto given = [&](auto... shape) { return tensor(DataType::kBFloat16, shape...); };
  const auto result = [&](auto... shape) {
    return tensor(options.features.partial_out ? DataType::kFloat32 : DataType::kBFloat16, shape...);
  };
  const auto q = given(s.seqlen_q, s.heads_q, s.head_dim), dq = result(s.seqlen_q, s.heads_q, s.head_dim),
             out = result(s.seqlen_q, s.heads_q, s.head_dim_v), dout = given(s.seqlen_q, s.heads_q, s.head_dim_v),
             k = given(s.seqlen_k, s.heads_kv, s.head_dim), dk = result(s.seqlen_k, s.heads_kv, s.head_dim),
             v = given(s.seqlen_k, s.heads_kv, s.head_dim_v), dv = result(s.seqlen_k, s.heads_kv, s.head_dim_v);
  Random random(7);
  for (const auto* input : {&q, &k, &v, &dout}) (*input)->fill(random);
  if (change) change({q->view, k->view, v->view, dout->view});
  for (const auto* output : {&out, &dq, &dk, &dv}) (*output)->poison();
  std::vector<float> lse(static_cast<std::size_t>(s.batch * s.heads_q * s.seqlen_q));
  TensorView lse_view = TensorView::contiguous(lse.data(), DataType::kFloat32, {s.batch, s.heads_q, s.seqlen_q});
  lse_view.device = kDevice;

  ForwardArgs forward_args;
  forward_args.q = q->view, forward_args.k = k->view, forward_args.v = v->view;
  forward_args.out = out->view, forward_args.lse = lse_view;
  forward_args.mask = mask;
  BackwardArgs args;
  args.q = q->view, args.k = k->view, args.v = v->view, args.out = out->view, args.lse = lse_view;
  args.dout = dout->view, args.dq = dq->view, args.dk = dk->view, args.dv = dv->view;
  args.mask = mask;
  std::vector<std::byte> workspace(forward_workspace(forward_args, options), std::byte{0xff});
  forward(forward_args, workspace, options);
  // An ordinary backward reads the rounded out.
  out->round();
  workspace.assign(backward_workspace(args, options), std::byte{0xff});
  backward(args, workspace, options);
  return {out->bits(), dq->bits(), dk->bits(), dv->bits()};
}

/// Under a causal band.
Results run(const Sizes& s, const Options& options, bool far = false, const Change& change = {}) {
  return run(s, options, masks::causal(s.seqlen_q, s.seqlen_k), far, change);
}

Options options_of(const std::string& kernels) {
  Options options;
  options.backend = "cuda";
  options.kernels = kernels;
  options.deterministic = true;
  return options;
}

/// True if a backward adds up parts of dk and dv. Nothing is run.
bool splits_query_heads(const Sizes& s, const Options& options) {
  const auto tensor = [&](int64_t seqlen, int64_t heads, int64_t columns) {
    TensorView view = TensorView::contiguous(nullptr, DataType::kBFloat16, {s.batch, seqlen, heads, columns});
    view.device = kDevice;
    return view;
  };
  BackwardArgs args;
  args.q = args.dq = tensor(s.seqlen_q, s.heads_q, s.head_dim);
  args.out = args.dout = tensor(s.seqlen_q, s.heads_q, s.head_dim_v);
  args.k = args.dk = tensor(s.seqlen_k, s.heads_kv, s.head_dim);
  args.v = args.dv = tensor(s.seqlen_k, s.heads_kv, s.head_dim_v);
  args.lse = TensorView::contiguous(nullptr, DataType::kFloat32, {s.batch, s.heads_q, s.seqlen_q});
  args.lse.device = kDevice;
  return std::ranges::any_of(explain(args, options).kernels,
                             [](const std::string& id) { return id.ends_with(".reduce_dkv"); });
}

class Backward : public testing::TestWithParam<const char*> {};

/// Grouped heads, and rows that several key tiles add to.
constexpr Sizes kSmall{1, 200, 330, 4, 2, 64, 64};

TEST_P(Backward, NumberOfCtasChangesNoBit) {
  Options options = options_of(GetParam());
  const Results all = run(kSmall, options);
  for (const int ctas : {1, 2, 5}) {
    options.max_ctas = ctas;
    EXPECT_EQ(run(kSmall, options), all) << ctas << " CTAs";
  }
}

/// Rows beyond the 128th of each tensor begin more than 2^31 elements from the first.
TEST_P(Backward, OffsetsTake64Bits) {
  const Options options = options_of(GetParam());
  for (const Sizes& s : {Sizes{1, 150, 140, 1, 1, 64, 64}, Sizes{1, 131, 135, 1, 1, 256, 72}})
    EXPECT_EQ(run(s, options, true), run(s, options)) << s.head_dim;
}

/// Tests calls without features, and with features for which Hopper has no kernels of partial results.
TEST_P(Backward, PartialResultsAreWhatIsRounded) {
  constexpr uint64_t kState[] = {3, 5};
  for (const Sizes& s : {kSmall, Sizes{1, 65, 131, 2, 2, 128, 96}, Sizes{1, 70, 130, 2, 1, 256, 72}}) {
    for (const Features& asked : {Features{}, Features{.softcap = 20, .dropout = {.p = 0.2, .state = kState}}}) {
      Options options = options_of(GetParam());
      options.features = asked;
      const Results whole = run(s, options);
      options.features.partial_out = true;
      EXPECT_EQ(run(s, options), whole) << "head_dim " << s.head_dim << ", softcap " << asked.softcap;
    }
  }
}

/// Fewer key tiles than multiprocessors, and more: query heads of a group are split or not.
TEST_P(Backward, SplitsQueryHeadsOfFewKeyTiles) {
  const Options options = options_of(GetParam());
  EXPECT_TRUE(splits_query_heads(kSmall, options));
  EXPECT_FALSE(splits_query_heads({1, 200, 330, 2, 2, 64, 64}, options)) << "one query head for each key head";
  EXPECT_FALSE(splits_query_heads({20, 200, 1280, 4, 2, 64, 64}, options)) << "enough key tiles";
}

/// Index of an element of batch entry 0 in a contiguous tensor [batch, seqlen, heads, columns].
int64_t place(const TensorView& t, int64_t row, int64_t head, int64_t column) {
  return (row * t.shape[2] + head) * t.shape[3] + column;
}
bool is_nan(uint16_t bits) { return std::isnan(bfloat16_to_float(bits)); }

/// No integer says that something was not finite.
TEST_P(Backward, NanOfOneRowIsInItsDqAlone) {
  constexpr int64_t kRow = 70, kHead = 1;
  const Options options = options_of(GetParam());
  for (const Sizes& s : {kSmall, Sizes{1, 100, 140, 2, 2, 256, 72}}) {
    const Results finite = run(s, options);
    const Results ours = run(s, options, false, [](const Inputs& inputs) {
      store_element(inputs.dout, place(inputs.dout, kRow, kHead, 5), std::numeric_limits<double>::quiet_NaN());
    });
    for (std::size_t at = 0; at < ours.dq.size(); ++at) {
      const auto row = static_cast<int64_t>(at) / s.head_dim;
      if (row == kRow * s.heads_q + kHead) {
        ASSERT_TRUE(is_nan(ours.dq[at])) << "column " << static_cast<int64_t>(at) % s.head_dim;
      } else {
        ASSERT_EQ(ours.dq[at], finite.dq[at]) << "row " << row / s.heads_q << ", head " << row % s.heads_q;
      }
    }
  }
}

/// The key's weight is 0, and its part of dq 0 times infinity.
TEST_P(Backward, InfiniteKeyWithScoreOfMinusInfinityShowsInDq) {
  constexpr int64_t kKey = 300, kKeyBlock = 256, kColumn = 3;
  const Sizes s{1, 330, 330, 1, 1, 64, 64};
  const Results ours = run(s, options_of(GetParam()), false, [&](const Inputs& inputs) {
    for (int64_t row = 0; row < s.seqlen_q; ++row) store_element(inputs.q, place(inputs.q, row, 0, kColumn), 0.5);
    store_element(inputs.k, place(inputs.k, kKey, 0, kColumn), -std::numeric_limits<double>::infinity());
  });
  for (int64_t row = kKey; row < s.seqlen_q; ++row) {
    ASSERT_FALSE(is_nan(ours.out[static_cast<std::size_t>(row * s.head_dim_v)])) << "its score is -inf";
    EXPECT_TRUE(is_nan(ours.dq[static_cast<std::size_t>(row * s.head_dim + kColumn)])) << "row " << row;
  }
  // Rows above it see none of the key's tile.
  EXPECT_FALSE(std::ranges::any_of(ours.dq.begin(), ours.dq.begin() + kKeyBlock * s.head_dim, is_nan));
}

/// A causal mask on the device. Each batch entry has fewer rows and keys than the tensors, and the second head one row
/// less.
class PaddedMask {
 public:
  PaddedMask(const Sizes& s, const std::vector<VisibleExtent>& extents) {
    for (const VisibleExtent& extent : extents) {
      for (const int32_t less : {0, 1}) {
        for (int32_t key = 0; key < s.seqlen_k; ++key) lts_.push_back(key < extent.keys ? extent.rows - less : 0);
      }
    }
    TensorView view = TensorView::contiguous(lts_.data(), DataType::kInt32, {s.batch, 2, s.seqlen_k, 1});
    view.device = kDevice;
    mask = from_startend_row_indices(view, true, s.seqlen_q, 0);
  }
  std::optional<Mask> mask;

 private:
  std::vector<int32_t> lts_;
};

/// Writes `value` to what lies past the extents.
void fill_padding(const Inputs& inputs, const std::vector<VisibleExtent>& extents, double value) {
  const auto fill = [&](const TensorView& t, int32_t VisibleExtent::* end) {
    const int64_t row = t.shape[2] * t.shape[3];
    for (int64_t b = 0; b < t.shape[0]; ++b) {
      for (int64_t at = extents[static_cast<std::size_t>(b)].*end * row; at < t.shape[1] * row; ++at)
        store_element(t, b * t.stride[0] + at, value);
    }
  };
  fill(inputs.q, &VisibleExtent::rows), fill(inputs.dout, &VisibleExtent::rows);
  fill(inputs.k, &VisibleExtent::keys), fill(inputs.v, &VisibleExtent::keys);
}

/// In tiles of every table, with sums of dq in floats and, with the features, in integers.
TEST_P(Backward, PaddingCountsAsZeros) {
  constexpr uint64_t kState[] = {3, 5};
  const std::vector<VisibleExtent> extents{{131, 131}, {70, 65}};
  for (const auto& [head_dim, head_dim_v] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}}) {
    const Sizes s{2, 150, 200, 2, 1, head_dim, head_dim_v};
    const PaddedMask padded(s, extents);
    for (const bool featured : {false, true}) {
      Options options = options_of(GetParam());
      options.deterministic = featured;
      options.max_ctas = 1;  // one order of additions
      if (featured) options.features = {.softcap = 20, .dropout = {.p = 0.2, .state = kState}};
      const auto with = [&](double value) {
        return run(s, options, *padded.mask, false,
                   [&](const Inputs& inputs) { fill_padding(inputs, extents, value); });
      };
      const Results zeros = with(0);
      EXPECT_FALSE(std::ranges::any_of(zeros.dq, is_nan)) << head_dim;
      EXPECT_EQ(with(std::numeric_limits<double>::quiet_NaN()), zeros) << head_dim << ", featured " << featured;
      EXPECT_EQ(with(1e30), zeros) << head_dim << ", featured " << featured;
    }
  }
}

/// Squares of such gradients and values are no floats.
TEST_P(Backward, SumsHaveTheirDigitsInAnyUnit) {
  const Options options = options_of(GetParam());
  const std::vector<uint16_t> wanted = run(kSmall, options).dq;
  float most = 0;
  for (const uint16_t bits : wanted) most = std::max(most, std::abs(bfloat16_to_float(bits)));
  for (TensorView Inputs::* scaled : {&Inputs::dout, &Inputs::v}) {
    for (const double unit : {0x1p-90, 0x1p70}) {
      const Results ours = run(kSmall, options, false, [&](const Inputs& inputs) {
        const TensorView& t = inputs.*scaled;
        for (int64_t at = 0; at < t.shape[1] * t.shape[2] * t.shape[3]; ++at)
          store_element(t, at, unit * load_element(t, at));
      });
      for (std::size_t at = 0; at < wanted.size(); ++at) {
        const double want = bfloat16_to_float(wanted[at]);
        ASSERT_NEAR(bfloat16_to_float(ours.dq[at]) / unit, want, std::abs(want) / 128 + most * 1e-6) << unit;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(KernelSets, Backward, testing::Values("sm80", "sm86"),
                         [](const auto& of) { return std::string(of.param); });

cuda::TensorRows rows_of(const TensorView& t) {
  return {t.data, t.stride[0], t.stride[2], t.stride[1], static_cast<int32_t>(t.shape[3])};
}

/// Finds by a plain loop the largest finite |K_jd| and |V_j| of keys [first, end) of a key head.
cuda::KeyMagnitudes plain_magnitudes(const TensorView& k, const TensorView& v, int64_t batch, int64_t head,
                                     int64_t first, int64_t end) {
  const auto value = [&](const TensorView& t, int64_t key, int64_t column) {
    return load_element(t, batch * t.stride[0] + key * t.stride[1] + head * t.stride[2] + column);
  };
  double most_k = 0, most_v = 0;
  for (int64_t key = first; key < end; ++key) {
    double squares = 0;
    for (int64_t column = 0; column < k.shape[3]; ++column) {
      const double size = std::abs(value(k, key, column));
      if (std::isfinite(size)) most_k = std::max(most_k, size);
    }
    for (int64_t column = 0; column < v.shape[3]; ++column) squares += std::pow(value(v, key, column), 2);
    most_v = std::max(most_v, std::sqrt(squares));
  }
  return {static_cast<float>(most_k), static_cast<float>(most_v)};
}

TEST(KeyMagnitudes, AreThoseOfAPlainLoop) {
  constexpr int64_t kBatch = 2, kKeys = 300, kHeads = 3, kBlock = cuda::KeyMagnitudeParams::kKeys, kBlocks = 2;
  for (const auto& [columns_k, columns_v] : {std::pair{40, 72}, std::pair{256, 8}, std::pair{64, 200}}) {
    Rows k(DataType::kBFloat16, kBatch, kKeys, kHeads, columns_k, kHeads * columns_k + 16),
        v(DataType::kBFloat16, kBatch, kKeys, kHeads, columns_v, kHeads * columns_v + 8);
    Random random(3);
    k.fill(random), v.fill(random);
    store_element(k.view, k.view.stride[1] * 7, std::numeric_limits<double>::infinity());
    store_element(k.view, k.view.stride[1] * 280 + 5, std::numeric_limits<double>::quiet_NaN());
    std::vector<cuda::KeyMagnitudes> ours(kBatch * kHeads * kBlocks, {-1, -1});
    cuda::LaunchChain(nullptr).launch("magnitudes", sm80::bwd::magnitude_instance(DataType::kBFloat16).kernel,
                                      kBatch * kHeads * kBlocks, cuda::kRowThreads, 0,
                                      cuda::KeyMagnitudeParams{.k = rows_of(k.view),
                                                               .v = rows_of(v.view),
                                                               .magnitudes = ours.data(),
                                                               .extents = {},
                                                               .seqlen_k = kKeys,
                                                               .blocks = kBlocks,
                                                               .heads = kHeads});
    for (int64_t n = 0; n < kBatch * kHeads * kBlocks; ++n) {
      const int64_t first = n % kBlocks * kBlock;
      const cuda::KeyMagnitudes want = plain_magnitudes(k.view, v.view, n / kBlocks / kHeads, n / kBlocks % kHeads,
                                                        first, std::min(first + kBlock, kKeys));
      EXPECT_EQ(ours[static_cast<std::size_t>(n)].k, want.k) << n;
      EXPECT_NEAR(ours[static_cast<std::size_t>(n)].v, want.v, 1e-5 * want.v) << n;
    }
  }
}

}  // namespace
}  // namespace flashmask
