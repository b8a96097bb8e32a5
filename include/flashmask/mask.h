// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "flashmask/export.h"
#include "flashmask/status.h"
#include "flashmask/tensor.h"

namespace flashmask {

/// Rows and keys of one block of a block mask.
inline constexpr int64_t kBlockMaskSize = 128;
/// Longest sequence a mask can describe; row indices are int32.
inline constexpr int64_t kMaxSeqlen = INT32_MAX;

/// A diagonal band shared by all columns: row i sees key j only if lo <= j - (i + q_offset) <= hi. An absent edge is
/// unbounded, and so is an edge that no element can be beyond. Any int64 is accepted; INT64_MAX and the like mean an
/// infinite window.
struct FLASHMASK_API Band {
  std::optional<int64_t> lo;
  std::optional<int64_t> hi;

  /// No restriction.
  static Band none() { return {}; }
  /// j <= i + q_offset.
  static Band causal() { return {.lo = std::nullopt, .hi = 0}; }
  /// i + q_offset - left <= j <= i + q_offset + right: the row's own position is visible and not
  /// counted. -1 leaves that side unbounded. Throws on values below -1.
  static Band window(int64_t left, int64_t right);

  bool unbounded() const { return !lo && !hi; }
  bool operator==(const Band&) const = default;
};

/// Parts of a Mask. Row intervals follow the FlashMask paper (section 4.1): column j is hidden from rows [LTS[j],
/// LTE[j]) and [UTS[j], UTE[j]).
struct MaskParts {
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  Band band{};
  /// Row i stands at key position i + q_offset; absent: seqlen_k - seqlen_q (bottom-right). Within [-2^40, 2^40]. Must
  /// be absent with positions.
  std::optional<int64_t> q_offset{};
  /// Batch and head count of the vectors below; 1 is broadcast over the call's.
  int64_t batch = 1;
  int64_t heads = 1;
  /// Each empty or [batch, heads, seqlen_k], absolute query rows of the call. Without both `lts` and `lte`
  /// there is no first interval, without both `uts` and `ute` no second; of a pair, a missing start is row 0
  /// and a missing end is seqlen_q. Values are clamped to [0, seqlen_q]; start >= end is an empty interval;
  /// the two may overlap and come in any order; the band does not clip them.
  std::vector<int32_t> lts{}, lte{}, uts{}, ute{};
  /// Batch and head count of `block_mask`; 1 is broadcast.
  int64_t block_batch = 1;
  int64_t block_heads = 1;
  /// Empty or [block_batch, block_heads, ceil(seqlen_q / 128), ceil(seqlen_k / 128)], nonzero = keep.
  std::vector<uint8_t> block_mask{};
  /// Batch count of the positions below; 1 is broadcast.
  int64_t position_batch = 1;
  /// Both empty, or [position_batch, seqlen_q] and [position_batch, seqlen_k]: the positions of rows and keys that the
  /// band compares instead of i + q_offset and j: row i sees key j only if lo <= k_pos[j] - q_pos[i] <= hi. Any numbers
  /// in any order; row intervals and block mask still count rows and keys. A lo of -(2^31 - 1) or less, or a hi of 2^31
  /// - 1 or more, is unbounded; lo must not be above 2^31 - 1, nor hi below its negative. Positions have no effect
  /// without a band.
  std::vector<int32_t> q_pos{}, k_pos{};
  /// In place of the vectors above, any number of hidden row intervals per column: both empty, or column_ptr [batch,
  /// heads, seqlen_k + 1] and intervals [n, 2], pairs (begin, end) of absolute rows. Column j of an entry and head is
  /// hidden from the intervals column_ptr[j] up to, but not including, column_ptr[j + 1], which count over all entries
  /// and heads and ascend. Values are clamped to [0, seqlen_q]; intervals may be empty, overlap and come in any order.
  /// A mask keeps them sorted and merged, or as the vectors if no column has more than two.
  std::vector<int32_t> column_ptr{}, intervals{};
};

/// A plain view of a mask, which the planner and the kernels read. Pointers as in MaskParts (null =
/// absent), in the order [batch, heads, seqlen_k] with `bounds_stride` elements from one column to the next;
/// they live on `device`.
struct MaskView {
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  /// The band on j - i, q_offset folded in, both ends inclusive; INT32_MIN / INT32_MAX are unbounded.
  int32_t diagonal_lo = INT32_MIN;
  int32_t diagonal_hi = INT32_MAX;
  /// Key position of row 0, 0 with positions. The diagonals have it already: for scores that depend on the distance.
  int64_t q_offset = 0;
  int64_t bounds_batch = 1;
  int64_t bounds_heads = 1;
  const int32_t* lts = nullptr;
  const int32_t* lte = nullptr;
  const int32_t* uts = nullptr;
  const int32_t* ute = nullptr;
  /// Elements between neighbouring columns of a vector: 1, or the number of vectors if they are interleaved as in
  /// FlashMask's [batch, heads, seqlen_k, n].
  int64_t bounds_stride = 1;
  int64_t block_batch = 1;
  int64_t block_heads = 1;
  const uint8_t* block_mask = nullptr;
  /// Hash of the contents, independent of bounds_stride; a Plan carries the hash of the mask it was made for. 0 if not
  /// computed: the host does not read contents on a device, and the C interface hashes others only for a plan.
  uint64_t content_hash = 0;
  Device device{};
  /// True if the band compares positions, [q_pos_batch, seqlen_q] and [k_pos_batch, seqlen_k]; the diagonals above are
  /// then the band's edges. Never true in a mask without elements.
  bool has_positions = false;
  int64_t q_pos_batch = 1;
  int64_t k_pos_batch = 1;
  const int32_t* q_pos = nullptr;
  const int32_t* k_pos = nullptr;
  /// Interval lists [bounds_batch, bounds_heads, seqlen_k + 1] and [listed_intervals, 2], in place of the vectors, see
  /// MaskParts: normalised in host memory, as the caller wrote them on a device.
  const int32_t* column_ptr = nullptr;
  const int32_t* intervals = nullptr;
  int64_t listed_intervals = 0;

