// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::ptx {

/// Layout of a matrix of 16-bit elements in shared memory under the 128-byte swizzle, as TMA writes it and wgmma reads
/// it: block after block of 64 columns, in a block row after row of 128 bytes, in a row 8 chunks of 16 bytes. Row r has
/// chunk c in place c ^ r % 8. The pattern repeats every 8 rows. All distances are in bytes.
struct Swizzle128 {
  static constexpr int kColumns = 64;
  static constexpr uint32_t kRow = 128, kPattern = 8 * kRow;
  /// From one 16 x 16 step of a product to the next, along a row and down the rows: along the inner dimension of an
  /// operand that is contiguous in it, and of one that is contiguous across it.
  static constexpr uint32_t kStepAlongRow = 16 * 2, kStepDownRows = 16 * kRow;
  static constexpr int kStepsInBlock = kColumns / 16;

  /// A block of `rows` rows.
  __host__ __device__ static constexpr uint32_t block(int rows) { return static_cast<uint32_t>(rows) * kRow; }
  /// Step number `step` along a row of a matrix of `rows` rows.
  __host__ __device__ static constexpr uint32_t step_along_row(int step, int rows) {
    return static_cast<uint32_t>(step / kStepsInBlock) * block(rows) +
           static_cast<uint32_t>(step % kStepsInBlock) * kStepAlongRow;
  }
  /// Chunk `chunk` of a row, from the row's first byte.
  __host__ __device__ static constexpr uint32_t chunk(uint32_t row, uint32_t chunk) { return (chunk ^ row % 8) << 4; }
};

}  // namespace flashmask::ptx
