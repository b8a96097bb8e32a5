// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>

#include "flashmask/attention.h"

namespace flashmask::cuda {

/// Fills in what follows from a kernel's id: the architecture, which it begins with, and the entry, which is the id
/// with underscores for dots.
inline KernelInfo named(KernelInfo info) {
  info.arch = info.id.substr(0, info.id.find('.'));
  info.symbol = "flashmask_" + info.id;
  std::replace(info.symbol.begin(), info.symbol.end(), '.', '_');
  return info;
}

}  // namespace flashmask::cuda
