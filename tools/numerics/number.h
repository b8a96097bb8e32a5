// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "flashmask/float16.h"
#include "flashmask/status.h"
#include "flashmask/tensor.h"

/// Shared by `flashmask run` and `flashmask verify`: tensors, the float64 oracle, the plain implementation and the
/// accuracy rule.
namespace flashmask::numerics {

/// The value of an element.
inline double load(DataType dtype, const void* data, int64_t offset) {
  switch (dtype) {
    case DataType::kFloat64:
      return static_cast<const double*>(data)[offset];
    case DataType::kFloat32:
      return static_cast<const float*>(data)[offset];
    case DataType::kBFloat16:
      return bfloat16_to_float(static_cast<const uint16_t*>(data)[offset]);
    case DataType::kFloat16:
      return float16_to_float(static_cast<const uint16_t*>(data)[offset]);
    case DataType::kFloat8E4M3:
      return float8_e4m3_to_float(static_cast<const uint8_t*>(data)[offset]);
    default:
      throw Error(ErrorCode::kInternal, "load: not a floating-point type");
  }
}

/// Sets an element, rounded to the dtype.
inline void store(DataType dtype, void* data, int64_t offset, double value) {
  switch (dtype) {
    case DataType::kFloat64:
      static_cast<double*>(data)[offset] = value;
      return;
    case DataType::kFloat32:
      static_cast<float*>(data)[offset] = static_cast<float>(value);
      return;
    case DataType::kBFloat16:
      static_cast<uint16_t*>(data)[offset] = float_to_bfloat16(static_cast<float>(value));
      return;
    case DataType::kFloat16:
      static_cast<uint16_t*>(data)[offset] = float_to_float16(static_cast<float>(value));
      return;
    case DataType::kFloat8E4M3:
      static_cast<uint8_t*>(data)[offset] = float_to_float8_e4m3(static_cast<float>(value));
      return;
    default:
      throw Error(ErrorCode::kInternal, "store: not a floating-point type");
  }
}

/// `value` rounded to a type of 16 or 8 bits (unchanged for float32).
inline float round_to(DataType dtype, float value) {
  if (dtype == DataType::kBFloat16) return bfloat16_to_float(float_to_bfloat16(value));
  if (dtype == DataType::kFloat16) return float16_to_float(float_to_float16(value));
  if (dtype == DataType::kFloat8E4M3) return float8_e4m3_to_float(float_to_float8_e4m3(value));
  return value;
}

}  // namespace flashmask::numerics
