// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "call/options.h"
#include "flashmask/attention.h"
#include "mask/view.h"

namespace flashmask {

/// A checked call, as the backends see it. All shapes agree, all sizes are in range.
struct Problem : CommonOptions {
  bool is_backward = false;
  int64_t batch = 0, seqlen_q = 0, seqlen_k = 0, heads_q = 0, heads_kv = 0, head_dim = 0, head_dim_v = 0;
  DataType dtype = DataType::kNone;
  Device device{};
  bool deterministic = false;
  std::string_view kernels = "auto";  ///< as Options::kernels, in whose memory it is
  ExecutedTiles* executed_tiles = nullptr;
  int64_t max_mask_bytes = 0;     ///< as Options::max_mask_bytes
  std::optional<GpuModel> gpu{};  ///< in an explanation: replaces the device's own properties

  TensorView q, k, v, out, lse, dout, dlse, dq, dk, dv, dsink;
  // The mask: a plan says which tiles have visible elements, which have only such, and how far elements reach; a source
  // says which elements of the other tiles are visible: the view's vectors, band and positions, or the matrix.
  MaskView mask;     ///< its contents are the caller's; hides nothing where there is a matrix
  TensorView dense;  ///< the matrix, [1 or batch, 1 or heads, seqlen_q, seqlen_k], or undefined
  PlanView plan;     ///< undefined where the call has to make it, or needs none

  Arrivals arrivals;  ///< a forward's; undefined where all keys are there
  EarlyKeys early;    ///< a backward's; undefined where dk and dv are of all keys

  /// Index of the mask (of its plan) that batch entry b and query head h read.
  int64_t mask_index(int64_t b, int64_t h) const {
    return broadcast_index(b, batch, mask.batch()) * mask.heads() + broadcast_index(h, heads_q, mask.heads());
  }
  /// The rows and keys of batch entry b that are read; elements past them count as zeros (docs/mask.md). Needs the
  /// plan in host memory.
  VisibleExtent visible_extent(int64_t b) const { return plan.extent(broadcast_index(b, batch, mask.batch())); }
  int64_t kv_head(int64_t h) const { return broadcast_index(h, heads_q, heads_kv); }
  /// The first key whose gradients come early; seqlen_k if none do.
  int64_t first_early_key() const { return early.defined() ? seqlen_k - early.dk.shape[1] : seqlen_k; }
  int64_t group_size() const { return heads_q / heads_kv; }
  /// True if no output has an element.
  bool is_empty() const {
    return !dsink.defined() && (batch == 0 || (seqlen_q == 0 && (!is_backward || seqlen_k == 0)));
  }
};

/// First element of (b, s, h) in a tensor [batch, seqlen, heads, dim].
template <typename T>
T* row_at(const TensorView& t, int64_t b, int64_t s, int64_t h) {
  return static_cast<T*>(t.data) + b * t.stride[0] + s * t.stride[1] + h * t.stride[2];
}

/// Offset of (b, h, i) in lse or dlse.
inline int64_t lse_offset(const TensorView& t, int64_t b, int64_t h, int64_t i) {
  return b * t.stride[0] + h * t.stride[1] + i * t.stride[2];
}

/// First element of the dense mask's matrix for (b, h); one without elements may lie nowhere.
inline const uint8_t* dense_matrix(const Problem& p, int64_t b, int64_t h) {
  if (!p.dense.data) return nullptr;
  return static_cast<const uint8_t*>(p.dense.data) + broadcast_index(b, p.batch, p.dense.shape[0]) * p.dense.stride[0] +
         broadcast_index(h, p.heads_q, p.dense.shape[1]) * p.dense.stride[1];
}

/// Checks a call and takes it apart; `mask`, in place of args.mask, may be null. `with_data`: also that
/// pointers are there (not for workspace queries).
Problem check(const ForwardArgs& args, const MaskView* mask, const Options& options, bool with_data);
Problem check(const BackwardArgs& args, const MaskView* mask, const Options& options, bool with_data);

/// Throws unless p is in [0, 1), and unless the state is there if it is needed.
void check_dropout(const Dropout& dropout);
void check_dropout_state(const Dropout& dropout);
/// Throws unless the origins, if they are needed, are those of weights [batch, heads_q, seqlen_q, seqlen_k] on
/// `device`.
void check_dropout_origins(const Dropout& dropout, const int64_t (&weights)[4], const Device& device, bool with_data);

/// Throws unless the plan, which is there, has the hash of the problem's mask. Passes where either is not known: on a
/// device, whose hash could not be read without waiting (validate_plan does), and for a mask that is not hashed.
void check_plan_hash(const Problem& problem);

}  // namespace flashmask
