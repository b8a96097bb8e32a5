// SPDX-License-Identifier: Apache-2.0

// What `flashmask verify` does not ask of the backward of mma.sync: the same bits with any number of CTAs, and where
// offsets take more than 32 bits; partial results that are what the ordinary call rounds; whose query heads are split.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "common/element.h"
#include "common/random.h"
#include "flashmask/attention.h"
#include "flashmask/builders.h"

namespace flashmask {
namespace {

constexpr Device kDevice{Device::Kind::kCuda, 0};

/// Address space of zeros, of which only what is touched takes memory.
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
  /// As bfloat16.
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

/// A forward and a backward under a causal band. `far`: tensors' rows lie so far apart that offsets exceed 2^31.
Results run(const Sizes& s, const Options& options, bool far = false) {
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
  for (const auto* output : {&out, &dq, &dk, &dv}) (*output)->poison();
  std::vector<float> lse(static_cast<std::size_t>(s.batch * s.heads_q * s.seqlen_q));
  TensorView lse_view = TensorView::contiguous(lse.data(), DataType::kFloat32, {s.batch, s.heads_q, s.seqlen_q});
  lse_view.device = kDevice;
  const Mask mask = masks::causal(s.seqlen_q, s.seqlen_k);

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
  // As an ordinary backward has it.
  out->round();
  workspace.assign(backward_workspace(args, options), std::byte{0xff});
  backward(args, workspace, options);
  return {out->bits(), dq->bits(), dk->bits(), dv->bits()};
}

Options options_of(const std::string& kernels) {
  Options options;
  options.backend = "cuda";
  options.kernels = kernels;
  options.deterministic = true;
  return options;
}

/// Whether a backward adds up parts of dk and dv. Nothing is run.
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

/// Grouped heads, and key tiles that wait for each other.
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

/// Without features, and with those of which Hopper has no kernels of partial results.
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

INSTANTIATE_TEST_SUITE_P(KernelSets, Backward, testing::Values("sm80", "sm86"),
                         [](const auto& of) { return std::string(of.param); });

}  // namespace
}  // namespace flashmask
