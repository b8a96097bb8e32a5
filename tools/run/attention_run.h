// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "flashmask/attention.h"
#include "flashmask/inspect.h"
#include "flashmask/plan.h"
#include "run/check.h"
#include "run/options.h"
#include "run/packing.h"
#include "run/projections.h"

namespace flashmask::run {

struct Seconds {
  double plan = 0, forward = 0, backward = 0;

  double attention() const { return forward + backward; }
  Seconds& operator+=(const Seconds& other) {
    plan += other.plan;
    forward += other.forward;
    backward += other.backward;
    return *this;
  }
};

/// Tensors for up to `batch` sequences, and the calls on them.
class Workbench {
 public:
  Workbench(const RunOptions& options, const Packed& packed, const Projections& projections, int64_t batch);

  /// Makes q, k, v and dout of sequences [first, first + count).
  void load(int64_t first, int64_t count);
  const Inputs& inputs() const { return inputs_; }
  /// Outputs of the right shapes.
  Outputs make_outputs() const;
  /// How a masked forward call would be done.
  Explanation explain(const Mask& mask, const Outputs& outputs) const;

  /// Told after each call how much of the loaded sequences' work is done, in kWorkPerSequence parts each.
  std::function<void(int64_t parts)> progress;
  static constexpr int64_t kForwardWork = 2, kBackwardWork = 5, kWorkPerSequence = kForwardWork + kBackwardWork;

  /// Plan, forward and backward of the loaded sequences under their masks.
  Seconds run(const Mask& mask, Outputs& outputs);
  /// Forward and backward with dense masks, a byte per element, [count, 1, seqlen, seqlen].
  Seconds run_dense(std::span<const uint8_t> visible, Outputs& outputs);

 private:
  Seconds run(const AttentionInputs& call, Outputs& outputs);
  AttentionInputs call_of() const;

  const RunOptions& options_;
  const Packed& packed_;
  const Projections& projections_;
  Options library_options_;
  int64_t batch_, count_ = 0;
  Inputs inputs_;
  std::vector<std::byte> workspace_;
};

/// What the run with FlashMask's masks gave.
struct MaskedFigures {
  int64_t sequences = 0;   ///< how many were attended
  int64_t batch_size = 0;  ///< sequences per call
  Seconds seconds{};
  MaskStatistics statistics{};  ///< of the attended sequences' masks, in tiles of 128 x 128
  int64_t mask_bytes = 0, plan_bytes = 0, dense_mask_bytes = 0;
  std::string backend, configuration;
  CheckFigures check{};
};

/// Runs attention over all sequences, or as many as the options allow, and checks samples of the results.
MaskedFigures run_masked(const RunOptions& options, const Packed& packed, const Projections& projections);

}  // namespace flashmask::run
