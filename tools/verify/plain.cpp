// SPDX-License-Identifier: Apache-2.0

// The plain implementation in a 16-bit type: one row of scores at a time, nothing tiled, nothing skipped.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "verify/oracle.h"

namespace flashmask::verify {
namespace {

using Floats = std::vector<float>;

Floats to_floats(std::span<const double> values) { return {values.begin(), values.end()}; }

/// [rows, columns] -> [columns, rows]
Floats transposed(const Floats& matrix, int64_t rows, int64_t columns) {
  Floats result(matrix.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c)
      result[static_cast<std::size_t>(c * rows + r)] = matrix[static_cast<std::size_t>(r * columns + c)];
  }
  return result;
}

/// y += factor * x
void add_scaled(float factor, const float* __restrict x, float* __restrict y, int64_t n) {
  for (int64_t at = 0; at < n; ++at) y[at] += factor * x[at];
}

void round_all(DataType dtype, Floats& values) {
  for (float& value : values) value = round_to(dtype, value);
}

/// One key head and what its query heads add up in it.
struct KeyHead {
  Floats k, v, k_transposed, v_transposed, dk, dv, inherited_dk;
};

/// One query head. `mean_error`: what the error of the out that a backward is handed adds to each row's mean
/// of dP; from it follow the inherited errors of dq and dk.
struct QueryHead {
  Floats q, dout, dlse, mean_error, out, dq, inherited_dq;
};

class PlainHead {
 public:
  PlainHead(const Case& c, KeyHead& keys, QueryHead& queries, const uint8_t* visible)
      : c_(c),
        keys_(keys),
        queries_(queries),
        visible_(visible),
        probability_(size(c.seqlen_k)),
        gradient_(size(c.seqlen_k)) {}

  void run() {
    for (int64_t i = 0; i < c_.seqlen_q; ++i) {
      if (!softmax_row(i)) continue;
      forward_row(i);
      score_gradient_row(i);
      backward_row(i);
      inherit_row(i);
    }
  }

 private:
  static std::size_t size(int64_t n) { return static_cast<std::size_t>(n); }
  bool visible(int64_t i, int64_t j) const { return visible_[i * c_.seqlen_k + j] != 0; }

  /// row x matrix, accumulated in fp32 and rounded to the type; `matrix` is [inner, seqlen_k].
  void multiply_row(const float* row, const Floats& matrix, int64_t inner, Floats& result) {
    std::fill(result.begin(), result.end(), 0.0f);
    for (int64_t d = 0; d < inner; ++d) add_scaled(row[d], matrix.data() + d * c_.seqlen_k, result.data(), c_.seqlen_k);
    round_all(c_.dtype, result);
  }

  /// probability_ = P of row i; false if the row sees nothing.
  bool softmax_row(int64_t i) {
    multiply_row(queries_.q.data() + i * c_.head_dim, keys_.k_transposed, c_.head_dim, probability_);
    const auto scale = static_cast<float>(c_.scale());
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < c_.seqlen_k; ++j) {
      if (visible(i, j)) largest = std::max(largest, probability_[size(j)] * scale);
    }
    if (std::isinf(largest)) return false;
    float sum = 0;
    for (int64_t j = 0; j < c_.seqlen_k; ++j) {
      float& p = probability_[size(j)];
      p = visible(i, j) ? std::exp(p * scale - largest) : 0.0f;
      sum += p;
    }
    for (float& p : probability_) p = round_to(c_.dtype, p / sum);
    return true;
  }

  void forward_row(int64_t i) {
    float* out = queries_.out.data() + i * c_.head_dim_v;
    for (int64_t j = 0; j < c_.seqlen_k; ++j) {
      if (visible(i, j)) add_scaled(probability_[size(j)], keys_.v.data() + j * c_.head_dim_v, out, c_.head_dim_v);
    }
  }

  /// gradient_ = dS of row i.
  void score_gradient_row(int64_t i) {
    multiply_row(queries_.dout.data() + i * c_.head_dim_v, keys_.v_transposed, c_.head_dim_v, gradient_);
    float mean = 0;
    for (int64_t j = 0; j < c_.seqlen_k; ++j) mean += probability_[size(j)] * gradient_[size(j)];
    const float dlse = queries_.dlse.empty() ? 0.0f : queries_.dlse[size(i)];
    for (int64_t j = 0; j < c_.seqlen_k; ++j) {
      gradient_[size(j)] = round_to(c_.dtype, probability_[size(j)] * (gradient_[size(j)] - mean + dlse));
    }
  }

  void backward_row(int64_t i) {
    const auto scale = static_cast<float>(c_.scale());
    const float* q = queries_.q.data() + i * c_.head_dim;
    const float* dout = queries_.dout.data() + i * c_.head_dim_v;
    for (int64_t j = 0; j < c_.seqlen_k; ++j) {
      if (!visible(i, j)) continue;
      add_scaled(probability_[size(j)], dout, keys_.dv.data() + j * c_.head_dim_v, c_.head_dim_v);
      add_scaled(scale * gradient_[size(j)], keys_.k.data() + j * c_.head_dim, queries_.dq.data() + i * c_.head_dim,
                 c_.head_dim);
      add_scaled(scale * gradient_[size(j)], q, keys_.dk.data() + j * c_.head_dim, c_.head_dim);
    }
  }

