// SPDX-License-Identifier: Apache-2.0
#pragma once

// Kernels before and after the kernel over the key tiles.

#include <cstdint>
#include <type_traits>

#include "backends/cuda/device/plan_bits.cuh"
#include "backends/cuda/device/row_products.cuh"
#include "backends/cuda/fragments/fixed_point.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sm90/backward/columns/fixed_dq.cuh"
#include "backends/cuda/sm90/backward/instance.h"
#include "backends/cuda/sm90/backward/row_bias.cuh"
#include "backends/cuda/sm90/backward/row_params.h"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::bwd {

/// The block's query tile; neighbouring blocks have neighbouring heads, whose rows are mostly adjacent in memory.
struct RowTilePlace {
  int64_t batch;
  int32_t first_row, head;
  int64_t index;  ///< in [batch, heads_q, row_tiles]

  template <typename Traits>
  __device__ static RowTilePlace of_block(const RowParams& p) {
    const uint32_t head = blockIdx.x % p.heads, rest = blockIdx.x / p.heads;
    const uint32_t tile = rest % p.row_tiles, batch = rest / p.row_tiles;
    const int64_t head_index = static_cast<int64_t>(batch) * p.heads + head;
    return {batch, static_cast<int32_t>(tile) * Traits::kRows, static_cast<int32_t>(head),
            head_index * p.row_tiles + tile};
  }
};

using cuda::Eight;
using cuda::RowShare;

/// A row's lse and its gradient.
struct RowValues {
  float lse, dlse;

  __device__ static RowValues load(const RowParams& p, const RowTilePlace& place, int32_t row) {
    if (row >= p.seqlen_q) return {-INFINITY, 0};
    return {*p.lse.template at<float>(place.batch, row, place.head),
            p.dlse.data ? *p.dlse.template at<float>(place.batch, row, place.head) : 0};
  }
};

/// How many key tiles contribute to the block's part of dq. All lanes of a warp call it.
template <typename Traits>
__device__ __forceinline__ uint32_t count_parts(const RowParams& p, const RowTilePlace& place) {
  if (p.dense) return p.key_blocks * Traits::kKeyTilesOfBlock;
  const uint32_t mask = cuda::mask_index(p.plan, static_cast<uint32_t>(place.batch), static_cast<uint32_t>(place.head));
  return Traits::kKeyTilesOfBlock *
         cuda::live_key_tiles<Traits::kGranules>(p.plan, mask, place.first_row / Traits::kRows, p.key_blocks);
}

template <typename Traits, typename Result>
__device__ __forceinline__ void clear_dq(const RowParams& p, const RowTilePlace& place) {
  using Share = RowShare<Traits::kRows, Traits::kQkDim>;
#pragma unroll 1
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    const int32_t row = place.first_row + Share::row(pass);
    if (row >= p.seqlen_q || Share::column() >= p.dq_columns.count) continue;
    Eight<Result>{}.store(p.dq_sums.out.template at<Result>(place.batch, row, place.head) + Share::column());
  }
}

/// True if the consumers of the kernel over tiles add dq to its sums themselves.
template <typename Traits>
__device__ __forceinline__ bool adds_from_registers(const RowParams& p) {
  return Traits::kTile.dq_from_registers || (Traits::kPair && p.in_pairs);
}

/// True if a query tile's sums begin as zeros and all of its `parts` are added: if consumers add them themselves, or if
/// a single part makes dq in fp32, which they would store in the tensors' type.
template <typename Traits, typename Result>
__device__ __forceinline__ bool begins_as_zeros(const RowParams& p, uint32_t parts) {
  if (adds_from_registers<Traits>(p)) return parts != 0;
  return std::is_same_v<Result, float> && parts == Progress::kAlone;
}
/// A query tile's word of Progress before any of its `parts`.
template <typename Traits, typename Result>
__device__ __forceinline__ uint32_t progress_before(const RowParams& p, uint32_t parts) {
  return begins_as_zeros<Traits, Result>(p, parts) ? parts | Progress::kStored : parts;
}

template <typename Traits>
__device__ __forceinline__ void clear_sums(const RowParams& p, const RowTilePlace& place) {
  constexpr int kFloats = Traits::kRows * Traits::kQkDim;
  auto* sums = reinterpret_cast<float4*>(p.dq_sums.sums + place.index * kFloats) + threadIdx.x;
#pragma unroll
  for (int at = 0; at < kFloats / 4; at += kRowThreads) sums[at] = {};
}

