// SPDX-License-Identifier: Apache-2.0

// Attention on an emulated device, by the kernel set that FLASHMASK_KERNELS names: the covering list, under matrices of
// the second rule; cases at the limits of accuracy; the same bits whatever turns threads take; no bank conflicts.

#include <gtest/gtest.h>

#include <compare>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/sm80/tile_config.h"
#include "simt/runtime.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "verify/case_masks.h"
#include "verify/covering_cases.h"
#include "verify/run_case.h"

namespace flashmask::test {
namespace {

using verify::Case;
using verify::DenseMask;

/// Multiply-adds of a case's products that every run has time for.
constexpr int64_t kMostCost = int64_t{1} << 23;
/// Every n-th case below that cost is run. The two emulated devices take turns, so each runs half of them.
constexpr std::size_t kEvery = 20;

/// The index of the emulated device.
std::size_t device() {
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  return text ? static_cast<std::size_t>(std::atoi(text)) : 0;
}

DenseMask dense_mask_by_rule(const Case& c) {
  const Mask mask = verify::make_mask(c);
  MaskParts parts = parts_of(mask);
  if (c.q_offset) parts.q_offset = c.q_offset;
  return {mask.batch(), mask.heads(), dense_by_rule(parts)};
}

const verify::RunOptions& options() {
  static const verify::RunOptions on_device{.backend = "cuda", .dense = dense_mask_by_rule};
  return on_device;
}

std::string failures_of(const Case& c, const verify::Verdict& verdict) {
  std::string text = "case " + describe(c);
  for (const std::string& failure : verdict.failures) text += "\n  " + failure;
  return text;
}

void expect_passes(const Case& c) {
  const verify::Verdict verdict = run_case(c, options());
  EXPECT_EQ(verdict.skipped, "");
  EXPECT_TRUE(verdict.passed()) << failures_of(c, verdict);
}

TEST(OnTheHost, CoveringList) {
  std::vector<Case> cases;
  std::size_t cheap = 0;
  const std::size_t every = kEvery * static_cast<std::size_t>(stride());
  for (const Case& c : verify::covering_cases(verify::cuda_values())) {
    if (test_long() || (c.cost() <= kMostCost && cheap++ % (2 * every) == device() % 2 * every)) cases.push_back(c);
  }
  std::size_t skipped = 0, forward_only = 0;
  verify::run_cases(cases, options(), 0, [&](std::size_t index, const verify::Verdict& verdict) {
    skipped += !verdict.skipped.empty();
    forward_only += verdict.forward_only;
    if (!verdict.passed()) ADD_FAILURE() << failures_of(cases[index], verdict);
  });
  std::printf("%zu cases, %zu of them skipped, %zu forward only\n", cases.size(), skipped, forward_only);
  EXPECT_LE(skipped, cases.size() / 10) << "too little is checked";
}

/// A mask with empty, full and partial tiles and ragged ends.
Case some_case(int64_t head_dim, int64_t head_dim_v, DataType dtype) {
  Case c;
  c.family = "causal_document";
  c.seed = 7;
  c.seqlen_q = c.seqlen_k = 391;
  c.heads_q = 2;
  c.heads_kv = 1;
  c.head_dim = head_dim;
  c.head_dim_v = head_dim_v;
  c.dtype = dtype;
  return c;
}

struct HeadDims {
  int64_t head_dim, head_dim_v;
  auto operator<=>(const HeadDims&) const = default;
};

/// Head dims in the table of tiles.
std::set<HeadDims> head_dims() {
  std::set<HeadDims> all;
  for (const sm80::ForwardTile& tile : sm80::kForwardTiles) all.insert({tile.head_dim, tile.head_dim_v});
  return all;
}

TEST(OnTheHost, InWhateverTurns) {
  for (const HeadDims dims : head_dims()) {
    const Case c = some_case(dims.head_dim, dims.head_dim_v, DataType::kBFloat16);
    for (uint64_t seed = 1; seed <= (test_long() ? 10u : 1u); ++seed) {
      simt::set_seed(seed);
      const verify::Verdict verdict = run_case(c, options());
      EXPECT_EQ(verdict.skipped, "");
      EXPECT_TRUE(verdict.passed()) << "seed " << seed << ", " << failures_of(c, verdict);
    }
  }
  simt::set_seed(0);
}

/// Random cases in which each rounding shows: few rows of a head see keys, float16 under a softcap, and few large
/// numbers, after dropout and without; one in which keys that nobody sees would change the unit of dq's sums; and two
/// that are parts of a whole, by whose numbers dropout keeps weights.
constexpr std::string_view kHardCases[] = {
    "family=padding seed=16003417368406244727 batch=2 seqlen_q=65 seqlen_k=23 heads_q=21 heads_kv=3 head_dim=16 "
    "head_dim_v=16 dtype=float16 mask_heads=q mask_batch=1 block_mask=none layout=bshd dout=expanded dlse=no plan=yes "
    "scale=0.12662684276010397 dropout=0.47545197675792944",
    "family=prefix_lm_document seed=6481328028366665360 batch=2 seqlen_q=416 seqlen_k=2 heads_q=4 heads_kv=4 "
    "head_dim=232 head_dim_v=8 dtype=bfloat16 mask_heads=q mask_batch=batch block_mask=each layout=bhsd dout=normal "
    "dlse=no plan=no window=0,1 sink=float32",
    "family=eagle3_ttt seed=3951575410411566230 batch=2 seqlen_q=19 seqlen_k=19 heads_q=9 heads_kv=3 head_dim=72 "
    "head_dim_v=72 dtype=float16 mask_heads=kv mask_batch=1 block_mask=none layout=bhsd dout=normal dlse=no plan=yes "
    "scale=0.16268502908337656 sink=own dropout=0.6922177921439273",
    "family=dflash seed=12550543619238019563 batch=1 seqlen_q=35 seqlen_k=35 heads_q=21 heads_kv=3 head_dim=64 "
    "head_dim_v=40 dtype=float16 mask_heads=kv mask_batch=1 block_mask=shared layout=bhsd dout=normal dlse=yes "
    "plan=yes sink=own",
    "family=full seed=3212741114634750480 batch=2 seqlen_q=66 seqlen_k=192 heads_q=14 heads_kv=2 head_dim=8 "
    "head_dim_v=8 dtype=float16 mask_heads=q mask_batch=batch block_mask=none layout=bshd dout=expanded dlse=yes "
    "plan=yes softcap=8.560281458837743 positions=each",
    "family=dflash seed=3487915640764971624 batch=5 seqlen_q=64 seqlen_k=192 heads_q=1 heads_kv=1 head_dim=32 "
    "head_dim_v=32 dtype=float16 mask_heads=1 mask_batch=1 block_mask=each layout=aligned dout=normal dlse=no plan=no "
    "partial=yes",
    "family=eagle3_ttt seed=15547040765805896477 batch=2 seqlen_q=495 seqlen_k=32 heads_q=3 heads_kv=3 head_dim=8 "
    "head_dim_v=8 dtype=float16 mask_heads=1 mask_batch=batch block_mask=each layout=bhsd dout=normal dlse=yes plan=no "
    "q_offset=-57 softcap=29.46250488859685 dropout=0.718081433410692",
    "family=attention_sink_window seed=10974498586958485470 batch=1 seqlen_q=21 seqlen_k=127 heads_q=1 heads_kv=1 "
    "head_dim=96 head_dim_v=16 dtype=float16 mask_heads=1 mask_batch=1 block_mask=none layout=bhsd dout=normal "
    "dlse=yes plan=no q_offset=86 sink=float32 dropout=0.6826540278115041",
    "family=document seed=11 batch=2 seqlen_q=205 seqlen_k=205 heads_q=4 heads_kv=2 head_dim=64 head_dim_v=64 "
    "dtype=bfloat16 mask_heads=1 mask_batch=1 block_mask=none layout=bshd dout=normal dlse=yes plan=yes dropout=0.4 "
    "part=each",
    "family=full seed=12 batch=2 seqlen_q=70 seqlen_k=301 heads_q=2 heads_kv=1 head_dim=128 head_dim_v=128 "
    "dtype=float16 mask_heads=1 mask_batch=1 block_mask=none layout=bshd dout=normal dlse=no plan=no softcap=20 "
    "dropout=0.25 part=shared",
};

TEST(OnTheHost, HardCases) {
  for (const std::string_view line : kHardCases) expect_passes(verify::parse_case(line));
}

/// Masks of interval lists, whose tiles' elements come from the plan's bits.
constexpr std::string_view kListCases[] = {
    "family=random_matrix seed=1 batch=2 seqlen_q=193 seqlen_k=321 heads_q=4 heads_kv=2 head_dim=64 head_dim_v=64 "
    "dtype=bfloat16 mask_heads=q mask_batch=batch block_mask=each layout=bhsd dout=normal dlse=yes plan=yes sink=own",
    "family=random_matrix seed=2 batch=2 seqlen_q=300 seqlen_k=129 heads_q=4 heads_kv=2 head_dim=128 head_dim_v=128 "
    "dtype=float16 mask_heads=kv mask_batch=1 block_mask=none layout=bshd dout=normal dlse=no plan=no positions=each",
    "family=random_matrix seed=3 batch=1 seqlen_q=65 seqlen_k=300 heads_q=2 heads_kv=2 head_dim=256 head_dim_v=256 "
    "dtype=bfloat16 mask_heads=1 mask_batch=1 block_mask=none layout=aligned dout=normal dlse=no plan=yes "
    "softcap=8.5 dropout=0.3",
    "family=dilated seed=4 batch=1 seqlen_q=391 seqlen_k=391 heads_q=2 heads_kv=1 head_dim=96 head_dim_v=96 "
    "dtype=float16 mask_heads=1 mask_batch=1 block_mask=none layout=bshd dout=normal dlse=yes plan=no window=100,3",
    "family=neighborhood_2d seed=5 batch=1 seqlen_q=400 seqlen_k=400 heads_q=2 heads_kv=1 head_dim=40 head_dim_v=24 "
    "dtype=bfloat16 mask_heads=1 mask_batch=1 block_mask=none layout=bshd dout=normal dlse=no plan=yes partial=yes",
};

TEST(OnTheHost, IntervalLists) {
  for (const std::string_view line : kListCases) {
    const Case c = verify::parse_case(line);
    EXPECT_TRUE(verify::make_mask(c).has_interval_lists()) << line;
    expect_passes(c);
  }
}

/// Keys of several words of a plan's bits, 32 blocks each: all of them, and the first and the last with none between.
constexpr std::string_view kLongCases[] = {
    "family=full seed=21 batch=1 seqlen_q=70 seqlen_k=8300 heads_q=1 heads_kv=1 head_dim=64 head_dim_v=64 "
    "dtype=bfloat16 mask_heads=1 mask_batch=1 block_mask=none layout=bshd dout=normal dlse=no plan=yes",
    "family=attention_sink_window seed=22 batch=1 seqlen_q=130 seqlen_k=12500 heads_q=1 heads_kv=1 head_dim=96 "
    "head_dim_v=96 dtype=float16 mask_heads=1 mask_batch=1 block_mask=none layout=bshd dout=normal dlse=yes plan=yes "
    "q_offset=12370",
};

TEST(OnTheHost, LongKeys) {
  for (const std::string_view line : kLongCases) expect_passes(verify::parse_case(line));
}

TEST(OnTheHost, WithoutBankConflicts) {
  for (const HeadDims dims : head_dims()) {
    simt::drain_launches();
    const Case c = some_case(dims.head_dim, dims.head_dim_v, DataType::kFloat16);
    EXPECT_TRUE(run_case(c, options()).passed());
    int64_t loads = 0;
    for (const simt::LaunchRecord& launch : simt::drain_launches()) {
      loads += launch.counts.matrix_loads;
      EXPECT_EQ(launch.counts.matrix_load_conflicts, 0) << launch.what << ", head dim " << dims.head_dim;
      EXPECT_EQ(launch.counts.copy_conflicts, 0) << launch.what << ", head dim " << dims.head_dim;
    }
    EXPECT_GT(loads, 0);
  }
}

}  // namespace
}  // namespace flashmask::test
