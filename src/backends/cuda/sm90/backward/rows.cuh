// SPDX-License-Identifier: Apache-2.0
#pragma once

// What is done for every query row before and after the kernel over the key tiles. A block has one query tile.

#include <cstdint>

#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/sm90/backward/instance.h"
#include "backends/cuda/sm90/backward/row_params.h"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::grad {

/// The block's query tile; neighbouring blocks have neighbouring heads, whose rows mostly are neighbours in memory.
struct RowTilePlace {
  int64_t batch;
  int32_t first_row, head;
  int64_t index;  ///< in [batch, heads_q, row_tiles]

  template <typename Traits>
  __device__ static RowTilePlace of_block(const RowParams& p) {
    const uint32_t head = blockIdx.x % p.heads, rest = blockIdx.x / p.heads;
    const uint32_t tile = rest % p.row_tiles, batch = rest / p.row_tiles;
    const int64_t sequence = static_cast<int64_t>(batch) * p.heads + head;
    return {batch, static_cast<int32_t>(tile) * Traits::kRows, static_cast<int32_t>(head), sequence * p.row_tiles + tile};
  }
};

/// A tile's rows as the block's threads share them: 16 bytes each.
template <typename Traits>
struct RowShare {
  static constexpr int kThreadsPerRow = Traits::kHeadDim / 8, kRowsPerPass = kRowThreads / kThreadsPerRow;
  static constexpr int kPasses = Traits::kRows / kRowsPerPass;
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

/// Fills the row vectors and clears the sums of dq, their turns and the counter of items.
template <typename Traits>
__global__ void __launch_bounds__(kRowThreads) prepare_rows(const __grid_constant__ RowParams p) {
  using Share = RowShare<Traits>;
  using Element = typename Traits::Element;
  const auto place = RowTilePlace::of_block<Traits>(p);
  uint4 out[Share::kPasses], dout[Share::kPasses];
#pragma unroll
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    const int32_t row = place.first_row + Share::row(pass);
    out[pass] = dout[pass] = {0, 0, 0, 0};
    if (row >= p.seqlen_q) continue;
    out[pass] = *reinterpret_cast<const uint4*>(p.out.template at<Element>(place.batch, row, place.head) + Share::column());
    dout[pass] = *reinterpret_cast<const uint4*>(p.dout.template at<Element>(place.batch, row, place.head) + Share::column());
  }
  auto* sums = reinterpret_cast<float4*>(p.sums.sums + place.index * Fragments<Traits::kHeadDim>::kTileFloats);
  for (int n = threadIdx.x; n < Fragments<Traits::kHeadDim>::kTileFloats / 4; n += kRowThreads) sums[n] = {0, 0, 0, 0};
  if (threadIdx.x == 0 && p.sums.turns) p.sums.turns[place.index] = 0;
  if (threadIdx.x == 0 && blockIdx.x == 0) *p.next = 0;
#pragma unroll
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    float delta = dot<Element>(out[pass], dout[pass]);
#pragma unroll
    for (int distance = Share::kThreadsPerRow / 2; distance > 0; distance /= 2) delta += __shfl_xor_sync(0xffffffff, delta, distance);
    if (Share::column() != 0) continue;
    const int32_t row = place.first_row + Share::row(pass);
    const float lse = row < p.seqlen_q ? *p.lse.template at<float>(place.batch, row, place.head) : -INFINITY;
    const bool sees = lse != -INFINITY;
    if (sees && p.dlse.data) delta -= *p.dlse.template at<float>(place.batch, row, place.head);
    constexpr float kLog2E = 1.44269504088896341f;
    const int64_t at = place.index * Traits::kRows + Share::row(pass);
    p.rows.lse_log2[at] = sees ? lse * kLog2E : INFINITY;
    p.rows.delta[at] = sees ? delta : 0.f;
  }
}

/// dq = softmax_scale * sums.
template <typename Traits>
__global__ void __launch_bounds__(kRowThreads) finish_rows(const __grid_constant__ RowParams p) {
  using Share = RowShare<Traits>;
  using Part = Fragments<Traits::kHeadDim>;
  using Element = typename Traits::Element;
  __shared__ __align__(16) Element tile[Traits::kRows][Traits::kHeadDim + 8];  // padded against bank conflicts
  const auto place = RowTilePlace::of_block<Traits>(p);
  const int lane = threadIdx.x % 32, e = threadIdx.x / 32;
  cudaGridDependencySynchronize();
  const auto* sums = reinterpret_cast<const float4*>(p.sums.sums + place.index * Part::kTileFloats) + threadIdx.x;
  float4 part[Part::kWarps];
#pragma unroll
  for (int warp = 0; warp < Part::kWarps; ++warp) part[warp] = sums[warp * (Part::kWarpFloats / 4)];
#pragma unroll
  for (int warp = 0; warp < Part::kWarps; ++warp) {
    const int row = Part::row(warp) + lane / 4, column = Part::column(warp) + 8 * e + 2 * (lane % 4);
    const float4 sum = part[warp];
    *reinterpret_cast<uint32_t*>(&tile[row][column]) = ptx::pack<Element>(sum.x * p.scale, sum.y * p.scale);
    *reinterpret_cast<uint32_t*>(&tile[row + 8][column]) = ptx::pack<Element>(sum.z * p.scale, sum.w * p.scale);
  }
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    const int32_t row = place.first_row + Share::row(pass);
    if (row >= p.seqlen_q) continue;
    *reinterpret_cast<uint4*>(p.dq.template at<Element>(place.batch, row, place.head) + Share::column()) =
        *reinterpret_cast<const uint4*>(&tile[Share::row(pass)][Share::column()]);
  }
}

}  // namespace flashmask::sm90::grad
