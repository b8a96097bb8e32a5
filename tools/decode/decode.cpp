// SPDX-License-Identifier: Apache-2.0
#include "decode/decode.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <span>

#include "common/random.h"
#include "flashmask/status.h"
#include "numerics/accuracy.h"
#include "numerics/oracle.h"
#include "numerics/plain.h"
#include "numerics/tensor.h"

namespace flashmask::decode {
namespace {

using numerics::HeadArray;
using numerics::PoisonedBytes;
using numerics::Tensor;

constexpr int64_t kSampledRows = 16;
constexpr int kRepetitions = 5;

double seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median_seconds(const std::function<void()>& work) {
  std::vector<double> times;
  for (int n = 0; n < kRepetitions; ++n) times.push_back(seconds(work));
  std::ranges::nth_element(times, times.begin() + kRepetitions / 2);
  return times[kRepetitions / 2];
}

/// Rows [first, first + count) of the first dimension.
TensorView rows(TensorView t, int64_t first, int64_t count) {
  t.data = static_cast<std::byte*>(t.data) + static_cast<std::size_t>(first * t.stride[0]) * element_size(t.dtype);
  t.shape[0] = count;
  return t;
}

/// [rows, heads, dim] as a batch of one.
TensorView batched(const TensorView& t) {
  TensorView view = TensorView::contiguous(t.data, t.dtype, {1, t.shape[0], t.shape[1], t.shape[2]});
  return view;
}

int32_t* int32_data(const Tensor& t) { return static_cast<int32_t*>(t.view().data); }

/// One sequence, its cache and the calls over it.
class Decoding {
 public:
  explicit Decoding(const DecodeOptions& options)
      : o_(options),
        keys_(o_.prompt + o_.drafts),
        q_(draw(o_.heads)),
        k_(draw(o_.kv_heads)),
        v_(draw(o_.kv_heads)),
        figures_{.options = options} {
    draw_tree();
    order_pages();
  }

  DecodeFigures run() {
    figures_.append_prompt = seconds([&] { append(0, o_.prompt); });
    Results prompt(o_, o_.prompt);
    figures_.prefill = seconds([&] { attend(0, o_.prompt, {}, prompt); });
    const int64_t step = std::max<int64_t>(o_.prompt / kSampledRows, 1);
    std::vector<int64_t> sampled;
    for (int64_t r = o_.prompt - 1; r >= 0; r -= step) sampled.push_back(r);
    check("prompt", 0, prompt, sampled);

    Results one(o_, 1);
    figures_.one_row = median_seconds([&] { attend(o_.prompt - 1, 1, {}, one); });

    figures_.append_drafts = seconds([&] { append(o_.prompt, o_.drafts); });
    Results drafts(o_, o_.drafts);
    figures_.verify = median_seconds([&] { attend(o_.prompt, o_.drafts, tree_mask(), drafts); });
    std::vector<int64_t> all(static_cast<std::size_t>(o_.drafts));
    std::iota(all.begin(), all.end(), o_.prompt);
    check("drafts", o_.prompt, drafts, all);
    explain(drafts);
    return std::move(figures_);
  }

 private:
  struct Results {
    Results(const DecodeOptions& o, int64_t count)
        : out(Tensor::contiguous(o.dtype, {1, count, o.heads, o.head_dim})),
          lse(Tensor::contiguous(DataType::kFloat32, {1, o.heads, count})) {}
    Tensor out, lse;
  };

  Tensor draw(int64_t heads) {
    Tensor t = Tensor::contiguous(o_.dtype, {keys_, heads, o_.head_dim});
    // The sum of twelve uniform numbers is close to normal.
    t.fill([&] {
      double sum = -6;
      for (int n = 0; n < 12; ++n) sum += random_.real();
      return sum;
    });
    return t;
  }

  /// Draws each node's parent among the few before it, so that the tree has both depth and branches.
  void draw_tree() {
    constexpr int64_t kNear = 5;
    for (int64_t t = 0; t < o_.drafts; ++t) {
      const int64_t parent = t == 0 ? -1 : random_.integer(std::max<int64_t>(t - kNear, 0), t - 1);
      figures_.parents.push_back(static_cast<int32_t>(parent));
      figures_.depth.push_back(parent < 0 ? 0 : figures_.depth[static_cast<std::size_t>(parent)] + 1);
    }
    const int64_t words = (o_.drafts + 31) / 32;
    tail_ = Tensor::contiguous(DataType::kInt32, {1, o_.drafts, words});
    depth_ = Tensor::contiguous(DataType::kInt32, {1, o_.drafts});
    std::ranges::copy(figures_.depth, int32_data(*depth_));
    for (int64_t t = 0; t < o_.drafts; ++t) {
      for (int64_t w = 0; w < words; ++w) {
        uint32_t bits = 0;
        for (int64_t u = 32 * w; u < std::min(32 * w + 32, o_.drafts); ++u)
          bits |= uint32_t{figures_.is_ancestor(u, t)} << u % 32;
        int32_data(*tail_)[t * words + w] = static_cast<int32_t>(bits);
      }
    }
  }

