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

/// Tensors for up to `batch` sequences in host memory, and the calls on them; with backend cuda, on copies on device 0.
class Workbench {
 public:
  Workbench(const RunOptions& options, const Packed& packed, const Projections& projections, int64_t batch);

  /// Makes q, k, v and dout of sequences [first, first + count).
  void load(int64_t first, int64_t count);
  const Inputs& inputs() const { return inputs_; }
  /// Outputs of the right shapes.
  Outputs make_outputs() const;
  /// Explanation of the first call's forward.
  const Explanation& explanation() const { return explanation_; }

  /// Told after each call how much of the loaded sequences' work is done, in kWorkPerSequence parts each.
  std::function<void(int64_t parts)> progress;
  static constexpr int64_t kForwardWork = 2, kBackwardWork = 5, kWorkPerSequence = kForwardWork + kBackwardWork;

  /// Plan, forward and backward of the loaded sequences under their masks. On a device every time is that of a second
  /// call, from an idle device until it is idle again; copies are outside of it.
  Seconds run(const Mask& mask, Outputs& outputs);
  /// Forward and backward with dense masks, a byte per element, [count, 1, seqlen, seqlen].
  Seconds run_dense(std::span<const uint8_t> visible, Outputs& outputs);

 private:
  /// The tensors of a call, in host memory or on the device.
  struct Views {
    TensorView q, k, v, dout, out, lse, dq, dk, dv;
  };

  bool on_device() const { return options_.backend == "cuda"; }
  Seconds run(const AttentionInputs& masks, Outputs& outputs);
  Seconds run_on_device(const AttentionInputs& masks, Outputs& outputs);
  Seconds run_calls(AttentionInputs call, const Views& views);
  template <typename F>
  double seconds_of(F&& call) const;

  const RunOptions& options_;
  const Packed& packed_;
  const Projections& projections_;
  Options library_options_;
  int64_t batch_, count_ = 0;
  Inputs inputs_;
  std::vector<std::byte> workspace_;
  Explanation explanation_;
};

/// Figures of the run with FlashMask's masks.
struct MaskedFigures {
  int64_t sequences = 0;   ///< how many were attended
  int64_t batch_size = 0;  ///< sequences per call
  Seconds seconds{};
  MaskStatistics statistics{};  ///< over the attended sequences' masks, in tiles of 128 x 128
  int64_t mask_bytes = 0, plan_bytes = 0, dense_mask_bytes = 0;
  std::string backend, configuration;
  CheckFigures check{};
};

/// Runs attention over all sequences, or as many as the options allow, and checks samples of the results.
MaskedFigures run_masked(const RunOptions& options, const Packed& packed, const Projections& projections);

}  // namespace flashmask::run
