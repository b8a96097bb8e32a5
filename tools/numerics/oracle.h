// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "flashmask/attention.h"
#include "numerics/tensor.h"

namespace flashmask::numerics {

/// Inputs of an attention's calls, as numbers. `dlse` may be empty, and so may `sink`, which has one number for each
/// query head.
struct HeadInputs {
  HeadArray q, k, v, dout, dlse;
  HeadArray sink{};
};

struct Sizes {
  int64_t batch = 1, heads_q = 1, heads_kv = 1, seqlen_q = 0, seqlen_k = 0, head_dim = 0, head_dim_v = 0;
};

/// Everything that they compute, as numbers.
struct Results {
  explicit Results(const Sizes& sizes);
  HeadArray out, lse, dq, dk, dv;  ///< lse has one column
  HeadArray dsink{};               ///< one number for each query head; empty without sinks
  bool forward_only = false;       ///< no gradients: nothing took the backward
};

/// The oracle: the reference backend in float64, with its own out and lse in the backward. `visible` is a dense mask
/// [batch or 1, heads, rows, keys]. Of `features` the sink is that of the inputs.
Results run_oracle(HeadInputs& inputs, const TensorView& visible, double softmax_scale, const Features& features = {});

}  // namespace flashmask::numerics
