// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstring>
#include <vector>

#include "c_api/read.h"
#include "common/tensor_checks.h"

using namespace flashmask;
using namespace flashmask::c_api;

fm_status fm_mask_to_dense(const fm_mask* mask, const fm_tensor* visible) {
  return guarded([&] {
    const CallMask of(mask, {});
    const MaskView& shapes = of.view();
    const TensorView out = tensor(required(visible, "visible"), "visible");
    const auto refuse = [&] {
      throw_invalid("visible is ", describe(out), "; it must be bool or uint8, contiguous, [", shapes.batch(), ", ",
                    shapes.heads(), ", ", shapes.seqlen_q, ", ", shapes.seqlen_k, "]");
    };
    const std::array<int64_t, TensorView::kMaxRank> shape{shapes.batch(), shapes.heads(), shapes.seqlen_q,
                                                          shapes.seqlen_k};
    if ((out.dtype != DataType::kBool && out.dtype != DataType::kUInt8) || out.rank != 4 || out.shape != shape)
      refuse();
    check_extent("visible", out);
    if (out.num_elements() == 0) return;
    if (out.stride != TensorView::contiguous(nullptr, out.dtype, {shape[0], shape[1], shape[2], shape[3]}).stride)
      refuse();
    check_data("visible", out);
    const std::vector<uint8_t> dense = to_dense(of.copy());
    std::memcpy(out.data, dense.data(), dense.size());
  });
}
