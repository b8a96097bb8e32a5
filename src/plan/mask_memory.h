// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "flashmask/plan.h"

namespace flashmask {

/// The environment variable that gives max_mask_bytes where a call does not.
inline constexpr const char* kMaskBytesVariable = "FLASHMASK_MAX_MASK_BYTES";

/// Bytes that interval lists and a plan of them take.
struct MaskMemory {
  int64_t lists = 0, plan = 0;
  int64_t bits = 0;  ///< the plan's part for bits of partial tiles

  MaskMemory(const MaskView& mask, const PlanLayout& layout);
  int64_t total() const { return lists + plan; }
};

/// "interval lists of 24 bytes and a plan of 2048 bytes, 1024 of them bits of partial tiles".
std::string describe(const MaskMemory& memory);

/// Throws kInvalidArgument unless it is 0 (not given) or more.
void check_max_mask_bytes(int64_t max_mask_bytes);

/// Why a mask with interval lists takes too much memory with a plan of this layout; empty if it does not, or has no
/// lists. The limit is max_mask_bytes; of 0, what kMaskBytesVariable says, or else a quarter of the memory of their
/// device, or none where that is 0: not known.
std::string mask_memory_refusal(const MaskView& mask, const PlanLayout& layout, int64_t max_mask_bytes,
                                int64_t device_memory);

/// Throws kUnsupported with that reason, if there is one.
void check_mask_memory(const MaskView& mask, const PlanLayout& layout, int64_t max_mask_bytes, int64_t device_memory);

}  // namespace flashmask
