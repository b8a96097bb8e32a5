// SPDX-License-Identifier: Apache-2.0

// The rows of the contract that a CPU can show, a test or more each.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#include "attention/call.h"
#include "flashmask/builders.h"
#include "flashmask/families.h"
#include "flashmask/float16.h"
#include "flashmask/inspect.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<uint8_t> dense_of(const Mask& mask) { return dense_by_rule(parts_of(mask)); }

/// Everything the call computed, as bits.
template <typename Real>
bool same_bits(const Call<Real>& a, const Call<Real>& b) {
  const auto same = [](const auto& x, const auto& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0);
  };
  return same(a.out, b.out) && same(a.lse, b.lse) && same(a.dq, b.dq) && same(a.dk, b.dk) && same(a.dv, b.dv);
}

void expect_matches_oracle(const Call<float>& call, const std::vector<uint8_t>& visible, int64_t batch = 1,
                           int64_t heads = 1) {
  Call<double> oracle = call.oracle(visible, batch, heads);
  oracle.run();
  for (const auto& [name, got, want] : {std::tuple{"out", &call.out, &oracle.out},
                                        {"dq", &call.dq, &oracle.dq},
                                        {"dk", &call.dk, &oracle.dk},
                                        {"dv", &call.dv, &oracle.dv}}) {
    EXPECT_LE(max_error(*got, *want), 1e-5 * max_value(*want)) << name;
  }
  EXPECT_LE(max_error(call.lse, oracle.lse), 1e-3);
}

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
  const int64_t counts[] = {1, 2, 6};  // of heads: everyone's, heads_kv, heads_q
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

