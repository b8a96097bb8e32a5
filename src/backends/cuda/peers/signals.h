// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "flashmask/attention.h"

namespace flashmask::cuda {

/// The kernels that begin and end an exchange between peers (call/peers.h).
std::vector<KernelInfo> peer_kernels();

}  // namespace flashmask::cuda
