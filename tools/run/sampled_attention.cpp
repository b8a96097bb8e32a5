// SPDX-License-Identifier: Apache-2.0
#include "run/sampled_attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "numerics/oracle.h"
#include "numerics/plain.h"

namespace flashmask::run {
namespace {

using numerics::HeadArray;
using numerics::KeyHead;
using numerics::QueryHead;

std::size_t index(int64_t value) { return static_cast<std::size_t>(value); }

/// Rows of heads [head, head + heads) of a tensor [batch, seqlen, heads, head_dim].
HeadArray gather(const Tensor& tensor, int64_t batch, std::span<const int64_t> rows, int64_t head, int64_t heads) {
  const TensorView& view = tensor.view();
  HeadArray array(1, heads, static_cast<int64_t>(rows.size()), view.shape[3]);
  auto to = array.values.begin();
  for (int64_t h = head; h < head + heads; ++h) {
    for (const int64_t row : rows) {
      const int64_t at = batch * view.stride[0] + row * view.stride[1] + h * view.stride[2];
      for (int64_t x = 0; x < view.shape[3]; ++x) *to++ = tensor.at(at + x);
    }
  }
  return array;
}

/// The keys that any of the rows sees, ascending.
std::vector<int64_t> keys_of(const SequenceRule& rule, std::span<const int64_t> rows) {
  std::vector<int64_t> keys;
  for (int64_t j = 0; !rows.empty() && j <= rows.back(); ++j) {
    if (std::ranges::any_of(rows, [&](int64_t i) { return rule.sees(i, j); })) keys.push_back(j);
  }
  return keys;
}

/// Row `n` of a matrix with `columns` of them, as it is and rounded to the type.
template <typename T>
std::vector<double> row_of(const std::vector<T>& matrix, std::size_t n, std::size_t columns) {
  const auto begin = matrix.begin() + static_cast<std::ptrdiff_t>(n * columns);
  return {begin, begin + static_cast<std::ptrdiff_t>(columns)};
}

std::span<const double> row_at(const HeadArray& array, int64_t head, std::size_t row) {
  return array.head(0, head).subspan(row * index(array.columns), index(array.columns));
}

double dot(std::span<const double> a, std::span<const double> b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

void add_scaled(std::vector<double>& sum, double factor, std::span<const double> values) {
  for (std::size_t x = 0; x < sum.size(); ++x) sum[x] += factor * values[x];
}

std::vector<double> rounded(DataType dtype, std::vector<double> values) {
  for (double& value : values) value = numerics::round_to(dtype, static_cast<float>(value));
  return values;
}

}  // namespace

struct SampledAttention::Attended {
  std::vector<int64_t> keys;
  std::vector<uint8_t> visible;  ///< [rows, keys]
  numerics::HeadInputs inputs;
  HeadArray given_out;
  double scale;
  numerics::Results exact;
  std::vector<KeyHead> plain_keys{};       ///< one, or none for float32
  std::vector<QueryHead> plain_queries{};  ///< one for each query head

