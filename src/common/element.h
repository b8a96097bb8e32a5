// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "flashmask/float16.h"
#include "flashmask/status.h"
#include "flashmask/tensor.h"

namespace flashmask {

/// The element at `offset`, counted in elements, of a tensor of a floating-point dtype.
inline double load_element(const TensorView& t, int64_t offset) {
  switch (t.dtype) {
    case DataType::kFloat64:
      return static_cast<const double*>(t.data)[offset];
    case DataType::kFloat32:
      return static_cast<const float*>(t.data)[offset];
    case DataType::kBFloat16:
      return bfloat16_to_float(static_cast<const uint16_t*>(t.data)[offset]);
    case DataType::kFloat16:
      return float16_to_float(static_cast<const uint16_t*>(t.data)[offset]);
    case DataType::kFloat8E4M3:
      return float8_e4m3_to_float(static_cast<const uint8_t*>(t.data)[offset]);
    default:
      break;
  }
  throw Error(ErrorCode::kInternal, "a backend met a dtype that the checks should have refused");
}

/// Sets it to `value`, rounded to the dtype.
inline void store_element(const TensorView& t, int64_t offset, double value) {
  switch (t.dtype) {
    case DataType::kFloat64:
      static_cast<double*>(t.data)[offset] = value;
      return;
    case DataType::kFloat32:
      static_cast<float*>(t.data)[offset] = static_cast<float>(value);
      return;
    case DataType::kBFloat16:
      static_cast<uint16_t*>(t.data)[offset] = float_to_bfloat16(static_cast<float>(value));
      return;
    case DataType::kFloat16:
      static_cast<uint16_t*>(t.data)[offset] = float_to_float16(static_cast<float>(value));
      return;
    case DataType::kFloat8E4M3:
      static_cast<uint8_t*>(t.data)[offset] = float_to_float8_e4m3(static_cast<float>(value));
      return;
    default:
      break;
  }
  throw Error(ErrorCode::kInternal, "a backend met a dtype that the checks should have refused");
}

}  // namespace flashmask
