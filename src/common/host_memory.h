// SPDX-License-Identifier: Apache-2.0
#pragma once

// Allocations in host memory whose size follows from what a caller passes.

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "common/message.h"

namespace flashmask {

/// Message of kOutOfMemory for small allocations, which do not name their purpose.
inline constexpr const char* kNoHostMemory = "host memory ran out; free some or pass less at once";

[[noreturn]] inline void throw_no_host_memory(const std::string& what, uint64_t bytes) {
  throw Error(ErrorCode::kOutOfMemory, message(what, " needs ", bytes, " bytes of host memory, which could not be ",
                                               "allocated; free some or pass less at once"));
}

/// The machine's memory in bytes; 0 if the system does not say.
inline int64_t host_memory_bytes() {
  const int64_t pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
  return pages > 0 && page_bytes > 0 ? pages * page_bytes : 0;
}

/// Runs f, turning a failed allocation into the library's error.
template <typename F>
auto with_memory_errors(F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory, kNoHostMemory);
  }
}

/// Returns `count` zeros or throws kOutOfMemory naming their purpose.
template <typename T>
std::vector<T> zeros(const std::string& what, int64_t count) {
  try {
    return std::vector<T>(static_cast<std::size_t>(count));
  } catch (const std::exception&) {
    throw_no_host_memory(what, static_cast<uint64_t>(count) * sizeof(T));
  }
}

/// An empty vector with room for a copy of `count` elements, or kOutOfMemory naming the argument that they are of.
template <typename T>
std::vector<T> room_for(const char* argument, int64_t count) {
  try {
    std::vector<T> elements;
    elements.reserve(static_cast<std::size_t>(count));
    return elements;
  } catch (const std::exception&) {
    throw_no_host_memory(message("a copy of ", argument), static_cast<uint64_t>(count) * sizeof(T));
  }
}

}  // namespace flashmask