  /// scale P delta of a row and a key that it sees.
  double delta_weight(int64_t head, std::size_t i, std::size_t j) const {
    const double score = scale * dot(row_at(inputs.q, head, i), row_at(inputs.k, 0, j)),
                 delta = dot(row_at(exact.out, head, i), row_at(inputs.dout, head, i));
    return scale * std::exp(score - exact.lse.head(0, head)[i]) * delta;
  }
};

SampledAttention::Attended SampledAttention::attend(const SequenceRule& rule, int64_t batch,
                                                    std::span<const int64_t> rows, int64_t head, int64_t heads) const {
  const std::vector<int64_t> keys = keys_of(rule, rows);
  std::vector<uint8_t> visible;
  for (const int64_t i : rows) {
    for (const int64_t j : keys) visible.push_back(rule.sees(i, j));
  }
  const int64_t kv_head = head / (shape_.heads / shape_.kv_heads);
  numerics::HeadInputs in{gather(inputs_.q, batch, rows, head, heads), gather(inputs_.k, batch, keys, kv_head, 1),
                          gather(inputs_.v, batch, keys, kv_head, 1), gather(inputs_.dout, batch, rows, head, heads),
                          HeadArray()};
  const double scale = 1 / std::sqrt(static_cast<double>(shape_.head_dim));
  const TensorView mask = TensorView::contiguous(
      visible.data(), DataType::kUInt8, {1, 1, static_cast<int64_t>(rows.size()), static_cast<int64_t>(keys.size())});
  numerics::Results exact = numerics::run_oracle(in, mask, scale);
  Attended attended{keys,  std::move(visible), std::move(in), gather(outputs_.out, batch, rows, head, heads),
                    scale, std::move(exact)};
  if (has_plain()) attend_plainly(attended.visible, attended);
  return attended;
}

void SampledAttention::attend_plainly(std::span<const uint8_t> visible, Attended& attended) const {
  const numerics::HeadInputs& in = attended.inputs;
  const numerics::PlainCall call{dtype_, in.q.rows, in.k.rows, shape_.head_dim, shape_.head_dim, attended.scale};
  KeyHead& keys = attended.plain_keys.emplace_back(call, in.k.values, in.v.values);
  for (int64_t h = 0; h < in.q.heads; ++h) {
    QueryHead& queries =
        attended.plain_queries.emplace_back(call, in.q.head(0, h), in.dout.head(0, h), std::span<const double>{},
                                            attended.given_out.head(0, h), attended.exact.out.head(0, h));
    run_plain_head(call, keys, queries, visible.data());
  }
}

std::vector<double> SampledAttention::subtracted_from_dq(const Attended& attended) {
  const HeadArray& keys = attended.inputs.k;
  std::vector<double> sum(index(keys.columns));
  for (std::size_t j = 0; j < attended.keys.size(); ++j) {
    if (attended.visible[j]) add_scaled(sum, attended.delta_weight(0, 0, j), row_at(keys, 0, j));
  }
  return sum;
}

std::vector<double> SampledAttention::subtracted_from_dk(const Attended& attended, std::size_t n) {
  const HeadArray& queries = attended.inputs.q;
  std::vector<double> sum(index(queries.columns));
  for (int64_t h = 0; h < queries.heads; ++h) {
    for (std::size_t i = 0; i < index(queries.rows); ++i) {
      if (attended.visible[i * attended.keys.size() + n])
        add_scaled(sum, attended.delta_weight(h, i, n), row_at(queries, h, i));
    }
  }
  return sum;
}

ExpectedRow SampledAttention::row(const SequenceRule& rule, const RowPlace& at) const {
  const Attended attended = attend(rule, at.batch, std::span(&at.row, 1), at.head, 1);
  const numerics::Results& exact = attended.exact;
  const auto dim = index(shape_.head_dim);
  ExpectedRow expected{{exact.out.values, exact.out.values, {}},
                       {exact.lse.values, exact.lse.values, {}},
                       {exact.dq.values, exact.dq.values, {}, subtracted_from_dq(attended)}};
  if (!has_plain()) return expected;
  const QueryHead& plain = attended.plain_queries[0];
  expected.out.plain = rounded(dtype_, row_of(plain.out, 0, dim));
  expected.lse.plain = row_of(plain.lse, 0, 1);
  expected.dq.plain = rounded(dtype_, row_of(plain.dq, 0, dim));
  expected.dq.inherited = row_of(plain.inherited_dq, 0, dim);
  return expected;
}

ExpectedColumn SampledAttention::column(const SequenceRule& rule, int64_t batch, int64_t key, int64_t kv_head) const {
  const int64_t group = shape_.heads / shape_.kv_heads;
  const auto dim = index(shape_.head_dim);
  const std::vector<int64_t> rows = rule.rows(key);
  if (rows.empty()) {
    const std::vector<double> zeros(dim);
    return {{zeros, zeros, zeros}, {zeros, zeros, {}}};
  }
  const Attended attended = attend(rule, batch, rows, kv_head * group, group);
  const auto n = index(std::ranges::lower_bound(attended.keys, key) - attended.keys.begin());
  const std::vector<double> dk = row_of(attended.exact.dk.values, n, dim),
                            dv = row_of(attended.exact.dv.values, n, dim);
  ExpectedColumn expected{{dk, dk, {}, subtracted_from_dk(attended, n)}, {dv, dv, {}}};
  if (!has_plain()) return expected;
  const KeyHead& plain = attended.plain_keys[0];
  expected.dk.plain = rounded(dtype_, row_of(plain.dk, n, dim));
  expected.dv.plain = rounded(dtype_, row_of(plain.dv, n, dim));
  expected.dk.inherited = row_of(plain.inherited_dk, n, dim);
  return expected;
}

}  // namespace flashmask::run
