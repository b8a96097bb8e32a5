// SPDX-License-Identifier: Apache-2.0
#include "numerics/oracle.h"

namespace flashmask::numerics {

Results::Results(const Sizes& s)
    : out(s.batch, s.heads_q, s.seqlen_q, s.head_dim_v),
      lse(s.batch, s.heads_q, s.seqlen_q, 1),
      dq(s.batch, s.heads_q, s.seqlen_q, s.head_dim),
      dk(s.batch, s.heads_kv, s.seqlen_k, s.head_dim),
      dv(s.batch, s.heads_kv, s.seqlen_k, s.head_dim_v) {}

Results run_oracle(HeadInputs& in, const TensorView& visible, double softmax_scale, const Features& features) {
  Results results(Sizes{.batch = in.q.batch,
                        .heads_q = in.q.heads,
                        .heads_kv = in.k.heads,
                        .seqlen_q = in.q.rows,
                        .seqlen_k = in.k.rows,
                        .head_dim = in.q.columns,
                        .head_dim_v = in.v.columns});
  AttentionInputs inputs{.q = in.q.as_tensor(), .k = in.k.as_tensor(), .v = in.v.as_tensor()};
  inputs.dense_mask = visible;
  Options options{.softmax_scale = softmax_scale, .features = features, .backend = "reference"};
  options.features.sink = {};
  options.features.split_size = 0;  // the oracle has one order of sums
  if (!in.sink.values.empty()) {
    results.dsink = in.sink;
    options.features.sink = in.sink.as_vector();
  }
  forward({inputs, results.out.as_tensor(), results.lse.as_lse()}, {}, options);

  const TensorView dlse = in.dlse.values.empty() ? TensorView{} : in.dlse.as_lse();
  backward({inputs, results.out.as_tensor(), results.lse.as_lse(), in.dout.as_tensor(), dlse, results.dq.as_tensor(),
            results.dk.as_tensor(), results.dv.as_tensor(),
            results.dsink.values.empty() ? TensorView{} : results.dsink.as_vector()},
           {}, options);
  return results;
}

}  // namespace flashmask::numerics
