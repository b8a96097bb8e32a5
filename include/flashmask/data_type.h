// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask {

/// Element types. The values are those of `fm_dtype` in c_api.h; kNone marks an absent tensor.
enum class DataType : int32_t {
  kNone = 0,
  kFloat32 = 1,
  kFloat64 = 2,
  kBFloat16 = 3,
  kFloat16 = 4,
  kInt32 = 5,
  kBool = 6,  ///< one byte, nonzero = true
  kUInt8 = 7,
  kInt64 = 8,       ///< only for mask builders' parameters and slots of a cache
  kFloat8E4M3 = 9,  ///< only for caches: 4 exponent bits, 3 of mantissa, no infinity (e4m3fn, arXiv:2209.05433)
};

}  // namespace flashmask
