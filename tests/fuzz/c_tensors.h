// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tensors and structs of the C interface for targets: wrong ones, and memory of exactly what they claim.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <vector>

#include "flashmask/c_api.h"
#include "fuzz/byte_reader.h"

namespace flashmask::fuzz {

/// The most bytes that a tensor of a call that runs may claim.
inline constexpr std::size_t kMostBytes = std::size_t{1} << 20;

/// A tensor of the call: where it is in which struct, and what is wrong with its pointer.
struct Argument {
  fm_tensor* tensor;
  uint8_t null = 0, misaligned = 0;
  bool readable = true;
};

/// Gives `t` this dtype and shape: contiguous, or with another `layout`.
void lay_out(fm_tensor& t, int32_t dtype, std::initializer_list<int64_t> shape, uint8_t layout = 0);

/// A number that is wrong somewhere: small, around a limit, or any.
int64_t draw_wrong(ByteReader& bytes);
/// Changes a field of one of the tensors.
void change_tensor(ByteReader& bytes, std::vector<Argument>& tensors);
/// Multiples of 8, so that no pointer is cut in two; some are larger than the struct.
uint32_t draw_struct_size(ByteReader& bytes, std::size_t right);

/// Bytes of an element; 0 of what is no dtype.
std::size_t size_of(int32_t dtype);

/// Buffers of exact size, so that a sanitizer sees reads and writes past them.
class Memory {
 public:
  char* take(std::size_t bytes, std::size_t misalignment = 0) {
    return buffers_.emplace_back(std::make_unique<char[]>(bytes + misalignment)).get() + misalignment;
  }
  /// Copies the struct at `from` into a buffer of `bytes`: all of it, less, or with zeros after it.
  template <typename Struct>
  Struct* copy(const Struct& from, std::size_t bytes) {
    char* to = take(bytes);
    std::memcpy(to, &from, std::min(bytes, sizeof(Struct)));
    return reinterpret_cast<Struct*>(to);
  }

 private:
  std::vector<std::unique_ptr<char[]>> buffers_;
};

/// The bytes before and after a tensor's first element that it claims; nothing if they are too many.
struct Claim {
  std::size_t before = 0, after = 0;
};

/// nullopt: more than kMostBytes.
std::optional<Claim> claim_of(const fm_tensor& t);

/// An address where nothing is, for tensors that claim too much to be there.
inline char* nowhere() { return reinterpret_cast<char*>(std::uintptr_t{0x10000}); }

/// Every function returns a status and, if it failed, a message.
fm_status judged(fm_status status);

}  // namespace flashmask::fuzz