  /// Batch and head count of the mask as a whole: vectors, block mask and positions together.
  int64_t batch() const {
    const int64_t of_intervals = bounds_batch > block_batch ? bounds_batch : block_batch;
    const int64_t of_positions = q_pos_batch > k_pos_batch ? q_pos_batch : k_pos_batch;
    return of_intervals > of_positions ? of_intervals : of_positions;
  }
  int64_t heads() const { return bounds_heads > block_heads ? bounds_heads : block_heads; }
};

/// One odd value that `Mask::validate` found: legal, read as the contract says, but rarely meant.
struct Finding {
  int64_t batch = 0, head = 0, column = 0;
  std::string what;
};

class Mask;
FLASHMASK_API Mask from_startend_row_indices(const TensorView& indices, bool causal, int64_t seqlen_q,
                                             std::optional<int64_t> q_offset);
FLASHMASK_API Mask from_interval_lists(const TensorView& column_ptr, const TensorView& intervals, int64_t seqlen_q,
                                       std::optional<int64_t> q_offset);

/// An immutable attention mask in O(seqlen_k) memory: an optional diagonal band, over indices or over positions of rows
/// and keys, at most two half-open intervals of hidden query rows per key column or a list of any number of them, and
/// an optional block mask; an element is visible if none of them hides it. Copies share the data and may be used from
/// any thread.
///
/// A mask whose vectors, lists, block mask or positions are on a CUDA device (from_startend_row_indices,
/// from_interval_lists, with_block_mask, with_positions) borrows the caller's memory, which has to stay as long as any
/// call uses the mask, and never reads it on the host. Functions that would have to (the spans, visible, validate,
/// to_dense, statistics, drawing, conversions, composition) throw kInvalidArgument naming the device.
class FLASHMASK_API Mask {
 public:
  /// Throws Error if sizes are negative, too large or disagree with the vectors.
  explicit Mask(MaskParts parts);

