// SPDX-License-Identifier: Apache-2.0
// A plan made on a CUDA device against the host's, byte for byte.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "backends/cuda/plan/device_plan.h"
#include "families/families.h"
#include "flashmask/builders.h"
#include "flashmask/plan.h"
#include "gpu/device_mask.h"
#include "plan/plan_buffer.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

class PlanOnDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = no_device(); !why.empty()) GTEST_SKIP() << "skipped: " << why;
  }
};

/// Names the part of a plan that a byte belongs to.
std::string part_of(const PlanLayout& l, int64_t byte) {
  const std::pair<int64_t, const char*> parts[] = {{0, "header"},
                                                   {l.row_live, "row_live"},
                                                   {l.row_full, "row_full"},
                                                   {l.key_live, "key_live"},
                                                   {l.key_full, "key_full"},
                                                   {l.row_counts, "row_counts"},
                                                   {l.key_counts, "key_counts"},
                                                   {l.key_order, "key_order"},
                                                   {l.row_tile_counts_128, "row_tile_counts_128"},
                                                   {l.row_tile_order_128, "row_tile_order_128"},
                                                   {l.row_tile_counts_192, "row_tile_counts_192"},
                                                   {l.row_tile_order_192, "row_tile_order_192"},
                                                   {l.scratch, "scratch"},
                                                   {l.most_runs, "most_runs"},
                                                   {l.extents(), "extents"},
                                                   {l.ascending_lists, "ascending_lists"},
                                                   {l.tiles_before, "tiles_before"},
                                                   {l.tile_bits, "tile_bits"},
                                                   {l.bytes, "past the end"}};
  std::string name;
  for (const auto& [begin, part] : parts) {
    if (byte >= begin && (begin > 0 || name.empty())) name = std::string(part) + " + " + std::to_string(byte - begin);
  }
  return name;
}

bool can_be_in_runs(const Mask& mask) { return !mask.has_interval_lists() && !mask.has_positions(); }

/// A plan on the host: the bytes that a device would write into memory of `poison`, and how these are laid out. What
/// else is in one that lacks runs is its writer's own.
struct HostPlan {
  PlanLayout layout;
  std::vector<std::byte> bytes;

  explicit HostPlan(const Mask& mask, std::byte poison = {}, PlanForm form = PlanForm::kBits)
      : layout(mask.seqlen_q(), mask.seqlen_k(), mask.batch(), mask.heads(),
               most_bit_tiles(mask.view(), {Device::Kind::kCuda, 0}), form),
        bytes(static_cast<std::size_t>(layout.bytes), poison) {
    write_plan(mask.view(), layout, bytes);
  }
};

void expect_bytes(const std::vector<std::byte>& got, const HostPlan& plan, std::byte poison, const std::string& what) {
  int shown = 0;
  for (std::size_t at = 0; at < got.size() && shown < 8; ++at) {
    const std::byte right = at < plan.bytes.size() ? plan.bytes[at] : poison;
    if (got[at] == right) continue;
    ++shown;
    ADD_FAILURE() << what << ": byte " << at << " (" << part_of(plan.layout, static_cast<int64_t>(at)) << ") is "
                  << static_cast<int>(got[at]) << ", the host's " << static_cast<int>(right);
  }
}

/// Makes the plan twice, in memory that held something else and in its own result.
void expect_plan(const Mask& mask, PlanForm form, const std::string& what, int64_t gap) {
  constexpr std::byte kPoison{0xa5};
  const HostPlan plan(mask, kPoison, form);
  const DeviceMask on_device(mask, gap);
  DeviceBytes buffer(plan.bytes.size() + 64);
  buffer.fill(static_cast<int>(kPoison));
  for (const char* run : {", first run", ", second run"}) {
    cuda::launch_plan(on_device.view(), plan.layout, buffer.data(), nullptr);
    require(cudaDeviceSynchronize(), "the plan's kernels");
    const std::vector<std::byte> got = buffer.read();
    if (most_runs(plan.layout, plan.bytes) > 0) {
      ASSERT_GT(most_runs(plan.layout, got), kLineRuns) << what + run;
    } else {
      expect_bytes(got, plan, kPoison, what + run);
    }
    if (testing::Test::HasFailure()) return;
  }
}

