// SPDX-License-Identifier: Apache-2.0
#pragma once

// What runs before and after the kernel over the key tiles.

#include <cstdint>

#include "backends/cuda/attention/plan_bits.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sm90/backward/instance.h"
#include "backends/cuda/sm90/backward/l2_group.cuh"
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

/// A tile's rows as the block's threads share them: 16 bytes each.
template <int kRows, int kDim>
struct RowShare {
  static constexpr int kThreadsPerRow = kDim / 8, kRowsPerPass = kRowThreads / kThreadsPerRow;
  static constexpr int kPasses = kRows / kRowsPerPass;
  __device__ static int row(int pass) { return pass * kRowsPerPass + static_cast<int>(threadIdx.x) / kThreadsPerRow; }
  __device__ static int column() { return static_cast<int>(threadIdx.x) % kThreadsPerRow * 8; }
};

template <typename Element>
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
  const auto* x = reinterpret_cast<const Element*>(&a);
  const auto* y = reinterpret_cast<const Element*>(&b);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += static_cast<float>(x[i]) * static_cast<float>(y[i]);
  return sum;
}

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
  if (p.dense) return p.key_tiles;
  const uint32_t mask = cuda::mask_index(p.plan, static_cast<uint32_t>(place.batch), static_cast<uint32_t>(place.head));
  return cuda::live_key_tiles<Traits::kGranules>(p.plan, mask, place.first_row / Traits::kRows, p.key_tiles);
}

template <typename Traits>
__device__ __forceinline__ void clear_dq(const RowParams& p, const RowTilePlace& place) {
  using Share = RowShare<Traits::kRows, Traits::kQkDim>;
#pragma unroll 1
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    const int32_t row = place.first_row + Share::row(pass);
    if (row >= p.seqlen_q) continue;
    auto* to = p.dq_sums.out.template at<typename Traits::Element>(place.batch, row, place.head) + Share::column();
    *reinterpret_cast<uint4*>(to) = {0, 0, 0, 0};
  }
}

/// Fills the rows' biases and the state of dq's sums, zeroes dq where no key tile contributes, clears the counter of
/// work tiles, and chooses the size of an L2 group.
template <typename Traits>
__device__ __forceinline__ void preprocess(const RowParams& p) {
  using Share = RowShare<Traits::kRows, Traits::kVDim>;
  using Element = typename Traits::Element;
  __shared__ float products[Traits::kRows];
  __shared__ uint32_t parts;
  cudaGridDependencySynchronize();
  // The next kernel may start beside the last of these blocks; it waits for all of them itself.
  cudaTriggerProgrammaticLaunchCompletion();
  const auto place = RowTilePlace::of_block<Traits>(p);
  const int own = static_cast<int>(threadIdx.x);
  RowValues values{};
  if (own < Traits::kRows) values = RowValues::load(p, place, place.first_row + own);
  if (own >= kRowThreads - 32) {
    const uint32_t count = count_parts<Traits>(p, place);
    if (own % 32 == 0) parts = count;
  }
#pragma unroll 2
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    const int32_t row = place.first_row + Share::row(pass);
    uint4 out{}, dout{};
    if (row < p.seqlen_q) {
      out = *reinterpret_cast<const uint4*>(p.out.template at<Element>(place.batch, row, place.head) + Share::column());
      dout =
          *reinterpret_cast<const uint4*>(p.dout.template at<Element>(place.batch, row, place.head) + Share::column());
    }
    float product = dot<Element>(out, dout);
#pragma unroll
    for (int distance = Share::kThreadsPerRow / 2; distance > 0; distance /= 2)
      product += __shfl_xor_sync(0xffffffff, product, distance);
    if (Share::column() == 0) products[Share::row(pass)] = product;
  }
  __syncthreads();
  if (own < Traits::kRows) {
    p.biases[place.index * Traits::kRows + own] = row_bias(values.lse, products[own] - values.dlse, p.score_scale);
  }
  if (own == 0) p.dq_sums.progress[place.index] = parts;
  if (own == 0 && blockIdx.x == 0) *p.next = 0;
  if (blockIdx.x == 0 && p.l2_group.result) choose_l2_group(p.l2_group, p.plan, p.key_tiles);
  if (parts == 0) clear_dq<Traits>(p, place);
}

/// A tile of gradients on its way from fragments to rows, through shared memory.
template <typename Element, int kRows, int kDim>
struct GradientTile {
  using Share = RowShare<kRows, kDim>;
  __align__(16) Element element[kRows][kDim + 8];  // padded against bank conflicts

