// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "call/cached_launch.h"

namespace flashmask::cpu {

/// Attention over a cache in host memory.
CachedLaunch cached_launch(const CachedProblem& problem);

}  // namespace flashmask::cpu
