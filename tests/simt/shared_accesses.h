// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace simt {

/// Tracks reads by ldmatrix and writes by cp.async of a block's shared memory, 16 bytes at a time, and their order by
/// barriers. Warps have vector clocks: clock[v] of warp w is the last step of warp v that barriers have ordered before
/// w. Functions that judge return the error, or "".
class SharedAccesses {
 public:
  SharedAccesses(std::size_t bytes, int warps);

  /// A thread of `warp` comes to a barrier, and goes on from it when all have come.
  void arrive(int barrier, int warp);
  void leave(int barrier, int warp);
  /// After the last has left.
  void clear(int barrier);
  /// The lanes of `warp` have met at a __syncwarp.
  void sync_lanes(int warp) { ++warps_[static_cast<std::size_t>(warp)].syncs; }

  /// A copy to the 16 bytes at `at` is issued by `thread`, and is there for it.
  std::string begin_write(std::size_t at, int thread);
  void end_write(std::size_t at, int thread);
  std::string read(std::size_t at, int thread);

 private:
  using Clocks = std::vector<uint32_t>;
  struct Warp {
    Clocks clocks;
    uint32_t syncs = 0;
  };
  struct Chunk {
    int writer = -1;  ///< thread; -1: none
    bool under_way = false;
    uint32_t written = 0;  ///< on its warp's clock
    uint32_t syncs = 0;    ///< its warp's count at the write
  };

  Warp& warp_of(int thread) { return warps_[static_cast<std::size_t>(thread) / 32]; }

  std::vector<Warp> warps_;
  std::vector<Clocks> barriers_;  ///< the greatest of those that have come
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> read_;  ///< [chunks, warps]: on the warp's clock
};

}  // namespace simt
