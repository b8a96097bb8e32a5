// SPDX-License-Identifier: Apache-2.0
#include "numerics/plain.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashmask::numerics {
namespace {

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

class PlainHead {
 public:
  PlainHead(const PlainCall& c, KeyHead& keys, QueryHead& queries, const uint8_t* visible)
      : c_(c),
        keys_(keys),
        queries_(queries),
        visible_(visible),
        probability_(size(c.seqlen_k)),
        weight_(size(c.seqlen_k)),
        slope_(size(c.seqlen_k), static_cast<float>(c.scale)),
        gradient_(size(c.seqlen_k)),
        gradient_for_given_out_(size(c.seqlen_k)) {}

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
  /// Factor of an element of P: the scale if dropout keeps it, otherwise 0.
  float dropout_factor(int64_t i, int64_t j) const {
    if (!queries_.kept) return 1;
    return queries_.kept[i * c_.seqlen_k + j] ? static_cast<float>(c_.dropout_scale) : 0.0f;
  }

  /// row x matrix, accumulated in fp32 and rounded to the type; `matrix` is [inner, seqlen_k].
  void multiply_row(const float* row, const Floats& matrix, int64_t inner, Floats& result) {
    std::fill(result.begin(), result.end(), 0.0f);
    for (int64_t d = 0; d < inner; ++d) add_scaled(row[d], matrix.data() + d * c_.seqlen_k, result.data(), c_.seqlen_k);
    round_all(c_.dtype, result);
  }

  /// Makes scores of row i's products in probability_; slope_ becomes their derivative by q . k.
  void score_row(int64_t i) {
    const auto scale = static_cast<float>(c_.scale);
    for (float& score : probability_) score *= scale;
    for (int64_t j = 0; queries_.score && j < c_.seqlen_k; ++j) {
      const PlainScore score = queries_.score(probability_[size(j)], i, j);
      probability_[size(j)] = score.value;
      slope_[size(j)] = scale * score.slope;
    }
  }

  /// Sets probability_ to P of row i, and weight_ to P after dropout; false if the row sees nothing.
  bool softmax_row(int64_t i) {
    multiply_row(queries_.q.data() + i * c_.head_dim, keys_.k_transposed, c_.head_dim, probability_);
    score_row(i);
    float largest = queries_.sink;
    for (int64_t j = 0; j < c_.seqlen_k; ++j) {
      if (visible(i, j)) largest = std::max(largest, probability_[size(j)]);
    }
    if (std::isinf(largest)) return false;
    float sum = std::exp(queries_.sink - largest);
    for (int64_t j = 0; j < c_.seqlen_k; ++j) {
      float& p = probability_[size(j)];
      p = visible(i, j) ? std::exp(p - largest) : 0.0f;
      sum += p;
    }
    queries_.lse[size(i)] = largest + std::log(sum);
    for (int64_t j = 0; j < c_.seqlen_k; ++j) {
      float& p = probability_[size(j)];
      p = round_to(c_.dtype, p / sum);
      weight_[size(j)] = p * dropout_factor(i, j);
    }
    return true;
  }

  void forward_row(int64_t i) {
    float* out = queries_.out.data() + i * c_.head_dim_v;
    for (int64_t j = 0; j < c_.seqlen_k; ++j) {
      if (visible(i, j)) add_scaled(weight_[size(j)], keys_.v.data() + j * c_.head_dim_v, out, c_.head_dim_v);
    }
  }

  /// gradient_ = dS of row i, and gradient_for_given_out_ with the mean from the out that a backward is handed.
  void score_gradient_row(int64_t i) {
    multiply_row(queries_.dout.data() + i * c_.head_dim_v, keys_.v_transposed, c_.head_dim_v, gradient_);
    for (int64_t j = 0; j < c_.seqlen_k; ++j) gradient_[size(j)] *= dropout_factor(i, j);
    float mean = 0;
    for (int64_t j = 0; j < c_.seqlen_k; ++j) mean += probability_[size(j)] * gradient_[size(j)];
    const float dlse = queries_.dlse.empty() ? 0.0f : queries_.dlse[size(i)];
    for (int64_t j = 0; j < c_.seqlen_k; ++j) {
      const float p = probability_[size(j)], difference = gradient_[size(j)] - mean + dlse;
      gradient_[size(j)] = round_to(c_.dtype, p * difference);
      gradient_for_given_out_[size(j)] = round_to(c_.dtype, p * (difference - queries_.mean_error[size(i)]));
    }
  }

