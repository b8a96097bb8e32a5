// SPDX-License-Identifier: Apache-2.0

// The cpu backend's kernels over caches for every instruction set that this machine has. Vectors of 4 to 16 floats end
// rows of odd head dims in other places.

#include <gtest/gtest.h>

#include "cache/cached_call.h"
#include "support/instruction_sets.h"

namespace flashmask::test {
namespace {

void check(const CachedShape& shape, double tolerance) {
  const CachedCase c(shape, 7);
  LaidOutCall call(c, {.page_size = 16});
  call.options.backend = "cpu";
  call.run().expect_right(tolerance);
}

TEST(CachedTargets, EveryInstructionSetOfThisMachine) {
  for_every_instruction_set([] {
    for (const auto& [dim, dim_v] : {std::pair<int64_t, int64_t>{24, 24}, {8, 40}, {37, 50}, {64, 16}, {72, 8}}) {
      SCOPED_TRACE(testing::Message() << "head dims " << dim << " and " << dim_v);
      check({.head_dim = dim, .head_dim_v = dim_v}, 2e-5);
      check({.head_dim = dim, .head_dim_v = dim_v, .dtype = DataType::kBFloat16, .cache_dtype = DataType::kBFloat16},
            2e-2);
    }
  });
}

}  // namespace
}  // namespace flashmask::test
