// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/row_copy.cuh"
#include "backends/cuda/sm80/decode/traits.cuh"

namespace flashmask::sm80 {

/// Loads the keys and values of a CTA's shares ahead of their use, from unit to unit: items of 64 keys, or values, by
/// turns, an item a slot and a group of copies. Each warp loads 16 rows of them, wherever they lie.
template <typename Traits>
class KeyLoader {
 public:
  using Shared = DecodeShared<Traits>;
  using Element = typename Traits::Element;
  __device__ __forceinline__ KeyLoader(const cuda::CachedParams& p, Shared& shared, int warp)
      : p_(p), shared_(shared), warp_(warp) {}

  /// Fills all slots but one.
  __device__ __forceinline__ void start() {
    if (ptx::is_leader()) shared_.walks[warp_].begin();
    find_step();
#pragma unroll 1
    for (int n = 0; n < Traits::kSlots - 1; ++n) load();
  }

  /// Loads the next item into the next slot, which nobody reads any more.
  __device__ __forceinline__ void load() {
    unsigned char* const to = shared_.slots[item_ % Traits::kSlots];
    if (item_ % 2 == 0) {
      entry_ = next_entry_;
      row_ = next_row_;
      if (const KeyStep& loaded = step(item_ / 2); !loaded.is_end) {
        copy<typename Traits::KTile>(to, loaded, p_.k_rows, p_.head_dim);
        ++found_;
        find_step();
      }
    } else if (const KeyStep& loaded = step(item_ / 2); !loaded.is_end) {
      copy<typename Traits::VTile>(to, loaded, p_.v_rows, p_.head_dim_v);
    }
    ptx::cp_async_commit();
    ++item_;
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
    const int32_t key =
        step.first_key + Traits::kLoadedKeys * warp_ + static_cast<int32_t>(ptx::lane()) % Traits::kLoadedKeys;
    if (step.is_end || key >= step.keys) return;
    const int32_t page = step.table ? p_.key_page(key) : 0;
    const int64_t stride = p_.call.page_table.defined() ? p_.call.page_table.stride[1] : p_.call.page_indices.stride[0];
    next_entry_ = step.table ? __ldg(step.table + page * stride) : step.request;
    next_row_ = key - page * p_.page_size;
  }

  /// Copies the warp's rows of an item. Keys and columns that are not there become zeros.
  template <typename Tile>
  __device__ __forceinline__ void copy(unsigned char* tile, const KeyStep& step, const cuda::CallRows& rows,
                                       int32_t columns) const {
    const bool is_there = static_cast<uint32_t>(entry_) < static_cast<uint32_t>(p_.pages);
    const uint64_t address =
        is_there ? reinterpret_cast<uint64_t>(rows.template at<Element>(entry_, row_, step.kv_head)) : 0;
    if (p_.keys_aligned) {
      copy_rows<Tile, true>(tile, address, columns);
    } else {
      copy_rows<Tile, false>(tile, address, columns);
    }
  }
  /// Each lane has the address of a row, and eight copy 64 columns of it.
  template <typename Tile, bool kAligned>
  __device__ __forceinline__ void copy_rows(unsigned char* tile, uint64_t address, int32_t columns) const {
    constexpr int kRowsAtOnce = 4;
    [[maybe_unused]] constexpr int kUnroll = kAligned ? Traits::kLoadedKeys / kRowsAtOnce : 1;
    const uint32_t lane = ptx::reload_lane(), chunk = lane % 8;
#pragma unroll kUnroll
    for (uint32_t first = 0; first < Traits::kLoadedKeys; first += kRowsAtOnce) {
      const uint32_t key = first + lane / 8, row = Traits::kLoadedKeys * static_cast<uint32_t>(warp_) + key;
      const auto* const from =
          reinterpret_cast<const Element*>(__shfl_sync(0xffffffff, address, static_cast<int>(key)));
      unsigned char* const to = tile + Tile::place(row, chunk);
#pragma unroll
      for (int32_t block = 0; block < Tile::kColumns / Tile::kBlockColumns; ++block) {
        const int32_t column = Tile::kBlockColumns * block + cuda::RowCopy::kElements * static_cast<int32_t>(chunk);
        cuda::RowCopy{kAligned}.copy_chunk(to + block * Tile::kBlockBytes, from + column, from && column < columns);
      }
    }
  }

  const cuda::CachedParams& p_;
  Shared& shared_;
  const int warp_;
  /// Pages and rows there of the lane's keys: the loaded step's, and the next one's.
  int32_t entry_ = -1, row_ = 0, next_entry_ = -1, next_row_ = 0;
  uint32_t item_ = 0, found_ = 0;  ///< found_: the last step that has been looked up
};

}  // namespace flashmask::sm80
