// SPDX-License-Identifier: Apache-2.0

// The rows of the contract that a CPU can show, a test or more each. That bits do not change: exactness_test.cpp.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>

#include "attention/compare.h"
#include "families/families.h"
#include "flashmask/builders.h"
#include "flashmask/float16.h"
#include "flashmask/inspect.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// --- bounds, position, causal, window --------------------------------------------------------------------

TEST(Contract, BottomRightIsTheDefaultAndQOffsetMovesTheBand) {
  for (const auto& [rows, keys] : {std::pair<int64_t, int64_t>{70, 200}, {200, 70}, {130, 130}}) {
    Call<float> call({.seqlen_q = rows, .seqlen_k = keys, .head_dim = 8, .head_dim_v = 8});
    call.mask = masks::causal(rows, keys);
    call.run();
    expect_matches_oracle(
        call, dense_by_rule({.seqlen_q = rows, .seqlen_k = keys, .band = Band::causal(), .q_offset = keys - rows}));
    for (const int64_t offset : {int64_t{0}, int64_t{-3}, int64_t{17}, keys + 5}) {
      call.mask = masks::causal(rows, keys).with_q_offset(offset);
      call.run();
      expect_matches_oracle(
          call, dense_by_rule({.seqlen_q = rows, .seqlen_k = keys, .band = Band::causal(), .q_offset = offset}));
    }
  }
}

TEST(Contract, WindowCountsSelfAndMinusOneIsUnbounded) {
  constexpr int64_t kRows = 150, kKeys = 170;
  for (const auto& [left, right] :
       {std::pair<int64_t, int64_t>{0, 0}, {9, 0}, {0, 9}, {40, 3}, {-1, 0}, {5, -1}, {-1, -1}}) {
    Call<float> call({.seqlen_q = kRows, .seqlen_k = kKeys, .head_dim = 8, .head_dim_v = 8});
    call.mask = masks::sliding_window(kRows, kKeys, left, right);
    call.run();
    std::vector<uint8_t> visible;
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < kKeys; ++j) {
        const int64_t position = i + kKeys - kRows;
        visible.push_back((left < 0 || position - left <= j) && (right < 0 || j <= position + right));
      }
    }
    expect_matches_oracle(call, visible);
  }
}

TEST(Contract, WindowOfEverythingBeforeIsCausalBitForBit) {
  constexpr int64_t kSeqlen = 300;
  Call<float> causal({.seqlen_q = kSeqlen, .seqlen_k = kSeqlen}), window({.seqlen_q = kSeqlen, .seqlen_k = kSeqlen});
  causal.mask = masks::causal(kSeqlen, kSeqlen);
  window.mask = masks::sliding_window(kSeqlen, kSeqlen, kSeqlen - 1, 0);
  causal.run();
  window.run();
  EXPECT_TRUE(same_bits(causal, window));
}

TEST(Contract, BoundsAreAbsoluteRowsClampedAndInAnyOrder) {
  Random random(11);
  for (int n = 0; n < 60; ++n) {
    const int64_t rows = random.integer(1, 200), keys = random.integer(1, 300);
    const MaskParts parts = random_parts(random, random_kind(random), rows, keys);
    Call<float> call({.seqlen_q = rows, .seqlen_k = keys, .head_dim = 5, .head_dim_v = 7}, static_cast<uint64_t>(n));
    call.mask = Mask(parts);
    call.run();
    expect_matches_oracle(call, dense_by_rule(parts));
  }
}

TEST(Contract, BlockMaskWithAndWithoutBounds) {
  Random random(12);
  for (const ColumnKind kind : {ColumnKind::kNone, ColumnKind::kFourBounds, ColumnKind::kDocuments}) {
    MaskParts parts = random_parts(random, kind, 300, 400, 2, 2);
    draw_block_mask(random, 1, 4, parts);
    Call<float> call(
        {.batch = 2, .seqlen_q = 300, .seqlen_k = 400, .heads_q = 4, .heads_kv = 2, .head_dim = 9, .head_dim_v = 4});
    call.mask = Mask(parts);
    call.run();
    expect_matches_oracle(call, dense_by_rule(parts, 2, 4), 2, 4);
  }
}

