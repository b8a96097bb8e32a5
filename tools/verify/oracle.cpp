// SPDX-License-Identifier: Apache-2.0
#include "verify/oracle.h"

namespace flashmask::verify {

const uint8_t* visible_matrix(const Case& c, const DenseMask& dense, int64_t b, int64_t h) {
  const int64_t mask_batch = dense.batch == 1 ? 0 : b, mask_head = h / (c.heads_q / dense.heads);
  return dense.visible.data() + (mask_batch * dense.heads + mask_head) * c.seqlen_q * c.seqlen_k;
}

Results run_oracle(const Problem& problem, const DenseMask& dense) {
  const Case& c = problem.c;
  numerics::HeadInputs inputs{problem.q.values(),
                              problem.k.values(),
                              problem.v.values(),
                              problem.dout.values(),
                              problem.dlse ? problem.dlse->values() : HeadArray(),
                              problem.sink ? problem.sink->values() : HeadArray()};
  const TensorView visible = TensorView::contiguous(dense.visible.data(), DataType::kUInt8,
                                                    {dense.batch, dense.heads, c.seqlen_q, c.seqlen_k});
  return numerics::run_oracle(inputs, visible, c.scale(), problem.features());
}

}  // namespace flashmask::verify
