// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "flashmask/attention.h"
#include "verify/case.h"

namespace flashmask::verify {

/// The tensors that a case's calls read, drawn from its seed: standard normal, rounded to the dtype, the
/// gaps of padded layouts poisoned.
struct Problem {
  explicit Problem(const Case& c);

  Case c;
  Tensor q, k, v, dout;
  std::optional<Tensor> dlse;
  std::vector<FeatureTensor> tensors;
  std::array<uint64_t, 2> dropout_state;
  std::optional<Tensor> q_origin, k_origin;  ///< sixteens that the case is a part of, see Dropout

  /// The sinks; null if there are none.
  const Tensor* sink() const;
  /// Features that the case asks for, with view(n) in place of tensors[n], and with `there`'s state and origins, which
  /// are where the call's tensors are.
  Features features(const std::function<TensorView(std::size_t)>& view, const Dropout& there) const;
  Features features() const;
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
