// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

namespace flashmask::run {

/// Calls f(begin, end) on disjoint ranges that make up [0, count), from `threads` threads (0: one for each
/// processor).
void parallel_for(int64_t count, int threads, const std::function<void(int64_t begin, int64_t end)>& f);

}  // namespace flashmask::run
