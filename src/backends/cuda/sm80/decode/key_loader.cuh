// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/cache/row_copy.cuh"
#include "backends/cuda/ptx/load_if.cuh"
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
      : p_(p),
        shared_(shared),
        warp_(warp),
        rows_(find_rows()),
        scales_by_key_(Traits::kFloat8 && p.has_factors_by_key()) {}

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
    // Copies these here: moved behind the load of the next entry, the copies would wait for it.
    entry_ = ptx::opaque(next_entry_);
    row_ = ptx::opaque(next_row_);
    if (const KeyStep& loaded = step(loaded_); !loaded.is_end) {
      if constexpr (Traits::kFloat8) {
        if (scales_by_key_) load_scales(loaded.kv_head);
      }
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

  /// Puts a unit's factors where all warps find them after their next meeting, for all steps, if its keys have one.
  __device__ __forceinline__ void put_unit_scales(const cuda::UnitPart& work) {
    if (scales_by_key_) return;
    const float2 factors = p_.factors_of(work.tile.keys, work.kv_head);
    for (auto i = static_cast<int>(threadIdx.x); i < Traits::kSteps * Traits::kKeys; i += Traits::kThreads) {
      auto& scales = shared_.scales[i / Traits::kKeys];
      scales.k[i % Traits::kKeys] = factors.x;
      scales.v[i % Traits::kKeys] = factors.y;
    }
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
    if (ptx::is_leader()) step = shared_.walks[warp_].next(p_, shared_.steps[warp_][(found_ - 1) % Traits::kSteps]);
    __syncwarp();
    const int32_t key = step.first_key + own_key();
    const bool is_there = !step.is_end && key < step.keys;
    const int32_t page = step.table ? p_.key_page(key) : 0;
    const int64_t stride = p_.call.page_table.defined() ? p_.call.page_table.stride[1] : p_.call.page_indices.stride[0];
    next_entry_ = is_there ? step.request : -1;
    ptx::load_if(is_there && step.table, step.table + page * stride, next_entry_);
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
  __device__ __forceinline__ void load_scales(int32_t kv_head) {
    scaled_ = loaded_;
    has_scales_ = true;
    k_scale_ = 1;
    v_scale_ = is_there() && !p_.v_scale.data ? 1.f : 0.f;
    load_scale(p_.k_scale, kv_head, k_scale_);
    load_scale(p_.v_scale, kv_head, v_scale_);
  }
  __device__ __forceinline__ void load_scale(const cuda::CacheScale& scale, int32_t kv_head, float& to) const {
    ptx::load_if(is_there() && scale.data,
                 scale.data + offset_of(scale.page_stride, scale.row_stride, scale.head_stride, kv_head), to);
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
    if (rows_ == Rows::kInRuns && __all_sync(0xffffffff, address != 0)) {
      copy_runs<Tile>(tile, address, rows.row_stride);
    } else if (rows_ == Rows::kUnaligned) {
      copy_rows<Tile, false>(tile, address, columns);
    } else {
      copy_rows<Tile, true>(tile, address, columns);
    }
  }
  /// How rows lie.
  enum class Rows : uint8_t {
    kUnaligned,
    kAligned,  ///< to 16 bytes
    kInRuns    ///< aligned, as long as a tile's, and equally far apart in runs of kRunKeys
  };
  static constexpr uint32_t kRunKeys = 16;
  static_assert(Traits::kLoadedKeys % kRunKeys == 0);
  __device__ __forceinline__ Rows find_rows() const {
    if (!p_.keys_aligned) return Rows::kUnaligned;
    const bool are_whole = p_.head_dim == Traits::kQkDim && p_.head_dim_v == Traits::kVDim,
               in_runs = !p_.call.has_tables() || p_.page_size % kRunKeys == 0;
    return are_whole && in_runs ? Rows::kInRuns : Rows::kAligned;
  }

  /// How the lanes of a warp divide its rows of a tile: kRowsAtOnce at a time, each a chunk of 16 bytes of a block.
  template <typename Tile>
  struct Lanes {
    static constexpr uint32_t kChunks = Tile::kChunksOfRow, kRowsAtOnce = 32 / kChunks;
    static constexpr int kBlocks = Tile::kColumns / Tile::kBlockColumns, kPasses = Traits::kLoadedKeys / kRowsAtOnce;
    uint32_t chunk, row, first_place;
    __device__ __forceinline__ explicit Lanes(int warp)
        : chunk(ptx::reload_lane() % kChunks),
          row(ptx::reload_lane() / kChunks),
          first_place(Tile::place(Traits::kLoadedKeys * static_cast<uint32_t>(warp) + row, chunk)) {}
    /// The lane's place for its row behind `first`. Rows that are apart by kRowsAtOnce, a power of two, differ by
    /// the exclusive or of two permutations.
    __device__ __forceinline__ uint32_t place(uint32_t first, int block) const {
      return (first_place ^ Tile::permutation(first) << 4) + first * Tile::kRowBytes + block * Tile::kBlockBytes;
    }
  };

  /// Copies rows that are all there, whole and in runs. A lane has the address of a row.
  template <typename Tile>
  __device__ __forceinline__ void copy_runs(unsigned char* tile, uint64_t address, int64_t row_stride) const {
    const Lanes<Tile> lanes(warp_);
    const uint64_t row_bytes = static_cast<uint64_t>(row_stride) * sizeof(Stored),
                   own = lanes.row * row_bytes + 16 * lanes.chunk;
    uint64_t from = 0;
#pragma unroll
    for (uint32_t first = 0; first < Traits::kLoadedKeys; first += lanes.kRowsAtOnce) {
      if (first % kRunKeys == 0) {
        from = __shfl_sync(0xffffffff, address, static_cast<int>(first)) + own;
      } else {
        from += lanes.kRowsAtOnce * row_bytes;
      }
#pragma unroll
      for (int block = 0; block < lanes.kBlocks; ++block)
        cuda::RowCopy{true}.copy_chunk(tile + lanes.place(first, block),
                                       reinterpret_cast<const Stored*>(from + 16 * lanes.kChunks * block), true);
    }
  }
  /// Copies rows of `columns` elements wherever they lie. A lane has the address of a row; 0: it is not there.
  template <typename Tile, bool kAligned>
  __device__ __forceinline__ void copy_rows(unsigned char* tile, uint64_t address, int32_t columns) const {
    const Lanes<Tile> lanes(warp_);
    constexpr int32_t kElements = 16 / sizeof(Stored);
    [[maybe_unused]] constexpr int kUnroll = kAligned ? lanes.kPasses : 1;
    const uint32_t there = __ballot_sync(0xffffffff, address != 0) >> lanes.row;
#pragma unroll kUnroll
    for (uint32_t first = 0; first < Traits::kLoadedKeys; first += lanes.kRowsAtOnce) {
      const uint64_t from = __shfl_sync(0xffffffff, address, static_cast<int>(first + lanes.row)) + 16 * lanes.chunk;
#pragma unroll
      for (int block = 0; block < lanes.kBlocks; ++block) {
        const int32_t column = kElements * static_cast<int32_t>(lanes.kChunks * block + lanes.chunk);
        cuda::RowCopy{kAligned}.copy_chunk(tile + lanes.place(first, block),
                                           reinterpret_cast<const Stored*>(from + 16 * lanes.kChunks * block),
                                           (there >> first & 1) != 0 && column < columns, columns - column);
      }
    }
  }

  const cuda::CachedParams& p_;
  Shared& shared_;
  const int warp_;
  const Rows rows_;
  const bool scales_by_key_;
  /// Pages and rows there of the lane's keys: the loaded step's, and the next one's.
  int32_t entry_ = -1, row_ = 0, next_entry_ = -1, next_row_ = 0;
  uint32_t loaded_ = 0, found_ = 0;  ///< the step that is loaded, and the last one that has been looked up
  float k_scale_ = 1, v_scale_ = 0;  ///< factors of the lane's key of step scaled_
  uint32_t scaled_ = 0;
  bool has_scales_ = false;
};

}  // namespace flashmask::sm80