void expect_plan(const Mask& mask, const std::string& what, int64_t gap = 0) {
  expect_plan(mask, PlanForm::kBits, what, gap);
  if (can_be_in_runs(mask)) expect_plan(mask, PlanForm::kRuns, what + ", in runs", gap);
}

std::string shape(const Mask& mask) {
  return std::to_string(mask.batch()) + " x " + std::to_string(mask.heads()) + " x (" +
         std::to_string(mask.seqlen_q()) + ", " + std::to_string(mask.seqlen_k()) + ")";
}

TEST_F(PlanOnDevice, RandomMasks) {
  Random random(1);
  for (int64_t n = 0; n < scaled(600); ++n) {
    const ColumnKind kind = kAllColumnKinds[static_cast<std::size_t>(n) % std::size(kAllColumnKinds)];
    const int64_t longest = n % 10 == 0 ? 9000 : 900;
    const Mask mask(random_parts(random, kind, random.integer(0, longest), random.integer(0, longest),
                                 random.integer(1, 3), random.integer(1, 3)));
    expect_plan(mask, "case " + std::to_string(n) + ", " + shape(mask), random.integer(0, 1));
    if (HasFailure()) return;
  }
}

TEST_F(PlanOnDevice, EveryPairOfLengths) {
  const int64_t lengths[] = {0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000};
  Random random(2);
  for (const int64_t rows : lengths) {
    for (const int64_t keys : lengths) {
      for (const ColumnKind kind :
           {ColumnKind::kNone, ColumnKind::kDocuments, ColumnKind::kFourBounds, ColumnKind::kEviction}) {
        const Mask mask(random_parts(random, kind, rows, keys, random.integer(1, 2), random.integer(1, 2)));
        expect_plan(mask, shape(mask));
        if (HasFailure()) return;
      }
      expect_plan(masks::causal(rows, keys), "causal " + std::to_string(rows) + "x" + std::to_string(keys));
      if (HasFailure()) return;
    }
  }
}

TEST_F(PlanOnDevice, BlockMasks) {
  // The block mask has a batch and heads of its own: more, as many or fewer than those of the vectors.
  Random random(3);
  for (int64_t n = 0; n < scaled(200); ++n) {
    const int64_t batch = random.integer(2, 3), heads = random.integer(1, 3);
    const bool fewer = random.flip();
    MaskParts parts = random_parts(random, random_kind(random), random.integer(0, 3000), random.integer(0, 3000),
                                   random.flip() ? 1 : batch, fewer ? heads : heads * 2);
    draw_block_mask(random, random.flip() ? 1 : batch, fewer ? heads * 2 : heads, parts);
    const Mask mask(parts);
    expect_plan(mask, "case " + std::to_string(n) + ", " + shape(mask));
    if (HasFailure()) return;
  }
}

TEST_F(PlanOnDevice, IntervalLists) {
  Random random(12);
  for (int64_t n = 0; n < scaled(400); ++n) {
    const int64_t longest = n % 10 == 0 ? 5000 : 600, batch = random.integer(1, 3), heads = random.integer(1, 2);
    MaskParts parts = random_parts(random, ColumnKind::kLists, random.integer(0, longest), random.integer(0, longest),
                                   random.flip() ? 1 : batch, heads);
    if (random.integer(0, 2) == 0 && parts.seqlen_q > 0 && parts.seqlen_k > 0)
      draw_positions(random, random.flip() ? 1 : batch, parts);
    if (random.integer(0, 2) == 0) draw_block_mask(random, random.flip() ? 1 : batch, heads * 2, parts);
    const Mask mask(parts);
    expect_plan(mask, "case " + std::to_string(n) + ", " + shape(mask));
    if (HasFailure()) return;
  }
}

/// Lists as no normalised mask has them: in any order, overlapping, empty, out of range.
struct RawLists {
  DeviceBytes column_ptr, intervals;
  MaskView view;

  explicit RawLists(const MaskParts& parts)
      : column_ptr(parts.column_ptr), intervals(parts.intervals), view(Mask(without_lists(parts)).view()) {
    view.bounds_batch = parts.batch;
    view.bounds_heads = parts.heads;
    view.column_ptr = reinterpret_cast<const int32_t*>(column_ptr.data());
    view.intervals = reinterpret_cast<const int32_t*>(intervals.data());
    view.listed_intervals = static_cast<int64_t>(parts.intervals.size() / 2);
    view.device = {Device::Kind::kCuda, 0};
  }
  static MaskParts without_lists(MaskParts parts) {
    parts.column_ptr.clear();
    parts.intervals.clear();
    return parts;
  }
};

