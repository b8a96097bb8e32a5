// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "flashmask/plan.h"

namespace flashmask {

/// Beginning of a plan's buffer, on the host and on a device.
struct PlanHeader {
  static constexpr uint64_t kMagic = 0x34304e414c504d46;  ///< "FMPLAN04"

  uint64_t magic;
  int64_t seqlen_q, seqlen_k, batch, heads;
  uint64_t mask_hash;
};

inline PlanHeader plan_header(const PlanLayout& layout, uint64_t mask_hash) {
  return {PlanHeader::kMagic, layout.seqlen_q, layout.seqlen_k, layout.batch, layout.heads, mask_hash};
}

}  // namespace flashmask
