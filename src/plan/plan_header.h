// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "flashmask/plan.h"

namespace flashmask {

/// Beginning of a plan's buffer, on the host and on a device.
struct PlanHeader {
  static constexpr uint64_t kBitsMagic = 0x34304e414c504d46;  ///< "FMPLAN04"
  static constexpr uint64_t kRunsMagic = 0x3430534e55524d46;  ///< "FMRUNS04"

  uint64_t magic;
  int64_t seqlen_q, seqlen_k, batch, heads;
  uint64_t mask_hash;
};

inline PlanHeader plan_header(const PlanLayout& layout, uint64_t mask_hash) {
  return {layout.in_runs() ? PlanHeader::kRunsMagic : PlanHeader::kBitsMagic,
          layout.seqlen_q,
          layout.seqlen_k,
          layout.batch,
          layout.heads,
          mask_hash};
}

}  // namespace flashmask
