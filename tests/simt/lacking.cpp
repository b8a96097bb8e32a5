// SPDX-License-Identifier: Apache-2.0

// Stubs for functions that the emulation lacks: building masks on a CUDA device, which uses CUB.

#include "backends/cuda/masks/build_masks.h"
#include "common/message.h"

namespace flashmask {

int64_t cuda::mask_build_scratch(const build::Arguments&) { throw_unsupported("masks are not built by the emulation"); }
void cuda::launch_mask_build(const build::Arguments&, const build::Output&, std::byte*, cudaStream_t) {
  throw_unsupported("masks are not built by the emulation");
}

}  // namespace flashmask