TEST_F(PlanOnDevice, ListsInAnyOrderAreTheirUnion) {
  Random random(13);
  for (int64_t n = 0; n < scaled(100); ++n) {
    MaskParts parts = random_parts(random, ColumnKind::kLists, random.integer(1, 600), random.integer(1, 600),
                                   random.integer(1, 2), random.integer(1, 2));
    const Mask mask(parts);
    if (!mask.has_interval_lists()) continue;
    const HostPlan plan(mask);
    const RawLists raw(parts);
    DeviceBytes buffer(plan.bytes.size());
    buffer.fill(0);
    cuda::launch_plan(raw.view, buffer.data(), nullptr);
    std::vector<std::byte> got = buffer.read();
    // The hash, the header's last word, is of the lists as they are, and which of them ascend says so.
    const auto copy = [&](int64_t begin, int64_t end) {
      std::copy(plan.bytes.begin() + begin, plan.bytes.begin() + end, got.begin() + begin);
    };
    copy(plan.layout.row_live - 8, plan.layout.row_live);
    copy(plan.layout.ascending_lists, plan.layout.tiles_before);
    expect_bytes(got, plan, {}, "case " + std::to_string(n) + ", " + shape(mask));
    if (HasFailure()) return;
  }
}

TEST_F(PlanOnDevice, NoListReadsBeyondTheIntervals) {
  MaskParts parts{.seqlen_q = 100, .seqlen_k = 3, .column_ptr = {0, 1, 2, 3}, .intervals = {1, 2, 3, 4, 5, 6}};
  RawLists raw(parts);
  raw.column_ptr.copy_from(std::vector<int32_t>{-7, INT32_MAX, INT32_MIN, 1000});
  DeviceBytes buffer(static_cast<std::size_t>(PlanLayout(100, 3, 1, 1, 2).bytes));
  cuda::launch_plan(raw.view, buffer.data(), nullptr);
  require(cudaDeviceSynchronize(), "the plan's kernels");
}

TEST_F(PlanOnDevice, RoomForBitTiles) {
  Random random(14);
  MaskParts parts;
  do {
    parts = random_parts(random, ColumnKind::kLists, 700, 900);
    parts.band = Band::causal();
  } while (!Mask(parts).has_interval_lists());
  const Mask mask(parts);
  const DeviceMask on_device(mask);
  const Device device{Device::Kind::kCuda, 0};
  const int64_t most = most_bit_tiles(mask.view(), device);
  EXPECT_EQ(most, 11 * 8);
  EXPECT_EQ(most_bit_tiles(mask.view(), {}), kNoBits);
  const auto layout_of = [](int64_t tiles) { return PlanLayout(700, 900, 1, 1, tiles); };
  DeviceBytes scratch(static_cast<std::size_t>(layout_of(0).bytes));
  const int64_t tiles = count_bit_tiles(on_device.view(), {scratch.data(), scratch.size()}, device);
  ASSERT_GT(tiles, 0);
  ASSERT_LT(tiles, most);
  for (const int64_t room : {most, tiles}) {
    DeviceBytes buffer(static_cast<std::size_t>(layout_of(room).bytes));
    buffer.fill(0);
    build_plan(on_device.view(), {buffer.data(), buffer.size()}, device);
    std::vector<std::byte> expected(buffer.size());
    build_plan(mask.view(), layout_of(room), expected);
    EXPECT_EQ(buffer.read(), expected);
    DeviceBytes again(buffer.size());
    const auto plan = PlanView::on_device(layout_of(room), {buffer.data(), buffer.size()}, device);
    validate_plan(on_device.view(), plan, {again.data(), again.size()});
  }
  DeviceBytes small(static_cast<std::size_t>(layout_of(tiles - 1).bytes));
  expect_invalid({"plan buffer has", "room for " + std::to_string(tiles - 1) + " bit tiles",
                  "its contents have " + std::to_string(tiles), std::to_string(layout_of(tiles).bytes)},
                 [&] { build_plan(on_device.view(), {small.data(), small.size()}, device); });
  expect_invalid({"scratch has", "needs " + std::to_string(layout_of(0).bytes)},
                 [&] { count_bit_tiles(on_device.view(), {scratch.data(), 100}, device); });
}

