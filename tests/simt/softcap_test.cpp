// SPDX-License-Identifier: Apache-2.0

// The tanh of a softcap: its digits, also where scores are far below the softcap.

#include "backends/cuda/device/softcap.cuh"

#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace flashmask::test {
namespace {

/// The largest relative error of `tanh` over magnitudes of y from 1e-30 to where tanh is 1, of either sign.
template <typename Function>
double largest_error(Function tanh) {
  double largest = 0;
  for (double y = 1e-30; y < 40; y *= 1.003) {
    for (const float x : {static_cast<float>(y), static_cast<float>(-y)}) {
      const double want = std::tanh(static_cast<double>(x));
      largest = std::max(largest, std::fabs(tanh(x) - want) / std::fabs(want));
    }
  }
  return largest;
}

TEST(Softcap, HasTheDigitsOfAProduct) {
  EXPECT_LE(largest_error(cuda::element_tanh<__nv_bfloat16>), 0x1p-11);
  EXPECT_LE(largest_error(cuda::element_tanh<__half>), 4e-5);
  EXPECT_EQ(cuda::element_tanh<__half>(INFINITY), 1);
  EXPECT_EQ(cuda::element_tanh<__half>(-INFINITY), -1);
  EXPECT_TRUE(std::isnan(cuda::element_tanh<__half>(NAN)));
}

}  // namespace
}  // namespace flashmask::test
