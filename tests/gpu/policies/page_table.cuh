// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::test {

/// A KvSource that finds a tile's page in a table.
struct PageTable {
  template <int kKeys>
  __device__ __forceinline__ static int32_t row(int32_t) {
    static_assert(kKeys == 128, "a tile is a page");
    return 0;
  }
  template <typename Params>
  __device__ __forceinline__ static int32_t entry(const Params& p, int32_t key_tile, int32_t batch) {
    return __ldg(p.pages + batch * p.pages_of_entry + key_tile);
  }
};

}  // namespace flashmask::test
