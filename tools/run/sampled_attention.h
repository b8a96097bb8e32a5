// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "run/projections.h"
#include "run/sequence_rule.h"

namespace flashmask::run {

/// [batch, seqlen, heads, head_dim] each.
struct Inputs {
  Tensor q, k, v, dout;
};
/// lse is float32 [batch, heads, seqlen].
struct Outputs {
  Tensor out, lse, dq, dk, dv;
};

/// Place of one query row of one head in the tensors.
struct RowPlace {
  int64_t batch, row, head;
};

/// Expected values of a row or a key column, and the values that its error limit follows from (numerics/accuracy.h).
struct Expected {
  std::vector<double> exact;      ///< the oracle's
  std::vector<double> plain;      ///< the plain implementation's; the oracle's for float32
  std::vector<double> inherited;  ///< dq and dk: effect of the rounding of out on the exact gradient
  /// dq and dk: the sum of P delta K or P delta Q that the gradient subtracts from the like sum with dP.
  std::vector<double> subtracted{};
};
struct ExpectedRow {
  Expected out, lse, dq;
};
struct ExpectedColumn {
  Expected dk, dv;
};

/// Computes attention of single rows over the keys that they see, by the oracle and by the plain implementation.
class SampledAttention {
 public:
  /// `outputs`: of the backend under test; its backward was given its own rounded out.
  SampledAttention(const AttentionShape& shape, DataType dtype, const Inputs& inputs, const Outputs& outputs)
      : shape_(shape), dtype_(dtype), inputs_(inputs), outputs_(outputs) {}

  ExpectedRow row(const SequenceRule& rule, const RowPlace& at) const;
  /// Sums over every row that sees the key, of every query head that shares its head.
  ExpectedColumn column(const SequenceRule& rule, int64_t batch, int64_t key, int64_t kv_head) const;

 private:
  struct Attended;
  /// Query heads [head, head + heads), which share a key head, of `rows` over every key that any of them sees.
  Attended attend(const SequenceRule& rule, int64_t batch, std::span<const int64_t> rows, int64_t head,
                  int64_t heads) const;
  /// Sums that the gradients subtract: for query row 0 of head 0, and for key `n` over all rows and heads.
  static std::vector<double> subtracted_from_dq(const Attended& attended);
  static std::vector<double> subtracted_from_dk(const Attended& attended, std::size_t n);
  void attend_plainly(std::span<const uint8_t> visible, Attended& attended) const;
  bool has_plain() const { return dtype_ != DataType::kFloat32; }

  AttentionShape shape_;
  DataType dtype_;
  const Inputs& inputs_;
  const Outputs& outputs_;
};

}  // namespace flashmask::run
