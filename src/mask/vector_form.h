// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "flashmask/mask.h"

namespace flashmask {

/// A mask in the words of fm_mask: vectors under a causal flag, a window of two sides around the row's own position,
/// and where that is.
struct VectorForm {
  int64_t seqlen_q = 0;
  StartEndRowIndices indices{};  ///< 0 vectors: none
  std::optional<std::pair<int64_t, int64_t>> window{};
  std::optional<int64_t> q_offset{};  ///< absent: seqlen_k - seqlen_q
};

/// from_dense() in that form. The row's own position is put on the band's edge, wherever that is.
VectorForm vector_form_from_dense(const TensorView& visible);

}  // namespace flashmask
