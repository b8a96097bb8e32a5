// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace flashmask::cuda {

/// Threads of a block of the backward's kernels that go over rows or, at the end, over keys.
inline constexpr int kRowThreads = 256;

}  // namespace flashmask::cuda
