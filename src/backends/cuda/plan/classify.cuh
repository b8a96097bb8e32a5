// SPDX-License-Identifier: Apache-2.0
#pragma once

// The first kernel of the planner: for every key block its bits over the row granules and its count, and what its
// contents add to the mask's hash.

#include <cstdint>

#include "backends/cuda/plan/params.cuh"
#include "mask/content_hash.h"
#include "mask/rules.h"

namespace flashmask::cuda::plan {

inline constexpr int kClassifyThreads = kGranuleKeys;  // a thread loads a column
inline constexpr int kGranulesPerThread = 16;          // and then decides on 16 granules: a piece of a word of bits
/// Row granules whose events are in shared memory at a time.
inline constexpr int kWindowGranules = kClassifyThreads * kGranulesPerThread;

/// Difference arrays over a window of row granules: how many columns begin (+1) or cease (-1) to be hidden from whole
/// granules, and to touch granules. Both are in one number, 1 and 2^16: a prefix sum is `covered + 65536 * touched`
/// modulo 2^32 whatever the single entries borrow from each other, and both sums are in [0, 4 * 128], so it can be
/// taken apart.
class Events {
 public:
  static constexpr int32_t kCovered = 1, kTouched = 1 << 16;

  __device__ explicit Events(int4 (&pieces)[kWindowGranules / 4]) : pieces_(pieces) {}

  /// Called by whole warps.
  __device__ void add(rules::Interval granules, int32_t value, int32_t window) {
    const int32_t begin = max(granules.begin - window, 0), end = granules.end - window;
    const bool some = begin < end && begin < kWindowGranules;
    add(some ? begin : -1, value);
    add(some && end < kWindowGranules ? end : -1, -value);
  }

  /// The events of the calling thread's granules, which are cleared.
  __device__ void take(int32_t (&out)[kGranulesPerThread]) {
#pragma unroll
    for (int n = 0; n < kGranulesPerThread / 4; ++n) {
      int4& piece = pieces_[piece_of(threadIdx.x, n)];
      out[4 * n] = piece.x;
      out[4 * n + 1] = piece.y;
      out[4 * n + 2] = piece.z;
      out[4 * n + 3] = piece.w;
      piece = make_int4(0, 0, 0, 0);
    }
  }

 private:
  /// A thread's four pieces are turned by its index, so that eight neighbours read from all banks.
  __device__ static uint32_t piece_of(uint32_t thread, uint32_t n) { return thread * 4 + (n + thread / 2) % 4; }

  /// Neighbouring columns are often alike: then one lane adds for its whole warp.
  __device__ void add(int32_t granule, int32_t value) {
    int alike;
    __match_all_sync(0xffffffff, granule, &alike);
    if (granule < 0 || (alike && threadIdx.x % 32 != 0)) return;
    const auto at = static_cast<uint32_t>(granule);
    auto* piece = reinterpret_cast<int32_t*>(&pieces_[piece_of(at / kGranulesPerThread, at / 4 % 4)]);
    atomicAdd(piece + at % 4, alike ? 32 * value : value);
  }

  int4 (&pieces_)[kWindowGranules / 4];
};

/// Sums over the warps before the calling thread's, and over the lanes before it: an exclusive prefix sum.
__device__ inline int32_t sum_before(int32_t value, int32_t (&of_warps)[kClassifyThreads / 32]) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t sum = value;
#pragma unroll
  for (uint32_t distance = 1; distance < 32; distance *= 2) {
    const int32_t before = __shfl_up_sync(0xffffffff, sum, distance);
    if (lane >= distance) sum += before;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  sum -= value;
#pragma unroll
  for (uint32_t w = 0; w + 1 < kClassifyThreads / 32; ++w) sum += w < warp ? of_warps[w] : 0;
  return sum;
}

/// Bits of one thread's granules.
struct GranuleBits {
  uint32_t live = 0, full = 0;
};

__device__ inline GranuleBits bits_of(const int32_t (&events)[kGranulesPerThread], int32_t before, int32_t columns) {
  GranuleBits bits;
  auto state = static_cast<uint32_t>(before);
#pragma unroll
  for (int n = 0; n < kGranulesPerThread; ++n) {
    state += static_cast<uint32_t>(events[n]);
    bits.live |= static_cast<uint32_t>(rules::is_live(static_cast<int32_t>(state & 0xffff), columns)) << n;
    bits.full |= static_cast<uint32_t>(rules::is_full(static_cast<int32_t>(state >> 16))) << n;
  }
  return bits;
}

/// One key block of one mask, by one thread block.
class KeyBlock {
 public:
  __device__ KeyBlock(const Params& p, int32_t m, int32_t c) : p_(p), m_(m), c_(c) {
    key_ = c * static_cast<int32_t>(kGranuleKeys) + static_cast<int32_t>(threadIdx.x);  // below 2^31: c < 2^24
    columns_ = min(static_cast<int32_t>(p.mask.seqlen_k) - c * static_cast<int32_t>(kGranuleKeys),
                   static_cast<int32_t>(kGranuleKeys));
  }

