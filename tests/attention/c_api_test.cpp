// SPDX-License-Identifier: Apache-2.0

// Reads of the C interface: shapes before contents, and only the contents that a function needs.

#include "flashmask/c_api.h"
#include "flashmask/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "support/c_tensor.h"

namespace flashmask::test {
namespace {

/// An address that nothing is mapped at.
const void* const kNowhere = reinterpret_cast<const void*>(std::uintptr_t{0x10000});

template <typename Struct>
Struct make() {
  Struct s{};
  s.struct_size = sizeof(s);
  return s;
}

fm_mask make_mask(int64_t seqlen_q, int64_t seqlen_k, uint32_t flags = 0) {
  auto mask = make<fm_mask>();
  mask.flags = flags;
  mask.seqlen_q = seqlen_q;
  mask.seqlen_k = seqlen_k;
  return mask;
}

/// A backward call of one batch entry and head without data; its first fields are a forward's.
fm_backward_args make_call(const fm_mask* mask, int64_t seqlen_q, int64_t seqlen_k) {
  auto args = make<fm_backward_args>();
  args.q = args.out = args.dout = args.dq = tensor(FM_FLOAT32, {1, seqlen_q, 1, 8}, kNowhere);
  args.k = args.v = args.dk = args.dv = tensor(FM_FLOAT32, {1, seqlen_k, 1, 8}, kNowhere);
  args.lse = tensor(FM_FLOAT32, {1, 1, seqlen_q}, kNowhere);
  args.mask = mask;
  return args;
}

fm_forward_args forward_of(const fm_backward_args& b) {
  auto args = make<fm_forward_args>();
  args.q = b.q;
  args.k = b.k;
  args.v = b.v;
  args.out = b.out;
  args.lse = b.lse;
  args.mask = b.mask;
  args.dense_mask = b.dense_mask;
  return args;
}

void expect_refused(fm_status status, const std::string& part) {
  EXPECT_EQ(status, FM_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fm_last_error()).find(part), std::string::npos)
      << "'" << part << "' is not in: " << fm_last_error();
}

/// Every function that takes this mask refuses it, without reading it, with a message that contains `part`.
void expect_refused_everywhere(const fm_mask& mask, const std::string& part) {
  const fm_backward_args backward = make_call(&mask, 300, 300);
  const fm_forward_args forward = forward_of(backward);
  std::vector<uint64_t> plan(4096), workspace(1 << 16);
  std::vector<uint8_t> visible(300 * 300);
  const fm_tensor dense = tensor(FM_BOOL, {1, 1, 300, 300}, visible.data());
  std::size_t bytes = 0;
  char text[8];
  expect_refused(fm_plan_bytes(&mask, &bytes), part);
  expect_refused(fm_plan_build(&mask, plan.data(), plan.size() * 8, nullptr), part);
  expect_refused(fm_plan_validate(&mask, plan.data(), plan.size() * 8, nullptr, 0, nullptr), part);
  expect_refused(fm_mask_to_dense(&mask, &dense), part);
  expect_refused(fm_forward_workspace(&forward, nullptr, &bytes), part);
  expect_refused(fm_forward(&forward, workspace.data(), workspace.size() * 8, nullptr), part);
  expect_refused(fm_backward_workspace(&backward, nullptr, &bytes), part);
  expect_refused(fm_backward(&backward, workspace.data(), workspace.size() * 8, nullptr), part);
  expect_refused(fm_explain(&forward, nullptr, text, sizeof(text), nullptr), part);
}

TEST(CInterface, TheMaskOfADropout) {
  const uint64_t state[2] = {7, uint64_t{1} << 63};
  std::vector<uint8_t> kept(2 * 3 * 20 * 30), want(kept.size());
  const fm_tensor there = tensor(FM_BOOL, {2, 3, 20, 30}, kept.data());
  ASSERT_EQ(fm_dropout_mask(0.4, state, &there), FM_OK) << fm_last_error();
  flashmask::dropout_mask({.p = 0.4, .state = state},
                          flashmask::TensorView::contiguous(want.data(), flashmask::DataType::kBool, {2, 3, 20, 30}));
  EXPECT_EQ(kept, want);
  ASSERT_EQ(fm_dropout_mask(0, nullptr, &there), FM_OK) << fm_last_error();
  EXPECT_EQ(kept, std::vector<uint8_t>(kept.size(), 1));
  expect_refused(fm_dropout_mask(0.4, nullptr, &there), "dropout_state is null");
  expect_refused(fm_dropout_mask(1, state, &there), "dropout_p is 1");
  expect_refused(fm_dropout_mask(0.4, state, nullptr), "kept is NULL");
}

TEST(CInterface, ABlockMaskOfAnotherShapeIsRefusedUnread) {
  const uint8_t one = 1;
  auto mask = make_mask(300, 300);
  for (const int64_t rows : {int64_t{300'000'000}, int64_t{1} << 31}) {
    mask.block_mask = tensor(FM_BOOL, {1, 1, rows, 1}, &one);
    expect_refused_everywhere(mask, "block_mask is bool [1, 1, " + std::to_string(rows) + ", 1]");
  }
  mask.block_mask = tensor(FM_BOOL, {int64_t{1} << 40, int64_t{1} << 40, 3, 3}, &one);
  expect_refused_everywhere(mask, "2^63");
  mask.block_mask = tensor(FM_BOOL, {1, 1, 3, 3}, &one);
  mask.block_mask.stride[2] = std::numeric_limits<int64_t>::max() / 2;
  expect_refused_everywhere(mask, "block_mask is bool [1, 1, 3, 3]; with its strides it spans more than 2^63");
}

TEST(CInterface, BoundsOfAnotherShapeAreRefusedUnread) {
  const int32_t one = 1;
  auto mask = make_mask(300, 300, FM_CAUSAL);
  mask.bounds = tensor(FM_INT32, {1, 1, 300'000'000, 1}, &one);
  expect_refused_everywhere(mask, "[1, 1, 300000000, 1]");
  mask.bounds = tensor(FM_INT32, {int64_t{1} << 40, int64_t{1} << 20, 300, 1}, &one);
  expect_refused_everywhere(mask, "2^63");
  mask.bounds = tensor(FM_INT32, {1, 1, 300, 1}, &one);
  mask.bounds.stride[2] = std::numeric_limits<int64_t>::min();
  expect_refused_everywhere(mask, "with its strides it spans more than 2^63");
}

TEST(CInterface, AMaskThatDoesNotFitTheCallIsRefusedUnread) {
  auto mask = make_mask(300, 300, FM_CAUSAL);
  mask.bounds = tensor(FM_INT32, {7, 1, 300, 1}, kNowhere);
  mask.block_mask = tensor(FM_BOOL, {1, 1, 3, 3}, kNowhere);
  const fm_forward_args forward = forward_of(make_call(&mask, 300, 300));
  expect_refused(fm_forward(&forward, nullptr, 0, nullptr), "mask's vectors have 7 batch entries");
  expect_refused(fm_explain(&forward, nullptr, nullptr, 0, nullptr), "mask's vectors have 7 batch entries");
  uint64_t plan[2] = {};
  expect_refused(fm_plan_build(&mask, plan, sizeof(plan), nullptr), "plan buffer has 16 bytes");
  const fm_tensor dense = tensor(FM_BOOL, {1, 1, 300, 300}, kNowhere);
  expect_refused(fm_mask_to_dense(&mask, &dense), "it must be bool or uint8, contiguous, [7, 1, 300, 300]");
  auto other = make_mask(300, 200);
  std::size_t bytes = 0;
  ASSERT_EQ(fm_plan_bytes(&other, &bytes), FM_OK);
  std::vector<uint64_t> of_other(bytes / 8);
  ASSERT_EQ(fm_plan_build(&other, of_other.data(), bytes, nullptr), FM_OK);
  expect_refused(fm_plan_validate(&mask, of_other.data(), bytes, nullptr, 0, nullptr), "not the plan of this mask");
}

TEST(CInterface, WorkspaceQueriesReadNoContents) {
  auto mask = make_mask(300, 200, FM_CAUSAL);
  mask.bounds = tensor(FM_INT32, {1, 1, 200, 1}, kNowhere);
  mask.block_mask = tensor(FM_BOOL, {1, 1, 3, 2}, kNowhere);
  const fm_backward_args nowhere = make_call(&mask, 300, 200);
  const fm_forward_args forward_nowhere = forward_of(nowhere);
  std::size_t forward_bytes = 0, backward_bytes = 0;
  ASSERT_EQ(fm_forward_workspace(&forward_nowhere, nullptr, &forward_bytes), FM_OK) << fm_last_error();
  ASSERT_EQ(fm_backward_workspace(&nowhere, nullptr, &backward_bytes), FM_OK) << fm_last_error();
  // A length that would take long to read.
  auto longest = make_mask(1, std::numeric_limits<int32_t>::max(), FM_CAUSAL);
  longest.bounds = tensor(FM_INT32, {1, 1, longest.seqlen_k, 1}, nullptr);
  const fm_forward_args of_longest = forward_of(make_call(&longest, 1, longest.seqlen_k));
  std::size_t longest_bytes = 0, plan_bytes = 0;
  ASSERT_EQ(fm_forward_workspace(&of_longest, nullptr, &longest_bytes), FM_OK) << fm_last_error();
  ASSERT_EQ(fm_plan_bytes(&longest, &plan_bytes), FM_OK) << fm_last_error();
  EXPECT_GT(longest_bytes, plan_bytes);
  // Contents change none of these sizes.
  const std::vector<int32_t> bounds(200, 300);
  const std::vector<uint8_t> blocks(6, 1);
  mask.bounds.data = const_cast<int32_t*>(bounds.data());
  mask.block_mask.data = const_cast<uint8_t*>(blocks.data());
  std::size_t bytes = 0;
  ASSERT_EQ(fm_forward_workspace(&forward_nowhere, nullptr, &bytes), FM_OK);
  EXPECT_EQ(bytes, forward_bytes);
  ASSERT_EQ(fm_backward_workspace(&nowhere, nullptr, &bytes), FM_OK);
  EXPECT_EQ(bytes, backward_bytes);
}

TEST(CInterface, AnExplanationReadsNoContentsWithoutTilesToCount) {
  auto mask = make_mask(0, 200, FM_CAUSAL);
  mask.bounds = tensor(FM_INT32, {1, 1, 200, 1}, kNowhere);
  const fm_forward_args no_rows = forward_of(make_call(&mask, 0, 200));
  char text[512];
  ASSERT_EQ(fm_explain(&no_rows, nullptr, text, sizeof(text), nullptr), FM_OK) << fm_last_error();
  EXPECT_NE(std::string(text).find("tiles: 0 of 0"), std::string::npos) << text;
  // No backend takes it: float64 is the reference's, by name.
  auto square = make_mask(200, 200, FM_CAUSAL);
  square.bounds = mask.bounds;
  fm_forward_args refused = forward_of(make_call(&square, 200, 200));
  for (fm_tensor* t : {&refused.q, &refused.k, &refused.v, &refused.out, &refused.lse}) t->dtype = FM_FLOAT64;
  ASSERT_EQ(fm_explain(&refused, nullptr, text, sizeof(text), nullptr), FM_OK) << fm_last_error();
  EXPECT_NE(std::string(text).find("no backend takes this call"), std::string::npos) << text;
  EXPECT_EQ(fm_forward(&refused, nullptr, 0, nullptr), FM_UNSUPPORTED);  // unread, too
}

TEST(CInterface, AnyNumberOfThreadsTakesTheWorkspaceOfTheWorkThereIs) {
  const fm_backward_args args = make_call(nullptr, 133, 133);
  auto options = make<fm_options>();
  std::size_t of_three = 0, of_many = 0;
  options.threads = 3;  // row tiles of 133 rows
  ASSERT_EQ(fm_backward_workspace(&args, &options, &of_three), FM_OK);
  options.threads = 100000;
  ASSERT_EQ(fm_backward_workspace(&args, &options, &of_many), FM_OK);
  EXPECT_EQ(of_many, of_three);
  EXPECT_LT(of_many, std::size_t{1} << 20);
}

/// The callback of a call, which keeps what it gives.
struct Allocator {
  std::vector<std::vector<std::byte>> given;
  bool has_memory = true;