TEST(Contract, MaskHeadsAndBatchBroadcast) {
  Random random(13);
  for (const int64_t heads : {1, 2, 4}) {
    for (const int64_t batch : {1, 3}) {
      const MaskParts parts = random_parts(random, ColumnKind::kFourBounds, 90, 140, batch, heads);
      Call<float> call(
          {.batch = 3, .seqlen_q = 90, .seqlen_k = 140, .heads_q = 4, .heads_kv = 2, .head_dim = 6, .head_dim_v = 6});
      call.mask = Mask(parts);
      call.run();
      expect_matches_oracle(call, dense_by_rule(parts, 3, 4), 3, 4);
    }
  }
}

TEST(Contract, VectorsAndBlockMaskBroadcastEachByItself) {
  Random random(14);
  const int64_t counts[] = {1, 2, 6};  // heads of the mask: one for all, heads_kv, heads_q
  const std::pair<int64_t, int64_t> batches[] = {{1, 2}, {2, 1}, {1, 1}, {2, 2}};
  for (int n = 0; n < (test_long() ? 36 : 18); ++n) {
    const int64_t heads = counts[n % 3], block_heads = counts[n / 3 % 3];
    const auto [batch, block_batch] = batches[n / 9];
    MaskParts parts = random_parts(random, ColumnKind::kFourBounds, 140, 260, batch, heads);
    draw_block_mask(random, block_batch, block_heads, parts);
    const Mask mask(parts);
    SCOPED_TRACE(testing::Message() << "[" << batch << ", " << heads << "] with blocks [" << block_batch << ", "
                                    << block_heads << "]");
    EXPECT_EQ(mask.heads(), std::max(heads, block_heads));
    EXPECT_EQ(mask.batch(), std::max(batch, block_batch));
    EXPECT_EQ(to_dense(mask), dense_by_rule(parts));
    const std::vector<uint8_t> visible = dense_by_rule(parts, 2, 6);
    // Each entry and head of the mask stands for as many of the call.
    EXPECT_EQ(statistics(mask).visible * 12 / (mask.batch() * mask.heads()),
              std::count(visible.begin(), visible.end(), 1));

    Call<float> call(
        {.batch = 2, .seqlen_q = 140, .seqlen_k = 260, .heads_q = 6, .heads_kv = 2, .head_dim = 4, .head_dim_v = 3});
    call.mask = mask;
    call.options.backend = "cpu";
    Call<float> with_plan = call;
    const Plan plan(mask);
    with_plan.plan = plan.view();
    call.run();
    with_plan.run();
    expect_matches_oracle(call, visible, 2, 6);
    EXPECT_TRUE(same_bits(call, with_plan));
    // The reference reads the mask itself, element by element.
    Call<double> reference = call.oracle({}), by_rule = call.oracle(visible, 2, 6);
    reference.mask = mask;
    reference.plan = plan.view();
    reference.run();
    by_rule.run();
    EXPECT_TRUE(same_bits(reference, by_rule));
  }
}

TEST(Contract, NoMaskMeansEveryRowSeesEveryKey) {
  Call<float> call({.batch = 2, .seqlen_q = 70, .seqlen_k = 150, .heads_q = 2, .heads_kv = 1});
  call.run();
  expect_matches_oracle(call, std::vector<uint8_t>(70 * 150, 1));
}

// --- empty rows, sizes -----------------------------------------------------------------------------------

