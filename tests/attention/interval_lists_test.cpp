// SPDX-License-Identifier: Apache-2.0
// Attention under masks of any number of hidden intervals per column, against the oracle and with everything executed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "attention/compare.h"
#include "flashmask/c_api.h"
#include "flashmask/plan.h"
#include "support/expect_error.h"
#include "support/extent.h"

namespace flashmask::test {
namespace {

MaskParts random_lists(Random& random, int64_t rows, int64_t keys) {
  MaskParts parts = random_parts(random, ColumnKind::kLists, rows, keys, random.integer(1, 2),
                                 random.flip() ? 4 : random.integer(1, 2));
  if (random.integer(0, 3) == 0) draw_positions(random, random.flip() ? 1 : 2, parts);
  if (random.integer(0, 3) == 0) draw_block_mask(random, 1, 2, parts);
  return parts;
}

TEST(AttentionByLists, MatchesTheOracleAndSkippingChangesNoBit) {
  Random random(1);
  for (int64_t n = 0; n < scaled(40); ++n) {
    const MaskParts parts = random_lists(random, random.integer(1, 300), random.integer(1, 400));
    Call<float> call({.batch = 2, .seqlen_q = parts.seqlen_q, .seqlen_k = parts.seqlen_k, .heads_q = 4, .heads_kv = 2},
                     static_cast<uint64_t>(n));
    call.with_dlse = true;
    if (random.flip()) call.add_sink();
    if (random.flip()) call.options.features.softcap = 4;
    SCOPED_TRACE(n);
    expect_right_with_live_tiles_alone(call, parts);
    if (HasFailure()) return;
  }
}

TEST(AttentionByLists, TheReferenceReadsThem) {
  Random random(2);
  for (int64_t n = 0; n < scaled(10); ++n) {
    const MaskParts parts = random_lists(random, random.integer(1, 40), random.integer(1, 40));
    const Mask mask(parts);
    Call<double> call(
        {.batch = 2, .seqlen_q = parts.seqlen_q, .seqlen_k = parts.seqlen_k, .heads_q = 4, .heads_kv = 2});
    Call<double> dense = call.oracle(dense_by_rule(parts), mask.batch(), mask.heads());
    call.options.backend = "reference";
    call.mask = mask;
    call.run();
    dense.run();
    EXPECT_TRUE(same_bits(call, dense)) << n;
  }
}

TEST(AttentionByLists, ListsThatFitHaveTheBitsOfVectors) {
  Random random(3);
  for (int64_t n = 0; n < scaled(10); ++n) {
    MaskParts vectors = random_parts(random, ColumnKind::kFourBounds, random.integer(1, 200), random.integer(1, 200));
    MaskParts lists = vectors;
    for (std::size_t j = 0; j < vectors.lts.size(); ++j) {
      lists.column_ptr.push_back(static_cast<int32_t>(lists.intervals.size() / 2));
      for (const int32_t row : {vectors.uts[j], vectors.ute[j], vectors.lts[j], vectors.lte[j]})
        lists.intervals.push_back(row);
    }
    lists.column_ptr.push_back(static_cast<int32_t>(lists.intervals.size() / 2));
    for (auto* vector : {&lists.lts, &lists.lte, &lists.uts, &lists.ute}) vector->clear();
    Call<float> one({.seqlen_q = vectors.seqlen_q, .seqlen_k = vectors.seqlen_k}), other = one;
    one.mask = Mask(vectors);
    other.mask = Mask(lists);
    EXPECT_FALSE(other.mask->has_interval_lists());
    one.run();
    other.run();
    EXPECT_TRUE(same_bits(one, other)) << n;
  }
}

TEST(AttentionByLists, ForwardInSplitsReadsThem) {
  Random random(4);
  for (int64_t n = 0; n < scaled(10); ++n) {
    MaskParts parts = random_lists(random, random.integer(1, 200), random.integer(200, 600));
    const Mask mask(parts);
    Call<float> call({.batch = 2, .seqlen_q = parts.seqlen_q, .seqlen_k = parts.seqlen_k, .heads_q = 4, .heads_kv = 2});
    call.options.features.split_size = 128;
    call.mask = mask;
    call.run();
    expect_matches_oracle(call, dense_by_rule(parts), mask.batch(), mask.heads());
    if (HasFailure()) FAIL() << n;
  }
}

TEST(AttentionByLists, ListsElsewhereAreRefusedByName) {
  const Device device{Device::Kind::kCuda, 0};
  const MaskParts parts{.seqlen_q = 9, .seqlen_k = 1, .column_ptr = {0, 3}, .intervals = {1, 2, 3, 4, 5, 6}};
  Call<float> call({.seqlen_q = 9, .seqlen_k = 1});
  call.mask = Mask(parts);
  ForwardArgs args = call.forward_args();
  for (TensorView* t : {&args.q, &args.k, &args.v, &args.out, &args.lse}) t->device = device;
  expect_invalid({"the mask's interval lists are on the CPU and q on CUDA device 0", "(from_interval_lists)"},
                 [&] { forward_workspace(args, {}); });
  expect_invalid({"the mask's interval lists are on the CPU and the plan is to be on CUDA device 0"},
                 [&] { build_plan(call.mask->view(), {}, device, nullptr); });
  expect_invalid({"the mask's interval lists are on the CPU and the plan is to be on CUDA device 0"},
                 [&] { count_bit_tiles(call.mask->view(), {}, device); });
}

TEST(AttentionByLists, PlansOnADeviceHaveBits) {
  const Device device{Device::Kind::kCuda, 0};
  std::vector<int32_t> column_ptr{0, 3}, intervals{1, 2, 3, 4, 5, 6};
  TensorView ptr = TensorView::contiguous(column_ptr.data(), DataType::kInt32, {1, 1, 2}),
             listed = TensorView::contiguous(intervals.data(), DataType::kInt32, {3, 2});
  ptr.device = listed.device = device;
  Call<float> call({.seqlen_q = 9, .seqlen_k = 1});
  call.mask = from_interval_lists(ptr, listed, 9);
  ForwardArgs args = call.forward_args();
  for (TensorView* t : {&args.q, &args.k, &args.v, &args.out, &args.lse}) t->device = device;
  std::vector<uint64_t> words(1024);
  const PlanLayout without(9, 1, 1, 1), with(9, 1, 1, 1, 1);
  const std::span<const std::byte> buffer = std::as_bytes(std::span(words));
  args.plan = PlanView::on_device(without, buffer, device);
  expect_invalid({"the plan has no bits", "count_bit_tiles"}, [&] { forward_workspace(args, {}); });
  const auto build = [&](const PlanLayout& layout) { build_plan(call.mask->view(), layout, {}, device); };
  expect_invalid({"layout has no bit tiles", "interval lists"}, [&] { build(without); });
  expect_invalid({"layout is in runs", "the mask has interval lists"},
                 [&] { build(PlanLayout(9, 1, 1, 1, kNoBits, PlanForm::kRuns)); });
  args.plan = PlanView::on_device(with, buffer, device);
  const Explanation explanation = explain(args, {});
  ASSERT_EQ(explanation.features.size(), 1u);
  EXPECT_EQ(explanation.features[0], "interval lists of 32 bytes and a plan of " + std::to_string(with.bytes) +
                                         " bytes, 1024 of them bits of partial tiles");
  call.mask = Mask({.seqlen_q = 9, .seqlen_k = 1});
  args.mask = call.mask;
  expect_invalid({"the plan has bits, and the mask no interval lists"}, [&] { forward_workspace(args, {}); });
}

TEST(AttentionByLists, BytesOfPlansOnADevice) {
  fm_mask mask{};
  mask.struct_size = sizeof(mask);
  mask.seqlen_q = 1000;
  mask.seqlen_k = 500;
  fm_options options{};
  options.struct_size = sizeof(options);
  options.device = 1;
  std::size_t most = 0, scratch = 0, bytes = 0;
  ASSERT_EQ(fm_plan_bytes(&mask, &bytes), FM_OK);
  ASSERT_EQ(fm_plan_device_bytes(&mask, &options, &most, &scratch), FM_OK) << fm_last_error();
  EXPECT_EQ(most, bytes);
  EXPECT_EQ(scratch, 0u) << "nothing is to be counted";
  std::vector<int32_t> column_ptr(501), intervals{1, 2};
  mask.column_ptr = {
      .data = column_ptr.data(), .dtype = FM_INT32, .ndim = 3, .shape = {1, 1, 501}, .stride = {501, 501, 1}};
  mask.intervals = {.data = intervals.data(), .dtype = FM_INT32, .ndim = 2, .shape = {1, 2}, .stride = {2, 1}};
  ASSERT_EQ(fm_plan_device_bytes(&mask, &options, &most, &scratch), FM_OK) << fm_last_error();
  EXPECT_EQ(static_cast<int64_t>(scratch), PlanLayout(1000, 500, 1, 1, 0).bytes);
  EXPECT_EQ(most, scratch + 16 * 4 * 1024);
  // Within a window rows see few key blocks.
  mask.flags = FM_HAS_WINDOW;
  mask.window_left = 60;
  ASSERT_EQ(fm_plan_device_bytes(&mask, &options, &most, &scratch), FM_OK) << fm_last_error();
  EXPECT_EQ(most, scratch + 16 * 2 * 1024);
  // In host memory a plan has none.
  std::size_t counted = 0;
  ASSERT_EQ(fm_plan_count_bytes(&mask, nullptr, 0, nullptr, &counted), FM_OK) << fm_last_error();
  EXPECT_EQ(counted, bytes);
}

template <typename F>
void expect_too_much(int64_t bytes, int64_t limit, const char* source, F&& f) {
  expect_error(ErrorCode::kUnsupported,
               {"interval lists of 32 bytes", std::to_string(bytes) + " bytes",
                "max_mask_bytes allows " + std::to_string(limit) + " (" + source + ")", "FLASHMASK_MAX_MASK_BYTES"},
               f);
}

TEST(AttentionByLists, TakeNoMoreMemoryThanAllowed) {
  const MaskParts parts{.seqlen_q = 9, .seqlen_k = 1, .column_ptr = {0, 3}, .intervals = {1, 2, 3, 4, 5, 6}};
  Call<float> call({.seqlen_q = 9, .seqlen_k = 1});
  call.mask = Mask(parts);
  const int64_t bytes = 2 * 4 + 3 * 8 + PlanLayout(9, 1, 1, 1).bytes;
  call.options.max_mask_bytes = bytes;
  call.run();
  call.options.max_mask_bytes = bytes - 1;
  expect_too_much(bytes, bytes - 1, "as asked for", [&] { call.forward(); });
  expect_too_much(bytes, bytes - 1, "as asked for", [&] { backward_workspace(call.backward_args(), call.options); });
  expect_too_much(bytes, bytes - 1, "as asked for", [&] { Plan(*call.mask, bytes - 1); });
  const Explanation explanation = explain(call.forward_args(), call.options);
  EXPECT_EQ(explanation.backend, "");
  EXPECT_NE(to_string(explanation).find("max_mask_bytes allows " + std::to_string(bytes - 1)), std::string::npos);
  // A plan that is there takes no more.
  const Plan plan(*call.mask, bytes);
  call.plan = plan.view();
  call.run();
  // Nor do masks without lists count.
  call.plan = {};
  call.mask = Mask({.seqlen_q = 9, .seqlen_k = 1});
  call.run();
  call.options.max_mask_bytes = -1;
  expect_invalid({"max_mask_bytes is -1", "0 (a quarter of the device's memory) or more"}, [&] { call.run(); });
}

/// Sets an environment variable for as long as it lives.
struct Variable {
  const char* name;
  Variable(const char* of, const std::string& value) : name(of) { setenv(name, value.c_str(), 1); }
  ~Variable() { unsetenv(name); }
};

TEST(AttentionByLists, TheEnvironmentSaysHowMuchMemoryTheyTake) {
  constexpr const char* kName = "FLASHMASK_MAX_MASK_BYTES";
  const MaskParts parts{.seqlen_q = 9, .seqlen_k = 1, .column_ptr = {0, 3}, .intervals = {1, 2, 3, 4, 5, 6}};
  const Mask mask(parts);
  const int64_t bytes = 2 * 4 + 3 * 8 + PlanLayout(9, 1, 1, 1).bytes;
  {
    const Variable exact(kName, std::to_string(bytes));
    Plan{mask};
  }
  {
    const Variable less(kName, std::to_string(bytes - 1));
    expect_too_much(bytes, bytes - 1, kName, [&] { Plan{mask}; });
    Plan(mask, bytes);
  }
  for (const char* wrong : {"0", "-1", "1GiB", " 7", "99999999999999999999"}) {
    const Variable variable(kName, wrong);
    expect_invalid({kName, std::string("'") + wrong + "'", "a number of bytes, at least 1"}, [&] { Plan{mask}; });
  }
}

TEST(AttentionByLists, PlansOfTheCInterfaceTakeNoMoreMemoryThanAllowed) {
  std::vector<int32_t> column_ptr{0, 3}, intervals{1, 2, 3, 4, 5, 6};
  fm_mask mask{};
  mask.struct_size = sizeof(mask);
  mask.seqlen_q = 9;
  mask.seqlen_k = 1;
  mask.column_ptr = {.data = column_ptr.data(), .dtype = FM_INT32, .ndim = 3, .shape = {1, 1, 2}, .stride = {2, 2, 1}};
  mask.intervals = {.data = intervals.data(), .dtype = FM_INT32, .ndim = 2, .shape = {3, 2}, .stride = {2, 1}};
  fm_options options{};
  options.struct_size = sizeof(options);
  std::size_t most = 0, scratch = 0;
  for (const auto& [device, tiles] : {std::pair{0, kNoBits}, {1, int64_t{1}}}) {
    options.device = device;
    options.max_mask_bytes = 2 * 4 + 3 * 8 + PlanLayout(9, 1, 1, 1, tiles).bytes;
    EXPECT_EQ(fm_plan_device_bytes(&mask, &options, &most, &scratch), FM_OK) << fm_last_error();
    --options.max_mask_bytes;
    EXPECT_EQ(fm_plan_device_bytes(&mask, &options, &most, &scratch), FM_UNSUPPORTED);
    EXPECT_NE(std::string(fm_last_error()).find("max_mask_bytes allows"), std::string::npos) << fm_last_error();
  }
  // Without room for all tiles, a plan whose tiles are still to be counted.
  EXPECT_EQ(fm_plan_device_bytes(&mask, &options, nullptr, &scratch), FM_OK) << fm_last_error();
  options.device = FM_DEVICE_CPU;
  options.max_mask_bytes = 1;
  EXPECT_EQ(fm_plan_count_bytes(&mask, nullptr, 0, &options, &most), FM_UNSUPPORTED);
}

TEST(AttentionByLists, AnotherPlanIsRefused) {
  const MaskParts parts{.seqlen_q = 9, .seqlen_k = 1, .column_ptr = {0, 3}, .intervals = {1, 2, 3, 4, 5, 6}};
  MaskParts others = parts;
  others.intervals[0] = 0;
  Call<float> call({.seqlen_q = 9, .seqlen_k = 1});
  call.mask = Mask(parts);
  const Plan own(*call.mask), plan{Mask(others)};
  call.plan = own.view();
  call.forward();
  call.plan = plan.view();
  expect_invalid({"plan was not made for this mask"}, [&] { call.forward(); });
}

}  // namespace
}  // namespace flashmask::test
