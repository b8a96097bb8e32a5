// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name.

#include "simt/device.h"

namespace flashmask::ptx {

inline float nearest_integer(float x) { return __int_as_float(__float2int_rn(x)); }

}  // namespace flashmask::ptx
