// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "run/attention_run.h"

namespace flashmask::run {

/// Compares equal calls with FlashMask's masks and with dense ones, on the first sequences.
struct DenseFigures {
  int64_t sequences = 0;  ///< 0: it was not run
  std::string note;       ///< why not all sequences, if so
  Seconds masked{}, dense{};
  struct Equality {
    std::string tensor;
    bool equal = false;
  };
  std::vector<Equality> equality{};

  /// True if every result has equal bits in both runs (-0 counts as 0).
  bool equal() const;
};

/// Runs both, one after the other on the same tensors. How many sequences: all if the dense run is likely to
/// end within options.dense_seconds, judged by the time that `masked` took for its tiles; otherwise as many as
/// are, one at least; none if a dense mask of one sequence takes more than 2 GiB.
DenseFigures compare_with_dense(const RunOptions& options, const Packed& packed, const Projections& projections,
                                const MaskedFigures& masked);

}  // namespace flashmask::run
