// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/backward/backward.h"

#include "common/message.h"

namespace flashmask::sm90 {

std::string backward_refusal(const Problem&) { return "backward is not available on CUDA yet; run it on the CPU"; }

int64_t backward_tile_rows(const Problem&) { return 64; }

std::size_t backward_workspace(const Problem&) { return 16; }

void backward(const Problem& p, std::byte*, unsigned long long*) { throw_unsupported(backward_refusal(p)); }

}  // namespace flashmask::sm90
