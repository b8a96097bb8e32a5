// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "verify/case_masks.h"
#include "verify/problem.h"
#include "verify/tensor.h"

namespace flashmask::verify {

/// Everything a case's calls compute, as numbers to compare against.
struct Results {
  explicit Results(const Case& c);
  HeadArray out, lse, dq, dk, dv;  ///< lse has one column
  bool forward_only = false;       ///< no gradients: nothing took the backward
};

/// The reference backend in float64, in dense-mask mode: the same (rounded) inputs, its own out and lse in
/// the backward.
Results run_oracle(const Problem& problem, const DenseMask& dense);

/// What a plain program computes in the case's 16-bit type: S = q k^T accumulated in fp32 and rounded to the
/// type, softmax in fp32, P rounded, products accumulated in fp32, results rounded; in the backward dP and
/// dS = P (dP - mean of dP under P) are rounded too. Its errors are the measure of the accuracy rule.
///
/// That program has P at hand; a backward that is handed out takes the mean from out . dout, and out has been
/// rounded to the type before it gets it. `inherited` is what that adds to the exact dq and dk: they plus it
/// are the exact gradients for the out that was handed over.
struct Plain {
  explicit Plain(const Case& c)
      : results(c),
        inherited_dq(c.batch, c.heads_q, c.seqlen_q, c.head_dim),
        inherited_dk(c.batch, c.heads_kv, c.seqlen_k, c.head_dim) {}
  Results results;  ///< lse is left zero
  HeadArray inherited_dq, inherited_dk;
};

/// `given_out` is what the backward under test was handed, `exact_out` the oracle's.
Plain run_plain(const Problem& problem, const DenseMask& dense, const HeadArray& given_out, const HeadArray& exact_out);

/// The dense matrix of batch entry b and query head h.
const uint8_t* visible_matrix(const Case& c, const DenseMask& dense, int64_t b, int64_t h);

}  // namespace flashmask::verify
