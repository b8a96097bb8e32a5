// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "backends/cuda/device/arrivals.cuh"
#include "backends/cuda/host/device.h"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/peers/signals.h"
#include "backends/cuda/ptx/system_scope.cuh"
#include "call/peers.h"
#include "common/message.h"

namespace flashmask::cuda {
namespace {

using peers::kMostPeers;

constexpr int kThreads = 256;
static_assert(kMostPeers <= kThreads, "a thread signals a peer");

/// Flags of the peers, in their memory.
struct PeerFlags {
  uint32_t* flags[kMostPeers];
  uint32_t count;
};

struct SettleParams {
  PeerFlags read_flags;
  const uint32_t* read_by_peers;
  uint32_t epoch, pieces;
  ArrivalParams arrivals;  ///< state and limit
  void* out;
  void* lse;
  int64_t out_bytes, lse_bytes;
  uint32_t* report;
};

__device__ void signal_peer(const PeerFlags& to, uint32_t value) {
  if (threadIdx.x < to.count) ptx::store_release_system(to.flags[threadIdx.x], value);
}

/// Waits until a peer has read what this rank gave it an epoch ago, whose buffer the next call fills.
__device__ bool has_read(const SettleParams& p) {
  if (threadIdx.x >= p.read_flags.count) return true;
  const uint32_t begin = ptx::coarse_time();
  while (static_cast<int32_t>(ptx::load_acquire_system(p.read_by_peers + threadIdx.x) - (p.epoch - 1)) < 0) {
    if (ptx::coarse_time() - begin > p.arrivals.limit) return false;
    __nanosleep(100);
  }
  return true;
}

/// Makes every element NaN, of whichever floating type.
__device__ void fill_with_nan(void* to, int64_t bytes) {
  auto* const at = static_cast<unsigned char*>(to);
  for (int64_t n = threadIdx.x; n < bytes; n += kThreads) at[n] = 0xff;
}

__device__ void settle(const SettleParams& p) {
  __shared__ uint32_t missing;
  if (threadIdx.x == 0) {
    wait_for_pieces(p.arrivals, p.pieces);
    missing = ptx::load_acquire_system(p.arrivals.state + kMissing);
  }
  __syncthreads();
  const bool arrived = missing == 0;
  __syncthreads();
  if (arrived) signal_peer(p.read_flags, p.epoch);
  if (arrived && !has_read(p)) atomicCAS(&missing, 0u, peers::kNotRead + threadIdx.x);
  __syncthreads();
  if (missing == 0) return;
  fill_with_nan(p.out, p.out_bytes);
  fill_with_nan(p.lse, p.lse_bytes);
  if (threadIdx.x != 0) return;
  p.arrivals.state[kMissing] = missing;  // calls that follow give up at once
  ptx::store_release_system(p.report, missing);
}

PeerFlags flags_of(std::span<uint32_t* const> flags) {
  PeerFlags result{.count = static_cast<uint32_t>(flags.size())};
  std::ranges::copy(flags, result.flags);
  return result;
}

}  // namespace
}  // namespace flashmask::cuda

// The kernels, with names of their own; see KernelInfo.
extern "C" __global__ void __launch_bounds__(flashmask::cuda::kThreads)
    flashmask_sm90_peers_signal(const __grid_constant__ flashmask::cuda::PeerFlags to, uint32_t value) {
  flashmask::cuda::signal_peer(to, value);
}
extern "C" __global__ void __launch_bounds__(flashmask::cuda::kThreads)
    flashmask_sm90_peers_settle(const __grid_constant__ flashmask::cuda::SettleParams p) {
  flashmask::cuda::settle(p);
}

namespace flashmask::cuda {

std::vector<KernelInfo> peer_kernels() {
  std::vector<KernelInfo> all;
  for (const char* what : {"signal", "settle"})
    all.push_back(named({.id = message("sm90.peers.", what), .op = "peers", .threads = kThreads}));
  return all;
}

}  // namespace flashmask::cuda

namespace flashmask::peers {

void signal(std::span<uint32_t* const> flags, uint32_t value, const Device& device, void* stream) {
  const cuda::DeviceGuard guard(device.index);
  cuda::LaunchChain(static_cast<cudaStream_t>(stream))
      .launch("launch of the kernel that signals peers", flashmask_sm90_peers_signal, 1, cuda::kThreads,
              cuda::flags_of(flags), value);
}

void settle(const Settlement& s, const Device& device, void* stream) {
  const cuda::DeviceGuard guard(device.index);
  const cuda::SettleParams params{
      .read_flags = cuda::flags_of(s.read_flags),
      .read_by_peers = s.read_by_peers.data(),
      .epoch = s.epoch,
      .pieces = s.pieces,
      .arrivals = {.state = s.state, .limit = cuda::wait_limit(s.timeout)},
      .out = s.out.data(),
      .lse = s.lse.data(),
      .out_bytes = static_cast<int64_t>(s.out.size()),
      .lse_bytes = static_cast<int64_t>(s.lse.size()),
      .report = s.report,
  };
  cuda::LaunchChain(static_cast<cudaStream_t>(stream))
      .launch("launch of the kernel that settles a call", flashmask_sm90_peers_settle, 1, cuda::kThreads, params);
}

}  // namespace flashmask::peers