TEST(Contract, AnyFiniteScale) {
  for (const double scale : {0.0, -0.3, 2.5, 1e-30}) {
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

// --- exactness, independence, determinism ----------------------------------------------------------------

TEST(Contract, SkippingNeverChangesABit) {
  for (const Family& family : families()) {
    const Mask mask = crop(make_family(family.name, 400, {}, 5), 100, 400, 0, 333);
    Call<float> masked(
        {.batch = 2, .seqlen_q = 300, .seqlen_k = 333, .heads_q = 2, .heads_kv = 1, .head_dim = 20, .head_dim_v = 12});
    masked.with_dlse = true;
    Call<float> dense = masked;
    masked.mask = mask;
    masked.run();
    dense.dense = dense_of(mask);
    dense.run();
    EXPECT_TRUE(masked.out == dense.out && masked.lse == dense.lse && masked.dq == dense.dq && masked.dk == dense.dk &&
                masked.dv == dense.dv)
        << family.name;
    EXPECT_EQ(dense.executed.forward, 2 * 2 * 5 * 3) << "dense mode executes every tile";
  }
}

TEST(Contract, NeighboursDoNotChangeADocument) {
  const std::vector<int64_t> lengths{50, 37, 90, 60};
  for (const bool causal : {true, false}) {
    Call<float> call({.seqlen_q = 237, .seqlen_k = 237, .heads_q = 2, .heads_kv = 1, .head_dim = 8, .head_dim_v = 8});
    const Documents documents = Documents::from_lengths(lengths);
    call.mask = causal ? masks::causal_document(documents) : masks::document(documents);
    Call<float> other = call;
    call.run();
    // Everything outside of document 1 changes, to values that move every maximum.
    for (auto* tensor : {&other.q, &other.k, &other.v, &other.dout}) {
      const std::size_t row = tensor->size() / 237;
      for (std::size_t n = 0; n < tensor->size(); ++n) {
        if (n / row < 50 || n / row >= 87) (*tensor)[n] = (*tensor)[n] * 30 + 5;
      }
    }
    other.run();
    const auto same = [&](const std::vector<float>& a, const std::vector<float>& b) {
      const std::size_t row = a.size() / 237;
      return std::memcmp(a.data() + 50 * row, b.data() + 50 * row, 37 * row * sizeof(float)) == 0;
    };
    EXPECT_TRUE(same(call.out, other.out));
    EXPECT_TRUE(same(call.dq, other.dq));
    EXPECT_TRUE(same(call.dk, other.dk));
    EXPECT_TRUE(same(call.dv, other.dv));
    EXPECT_FALSE(call.out == other.out);
  }
}

TEST(Contract, TheSameBitsWithAnyNumberOfThreadsAndInEveryRun) {
  const auto run = [](int threads) {
    Call<float> call(
        {.batch = 2, .seqlen_q = 300, .seqlen_k = 420, .heads_q = 4, .heads_kv = 2, .head_dim = 24, .head_dim_v = 16});
    call.mask = crop(make_family("global_sliding_window", 420, {}, 1), 120, 420, 0, 420);
    call.options.threads = threads;
    call.options.deterministic = true;
    call.run();
    return call;
  };
  const Call<float> one = run(1);
  for (const int threads : {1, 2, 7, 0}) {
    for (int repeat = 0; repeat < 3; ++repeat) EXPECT_TRUE(same_bits(one, run(threads))) << threads;
  }
}

TEST(Contract, NoMoreThreadsThanWork) {
  const auto make = [](int threads) {
    Call<float> call({.seqlen_q = 133, .seqlen_k = 300, .heads_q = 2, .heads_kv = 1, .head_dim = 24, .head_dim_v = 16});
    call.mask = make_family("sliding_window", 300, {{"left", "70"}}, 1);
    call.mask = crop(*call.mask, 100, 233, 0, 300);
    call.options.threads = threads;
    call.options.backend = "cpu";
    return call;
  };
  Call<float> one = make(1), six = make(6);  // 3 row tiles of 2 heads
  one.run();
  for (const int threads : {6, 7, 100000, std::numeric_limits<int>::max()}) {
    Call<float> call = make(threads);
    EXPECT_EQ(forward_workspace(call.forward_args(), call.options), forward_workspace(six.forward_args(), six.options));
    EXPECT_EQ(backward_workspace(call.backward_args(), call.options),
              backward_workspace(six.backward_args(), six.options));
    EXPECT_NE(to_string(explain(call.forward_args(), call.options)).find(", 6 threads,"), std::string::npos);
    call.run();
    EXPECT_TRUE(same_bits(one, call)) << threads;
  }
  // Work for any number: no more than a machine can be expected to start.
  const auto many = [](int threads) {
    Call<float> call(
        {.batch = 20, .seqlen_q = 64, .seqlen_k = 1, .heads_q = 100, .heads_kv = 1, .head_dim = 1, .head_dim_v = 1});
    call.options.threads = threads;
    call.options.backend = "cpu";
    return forward_workspace(call.forward_args(), call.options);
  };
  EXPECT_EQ(many(2000), many(std::max<int>(1024, static_cast<int>(std::thread::hardware_concurrency()))));
}

TEST(Contract, ThreadsOfOneHeadTakeTurnsAtDq) {
  // Key tiles of one head add to the same rows of dq, in place (head_dim 64) or beside it (48); of the second size
  // there are fewer row tiles than threads.
  for (const int64_t head_dim : {48, 64}) {
    for (const Sizes& sizes : {Sizes{.seqlen_q = 700, .seqlen_k = 1500, .head_dim = head_dim, .head_dim_v = 32},
                               Sizes{.seqlen_q = 70, .seqlen_k = 2000, .head_dim = head_dim, .head_dim_v = 32}}) {
      const Mask mask = masks::sliding_window(sizes.seqlen_q, sizes.seqlen_k, 400, 300);
      const auto run = [&](int threads, bool dense) {
        Call<float> call(sizes);
        if (dense) {
          call.dense = dense_of(mask);
        } else {
          call.mask = mask;
        }
        call.options.threads = threads;
        call.run();
        return call;
      };
      const Call<float> one = run(1, false);
      expect_matches_oracle(one, dense_of(mask));
      for (int repeat = 0; repeat < 5; ++repeat) EXPECT_TRUE(same_bits(one, run(8, repeat % 2 == 1))) << head_dim;
    }
  }
}

TEST(Contract, APlanMadeInTheCallChangesNothing) {
  Call<float> own({.seqlen_q = 200, .seqlen_k = 200}), given({.seqlen_q = 200, .seqlen_k = 200});
  own.mask = given.mask = make_family("shared_question", 200, {}, 2);
  const Plan plan(*given.mask);
  given.plan = plan.view();
  own.run();
  given.run();
  EXPECT_TRUE(same_bits(own, given));
}

// --- skipping is real ------------------------------------------------------------------------------------

TEST(Contract, ExecutedTilesAreThePlansLiveOnes) {
  for (const Family& family : families()) {
    const Mask mask = make_family(family.name, 700, {}, 9);
    Call<float> call(
        {.batch = 1, .seqlen_q = 700, .seqlen_k = 700, .heads_q = 4, .heads_kv = 2, .head_dim = 2, .head_dim_v = 2});
    call.mask = mask;
    call.run();
    const Plan plan(mask);
    const int64_t live = 4 * plan.view().live_granules();
    EXPECT_EQ(call.executed.forward, live) << family.name;
    EXPECT_EQ(call.executed.backward_rows, live) << family.name;
    EXPECT_EQ(call.executed.backward_keys, live) << family.name;
  }
}

// --- accuracy of the 16-bit types at one glance (the conformance list does the rest) ----------------------

TEST(Contract, SixteenBitInputsAreReadExactly) {
  // The same values given as bfloat16, float16 and float32 differ in the rounding of the outputs only.
  const Sizes s{.seqlen_q = 90, .seqlen_k = 150, .head_dim = 19, .head_dim_v = 11};
  Call<float> call(s);
  call.mask = masks::causal(90, 150);
  for (auto* tensor : {&call.q, &call.k, &call.v}) {
    for (float& x : *tensor) x = bfloat16_to_float(float_to_bfloat16(std::clamp(x, -4.0f, 4.0f)));
    for (float& x : *tensor) x = float16_to_float(float_to_float16(x));
  }
  call.forward();
  for (const bool bfloat : {true, false}) {
    const auto narrow = [bfloat](const std::vector<float>& from) {
      std::vector<uint16_t> to;
      for (const float x : from) to.push_back(bfloat ? float_to_bfloat16(x) : float_to_float16(x));
      return to;
    };
    const auto q = narrow(call.q), k = narrow(call.k), v = narrow(call.v), want = narrow(call.out);
    std::vector<uint16_t> out(call.out.size());
    std::vector<float> lse(call.lse.size());
    ForwardArgs args = call.forward_args();
    for (auto [view, data] : {std::pair{&args.q, q.data()},
                              {&args.k, k.data()},
                              {&args.v, v.data()},
                              {&args.out, static_cast<const uint16_t*>(out.data())}}) {
      view->data = const_cast<uint16_t*>(data);
      view->dtype = bfloat ? DataType::kBFloat16 : DataType::kFloat16;
    }
    args.lse.data = lse.data();
    std::vector<std::byte> workspace(forward_workspace(args));
    forward(args, workspace);
    EXPECT_EQ(out, want);
    EXPECT_EQ(lse, call.lse);
  }
}

// --- memory ----------------------------------------------------------------------------------------------

TEST(Contract, WorkspaceIsLinearInTheLengths) {
  const auto bytes = [](int64_t seqlen) {
    Call<float> call({.batch = 0,
                      .seqlen_q = seqlen,
                      .seqlen_k = seqlen,
                      .heads_q = 8,
                      .heads_kv = 8,
                      .head_dim = 64,
                      .head_dim_v = 64});
    call.sizes.batch = 1;  // shapes only: the tensors stay empty
    call.plan = {};
    const Mask mask = masks::causal(seqlen, seqlen);
    const Plan plan(mask);
    call.mask = mask;
    call.plan = plan.view();
    call.options.threads = 2;
    return static_cast<double>(backward_workspace(call.backward_args(), call.options));
  };
  EXPECT_LE(bytes(131072), 2.01 * bytes(65536));
  EXPECT_LE(bytes(65536), 8 * 65536 * 4 + 4e6);  // one float a row and head, and two threads' scratch
}

}  // namespace
}  // namespace flashmask::test
