// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/host/device_call.h"

#include <cstdio>

#include "backends/cuda/host/error.h"
#include "backends/cuda/plan/device_plan.h"
#include "common/message.h"

namespace flashmask::cuda {

TileCounter::TileCounter(const Problem& problem, std::byte* memory)
    : problem_(problem), count_(problem.executed_tiles ? reinterpret_cast<unsigned long long*>(memory) : nullptr) {
  if (count_)
    check(cudaMemsetAsync(count_, 0, sizeof(*count_), stream_of(problem)), "cudaMemsetAsync of the tile counter");
}

void TileCounter::report() const {
  if (!count_) return;
  unsigned long long count = 0;
  check(cudaMemcpyAsync(&count, count_, sizeof(count), cudaMemcpyDeviceToHost, stream_of(problem_)),
        "cudaMemcpyAsync of the tile counter");
  check(cudaStreamSynchronize(stream_of(problem_)), problem_.is_backward ? "backward" : "forward");
  const auto executed = static_cast<int64_t>(count);
  if (!problem_.is_backward) {
    problem_.executed_tiles->forward += executed;
    return;
  }
  problem_.executed_tiles->backward_rows += executed;
  problem_.executed_tiles->backward_keys += executed;
}

std::vector<std::string> plan_kernels_of(const Problem& p) {
  std::vector<std::string> ids;
  if (!needs_plan(p) || p.plan.defined() || p.is_empty()) return ids;
  for (const KernelInfo& kernel :
       plan_kernels({.lists = p.mask.column_ptr != nullptr, .positions = p.mask.has_positions}))
    ids.push_back(kernel.id);
  return ids;
}

std::string configuration_of(const Problem& p, const Explanation& e) {
  const std::string ctas = p.max_ctas > 0 ? message(", at most ", p.max_ctas, " CTAs") : "";
  char padding[64] = "";
  if (e.padding_share > 0)
    std::snprintf(padding, sizeof(padding), " (%.1f %% of its work is padding)", 100 * e.padding_share);
  return message(e.arch, " ", e.tile.rows, "x", e.tile.keys, " tiles, ", e.instance, padding, ", ", plan_source(p),
                 ctas);
}

}  // namespace flashmask::cuda
