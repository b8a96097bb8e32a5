// SPDX-License-Identifier: Apache-2.0
#include "verify/oracle.h"

#include <algorithm>

namespace flashmask::verify {

Results::Results(const Case& c)
    : out(c.batch, c.heads_q, c.seqlen_q, c.head_dim_v),
      lse(c.batch, c.heads_q, c.seqlen_q, 1),
      dq(c.batch, c.heads_q, c.seqlen_q, c.head_dim),
      dk(c.batch, c.heads_kv, c.seqlen_k, c.head_dim),
      dv(c.batch, c.heads_kv, c.seqlen_k, c.head_dim_v) {}

const uint8_t* visible_matrix(const Case& c, const DenseMask& dense, int64_t b, int64_t h) {
  const int64_t mask_batch = dense.batch == 1 ? 0 : b, mask_head = h / (c.heads_q / dense.heads);
  return dense.visible.data() + (mask_batch * dense.heads + mask_head) * c.seqlen_q * c.seqlen_k;
}

Results run_oracle(const Problem& problem, const DenseMask& dense) {
  const Case& c = problem.c;
  Results results(c);
  HeadArray q = problem.q.values(), k = problem.k.values(), v = problem.v.values(), dout = problem.dout.values();
  AttentionInputs inputs{.q = q.as_tensor(), .k = k.as_tensor(), .v = v.as_tensor()};
  inputs.dense_mask = TensorView::contiguous(dense.visible.data(), DataType::kUInt8,
                                             {dense.batch, dense.heads, c.seqlen_q, c.seqlen_k});
  const Options options{.softmax_scale = c.softmax_scale, .backend = "reference"};
  forward({inputs, results.out.as_tensor(), results.lse.as_lse()}, {}, options);

  HeadArray dlse = problem.dlse ? problem.dlse->values() : HeadArray();
  const TensorView dlse_view = problem.dlse ? dlse.as_lse() : TensorView{};
  backward({inputs, results.out.as_tensor(), results.lse.as_lse(), dout.as_tensor(), dlse_view, results.dq.as_tensor(),
            results.dk.as_tensor(), results.dv.as_tensor()},
           {}, options);
  return results;
}

}  // namespace flashmask::verify