  /// Loads the calling thread's column.
  __device__ void load() {
    if (key_ >= p_.mask.seqlen_k) return;
    const Own own = own_of(p_, m_, p_.bounds);
    const rules::Columns columns = own_columns(p_.mask, own.index);
    hidden_ = rules::merge(rules::hidden_rows(columns, key_));
    if (!own.first) return;
    using enum content_hash::Source;
    const int64_t at = key_ * columns.stride, position = first_column(p_.mask, own.index) + key_;
    const auto add = [&](content_hash::Source source, const int32_t* vector) {
      if (vector) hash_ += content_hash::element(source, position, static_cast<uint32_t>(vector[at]));
    };
    add(kLts, columns.lts);
    add(kLte, columns.lte);
    add(kUts, columns.uts);
    add(kUte, columns.ute);
  }

  __device__ void add_events(Events events, int32_t window) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const rules::Interval hidden = hidden_.interval[n];
      const bool some = hidden.begin < hidden.end;
      if (!__any_sync(0xffffffff, some)) continue;
      const auto granules = [some](rules::Interval tiles) { return some ? tiles : rules::Interval{0, 0}; };
      events.add(granules(rules::covered_tiles(hidden, kGranuleRows, static_cast<int32_t>(p_.mask.seqlen_q))),
                 Events::kCovered, window);
      events.add(granules(rules::touched_tiles(hidden, kGranuleRows)), Events::kTouched, window);
    }
  }

  /// The bits of the calling thread's granules, `first` and on: none past the last.
  __device__ GranuleBits judge(const int32_t (&events)[kGranulesPerThread], int32_t before, int32_t first) {
    if (first >= p_.row_granules) return {};
    GranuleBits bits = bits_of(events, before, columns_);
    if (p_.mask.block_mask) clear_blocks(bits, first);
    const auto existing = rules::low_bits<uint32_t>(min(p_.row_granules - first, kGranulesPerThread));
    live_granules_ += __popc(bits.live & existing);
    return {bits.live & existing, bits.full & existing};
  }

  __device__ void write(const GranuleBits& bits, int32_t first) const {
    const int32_t pieces = static_cast<int32_t>(p_.layout.words_per_key) * (64 / kGranulesPerThread);
    const int32_t piece = first / kGranulesPerThread;
    if (piece >= pieces) return;
    const int64_t at = index() * pieces + piece;
    p_.at<uint16_t>(p_.layout.key_live)[at] = static_cast<uint16_t>(bits.live);
    p_.at<uint16_t>(p_.layout.key_full)[at] = static_cast<uint16_t>(bits.full);
  }

  /// Adds up over the threads and writes the sums.
  __device__ void write_sums(int32_t (&of_warps)[kClassifyThreads / 32],
                             uint64_t (&hash_of_warps)[kClassifyThreads / 32]) {
    auto hash = static_cast<unsigned long long>(hash_);
    for (int distance = 16; distance > 0; distance /= 2) {
      live_granules_ += __shfl_xor_sync(0xffffffff, live_granules_, distance);
      hash += __shfl_xor_sync(0xffffffff, hash, distance);
    }
    __syncthreads();  // of_warps held prefix sums
    if (threadIdx.x % 32 == 0) {
      of_warps[threadIdx.x / 32] = live_granules_;
      hash_of_warps[threadIdx.x / 32] = hash;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    p_.at<int32_t>(p_.layout.key_counts)[index()] = of_warps[0] + of_warps[1] + of_warps[2] + of_warps[3];
    p_.at<uint64_t>(p_.layout.scratch)[index()] =
        hash_of_warps[0] + hash_of_warps[1] + hash_of_warps[2] + hash_of_warps[3];
  }

  /// The key block's number over all masks.
  __device__ int64_t index() const { return int64_t{m_} * p_.key_blocks + c_; }

 private:
  /// Granules in blocks that the block mask clears are neither live nor full.
  __device__ void clear_blocks(GranuleBits& bits, int32_t first) {
    constexpr int kPerBlock = kBlockMaskSize / kGranuleRows;
    const Own own = own_of(p_, m_, p_.blocks);
    const int64_t begin = first_block(p_.mask, own.index);
#pragma unroll 1  // rarely run, so let it be short
    for (int n = 0; n < kGranulesPerThread / kPerBlock && first + n * kPerBlock < p_.row_granules; ++n) {
      const int64_t at = begin + int64_t{first / kPerBlock + n} * p_.key_blocks + c_;
      const uint8_t keep = p_.mask.block_mask[at];
      if (own.first) hash_ += content_hash::element(content_hash::Source::kBlockMask, at, keep);
      if (keep) continue;
      const uint32_t others = ~(rules::low_bits<uint32_t>(kPerBlock) << (n * kPerBlock));
      bits.live &= others;
      bits.full &= others;
    }
  }

  const Params& p_;
  int32_t m_, c_, key_, columns_;
  int32_t live_granules_ = 0;
  uint64_t hash_ = 0;
  rules::HiddenRows hidden_{};
};

