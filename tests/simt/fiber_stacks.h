// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stacks of the fibers that CUDA threads are.

#include <boost/context/protected_fixedsize_stack.hpp>
#include <boost/context/stack_context.hpp>
#include <cstddef>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

namespace context = boost::context;

inline constexpr std::size_t kStackBytes = 256 * 1024;

/// Stacks with a guard page, used again: making one takes longer than a block.
class StackPool {
 public:
  ~StackPool() {
    for (context::stack_context& stack : free_) allocator_.deallocate(stack);
  }
  context::stack_context allocate() {
    if (free_.empty()) return allocator_.allocate();
    const context::stack_context stack = free_.back();
    free_.pop_back();
    return stack;
  }
  void deallocate(context::stack_context& stack) { free_.push_back(stack); }

 private:
  context::protected_fixedsize_stack allocator_{kStackBytes};
  std::vector<context::stack_context> free_;
};

inline StackPool& stacks() {
  static thread_local StackPool pool;
  return pool;
}

/// Allocator that Boost.Context takes and copies.
struct StackAllocator {
  context::stack_context* taken;
  context::stack_context allocate() const { return *taken = stacks().allocate(); }
  void deallocate(context::stack_context& stack) const { stacks().deallocate(stack); }
};

/// Tells the address sanitizer which stack is in use.
class Switch {
 public:
#if defined(__SANITIZE_ADDRESS__)
  /// Before leaving a stack; `ends`: for good.
  void leave(const void* bottom, std::size_t size, bool ends = false) {
    __sanitizer_start_switch_fiber(ends ? nullptr : &fake_, bottom, size);
  }
  /// After coming (back) to it; says which stack was left.
  void arrive(const void** bottom = nullptr, std::size_t* size = nullptr) {
    __sanitizer_finish_switch_fiber(fake_, bottom, size);
  }

 private:
  void* fake_ = nullptr;
#else
  void leave(const void*, std::size_t, bool = false) {}
  void arrive(const void** = nullptr, std::size_t* = nullptr) {}
#endif
};

}  // namespace simt
