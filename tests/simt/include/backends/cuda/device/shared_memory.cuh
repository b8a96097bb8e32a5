// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name.

#include "simt/machine.h"

namespace flashmask::cuda {

inline unsigned char* dynamic_shared_memory() { return simt::shared_memory(); }

}  // namespace flashmask::cuda
