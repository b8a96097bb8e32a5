// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace flashmask::fuzz {

/// Takes decisions from an input's bytes, front to back; after the end it begins anew, so that short inputs fill long
/// vectors.
class ByteReader {
 public:
  explicit ByteReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  uint8_t byte() { return bytes_.empty() ? 0 : bytes_[at_++ % bytes_.size()]; }
  bool flip() { return (byte() & 1) != 0; }
  /// One of `values`.
  int64_t one_of(std::span<const int64_t> values) { return values[byte() % values.size()]; }
  int64_t wide() {
    uint64_t value = 0;
    for (int n = 0; n < 8; ++n) value = value << 8 | byte();
    return static_cast<int64_t>(value);
  }
  /// Small integers mostly, and now and then one that makes sums overflow: at the ends of a type, at its own limits.
  int64_t position() {
    constexpr int64_t k40 = int64_t{1} << 40;
    constexpr int64_t kOdd[] = {
        std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), k40, -k40, k40 + 1, -k40 - 1,
        std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
    const uint8_t kind = byte();
    if (kind < 8) return kOdd[kind];
    if (kind < 12) return wide();
    return static_cast<int64_t>(byte()) - (kind < 134 ? 128 : 16);
  }
  /// A row bound: around [0, 240), or an extreme.
  int32_t bound() {
    const uint8_t value = byte();
    if (value == 254) return std::numeric_limits<int32_t>::min();
    if (value == 255) return std::numeric_limits<int32_t>::max();
    return static_cast<int32_t>(value) - 8;
  }

 private:
  std::span<const uint8_t> bytes_;
  std::size_t at_ = 0;
};

}  // namespace flashmask::fuzz
