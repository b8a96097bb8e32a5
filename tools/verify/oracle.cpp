// SPDX-License-Identifier: Apache-2.0
#include "verify/oracle.h"

namespace flashmask::verify {

const uint8_t* visible_matrix(const Case& c, const DenseMask& dense, int64_t b, int64_t h) {
  const int64_t mask_batch = dense.batch == 1 ? 0 : b, mask_head = h / (c.heads_q / dense.heads);
  return dense.visible.data() + (mask_batch * dense.heads + mask_head) * c.seqlen_q * c.seqlen_k;
}

std::vector<uint8_t> kept_matrix(const Problem& problem) {
  const Case& c = problem.c;
  if (c.features.dropout == 0) return {};
  std::vector<uint8_t> kept(static_cast<std::size_t>(c.batch * c.heads_q * c.seqlen_q * c.seqlen_k));
  dropout_mask(problem.features().dropout,
               TensorView::contiguous(kept.data(), DataType::kUInt8, {c.batch, c.heads_q, c.seqlen_q, c.seqlen_k}));
  return kept;
}

Results run_oracle(const Problem& problem, const DenseMask& dense) {
  const Case& c = problem.c;
  numerics::HeadInputs inputs{problem.q.values(),
                              problem.k.values(),
                              problem.v.values(),
                              problem.dout.values(),
                              problem.dlse ? problem.dlse->values() : HeadArray(),
                              problem.sink() ? problem.sink()->values() : HeadArray()};
  const TensorView visible = TensorView::contiguous(dense.visible.data(), DataType::kUInt8,
                                                    {dense.batch, dense.heads, c.seqlen_q, c.seqlen_k});
  return numerics::run_oracle(inputs, visible, c.scale(), problem.features());
}

}  // namespace flashmask::verify
