// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "flashmask/attention.h"
#include "verify/case.h"

namespace flashmask::verify {

/// The tensors that a case's calls read, drawn from its seed: standard normal, rounded to the dtype, the
/// gaps of padded layouts poisoned.
struct Problem {
  explicit Problem(const Case& c);

  Case c;
  Tensor q, k, v, dout;
  std::optional<Tensor> dlse, sink;

  /// What the case asks for; the sink is `sink_there`, where the call's tensors are.
  Features features(const TensorView& sink_there) const { return {.softcap = c.features.softcap, .sink = sink_there}; }
  Features features() const { return features(sink ? sink->view() : TensorView{}); }
};

/// The tensors that a case's calls write; poisoned at first.
struct Outputs {
  explicit Outputs(const Case& c);

  Tensor out, lse, dq, dk, dv;
  std::optional<Tensor> dsink;
};

/// The arguments of calls on `inputs` (q, k, v and a mask) that write `outputs`.
ForwardArgs forward_args(const AttentionInputs& inputs, const Outputs& outputs);
BackwardArgs backward_args(const AttentionInputs& inputs, const Problem& problem, const Outputs& outputs);

}  // namespace flashmask::verify