__device__ inline void zero(int32_t* values, int64_t count) {
  for (int64_t n = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; n < count; n += int64_t{gridDim.x} * blockDim.x)
    values[n] = 0;
}

/// Zeroes the counts of rows, which later kernels add to: by all blocks.
__device__ __forceinline__ void clear_row_counts(const Params& p) {
  const int64_t masks = p.layout.batch * p.layout.heads;
  zero(p.at<int32_t>(p.layout.row_counts), masks * p.layout.row_granules);
  zero(p.at<int32_t>(p.layout.row_tile_counts_128), masks * p.layout.row_tiles_128);
  zero(p.at<int32_t>(p.layout.row_tile_counts_192), masks * p.layout.row_tiles_192);
}

/// Writes a key block's granules as bits.
class KeyBlockBits {
 public:
  struct Shared {};
  __device__ KeyBlockBits(const Params&, const KeyBlock& block, Shared&) : block_(block) {}

  __device__ void write(const GranuleBits& bits, int32_t window) const {
    block_.write(bits, window + static_cast<int32_t>(threadIdx.x) * kGranulesPerThread);
  }
  __device__ void finish() const {}

 private:
  const KeyBlock& block_;
};

/// Writes a key block's granules as runs: a window's bits meet in shared memory, where one thread reads the live ones
/// and another the full ones.
class KeyBlockRuns {
 public:
  static constexpr int kWords = kWindowGranules / 32;
  struct Shared {
    uint32_t words[2][kWords];  ///< live, full
  };
  __device__ KeyBlockRuns(const Params& p, const KeyBlock& block, Shared& shared)
      : p_(p),
        shared_(shared),
        which_(static_cast<int32_t>(threadIdx.x / 32)),
        is_writer_(threadIdx.x % 32 == 0 && which_ < 2),
        runs_(line_runs(p, which_ == 0 ? p.layout.key_live : p.layout.key_full, block.index())) {}

  /// Has a barrier; the next call comes after another one.
  __device__ void write(const GranuleBits& bits, int32_t window) {
    static_assert(2 * kGranulesPerThread == 32);
    reinterpret_cast<uint16_t*>(shared_.words[0])[threadIdx.x] = static_cast<uint16_t>(bits.live);
    reinterpret_cast<uint16_t*>(shared_.words[1])[threadIdx.x] = static_cast<uint16_t>(bits.full);
    __syncthreads();
    if (!is_writer_) return;
    for (int32_t n = 0; n < kWords && window + n * 32 < p_.row_granules; ++n)
      runs_.add(shared_.words[which_][n], window + n * 32);
  }
  __device__ void finish() {
    if (is_writer_) finish_line(p_, runs_, p_.row_granules);
  }

 private:
  const Params& p_;
  Shared& shared_;
  int32_t which_;
  bool is_writer_;
  RunWriter runs_;
};

/// A block for every key block of every mask, at least one.
template <typename Writer>
__device__ __forceinline__ void classify(const Params& p) {
  allow_next();
  clear_row_counts(p);
  if (p.key_blocks == 0) return;

  __shared__ int4 pieces[kWindowGranules / 4];
  __shared__ int32_t of_warps[kClassifyThreads / 32];
  __shared__ uint64_t hash_of_warps[kClassifyThreads / 32];
  __shared__ typename Writer::Shared shared;
  const auto index = static_cast<int32_t>(blockIdx.x);
  KeyBlock block(p, index / p.key_blocks, index % p.key_blocks);
  Writer writer(p, block, shared);
  Events events(pieces);
  int32_t own[kGranulesPerThread];
  for (int n = threadIdx.x; n < kWindowGranules / 4; n += kClassifyThreads) pieces[n] = make_int4(0, 0, 0, 0);
  block.load();
  __syncthreads();
  for (int32_t window = 0; window < p.row_granules; window += kWindowGranules) {
    block.add_events(events, window);
    __syncthreads();
    events.take(own);
    int32_t sum = 0;
#pragma unroll
    for (int n = 0; n < kGranulesPerThread; ++n) sum += own[n];
    const int32_t before = sum_before(sum, of_warps);  // has a barrier: all events are taken when it returns
    writer.write(block.judge(own, before, window + static_cast<int32_t>(threadIdx.x) * kGranulesPerThread), window);
  }
  writer.finish();
  block.write_sums(of_warps, hash_of_warps);
}

}  // namespace flashmask::cuda::plan
