// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "flashmask/export.h"
#include "flashmask/granule_run.h"
#include "flashmask/mask.h"
#include "flashmask/tiles.h"
#include "flashmask/visible_extent.h"

namespace flashmask {

/// Limit of a plan's size: about the plan of one mask of 128 Mi rows and keys. Larger lengths are mistakes, better
/// named than answered with a lack of memory.
inline constexpr int64_t kMaxPlanBytes = int64_t{1} << 40;

/// A bit tile, the visible elements of a granule: for each of its keys a word of 64 rows, bit r for its row r.
inline constexpr int64_t kBitTileWords = kGranuleKeys;
inline constexpr int64_t kBitTileBytes = kBitTileWords * static_cast<int64_t>(sizeof(uint64_t));
/// PlanLayout::bit_tiles of a plan without bits.
inline constexpr int64_t kNoBits = -1;

/// How a plan holds the granules of its lines, row granules and key blocks.
enum class PlanForm : int32_t {
  kBits,  ///< a bit for each: any mask's, quadratic in the length
  kRuns,  ///< at most kLineRuns runs a line: linear in the length
};

/// Bytes of bits of granules up to which a plan is in bits, whatever its mask. A longer one is in runs if it is counted
/// to fit (count_plan_layout), and if these are smaller.
inline constexpr int64_t kShortPlanBytes = int64_t{4} << 20;

/// Layout of a plan's buffer; follows from shapes, the room for bit tiles and the form alone, so that the buffer can be
/// allocated before the mask's contents are known. Offsets are bytes from the buffer's start.
///
/// A plan on a CUDA device of a mask with interval lists has bits: a tile for each partial granule. Masks ascend, then
/// row granules, then key blocks; all that hides elements is in them, but the block mask.
struct FLASHMASK_API PlanLayout {
  PlanLayout() = default;
  /// Throws kInvalidArgument for lengths outside [0, kMaxSeqlen], batch or heads below 1, more than kMaxPlanBytes,
  /// or for bit tiles of a plan in runs.
  PlanLayout(int64_t seqlen_q, int64_t seqlen_k, int64_t batch, int64_t heads, int64_t bit_tiles = kNoBits,
             PlanForm form = PlanForm::kBits);

  int64_t seqlen_q = 0, seqlen_k = 0, batch = 0, heads = 0;
  int64_t bit_tiles = kNoBits;  ///< how many there is room for
  int64_t row_granules = 0;     ///< ceil(seqlen_q / 64)
  int64_t key_blocks = 0;       ///< ceil(seqlen_k / 128)
  int64_t words_per_row = 0;    ///< 64-bit words of one row granule's bits over the key blocks
  int64_t words_per_key = 0;    ///< 64-bit words of one key block's bits over the row granules
  int64_t row_tiles_128 = 0;    ///< ceil(seqlen_q / 128): tiles of two row granules
  int64_t row_tiles_192 = 0;    ///< ceil(seqlen_q / 192): tiles of three row granules

  // In runs GranuleRun [batch * heads, row_granules or key_blocks, kLineRuns] instead.
  int64_t row_live = 0, row_full = 0;                       ///< uint64 [batch * heads, row_granules, words_per_row]
  int64_t key_live = 0, key_full = 0;                       ///< uint64 [batch * heads, key_blocks, words_per_key]
  int64_t row_counts = 0;                                   ///< int32 [batch * heads, row_granules]
  int64_t key_counts = 0, key_order = 0;                    ///< int32 [batch * heads, key_blocks]
  int64_t row_tile_counts_128 = 0, row_tile_order_128 = 0;  ///< int32 [batch * heads, row_tiles_128]
  int64_t row_tile_counts_192 = 0, row_tile_order_192 = 0;  ///< int32 [batch * heads, row_tiles_192]
  int64_t scratch = 0;  ///< uint64 [batch * heads, key_blocks], for use while a plan is built; zero in a finished one
  /// In runs alone: int32, 0, or above kLineRuns if a line has more, and this is not the plan of its mask.
  int64_t most_runs = 0;
  int64_t visible_extents = 0;  ///< VisibleExtent [batch]
  // With bits alone.
  int64_t ascending_lists = 0;  ///< uint32 [batch * heads, key_blocks, 4], a bit for each key: its list ascends
  /// int32 [batch * heads, row_granules, 2 * words_per_row] and one more, the number of all tiles: for every 32 key
  /// blocks, how many tiles come before theirs.
  int64_t tiles_before = 0;
  int64_t tile_bits = 0;  ///< uint64 [bit_tiles, kBitTileWords], the last part
  int64_t bytes = 0;
  PlanForm form = PlanForm::kBits;