  static void* allocate(void* context, std::size_t bytes) {
    auto* self = static_cast<Allocator*>(context);
    self->given.emplace_back(bytes);
    return self->has_memory ? self->given.back().data() : nullptr;
  }
  fm_options options() {
    auto result = make<fm_options>();
    result.allocate = allocate;
    result.allocate_context = this;
    return result;
  }
};

/// A causal call of `rows` rows and keys in both directions, in memory of its own.
struct SmallCall {
  std::vector<float> q, out, lse, dq, dk, dv;
  fm_mask mask;
  fm_backward_args args;

  explicit SmallCall(int64_t rows)
      : q(static_cast<std::size_t>(rows * 8), 0.5f), out(q), lse(static_cast<std::size_t>(rows)), dq(q), dk(q), dv(q) {
    mask = make_mask(rows, rows, FM_CAUSAL);
    args = make_call(&mask, rows, rows);
    for (fm_tensor* t : {&args.q, &args.k, &args.v, &args.dout}) t->data = q.data();
    args.out.data = out.data();
    args.lse.data = lse.data();
    args.dq.data = dq.data();
    args.dk.data = dk.data();
    args.dv.data = dv.data();
  }
};

TEST(CInterface, AMaskIsTheSameBorrowedAndCopied) {
  constexpr int64_t kRows = 200;
  std::vector<int32_t> bounds(kRows * 2), apart(kRows * 4, 7);
  for (std::size_t n = 0; n < bounds.size(); ++n) bounds[n] = apart[n * 2] = static_cast<int32_t>(n * 31 % 260) - 20;
  const std::vector<uint8_t> blocks{1, 0, 255, 2};
  const std::vector<int32_t> wide_blocks{1, 0, 3, -4};
  SmallCall borrowed(kRows), copied(kRows);
  borrowed.mask.bounds = tensor(FM_INT32, {1, 1, kRows, 2}, bounds.data());
  borrowed.mask.block_mask = tensor(FM_UINT8, {1, 1, 2, 2}, blocks.data());
  copied.mask.bounds = tensor(FM_INT32, {1, 1, kRows, 2}, apart.data());
  copied.mask.bounds.stride[2] = 4;
  copied.mask.bounds.stride[3] = 2;
  copied.mask.block_mask = tensor(FM_INT32, {1, 1, 2, 2}, wide_blocks.data());
  Allocator allocator;
  const fm_options options = allocator.options();
  std::size_t bytes = 0;
  ASSERT_EQ(fm_plan_bytes(&copied.mask, &bytes), FM_OK);
  std::vector<uint64_t> plan(bytes / 8);
  ASSERT_EQ(fm_plan_build(&copied.mask, plan.data(), bytes, nullptr), FM_OK) << fm_last_error();
  ASSERT_EQ(fm_plan_validate(&borrowed.mask, plan.data(), bytes, nullptr, 0, nullptr), FM_OK) << fm_last_error();
  for (SmallCall* call : {&borrowed, &copied}) {
    const fm_forward_args unplanned = forward_of(call->args);
    ASSERT_EQ(fm_forward(&unplanned, nullptr, 0, &options), FM_OK) << fm_last_error();
    call->args.plan = plan.data();
    call->args.plan_bytes = bytes;
    ASSERT_EQ(fm_backward(&call->args, nullptr, 0, &options), FM_OK) << fm_last_error();
  }
  for (const auto member : {&SmallCall::out, &SmallCall::lse, &SmallCall::dq, &SmallCall::dk, &SmallCall::dv})
    EXPECT_EQ(std::memcmp((borrowed.*member).data(), (copied.*member).data(), (copied.*member).size() * 4), 0);
  bounds[0] += 100;
  expect_refused(fm_backward(&borrowed.args, nullptr, 0, &options), "plan was not made for this mask");
}

TEST(CInterface, AnAllocatorGivesACallItsWorkspace) {
  SmallCall call(200), same(200);
  Allocator allocator;
  const fm_options options = allocator.options();
  const fm_forward_args forward = forward_of(call.args), same_forward = forward_of(same.args);
  std::size_t forward_bytes = 0, backward_bytes = 0;
  ASSERT_EQ(fm_forward_workspace(&forward, &options, &forward_bytes), FM_OK) << fm_last_error();
  ASSERT_EQ(fm_backward_workspace(&call.args, &options, &backward_bytes), FM_OK) << fm_last_error();
  EXPECT_TRUE(allocator.given.empty());  // asking for sizes allocates nothing
  ASSERT_EQ(fm_forward(&forward, nullptr, 0, &options), FM_OK) << fm_last_error();
  ASSERT_EQ(fm_backward(&call.args, nullptr, 0, &options), FM_OK) << fm_last_error();
  ASSERT_EQ(allocator.given.size(), 2u);
  EXPECT_EQ(allocator.given[0].size(), forward_bytes);
  EXPECT_EQ(allocator.given[1].size(), backward_bytes);

  std::vector<std::byte> workspace(std::max(forward_bytes, backward_bytes));
  ASSERT_EQ(fm_forward(&same_forward, workspace.data(), workspace.size(), nullptr), FM_OK) << fm_last_error();
  ASSERT_EQ(fm_backward(&same.args, workspace.data(), workspace.size(), nullptr), FM_OK) << fm_last_error();
  EXPECT_EQ(call.out, same.out);
  EXPECT_EQ(call.dq, same.dq);
}

TEST(CInterface, AnAllocatorIsHonouredOrRefused) {
  SmallCall call(200);
  Allocator allocator;
  fm_options options = allocator.options();
  const fm_forward_args forward = forward_of(call.args);
  std::byte workspace[8];
  expect_refused(fm_forward(&forward, workspace, sizeof(workspace), &options),
                 "workspace and options->allocate are both given");
  call.args.dq.shape[1] = 3;
  EXPECT_EQ(fm_backward(&call.args, nullptr, 0, &options), FM_INVALID_ARGUMENT);
  EXPECT_TRUE(allocator.given.empty());  // a call that is refused asks for nothing
  options.backend = "reference";         // which needs none
  ASSERT_EQ(fm_forward(&forward, nullptr, 0, &options), FM_OK) << fm_last_error();
  EXPECT_TRUE(allocator.given.empty());
  options.backend = nullptr;
  allocator.has_memory = false;
  std::fill(call.out.begin(), call.out.end(), -1.0f);
  EXPECT_EQ(fm_forward(&forward, nullptr, 0, &options), FM_OUT_OF_MEMORY);
  EXPECT_NE(std::string(fm_last_error()).find("options->allocate gave no memory for a workspace of"), std::string::npos)
      << fm_last_error();
  EXPECT_EQ(std::count(call.out.begin(), call.out.end(), -1.0f), static_cast<std::ptrdiff_t>(call.out.size()));
  options.allocate = nullptr;
  expect_refused(fm_forward(&forward, nullptr, 0, &options), "options->allocate_context");
}

TEST(CInterface, BothDirectionsAreExplained) {
  SmallCall call(200);
  char text[512], json[1024];
  ASSERT_EQ(fm_explain_backward(&call.args, nullptr, text, sizeof(text), nullptr), FM_OK) << fm_last_error();
  ASSERT_EQ(fm_explain_json(&call.args, 1, nullptr, nullptr, json, sizeof(json), nullptr), FM_OK) << fm_last_error();
  std::size_t bytes = 0;
  ASSERT_EQ(fm_backward_workspace(&call.args, nullptr, &bytes), FM_OK);
  const std::string of_workspace = std::to_string(bytes);
  EXPECT_NE(std::string(text).find("workspace: " + of_workspace + " bytes"), std::string::npos) << text;
  EXPECT_NE(std::string(json).find(of_workspace), std::string::npos) << json;
  EXPECT_NE(std::string(text).find("backend: cpu"), std::string::npos) << text;
}

TEST(CInterface, InfiniteWindowsAreUnbounded) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const auto dense_of = [](const fm_mask& mask) {
    std::vector<uint8_t> visible(7 * 5);
    const fm_tensor t = tensor(FM_BOOL, {1, 1, 7, 5}, visible.data());
    EXPECT_EQ(fm_mask_to_dense(&mask, &t), FM_OK) << fm_last_error();
    return visible;
  };
  for (const uint32_t causal : {0u, uint32_t{FM_CAUSAL}}) {
    for (const int64_t q_offset : {int64_t{0}, int64_t{1} << 40, -(int64_t{1} << 40)}) {
      auto mask = make_mask(7, 5, FM_HAS_WINDOW | FM_HAS_Q_OFFSET | causal);
      mask.q_offset = q_offset;
      mask.window_left = mask.window_right = -1;
      const std::vector<uint8_t> unbounded = dense_of(mask);
      for (const int64_t window : {kMax, kMax - 1, int64_t{1} << 62}) {
        mask.window_left = mask.window_right = window;
        EXPECT_EQ(dense_of(mask), unbounded) << window;
      }
    }
  }
  auto mask = make_mask(7, 5, FM_HAS_Q_OFFSET);
  std::size_t bytes = 0;
  for (const int64_t q_offset : {kMax, std::numeric_limits<int64_t>::min()}) {
    mask.q_offset = q_offset;
    expect_refused(fm_plan_bytes(&mask, &bytes), "q_offset is " + std::to_string(q_offset));
  }
}

