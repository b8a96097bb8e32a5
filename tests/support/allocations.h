// SPDX-License-Identifier: Apache-2.0
#pragma once

// Counts what operator new gives out in the whole process, the library's part of it included. To be included by one
// source of a program.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace flashmask::test {

inline std::atomic<int64_t> allocations{0};

inline void* counted_allocation(std::size_t size, std::size_t alignment) {
  ++allocations;
  const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
  if (void* const memory = std::aligned_alloc(alignment, rounded > 0 ? rounded : alignment)) return memory;
  throw std::bad_alloc();
}

/// How often f() allocates when it is called again.
template <typename F>
int64_t second_call_allocations(F&& f) {
  f();
  const int64_t before = allocations;
  f();
  return allocations - before;
}

}  // namespace flashmask::test

// Not inlined: GCC would take free() for the wrong end of what operator new began.
[[gnu::noinline]] void* operator new(std::size_t size) {
  return flashmask::test::counted_allocation(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment) {
  return flashmask::test::counted_allocation(size, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
