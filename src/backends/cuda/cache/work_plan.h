// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/cuda/cache/cached_params.h"
#include "backends/cuda/cache/work.h"
#include "backends/cuda/host/launch_chain.h"
#include "call/cached_problem.h"

namespace flashmask::cuda {

/// The properties of an architecture's kernels that a plan depends on.
struct WorkPlaces {
  int32_t shares;                      ///< places for CTAs on the device
  int32_t least_blocks, split_blocks;  ///< see WorkPlan
  int32_t packed_rows;                 ///< the most that a tile gets
  int32_t tile_rows, head_dim_v;       ///< the kernel's tile has
};

/// Layout of a plan in device memory: sizes follow from capacities alone.
class WorkPlanLayout {
 public:
  /// `capacities` have no refusal().
  WorkPlanLayout(const CachedCapacities& capacities, const WorkPlaces& places);
  /// Why kernels of tiles of so many packed rows cannot count in such a plan; empty if they can.
  static std::string refusal(const CachedCapacities& capacities, int32_t packed_rows = kPackedRows);

  int64_t bytes() const { return bytes_; }
  /// The plan at `memory`, aligned to kWorkspaceAlignment, for calls with the problem's mask.
  WorkPlan at(std::byte* memory, const CachedProblem& problem) const;

 private:
  int64_t take(int64_t bytes);
  /// Sets a forest's sizes of row tiles, for `rows` rows.
  void set_levels(int64_t rows, int64_t rows_of_request);
  /// Floats of the results that CTAs hand to one another, or keep.
  int64_t partial_results(const CachedCapacities& capacities) const;

  WorkPlaces places_;
  TileLevel levels_[kTileLevels] = {};  ///< a forest's
  int64_t tile_slots_, words_, group_, heads_kv_, split_blocks_, splits_, listed_splits_, split_rows_;
  int64_t bytes_ = 0;
  int64_t shares_, arrived_, tiles_, live_, live_bits_, full_bits_, results_, partials_;
};

/// True if plans of these capacities have row tiles of several sizes, the largest of so many packed rows: those of a
/// forest, unless a tile has only some of a row's heads.
bool has_levels(const CachedCapacities& capacities, int32_t packed_rows);

/// Splits of a sequence that a plan has room for; 1 without batch_invariant.
int64_t splits_of(const CachedCapacities& capacities);

/// The capacities of a plan for one call.
CachedCapacities capacities_of(const CachedProblem& problem);
/// The capacities of the plan that a call has, or makes.
CachedCapacities plan_capacities(const CachedProblem& problem);

/// Fills a plan, by one or two launches.
void launch_work_plan(const WorkPlan& plan, const CachedProblem& problem, LaunchChain& chain);

/// Merges the results of a forest's rows, of so many columns each, behind the kernel that leaves them.
void launch_forest_merge(const CachedParams& params, const CachedProblem& problem, int32_t columns, LaunchChain& chain);

/// The kernels that do.
std::vector<KernelInfo> work_plan_kernels();

}  // namespace flashmask::cuda
