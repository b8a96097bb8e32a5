// SPDX-License-Identifier: Apache-2.0

// Attention over caches on an emulated device, by the kernel set that FLASHMASK_KERNELS names: the covering list and
// drawn cases, every kernel with few rows and many, the same bits whatever turns threads take, no bank conflicts.

#include <gtest/gtest.h>

#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

#include "backends/cuda/sm80/decode/tile_config.h"
#include "flashmask/kv_cache.h"
#include "simt/runtime.h"
#include "support/extent.h"
#include "verify/cached_cases.h"
#include "verify/run_case.h"

namespace flashmask::test {
namespace {

using verify::AnyCase, verify::CachedCase;

const verify::RunOptions& options() {
  static const verify::RunOptions on_device{.backend = "cuda", .dense = {}};
  return on_device;
}

std::string failures_of(const CachedCase& c, const verify::Verdict& verdict) {
  std::string text = "case " + describe(c) + verdict.skipped;
  for (const std::string& failure : verdict.failures) text += "\n  " + failure;
  return text;
}

TEST(DecodeOnTheHost, CoveringAndDrawnCases) {
  std::vector<CachedCase> cases = verify::covering_cached_cases("cuda");
  for (int64_t n = 0; n < 100 / stride(); ++n) cases.push_back(verify::random_cached_case(2026, n, "cuda"));
  const std::vector<AnyCase> any(cases.begin(), cases.end());
  std::size_t skipped = 0;
  verify::run_cases(any, options(), 0, [&](std::size_t index, const verify::Verdict& verdict) {
    skipped += !verdict.skipped.empty();
    if (!verdict.passed()) ADD_FAILURE() << failures_of(cases[index], verdict);
  });
  EXPECT_LE(skipped, cases.size() / 3) << "too little is checked";
}

/// Requests of up to 16 packed rows, up to 32, and more, beside one without rows and one without keys.
CachedCase some_case(const sm80::DecodeTile& tile, DataType dtype, bool float8) {
  CachedCase c;
  c.seed = 11;
  c.tables = verify::CacheTables::kTable;
  c.page_size = 16;
  c.packed = true;
  c.keys = {391, 200, 130, 7, 0};
  c.rows = {2, 4, 19, 0, 1};
  c.heads_q = 14;
  c.heads_kv = 2;
  c.head_dim = tile.head_dim;
  c.head_dim_v = tile.head_dim_v;
  c.dtype = dtype;
  if (!float8) return c;
  c.float8 = true;
  c.k_scale = c.v_scale = verify::ScaleShape::kTokenHead;
  return c;
}

void expect_passes(const CachedCase& c) {
  const verify::Verdict verdict = run_case(c, options());
  EXPECT_EQ(verdict.skipped, "");
  EXPECT_TRUE(verdict.passed()) << "seed " << simt::seed() << ", " << failures_of(c, verdict);
}

TEST(DecodeOnTheHost, EveryKernelInWhateverTurns) {
  for (const sm80::DecodeTile& tile : sm80::kDecodeTiles) {
    for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat16}) {
      for (const bool float8 : {false, true}) {
        for (uint64_t seed = 1; seed <= (test_long() ? 10u : 1u); ++seed) {
          simt::set_seed(seed);
          expect_passes(some_case(tile, dtype, float8));
        }
      }
    }
  }
  simt::set_seed(0);
}

TEST(DecodeOnTheHost, WithoutBankConflicts) {
  for (const sm80::DecodeTile& tile : sm80::kDecodeTiles) {
    for (const bool float8 : {false, true}) {
      simt::drain_launches();
      expect_passes(some_case(tile, DataType::kBFloat16, float8));
      int64_t loads = 0;
      for (const simt::LaunchRecord& launch : simt::drain_launches()) {
        loads += launch.counts.matrix_loads;
        EXPECT_EQ(launch.counts.matrix_load_conflicts, 0) << launch.what << ", head dim " << tile.head_dim;
        EXPECT_EQ(launch.counts.copy_conflicts, 0) << launch.what << ", head dim " << tile.head_dim;
      }
      EXPECT_GT(loads, 0);
    }
  }
}

/// Rows of many requests in one sequence, of which some keys are seen by all, some by neighbours, and some by few.
TEST(DecodeOnTheHost, Forests) {
  for (const bool float8 : {false, true}) {
    for (const int64_t heads_q : {2, 8, 22}) {
      for (uint64_t seed = 1; seed <= (test_long() ? 20u : 2u); ++seed) {
        CachedCase c = some_case(sm80::kDecodeTiles[seed % 2], DataType::kBFloat16, float8);
        c.seed = seed;
        c.keys = {600};
        c.rows = {seed % 2 == 0 ? 70 : 33};
        c.heads_q = heads_q;
        c.vectors = 2;
        c.causal = false;
        c.vectors_by_head = seed % 2 == 0;
        expect_passes(c);
      }
    }
  }
}

/// A plan's places are those of the kernels that the device takes by itself.
TEST(DecodeOnTheHost, APlanIsForOneKernelSet) {
  constexpr Device kDevice{Device::Kind::kCuda, 0};
  std::vector<uint16_t> memory(16 * 64);
  const auto tensor = [&](std::initializer_list<int64_t> shape) {
    TensorView t = TensorView::contiguous(memory.data(), DataType::kBFloat16, shape);
    t.device = kDevice;
    return t;
  };
  CachedForwardArgs args;
  args.q = args.out = tensor({1, 1, 2, 64});
  args.cache.k = args.cache.v = tensor({1, 16, 1, 64});
  const Options other{.backend = "cuda", .kernels = "sm86"};
  if (std::getenv("FLASHMASK_KERNELS") == std::string("sm86")) GTEST_SKIP() << "the device runs no other";
  EXPECT_EQ(explain_cached(args, other).backend, "cuda");
  CachedPlan plan{.capacities = {.max_batch = 1,
                                 .max_rows = 1,
                                 .max_keys = 16,
                                 .heads_q = 2,
                                 .heads_kv = 1,
                                 .head_dim = 64,
                                 .head_dim_v = 64},
                  .buffer = {},
                  .device = kDevice};
  std::vector<std::byte> buffer(cached_plan_bytes(plan.capacities, plan.device));
  plan.buffer = buffer;
  build_cached_plan(args, plan);
  args.plan = &plan;
  EXPECT_EQ(explain_cached(args, {.backend = "cuda"}).backend, "cuda");
  const CachedExplanation said = explain_cached(args, other);
  EXPECT_EQ(said.backend, "");
  ASSERT_EQ(said.rejected.size(), 1u);
  EXPECT_NE(said.rejected[0].find("kernels 'sm86' (Options::kernels) read no plan of this device, which is for 'sm80'"),
            std::string::npos)
      << said.rejected[0];
}

}  // namespace
}  // namespace flashmask::test