  /// Gives the sequence pages out of a larger cache, in an order without order; all of it is NaN at first.
  void order_pages() {
    const int64_t count = (keys_ + o_.page_size - 1) / o_.page_size;
    figures_.pages = count + count / 8 + 1;
    std::vector<int32_t> order(static_cast<std::size_t>(figures_.pages));
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t n = order.size(); n > 1; --n)
      std::swap(order[n - 1], order[static_cast<std::size_t>(random_.integer(0, static_cast<int64_t>(n) - 1))]);
    order.resize(static_cast<std::size_t>(count));
    figures_.table = order;
    table_ = Tensor::contiguous(DataType::kInt32, {1, count});
    std::ranges::copy(order, int32_data(*table_));
    for (std::optional<Tensor>* cache : {&k_cache_, &v_cache_})
      *cache = Tensor::contiguous(o_.dtype, {figures_.pages, o_.page_size, o_.kv_heads, o_.head_dim});
  }

  KvCacheView cache(int64_t length) {
    *int32_data(seqlens_) = static_cast<int32_t>(length);
    return {.k = k_cache_->view(), .v = v_cache_->view(), .page_table = table_->view(), .seqlens = seqlens_.view()};
  }
  SequenceMaskView tree_mask() const { return {.tail = tail_->view(), .tail_depth = depth_->view()}; }
  Options call_options() const { return {.threads = o_.threads, .backend = o_.backend}; }

  void append(int64_t first, int64_t count) {
    append_kv({.k = batched(rows(k_.view(), first, count)),
               .v = batched(rows(v_.view(), first, count)),
               .cache = cache(first + count)},
              call_options());
  }

  CachedForwardArgs args(int64_t first, int64_t count, const SequenceMaskView& mask, const Results& results) {
    return {.q = batched(rows(q_.view(), first, count)),
            .out = results.out.view(),
            .lse = results.lse.view(),
            .cache = cache(first + count),
            .mask = mask};
  }
  void attend(int64_t first, int64_t count, const SequenceMaskView& mask, Results& results) {
    const CachedForwardArgs call = args(first, count, mask, results);
    std::vector<std::byte> workspace(cached_forward_workspace(call, call_options()));
    cached_forward(call, workspace, call_options());
  }

  /// True if token r sees token j: the prompt sees what is before it, a draft its ancestors, too.
  bool sees(int64_t r, int64_t j) const {
    return j < o_.prompt || r < o_.prompt ? j <= r : figures_.is_ancestor(j - o_.prompt, r - o_.prompt);
  }

  /// Compares rows of a call that began at row `first`.
  void check(const std::string& what, int64_t first, const Results& results, const std::vector<int64_t>& sampled) {
    const auto count = static_cast<int64_t>(sampled.size());
    const HeadArray no_gradient(1, o_.heads, count, o_.head_dim);
    numerics::HeadInputs inputs{.q = sampled_rows(q_, 0, sampled),
                                .k = by_heads(k_, o_.kv_heads),
                                .v = by_heads(v_, o_.kv_heads),
                                .dout = no_gradient,
                                .dlse = {}};
    std::vector<uint8_t> visible;
    for (const int64_t r : sampled) {
      for (int64_t j = 0; j < keys_; ++j) visible.push_back(sees(r, j));
    }
    const double scale = 1 / std::sqrt(static_cast<double>(o_.head_dim));
    const numerics::Results exact =
        run_oracle(inputs, TensorView::contiguous(visible.data(), DataType::kUInt8, {1, 1, count, keys_}), scale);
    const double plain_error =
        o_.dtype == DataType::kFloat32 ? 0 : largest_plain_error(inputs, count, scale, visible, exact.out);
    add_accuracy("out of the " + what, sampled_rows(results.out, first, sampled), exact.out, plain_error);
    HeadArray lse(1, o_.heads, count, 1);
    const int64_t rows_per_head = results.lse.view().shape[2];
    for (int64_t h = 0; h < o_.heads; ++h) {
      std::ranges::transform(sampled, lse.head(0, h).begin(),
                             [&](int64_t r) { return results.lse.at(h * rows_per_head + r - first); });
    }
    add_lse(what, lse, exact.lse);
  }

  /// Rows of a tensor [.., rows, heads, head_dim] whose first row is `first`.
  HeadArray sampled_rows(const Tensor& t, int64_t first, const std::vector<int64_t>& sampled) const {
    HeadArray array(1, o_.heads, static_cast<int64_t>(sampled.size()), o_.head_dim);
    for (int64_t h = 0; h < o_.heads; ++h) {
      auto to = array.head(0, h).begin();
      for (const int64_t r : sampled) {
        for (int64_t x = 0; x < o_.head_dim; ++x) *to++ = t.at(((r - first) * o_.heads + h) * o_.head_dim + x);
      }
    }
    return array;
  }

