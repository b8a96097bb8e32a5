// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/decode/arrivals.cuh"
#include "backends/cuda/sm90/decode/traits.cuh"

namespace flashmask::sm90 {

/// Brings the factors of e4m3 keys and values that differ by key, tile after tile.
template <typename Traits>
class FactorLoader {
 public:
  using Shared = DecodeShared<Traits>;
  __device__ __forceinline__ FactorLoader(const DecodeParams& p, Shared& shared) : p_(p), shared_(shared) {}

  /// Loads the factors of a unit's tiles.
  __device__ __forceinline__ void load(const Work& work) {
    if (!p_.has_factors_by_key()) return;
    const SequenceView sequence = p_.sequence_of(work.tile);
#pragma unroll 1
    for (int32_t n = 0; n < work.tiles; ++n, ++tile_) {
      const ptx::RingPosition<Traits::kTiles> announced{tile_};
      ptx::wait(shared_.tile_full[announced.stage()], announced.phase());
      const int32_t first = shared_.tiles[announced.stage()].first_key();
      arrive_warp(shared_.tile_empty[announced.stage()]);
      load_tile(sequence, first, work.kv_head);
    }
  }

 private:
  static constexpr int kLaneKeys = cuda::kBlockKeys / 32;

  /// Values that are not there have none.
  __device__ __forceinline__ void load_tile(const SequenceView& sequence, int32_t first, int32_t head) const {
    const ptx::RingPosition<Float8Shared<Traits>::kFactors> at{tile_};
    const auto lane = static_cast<int32_t>(ptx::lane());
    int32_t page[kLaneKeys] = {}, entry[kLaneKeys] = {};
    float k[kLaneKeys], v[kLaneKeys];  // loads are under way at once
    if (p_.call.has_tables()) {
#pragma unroll
      for (int n = 0; n < kLaneKeys; ++n) {
        const int32_t key = first + lane + 32 * n;
        page[n] = p_.key_page(key);
        entry[n] = key < sequence.keys() ? sequence.table_entry(page[n]) : -1;
      }
    }
#pragma unroll
    for (int n = 0; n < kLaneKeys; ++n) {
      const int32_t key = first + lane + 32 * n;
      const KeyPlace place = sequence.place(key, page[n], entry[n]);
      const bool is_there = key < sequence.keys() && place.page >= 0;
      k[n] = is_there ? p_.k_scale.at(place.page, place.slot, head) : 1.f;
      v[n] = is_there ? p_.v_scale.at(place.page, place.slot, head) : 0.f;
    }
    ptx::wait(shared_.float8.factors_empty[at.stage()], at.phase() ^ 1);
    delay<Role::kProducer>();
    TileFactors& to = shared_.float8.factors[at.stage()];
#pragma unroll
    for (int n = 0; n < kLaneKeys; ++n) {
      to.k[lane + 32 * n] = k[n];
      to.v[lane + 32 * n] = v[n];
    }
    ptx::arrive(shared_.float8.factors_full[at.stage()]);
  }

  const DecodeParams& p_;
  Shared& shared_;
  uint32_t tile_ = 0;  ///< the next, counted through
};

/// In its place where a cache has no factors.
template <typename Traits>
struct NoFactorLoader {
  __device__ __forceinline__ NoFactorLoader(const DecodeParams&, DecodeShared<Traits>&) {}
  __device__ __forceinline__ static void load(const Work&) {}
};

}  // namespace flashmask::sm90
