// SPDX-License-Identifier: Apache-2.0
#include "simt/shared_accesses.h"

#include <algorithm>

namespace simt {
namespace {

constexpr std::size_t kBarriers = 16, kChunkBytes = 16;

void join(std::vector<uint32_t>& clocks, const std::vector<uint32_t>& others) {
  for (std::size_t n = 0; n < clocks.size(); ++n) clocks[n] = std::max(clocks[n], others[n]);
}

std::string name(int thread) { return "thread " + std::to_string(thread); }

}  // namespace

SharedAccesses::SharedAccesses(std::size_t bytes, int warps)
    : warps_(static_cast<std::size_t>(warps)),
      barriers_(kBarriers, Clocks(warps_.size())),
      chunks_(bytes / kChunkBytes),
      read_(chunks_.size() * warps_.size()) {
  for (std::size_t n = 0; n < warps_.size(); ++n) {
    warps_[n].clocks.assign(warps_.size(), 0);
    warps_[n].clocks[n] = 1;
  }
}

void SharedAccesses::arrive(int barrier, int warp) {
  Warp& own = warps_[static_cast<std::size_t>(warp)];
  join(barriers_[static_cast<std::size_t>(barrier)], own.clocks);
  ++own.clocks[static_cast<std::size_t>(warp)];
}

void SharedAccesses::leave(int barrier, int warp) {
  Warp& own = warps_[static_cast<std::size_t>(warp)];
  join(own.clocks, barriers_[static_cast<std::size_t>(barrier)]);
  ++own.syncs;
}

void SharedAccesses::clear(int barrier) {
  Clocks& clocks = barriers_[static_cast<std::size_t>(barrier)];
  std::fill(clocks.begin(), clocks.end(), 0);
}

std::string SharedAccesses::begin_write(std::size_t at, int thread) {
  Chunk& chunk = chunks_[at / kChunkBytes];
  const auto own_warp = static_cast<std::size_t>(thread) / 32;
  const Clocks& clocks = warps_[own_warp].clocks;
  const uint32_t* read = &read_[at / kChunkBytes * warps_.size()];
  for (std::size_t warp = 0; warp < warps_.size(); ++warp) {
    if (warp != own_warp && read[warp] > clocks[warp])
      return "warp " + std::to_string(warp) + " reads what this overwrites, and no barrier is between";
  }
  if (chunk.under_way) return "a copy of " + name(chunk.writer) + " to the same place is under way";
  if (chunk.writer >= 0) {
    const auto writers = static_cast<std::size_t>(chunk.writer) / 32;
    if (writers != own_warp && chunk.written > clocks[writers])
      return name(chunk.writer) + " writes to the same place, and no barrier is between";
  }
  chunk.writer = thread;
  chunk.under_way = true;
  return "";
}

void SharedAccesses::end_write(std::size_t at, int thread) {
  Chunk& chunk = chunks_[at / kChunkBytes];
  const Warp& own = warp_of(thread);
  chunk.under_way = false;
  chunk.written = own.clocks[static_cast<std::size_t>(thread) / 32];
  chunk.syncs = own.syncs;
}

std::string SharedAccesses::read(std::size_t at, int thread) {
  const Chunk& chunk = chunks_[at / kChunkBytes];
  const auto own_warp = static_cast<std::size_t>(thread) / 32;
  const Warp& own = warps_[own_warp];
  read_[at / kChunkBytes * warps_.size() + own_warp] = own.clocks[own_warp];
  if (chunk.writer < 0) return "";
  if (chunk.under_way) return name(chunk.writer) + " has not waited for its copy to what this reads";
  const auto writers = static_cast<std::size_t>(chunk.writer) / 32;
  if (writers != own_warp && chunk.written > own.clocks[writers])
    return name(chunk.writer) + " copied what this reads, and no barrier is between";
  if (writers == own_warp && chunk.writer != thread && chunk.syncs == own.syncs)
    return name(chunk.writer) + " of the same warp copied what this reads, and no __syncwarp is between";
  return "";
}

}  // namespace simt