TEST(Contract, RowsThatSeeNothing) {
  constexpr int64_t kRows = 200, kKeys = 130;
  Call<float> call(
      {.seqlen_q = kRows, .seqlen_k = kKeys, .heads_q = 2, .heads_kv = 1, .head_dim = 12, .head_dim_v = 5});
  call.mask = masks::causal(kRows, kKeys);  // the first 70 rows stand before key 0
  call.with_dlse = true;
  call.run();
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t h = 0; h < 2; ++h) {
      const float lse = call.lse[static_cast<std::size_t>(h * kRows + i)];
      if (i >= 70) {
        ASSERT_TRUE(std::isfinite(lse));
        continue;
      }
      ASSERT_EQ(lse, -kInf);
      for (int64_t c = 0; c < 5; ++c) ASSERT_EQ(call.out[static_cast<std::size_t>((i * 2 + h) * 5 + c)], 0.0f);
      for (int64_t c = 0; c < 12; ++c) ASSERT_EQ(call.dq[static_cast<std::size_t>((i * 2 + h) * 12 + c)], 0.0f);
    }
  }
  expect_matches_oracle(call, dense_of(*call.mask));
}

TEST(Contract, KeysThatNobodySeesHaveZeroGradients) {
  Call<float> call({.seqlen_q = 100, .seqlen_k = 200, .head_dim = 4, .head_dim_v = 4});
  call.mask = masks::padding(100, 200, std::vector<int64_t>{150});
  call.run();
  for (std::size_t n = 150 * 4; n < 200 * 4; ++n) {
    ASSERT_EQ(call.dk[n], 0.0f);
    ASSERT_EQ(call.dv[n], 0.0f);
  }
}

TEST(Contract, ZeroSizesAreLegal) {
  for (const auto& [batch, rows, keys] : {std::array<int64_t, 3>{0, 5, 5}, {2, 0, 5}, {2, 5, 0}, {1, 0, 0}}) {
    Call<float> call({.batch = batch, .seqlen_q = rows, .seqlen_k = keys, .heads_q = 2, .heads_kv = 1});
    call.run();
    call.mask = masks::causal(rows, keys);
    call.run();
    for (const float x : call.out) EXPECT_EQ(x, 0.0f);
    for (const float x : call.lse) EXPECT_EQ(x, -kInf);
    for (const auto* gradient : {&call.dq, &call.dk, &call.dv}) {
      for (const float x : *gradient) EXPECT_EQ(x, 0.0f);
    }
  }
}

TEST(Contract, NothingToWriteTakesNoTimeHoweverManyEntries) {
  ForwardArgs args;
  constexpr int64_t kBatch = int64_t{1} << 50;
  args.q = args.k = args.v = args.out = TensorView::contiguous(nullptr, DataType::kFloat32, {kBatch, 0, 2, 4});
  args.lse = TensorView::contiguous(nullptr, DataType::kFloat32, {kBatch, 2, 0});
  for (const char* backend : {"cpu", "reference"}) {
    const Options options{.backend = backend};
    std::vector<std::byte> workspace(forward_workspace(args, options));
    EXPECT_NO_THROW(forward(args, workspace, options));
  }
}

