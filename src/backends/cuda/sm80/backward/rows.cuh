// SPDX-License-Identifier: Apache-2.0
#pragma once

// Kernels before and after the one over the key tiles, with a block for each row tile.

#include <cstdint>

#include "backends/cuda/device/plan_bits.cuh"
#include "backends/cuda/device/row_products.cuh"
#include "backends/cuda/fragments/fixed_point.cuh"
#include "backends/cuda/sm80/backward/params.h"
#include "backends/cuda/sm80/backward/row_scales.cuh"
#include "backends/cuda/sm80/backward/store_tile.cuh"
#include "backends/cuda/sm80/backward/traits.cuh"

namespace flashmask::sm80::bwd {

/// The block's row tile; neighbouring blocks have neighbouring heads, whose rows are mostly adjacent in memory.
struct RowTilePlace {
  uint32_t batch, head;
  int32_t tile;
  int64_t index;  ///< in [batch, heads_q, row_tiles]

  __device__ explicit RowTilePlace(const RowParams& p)
      : batch(blockIdx.x / p.heads / p.row_tiles),
        head(blockIdx.x % p.heads),
        tile(static_cast<int32_t>(blockIdx.x / p.heads % p.row_tiles)),
        index((static_cast<int64_t>(batch) * p.heads + head) * p.row_tiles + tile) {}

  /// Row `row` of a tensor.
  template <typename T>
  __device__ T* row_of(const cuda::TensorRows& tensor, int32_t row) const {
    return tensor.template of_head<T>(batch, head) + row * tensor.row_stride;
  }
};

/// True if key tiles contribute to the block's part of dq. All lanes of a warp call it.
template <typename Traits>
__device__ __forceinline__ bool has_parts(const RowParams& p, const RowTilePlace& place) {
  if (p.dense || p.key_blocks == 0) return p.key_blocks != 0;
  return cuda::live_key_tiles<Traits::kGranules>(p.plan, cuda::mask_index(p.plan, place.batch, place.head),
                                                 place.tile / Traits::kTilesOfGranule, p.key_blocks) != 0;
}

/// A row's dout . out, and, in fixed point, |dout|; 0 past the last row that sees a key.
struct RowProducts {
  float dout_out, dout_norm;
};

/// Computes the products of the block's tile, which all threads may read after a barrier.
template <typename Traits>
__device__ __forceinline__ void multiply_rows(const RowParams& p, const RowTilePlace& place,
                                              RowProducts (&products)[Traits::kRows]) {
  using Share = cuda::RowShare<Traits::kRows, Traits::kVDim>;
  using Element = typename Traits::Element;
  const int32_t row_end = p.extents.rows(place.batch, p.seqlen_q);
#pragma unroll 2
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    const int32_t row = place.tile * Traits::kRows + Share::row(pass);
    float product = 0;
    cuda::Magnitude magnitude;
    if (row < row_end && Share::column() < p.out.columns) {
      const auto dout = cuda::Eight<Element>::load(place.row_of<Element>(p.dout, row) + Share::column());
      product = p.float_rows
                    ? cuda::dot(cuda::Eight<float>::load(place.row_of<float>(p.out, row) + Share::column()), dout)
                    : cuda::dot(cuda::Eight<Element>::load(place.row_of<Element>(p.out, row) + Share::column()), dout);
      if (p.dq_sums.fixed_point) magnitude.add(dout);
    }
#pragma unroll
    for (int distance = Share::kThreadsPerRow / 2; distance > 0; distance /= 2)
      product += __shfl_xor_sync(0xffffffff, product, distance);
    if (p.dq_sums.fixed_point) magnitude.join(Share::kThreadsPerRow);
    if (Share::column() == 0) products[Share::row(pass)] = {product, magnitude.norm()};
  }
}

/// The terms of a row whose dout . out is `product`.
__device__ __forceinline__ RowTerms make_row_terms(const RowParams& p, const RowTilePlace& place, int32_t row,
                                                   float product) {
  constexpr float kLog2E = 1.44269504f;
  const float lse = row < p.seqlen_q ? *place.row_of<float>(p.lse, row) : -INFINITY;
  if (lse == -INFINITY) return {-INFINITY, 0};
  const float dlse = p.dlse.data ? *place.row_of<float>(p.dlse, row) : 0;
  return {-lse * kLog2E, dlse - product};
}

