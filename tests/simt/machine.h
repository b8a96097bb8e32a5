// SPDX-License-Identifier: Apache-2.0
#pragma once

// A machine that runs CUDA kernels, compiled by the host's compiler, on the host. The threads of a block are fibers,
// which run until they meet others: at a collective of their warp, or at a barrier of their block.
// docs/decisions/cuda-on-the-host.md lists the errors that it catches and misses.

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <stdexcept>
#include <string>

namespace simt {

/// Fault of a kernel that no device would let pass except by chance; names the thread and the place.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Counters of a launch. A conflict is one more pass over the banks of shared memory than 128 bytes would need.
struct Counts {
  int64_t collectives = 0, barriers = 0;
  int64_t matrix_loads = 0, matrix_load_conflicts = 0;  ///< ldmatrix, each by a warp
  int64_t copies = 0, copy_conflicts = 0;               ///< cp.async, each by a warp

  Counts& operator+=(const Counts& other);
};

/// A kernel's grid: one-dimensional.
struct Grid {
  int64_t blocks;
  int threads;  ///< per block, whole warps
  int shared_bytes = 0;
};

/// How threads take turns: equal seeds, equal turns. By default FLASHMASK_SIMT_SEED of the environment, or 0.
void set_seed(uint64_t seed);
uint64_t seed();

namespace detail {
/// Runs `thread` as every thread of the grid, block after block. What a thread throws comes out of it.
Counts run(const Grid& grid, void (*thread)(const void* of_kernel), const void* of_kernel);
}  // namespace detail

/// Runs `kernel(args...)`. Any number of the host's threads may run kernels at a time.
template <typename... Parameters, typename... Args>
Counts launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, const Args&... args) {
  const auto call = [&] { kernel(args...); };
  return detail::run(
      {blocks, threads, shared_bytes}, [](const void* c) { (*static_cast<const decltype(call)*>(c))(); }, &call);
}

// --- What device code calls ------------------------------------------------------------------------

using Place = std::source_location;

/// The lanes' operands at a collective; null for those that are not in it.
using Operands = void* const (&)[32];

/// The calling thread waits until all lanes of `lanes` are at the same place; then `complete` is called once.
void meet(const char* what, uint32_t lanes, Place place, void* operand, void (*complete)(Operands));

inline constexpr uint32_t kWholeWarp = 0xffffffff;

/// Barrier `id` among `threads` threads; all of the block that have not ended, for 0. Without `waits` the thread goes
/// on.
void barrier(const char* what, int id, int threads, bool waits, Place place);

/// Lets others run: for a thread that waits for memory.
void pause(const char* what, Place place);

/// Dynamic shared memory of the calling thread's block.
unsigned char* shared_memory();
/// Address in the shared window of `p`, in or at the end of dynamic shared memory; 0 is nowhere.
uint32_t shared_address(const void* p, Place place);
/// 16 bytes at an address in the shared window: throws unless all are in dynamic shared memory, and aligned.
unsigned char* shared_row(const char* what, uint32_t address, Place place);
/// 16 bytes that the calling lane has a matrix load read: throws also if a copy to them may not have completed.
unsigned char* matrix_row(const char* what, uint32_t address, Place place);

/// cp.async, its commit and its wait. The bytes are poison from the issue until the issuing thread waits for the group.
void copy_async(uint32_t shared, const void* global, bool inside, Place place);
void commit_copies();
void wait_for_copies(std::size_t pending);

/// Counts the passes over the banks of a load of four 8x8 matrices, by the rows' addresses.
void count_matrix_load(const uint32_t (&addresses)[32]);

/// "thread 37 of block 2 at kernel.cuh:12 (ldmatrix)".
[[noreturn]] void fail(const char* what, Place place, const std::string& why);

}  // namespace simt