  int64_t extents() const { return visible_extents; }
  bool has_bits() const { return bit_tiles != kNoBits; }
  bool in_runs() const { return form == PlanForm::kRuns; }

  bool operator==(const PlanLayout&) const = default;
};

/// The granules of a line of a plan of either form, as words of bits: bit n % 64 of word n / 64 is granule n's.
class FLASHMASK_API GranuleLine {
 public:
  GranuleLine() = default;
  explicit GranuleLine(std::span<const uint64_t> words) : words_(words.data()), size_(words.size()) {}
  GranuleLine(const GranuleRun* runs, std::size_t size) : runs_(runs), size_(size) {}

  std::size_t size() const { return size_; }
  uint64_t operator[](std::size_t word) const { return words_ ? words_[word] : runs_word(word); }
  bool has(int64_t granule) const { return ((*this)[static_cast<std::size_t>(granule / 64)] >> granule % 64 & 1) != 0; }

 private:
  uint64_t runs_word(std::size_t word) const;

  const uint64_t* words_ = nullptr;
  const GranuleRun* runs_ = nullptr;
  std::size_t size_ = 0;
};

/// A built plan, read-only. `m` is a mask index: batch * heads + head.
class FLASHMASK_API PlanView {
 public:
  PlanView() = default;
  /// Reads a buffer that build_plan filled; throws if it does not hold a plan or is shorter than one.
  explicit PlanView(std::span<const std::byte> buffer);
  /// A plan in device memory, which is not read here: the layout is trusted. Only layout(), device() and data() may be
  /// used; mask_hash() is 0. Throws if the buffer is shorter than the layout or misaligned.
  static PlanView on_device(const PlanLayout& layout, std::span<const std::byte> buffer, Device device);

  bool defined() const { return base_ != nullptr; }
  const PlanLayout& layout() const { return layout_; }
  Device device() const { return device_; }
  /// The buffer's first byte, in the memory of device().
  const std::byte* data() const { return base_; }
  /// MaskView::content_hash of the mask the plan was made for.
  uint64_t mask_hash() const { return mask_hash_; }

  /// Granule c of the line: (row r, key block c) has a visible element / only visible ones.
  GranuleLine row_live(int64_t m, int64_t r) const { return row_line(layout_.row_live, m, r); }
  GranuleLine row_full(int64_t m, int64_t r) const { return row_line(layout_.row_full, m, r); }
  /// The transpose: granule r of the line.
  GranuleLine key_live(int64_t m, int64_t c) const { return key_line(layout_.key_live, m, c); }
  GranuleLine key_full(int64_t m, int64_t c) const { return key_line(layout_.key_full, m, c); }

  /// Live granules of each row granule / key block.
  std::span<const int32_t> row_counts(int64_t m) const { return ints(layout_.row_counts, m, layout_.row_granules); }
  std::span<const int32_t> key_counts(int64_t m) const { return ints(layout_.key_counts, m, layout_.key_blocks); }
  /// Key blocks with most live granules first; equal counts keep ascending order.
  std::span<const int32_t> key_order(int64_t m) const { return ints(layout_.key_order, m, layout_.key_blocks); }

  /// Live key blocks of each row tile of `granules_per_tile` row granules (a key block is live if it is in any of
  /// them), and the tiles with most live key blocks first, equal counts in ascending order. `granules_per_tile` is
  /// 2 or 3; throws otherwise.
  std::span<const int32_t> row_tile_counts(int64_t m, int64_t granules_per_tile) const;
  std::span<const int32_t> row_tile_order(int64_t m, int64_t granules_per_tile) const;

  /// The extent of the visible elements of batch entry `b` of the mask.
  VisibleExtent extent(int64_t b) const { return reinterpret_cast<const VisibleExtent*>(base_ + layout_.extents())[b]; }

