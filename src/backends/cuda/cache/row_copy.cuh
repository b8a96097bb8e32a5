// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/cp_async.cuh"
#include "backends/cuda/ptx/registers.cuh"

namespace flashmask::cuda {

/// Copies of rows that may lie anywhere: `aligned` ones, to 16 bytes, by cp.async, others element by element. A chunk
/// is 8 elements of 16 bits, or 16 of 8.
struct RowCopy {
  static constexpr int kElements = 8;
  bool aligned;

  /// Copies a chunk to shared memory; zeros, and `from` is not read, unless `inside`.
  __device__ __forceinline__ void copy_chunk(void* to, const void* from, bool inside) const {
    if (aligned) {
      ptx::cp_async_16(ptx::shared_address(to), from, inside);
      return;
    }
    const auto* const elements = static_cast<const uint16_t*>(from);
    uint32_t pairs[kElements / 2] = {};
#pragma unroll
    for (int n = 0; n < kElements; ++n)
      if (inside) pairs[n / 2] |= uint32_t{__ldg(elements + n)} << 16 * (n % 2);
    *static_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  /// Likewise a chunk whose row ends `columns` elements on. Rows of 16 bits end between chunks, and so do aligned ones.
  template <typename Stored>
  __device__ __forceinline__ void copy_chunk(void* to, const Stored* from, bool inside, int32_t columns) const {
    if constexpr (sizeof(Stored) == 1) {
      if (!aligned) return copy_bytes(static_cast<uint32_t*>(to), from, inside ? columns : 0);
    }
    copy_chunk(to, from, inside);
  }
  /// Stores two neighbouring elements.
  template <typename Element>
  __device__ __forceinline__ void store_pair(Element* to, float first, float second) const {
    const uint32_t pair = ptx::pack<Element>(first, second);
    if (aligned) {
      *reinterpret_cast<uint32_t*>(to) = pair;
    } else {
      auto* const elements = reinterpret_cast<uint16_t*>(to);
      elements[0] = static_cast<uint16_t>(pair);
      elements[1] = static_cast<uint16_t>(pair >> 16);
    }
  }

 private:
  /// A word at a time, as registers are few.
  __device__ __forceinline__ static void copy_bytes(uint32_t* to, const uint8_t* from, int32_t columns) {
#pragma unroll 1
    for (int first = 0; first < 16; first += 4) {
      uint32_t word = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (first + n < columns) word |= uint32_t{__ldg(from + first + n)} << 8 * n;
      to[first / 4] = word;
    }
  }
};

}  // namespace flashmask::cuda
