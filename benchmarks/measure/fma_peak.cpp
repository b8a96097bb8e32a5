// SPDX-License-Identifier: Apache-2.0

// Measures the peak of float32 multiply-adds on this machine, with the instruction set that the CPU backend chooses:
//
//   fma_peak THREADS MILLISECONDS
//
// prints the GFLOP/s (two FLOP a multiply-add) of THREADS threads that do nothing else for at least MILLISECONDS, and
// the instruction set.

// The CPU backend has no kernels of SVE, whose vectors cannot be in arrays either.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif

// The order of these matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fma_peak.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <chrono>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace flashmask::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// Independent sums: more than latency times ports anywhere, and with both factors no more than AVX2's registers.
constexpr int kSums = 12;

/// `steps` multiply-adds in every lane of every sum. Returns floating-point operations; `result` keeps the work from
/// being left out.
double multiply_add(int64_t steps, float* result) {
  const hn::ScalableTag<float> floats;
  // Sums converge to 2: nothing overflows or becomes subnormal, whose arithmetic can be slower.
  const auto half = hn::Set(floats, 0.5f), one = hn::Set(floats, 1.0f);
  hn::Vec<decltype(floats)> sum[kSums];
  for (int i = 0; i < kSums; ++i) sum[i] = hn::Set(floats, static_cast<float>(i));
  for (int64_t n = 0; n < steps; ++n) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sum[i] = hn::MulAdd(sum[i], half, one);
  }
  for (int i = 1; i < kSums; ++i) sum[0] = hn::Add(sum[0], sum[i]);
  hn::StoreU(sum[0], floats, result);
  return 2.0 * kSums * static_cast<double>(hn::Lanes(floats)) * static_cast<double>(steps);
}

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace flashmask::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <omp.h>

#include <cstdio>
#include <cstdlib>

namespace flashmask {

HWY_EXPORT(multiply_add);
HWY_EXPORT(target_name);

/// GFLOP/s of all threads together over one stretch of time, from the first to begin to the last to end.
double gflops(int threads, double milliseconds) {
  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double, std::milli> least(milliseconds);
  double operations = 0;
  const auto begin = Clock::now();
#pragma omp parallel num_threads(threads) reduction(+ : operations)
  {
    float result[16];  // the longest vector, AVX-512's
    do operations += HWY_DYNAMIC_DISPATCH(multiply_add)(100'000, result);
    while (Clock::now() - begin < least);
  }
  return operations / std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

const char* simd_target() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace flashmask

int main(int count, char** arguments) {
  const int threads = count == 3 ? std::atoi(arguments[1]) : 0;
  const double milliseconds = count == 3 ? std::atof(arguments[2]) : 0;
  if (threads < 1 || milliseconds <= 0) {
    std::fprintf(stderr, "usage: fma_peak THREADS MILLISECONDS\n");
    return 2;
  }
  flashmask::gflops(threads, 20);  // starts the threads, and the clock of wide vectors
  std::printf("%.1f %s\n", flashmask::gflops(threads, milliseconds), flashmask::simd_target());
}
#endif  // HWY_ONCE
