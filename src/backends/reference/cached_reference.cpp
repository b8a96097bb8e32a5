// SPDX-License-Identifier: Apache-2.0

// The oracle of calls over a cache, too simple to be wrong.

#include "backends/reference/cached_reference.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "backends/reference/score.h"
#include "cache/sequence.h"
#include "call/alibi.h"
#include "call/sink_and_dropout.h"
#include "common/element.h"

namespace flashmask::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// One key's row of k or v for key head hk, as float64: zeros where there is no page.
std::vector<double> load_key(const TensorView& t, DataType dtype, const TensorView& scale, const KeyPlace& at,
                             int64_t hk) {
  std::vector<double> row(static_cast<std::size_t>(t.shape[3]), 0.0);
  if (at.page < 0) return row;
  TensorView typed = t;
  typed.dtype = dtype;
  const double factor =
      scale.defined()
          ? load_element(scale, at.page * scale.stride[0] + at.slot * scale.stride[1] + hk * scale.stride[2])
          : 1.0;
  for (int64_t c = 0; c < t.shape[3]; ++c) {
    const int64_t element = at.page * t.stride[0] + at.slot * t.stride[1] + hk * t.stride[2] + c * t.stride[3];
    row[static_cast<std::size_t>(c)] = factor * load_element(typed, element);
  }
  return row;
}

/// Element c of a request's row i of head h.
int64_t element(const CachedProblem& p, const TensorView& t, int64_t b, const RequestRows& rows, int64_t i, int64_t h,
                int64_t c) {
  const auto& s = t.stride;
  return p.is_packed() ? (rows.begin + i) * s[0] + h * s[1] + c * s[2] : b * s[0] + i * s[1] + h * s[2] + c * s[3];
}

double dot(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (std::size_t c = 0; c < x.size(); ++c) sum += x[c] * y[c];
  return sum;
}

/// The keys of a request under one key head, which all rows and heads of its group read.
struct HeadOfKeys {
  std::vector<std::vector<double>> k, v;
  std::vector<KeyPlace> at;

  HeadOfKeys(const CachedProblem& p, const Sequence& sequence, int64_t hk) {
    for (int64_t j = 0; j < sequence.keys(); ++j) {
      at.push_back(sequence.place(j));
      k.push_back(load_key(p.cache.k, p.cache_dtype, p.cache.k_scale, at.back(), hk));
      v.push_back(load_key(p.cache.v, p.cache_dtype, p.cache.v_scale, at.back(), hk));
    }
  }
};

void forward_row(const CachedProblem& p, const Sequence& sequence, int64_t b, int64_t h, int64_t i,
                 const HeadOfKeys& keys) {
  const int64_t r = sequence.first_row() + i, hk = h / p.group_size();
  const RequestRows& rows = sequence.rows();
  std::vector<double> q;
  for (int64_t c = 0; c < p.head_dim; ++c) q.push_back(load_element(p.q, element(p, p.q, b, rows, i, h, c)));
  const double sink = sink_of(p, h), slope = alibi_slope(p, b, h);
  double largest = sink;
  std::vector<double> score(keys.k.size(), -kInfinity);
  for (int64_t j = 0; j < sequence.keys() && r >= 0; ++j) {
    const auto n = static_cast<std::size_t>(j);
    if (!sequence.sees(r, j, hk)) continue;
    const double distance =
        slope == 0 ? 0
                   : std::fabs(static_cast<double>(sequence.row_position(r) - sequence.key_position(j, keys.at[n])));
    score[n] = score_of(p, dot(q, keys.k[n]), -slope * distance).value;
    largest = std::fmax(largest, score[n]);
  }
  double sum = sink == -kInfinity ? 0 : std::exp(sink - largest);
  std::vector<double> out(static_cast<std::size_t>(p.head_dim_v), 0.0);
  for (std::size_t n = 0; n < score.size(); ++n) {
    if (score[n] == -kInfinity) continue;
    const double weight = std::exp(score[n] - largest);
    sum += weight;
    for (std::size_t c = 0; c < out.size(); ++c) out[c] += weight * keys.v[n][c];
  }
  for (std::size_t c = 0; c < out.size(); ++c)
    store_element(p.out, element(p, p.out, b, rows, i, h, static_cast<int64_t>(c)), sum == 0 ? 0.0 : out[c] / sum);
  if (p.lse.defined())
    store_element(p.lse, cached_lse_offset(p, b, rows, i, h), sum == 0 ? -kInfinity : largest + std::log(sum));
}

}  // namespace

void cached_forward(const CachedProblem& p, std::byte*) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence sequence(p, b);
    for (int64_t hk = 0; hk < p.heads_kv && sequence.rows().count > 0; ++hk) {
      const HeadOfKeys keys(p, sequence, hk);
      for (int64_t h = hk * p.group_size(); h < (hk + 1) * p.group_size(); ++h) {
        for (int64_t i = 0; i < sequence.rows().count; ++i) forward_row(p, sequence, b, h, i, keys);
      }
    }
  }
}

}  // namespace flashmask::reference
