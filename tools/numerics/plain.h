// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "numerics/number.h"

/// A plain program in a 16-bit type, one head at a time and one row of scores at a time, nothing tiled, nothing
/// skipped: S = q k^T accumulated in fp32 and rounded to the type, softmax in fp32, P rounded, products accumulated in
/// fp32, results rounded; in the backward dP and dS = P (dP - mean of dP under P) are rounded too. Its errors are the
/// measure of the accuracy rule. Scores are made of products, the sink's score joins them, and the rounded P is dropped
/// and scaled in fp32, as every backend does, which scales the finished sums.
///
/// The program computes the mean from P; a backward that is given `out` takes it from out . dout, with out rounded to
/// the type. `inherited` is the difference that this makes to the exact dq and dk: with it added, they are the exact
/// gradients for the given out. `..._for_given_out` are the program's gradients with the mean from out . dout.
namespace flashmask::numerics {

using Floats = std::vector<float>;

/// A score, and its derivative by the scaled product that it is made of.
struct PlainScore {
  float value, slope;
};

struct PlainCall {
  DataType dtype = DataType::kBFloat16;
  int64_t seqlen_q = 0, seqlen_k = 0, head_dim = 0, head_dim_v = 0;
  double scale = 1;
  double dropout_scale = 1;
};

/// One key head and the sums of its query heads, in fp32: not yet rounded.
struct KeyHead {
  KeyHead(const PlainCall& call, std::span<const double> k_values, std::span<const double> v_values);
  Floats k, v, k_transposed, v_transposed, dk, dv, inherited_dk, dk_for_given_out;
};

/// One query head. `mean_error`: effect of the given out's error on each row's mean of dP, from which the inherited
/// errors of dq and dk follow. `dlse` may be empty.
struct QueryHead {
  QueryHead(const PlainCall& call, std::span<const double> q_values, std::span<const double> dout_values,
            std::span<const double> dlse_values, std::span<const double> given_out, std::span<const double> exact_out);
  Floats q, dout, dlse, mean_error, out, lse, dq, inherited_dq, dq_for_given_out;
  /// Makes a score of the scaled product of a row and a key; empty: it is that.
  std::function<PlainScore(float scaled, int64_t row, int64_t key)> score{};
  float sink = -std::numeric_limits<float>::infinity();  ///< this head's; by default none
  const uint8_t* kept = nullptr;                         ///< by dropout, [seqlen_q, seqlen_k]; null: all
};

/// Forward and backward of one query head; `visible` is [seqlen_q, seqlen_k]. Results are added up in both heads.
void run_plain_head(const PlainCall& call, KeyHead& keys, QueryHead& queries, const uint8_t* visible);

}  // namespace flashmask::numerics
