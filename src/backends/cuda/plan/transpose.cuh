// SPDX-License-Identifier: Apache-2.0
#pragma once

// The second kernel of the planner: transposes the bits of every key block over the row granules to the bits of every
// row granule over the key blocks, and counts the bits of row granules and row tiles.

#include <cstdint>

#include "backends/cuda/plan/params.cuh"

namespace flashmask::cuda::plan {

inline constexpr int kBandRows =
    96;  // row granules of a block: whole tiles of two and of three, and whole 32-bit words
inline constexpr int kSliceKeys = 128;  // key blocks of a block, 32 for each of its warps
inline constexpr int kTransposeThreads = kSliceKeys;

/// Bit c of lane r goes to bit r of lane c: swaps ever smaller squares across the diagonal.
__device__ inline uint32_t transpose32(uint32_t x) {
  uint32_t mask = 0x0000ffff;
#pragma unroll
  for (uint32_t width = 16; width > 0; width /= 2, mask ^= mask << width) {
    const uint32_t other = __shfl_xor_sync(0xffffffff, x, width);
    x = threadIdx.x & width ? (x & ~mask) | (other >> width & mask) : (x & mask) | (other << width & ~mask);
  }
  return x;
}

/// A row granule's bits over the key blocks of a slice.
union SliceBits {
  uint4 all;
  uint32_t word[kSliceKeys / 32];
  uint64_t wide[kSliceKeys / 64];
};

__device__ inline int32_t count_bits(const uint4& bits) {
  return __popc(bits.x) + __popc(bits.y) + __popc(bits.z) + __popc(bits.w);
}

/// The band of rows and the slice of key blocks of one mask that a block transposes.
struct Square {
  int32_t m, band, slice;
};

/// Moves the calling thread's key block, live or full ones by `offset`, into shared memory, transposed.
template <PlanForm kForm>
__device__ void transpose_key_block(const Params& p, const Square& at, int64_t offset, SliceBits (&to)[kBandRows]) {
  const auto words = static_cast<int32_t>(p.layout.words_per_key) * 2;
  const int32_t key = at.slice * kSliceKeys + static_cast<int32_t>(threadIdx.x);
  const int64_t line = int64_t{at.m} * p.key_blocks + key;
  uint32_t bits[kBandRows / 32];
#pragma unroll
  for (int n = 0; n < kBandRows / 32; ++n) {
    const int32_t word = at.band * (kBandRows / 32) + n;
    bits[n] = key < p.key_blocks && word < words ? key_block_word<kForm>(p, offset, line, word) : 0;
  }
#pragma unroll
  for (int n = 0; n < kBandRows / 32; ++n) to[n * 32 + threadIdx.x % 32].word[threadIdx.x / 32] = transpose32(bits[n]);
}

/// Writes row granule `row`'s bits over the slice.
__device__ inline void write_row(const Params& p, const Square& at, int32_t row, const SliceBits& bits, uint64_t* to) {
  const auto words = static_cast<int32_t>(p.layout.words_per_row);
  uint64_t* out = to + (int64_t{at.m} * p.row_granules + row) * words;
#pragma unroll
  for (int n = 0; n < kSliceKeys / 64; ++n) {
    const int32_t word = at.slice * (kSliceKeys / 64) + n;
    if (word < words) out[word] = bits.wide[n];
  }
}

/// Adds the slice's live key blocks of the `n`th tile of the band that has so many granules to the tile's count.
template <int kGranules>
__device__ void add_to_tile_count(const Square& at, int32_t n, const SliceBits (&live)[kBandRows], int32_t* counts,
                                  int64_t tiles) {
  const int32_t tile = at.band * (kBandRows / kGranules) + n;
  if (tile >= tiles) return;
  uint4 any = live[n * kGranules].all;
#pragma unroll
  for (int g = 1; g < kGranules; ++g) {
    const uint4 more = live[n * kGranules + g].all;
    any = make_uint4(any.x | more.x, any.y | more.y, any.z | more.z, any.w | more.w);
  }
  const int32_t count = count_bits(any);
  if (count > 0) atomicAdd(counts + at.m * tiles + tile, count);
}

/// Adds the slice's live key blocks to the counts of the band's row granules and row tiles.
__device__ inline void add_to_counts(const Params& p, const Square& at, const SliceBits (&live)[kBandRows]) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < kBandRows)
    add_to_tile_count<1>(at, thread, live, p.at<int32_t>(p.layout.row_counts), p.layout.row_granules);
  // Rows past the last one have no bits, so a ragged last tile needs no care.
  if (thread < kBandRows / 2)
    add_to_tile_count<2>(at, thread, live, p.at<int32_t>(p.layout.row_tile_counts_128), p.layout.row_tiles_128);
  if (const int32_t n = kTransposeThreads - 1 - thread; n < kBandRows / 3)
    add_to_tile_count<3>(at, n, live, p.at<int32_t>(p.layout.row_tile_counts_192), p.layout.row_tiles_192);
}

/// A block for every band and slice of every mask.
__device__ __forceinline__ void transpose(const Params& p, int32_t bands, int32_t slices) {
  __shared__ SliceBits live[kBandRows], full[kBandRows];
  allow_next();
  wait_for_previous();
  const auto index = static_cast<int32_t>(blockIdx.x);
  const Square at{index / (bands * slices), index % (bands * slices) / slices, index % slices};
  transpose_key_block<PlanForm::kBits>(p, at, p.layout.key_live, live);
  transpose_key_block<PlanForm::kBits>(p, at, p.layout.key_full, full);
  __syncthreads();
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (const int32_t row = at.band * kBandRows + thread; thread < kBandRows && row < p.row_granules) {
    write_row(p, at, row, live[thread], p.at<uint64_t>(p.layout.row_live));
    write_row(p, at, row, full[thread], p.at<uint64_t>(p.layout.row_full));
  }
  add_to_counts(p, at, live);
}

/// Adds the bits of a slice to a row granule's runs.
__device__ inline void add_slice(RunWriter& runs, const SliceBits& bits, int32_t slice) {
#pragma unroll
  for (int n = 0; n < kSliceKeys / 32; ++n) runs.add(bits.word[n], slice * kSliceKeys + n * 32);
}

/// transpose in runs: a block for every band of every mask, which goes through all slices, as runs pass from one to
/// the next.
__device__ __forceinline__ void transpose_runs(const Params& p, int32_t bands, int32_t slices) {
  __shared__ SliceBits live[kBandRows], full[kBandRows];
  allow_next();
  wait_for_previous();
  const auto thread = static_cast<int32_t>(threadIdx.x), index = static_cast<int32_t>(blockIdx.x);
  Square at{index / bands, index % bands, 0};
  const int32_t row = at.band * kBandRows + thread;
  const bool has_row = thread < kBandRows && row < p.row_granules;
  const int64_t line = int64_t{at.m} * p.row_granules + row;
  RunWriter live_runs(line_runs(p, p.layout.row_live, line)), full_runs(line_runs(p, p.layout.row_full, line));
  for (; at.slice < slices; ++at.slice) {
    transpose_key_block<PlanForm::kRuns>(p, at, p.layout.key_live, live);
    transpose_key_block<PlanForm::kRuns>(p, at, p.layout.key_full, full);
    __syncthreads();
    if (has_row) {
      add_slice(live_runs, live[thread], at.slice);
      add_slice(full_runs, full[thread], at.slice);
    }
    add_to_counts(p, at, live);
    __syncthreads();
  }
  if (!has_row) return;
  finish_line(p, live_runs, p.key_blocks);
  finish_line(p, full_runs, p.key_blocks);
}

}  // namespace flashmask::cuda::plan
