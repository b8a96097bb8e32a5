// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device.h"
#include "call/launch.h"
#include "common/arithmetic.h"

namespace flashmask::cuda {

inline cudaStream_t stream_of(const Problem& p) { return static_cast<cudaStream_t>(p.stream); }

/// A call's executed tiles, counted on the device if the call counts them.
class TileCounter {
 public:
  /// `memory` has kWorkspaceAlignment bytes.
  TileCounter(const Problem& problem, std::byte* memory);
  /// The counter that the kernel adds to, or null.
  unsigned long long* on_device() const { return count_; }
  /// Adds the count to the call's. Waits for the stream, if tiles are counted at all.
  void report() const;

 private:
  const Problem& problem_;
  unsigned long long* count_;
};

/// The kernels of the plan that the call makes, if it makes one.
std::vector<std::string> plan_kernels_of(const Problem& problem);
/// Explanation::configuration of a call whose arch and tile are known.
std::string configuration_of(const Problem& problem, const Explanation& explanation);

/// The Configuration of a call on a CUDA device, from what its kernels need: tile(), workspace_bytes(),
/// explain(problem, explanation) for arch, instance and kernels, and run(problem, workspace, executed), which puts
/// them on the stream; executed tiles are added up in *executed, on the device, if it is not null.
template <typename Kernels>
struct DeviceCall {
  Kernels kernels;

  TileShape tile() const { return kernels.tile(); }
  bool reads_plan(const Problem& problem) const { return needs_plan(problem); }
  int64_t workspace_bytes() const { return counter_at() + kWorkspaceAlignment; }
  void explain(const Problem& problem, Explanation& explanation) const {
    explanation.kernels = plan_kernels_of(problem);
    kernels.explain(problem, explanation);
    explanation.configuration = configuration_of(problem, explanation);
  }
  void run(const Problem& problem, std::byte* workspace) const {
    const DeviceGuard guard(problem.device.index);
    const TileCounter counter(problem, workspace + counter_at());
    kernels.run(problem, workspace, counter.on_device());
    counter.report();
  }

 private:
  int64_t counter_at() const { return round_up(kernels.workspace_bytes(), kWorkspaceAlignment); }
};

}  // namespace flashmask::cuda
