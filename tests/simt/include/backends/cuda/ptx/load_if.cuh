// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name.

#include <cstdint>

namespace flashmask::ptx {

inline void load_if(bool condition, const int32_t* from, int32_t& to) {
  if (condition) to = *from;
}

}  // namespace flashmask::ptx
