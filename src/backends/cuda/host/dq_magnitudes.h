// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/device/fixed_point_params.h"
#include "call/problem.h"

namespace flashmask::cuda {

/// How many blocks of keys a backward measures before it sums up dq in integers, in deterministic mode; 0: dq's sums,
/// if there are any, are floats.
int64_t magnitude_blocks(const Problem& p);

/// Parameters of the kernel that measures them, which leaves as many `magnitudes`.
KeyMagnitudeParams key_magnitude_params(const Problem& p, KeyMagnitudes* magnitudes, const VisibleExtents& extents);

/// Parameters of the pass over rows, which gives them scales; none without `magnitudes`.
RowScaleParams row_scale_params(const Problem& p, const KeyMagnitudes* magnitudes);

}  // namespace flashmask::cuda