/// Writes the tile's rows' terms and, in fixed point, their scales, 0 where a row sees nothing.
template <typename Traits>
__device__ __forceinline__ void write_terms(const RowParams& p, const RowTilePlace& place,
                                            const RowProducts (&products)[Traits::kRows]) {
  cuda::KeyMagnitudes keys{};
  if (p.dq_sums.fixed_point) keys = cuda::head_magnitudes(p.scales, place.batch, place.head);
  const auto own = static_cast<int32_t>(threadIdx.x);
  if (own >= Traits::kRows) return;
  const RowProducts& of_row = products[own];
  const RowTerms terms = make_row_terms(p, place, place.tile * Traits::kRows + own, of_row.dout_out);
  const int64_t row = place.index * Traits::kRows + own;
  p.terms[row] = terms;
  if (p.dq_sums.fixed_point)
    p.dq_sums.scales[row] =
        terms.minus_lse == -INFINITY ? 0 : cuda::dq_row_scale(p.scales, keys, of_row.dout_norm, terms.minus_delta);
}

/// Zeros for the tile's dq, which is of type Result.
template <typename Traits, typename Result>
__device__ __forceinline__ void clear_dq(const RowParams& p, const RowTilePlace& place) {
  using Share = cuda::RowShare<Traits::kRows, Traits::kQkDim>;
#pragma unroll 1
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    const int32_t row = place.tile * Traits::kRows + Share::row(pass);
    if (row >= p.seqlen_q || Share::column() >= p.dq.columns) continue;
    cuda::Eight<Result>{}.store(place.row_of<Result>(p.dq, row) + Share::column());
  }
}

/// Writes the tile's terms (write_terms) and whether dq has sums. Clears the sums, or dq if no key tile contributes,
/// and the counter of work tiles.
template <typename Traits>
__device__ __forceinline__ void preprocess(const RowParams& p) {
  __shared__ RowProducts products[Traits::kRows];
  __shared__ bool has_sums;
  const RowTilePlace place(p);
  const auto own = static_cast<int32_t>(threadIdx.x);
  if (own < 32) {
    const bool has = has_parts<Traits>(p, place);
    if (own == 0) has_sums = has;
  }
  multiply_rows<Traits>(p, place, products);
  __syncthreads();
  write_terms<Traits>(p, place, products);
  if (own == 0) p.dq_sums.has_sums[place.index] = has_sums;
  if (own == 0 && blockIdx.x == 0) *p.next = 0;
  if (has_sums) {
    constexpr int kFloats = DqFragments<Traits>::kOfTile;
    auto* sums = reinterpret_cast<float4*>(p.dq_sums.sums + place.index * kFloats);
    for (int at = own; at < kFloats / 4; at += cuda::kRowThreads) sums[at] = {};
    return;
  }
  if (p.float_rows) {
    clear_dq<Traits, float>(p, place);
  } else {
    clear_dq<Traits, typename Traits::Element>(p, place);
  }
}

/// dq = scale * sums, where key tiles contribute. Each warp reads the fragments that its counterparts have
/// added.
template <typename Traits>
__device__ __forceinline__ void convert_dq(const RowParams& p) {
  using Tile = typename Traits::QTile;
  using Grid = typename Traits::DqGrid;
  using Fragments = DqFragments<Traits>;
  static_assert(cuda::kRowThreads == Traits::kThreads);
  __shared__ __align__(128) unsigned char tile[Tile::kBytes];
  const RowTilePlace place(p);
  if (!p.dq_sums.has_sums[place.index]) return;
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const float* const sums = p.dq_sums.sums + Fragments::first(place.index, warp, threadIdx.x % 32);
  typename Grid::Fragments dq;
#pragma unroll
  for (int slab = 0; slab < Grid::kSlabs; ++slab) {
#pragma unroll
    for (int n = 0; n < 8 * Grid::kPieces; ++n) dq[slab][n] = sums[slab * Fragments::kOfSlab + n * 32];
  }
  if (p.dq_sums.fixed_point) {
    const RowScales<Traits> scales(p.dq_sums, place.index, warp);
#pragma unroll
    for (int slab = 0; slab < Grid::kSlabs; ++slab) scales.make_floats(slab, dq[slab]);
  }
  const int32_t first = place.tile * Traits::kRows, rows = p.seqlen_q - first;
  if (p.float_rows) {
    store_fragments<Grid>(dq, p.scale, place.row_of<float>(p.dq, first), p.dq.row_stride, rows, p.dq.columns, warp);
    return;
  }
  write_fragments<Grid, Tile>(dq, p.scale, tile, warp);
  __syncthreads();
  store_tile<Tile, Traits::kThreads>(tile, place.row_of<typename Traits::Element>(p.dq, first), p.dq.row_stride, rows,
                                     p.dq.columns);
}

}  // namespace flashmask::sm80::bwd