TEST(CInterface, PeersArgumentsAreChecked) {
  void* data = nullptr;
  fm_peer_handle handle{};
  expect_refused(fm_peer_memory_create(0, 64, &data, &handle), "device is 0; it must be 1 + the index");
  expect_refused(fm_peer_memory_create(1, 0, &data, &handle), "bytes is 0");
  expect_refused(fm_peer_memory_create(1, 64, nullptr, &handle), "data is NULL");
  expect_refused(fm_peer_memory_open(1, nullptr, &data), "handle is NULL");
  expect_refused(fm_peer_memory_release(1, nullptr, 0), "data is NULL");
  uint32_t word = 0;
  const fm_transfer copy{FM_COPY, 0, &word, nullptr, 4}, unknown{3, 0, &word, &word, 4};
  expect_refused(fm_transfers_enqueue(&copy, 1, 1, nullptr), "a transfer's from is NULL");
  expect_refused(fm_transfers_enqueue(&unknown, 1, 1, nullptr), "a transfer's kind is 3");
  expect_refused(fm_transfers_enqueue(nullptr, 1, 1, nullptr), "transfers is NULL");
  expect_refused(fm_transfers_enqueue(&copy, -1, 1, nullptr), "count is -1");
  uint32_t* const flags[] = {&word, nullptr};
  expect_refused(fm_peers_signal(flags, 2, 1, 1, nullptr), "flags is NULL");
  expect_refused(fm_peers_signal(flags, 65, 1, 1, nullptr), "the number of peers is 65");
  auto settlement = make<fm_settlement>();
  expect_refused(fm_peers_settle(&settlement, 1, nullptr), "settlement->state is NULL");
  int32_t state[2] = {};
  settlement.state = state;
  settlement.peers = 1;
  expect_refused(fm_peers_settle(&settlement, 1, nullptr), "settlement->read_by_peers is NULL");
  settlement.peers = 0;
  expect_refused(fm_peers_settle(&settlement, 1, nullptr), "settlement->report is NULL");
  settlement.report = &word;
  settlement.timeout = -1;
  expect_refused(fm_peers_settle(&settlement, 1, nullptr), "settlement->timeout is -1");
  if (!kernels().empty()) return;
  EXPECT_EQ(fm_peer_memory_create(1, 64, &data, &handle), FM_NO_DEVICE);
  EXPECT_NE(std::string(fm_last_error()).find("not compiled in"), std::string::npos) << fm_last_error();
}

TEST(CInterface, MisalignedDataIsRefused) {
  alignas(8) char bytes[64] = {};
  auto mask = make_mask(4, 4, FM_CAUSAL);
  mask.bounds = tensor(FM_INT32, {1, 1, 4, 1}, bytes + 1);
  uint64_t plan[512];
  expect_refused(fm_plan_build(&mask, plan, sizeof(plan), nullptr),
                 "address of startend_row_indices is not a multiple of 4 bytes");
  fm_forward_args args = forward_of(make_call(nullptr, 1, 1));
  args.q.data = bytes + 2;
  expect_refused(fm_forward(&args, plan, sizeof(plan), nullptr), "address of q is not a multiple of 4 bytes");
}

}  // namespace
}  // namespace flashmask::test
