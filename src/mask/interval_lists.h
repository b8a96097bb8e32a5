// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "flashmask/mask.h"
#include "mask/mask_tensors.h"

namespace flashmask {

/// Checks column_ptr and intervals of the parts and normalises them: sorted, merged, within [0, seqlen_q], none empty.
/// They become the vectors if no column has more than two.
void settle_interval_lists(MaskParts& parts);

/// column_ptr and intervals of a caller's tensors, in host memory and checked by check_contents, as parts.
void read_interval_lists(const MaskTensors& mask, MaskParts& parts);

}  // namespace flashmask