TEST(Contract, OffsetsBeyondTwoToThe31Elements) {
  // Two batch entries 2^31 + 64 elements apart: the addresses are reserved, only the touched pages exist.
  constexpr int64_t kFar = (int64_t{1} << 31) + 64, kSeqlen = 40, kDim = 8;
  constexpr std::size_t kBytes = static_cast<std::size_t>(kFar + kSeqlen * kDim) * sizeof(float);
  void* mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  Call<float> call({.batch = 2, .seqlen_q = kSeqlen, .seqlen_k = kSeqlen, .head_dim = kDim, .head_dim_v = kDim});
  call.mask = masks::causal(kSeqlen, kSeqlen);
  call.run();
  auto* far = static_cast<float*>(mapped);
  for (int64_t b = 0; b < 2; ++b)
    std::memcpy(far + b * kFar, call.q.data() + b * kSeqlen * kDim, kSeqlen * kDim * sizeof(float));
  ForwardArgs args = call.forward_args();
  args.q.data = mapped;
  args.q.stride[0] = kFar;
  std::vector<float> out(call.out.size(), kNan);
  args.out.data = out.data();
  std::vector<std::byte> workspace(forward_workspace(args));
  forward(args, workspace);
  EXPECT_EQ(out, call.out);
  // And written there: dq takes q's layout.
  BackwardArgs gradients = call.backward_args();
  gradients.q = args.q;
  gradients.dq.data = mapped;
  gradients.dq.stride[0] = kFar;
  const std::vector<float> q = call.q;  // dq overwrites q
  std::vector<float> copy(q);
  gradients.q = call.backward_args().q;
  workspace.resize(backward_workspace(gradients));
  backward(gradients, workspace);
  for (int64_t b = 0; b < 2; ++b)
    EXPECT_EQ(std::memcmp(far + b * kFar, call.dq.data() + b * kSeqlen * kDim, kSeqlen * kDim * sizeof(float)), 0);
  munmap(mapped, kBytes);
}

// --- layout ----------------------------------------------------------------------------------------------

TEST(Contract, StridedAndExpandedTensorsGiveTheSameBits) {
  const Sizes s{
      .batch = 2, .seqlen_q = 70, .seqlen_k = 140, .heads_q = 4, .heads_kv = 2, .head_dim = 10, .head_dim_v = 6};
  Call<float> plain(s);
  plain.mask = masks::causal(70, 140);
  std::fill(plain.dout.begin(), plain.dout.end(), 0.25f);
  plain.run();

  // [batch, heads, seqlen, dim] in memory; dout one element seen everywhere.
  const auto transposed = [](const std::vector<float>& from, int64_t batch, int64_t seqlen, int64_t heads,
                             int64_t dim) {
    std::vector<float> to(from.size());
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < seqlen; ++i)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t c = 0; c < dim; ++c)
            to[static_cast<std::size_t>(((b * heads + h) * seqlen + i) * dim + c)] =
                from[static_cast<std::size_t>(((b * seqlen + i) * heads + h) * dim + c)];
    return to;
  };
  const auto bhsd = [](TensorView t, std::vector<float>& data) {
    t.data = data.data();
    t.stride = {t.shape[2] * t.shape[1] * t.shape[3], t.shape[3], t.shape[1] * t.shape[3], 1, 0};
    return t;
  };
  std::vector<float> q = transposed(plain.q, 2, 70, 4, 10), k = transposed(plain.k, 2, 140, 2, 10),
                     v = transposed(plain.v, 2, 140, 2, 6);
  std::vector<float> out(plain.out.size(), kNan), dq(q.size(), kNan), dk(k.size(), kNan), dv(v.size(), kNan),
      quarter{0.25f};
  BackwardArgs args = plain.backward_args();
  args.q = bhsd(args.q, q);
  args.k = bhsd(args.k, k);
  args.v = bhsd(args.v, v);
  args.out = bhsd(args.out, out);
  args.dq = bhsd(args.dq, dq);
  args.dk = bhsd(args.dk, dk);
  args.dv = bhsd(args.dv, dv);
  args.dout.data = quarter.data();
  args.dout.stride = {};
  ForwardArgs forward_args;
  static_cast<AttentionInputs&>(forward_args) = args;
  forward_args.out = args.out;
  forward_args.lse = args.lse;
  std::vector<std::byte> workspace(std::max(forward_workspace(forward_args), backward_workspace(args)));
  forward(forward_args, workspace);
  backward(args, workspace);
  EXPECT_EQ(out, transposed(plain.out, 2, 70, 4, 6));
  EXPECT_EQ(dq, transposed(plain.dq, 2, 70, 4, 10));
  EXPECT_EQ(dk, transposed(plain.dk, 2, 140, 2, 10));
  EXPECT_EQ(dv, transposed(plain.dv, 2, 140, 2, 6));
}

