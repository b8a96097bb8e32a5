// SPDX-License-Identifier: Apache-2.0

// Stubs for functions that the emulation lacks: building masks on a CUDA device, which uses CUB, and memory that
// processes share.

#include "backends/cuda/masks/build_masks.h"
#include "backends/cuda/peers/signals.h"
#include "call/peers.h"
#include "common/message.h"

namespace flashmask {

int64_t cuda::mask_build_scratch(const build::Arguments&) { throw_unsupported("masks are not built by the emulation"); }
void cuda::launch_mask_build(const build::Arguments&, const build::Output&, std::byte*, cudaStream_t) {
  throw_unsupported("masks are not built by the emulation");
}

std::vector<KernelInfo> cuda::peer_kernels() { return {}; }

namespace {
[[noreturn]] void throw_no_peers() { throw_unsupported("emulated devices have no peers"); }
}  // namespace

peers::SharedMemory peers::create(const Device&, std::size_t) { throw_no_peers(); }
void* peers::open(const Device&, const Handle&) { throw_no_peers(); }
void peers::release(const Device&, void*, bool) { throw_no_peers(); }
void peers::enqueue(std::span<const Transfer>, const Device&, void*) { throw_no_peers(); }
void peers::signal(std::span<uint32_t* const>, uint32_t, const Device&, void*) { throw_no_peers(); }
void peers::settle(const Settlement&, const Device&, void*) { throw_no_peers(); }

}  // namespace flashmask