  TileClass granule(int64_t m, int64_t r, int64_t c) const {
    if (!row_live(m, r).has(c)) return TileClass::kEmpty;
    return row_full(m, r).has(c) ? TileClass::kFull : TileClass::kPartial;
  }
  /// Live granules over all masks of the plan. Throws for a plan on a device.
  int64_t live_granules() const;

 private:
  GranuleLine row_line(int64_t offset, int64_t m, int64_t r) const {
    return line(offset, m * layout_.row_granules + r, layout_.words_per_row);
  }
  GranuleLine key_line(int64_t offset, int64_t m, int64_t c) const {
    return line(offset, m * layout_.key_blocks + c, layout_.words_per_key);
  }
  GranuleLine line(int64_t offset, int64_t index, int64_t words) const {
    const auto size = static_cast<std::size_t>(words);
    if (layout_.in_runs()) return {reinterpret_cast<const GranuleRun*>(base_ + offset) + index * kLineRuns, size};
    return GranuleLine({reinterpret_cast<const uint64_t*>(base_ + offset) + index * words, size});
  }
  std::span<const int32_t> ints(int64_t offset, int64_t m, int64_t n) const {
    return {reinterpret_cast<const int32_t*>(base_ + offset) + m * n, static_cast<std::size_t>(n)};
  }

  const std::byte* base_ = nullptr;
  PlanLayout layout_;
  uint64_t mask_hash_ = 0;
  Device device_{};
};

/// Calls f(index, full) for every live granule of a line, in ascending order.
template <typename F>
void for_each_live(const GranuleLine& live, const GranuleLine& full, F&& f) {
  for (std::size_t w = 0; w < live.size(); ++w) {
    for (uint64_t bits = live[w]; bits; bits &= bits - 1) {
      const int bit = std::countr_zero(bits);
      f(static_cast<int64_t>(w) * 64 + bit, (full[w] >> bit & 1) != 0);
    }
  }
}

/// Fills `buffer` (at least PlanLayout::bytes, 8-byte aligned) with the plan of a mask in host memory, without bit
/// tiles: in runs if only these have room and the mask's plan may be in runs, as count_plan_layout says.
FLASHMASK_API void build_plan(const MaskView& mask, std::span<std::byte> buffer);

/// build_plan in a layout of the mask's plan, which may have bit tiles: the bytes that a CUDA device would write. Tiles
/// that it has no room for are counted, and not written. Throws kInvalidArgument if the layout is in runs and a line of
/// the mask's plan has more than kLineRuns.
FLASHMASK_API void build_plan(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> buffer);

/// Bit tiles of a plan on `device` whatever the contents of the mask: its granules, of an index band's width those that
/// the band can reach; kNoBits on the CPU or without interval lists. This many suit calls that make their own plan, and
/// graphs, which are captured before contents are known.
FLASHMASK_API int64_t most_bit_tiles(const MaskView& mask, Device device);

/// Bit tiles that the mask's contents as they are now need, kNoBits as above: for plans that are made ahead of calls.
/// On a CUDA device this makes the plan without its bits in `scratch` (the layout with 0 bit tiles, in its memory,
/// 8-byte aligned) and waits for `stream`. Throws kUnsupported if lists and plan take more than max_mask_bytes, as
/// Options have it.
FLASHMASK_API int64_t count_bit_tiles(const MaskView& mask, std::span<std::byte> scratch, Device device,
                                      void* stream = nullptr, int64_t max_mask_bytes = 0);

/// Layout of the smallest plan that the mask's contents as they are now have, for plans that are made ahead of calls.
/// Without interval lists and positions, a plan whose bits take more than kShortPlanBytes and runs less is in runs if
/// no line has more than kLineRuns; one of lists has count_bit_tiles(), and every other one is in bits, without waits.
///
/// A band alone fits in runs. Else this makes the plan in `scratch`, count_plan_scratch() bytes on the mask's device,
/// 8-byte aligned, and on a CUDA device waits for `stream`. Throws as count_bit_tiles does.
FLASHMASK_API PlanLayout count_plan_layout(const MaskView& mask, std::span<std::byte> scratch, Device device,
                                           void* stream = nullptr, int64_t max_mask_bytes = 0);
/// Bytes of its scratch, from the shapes alone; 0 if nothing has to be counted.
FLASHMASK_API int64_t count_plan_scratch(const MaskView& mask, Device device);

/// Builds a plan on a device that holds the mask's contents (if it has any) and `buffer`: on a CUDA device the work is
/// put on `stream` (a cudaStream_t), nothing is allocated and nothing waits. The plan reflects the contents at the time
/// the work ran: rebuild it when they change. On the CPU `stream` must be null. Throws kNoDevice if the device is not
/// there or the library was built without CUDA.
///
/// The plan of interval lists on a CUDA device has bits, as many tiles as `buffer` has room for. With room for fewer
/// than most_bit_tiles() this waits for `stream`, and throws kInvalidArgument if there are more of them; a stream that
/// captures a graph needs room for all. A plan in runs of a mask with contents, in a buffer that is too short for bits,
/// waits, too: throws kInvalidArgument if a line has more than kLineRuns, or in a capture.
FLASHMASK_API void build_plan(const MaskView& mask, std::span<std::byte> buffer, Device device, void* stream = nullptr);

/// build_plan in a layout of the mask's plan on the device, whatever else `buffer` has room for.
FLASHMASK_API void build_plan(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> buffer,
                              Device device, void* stream = nullptr);

/// Throws kInvalidArgument if `plan` is not the plan of `mask`'s present contents; a debugging aid, as calls cannot
/// check the contents of a mask on a device without waiting for it. `scratch`: on a CUDA device PlanLayout::bytes of
/// its memory, 8-byte aligned, to rebuild the plan in, and the function waits for `stream`; unused on the CPU.
FLASHMASK_API void validate_plan(const MaskView& mask, const PlanView& plan, std::span<std::byte> scratch = {},
                                 void* stream = nullptr);
inline void validate_plan(const Mask& mask, const PlanView& plan, std::span<std::byte> scratch = {},
                          void* stream = nullptr) {
  validate_plan(mask.view(), plan, scratch, stream);
}

/// A plan that owns its buffer, in runs or bits as count_plan_layout says. Immutable: one plan serves every head,
/// layer, recomputation, forward and backward of its mask, from any thread.
class FLASHMASK_API Plan {
 public:
  /// max_mask_bytes: as Options have it, for a mask with interval lists.
  explicit Plan(const Mask& mask, int64_t max_mask_bytes = 0) : Plan(mask.view(), max_mask_bytes) {}
  explicit Plan(const MaskView& mask, int64_t max_mask_bytes = 0);
  /// In a layout of the mask's plan, without bit tiles. Throws as build_plan does.
  Plan(const MaskView& mask, const PlanLayout& layout);
  const PlanView& view() const { return view_; }
  std::span<const std::byte> buffer() const {
    return {reinterpret_cast<const std::byte*>(words_.data()), words_.size() * 8};
  }

