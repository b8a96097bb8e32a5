// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "cache/cached_call.h"
#include "support/expect_error.h"

namespace flashmask::test {
namespace {

const CachedShape kShape{.keys = {70, 5}, .rows = {3, 9}, .vectors = 1};

/// A plan with room for the shape, and its buffer.
struct OwnPlan {
  std::vector<std::byte> buffer;
  CachedPlan plan;

  explicit OwnPlan(CachedCapacities capacities = {.max_batch = 4,
                                                  .max_rows = 64,
                                                  .max_keys = 256,
                                                  .heads_q = 4,
                                                  .heads_kv = 2,
                                                  .head_dim = 24,
                                                  .head_dim_v = 24})
      : buffer(cached_plan_bytes(capacities, {})), plan{.capacities = capacities, .buffer = buffer} {}
};

TEST(CachedPlanTest, ACallWithItHasTheBitsOfOneWithout) {
  const CachedCase c(kShape, 1);
  LaidOutCall call(c, {});
  const auto wanted = call.run().all_bits();
  OwnPlan own;
  build_cached_plan(call.args, own.plan);
  call.args.plan = &own.plan;
  EXPECT_EQ(call.run().all_bits(), wanted);
}

TEST(CachedPlanTest, ItIsBuiltWithoutRowsForCallsOfAnyNumber) {
  for (const bool packed : {true, false}) {
    CachedShape shape = kShape;
    shape.packed = packed;
    if (!packed) shape.rows = {3, 3};
    const CachedCase c(shape, 4);
    LaidOutCall call(c, {});
    const auto wanted = call.run().all_bits();
    OwnPlan own;
    CachedForwardArgs no_rows = call.args;
    no_rows.q = no_rows.out = no_rows.lse = {};
    build_cached_plan(no_rows, own.plan);
    call.args.plan = &own.plan;
    EXPECT_EQ(call.run().all_bits(), wanted) << packed;
    own.plan.capacities.max_rows = 2;
    expect_invalid({"rows and the plan max_rows 2"}, [&] { call.run(); });
  }
}

TEST(CachedPlanTest, ACallThatDiffersIsRefused) {
  const CachedCase c(kShape, 2);
  LaidOutCall call(c, {}), other(c, {});
  OwnPlan own;
  call.args.plan = &own.plan;
  expect_invalid({"plan was never built"}, [&] { call.run(); });
  build_cached_plan(call.args, own.plan);
  const CachedForwardArgs right = call.args;
  const auto refused = [&](const char* name) {
    expect_invalid({name, "build it again"}, [&] { call.run(); });
    call.args = right;
  };
  call.args.cache.seqlens = other.args.cache.seqlens;
  refused("seqlens is another");
  call.args.cache.page_table = other.args.cache.page_table;
  refused("page_table is another");
  call.args.mask.bounds = other.args.mask.bounds;
  refused("mask.bounds is another");
  call.args.mask.window_left = 7;
  refused("window_size");
  call.args.cu_seqlens_q = other.args.cu_seqlens_q;
  refused("cu_seqlens_q is another");
  call.args.split_size = 256;
  expect_invalid({"split_size of the call is 256 and of the plan 1024"}, [&] { call.run(); });
  call.args = right;
  const CachedPlan built = own.plan;
  own.plan.capacities.max_keys *= 2;
  refused("the plan's buffer, or one of its capacities, is another");
  own.plan = built;
  std::vector<std::byte> copy = own.buffer;
  own.plan.buffer = copy;
  refused("the plan's buffer, or one of its capacities, is another");
  own.plan = built;
  own.buffer[0] = std::byte{1};
  expect_invalid({"plan was never built, or its buffer holds something else"}, [&] { call.run(); });
}

TEST(CachedPlanTest, Capacities) {
  const CachedCase c(kShape, 3);
  LaidOutCall call(c, {});
  const CachedCapacities room = OwnPlan().plan.capacities;
  const auto refused = [&](CachedCapacities capacities, std::initializer_list<std::string> parts) {
    OwnPlan own(capacities);
    expect_invalid(parts, [&] { build_cached_plan(call.args, own.plan); });
  };
  CachedCapacities small = room;
  small.max_batch = 1;
  refused(small, {"2 requests", "max_batch 1"});
  small = room;
  small.max_rows = 11;
  refused(small, {"14 rows", "max_rows 11"});
  small = room;
  small.max_keys = 60;
  refused(small, {"keys", "max_keys 60"});
  small = room;
  small.heads_kv = 4;
  refused(small, {"heads_kv of the call is 2 and of the plan 4"});
  small = room;
  small.max_keys = -1;
  expect_invalid({"max_keys is -1"}, [&] { cached_plan_bytes(small, {}); });
  OwnPlan own;
  own.plan.buffer = own.plan.buffer.first(1);
  expect_invalid({"buffer has 1 bytes"}, [&] { build_cached_plan(call.args, own.plan); });
}

TEST(CachedPlanTest, OfAForest) {
  CachedShape shape = kShape;
  shape.keys = {70};
  shape.rows = {9};
  const CachedCase c(shape, 5);
  LaidOutCall call(c, {});
  const auto wanted = call.run().all_bits();
  CachedCapacities room = OwnPlan().plan.capacities;
  room.forest = true;
  OwnPlan own(room);
  build_cached_plan(call.args, own.plan);
  call.args.plan = &own.plan;
  EXPECT_EQ(call.run().all_bits(), wanted) << "hosts have no tiles";
  LaidOutCall of_lists(c, {.lists = true});
  expect_invalid({"page_indptr and the plan is a forest's"}, [&] { build_cached_plan(of_lists.args, own.plan); });
  own.plan.capacities.forest = false;
  expect_invalid({"one of its capacities, is another"}, [&] { call.run(); });
  room.max_keys = 111;
  OwnPlan small(room);
  expect_invalid({"112 keys and the forest's plan max_keys 111"}, [&] { build_cached_plan(call.args, small.plan); });
  room.batch_invariant = true;
  expect_invalid({"forest is set beside batch_invariant"}, [&] { cached_plan_bytes(room, {}); });
  const CachedCase two(kShape, 6);
  LaidOutCall other(two, {});
  OwnPlan of_one(own.plan.capacities);
  of_one.plan.capacities.forest = true;
  expect_invalid({"2 requests and the plan is a forest's"}, [&] { build_cached_plan(other.args, of_one.plan); });
}

TEST(CachedPlanTest, ABuildThatThrowsLeavesNone) {
  const CachedCase c(kShape, 3);
  LaidOutCall call(c, {});
  OwnPlan own;
  build_cached_plan(call.args, own.plan);
  own.plan.buffer = own.plan.buffer.first(1);
  expect_invalid({"buffer has 1 bytes"}, [&] { build_cached_plan(call.args, own.plan); });
  EXPECT_EQ(own.plan.built_for, CachedPlan{}.built_for);
  own.plan.buffer = own.buffer;
  call.args.plan = &own.plan;
  expect_invalid({"plan was never built"}, [&] { call.run(); });
}

TEST(CachedPlanTest, Devices) {
  const CachedCase c(kShape, 3);
  LaidOutCall call(c, {});
  OwnPlan own;
  own.plan.device = {Device::Kind::kCuda, 0};
  expect_invalid({"the plan is on CUDA device 0 and q on the CPU"}, [&] { build_cached_plan(call.args, own.plan); });
  if (has_cuda()) GTEST_SKIP() << "skipped: a CUDA device takes the rest";
  expect_error(ErrorCode::kNoDevice, {"CUDA"}, [&] { cached_plan_bytes(own.plan.capacities, own.plan.device); });
}

}  // namespace
}  // namespace flashmask::test