/// Every other of so many blocks a side is kept.
Mask striped(int64_t blocks) {
  MaskParts parts{.seqlen_q = blocks * kBlockMaskSize, .seqlen_k = blocks * kBlockMaskSize};
  for (int64_t n = 0; n < blocks * blocks; ++n) parts.block_mask.push_back((n / blocks + n % blocks) % 2 == 0 ? 1 : 0);
  return Mask(parts);
}

TEST_F(PlanOnDevice, Runs) {
  // As many as there is room for, one more, and many more; with ragged ends.
  for (const int64_t blocks : {14, 16, 17, 18, 40}) {
    expect_plan(striped(blocks), std::to_string(blocks) + " blocks");
    if (HasFailure()) return;
  }
  const Device device{Device::Kind::kCuda, 0};
  for (const int64_t blocks : {16, 18}) {
    const Mask mask = striped(blocks);
    const DeviceMask on_device(mask);
    const HostPlan plan(mask, {}, PlanForm::kRuns);
    DeviceBytes buffer(plan.bytes.size());
    const auto build = [&] { build_plan(on_device.view(), plan.layout, {buffer.data(), buffer.size()}, device); };
    if (blocks == 16) {
      build();
      EXPECT_EQ(buffer.read(), plan.bytes);
    } else {
      expect_invalid(
          {"8 runs", "its mask has lines of more", "it needs " + std::to_string(plan_layout(mask.view()).bytes)},
          build);
    }
  }
}

TEST_F(PlanOnDevice, LongPlansOfFewRunsAreCounted) {
  constexpr int64_t kLength = int64_t{300} << 10;
  const Device device{Device::Kind::kCuda, 0};
  const DeviceMask documents(make_family("causal_document", kLength, {}, 1)), stripes(striped(kLength / 128));
  for (const MaskView& mask : {documents.view(), stripes.view()}) {
    DeviceBytes scratch(static_cast<std::size_t>(count_plan_scratch(mask, device)));
    EXPECT_EQ(static_cast<int64_t>(scratch.size()), PlanLayout(kLength, kLength, 1, 1, kNoBits, PlanForm::kRuns).bytes);
    const PlanLayout layout = count_plan_layout(mask, {scratch.data(), scratch.size()}, device);
    EXPECT_EQ(layout.in_runs(), mask.block_mask == nullptr);
    DeviceBytes buffer(static_cast<std::size_t>(layout.bytes)), again(buffer.size());
    build_plan(mask, {buffer.data(), buffer.size()}, device);
    validate_plan(mask, PlanView::on_device(layout, {buffer.data(), buffer.size()}, device),
                  {again.data(), again.size()});
  }
}

TEST_F(PlanOnDevice, GraphsTakeNoRunsOfContents) {
  const Mask mask = striped(2);
  const DeviceMask on_device(mask);
  const HostPlan plan(mask, {}, PlanForm::kRuns);
  DeviceBytes buffer(plan.bytes.size());
  cudaStream_t stream;
  cudaGraph_t graph;
  require(cudaStreamCreate(&stream), "cudaStreamCreate");
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  expect_invalid({"8 runs", "while a graph is captured it needs"}, [&] {
    build_plan(on_device.view(), plan.layout, {buffer.data(), buffer.size()}, {Device::Kind::kCuda, 0}, stream);
  });
  cudaStreamEndCapture(stream, &graph);
  cudaStreamDestroy(stream);
}

TEST_F(PlanOnDevice, GraphsNeedRoomForAllBitTiles) {
  const MaskParts parts{.seqlen_q = 9, .seqlen_k = 1, .column_ptr = {0, 3}, .intervals = {1, 2, 3, 4, 5, 6}};
  const DeviceMask on_device{Mask(parts)};
  const Device device{Device::Kind::kCuda, 0};
  DeviceBytes buffer(static_cast<std::size_t>(PlanLayout(9, 1, 1, 1, 0).bytes));
  cudaStream_t stream;
  cudaGraph_t graph;
  require(cudaStreamCreate(&stream), "cudaStreamCreate");
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  expect_invalid({"room for 0 bit tiles", "while a graph is captured it needs"},
                 [&] { build_plan(on_device.view(), {buffer.data(), buffer.size()}, device, stream); });
  cudaStreamEndCapture(stream, &graph);
  cudaStreamDestroy(stream);
}

