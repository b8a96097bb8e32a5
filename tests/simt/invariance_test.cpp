// SPDX-License-Identifier: Apache-2.0

// Bits of a request over caches with batch_invariant, on emulated devices of several numbers of multiprocessors: alone
// and beside others, whatever those are. What verify compares within a device (pages, max_ctas, plans) it does there.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "flashmask/kv_cache.h"
#include "verify/cached_tensors.h"
#include "verify/run_case.h"

namespace flashmask::test {
namespace {

using verify::CachedCase, verify::CachedDraw, verify::CachedPlacement, verify::CachedTensors;

/// A request's results, and how they are had.
using Bits = std::pair<std::vector<std::byte>, std::vector<std::byte>>;
struct Way {
  int32_t device = 0;
  int max_ctas = 0;
  uint64_t order = 0;
  int64_t page_size = 16;
};

/// out and lse of every request. Memory of emulated devices is the host's.
std::vector<Bits> bits_of(const CachedDraw& draw, const Way& way) {
  CachedPlacement placement(draw.c);
  placement.order = way.order;
  placement.page_size = way.page_size;
  CachedTensors tensors(draw, placement);
  CachedForwardArgs args = tensors.args();
  Options options{.max_ctas = way.max_ctas, .features = tensors.features(), .backend = "cuda", .kernels = "sm86"};
  for (TensorView* t : verify::every_tensor(args, options.features)) t->device = {Device::Kind::kCuda, way.device};
  std::vector<std::byte> workspace(cached_forward_workspace(args, options));
  cached_forward(args, workspace, options);
  std::vector<Bits> bits;
  for (std::size_t b = 0; b < draw.requests.size(); ++b) bits.emplace_back(tensors.out_bits(b), tensors.lse_bits(b));
  return bits;
}

/// Requests in one split, in several, and beside them some that are empty.
CachedCase some_case(int64_t head_dim, int64_t head_dim_v) {
  CachedCase c;
  c.seed = 5;
  c.keys = {391, 0, 200, 129, 700, 0, 40, 0};
  c.rows = {2, 0, 5, 1, 1, 3, 0, 0};
  c.heads_q = 6;
  c.heads_kv = 2;
  c.head_dim = head_dim;
  c.head_dim_v = head_dim_v;
  c.dtype = DataType::kBFloat16;
  c.split_size = 256;
  c.batch_invariant = true;
  return c;
}

std::vector<CachedCase> some_cases() {
  std::vector<CachedCase> cases;
  cases.push_back(some_case(64, 64));
  cases.push_back(some_case(128, 128));
  cases.back().split_size = 128;
  cases.back().dtype = DataType::kFloat16;
  cases.back().vectors = 1;
  cases.back().vectors_by_head = true;
  cases.push_back(some_case(192, 128));
  cases.back().window = {150, -1};
  cases.back().tail = 5;
  cases.back().tail_depth = true;
  cases.push_back(some_case(64, 64));
  cases.back().float8 = true;
  cases.back().k_scale = cases.back().v_scale = verify::ScaleShape::kTokenHead;
  cases.back().blocks = verify::CachedBlocks::kRowsAndKeys;
  cases.back().tables = verify::CacheTables::kLists;
  cases.push_back(some_case(256, 256));
  cases.back().split_size = 1024;
  cases.back().sink = true;
  cases.push_back(some_case(64, 64));  // rows of a tile that see nothing of the first split, or of the last
  cases.back().window = {1, -1};
  cases.back().keys[0] = 258;
  cases.back().rows[0] = 5;
  return cases;
}

TEST(InvariantBits, AreOfRightResults) {
  for (const CachedCase& c : some_cases()) {
    const verify::Verdict verdict = run_case(c, {.backend = "cuda", .dense = {}});
    EXPECT_EQ(verdict.skipped, "") << describe(c);
    for (const std::string& failure : verdict.failures) ADD_FAILURE() << describe(c) << ": " << failure;
  }
}

TEST(InvariantBits, AloneAndBesideOthersOnAnyDevice) {
  for (const CachedCase& c : some_cases()) {
    SCOPED_TRACE(describe(c));
    const CachedDraw all(c);
    std::vector<Bits> wanted;
    for (std::size_t b = 0; b < all.requests.size(); ++b) wanted.push_back(bits_of(all.alone(b), {})[0]);
    for (const Way& way : {Way{}, Way{1}, Way{2, 0, 3, 16}, Way{2, 5, 4, 64}, Way{0, 1, 5, 1}})
      EXPECT_TRUE(bits_of(all, way) == wanted) << "device " << way.device << ", max_ctas " << way.max_ctas;
  }
}

TEST(InvariantBits, ANeighbourThatGrows) {
  CachedCase c = some_case(64, 64);
  c.keys = {700, 9};
  c.rows = {1, 1};
  const CachedDraw before(c);
  c.keys[1] = 10;
  CachedDraw after(c);
  after.requests[0] = before.requests[0];
  EXPECT_TRUE(bits_of(before, {})[0] == bits_of(after, {})[0]);
}

/// Otherwise the tests above would show nothing.
TEST(InvariantBits, OtherSplitsHaveOtherBits) {
  CachedCase c = some_case(64, 64);
  const std::vector<Bits> wanted = bits_of(CachedDraw(c), {});
  c.split_size = 128;
  EXPECT_FALSE(bits_of(CachedDraw(c), {}) == wanted);
  c.batch_invariant = false;
  const CachedDraw all(c);
  EXPECT_FALSE(bits_of(all, {1}) == bits_of(all, {2})) << "shares cut units where multiprocessors say so";
}

/// A request of lists of pages may be longer than the plan's max_keys, which the host cannot see. The last split has
/// the rest, and blocks that stand for none are not among it.
TEST(InvariantBits, MoreKeysThanThePlanHasRoomFor) {
  CachedCase c = some_case(64, 64);
  c.keys = {5000};
  c.rows = {1};
  c.split_size = 128;
  c.tables = verify::CacheTables::kLists;
  c.blocks = verify::CachedBlocks::kKeys;
  c.blocks_by_head = true;
  const CachedDraw draw(c);
  const CachedPlacement placement(c);
  CachedTensors tensors(draw, placement);
  CachedForwardArgs args = tensors.args();
  Options options{.features = tensors.features(), .backend = "cuda"};
  for (TensorView* t : verify::every_tensor(args, options.features)) t->device = {Device::Kind::kCuda, 0};
  std::vector<std::byte> workspace(cached_forward_workspace(args, options));
  cached_forward(args, workspace, options);
  const verify::RequestResults wanted = tensors.results(0);
  CachedPlan plan{.capacities = {.max_batch = 1,
                                 .max_rows = 8,
                                 .max_keys = 2048,
                                 .heads_q = c.heads_q,
                                 .heads_kv = c.heads_kv,
                                 .head_dim = 64,
                                 .head_dim_v = 64,
                                 .batch_invariant = true,
                                 .split_size = 128},
                  .buffer = {},
                  .device = args.q.device};
  std::vector<std::byte> buffer(cached_plan_bytes(plan.capacities, plan.device));
  plan.buffer = buffer;
  build_cached_plan(args, plan, options);
  args.plan = &plan;
  cached_forward(args, {}, options);
  const verify::RequestResults got = tensors.results(0);
  for (int64_t h = 0; h < c.heads_q; ++h) EXPECT_NEAR(got.lse.head(0, h)[0], wanted.lse.head(0, h)[0], 1e-4);
}

/// A plan that has no room for a request's splits, or is of another kind.
TEST(InvariantBits, PlansOfOtherCallsAreRefused) {
  CachedCase c = some_case(64, 64);
  const CachedDraw draw(c);
  CachedPlacement placement(c);
  CachedTensors tensors(draw, placement);
  CachedForwardArgs args = tensors.args();
  Options options{.features = tensors.features(), .backend = "cuda"};
  for (TensorView* t : verify::every_tensor(args, options.features)) t->device = {Device::Kind::kCuda, 0};
  const auto error = [&](CachedCapacities capacities, bool batch_invariant) -> std::string {
    CachedPlan plan{.capacities = capacities, .buffer = {}, .device = args.q.device};
    std::vector<std::byte> buffer(cached_plan_bytes(plan.capacities, plan.device));
    plan.buffer = buffer;
    try {
      args.plan = nullptr;
      args.batch_invariant = capacities.batch_invariant;
      build_cached_plan(args, plan, options);
      args.plan = &plan;
      args.batch_invariant = batch_invariant;
      cached_forward(args, {}, options);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  CachedCapacities capacities{.max_batch = 8,
                              .max_rows = 64,
                              .max_keys = 1024,
                              .heads_q = 6,
                              .heads_kv = 2,
                              .head_dim = 64,
                              .head_dim_v = 64,
                              .batch_invariant = true,
                              .split_size = 256};
  EXPECT_EQ(error(capacities, true), "");
  EXPECT_NE(error(capacities, false).find("batch_invariant of the call is 0 and of the plan 1"), std::string::npos);
  capacities.batch_invariant = false;
  EXPECT_NE(error(capacities, true).find("batch_invariant of the call is 1 and of the plan 0"), std::string::npos);
  capacities.batch_invariant = true;
  capacities.max_total_keys = 500;
  EXPECT_NE(error(capacities, true).find("splits of split_size 256; the plan's max_keys has 2"), std::string::npos)
      << error(capacities, true);
}

}  // namespace
}  // namespace flashmask::test
