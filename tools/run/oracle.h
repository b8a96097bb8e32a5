// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "run/check.h"
#include "run/packing.h"

namespace flashmask::run {

/// fp64, nothing rounded: the oracle.
struct ExactArithmetic {
  using Number = double;
  double round(double value) const { return value; }
};

/// What a plain implementation in a 16-bit type does: products and sums in float32, every intermediate matrix
/// rounded to the type.
struct PlainArithmetic {
  using Number = float;
  DataType dtype;
  float round(float value) const { return round_to(dtype, value); }
};

/// Which node of a tree goes on from which, told from the parents alone.
class Lineage {
 public:
  explicit Lineage(const Packed& packed) {
    for (const PackedNode& node : packed.nodes) {
      if (node.node == 0) roots_.push_back(last_.size());
      last_.push_back(node.node);
    }
    for (std::size_t n = last_.size(); n-- > 0;) {
      const PackedNode& node = packed.nodes[n];
      if (node.parent < 0) continue;
      int32_t& last_of_parent = last_[row(node.segment, node.parent)];
      last_of_parent = std::max(last_of_parent, last_[n]);
    }
  }

  /// Whether `above` is `node` or on the way from the root to it. Nodes are numbered depth first, so that those
  /// below one follow it up to the last of them.
  bool leads_to(int32_t segment, int32_t above, int32_t node) const {
    return above <= node && node <= last_[row(segment, above)];
  }

 private:
  std::size_t row(int32_t segment, int32_t node) const {
    return roots_[static_cast<std::size_t>(segment)] + static_cast<std::size_t>(node);
  }

  std::vector<std::size_t> roots_;  ///< where each tree's nodes begin
  std::vector<int32_t> last_;       ///< the last node below each one, or itself
};

/// Who sees whom in one packed sequence, told from the documents, answers and nodes alone: the oracle does not
/// take the mask's word for it.
struct SequenceRule {
  const Packed& packed;
  const Lineage& lineage;
  int64_t sequence;

