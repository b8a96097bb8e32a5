// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "flashmask/tensor.h"

/// Device memory that processes of one machine share, and what streams do with it: the exchange of context parallel
/// ranks whose keys arrive while a forward runs (docs/context-parallel.md). The CUDA backend's; without it every
/// function throws. Arguments are checked.
namespace flashmask::peers {

/// Names memory to other processes of the machine.
using Handle = std::array<std::byte, 64>;
struct SharedMemory {
  void* data;
  Handle handle;
};

/// Allocates zeroed memory. A later release() of it comes after those of all processes that opened it.
SharedMemory create(const Device& device, std::size_t bytes);
/// Maps another process' memory, on this or another device that `device` reaches.
void* open(const Device& device, const Handle& handle);
void release(const Device& device, void* data, bool is_opened);

/// One step of a stream. None of them takes a multiprocessor, so they go on under a kernel that has them all.
struct Transfer {
  enum class Kind { kCopy, kWait, kWrite };
  Kind kind;
  void* to;          ///< kWait: the word, in the device's own memory; kWrite: likewise
  const void* from;  ///< kCopy
  std::size_t bytes;
  uint32_t value;  ///< kWait: until word - value, as a signed number, is at least 0; kWrite: what is written
};
void enqueue(std::span<const Transfer> transfers, const Device& device, void* stream);

/// Settlement::report of a peer that has not read: this, plus its place among the peers. Below it are numbers of
/// pieces.
constexpr uint32_t kNotRead = 1u << 30;
/// Peers that one call can signal.
constexpr std::size_t kMostPeers = 64;

/// Writes a value to flags in any device's memory, when all that the stream had before is done and visible to them.
void signal(std::span<uint32_t* const> flags, uint32_t value, const Device& device, void* stream);

/// End of a forward whose keys arrived: fm_settlement in c_api.h.
struct Settlement {
  uint32_t epoch, pieces;
  uint32_t* state;
  std::span<const uint32_t> read_by_peers;
  std::span<uint32_t* const> read_flags;
  std::span<std::byte> out, lse;
  uint32_t* report;
  double timeout;
};
void settle(const Settlement& settlement, const Device& device, void* stream);

}  // namespace flashmask::peers