TEST_F(PlanOnDevice, LongLists) {
  Random random(15);
  for (const auto& [rows, keys] : {std::pair<int64_t, int64_t>{32768, 3000}, {3000, 32768}, {20001, 20001}}) {
    MaskParts parts = random_parts(random, ColumnKind::kLists, rows, keys);
    parts.band = Band::window(4000, 0);
    expect_plan(Mask(parts), shape(Mask(parts)));
    if (HasFailure()) return;
  }
}

TEST_F(PlanOnDevice, Positions) {
  Random random(9);
  for (int64_t n = 0; n < scaled(400); ++n) {
    const int64_t longest = n % 10 == 0 ? 9000 : 900, batch = random.integer(1, 3);
    MaskParts parts = random_parts(random, random_kind(random), random.integer(1, longest), random.integer(1, longest),
                                   random.flip() ? 1 : batch, random.integer(1, 3));
    draw_positions(random, random.flip() ? 1 : batch, parts);
    if (random.integer(0, 3) == 0) draw_block_mask(random, random.flip() ? 1 : batch, parts.heads * 2, parts);
    if (random.integer(0, 5) == 0) parts.band = Band::none();  // then they count for the hash alone
    const Mask mask(parts);
    expect_plan(mask, "case " + std::to_string(n) + ", " + shape(mask), random.integer(0, 1));
    if (HasFailure()) return;
  }
}

TEST_F(PlanOnDevice, PositionsOfLongMasks) {
  Random random(10);
  const std::pair<int64_t, int64_t> shapes[] = {{131072, 131072}, {131071, 70001}, {1048576, 100}, {100, 1048576}};
  for (const auto& [rows, keys] : shapes) {
    for (int n = 0; n < 4; ++n) {
      MaskParts parts = random_parts(random, ColumnKind::kFourBounds, rows, keys);
      draw_positions(random, 1, parts);
      parts.band = random.flip() ? Band::causal() : Band::window(4000, 100);
      const Mask mask(parts);
      expect_plan(mask, shape(mask));
      if (HasFailure()) return;
    }
  }
}