  bool sees(int64_t row, int64_t key) const {
    const auto i = static_cast<std::size_t>(sequence * packed.seqlen + row),
               j = static_cast<std::size_t>(sequence * packed.seqlen + key);
    if (key > row || packed.segment_ids[i] < 0 || packed.segment_ids[i] != packed.segment_ids[j]) return false;
    if (!packed.node_ids.empty())
      return lineage.leads_to(packed.segment_ids[i], packed.node_ids[j], packed.node_ids[i]);
    return packed.answer_ids.empty() || packed.answer_ids[j] == 0 || packed.answer_ids[j] == packed.answer_ids[i];
  }
  /// The keys that `row` sees, ascending.
  std::vector<int64_t> keys(int64_t row) const {
    std::vector<int64_t> seen;
    for (int64_t j = 0; j <= row; ++j) {
      if (sees(row, j)) seen.push_back(j);
    }
    return seen;
  }
};

/// Where one row of one head lies in the tensors.
struct RowPlace {
  int64_t batch, row, head, kv_head;
};

/// Attention of one query row and the part of the gradient that needs nothing but this row.
template <typename Number>
struct AttendedRow {
  std::vector<Number> probability, score_gradient;  ///< one for each key that it sees
  std::vector<Number> out, dq;
  Number lse = -std::numeric_limits<Number>::infinity();
};

template <typename Arithmetic>
AttendedRow<typename Arithmetic::Number> attend_row(const Arithmetic& arithmetic, const AttentionShape& shape,
                                                    int64_t seqlen, const Inputs& in, const RowPlace& at,
                                                    std::span<const int64_t> keys) {
  using Number = typename Arithmetic::Number;
  const int64_t d = shape.head_dim;
  const int64_t row = ((at.batch * seqlen + at.row) * shape.heads + at.head) * d;
  const auto key_row = [&](int64_t j) { return ((at.batch * seqlen + j) * shape.kv_heads + at.kv_head) * d; };
  const auto dot = [&](const Tensor& a, int64_t a_row, const Tensor& b, int64_t b_row) {
    Number sum = 0;
    for (int64_t x = 0; x < d; ++x) sum += static_cast<Number>(a.at(a_row + x)) * static_cast<Number>(b.at(b_row + x));
    return sum;
  };

  AttendedRow<Number> result;
  result.out.assign(static_cast<std::size_t>(d), 0);
  result.dq.assign(static_cast<std::size_t>(d), 0);
  if (keys.empty()) return result;

  const auto scale = static_cast<Number>(1 / std::sqrt(static_cast<double>(d)));
  std::vector<Number>& p = result.probability;
  for (const int64_t j : keys) p.push_back(arithmetic.round(dot(in.q, row, in.k, key_row(j))) * scale);
  const Number largest = *std::max_element(p.begin(), p.end());
  Number sum = 0;
  for (const Number s : p) sum += std::exp(s - largest);
  result.lse = largest + std::log(sum);
  for (Number& s : p) s = arithmetic.round(std::exp(s - result.lse));
  for (std::size_t n = 0; n < p.size(); ++n) {
    for (int64_t x = 0; x < d; ++x)
      result.out[static_cast<std::size_t>(x)] += p[n] * static_cast<Number>(in.v.at(key_row(keys[n]) + x));
  }
  Number delta = 0;
  for (int64_t x = 0; x < d; ++x) {
    Number& out = result.out[static_cast<std::size_t>(x)];
    out = arithmetic.round(out);
    delta += out * static_cast<Number>(in.dout.at(row + x));
  }
  for (std::size_t n = 0; n < p.size(); ++n) {
    const int64_t key = key_row(keys[n]);
    const Number dp = arithmetic.round(dot(in.dout, row, in.v, key));
    const Number ds = arithmetic.round(p[n] * (dp - delta)) * scale;
    result.score_gradient.push_back(ds);
    for (int64_t x = 0; x < d; ++x)
      result.dq[static_cast<std::size_t>(x)] += ds * static_cast<Number>(in.k.at(key + x));
  }
  for (Number& value : result.dq) value = arithmetic.round(value);
  return result;
}

/// dk and dv of one key column: sums over every row that sees it, of every query head that shares its head.
template <typename Number>
struct ColumnGradient {
  std::vector<Number> dk, dv;
};

template <typename Arithmetic>
ColumnGradient<typename Arithmetic::Number> column_gradient(const Arithmetic& arithmetic, const AttentionShape& shape,
                                                            const SequenceRule& rule, const Inputs& in, int64_t batch,
                                                            int64_t key, int64_t kv_head) {
  using Number = typename Arithmetic::Number;
  const int64_t d = shape.head_dim, group = shape.heads / shape.kv_heads, seqlen = rule.packed.seqlen;
  ColumnGradient<Number> sum{std::vector<Number>(static_cast<std::size_t>(d)),
                             std::vector<Number>(static_cast<std::size_t>(d))};
  for (int64_t i = key; i < seqlen; ++i) {
    if (!rule.sees(i, key)) continue;
    const std::vector<int64_t> keys = rule.keys(i);
    const auto n = static_cast<std::size_t>(std::lower_bound(keys.begin(), keys.end(), key) - keys.begin());
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const auto row = attend_row(arithmetic, shape, seqlen, in, {batch, i, head, kv_head}, keys);
      const int64_t at = ((batch * seqlen + i) * shape.heads + head) * d;
      for (int64_t x = 0; x < d; ++x) {
        sum.dk[static_cast<std::size_t>(x)] += row.score_gradient[n] * static_cast<Number>(in.q.at(at + x));
        sum.dv[static_cast<std::size_t>(x)] += row.probability[n] * static_cast<Number>(in.dout.at(at + x));
      }
    }
  }
  for (auto* values : {&sum.dk, &sum.dv}) {
    for (Number& value : *values) value = arithmetic.round(value);
  }
  return sum;
}

}  // namespace flashmask::run