  int64_t seqlen_q() const;
  int64_t seqlen_k() const;
  /// Batch and heads of the mask: each 1 or the call's number.
  int64_t batch() const;
  int64_t heads() const;
  /// The band, without edges that no element can be beyond.
  const Band& band() const;
  /// 0 in a mask with positions, which has none.
  int64_t q_offset() const;
  /// Number of row intervals stored per column: 0, 1 or 2; with interval lists, of the column that has most.
  int num_intervals() const;
  /// True if some column has more than two hidden intervals, so that each column has a list of them.
  bool has_interval_lists() const;
  bool has_block_mask() const;
  bool has_positions() const;
  /// The stored vectors, empty where absent; see MaskParts. Valid as long as this Mask or a copy lives.
  std::span<const int32_t> lts() const;
  std::span<const int32_t> lte() const;
  std::span<const int32_t> uts() const;
  std::span<const int32_t> ute() const;
  std::span<const int32_t> column_ptr() const;
  std::span<const int32_t> intervals() const;
  std::span<const uint8_t> block_mask() const;
  /// [view().q_pos_batch, seqlen_q] and [view().k_pos_batch, seqlen_k].
  std::span<const int32_t> q_pos() const;
  std::span<const int32_t> k_pos() const;
  const MaskView& view() const;
  /// Device of the vectors, the block mask and the positions; the CPU if there are none (such a mask fits every
  /// device).
  Device device() const;
  /// Bytes held by the vectors, the block mask and the positions; borrowed memory does not count.
  int64_t memory_bytes() const;

  /// True if query row `i` sees key `j` under mask batch `b` and mask head `h`.
  bool visible(int64_t b, int64_t h, int64_t i, int64_t j) const;

  /// This mask with row i standing at key position i + q_offset. Throws if the mask has positions.
  Mask with_q_offset(int64_t q_offset) const;
  /// This mask with `band` in place of its own.
  Mask with_band(const Band& band) const;
  /// This mask with the block mask `keep` ([batch, heads, ceil(seqlen_q/128), ceil(seqlen_k/128)]); an empty vector
  /// removes it.
  Mask with_block_mask(std::vector<uint8_t> keep, int64_t batch = 1, int64_t heads = 1) const;
  /// `keep` [batch, heads, ceil(seqlen_q/128), ceil(seqlen_k/128)]: copied from host memory (bool, uint8 or int32, any
  /// strides), or borrowed on a CUDA device (bool or uint8, contiguous), which must be the vectors' device, if there
  /// are any.
  template <std::same_as<TensorView> Tensor>  // not viable for {}, which is an empty vector
  Mask with_block_mask(const Tensor& keep) const {
    return with_block_tensor(keep);
  }

  /// This mask with these positions of rows and keys instead of q_offset or its own positions; see MaskParts. Two empty
  /// vectors remove the positions, and the band then uses the default q_offset.
  Mask with_positions(std::vector<int32_t> q_pos, std::vector<int32_t> k_pos, int64_t batch = 1) const;
  /// int32 [batch or 1, seqlen_q] and [batch or 1, seqlen_k]: copied from host memory (any strides), or borrowed on a
  /// CUDA device (contiguous), which must be the device of the mask's other contents, if it has any.
  template <std::same_as<TensorView> Tensor>
  Mask with_positions(const Tensor& q_pos, const Tensor& k_pos) const {
    return with_position_tensors(q_pos, k_pos);
  }

  /// Values that are legal but odd (outside [0, seqlen_q], start > end), at most `limit` of them.
  std::vector<Finding> validate(int64_t limit = 16) const;

 private:
  friend Mask from_startend_row_indices(const TensorView& indices, bool causal, int64_t seqlen_q,
                                        std::optional<int64_t> q_offset);
  friend Mask from_interval_lists(const TensorView& column_ptr, const TensorView& intervals, int64_t seqlen_q,
                                  std::optional<int64_t> q_offset);
  struct Data;
  struct BlockMask;
  struct Positions;
  /// A mask without a block mask that borrows the vectors of `vectors`.
  Mask(const MaskView& vectors, const Band& band, std::optional<int64_t> q_offset);
  Mask with_block_tensor(const TensorView& keep) const;
  Mask with_position_tensors(const TensorView& q_pos, const TensorView& k_pos) const;
  Mask with_block(std::shared_ptr<const BlockMask> block) const;