TEST_F(PlanOnDevice, PositionsInACudaGraphWithNewContents) {
  Random random(11);
  MaskParts parts = random_parts(random, ColumnKind::kDocuments, 5000, 6000);
  parts.band = Band::window(700, 0);
  draw_positions(random, 1, parts);
  DeviceMask on_device{Mask(parts)};
  DeviceBytes buffer(HostPlan(Mask(parts)).bytes.size());
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  require(cudaStreamCreate(&stream), "cudaStreamCreate");
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  cuda::launch_plan(on_device.view(), buffer.data(), stream);
  require(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  require(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  for (int n = 0; n < 5; ++n) {
    for (auto* positions : {&parts.q_pos, &parts.k_pos}) {
      for (int32_t& position : *positions) position = static_cast<int32_t>(random.integer(0, 6000));
    }
    const Mask mask(parts);
    on_device.assign(mask);
    require(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    require(cudaStreamSynchronize(stream), "the plan's kernels");
    expect_bytes(buffer.read(), HostPlan(mask), {}, "replay " + std::to_string(n));
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(PlanOnDevice, EveryFamily) {
  for (const Family& family : families()) {
    for (const int64_t seqlen : {1, 129, 700, 8192, 20000}) {
      const Mask mask = make_family(family.name, seqlen, {}, 5);
      expect_plan(mask, std::string(family.name) + " at " + std::to_string(seqlen));
      if (HasFailure()) return;
    }
  }
}

TEST_F(PlanOnDevice, LongMasks) {
  Random random(4);
  const std::pair<int64_t, int64_t> shapes[] = {{8192, 8192},    {32768, 32768},  {131072, 131072},
                                                {131071, 70001}, {70001, 131071}, {1048576, 100},
                                                {100, 1048576},  {300000, 5000},  {131072 + 1, 129}};
  for (const auto& [rows, keys] : shapes) {
    for (const ColumnKind kind : kAllColumnKinds) {
      const Mask mask(random_parts(random, kind, rows, keys));
      expect_plan(mask, "kind " + std::to_string(static_cast<int>(kind)) + ", " + shape(mask));
      if (HasFailure()) return;
    }
  }
}

TEST_F(PlanOnDevice, AllCountsEqual) {
  // Ties keep ascending order, and whole warps add events to the same granules.
  for (const int64_t seqlen : {8192, 131072, 300001}) {
    expect_plan(masks::full(seqlen, seqlen), "full " + std::to_string(seqlen));
    expect_plan(masks::causal(seqlen, seqlen), "causal " + std::to_string(seqlen));
    MaskParts hidden{.seqlen_q = seqlen, .seqlen_k = seqlen};
    hidden.lts.assign(static_cast<std::size_t>(seqlen), 0);
    expect_plan(Mask(hidden), "all hidden " + std::to_string(seqlen));
    if (HasFailure()) return;
  }
}

TEST_F(PlanOnDevice, AMillionTokens) {
  Random random(5);
  const Mask mask(random_parts(random, ColumnKind::kFourBounds, 1048576, 1048576));
  expect_plan(mask, shape(mask));
  expect_plan(make_family("causal_document", 1048576, {}, 1), "causal document");
}

TEST_F(PlanOnDevice, ManyMasks) {
  Random random(6);
  const Mask mask(random_parts(random, ColumnKind::kFourBounds, 1000, 1000, 20, 30));
  expect_plan(mask, shape(mask));
}

TEST_F(PlanOnDevice, InACudaGraphWithNewContents) {
  Random random(7);
  const int64_t rows = 5000, keys = 6000;
  MaskParts parts = random_parts(random, ColumnKind::kFourBounds, rows, keys, 2, 2);
  DeviceMask on_device{Mask(parts)};
  DeviceBytes buffer(HostPlan(Mask(parts)).bytes.size());
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  require(cudaStreamCreate(&stream), "cudaStreamCreate");
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  cuda::launch_plan(on_device.view(), buffer.data(), stream);
  require(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  require(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  for (int n = 0; n < 5; ++n) {
    for (auto* vector : {&parts.lts, &parts.lte, &parts.uts, &parts.ute}) {
      for (int32_t& row : *vector) row = static_cast<int32_t>(random.integer(0, rows));
    }
    const Mask mask(parts);
    on_device.assign(mask);
    require(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    require(cudaStreamSynchronize(stream), "the plan's kernels");
    expect_bytes(buffer.read(), HostPlan(mask), {}, "replay " + std::to_string(n));
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(PlanOnDevice, OneAfterTheOtherWithoutWaiting) {
  // Kernels of neighbouring plans must not overlap where one's buffer is the other's.
  Random random(8);
  std::vector<Mask> masks;
  std::vector<DeviceMask> on_device;
  for (int n = 0; n < 20; ++n) {
    masks.emplace_back(random_parts(random, ColumnKind::kFourBounds, 4000, 4000));
    on_device.emplace_back(masks.back());
  }
  const HostPlan first(masks[0]);
  DeviceBytes buffer(first.bytes.size()), copies(first.bytes.size() * masks.size());
  for (std::size_t n = 0; n < masks.size(); ++n) {
    cuda::launch_plan(on_device[n].view(), buffer.data(), nullptr);
    require(cudaMemcpyAsync(copies.data() + n * buffer.size(), buffer.data(), buffer.size(), cudaMemcpyDeviceToDevice),
            "cudaMemcpyAsync");
  }
  const std::vector<std::byte> bytes = copies.read();
  for (std::size_t n = 0; n < masks.size(); ++n) {
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(n * buffer.size());
    expect_bytes({begin, begin + static_cast<std::ptrdiff_t>(buffer.size())}, HostPlan(masks[n]), {},
                 "plan " + std::to_string(n));
  }
}

// --- Errors: found before anything is launched, with or without a device -----------------------------

TEST(PlanOnDeviceErrors, HostVectors) {
  const Mask mask({.seqlen_q = 4, .seqlen_k = 2, .lts = {1, 2}});
  expect_invalid({"vectors", "host memory"}, [&] { cuda::launch_plan(mask.view(), nullptr, nullptr); });
}

TEST(PlanOnDeviceErrors, TooLarge) {
  MaskView view{.seqlen_q = 1, .seqlen_k = kMaxSeqlen, .bounds_batch = 129};  // 129 * 2^24 key blocks, 70 GB
  expect_error(ErrorCode::kUnsupported, {"batch 129", "seqlen_k 2147483647", "2^31"},
               [&] { cuda::launch_plan(view, nullptr, nullptr); });
}

}  // namespace
}  // namespace flashmask::test