  /// What comes to dq and dk from the row's mean error: every dS is off by P times that.
  void inherit_row(int64_t i) {
    const float error = -static_cast<float>(c_.scale()) * queries_.mean_error[size(i)];
    const float* q = queries_.q.data() + i * c_.head_dim;
    for (int64_t j = 0; j < c_.seqlen_k && error != 0; ++j) {
      if (!visible(i, j)) continue;
      add_scaled(probability_[size(j)] * error, keys_.k.data() + j * c_.head_dim,
                 queries_.inherited_dq.data() + i * c_.head_dim, c_.head_dim);
      add_scaled(probability_[size(j)] * error, q, keys_.inherited_dk.data() + j * c_.head_dim, c_.head_dim);
    }
  }

  const Case& c_;
  KeyHead& keys_;
  QueryHead& queries_;
  const uint8_t* visible_;
  Floats probability_, gradient_;
};

/// dout . (given - exact) of each row.
Floats mean_errors(const Case& c, std::span<const double> dout, std::span<const double> given,
                   std::span<const double> exact) {
  Floats means;
  std::size_t at = 0;
  for (int64_t i = 0; i < c.seqlen_q; ++i) {
    double mean = 0;
    for (int64_t d = 0; d < c.head_dim_v; ++d, ++at) mean += dout[at] * (given[at] - exact[at]);
    means.push_back(static_cast<float>(mean));
  }
  return means;
}

/// Stores a head rounded to the type.
void keep(DataType dtype, Floats& from, std::span<double> to) {
  round_all(dtype, from);
  std::copy(from.begin(), from.end(), to.begin());
}

/// Runs the plain implementation on one case, head after head.
class PlainRun {
 public:
  PlainRun(const Problem& problem, const DenseMask& dense, const HeadArray& given_out, const HeadArray& exact_out)
      : c_(problem.c),
        dense_(dense),
        given_out_(given_out),
        exact_out_(exact_out),
        q_(problem.q.values()),
        k_(problem.k.values()),
        v_(problem.v.values()),
        dout_(problem.dout.values()),
        dlse_(problem.dlse ? problem.dlse->values() : HeadArray()),
        plain_(c_) {}

  Plain run() {
    for (int64_t b = 0; b < c_.batch; ++b) {
      for (int64_t kv = 0; kv < c_.heads_kv; ++kv) run_key_head(b, kv);
    }
    return std::move(plain_);
  }

 private:
  void run_key_head(int64_t b, int64_t kv) {
    KeyHead keys = load_key_head(b, kv);
    const int64_t group = c_.heads_q / c_.heads_kv;
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) run_query_head(b, h, keys);
    keep(c_.dtype, keys.dk, plain_.results.dk.head(b, kv));
    keep(c_.dtype, keys.dv, plain_.results.dv.head(b, kv));
    std::copy(keys.inherited_dk.begin(), keys.inherited_dk.end(), plain_.inherited_dk.head(b, kv).begin());
  }

  void run_query_head(int64_t b, int64_t h, KeyHead& keys) {
    QueryHead queries = load_query_head(b, h);
    PlainHead(c_, keys, queries, visible_matrix(c_, dense_, b, h)).run();
    keep(c_.dtype, queries.out, plain_.results.out.head(b, h));
    keep(c_.dtype, queries.dq, plain_.results.dq.head(b, h));
    std::copy(queries.inherited_dq.begin(), queries.inherited_dq.end(), plain_.inherited_dq.head(b, h).begin());
  }

  KeyHead load_key_head(int64_t b, int64_t kv) const {
    KeyHead head;
    head.k = to_floats(k_.head(b, kv));
    head.v = to_floats(v_.head(b, kv));
    head.k_transposed = transposed(head.k, c_.seqlen_k, c_.head_dim);
    head.v_transposed = transposed(head.v, c_.seqlen_k, c_.head_dim_v);
    head.dk.resize(head.k.size());
    head.dv.resize(head.v.size());
    head.inherited_dk.resize(head.k.size());
    return head;
  }

  QueryHead load_query_head(int64_t b, int64_t h) const {
    QueryHead head;
    head.q = to_floats(q_.head(b, h));
    head.dout = to_floats(dout_.head(b, h));
    if (c_.dlse) head.dlse = to_floats(dlse_.head(b, h));
    head.mean_error = mean_errors(c_, dout_.head(b, h), given_out_.head(b, h), exact_out_.head(b, h));
    head.out.resize(head.dout.size());
    head.dq.resize(head.q.size());
    head.inherited_dq.resize(head.q.size());
    return head;
  }

  const Case& c_;
  const DenseMask& dense_;
  const HeadArray &given_out_, &exact_out_;
  const HeadArray q_, k_, v_, dout_, dlse_;
  Plain plain_;
};

}  // namespace

Plain run_plain(const Problem& problem, const DenseMask& dense, const HeadArray& given_out,
                const HeadArray& exact_out) {
  return PlainRun(problem, dense, given_out, exact_out).run();
}

}  // namespace flashmask::verify
