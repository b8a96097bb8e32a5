// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "verify/case_masks.h"
#include "verify/problem.h"

namespace flashmask::verify {

/// Runs numerics/oracle.h on the problem's (rounded) inputs, in dense-mask mode.
Results run_oracle(const Problem& problem, const DenseMask& dense);

/// Results of numerics/plain.h on every head of a case, with the errors that dq and dk inherit from the rounding of
/// out, and the gradients computed with the rounded out.
struct Plain {
  explicit Plain(const Case& c)
      : results(c.sizes()),
        inherited_dq(c.batch, c.heads_q, c.seqlen_q, c.head_dim),
        inherited_dk(c.batch, c.heads_kv, c.seqlen_k, c.head_dim),
        dq_for_given_out(inherited_dq),
        dk_for_given_out(inherited_dk) {}
  Results results;  ///< lse is left zero
  HeadArray inherited_dq, inherited_dk, dq_for_given_out, dk_for_given_out;
};

/// `given_out` is the out that the backward under test read, `exact_out` the oracle's.
Plain run_plain(const Problem& problem, const DenseMask& dense, const HeadArray& given_out, const HeadArray& exact_out);

/// Weights that the case's dropout keeps, [batch, heads_q, seqlen_q, seqlen_k]; empty without dropout.
std::vector<uint8_t> kept_matrix(const Problem& problem);

/// The dense matrix of batch entry b and query head h.
const uint8_t* visible_matrix(const Case& c, const DenseMask& dense, int64_t b, int64_t h);

}  // namespace flashmask::verify