/// Fills the rows' biases and the state of dq's sums, zeroes dq where no key tile contributes, and clears the work tile
/// counter. out and dq are of type Result.
template <typename Traits, typename Result = typename Traits::Element>
__device__ __forceinline__ void preprocess(const RowParams& p) {
  using Share = RowShare<Traits::kRows, Traits::kVDim>;
  using Element = typename Traits::Element;
  __shared__ float products[Traits::kRows], dout_norms[Traits::kRows];
  __shared__ uint32_t parts;
  cudaGridDependencySynchronize();
  // The next kernel may start beside the last of these blocks; it waits for all of them itself.
  cudaTriggerProgrammaticLaunchCompletion();
  const auto place = RowTilePlace::of_block<Traits>(p);
  const int own = static_cast<int>(threadIdx.x);
  RowValues values{};
  if (own < Traits::kRows) values = RowValues::load(p, place, place.first_row + own);
  const bool fixed_point = p.dq_sums.fixed_point;
  const cuda::KeyMagnitudes keys =
      fixed_point ? cuda::head_magnitudes(p.scales, place.batch, place.head) : cuda::KeyMagnitudes{};
  if (own >= kRowThreads - 32) {
    const uint32_t count = count_parts<Traits>(p, place);
    if (own % 32 == 0) parts = count;
  }
  const int32_t row_end = p.extents.rows(static_cast<uint32_t>(place.batch), p.seqlen_q);
#pragma unroll 2
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    const int32_t row = place.first_row + Share::row(pass);
    Eight<Result> out{};
    Eight<Element> dout{};
    if (row < row_end && Share::column() < p.head_dim_v) {
      out = out.load(p.out.template at<Result>(place.batch, row, place.head) + Share::column());
      dout = dout.load(p.dout.template at<Element>(place.batch, row, place.head) + Share::column());
    }
    float product = dot(out, dout);
#pragma unroll
    for (int distance = Share::kThreadsPerRow / 2; distance > 0; distance /= 2)
      product += __shfl_xor_sync(0xffffffff, product, distance);
    if (Share::column() == 0) products[Share::row(pass)] = product;
    if (!fixed_point) continue;
    cuda::Magnitude magnitude;
    magnitude.add(dout);
    magnitude.join(Share::kThreadsPerRow);
    if (Share::column() == 0) dout_norms[Share::row(pass)] = magnitude.norm();
  }
  __syncthreads();
  if (own < Traits::kRows) {
    const float delta = products[own] - values.dlse;
    RowBias bias = !kTermsLast<Traits> ? row_bias(values.lse, delta, p.score_scale)
                   : p.folds_delta     ? row_term_and_bias(values.lse, delta)
                                       : row_terms(values.lse, delta);
    if (fixed_point)
      bias.pair[RowBias::kScalePair] = __float_as_uint(cuda::dq_row_scale(p.scales, keys, dout_norms[own], delta));
    p.biases[place.index * Traits::kRows + own] = bias;
  }
  if (own < Traits::kDqPieces)
    p.dq_sums.progress[place.index * Traits::kDqPieces + own] = progress_before<Traits, Result>(p, parts);
  if (own == 0 && blockIdx.x == 0) *p.next = 0;
  if (begins_as_zeros<Traits, Result>(p, parts)) clear_sums<Traits>(p, place);
  if (parts == 0) clear_dq<Traits, Result>(p, place);
}

/// A tile of gradients on its way from fragments to rows, through shared memory.
template <typename Element, int kRows, int kDim>
struct GradientTile {
  using Share = RowShare<kRows, kDim>;
  __align__(16) Element element[kRows][kDim + 8];  // padded against bank conflicts

  /// A warp's fragments, eight columns of 16 rows at (row, column), times `scale`. Zeros become positive, as in a dq
  /// that the consumers store themselves.
  __device__ void write(int row, int column, const float4& values, float scale) {
    const int lane = threadIdx.x % 32;
    Element* to = &element[row + lane / 4][column + 2 * (lane % 4)];
    *reinterpret_cast<uint32_t*>(to) =
        ptx::pack<Element>(__fmaf_rn(values.x, scale, 0.f), __fmaf_rn(values.y, scale, 0.f));
    *reinterpret_cast<uint32_t*>(to + 8 * (kDim + 8)) =
        ptx::pack<Element>(__fmaf_rn(values.z, scale, 0.f), __fmaf_rn(values.w, scale, 0.f));
  }

  /// The rows before `end`, to (batch, row, head) of a tensor.
  __device__ void store(const Rows& to, const Columns& columns, int64_t batch, int32_t first_row, int32_t end,
                        int64_t head) const {
    const int32_t column = Share::column() < kDim ? columns.of_tile(Share::column()) : columns.count;
    if (column >= columns.count) return;
#pragma unroll
    for (int pass = 0; pass < Share::kPasses; ++pass) {
      const int32_t row = first_row + Share::row(pass);
      if (row >= end) continue;
      *reinterpret_cast<uint4*>(to.template at<Element>(batch, row, head) + column) =
          *reinterpret_cast<const uint4*>(&element[Share::row(pass)][Share::column()]);
    }
  }
};