TEST(Contract, WorkspaceNeedsNoAlignmentAndNoInitialisation) {
  Call<float> call({.seqlen_q = 100, .seqlen_k = 100}), shifted({.seqlen_q = 100, .seqlen_k = 100});
  call.mask = shifted.mask = masks::causal(100, 100);
  call.forward();
  const std::size_t bytes = forward_workspace(shifted.forward_args());
  for (const std::size_t shift : {1u, 3u, 17u, 63u}) {
    std::vector<std::byte> memory(bytes + shift, std::byte{0xff});
    forward(shifted.forward_args(), std::span(memory).subspan(shift));
    EXPECT_EQ(shifted.out, call.out);
  }
}

// --- non-finite inputs -----------------------------------------------------------------------------------

TEST(Contract, KeysInTilesThatNoRowSeesNeverReachAnything) {
  constexpr int64_t kRows = 64, kKeys = 384;
  Call<float> clean({.seqlen_q = kRows, .seqlen_k = kKeys, .head_dim = 8, .head_dim_v = 8});
  clean.mask = masks::padding(kRows, kKeys, std::vector<int64_t>{128});
  Call<float> poisoned = clean;
  for (const float value : {kNan, kInf, -kInf, 3e38f}) {
    std::fill(poisoned.k.begin() + 128 * 8, poisoned.k.end(), value);
    std::fill(poisoned.v.begin() + 128 * 8, poisoned.v.end(), value);
    clean.run();
    poisoned.run();
    EXPECT_TRUE(same_bits(clean, poisoned)) << value;
  }
}

TEST(Contract, NonFiniteHiddenKeyInAPartialTileStaysWithinRowsOfThatTile) {
  // Key 100 is hidden from all; its tile (keys 0 to 127) is partial for rows 0 to 63 and empty for the others.
  constexpr int64_t kRows = 192, kKeys = 256, kDim = 8;
  MaskParts parts{.seqlen_q = kRows,
                  .seqlen_k = kKeys,
                  .lts = std::vector<int32_t>(kKeys, kRows),
                  .ute = std::vector<int32_t>(kKeys, 0)};
  for (std::size_t j = 0; j < 128; ++j) parts.lts[j] = 64;
  parts.lts[100] = 0;
  Call<float> clean({.seqlen_q = kRows, .seqlen_k = kKeys, .head_dim = kDim, .head_dim_v = kDim});
  clean.mask = Mask(parts);
  Call<float> poisoned = clean;
  clean.forward();
  poisoned.v[100 * kDim] = kNan;
  poisoned.k[100 * kDim] = kNan;
  poisoned.forward();
  EXPECT_EQ(poisoned.lse, clean.lse);  // a hidden score is replaced, so it never counts
  for (std::size_t n = 64 * kDim; n < clean.out.size(); ++n) ASSERT_EQ(poisoned.out[n], clean.out[n]);
  // The oracle is exact.
  Call<double> oracle = poisoned.oracle(dense_by_rule(parts));
  oracle.forward();
  for (const double x : oracle.out) ASSERT_TRUE(std::isfinite(x));
}

TEST(Contract, VisibleNanIsNotLost) {
  Call<float> call({.seqlen_q = 70, .seqlen_k = 70, .head_dim = 8, .head_dim_v = 8});
  call.mask = masks::causal(70, 70);
  call.k[30 * 8] = kNan;
  call.run();
  for (int64_t i = 0; i < 70; ++i) {
    EXPECT_EQ(std::isnan(call.lse[static_cast<std::size_t>(i)]), i >= 30) << i;
    EXPECT_EQ(std::isnan(call.out[static_cast<std::size_t>(i * 8)]), i >= 30) << i;
    if (i >= 30) {
      EXPECT_TRUE(std::isnan(call.dq[static_cast<std::size_t>(i * 8)])) << i;
    }
  }
}

// --- lse, scale ------------------------------------------------------------------------------------------

