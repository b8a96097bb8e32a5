// SPDX-License-Identifier: Apache-2.0

// What the library has on a CUDA device and the emulation has not: Hopper's kernels, whose instructions have no stand-ins,
// and the builds of masks there, which use CUB.

#include "backends/cuda/masks/build_masks.h"
#include "backends/cuda/sm90/kernel_set.h"
#include "common/message.h"

namespace flashmask {

const cuda::KernelSet sm90::kKernelSet{
    .name = "sm90",
    .needs = "9.0 (Hopper)",
    .runs_on = [](int, int) { return false; },
    .kernels = [] { return std::vector<KernelInfo>(); },
    .prepare = [](const Problem&) -> Prepared { return Refusal{"is not emulated"}; },
};

int64_t cuda::mask_build_scratch(const build::Arguments&) { throw_unsupported("masks are not built by the emulation"); }
void cuda::launch_mask_build(const build::Arguments&, const build::Output&, std::byte*, cudaStream_t) {
  throw_unsupported("masks are not built by the emulation");
}

}  // namespace flashmask
