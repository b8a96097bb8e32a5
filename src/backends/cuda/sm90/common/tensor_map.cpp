// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/common/tensor_map.h"

#include <cstdint>

#include "backends/cuda/host/alignment.h"
#include "backends/cuda/host/driver.h"
#include "common/message.h"

namespace flashmask::sm90 {
namespace {

constexpr int64_t kBlockColumns = 64;                // 128 bytes of 16-bit elements: the span of the swizzle
constexpr int64_t kMostElements = int64_t{1} << 39;  // 2^40 bytes of 16-bit ones

/// A dimension of one element is never stepped along, so its stride only has to be legal.
cuuint64_t byte_stride(const TensorView& t, int dimension) {
  return element_size(t.dtype) * static_cast<cuuint64_t>(t.shape[dimension] <= 1 ? kBlockColumns : t.stride[dimension]);
}

CUtensorMapDataType type_of(const TensorView& t) {
  if (element_size(t.dtype) == 1) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return t.dtype == DataType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

}  // namespace

std::string tensor_map_refusal(const char* argument, const TensorView& t) {
  if (std::string why = cuda::alignment_refusal(argument, t); !why.empty()) return why;
  for (int d = 0; d < t.rank - 1; ++d) {
    if (t.shape[d] <= 1) continue;
    if (t.stride[d] == 0) return message(argument, " is expanded (stride 0) in dimension ", d, "; make it contiguous");
    if (t.stride[d] >= kMostElements)
      return message(argument, " has stride ", t.stride[d], " in dimension ", d,
                     "; it must be below 2^39 (2^40 bytes)");
  }
  return "";
}

std::string tensor_maps_refusal(const Problem& p) { return cuda::first_refusal(p, tensor_map_refusal); }

CUtensorMap tensor_map(const TensorView& t, const ColumnBlocks& blocks, int box_rows, int box_blocks,
                       const char* argument, CUtensorMapL2promotion promotion, int box_heads) {
  const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(blocks.width), static_cast<cuuint64_t>(t.shape[1]),
                               static_cast<cuuint64_t>(blocks.count), static_cast<cuuint64_t>(t.shape[2]),
                               static_cast<cuuint64_t>(t.shape[0])};
  const cuuint64_t block_stride =
      static_cast<cuuint64_t>(blocks.count > 1 ? blocks.width : kBlockColumns) * element_size(t.dtype);
  const cuuint64_t strides[4] = {byte_stride(t, 1), block_stride, byte_stride(t, 2), byte_stride(t, 0)};
  const cuuint32_t box[5] = {kBlockColumns, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_blocks),
                             static_cast<cuuint32_t>(box_heads), 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = type_of(t);
  const CUtensorMapSwizzle swizzle =
      type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMap map{};
  const CUresult result = cuda::driver().tensor_map_encode_tiled(&map, type, 5, t.data, sizes, strides, box, steps,
                                                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
                                                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(ErrorCode::kInternal,
                message("CUDA: no tensor map of ", argument, ", ", describe(t), ", in boxes of ", box_rows,
                        " rows and ", box_blocks, " blocks of 64 columns, ", blocks.count, " times ", blocks.width,
                        " of the tensor: ", cuda::driver_error(result)));
  }
  return map;
}

CUtensorMap tensor_map(const TensorView& t, int box_rows, int box_blocks, const char* argument) {
  return tensor_map(t, {kBlockColumns, t.shape[3] / kBlockColumns}, box_rows, box_blocks, argument);
}

}  // namespace flashmask::sm90