TEST(Contract, LseIsTheNaturalLogarithmOfTheVisibleScores) {
  Call<float> call({.seqlen_q = 3, .seqlen_k = 4, .head_dim = 1, .head_dim_v = 1});
  call.q = {1, 2, -1};
  call.k = {0.5f, 1, -2, 3};
  call.mask = masks::causal(3, 4, 0);
  call.options.softmax_scale = 0.5;
  call.forward();
  EXPECT_NEAR(call.lse[0], 0.25, 1e-6);
  EXPECT_NEAR(call.lse[1], std::log(std::exp(0.5) + std::exp(1.0)), 1e-6);
  EXPECT_NEAR(call.lse[2], std::log(std::exp(-0.25) + std::exp(-0.5) + std::exp(1.0)), 1e-6);
}

TEST(Contract, ScalesFromZeroUp) {
  for (const double scale : {0.0, 0.3, 2.5, 1e-30}) {
    Call<float> call({.seqlen_q = 100, .seqlen_k = 150, .head_dim = 6, .head_dim_v = 4});
    call.options.softmax_scale = scale;
    call.mask = masks::causal(100, 150);
    call.run();
    Call<double> oracle = call.oracle(dense_of(*call.mask));
    oracle.run();
    EXPECT_LE(max_error(call.out, oracle.out), 1e-5 * max_value(oracle.out)) << scale;
    EXPECT_LE(max_error(call.dv, oracle.dv), 1e-5 * max_value(oracle.dv)) << scale;
    EXPECT_LE(max_error(call.dq, oracle.dq), 1e-5 * std::max(max_value(oracle.dq), 1e-30)) << scale;
  }
}

TEST(Contract, EqualGradientsOfManyRowsAddUp) {
  // Gradients as of a mean: rounding each sum on the way to dv would err in one direction.
  constexpr int64_t kRows = 5000;
  Call<float> call({.seqlen_q = kRows, .seqlen_k = 1});
  std::fill(call.dout.begin(), call.dout.end(), 0.3173F);
  call.run();
  Call<double> oracle = call.oracle(std::vector<uint8_t>(kRows, 1));
  oracle.run();
  EXPECT_LE(max_error(call.dv, oracle.dv), 1e-5 * max_value(oracle.dv));
}

TEST(Contract, ScoresFarApartDoNotOverflow) {
  // Score 50 j in every row: the last visible key takes all, exactly.
  constexpr int64_t kRows = 80, kKeys = 300;
  Call<float> call({.seqlen_q = kRows, .seqlen_k = kKeys, .head_dim = 1, .head_dim_v = 2});
  call.mask = masks::causal(kRows, kKeys);
  call.options.softmax_scale = 50;
  std::fill(call.q.begin(), call.q.end(), 1.0f);
  for (std::size_t j = 0; j < kKeys; ++j) call.k[j] = static_cast<float>(j);
  call.run();
  for (std::size_t i = 0; i < kRows; ++i) {
    const std::size_t last = i + kKeys - kRows;
    ASSERT_EQ(call.out[2 * i], call.v[2 * last]);
    ASSERT_EQ(call.lse[i], 50.0f * static_cast<float>(last));
    ASSERT_LT(std::abs(call.dq[i]), 1e-15f);
  }
}

TEST(Contract, GradientOfLseIsSupported) {
  Call<float> call(
      {.batch = 1, .seqlen_q = 130, .seqlen_k = 130, .heads_q = 2, .heads_kv = 2, .head_dim = 8, .head_dim_v = 8});
  call.mask = masks::causal(130, 130);
  call.with_dlse = true;
  call.run();
  expect_matches_oracle(call, dense_of(*call.mask));
  Call<float> without = call;
  without.with_dlse = false;
  without.run();
  EXPECT_GT(max_error(call.dq, without.dq), 0.01);  // it does something
}

}  // namespace
}  // namespace flashmask::test