/// A tile of gradients in fp32, which go from fragments to rows without a detour: a quad has 32 bytes of a row, whole
/// sectors.
struct FloatTile {
  const Rows& to;
  const Columns& columns;
  int64_t batch;
  int32_t first_row, end;
  int64_t head;

  /// GradientTile::write for rows before `end`, straight to the tensor.
  __device__ void write(int row, int column, const float4& values, float scale) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, own = first_row + row + lane / 4;
    const int32_t of_tensor = columns.of_tile(column);
    if (of_tensor >= columns.count) return;
    store_pair(own, of_tensor + 2 * (lane % 4), values.x, values.y, scale);
    store_pair(own + 8, of_tensor + 2 * (lane % 4), values.z, values.w, scale);
  }

 private:
  __device__ void store_pair(int32_t row, int32_t column, float first, float second, float scale) const {
    if (row >= end) return;
    *reinterpret_cast<float2*>(to.template at<float>(batch, row, head) + column) = {__fmaf_rn(first, scale, 0.f),
                                                                                    __fmaf_rn(second, scale, 0.f)};
  }
};

/// Fragments of 16 rows and 8 columns, 32 float4 each, follow each other in slabs of 16 rows and kColumns columns; a
/// block takes as many at a step as it has warps. The slab of the calling warp's, and its first column there.
template <int kColumns>
struct FragmentPlace {
  int slab, column;

  __device__ __forceinline__ explicit FragmentPlace(int step) {
    constexpr int kAtOnce = kRowThreads / 32, kOfSlab = kColumns / 8;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if constexpr (kOfSlab % kAtOnce == 0) {
      slab = step / (kOfSlab / kAtOnce);
      column = 8 * (step % (kOfSlab / kAtOnce) * kAtOnce + warp);
    } else {
      slab = (step * kAtOnce + warp) / kOfSlab;
      column = 8 * ((step * kAtOnce + warp) % kOfSlab);
    }
  }
};

/// The biases of the 16 rows of the block's fragments at a step of FragmentPlace.
template <typename Traits>
__device__ __forceinline__ const RowBias* biases_of(const RowParams& p, const RowTilePlace& place, int slab) {
  return p.biases + place.index * Traits::kRows + slab % DqBlocks<Traits>::kWarpsOfColumns * 16;
}

/// A thread's four sums of a fragment whose integers consumers have added from registers: joined, those of one row
/// behind those of the other.
__device__ __forceinline__ float4 load_joined(const float4* fragment) {
  const auto* joined = reinterpret_cast<const uint64_t*>(fragment) + threadIdx.x % 32;
  const float2 first = cuda::split_integers(joined[0]), second = cuda::split_integers(joined[32]);
  return {first.x, first.y, second.x, second.y};
}

/// A thread's four sums of each of its fragments, at FragmentPlace of a step. Joined integers become floats beside the
/// loads of others.
template <typename Traits, int kSteps>
__device__ __forceinline__ void load_sums(const RowParams& p, const RowTilePlace& place, bool are_joined,
                                          float4 (&sums)[kSteps]) {
  using Blocks = DqBlocks<Traits>;
  const float* of_tile = p.dq_sums.sums + place.index * Blocks::kTileFloats;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto fragment = [&](int step) {
    return reinterpret_cast<const float4*>(of_tile + 128 * (step * (kRowThreads / 32) + warp));
  };
  if (are_joined) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int slab = FragmentPlace<Blocks::kBlockColumns>(step).slab;
      sums[step] = from_integers(load_joined(fragment(step)), biases_of<Traits>(p, place, slab));
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) sums[step] = fragment(step)[lane];
  }
}

/// dq = scale * sums, where several key tiles contribute. The consumers have stored that of a single one, and
/// preprocess has zeroed the rest. dq is of type Result; in fp32 that of a single one, too, comes from sums.
template <typename Traits, typename Result = typename Traits::Element>
__device__ __forceinline__ void convert_dq(const RowParams& p) {
  using Blocks = DqBlocks<Traits>;
  const auto place = RowTilePlace::of_block<Traits>(p);
  const DqSums& dq = p.dq_sums;
  cudaGridDependencySynchronize();
  if (!(dq.progress[place.index * Traits::kDqPieces] & Progress::kStored)) return;
  const bool are_joined = dq.fixed_point && adds_from_registers<Traits>(p);
  constexpr int kSteps = Blocks::kTileFloats / (4 * kRowThreads);
  float4 sums[kSteps];
  load_sums<Traits>(p, place, are_joined, sums);
  const auto write_to = [&](auto& tile) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const FragmentPlace<Blocks::kBlockColumns> fragment(step);
      const int row = fragment.slab % Blocks::kWarpsOfColumns * 16;
      if (dq.fixed_point && !are_joined)
        sums[step] = from_integers(sums[step], biases_of<Traits>(p, place, fragment.slab));
      tile.write(row, fragment.slab / Blocks::kWarpsOfColumns * Blocks::kBlockColumns + fragment.column, sums[step],
                 p.scale);
    }
  };
  if constexpr (std::is_same_v<Result, float>) {
    const FloatTile tile{dq.out, p.dq_columns, place.batch, place.first_row, p.seqlen_q, place.head};
    write_to(tile);
  } else {
    __shared__ GradientTile<Result, Traits::kRows, Traits::kQkDim> tile;
    write_to(tile);
    __syncthreads();
    tile.store(dq.out, p.dq_columns, place.batch, place.first_row, p.seqlen_q, place.head);
  }
}

