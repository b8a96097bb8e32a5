// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
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
  std::array<uint64_t, 2> dropout_state;

  /// Features that the case asks for, with the given sink and state, which are where the call's tensors are.
  Features features(const TensorView& sink_there, const uint64_t* state_there) const {
    return {.softcap = c.features.softcap,
            .sink = sink_there,
            .dropout = {.p = c.features.dropout, .state = c.features.dropout > 0 ? state_there : nullptr},
            .partial_out = c.features.partial};
  }
  Features features() const { return features(sink ? sink->view() : TensorView{}, dropout_state.data()); }
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