  Plan(Plan&&) = default;
  Plan& operator=(Plan&&) = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

 private:
  /// False if the layout's runs do not suffice.
  bool write(const MaskView& mask, const PlanLayout& layout);

  std::vector<uint64_t> words_;
  PlanView view_;
};

/// A plan seen in tiles of several granules: `shape.rows` a multiple of 64, `shape.keys` of 128.
class FLASHMASK_API TiledPlanView {
 public:
  TiledPlanView(const PlanView& plan, TileShape shape);

  TileShape shape() const { return shape_; }
  int64_t row_tiles() const { return row_tiles_; }
  int64_t key_tiles() const { return key_tiles_; }
  TileClass tile(int64_t m, int64_t row_tile, int64_t key_tile) const;
  /// Live tiles of one row / column of tiles.
  int64_t live_in_row(int64_t m, int64_t row_tile) const;
  int64_t live_in_column(int64_t m, int64_t key_tile) const;
  int64_t live_tiles() const;
  /// Rows / columns of tiles with most live tiles first; equal counts keep ascending order.
  std::vector<int32_t> row_order(int64_t m) const;
  std::vector<int32_t> column_order(int64_t m) const;

 private:
  PlanView plan_;
  TileShape shape_;
  int64_t row_tiles_ = 0, key_tiles_ = 0;
};

}  // namespace flashmask
