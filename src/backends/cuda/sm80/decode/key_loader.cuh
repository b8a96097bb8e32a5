// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/row_copy.cuh"
#include "backends/cuda/sm80/decode/traits.cuh"

namespace flashmask::sm80 {

/// Loads the keys and values of a CTA's shares ahead of their use, from unit to unit: the keys of a step and its values
/// by turns, each a slot and a group of copies. Each warp loads kLoadedKeys rows of them, wherever they lie.
template <typename Traits>
class KeyLoader {
 public:
  using Shared = DecodeShared<Traits>;
  using Stored = typename Traits::Stored;
  __device__ __forceinline__ KeyLoader(const cuda::CachedParams& p, Shared& shared, int warp)
      : p_(p), shared_(shared), warp_(warp) {}

  /// Fills all slots but one.
  __device__ __forceinline__ void start() {
    if (ptx::is_leader()) shared_.walks[warp_].begin();
    find_step();
    load_keys();
#pragma unroll 1
    for (int n = 2; n < Traits::kSlots; n += 2) {
      load_values();
      put_scales();
      load_keys();
    }
  }

  /// Loads the next step's keys into the next slot, which nobody reads any more, and looks up the step after it.
  __device__ __forceinline__ void load_keys() {
    entry_ = next_entry_;
    row_ = next_row_;
    if (const KeyStep& loaded = step(loaded_); !loaded.is_end) {
      if constexpr (Traits::kFloat8) load_scales(loaded);
      copy<typename Traits::KTile>(2 * loaded_, loaded, p_.k_rows, p_.head_dim);
      ++found_;
      find_step();
    }
    ptx::cp_async_commit();
  }
  /// Loads the values of the step whose keys came last.
  __device__ __forceinline__ void load_values() {
    if (const KeyStep& loaded = step(loaded_); !loaded.is_end)
      copy<typename Traits::VTile>(2 * loaded_ + 1, loaded, p_.v_rows, p_.head_dim_v);
    ptx::cp_async_commit();
    ++loaded_;
  }

  /// Puts the factors of the keys that were last begun where all warps find them after their next meeting.
  __device__ __forceinline__ void put_scales() {
    if constexpr (Traits::kFloat8) {
      if (!has_scales_) return;
      auto& scales = shared_.scales[scaled_ % Traits::kSteps];
      scales.k[own_key()] = k_scale_;
      scales.v[own_key()] = v_scale_;
      has_scales_ = false;
    }
  }

  /// The n-th step; one of those that are loading.
  __device__ __forceinline__ const KeyStep& step(uint32_t n) const {
    return shared_.steps[warp_][min(n, found_) % Traits::kSteps];
  }

 private:
  /// Finds a step, and the place of the lane's key, one of the warp's. The table's entry is left unchecked, so that
  /// nothing waits for it here.
  __device__ __forceinline__ void find_step() {
    KeyStep& step = shared_.steps[warp_][found_ % Traits::kSteps];
    if (ptx::is_leader()) step = shared_.walks[warp_].next(p_);
    __syncwarp();
    next_entry_ = -1;
    const int32_t key = step.first_key + own_key();
    if (step.is_end || key >= step.keys) return;
    const int32_t page = step.table ? p_.key_page(key) : 0;
    const int64_t stride = p_.call.page_table.defined() ? p_.call.page_table.stride[1] : p_.call.page_indices.stride[0];
    next_entry_ = step.table ? __ldg(step.table + page * stride) : step.request;
    next_row_ = key - page * p_.page_size;
  }

