// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name.

namespace flashmask::ptx {

template <typename T>
void load_if(bool condition, const T* from, T& to) {
  if (condition) to = *from;
}

}  // namespace flashmask::ptx
