// SPDX-License-Identifier: Apache-2.0

// Vectors and panels of them, rows of floats, and a thread's scratch.

// Included by tile_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_SIMD_INL_H_
#undef FLASHMASK_BACKENDS_CPU_SIMD_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <limits>

#include "backends/cpu/tile_kernels.h"
#include "common/arithmetic.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;
using Words = hn::Rebind<uint32_t, Floats>;
using Vec = hn::Vec<Floats>;
constexpr Floats kFloats;
constexpr Words kWords;

/// Lanes of a vector, columns of a panel, and how many broadcast rows a product handles at once: as many
/// accumulators as the registers hold beside the operands.
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(kFloats));
constexpr int64_t kWidth = 2 * kLanes;
constexpr int kBroadcast = HWY_TARGET <= HWY_AVX3 ? 12 : 6;
static_assert(kTileRows % kWidth == 0 && kTileKeys % kWidth == 0 && kMaxWidth % kWidth == 0);

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Row length of a float32 tile: an odd number of cache lines.
constexpr int64_t padded(int64_t n) { return round_up(n, 16) / 16 % 2 == 1 ? round_up(n, 16) : round_up(n, 16) + 16; }

/// Parts of a thread's scratch, handed out in order; of none (null) they are only counted.
class Scratch {
 public:
  explicit Scratch(float* begin) : begin_(begin) {}
  float* take(int64_t count) {
    float* part = begin_ ? begin_ + taken_ : nullptr;
    taken_ += round_up(count, 16);
    return part;
  }
  int64_t taken() const { return taken_; }

 private:
  float* begin_;
  int64_t taken_ = 0;
};

/// Rows of floats in memory: row n begins at `at + n * stride`.
struct Rows {
  float* at;
  int64_t stride;
  Rows columns_from(int64_t c) const { return {at + c, stride}; }
};

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_SIMD_INL_H_