  std::shared_ptr<const Data> data_;
};

// --- Conversions ----------------------------------------------------------------------------------

/// FlashMask's `startend_row_indices` and the flag that gives it its meaning.
struct StartEndRowIndices {
  bool causal = false;
  int64_t batch = 1, heads = 1, seqlen_k = 0;
  int64_t vectors = 1;          ///< 1, 2 or 4
  std::vector<int32_t> values;  ///< [batch, heads, seqlen_k, vectors]
};

/// Reads int32 `indices` [batch, heads, seqlen_k, n], any strides: causal with n = 1 (LTS) or 2 (LTS,
/// LTE); not causal with n = 2 (LTS, UTE) or 4 (LTS, LTE, UTS, UTE). Any other pairing is an error.
/// Indices on a CUDA device must be contiguous and are borrowed: the mask is a view of the caller's memory.
FLASHMASK_API Mask from_startend_row_indices(const TensorView& indices, bool causal, int64_t seqlen_q,
                                             std::optional<int64_t> q_offset = std::nullopt);

/// The mask of interval lists, int32 `column_ptr` [batch, heads, seqlen_k + 1] and `intervals` [n, 2] (see MaskParts),
/// without a band. Copied from host memory (any strides), or borrowed on a CUDA device: contiguous, aligned to 8 bytes.
FLASHMASK_API Mask from_interval_lists(const TensorView& column_ptr, const TensorView& intervals, int64_t seqlen_q,
                                       std::optional<int64_t> q_offset = std::nullopt);

/// Writes `mask` in the smallest of the four vector forms that expresses it exactly. Throws kUnrepresentable, naming
/// the first column that fits none. A mask with a block mask is refused too, because FlashMask's call takes that as a
/// separate argument. A band over positions becomes intervals if it fits.
FLASHMASK_API StartEndRowIndices to_startend_row_indices(const Mask& mask);

/// to_startend_row_indices() for a mask whose vectors are too long to hold twice: calls take(values) for each column,
/// in the order [batch, heads, seqlen_k], and returns the form without values. Allocates nothing of the mask's length,
/// and throws before the first call.
FLASHMASK_API StartEndRowIndices read_startend_row_indices(const Mask& mask,
                                                           const std::function<void(std::span<const int32_t>)>& take);

/// The mask of a dense matrix `visible` (bool or uint8, [seqlen_q, seqlen_k] or [batch, heads, seqlen_q, seqlen_k],
/// nonzero = visible, any strides). Bands are tried in the order none, causal, left edge, both, each as tight as the
/// matrix allows; the fewest intervals per column win, ties in that order. A matrix that needs more than two becomes
/// interval lists beside that band.
FLASHMASK_API Mask from_dense(const TensorView& visible);

/// One byte per element, 1 = visible: [mask.batch(), mask.heads(), seqlen_q, seqlen_k].
FLASHMASK_API std::vector<uint8_t> to_dense(const Mask& mask);

// --- Composition ----------------------------------------------------------------------------------

// The result keeps one band over positions; bands over other masks' positions become intervals.

/// Visible where both are. Same lengths; batches and heads broadcast. Always exact.
FLASHMASK_API Mask intersect(const Mask& a, const Mask& b);

/// Block-diagonal packing: row and key ranges of the pieces follow each other and do not see each other.
/// Always exact.
FLASHMASK_API Mask concatenate(std::span<const Mask> pieces);

/// Rows [row_begin, row_end) and keys [key_begin, key_end) of a mask; always exact. With a block mask the
/// ranges must begin at multiples of 128.
FLASHMASK_API Mask crop(const Mask& mask, int64_t row_begin, int64_t row_end, int64_t key_begin, int64_t key_end);

/// Rows (or keys) [begin, end) of a sequence.
struct RowSegment {
  int64_t begin = 0, end = 0;
  bool operator==(const RowSegment&) const = default;
};

/// The rows of `rows` and the keys of `keys`, each one segment after another: the mask of a process that holds these
/// rows of a longer sequence. Always exact. Rows ascend and do not overlap; keys come in any order.
///
/// A bound becomes the number of gathered rows before it. A band stays a band if rows and keys are one run each. Over
/// several runs it becomes row intervals, if the columns have room for them, as interval lists always have; otherwise a
/// band over the positions of rows and keys in `mask`. With a block mask segments begin at multiples of 128, and all
/// but the last row and key segments end there, or kUnsupported.
FLASHMASK_API Mask gather(const Mask& mask, std::span<const RowSegment> rows, std::span<const RowSegment> keys);

}  // namespace flashmask
