// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/cache/packed_rows.cuh"
#include "backends/cuda/cache/row_copy.cuh"
#include "backends/cuda/fragments/float8.cuh"
#include "backends/cuda/fragments/float8_units.cuh"
#include "backends/cuda/sm80/decode/cache_operands.cuh"
#include "backends/cuda/sm80/decode/traits.cuh"

namespace flashmask::sm80 {

/// Copies a unit's packed rows to where products read them, by all warps of a CTA.
template <typename Traits>
class QueryLoader {
 public:
  using Shared = DecodeShared<Traits>;
  using Element = typename Traits::Element;
  using Product = typename Traits::Product;
  using QTile = typename Traits::QTile;
  __device__ __forceinline__ QueryLoader(const cuda::CachedParams& p, Shared& shared, int warp)
      : p_(p), shared_(shared), warp_(warp) {}

  /// Copies the unit's packed rows. The rest of the last 16, and columns that are not there, are zeros.
  __device__ __forceinline__ void load(const cuda::UnitPart& work) const {
    constexpr int kChunks = Traits::kQkDim / cuda::RowCopy::kElements;
    const int32_t rows = (work.count() + cuda::Slab::kRows - 1) / cuda::Slab::kRows * cuda::Slab::kRows;
    if constexpr (Traits::kFloat8) {
      for (int32_t packed = warp_; packed < rows; packed += Traits::kWarps) load_scaled_query(work, packed);
    } else {
#pragma unroll 1
      for (auto n = static_cast<int32_t>(threadIdx.x); n < rows * kChunks; n += Traits::kThreads)
        *query_chunk(n / kChunks, n % kChunks) = read_query(work, n / kChunks, n % kChunks);
    }
  }

 private:
  __device__ __forceinline__ uint4* query_chunk(int32_t packed, int32_t chunk) const {
    const uint32_t place = QTile::place(static_cast<uint32_t>(packed), static_cast<uint32_t>(chunk) % 8);
    return reinterpret_cast<uint4*>(shared_.rows.q + chunk / 8 * QTile::kBlockBytes + place);
  }
  /// Eight columns of a packed row.
  __device__ __forceinline__ uint4 read_query(const cuda::UnitPart& work, int32_t packed, int32_t chunk) const {
    const int32_t heads = work.tile.head_count, column = cuda::RowCopy::kElements * chunk;
    if (packed >= work.count() || column >= p_.head_dim) return {};
    const cuda::RowPlace place(p_, work, packed / heads);
    const auto* const from = p_.q.at<const Element>(place.batch, place.row, cuda::query_head(p_, work, packed % heads));
    if (p_.rows_aligned) return __ldg(reinterpret_cast<const uint4*>(from + column));
    uint4 elements;
    cuda::RowCopy{false}.copy_chunk(&elements, from + column, true);
    return elements;
  }
  /// Copies a row for products with e4m3, by a warp, whose lanes have eight columns each: in f16, in its unit.
  __device__ __forceinline__ void load_scaled_query(const cuda::UnitPart& work, int32_t packed) const {
    const auto lane = static_cast<int32_t>(ptx::lane());
    const uint4 elements = lane < Traits::kQkDim / 8 ? read_query(work, packed, lane) : uint4{};
    const uint32_t words[4] = {elements.x, elements.y, elements.z, elements.w};
    float x[8];
    uint32_t largest = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const auto bits = static_cast<uint16_t>(words[n / 2] >> 16 * (n % 2));
      x[n] = static_cast<float>(reinterpret_cast<const Element&>(bits));
      largest = max(largest, __float_as_uint(x[n]) & 0x7fffffff);
    }
    const auto unit = cuda::QueryUnit::of(__reduce_max_sync(0xffffffff, largest));
    if (lane == 0) shared_.rows.q_unit[packed] = unit.inverse * cuda::kE4m3Unit;
    if (lane >= Traits::kQkDim / 8) return;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint32_t pair = place_in_sixteen(static_cast<uint32_t>(lane) % 2 * 4 + n);
      auto* const chunk =
          reinterpret_cast<uint32_t*>(query_chunk(packed, lane / 2 * 2 + static_cast<int32_t>(pair) / 4));
      chunk[pair % 4] = ptx::pack<Product>(x[2 * n] * unit.factor, x[2 * n + 1] * unit.factor);
    }
  }

  const cuda::CachedParams& p_;
  Shared& shared_;
  const int warp_;
};

}  // namespace flashmask::sm80
