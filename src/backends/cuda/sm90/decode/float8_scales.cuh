// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/fragments/float8_units.cuh"
#include "backends/cuda/fragments/fragments.cuh"
#include "backends/cuda/fragments/softmax.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/decode/arrivals.cuh"
#include "backends/cuda/sm90/decode/traits.cuh"

namespace flashmask::sm90 {

/// Units and factors of a consumer warpgroup's rows over a cache of e4m3: rows of q in f16, each in a unit of its own;
/// a key's factor with its scores, a value's with its weights, in units that O is in.
template <typename Traits>
class Float8Scales {
 public:
  using Shared = DecodeShared<Traits>;
  using Element = typename Traits::Element;
  using Product = typename Traits::Product;
  using Scores = typename Traits::Scores;
  __device__ __forceinline__ Float8Scales(const DecodeParams& p, Shared& shared) : p_(p), shared_(shared) {}

  /// Turns the warp's 16 rows of q, which lie from `rows` on, into f16 in place, two lanes a row, and begins a unit.
  /// All warps of the warpgroup then have to meet before a product reads them.
  __device__ __forceinline__ void begin(unsigned char* rows, const Work& work) {
    const uint32_t lane = ptx::opaque(ptx::lane()), row = lane / 2, first_chunk = lane % 2 * kLaneChunks;
    const auto chunk_at = [&](int block, uint32_t chunk) {
      return reinterpret_cast<uint4*>(rows + block * Swizzle::block(Traits::kRows) + row * Swizzle::kRow +
                                      Swizzle::chunk(row, first_chunk + chunk));
    };
    uint32_t largest = 0;
    for_each_chunk([&](int block, uint32_t n) {
      float x[8];
      unpack(*chunk_at(block, n), x);
#pragma unroll
      for (const float each : x) largest = max(largest, __float_as_uint(each) & 0x7fffffff);
    });
    const auto unit = cuda::QueryUnit::of(max(largest, __shfl_xor_sync(0xffffffff, largest, 1)));
    for_each_chunk([&](int block, uint32_t n) {
      uint4* const at = chunk_at(block, n);
      float x[8];
      unpack(*at, x);
      const auto pair = [&](int i) { return ptx::pack<Product>(x[2 * i] * unit.factor, x[2 * i + 1] * unit.factor); };
      *at = make_uint4(pair(0), pair(1), pair(2), pair(3));
    });
    const float2 of_all = p_.has_factors_by_key() ? float2{1, 1} : p_.factors_of(work.tile.keys, work.kv_head);
    if (lane % 2 == 0) shared_.float8.q_unit[slab() + row] = unit.inverse * of_all.x;
    ptx::fence_async_proxy();
    of_values_ = of_all.y;
    unit_[0] = unit_[1] = {};
  }

  /// Waits for the n-th tile's factors.
  __device__ __forceinline__ void wait(uint32_t n) const {
    if (p_.has_factors_by_key()) ptx::wait(shared_.float8.factors_full[Ring{n}.stage()], Ring{n}.phase());
  }
  __device__ __forceinline__ void release(uint32_t n) const {
    if (p_.has_factors_by_key()) arrive_warp(shared_.float8.factors_empty[Ring{n}.stage()]);
  }

  /// Makes scores of the n-th tile's products: rows lack their units, keys their factors.
  __device__ __forceinline__ void scale_scores(uint32_t n, Scores& s) const {
    const int row = slab() + cuda::Slab::row_in_eight();
    const float unit[2] = {shared_.float8.q_unit[row], shared_.float8.q_unit[row + 8]};
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= unit[i / 2 % 2];
    if (p_.has_factors_by_key()) multiply(s, factors_of(n).k);
  }

  /// Multiplies the n-th tile's weights by the values' factors, in their rows' units. True if O goes over to others, by
  /// multiplication by `change`.
  __device__ __forceinline__ bool scale_weights(uint32_t n, Scores& s, float (&change)[2]) {
    if (!p_.v_scale.data) return false;
    if (p_.has_factors_by_key()) multiply(s, factors_of(n).v);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = 0;
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (i / 2 % 2 == half) largest = fmaxf(largest, fabsf(s[i]));
      const cuda::RowUnit before = unit_[half];
      unit_[half] = before.after(cuda::quad_max(largest * fabsf(of_values_)));
      change[half] = before.change_to(unit_[half]);
      // Before a row's first product the inverse is near the largest number, and 0 times infinity would be NaN.
      const float factor = unit_[half].is_set() ? of_values_ * unit_[half].inverse() : 0;
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (i / 2 % 2 == half) s[i] *= factor;
    }
    return __any_sync(0xffffffff, change[0] != 1 || change[1] != 1);
  }

  /// Gives O its units.
  __device__ __forceinline__ void finish(typename Traits::Outputs& o) const {
    if (!p_.v_scale.data) return;
    const float unit[2] = {unit_[0].value(), unit_[1].value()};
    cuda::RowState::rescale(o, unit);
  }

 private:
  using Swizzle = ptx::Swizzle128;
  using Ring = ptx::RingPosition<Float8Shared<Traits>::kFactors>;
  static constexpr int kScores = sizeof(Scores) / sizeof(float);
  static constexpr uint32_t kLaneChunks = 4;  ///< a lane has in a block of 64 columns

  /// The warp's first row of the tile.
  __device__ __forceinline__ static int slab() { return cuda::Slab::kRows * static_cast<int>(threadIdx.x / 32); }
  __device__ __forceinline__ const TileFactors& factors_of(uint32_t n) const {
    return shared_.float8.factors[Ring{n}.stage()];
  }
  __device__ __forceinline__ static void multiply(Scores& s, const float (&factors)[cuda::kBlockKeys]) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= factors[cuda::Slab::column(i)];
  }
  /// Calls f with the block and number of each of the lane's chunks.
  template <typename F>
  __device__ __forceinline__ static void for_each_chunk(const F& f) {
#pragma unroll
    for (int block = 0; block < Traits::kQkBlocks; ++block) {
#pragma unroll
      for (uint32_t n = 0; n < kLaneChunks; ++n) f(block, n);
    }
  }
  __device__ __forceinline__ static void unpack(const uint4& chunk, float (&x)[8]) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const auto bits = static_cast<uint16_t>(words[n / 2] >> 16 * (n % 2));
      x[n] = static_cast<float>(reinterpret_cast<const Element&>(bits));
    }
  }

  const DecodeParams& p_;
  Shared& shared_;
  float of_values_ = 1;  ///< the factor of all of a unit's values, or 1
  cuda::RowUnit unit_[2];
};

/// In its place where a cache holds numbers of the products' type.
template <typename Traits>
struct NoScales {
  __device__ __forceinline__ NoScales(const DecodeParams&, DecodeShared<Traits>&) {}
};

}  // namespace flashmask::sm90
