// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "mask/rules.h"

namespace flashmask {

/// n / divisor, neither below 0. Devices take several times as long with 64 bits as with 32.
FLASHMASK_RULE int64_t quotient(int64_t n, int64_t divisor) {
  if ((n | divisor) >> 32 == 0) return static_cast<uint32_t>(n) / static_cast<uint32_t>(divisor);
  return n / divisor;
}

}  // namespace flashmask
