// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "flashmask/mask.h"
#include "flashmask/tensor.h"
#include "numerics/oracle.h"
#include "verify/features.h"

namespace flashmask::verify {

/// Number of a mask's heads, relative to the call's.
enum class MaskHeads { kOne, kKv, kQuery };

/// The mask's block mask: none, one for all, or one for each batch entry and query head.
enum class BlockMask { kNone, kShared, kEach };

using numerics::HeadArray;
using numerics::Layout;
using numerics::PoisonedBytes;
using numerics::Results;
using numerics::Tensor;

/// A window that is intersected with the mask's own band; -1 is unbounded.
struct Window {
  int64_t left = -1;
  int64_t right = -1;
  bool operator==(const Window&) const = default;
};

/// The family of a case whose call is given no mask at all.
inline constexpr std::string_view kNoMask = "none";
/// The family of a case whose columns hide any rows, as a boolean matrix does: no builder's.
inline constexpr std::string_view kRandomMatrix = "random_matrix";

/// One call to check, forward and backward. Everything random in it (masks and tensors) follows from `seed`.
struct Case {
  int64_t batch = 1;
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  int64_t heads_q = 1;
  int64_t heads_kv = 1;
  int64_t head_dim = 64;
  int64_t head_dim_v = 64;
  DataType dtype = DataType::kFloat32;
  std::string family = "full";
  uint64_t seed = 0;
  MaskHeads mask_heads = MaskHeads::kOne;
  /// A mask of its own for each batch entry (otherwise one for all).
  bool mask_per_batch = false;
  BlockMask block_mask = BlockMask::kNone;
  std::optional<Window> window{};
  /// Given to the call, in place of the mask's own.
  std::optional<int64_t> q_offset{};
  Layout layout = Layout::kBshd;
  /// dout is one number seen through strides of zero, as the gradient of a sum is.
  bool expanded_dout = false;
  /// A gradient comes in through lse too.
  bool dlse = false;
  std::optional<double> given_scale{};  ///< softmax_scale, if not the default
  /// The call is given a ready plan (otherwise it makes its own).
  bool ready_plan = false;
  CaseFeatures features{};

  bool operator==(const Case&) const = default;

  int64_t mask_batch_count() const { return mask_per_batch ? batch : 1; }
  int64_t mask_head_count() const {
    return mask_heads == MaskHeads::kOne ? 1 : mask_heads == MaskHeads::kKv ? heads_kv : heads_q;
  }
  double scale() const;
  /// Dtype of out and the gradients.
  DataType result_dtype() const { return features.partial ? DataType::kFloat32 : dtype; }
  DataType sink_dtype() const { return features.sink == SinkKind::kOwn ? dtype : DataType::kFloat32; }
  numerics::Sizes sizes() const { return {batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v}; }
  bool has_positions() const { return features.positions != Positions::kNone; }
  bool has_mask() const { return family != kNoMask || block_mask != BlockMask::kNone || window || has_positions(); }
  /// Multiply-adds of the forward's two products over the whole score matrix: what the case costs to check.
  int64_t cost() const { return batch * heads_q * seqlen_q * seqlen_k * (head_dim + head_dim_v); }
};

/// The case on one line, complete: "family=causal seed=1 batch=2 ...".
std::string describe(const Case& c);

/// Reads a line that `describe` wrote; what the line leaves out has its default. Throws Error naming a word
/// that it does not understand.
Case parse_case(std::string_view line);

/// "float32", "bfloat16" or "float16"; throws naming `argument` and the accepted ones.
DataType parse_dtype(std::string_view text, std::string_view argument = "dtype");
/// "bshd", "bhsd", "padded" or "aligned"; throws naming `argument` and the accepted ones.
Layout parse_layout(std::string_view text, std::string_view argument = "layout");

}  // namespace flashmask::verify
