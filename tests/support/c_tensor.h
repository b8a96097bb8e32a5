// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "flashmask/c_api.h"

namespace flashmask::test {

/// Contiguous; `data` may be anything where nothing is read.
inline fm_tensor tensor(fm_dtype dtype, std::initializer_list<int64_t> shape, const void* data) {
  fm_tensor t{};
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  uint64_t stride = 1;  // unsigned, as some tests try sizes whose product overflows
  for (int d = t.ndim - 1; d >= 0; --d) {
    t.stride[d] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(t.shape[d]);
  }
  return t;
}

}  // namespace flashmask::test
