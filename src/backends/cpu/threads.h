// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::cpu {

/// OpenMP's number of threads; 1 in a process that was forked off one with several.
int default_threads();

/// The number of threads asked for (0: the default), capped by the number of items and by what a machine can be
/// expected to start.
int thread_count(int wanted, int64_t items);

}  // namespace flashmask::cpu
