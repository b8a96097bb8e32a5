// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/host/kernel_table.h"

#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/dq_magnitudes.h"

namespace flashmask::cuda {

Variant asked_variant(const Problem& p) {
  return {.sum = p.is_backward && magnitude_blocks(p) > 0 ? DqSum::kIntegers : DqSum::kFloats,
          .scores = !has_product_scores(p),
          .dropout = p.features.dropout.p != 0,
          .sink = p.features.sink.defined(),
          .positions = compares_positions(p.mask) && !p.mask.column_ptr,  // bit tiles have what these hide
          .partial = p.features.partial_out};
}

std::string tile_kernel_id(const char* arch, const char* op, DataType dtype, int head_dim, int head_dim_v, char column,
                           int value) {
  return message(arch, ".", op, ".", dtype == DataType::kBFloat16 ? "bf16" : "f16", ".d", head_dim, ".dv", head_dim_v,
                 ".", column, value);
}

}  // namespace flashmask::cuda
