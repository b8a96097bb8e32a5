// SPDX-License-Identifier: Apache-2.0
#pragma once

// One attention call with tensors of its own, for tests that look at a single property. Everything is
// contiguous and drawn from a seed; outputs begin as NaN.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>
#include <optional>
#include <string>
#include <vector>

#include "common/random.h"
#include "flashmask/attention.h"

namespace flashmask::test {

struct Sizes {
  int64_t batch = 1, seqlen_q = 0, seqlen_k = 0, heads_q = 1, heads_kv = 1, head_dim = 16, head_dim_v = 16;
};

/// `Real` is float or double; the dtype of the call follows.
template <typename Real>
class Call {
 public:
  explicit Call(const Sizes& s, uint64_t seed = 1) : sizes(s) {
    Random random(seed);
    for (auto [tensor, count] : {std::pair{&q, s.batch * s.seqlen_q * s.heads_q * s.head_dim},
                                 {&k, s.batch * s.seqlen_k * s.heads_kv * s.head_dim},
                                 {&v, s.batch * s.seqlen_k * s.heads_kv * s.head_dim_v},
                                 {&dout, s.batch * s.seqlen_q * s.heads_q * s.head_dim_v},
                                 {&dlse, s.batch * s.heads_q * s.seqlen_q}}) {
      for (int64_t n = 0; n < count; ++n) {
        // Box-Muller
        tensor->push_back(static_cast<Real>(std::sqrt(-2 * std::log(1 - random.real())) *
                                            std::cos(2 * std::numbers::pi * random.real())));
      }
    }
    constexpr Real nan = std::numeric_limits<Real>::quiet_NaN();
    out.assign(dout.size(), nan);
    lse.assign(dlse.size(), nan);
    dq.assign(q.size(), nan);
    dk.assign(k.size(), nan);
    dv.assign(v.size(), nan);
  }

  Sizes sizes;
  std::vector<Real> q, k, v, dout, dlse, out, lse, dq, dk, dv;
  std::vector<Real> sink, dsink;  ///< [heads_q]; no sinks where empty
  bool with_dlse = false;
  std::optional<Mask> mask;
  PlanView plan;
  /// [dense_batch, dense_heads, seqlen_q, seqlen_k]; empty: no dense mask.
  std::vector<uint8_t> dense;
  int64_t dense_batch = 1, dense_heads = 1;
  bool dense_by_columns = false;  ///< each key's rows one after the other
  Options options;
  ExecutedTiles executed;

  ForwardArgs forward_args() const {
    ForwardArgs args;
    fill(args);
    return args;
  }
  BackwardArgs backward_args() const {
    BackwardArgs args;
    fill(args);
    const Sizes& s = sizes;
    args.dout = view(dout, {s.batch, s.seqlen_q, s.heads_q, s.head_dim_v});
    if (with_dlse) args.dlse = view(dlse, {s.batch, s.heads_q, s.seqlen_q});
    args.dq = view(dq, {s.batch, s.seqlen_q, s.heads_q, s.head_dim});
    args.dk = view(dk, {s.batch, s.seqlen_k, s.heads_kv, s.head_dim});
    args.dv = view(dv, {s.batch, s.seqlen_k, s.heads_kv, s.head_dim_v});
    if (!dsink.empty()) args.dsink = view(dsink, {s.heads_q});
    return args;
  }
  /// Every head gets a sink of its own, with a gradient.
  void add_sink(uint64_t seed = 1) {
    Random random(seed);
    for (int64_t h = 0; h < sizes.heads_q; ++h) sink.push_back(static_cast<Real>(4 * random.real() - 1));
    dsink.assign(sink.size(), std::numeric_limits<Real>::quiet_NaN());
  }
  void forward() {
    options.executed_tiles = &executed;
    set_sink();
    std::vector<std::byte> workspace(forward_workspace(forward_args(), options), std::byte{0xff});
    flashmask::forward(forward_args(), workspace, options);
  }
  void backward() {
    options.executed_tiles = &executed;
    set_sink();
    std::vector<std::byte> workspace(backward_workspace(backward_args(), options), std::byte{0xff});
    flashmask::backward(backward_args(), workspace, options);
  }
  void run() {
    forward();
    backward();
  }

  /// Runs the oracle on this call's inputs, in float64, under a dense matrix that the caller made.
  Call<double> oracle(const std::vector<uint8_t>& visible, int64_t visible_batch = 1, int64_t visible_heads = 1) const {
    Call<double> other(sizes);
    const auto copy = [](const std::vector<Real>& from) { return std::vector<double>(from.begin(), from.end()); };
    other.q = copy(q);
    other.k = copy(k);
    other.v = copy(v);
    other.dout = copy(dout);
    other.dlse = copy(dlse);
    other.with_dlse = with_dlse;
    other.dense = visible;
    other.dense_batch = visible_batch;
    other.dense_heads = visible_heads;
    other.sink = copy(sink);
    other.dsink = copy(dsink);
    other.options.softmax_scale = options.softmax_scale;
    other.options.features = options.features;
    other.options.features.split_size = 0;  // the oracle has one order of sums
    other.options.backend = "reference";
    return other;
  }

  static constexpr DataType kDtype = sizeof(Real) == 8 ? DataType::kFloat64 : DataType::kFloat32;
  static TensorView view(const std::vector<Real>& data, std::initializer_list<int64_t> shape) {
    return TensorView::contiguous(data.data(), kDtype, shape);
  }

 private:
  void set_sink() {
    if (!sink.empty()) options.features.sink = view(sink, {sizes.heads_q});
  }
  template <typename Args>
  void fill(Args& args) const {
    const Sizes& s = sizes;
    args.q = view(q, {s.batch, s.seqlen_q, s.heads_q, s.head_dim});
    args.k = view(k, {s.batch, s.seqlen_k, s.heads_kv, s.head_dim});
    args.v = view(v, {s.batch, s.seqlen_k, s.heads_kv, s.head_dim_v});
    args.out = view(out, {s.batch, s.seqlen_q, s.heads_q, s.head_dim_v});
    args.lse = view(lse, {s.batch, s.heads_q, s.seqlen_q});
    args.mask = mask;
    args.plan = plan;
    if (!dense.empty()) {
      args.dense_mask =
          TensorView::contiguous(dense.data(), DataType::kBool, {dense_batch, dense_heads, s.seqlen_q, s.seqlen_k});
      if (dense_by_columns) args.dense_mask.stride[2] = 1, args.dense_mask.stride[3] = s.seqlen_q;
    }
  }
};

/// Largest |a - b|; infinity where only one is finite or either is NaN. Equal infinities agree.
template <typename A, typename B>
double max_error(const std::vector<A>& a, const std::vector<B>& b) {
  double worst = a.size() == b.size() ? 0 : std::numeric_limits<double>::infinity();
  for (std::size_t n = 0; n < a.size() && n < b.size(); ++n) {
    const double x = static_cast<double>(a[n]), y = static_cast<double>(b[n]);
    if (x == y) continue;
    const double error = std::abs(x - y);
    worst = std::isfinite(error) ? std::max(worst, error) : std::numeric_limits<double>::infinity();
  }
  return worst;
}

template <typename Real>
double max_value(const std::vector<Real>& a) {
  double largest = 0;
  for (const Real x : a) {
    if (std::isfinite(x)) largest = std::max(largest, std::abs(static_cast<double>(x)));
  }
  return largest;
}

}  // namespace flashmask::test
