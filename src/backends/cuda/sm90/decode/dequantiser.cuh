// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/fragments/float8.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/decode/traits.cuh"

namespace flashmask::sm90 {

/// Makes f16 of the e4m3 keys, or values, that a producer warp has copied: part after part of a tile, from the ring of
/// copies to where products read them. The warp that copies converts, so that a copy's slot is free without a barrier
/// once its part has been converted.
template <typename Traits>
class Dequantiser {
 public:
  using Shared = DecodeShared<Traits>;
  using Product = typename Traits::Product;
  __device__ __forceinline__ Dequantiser(Shared& shared, bool of_keys)
      : copies_(of_keys ? shared.float8.k[0] : shared.float8.v[0]),
        copied_(of_keys ? shared.float8.k_copied : shared.float8.v_copied),
        tiles_(of_keys ? shared.k[0] : shared.v[0]),
        full_(of_keys ? shared.k_full : shared.v_full),
        empty_(of_keys ? shared.k_empty : shared.v_empty) {}

  /// Converts until at most `most` of the parts that copies have begun for are left.
  __device__ __forceinline__ void leave(uint32_t begun, uint32_t most) {
#pragma unroll 1
    while (begun - parts_.count > most) convert_next();
  }

 private:
  using Swizzle = ptx::Swizzle128;
  static constexpr int kParts = Traits::kCopyParts;
  /// Steps through a part's block of 64 columns, of 8 rows each.
  static constexpr int kSteps = Traits::kCopiedKeys / 8;

  __device__ __forceinline__ void convert_next() {
    const ptx::RingPosition<Traits::kSlots> tile{parts_.count / kParts};
    const uint32_t part = parts_.count % kParts, slot = parts_.stage();
    if (part == 0) ptx::wait(empty_[tile.stage()], tile.phase() ^ 1);
    ptx::wait(copied_[slot], parts_.phase());
    delay<Role::kProducer>();
    Product* const to = tiles_ + tile.stage() * Traits::kTileElements + part * Traits::kCopiedKeys * Swizzle::kColumns;
    convert(copies_ + slot * Traits::kKeyCopyBytes, reinterpret_cast<unsigned char*>(to));
    __syncwarp();  // all lanes have read the copy, whose slot the next one takes
    parts_.advance();
    if (part + 1 < kParts) return;
    ptx::fence_async_proxy();
    ptx::arrive(full_[tile.stage()]);
  }
  /// A lane makes two chunks of f16 of one of e4m3. Eight neighbouring lanes have two rows, so that neither the copy's
  /// chunks nor the tile's meet a bank twice.
  __device__ __forceinline__ void convert(const unsigned char* from, unsigned char* to) const {
    const uint32_t lane = ptx::lane(), row = lane / 4, chunk = 2 * (lane % 4);
    unsigned char* const own_row = to + row * Swizzle::kRow;
    unsigned char* const first = own_row + Swizzle::chunk(row, chunk);
    unsigned char* const second = own_row + Swizzle::chunk(row, chunk + 1);
#pragma unroll
    for (int block = 0; block < Traits::kQkBlocks; ++block) {
      const auto* const chunks = reinterpret_cast<const uint4*>(from) + 32 * kSteps * block + lane;
      uint4 bytes[kSteps];  // are under way at once
#pragma unroll
      for (int step = 0; step < kSteps; ++step) bytes[step] = chunks[32 * step];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t place = block * Swizzle::block(Traits::kSlotKeys) + step * Swizzle::kPattern;
        store(first + place, bytes[step].x, bytes[step].y);
        store(second + place, bytes[step].z, bytes[step].w);
      }
    }
  }
  __device__ __forceinline__ static void store(unsigned char* chunk, uint32_t low, uint32_t high) {
    const cuda::HalfPairs a = cuda::e4m3_neighbours(low), b = cuda::e4m3_neighbours(high);
    *reinterpret_cast<uint4*>(chunk) = make_uint4(a.first, a.second, b.first, b.second);
  }

  const unsigned char* const copies_;
  uint64_t* const copied_;
  Product* const tiles_;
  uint64_t *const full_, *const empty_;
  ptx::RingPosition<Traits::kCopySlots> parts_;  ///< the next to be converted
};

/// In its place where a cache holds numbers of the products' type.
template <typename Traits>
struct NoDequantiser {
  __device__ __forceinline__ NoDequantiser(DecodeShared<Traits>&, bool) {}
  __device__ __forceinline__ static void leave(uint32_t, uint32_t) {}
};

}  // namespace flashmask::sm90
