// SPDX-License-Identifier: Apache-2.0
#include "flashmask/tensor.h"

#include "common/message.h"

namespace flashmask {

std::size_t element_size(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat64:
    case DataType::kInt64:
      return 8;
    case DataType::kFloat32:
    case DataType::kInt32:
      return 4;
    case DataType::kBFloat16:
    case DataType::kFloat16:
      return 2;
    case DataType::kBool:
    case DataType::kUInt8:
    case DataType::kFloat8E4M3:
      return 1;
    case DataType::kNone:
      break;
  }
  return 0;
}

std::string_view name(DataType dtype) {
  switch (dtype) {
    case DataType::kNone:
      return "none";
    case DataType::kFloat32:
      return "float32";
    case DataType::kFloat64:
      return "float64";
    case DataType::kBFloat16:
      return "bfloat16";
    case DataType::kFloat16:
      return "float16";
    case DataType::kInt32:
      return "int32";
    case DataType::kBool:
      return "bool";
    case DataType::kUInt8:
      return "uint8";
    case DataType::kInt64:
      return "int64";
    case DataType::kFloat8E4M3:
      return "float8_e4m3";
  }
  return "unknown";
}

std::string describe(const TensorView& tensor) {
  if (!tensor.defined()) return "absent";
  std::string text = message(name(tensor.dtype), " [");
  for (int d = 0; d < tensor.rank && d < TensorView::kMaxRank; ++d)
    text += message(d ? ", " : "", tensor.shape[static_cast<std::size_t>(d)]);
  return text + "]";
}

}  // namespace flashmask