  /// The lane's key of a step.
  __device__ __forceinline__ int32_t own_key() const {
    return Traits::kLoadedKeys * warp_ + static_cast<int32_t>(ptx::lane()) % Traits::kLoadedKeys;
  }
  __device__ __forceinline__ bool is_there() const {
    return static_cast<uint32_t>(entry_) < static_cast<uint32_t>(p_.pages);
  }
  /// Begins to load the factors of a step's keys. A value that is not there has none.
  __device__ __forceinline__ void load_scales(const KeyStep& step) {
    scaled_ = loaded_;
    has_scales_ = true;
    k_scale_ = is_there() ? scale_of(p_.k_scale, step.kv_head) : 1.f;
    v_scale_ = is_there() ? scale_of(p_.v_scale, step.kv_head) : 0.f;
  }
  __device__ __forceinline__ float scale_of(const cuda::CacheScale& scale, int32_t head) const {
    return scale.data ? __ldg(scale.data + offset_of(scale.page_stride, scale.row_stride, scale.head_stride, head))
                      : 1.f;
  }
  /// The offset of the lane's key in elements. Those of a page fit 32 bits (see page_refusal).
  __device__ __forceinline__ uint64_t offset_of(int64_t page_stride, int64_t row_stride, int64_t head_stride,
                                                int32_t head) const {
    const uint32_t in_page = static_cast<uint32_t>(row_) * static_cast<uint32_t>(row_stride) +
                             static_cast<uint32_t>(head) * static_cast<uint32_t>(head_stride);
    return static_cast<uint32_t>(entry_) * static_cast<uint64_t>(page_stride) + in_page;
  }

  /// Copies the warp's rows of an item. Keys and columns that are not there become zeros.
  template <typename Tile>
  __device__ __forceinline__ void copy(uint32_t item, const KeyStep& step, const cuda::CallRows& rows,
                                       int32_t columns) const {
    const uint64_t offset = offset_of(rows.batch_stride, rows.row_stride, rows.head_stride, step.kv_head),
                   address =
                       is_there() ? reinterpret_cast<uint64_t>(static_cast<const Stored*>(rows.data) + offset) : 0;
    unsigned char* const tile = shared_.slots[item % Traits::kSlots];
    if (p_.keys_aligned) {
      copy_rows<Tile, true>(tile, address, columns);
    } else {
      copy_rows<Tile, false>(tile, address, columns);
    }
  }
  /// Each lane has the address of a row, and as many copy a block's part of it as that has chunks of 16 bytes.
  template <typename Tile, bool kAligned>
  __device__ __forceinline__ void copy_rows(unsigned char* tile, uint64_t address, int32_t columns) const {
    constexpr uint32_t kChunks = Tile::kChunksOfRow, kRowsAtOnce = 32 / kChunks;
    constexpr int32_t kElements = 16 / sizeof(Stored);
    [[maybe_unused]] constexpr int kUnroll = kAligned ? Traits::kLoadedKeys / kRowsAtOnce : 1;
    const uint32_t lane = ptx::reload_lane(), chunk = lane % kChunks, own_row = lane / kChunks;
    const uint32_t there = __ballot_sync(0xffffffff, address != 0) >> own_row;
    const uint32_t first_place = Tile::place(Traits::kLoadedKeys * static_cast<uint32_t>(warp_) + own_row, chunk);
#pragma unroll kUnroll
    for (uint32_t first = 0; first < Traits::kLoadedKeys; first += kRowsAtOnce) {
      const uint64_t row = __shfl_sync(0xffffffff, address, static_cast<int>(first + own_row));
      const auto* const from = reinterpret_cast<const Stored*>(row) + kElements * static_cast<int32_t>(chunk);
      // Rows that are apart by kRowsAtOnce, a power of two, are permuted by what the two permutations have together.
      unsigned char* const to = tile + ((first_place + first * Tile::kRowBytes) ^ Tile::permutation(first) << 4);
#pragma unroll
      for (int32_t block = 0; block < Tile::kColumns / Tile::kBlockColumns; ++block) {
        const int32_t of_block = kElements * static_cast<int32_t>(kChunks) * block,
                      column = of_block + kElements * static_cast<int32_t>(chunk);
        cuda::RowCopy{kAligned}.copy_chunk(to + block * Tile::kBlockBytes, from + of_block,
                                           (there >> first & 1) != 0 && column < columns, columns - column);
      }
    }
  }

  const cuda::CachedParams& p_;
  Shared& shared_;
  const int warp_;
  /// Pages and rows there of the lane's keys: the loaded step's, and the next one's.
  int32_t entry_ = -1, row_ = 0, next_entry_ = -1, next_row_ = 0;
  uint32_t loaded_ = 0, found_ = 0;  ///< the step that is loaded, and the last one that has been looked up
  float k_scale_ = 1, v_scale_ = 0;  ///< factors of the lane's key of step scaled_
  uint32_t scaled_ = 0;
  bool has_scales_ = false;
};

}  // namespace flashmask::sm80