  void backward_row(int64_t i) {
    const float* q = queries_.q.data() + i * c_.head_dim;
    const float* dout = queries_.dout.data() + i * c_.head_dim_v;
    for (int64_t j = 0; j < c_.seqlen_k; ++j) {
      if (!visible(i, j)) continue;
      add_scaled(weight_[size(j)], dout, keys_.dv.data() + j * c_.head_dim_v, c_.head_dim_v);
      const auto add = [&](float gradient, Floats& dq, Floats& dk) {
        const float dscore = slope_[size(j)] * gradient;
        add_scaled(dscore, keys_.k.data() + j * c_.head_dim, dq.data() + i * c_.head_dim, c_.head_dim);
        add_scaled(dscore, q, dk.data() + j * c_.head_dim, c_.head_dim);
      };
      add(gradient_[size(j)], queries_.dq, keys_.dk);
      add(gradient_for_given_out_[size(j)], queries_.dq_for_given_out, keys_.dk_for_given_out);
    }
  }

  /// Adds the row's mean error to inherited dq and dk: every dS is off by P times that error.
  void inherit_row(int64_t i) {
    const float error = -queries_.mean_error[size(i)];
    const float* q = queries_.q.data() + i * c_.head_dim;
    for (int64_t j = 0; j < c_.seqlen_k && error != 0; ++j) {
      if (!visible(i, j)) continue;
      const float dscore = slope_[size(j)] * error * probability_[size(j)];
      add_scaled(dscore, keys_.k.data() + j * c_.head_dim, queries_.inherited_dq.data() + i * c_.head_dim, c_.head_dim);
      add_scaled(dscore, q, keys_.inherited_dk.data() + j * c_.head_dim, c_.head_dim);
    }
  }

  const PlainCall& c_;
  KeyHead& keys_;
  QueryHead& queries_;
  const uint8_t* visible_;
  Floats probability_, weight_, slope_, gradient_, gradient_for_given_out_;
};

/// dout . (given - exact) of each row.
Floats mean_errors(const PlainCall& c, std::span<const double> dout, std::span<const double> given,
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

}  // namespace

KeyHead::KeyHead(const PlainCall& call, std::span<const double> k_values, std::span<const double> v_values)
    : k(to_floats(k_values)),
      v(to_floats(v_values)),
      k_transposed(transposed(k, call.seqlen_k, call.head_dim)),
      v_transposed(transposed(v, call.seqlen_k, call.head_dim_v)),
      dk(k.size()),
      dv(v.size()),
      inherited_dk(k.size()),
      dk_for_given_out(k.size()) {}

QueryHead::QueryHead(const PlainCall& call, std::span<const double> q_values, std::span<const double> dout_values,
                     std::span<const double> dlse_values, std::span<const double> given_out,
                     std::span<const double> exact_out)
    : q(to_floats(q_values)),
      dout(to_floats(dout_values)),
      dlse(to_floats(dlse_values)),
      mean_error(mean_errors(call, dout_values, given_out, exact_out)),
      out(dout.size()),
      lse(static_cast<std::size_t>(call.seqlen_q), -std::numeric_limits<float>::infinity()),
      dq(q.size()),
      inherited_dq(q.size()),
      dq_for_given_out(q.size()) {}

void run_plain_head(const PlainCall& call, KeyHead& keys, QueryHead& queries, const uint8_t* visible) {
  PlainHead(call, keys, queries, visible).run();
}

}  // namespace flashmask::numerics
