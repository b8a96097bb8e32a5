// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "backends/cuda/device/arrival_params.h"
#include "backends/cuda/device/feature_params.h"
#include "backends/cuda/device/mask_params.h"
#include "backends/cuda/device/tensor_rows.h"
#include "call/problem.h"

namespace flashmask::cuda {

// Parameters that the host derives from a call for the kernels of every architecture.

/// How a tensor [batch or 1, heads, ...] is broadcast to the call's batch entries and query heads.
Sharing sharing(const Problem& p, int64_t batch, int64_t heads);

/// The element types that there are kernels of.
inline constexpr DataType kDataTypes[] = {DataType::kBFloat16, DataType::kFloat16};

/// The most work tiles of a call, which kernels count in 32 bits.
inline constexpr int64_t kMostWorkTiles = int64_t{1} << 30;

/// Why the kernels cannot count the rows or keys of the call in 32 bits; empty if they can.
std::string lengths_refusal(const Problem& p);

/// The compute capability of the call's device, or of the one that an explanation takes in its place.
struct Capability {
  int major, minor;
};
Capability capability_of(const Problem& p);

/// Multiprocessors of the call's device.
int64_t multiprocessors(const Problem& p);

/// How many CTAs of a persistent kernel the call may have.
int64_t most_ctas(const Problem& p);

/// The kernels' view of the call's mask, and of its dense mask if it has one.
MaskColumns mask_columns(const Problem& p);
DenseMask dense_mask(const Problem& p);

/// How the forward computes the visible elements of the call's partial granules.
ElementMask element_mask(const Problem& p);

/// True if the kernels read the call's tiles from a plan. Those of a dense mask they know: all are partial.
bool needs_plan(const Problem& p);

// Views of the call's plan. Without one its parts are null.

/// The plan's bits for the forward's kernels. Tiles of `tile_rows` have an order of their own; tiles of 64 rows come by
/// pairs, in the order of 128.
RowPlanBits row_plan_bits(const Problem& p, int tile_rows);

/// The plan's bits for the backward's kernels.
KeyPlanBits key_plan_bits(const Problem& p);

/// The plan's bit tiles; unset without interval lists.
BitTiles bit_tiles(const Problem& p);

/// The plan's extents.
VisibleExtents visible_extents(const Problem& p);

/// A tensor [batch, seqlen, heads, columns].
TensorRows tensor_rows(const TensorView& tensor);

/// True if the scores of the call are products q.k times softmax_scale.
bool has_product_scores(const Problem& p);
/// The factor that makes scores of the numbers that the kernels' Score policy leaves: softmax_scale for products.
double score_unit(const Problem& p);
/// score_unit in units of the exponent of 2, for the forward; at least a tiny number.
float scale_log2(const Problem& p);

/// How many query heads, in whole groups that share keys and values, run together so that these stay in `l2_bytes` of
/// the L2 cache.
int64_t heads_per_l2_group(const Problem& p, int64_t l2_bytes);

/// The kernels' parameters of the call's features, and of its scores.
FeatureParams feature_params(const Problem& p);
ScoreParams score_params(const Problem& p);

/// The kernels' view of keys that arrive while they run.
ArrivalParams arrival_params(const Problem& p);

/// Lets a kernel have its dynamic shared memory; asks CUDA once per kernel and device.
void allow_shared_memory(const void* kernel, int bytes, int32_t device);

}  // namespace flashmask::cuda
