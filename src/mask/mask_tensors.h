// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "common/message.h"
#include "flashmask/mask.h"

namespace flashmask {

/// A mask as a caller's tensors, before anything of them is read. All are on one device.
struct MaskTensors {
  int64_t seqlen_q = 0, seqlen_k = 0;
  Band band{};
  std::optional<int64_t> q_offset{};     ///< absent: seqlen_k - seqlen_q
  bool causal = false;                   ///< how the vectors of `indices` are meant
  TensorView indices{};                  ///< as from_startend_row_indices takes them; undefined: none
  TensorView block_mask{};               ///< as Mask::with_block_mask takes it; undefined: none
  TensorView q_pos{}, k_pos{};           ///< as Mask::with_positions takes them; undefined: none
  TensorView column_ptr{}, intervals{};  ///< as MaskParts has them, in place of `indices`; undefined: none
};

/// The mask as a view of the tensors in place, its shapes checked. Contents may be read through it once check_contents
/// has passed, if they can_be_borrowed; content_hash is 0 if the mask has any. Allocates nothing.
MaskView view_of(const MaskTensors& mask);

/// Throws unless the contents are there and, on a device, laid out to be borrowed; nothing of them is read. The shapes
/// are those that view_of has checked.
void check_contents(const MaskTensors& mask);

/// True if the tensors are laid out as a view reads them.
bool can_be_borrowed(const MaskTensors& mask);

/// The vectors of a MaskView in the order in which indices of `vectors` of them hold them, the rest null. Throws if no
/// form has that many.
std::array<const int32_t* MaskView::*, 4> vector_order(bool causal, int64_t vectors);

/// Throws unless these are indices, of any shape that a mask may have; data is not looked at.
void check_indices(const TensorView& indices, bool causal);

/// Throws unless this is a block mask for these lengths; data is not looked at.
void check_block_mask(const TensorView& keep, int64_t seqlen_q, int64_t seqlen_k);

// --- Limits of a mask as a whole ------------------------------------------------------------------

void check_seqlen(const char* argument, int64_t seqlen);

/// The largest q_offset: far beyond any sequence, and small enough that sums of a few never overflow.
inline constexpr int64_t kMaxOffset = int64_t{1} << 40;

inline void check_offset(int64_t q_offset) {
  if (q_offset < -kMaxOffset || q_offset > kMaxOffset)
    throw_invalid("q_offset is ", q_offset, "; it must be between -2^40 and 2^40");
}

/// Throws unless these are positions of a mask of such lengths, both or neither, and without a q_offset; data is not
/// looked at.
void check_positions(const MaskTensors& mask);

/// Throws unless these are interval lists of a mask of such lengths, both or neither, on one device and without
/// indices; data is not looked at.
void check_interval_lists(const MaskTensors& mask);

/// Sets the view's diagonals and q_offset. Throws unless q_offset is within [-2^40, 2^40], or with positions unless the
/// band's edges can be compared with them. Edges of the band that no element can be beyond go.
void set_band(MaskView& view, Band& band, int64_t q_offset);

/// Vectors, a block mask or positions serve one batch entry or all, and the former one head or several.
void check_broadcast(const MaskView& view);

}  // namespace flashmask