  HeadArray by_heads(const Tensor& t, int64_t heads) const {
    HeadArray array(1, heads, keys_, o_.head_dim);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t j = 0; j < keys_; ++j) {
        for (int64_t x = 0; x < o_.head_dim; ++x)
          array.head(0, h)[static_cast<std::size_t>(j * o_.head_dim + x)] = t.at((j * heads + h) * o_.head_dim + x);
      }
    }
    return array;
  }

  /// Largest error of the plain implementation, by which the accuracy rule goes (numerics/accuracy.h).
  double largest_plain_error(const numerics::HeadInputs& inputs, int64_t count, double scale,
                             const std::vector<uint8_t>& visible, const HeadArray& exact) const {
    const numerics::PlainCall call{o_.dtype, count, keys_, o_.head_dim, o_.head_dim, scale};
    double largest = 0;
    for (int64_t h = 0; h < o_.heads; ++h) {
      const int64_t hk = h / (o_.heads / o_.kv_heads);
      numerics::KeyHead keys(call, inputs.k.head(0, hk), inputs.v.head(0, hk));
      numerics::QueryHead queries(call, inputs.q.head(0, h), inputs.dout.head(0, h), {}, inputs.dout.head(0, h),
                                  inputs.dout.head(0, h));
      run_plain_head(call, keys, queries, visible.data());
      const auto want = exact.head(0, h);
      for (std::size_t n = 0; n < want.size(); ++n)
        largest = std::max(largest, std::fabs(numerics::round_to(o_.dtype, queries.out[n]) - want[n]));
    }
    return largest;
  }

  void add_accuracy(const std::string& what, const HeadArray& got, const HeadArray& want, double plain_error) {
    run::Accuracy a{.tensor = what, .plain_error = plain_error};
    for (std::size_t n = 0; n < got.values.size(); ++n) {
      const double error = std::fabs(got.values[n] - want.values[n]);
      a.max_error = std::isnan(error) ? INFINITY : std::max(a.max_error, error);
      a.max_reference = std::max(a.max_reference, std::fabs(want.values[n]));
    }
    a.limit =
        o_.dtype == DataType::kFloat32 ? numerics::float32_limit(a.max_reference) : numerics::plain_limit(plain_error);
    figures_.accuracy.push_back(std::move(a));
  }
  void add_lse(const std::string& what, const HeadArray& got, const HeadArray& want) {
    run::Accuracy a{.tensor = "lse of the " + what, .limit = numerics::lse_limit(o_.dtype)};
    for (std::size_t n = 0; n < got.values.size(); ++n) {
      const double error = std::fabs(got.values[n] - want.values[n]) / numerics::lse_unit(want.values[n]);
      a.max_error = std::isnan(error) ? INFINITY : std::max(a.max_error, error);
      a.max_reference = std::max(a.max_reference, std::fabs(want.values[n]));
    }
    figures_.accuracy.push_back(std::move(a));
  }

  void explain(const Results& drafts) {
    const CachedForwardArgs call = args(o_.prompt, o_.drafts, tree_mask(), drafts);
    const CachedExplanation said = explain_cached(call, call_options());
    figures_.backend = said.backend;
    figures_.kernel = said.kernel;
    figures_.bytes_read = said.bytes_read;
    figures_.workspace_bytes = said.workspace_bytes;
    figures_.mask_bytes = 4 * (tail_->size() + depth_->size());
    figures_.dense_bytes = o_.drafts * keys_;
    figures_.plan_bytes = static_cast<int64_t>(cached_plan_bytes({.max_batch = 1,
                                                                  .max_rows = o_.drafts,
                                                                  .max_keys = keys_ + o_.page_size,
                                                                  .heads_q = o_.heads,
                                                                  .heads_kv = o_.kv_heads,
                                                                  .head_dim = o_.head_dim,
                                                                  .head_dim_v = o_.head_dim},
                                                                 {}));
  }

  const DecodeOptions o_;
  const int64_t keys_;
  Random random_{o_.seed};
  const Tensor q_, k_, v_;
  std::optional<Tensor> k_cache_, v_cache_, table_, tail_, depth_;
  Tensor seqlens_ = Tensor::contiguous(DataType::kInt32, {1});
  DecodeFigures figures_;
};

}  // namespace

bool DecodeFigures::is_ancestor(int64_t u, int64_t t) const {
  while (t > u) t = parents[static_cast<std::size_t>(t)];
  return t == u;
}

bool DecodeFigures::passed() const { return std::ranges::all_of(accuracy, &run::Accuracy::passed); }

DecodeFigures decode(const DecodeOptions& options) { return Decoding(options).run(); }

}  // namespace flashmask::decode