  /// Element number threadIdx.x of the 16 x 64 fragments at (row, column), times `scale`. Zeros become positive, as in
  /// a dq that the consumers store themselves.
  __device__ void write(int row, int column, const float4& values, float scale) {
    const int lane = threadIdx.x % 32, e = threadIdx.x / 32;
    Element* to = &element[row + lane / 4][column + 8 * e + 2 * (lane % 4)];
    *reinterpret_cast<uint32_t*>(to) =
        ptx::pack<Element>(__fmaf_rn(values.x, scale, 0.f), __fmaf_rn(values.y, scale, 0.f));
    *reinterpret_cast<uint32_t*>(to + 8 * (kDim + 8)) =
        ptx::pack<Element>(__fmaf_rn(values.z, scale, 0.f), __fmaf_rn(values.w, scale, 0.f));
  }

  /// The rows before `end`, to (batch, row, head) of a tensor.
  __device__ void store(const Rows& to, int64_t batch, int32_t first_row, int32_t end, int64_t head) const {
#pragma unroll
    for (int pass = 0; pass < Share::kPasses; ++pass) {
      const int32_t row = first_row + Share::row(pass);
      if (row >= end) continue;
      *reinterpret_cast<uint4*>(to.template at<Element>(batch, row, head) + Share::column()) =
          *reinterpret_cast<const uint4*>(&element[Share::row(pass)][Share::column()]);
    }
  }
};

/// dq = softmax_scale * sums, where several key tiles contribute. The consumers have stored that of a single one, and
/// preprocess has zeroed the rest.
template <typename Traits>
__device__ __forceinline__ void convert_dq(const RowParams& p) {
  using Blocks = DqBlocks<Traits::kRows, Traits::kQkDim>;
  __shared__ GradientTile<typename Traits::Element, Traits::kRows, Traits::kQkDim> tile;
  const auto place = RowTilePlace::of_block<Traits>(p);
  const DqSums& dq = p.dq_sums;
  cudaGridDependencySynchronize();
  if (!(dq.progress[place.index] & Progress::kStored)) return;
  const auto* sums = reinterpret_cast<const float4*>(dq.sums + place.index * Blocks::kTileFloats) + threadIdx.x;
  float4 part[Blocks::kWarps];
#pragma unroll
  for (int warp = 0; warp < Blocks::kWarps; ++warp) part[warp] = sums[warp * (Blocks::kWarpFloats / 4)];
#pragma unroll
  for (int columns = 0; columns < Blocks::kColumnBlocks; ++columns) {
#pragma unroll
    for (int warp = 0; warp < Blocks::kWarpsOfColumns; ++warp)
      tile.write(warp * 16, columns * 64, part[columns * Blocks::kWarpsOfColumns + warp], p.softmax_scale);
  }
  __syncthreads();
  tile.store(dq.out, place.batch, place.first_row, p.seqlen_q, place.head);
}

/// dk = softmax_scale * the sum of its parts, and dv without the factor, where a key head's query heads are split;
/// always in the same order. A block does one of the two of a key tile.
template <typename Traits>
__device__ __forceinline__ void reduce_dkv(const KeyParams& p) {
  static_assert(Traits::kQkDim == Traits::kVDim, "the parts of dk and dv have one size");
  using Part = KeyFragments<Traits::kQkDim>;
  __shared__ GradientTile<typename Traits::Element, Traits::kKeys, Traits::kQkDim> tile;
  const bool is_dv = blockIdx.x % 2;
  const uint32_t key_tile = blockIdx.x / 2 % p.key_tiles, kv_head_index = blockIdx.x / 2 / p.key_tiles;
  const int64_t of_split = int64_t{2} * p.key_tiles * (Part::kTileFloats / 4);
  const auto* parts = reinterpret_cast<const float4*>(p.parts) + kv_head_index * p.splits * of_split +
                      (key_tile * 2 + is_dv) * static_cast<int64_t>(Part::kTileFloats / 4) + threadIdx.x;
  cudaGridDependencySynchronize();
#pragma unroll 2
  for (int block = 0; block < Part::kTileFloats / Part::kBlockFloats; ++block) {
    float4 sum{};
    for (uint32_t split = 0; split < p.splits; ++split) {
      const float4 part = parts[split * of_split + block * (Part::kBlockFloats / 4)];
      sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
    }
    constexpr int kBlocks = Traits::kQkDim / 64;
    tile.write(block / kBlocks * 16, block % kBlocks * 64, sum, is_dv ? 1.f : p.softmax_scale);
  }
  __syncthreads();
  tile.store(is_dv ? p.dv : p.dk, kv_head_index / p.heads_kv, static_cast<int32_t>(key_tile) * Traits::kKeys,
             p.seqlen_k, kv_head_index % p.heads_kv);
}

}  // namespace flashmask::sm90::bwd
