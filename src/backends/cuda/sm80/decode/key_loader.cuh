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
  using Stored = typename Traits::Stored;
  __device__ __forceinline__ KeyLoader(const cuda::CachedParams& p, Shared& shared, int warp)
      : p_(p), shared_(shared), warp_(warp) {}

  /// Fills all slots but one.
  __device__ __forceinline__ void start() {
    if (ptx::is_leader()) shared_.walks[warp_].begin();
    find_step();
#pragma unroll 1
    for (int n = 0; n < Traits::kSlots - 1; ++n) {
      if (n > 0 && n % 2 == 0) put_scales();
      load();
    }
  }

  /// Loads the next item into the next slot, which nobody reads any more.
  __device__ __forceinline__ void load() {
    unsigned char* const to = shared_.slots[item_ % Traits::kSlots];
    if (item_ % 2 == 0) {
      entry_ = next_entry_;
      row_ = next_row_;
      if (const KeyStep& loaded = step(item_ / 2); !loaded.is_end) {
        if constexpr (Traits::kFloat8) load_scales(loaded);
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

  /// Puts the factors of the keys that were last begun where all warps find them after their next meeting.
  __device__ __forceinline__ void put_scales() {
    if constexpr (Traits::kFloat8) {
      auto& scales = shared_.scales[scaled_ % Traits::kSteps];
      scales.k[own_key()] = k_scale_;
      scales.v[own_key()] = v_scale_;
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
    scaled_ = item_ / 2;
    k_scale_ = is_there() ? p_.k_scale.at(entry_, row_, step.kv_head) : 1.f;
    v_scale_ = is_there() ? p_.v_scale.at(entry_, row_, step.kv_head) : 0.f;
  }

  /// Copies the warp's rows of an item. Keys and columns that are not there become zeros.
  template <typename Tile>
  __device__ __forceinline__ void copy(unsigned char* tile, const KeyStep& step, const cuda::CallRows& rows,
                                       int32_t columns) const {
    const uint64_t address =
        is_there() ? reinterpret_cast<uint64_t>(rows.template at<Stored>(entry_, row_, step.kv_head)) : 0;
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
    const uint32_t lane = ptx::reload_lane(), chunk = lane % kChunks;
#pragma unroll kUnroll
    for (uint32_t first = 0; first < Traits::kLoadedKeys; first += kRowsAtOnce) {
      const uint32_t key = first + lane / kChunks, row = Traits::kLoadedKeys * static_cast<uint32_t>(warp_) + key;
      const auto* const from = reinterpret_cast<const Stored*>(__shfl_sync(0xffffffff, address, static_cast<int>(key)));
      unsigned char* const to = tile + Tile::place(row, chunk);
#pragma unroll
      for (int32_t block = 0; block < Tile::kColumns / Tile::kBlockColumns; ++block) {
        const int32_t column = kElements * (static_cast<int32_t>(kChunks) * block + static_cast<int32_t>(chunk));
        copy_chunk<kAligned>(to + block * Tile::kBlockBytes, from + column, from ? columns - column : 0);
      }
    }
  }
  /// Copies at most `columns` elements of a chunk. Aligned ones have all of them or none.
  template <bool kAligned>
  __device__ __forceinline__ static void copy_chunk(unsigned char* to, const Stored* from, int32_t columns) {
    if constexpr (Traits::kFloat8 && !kAligned) {
      uint32_t words[4] = {};
#pragma unroll
      for (int n = 0; n < 16; ++n)
        if (n < columns) words[n / 4] |= uint32_t{__ldg(from + n)} << 8 * (n % 4);
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      cuda::RowCopy{kAligned}.copy_chunk(to, from, columns > 0);
    }
  }

  const cuda::CachedParams& p_;
  Shared& shared_;
  const int warp_;
  /// Pages and rows there of the lane's keys: the loaded step's, and the next one's.
  int32_t entry_ = -1, row_ = 0, next_entry_ = -1, next_row_ = 0;
  uint32_t item_ = 0, found_ = 0;    ///< found_: the last step that has been looked up
  float k_scale_ = 1, v_scale_ = 0;  ///< factors of the lane's key of step scaled_
  uint32_t scaled_ = 0;
};

}  // namespace flashmask::sm80