/// Keys whose columns of dk and dv a block has in shared memory at once, 48 KB of it.
template <typename Traits>
inline constexpr int kReducedKeys = Traits::kQkDim + Traits::kVDim <= 256 ? Traits::kKeys : 64;

/// A key tile's dk or dv, the sum of its parts times `scale`, whose first lies at `parts` and the next `of_split`
/// floats further on.
template <typename Traits, typename Result, int kDim>
__device__ __forceinline__ void reduce_keys(const KeyParams& p, const float* parts, int64_t of_split, float scale,
                                            const Rows& to, const Columns& columns, uint32_t key_tile,
                                            uint32_t kv_head_index) {
  constexpr int kKeys = kReducedKeys<Traits>;
  const auto* own = reinterpret_cast<const float4*>(parts) + threadIdx.x;
#pragma unroll 1
  for (int first = 0; first < Traits::kKeys; first += kKeys) {
    const auto write_to = [&](auto& tile) {
#pragma unroll 2
      for (int step = 0; step < kKeys * kDim / (4 * kRowThreads); ++step) {
        float4 sum{};
        for (uint32_t split = 0; split < p.splits; ++split) {
          const float4 part = own[split * (of_split / 4) + first * (kDim / 4) + step * kRowThreads];
          sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
        }
        const FragmentPlace<kDim> fragment(step);
        tile.write(fragment.slab * 16, fragment.column, sum, scale);
      }
    };
    if constexpr (std::is_same_v<Result, float>) {
      const FloatTile tile{to,
                           columns,
                           kv_head_index / p.heads_kv,
                           static_cast<int32_t>(key_tile) * Traits::kKeys + first,
                           p.seqlen_k,
                           kv_head_index % p.heads_kv};
      write_to(tile);
    } else {
      __shared__ GradientTile<Result, kKeys, kDim> tile;
      write_to(tile);
      __syncthreads();
      tile.store(to, columns, kv_head_index / p.heads_kv, static_cast<int32_t>(key_tile) * Traits::kKeys + first,
                 p.seqlen_k, kv_head_index % p.heads_kv);
      if constexpr (kKeys < Traits::kKeys) __syncthreads();
    }
  }
}

/// Sums the parts of dk, times scale, and of dv, in a fixed order, if a key head's query heads are split. dk
/// and dv are of type Result. A block computes either dk or dv of a key tile.
template <typename Traits, typename Result = typename Traits::Element>
__device__ __forceinline__ void reduce_dkv(const KeyParams& p) {
  constexpr int kDkFloats = KeyFragments<Traits::kKeys, Traits::kQkDim>::kTileFloats,
                kDvFloats = KeyFragments<Traits::kKeys, Traits::kVDim>::kTileFloats;
  const uint32_t key_tile = blockIdx.x / 2 % p.key_tiles, kv_head_index = blockIdx.x / 2 / p.key_tiles;
  const int64_t of_tile = kDkFloats + kDvFloats, of_split = of_tile * p.key_tiles;
  const float* parts = p.parts + kv_head_index * p.splits * of_split + key_tile * of_tile;
  const bool is_dv = blockIdx.x % 2;
  const Rows& to = is_dv ? p.to.dv : p.to.dk;
  const Columns& columns = is_dv ? p.to.dv_columns : p.to.dk_columns;
  const float scale = is_dv ? 1.f : p.scale;
  parts += is_dv ? kDkFloats : 0;
  cudaGridDependencySynchronize();
  if (Traits::kQkDim == Traits::kVDim || !is_dv) {
    reduce_keys<Traits, Result, Traits::kQkDim>(p, parts, of_split, scale, to, columns, key_tile, kv_head_index);
  } else {
    reduce_keys<Traits, Result, Traits::kVDim>(p, parts, of_split, scale, to, columns, key_tile, kv_head_index);
  }
}

}  // namespace flashmask::sm90::bwd
