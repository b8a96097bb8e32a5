// SPDX-License-Identifier: Apache-2.0
// The instance of a GPU's kernels that a pair of head dims runs in, and its share of padding. Without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/sm90/common/column_blocks.h"
#include "backends/cuda/sm90/tile_config.h"
#include "flashmask/attention.h"
#include "flashmask/builders.h"

namespace flashmask::test {
namespace {

using Dims = std::pair<int64_t, int64_t>;  // head_dim, head_dim_v

TensorView tensor(std::initializer_list<int64_t> shape, DataType type) {
  TensorView t = TensorView::contiguous(reinterpret_cast<const void*>(uintptr_t{0x10000}), type, shape);
  t.device = {Device::Kind::kCuda, 0};
  return t;
}

/// A forward call on tensors that lie nowhere.
ForwardArgs call_of(const Dims& dims, int64_t seqlen = 256) {
  ForwardArgs args;
  args.q = args.k = tensor({1, seqlen, 2, dims.first}, DataType::kBFloat16);
  args.v = args.out = tensor({1, seqlen, 2, dims.second}, DataType::kBFloat16);
  args.lse = tensor({1, 2, seqlen}, DataType::kFloat32);
  return args;
}

/// Its backward.
BackwardArgs backward_of(const Dims& dims, int64_t seqlen = 256) {
  const ForwardArgs forward = call_of(dims, seqlen);
  BackwardArgs args;
  args.q = args.dq = forward.q, args.k = args.dk = forward.k, args.v = args.dv = forward.v;
  args.out = args.dout = forward.out, args.lse = forward.lse;
  return args;
}

/// Explains the call as the kernels of an architecture would run it.
template <typename Args>
Explanation explained(const std::string& arch, const Args& args) {
  return explain(args, {.kernels = arch}, GpuModel{});
}

/// The head dims of the instance that runs; none if the call is refused.
template <typename Args>
Dims instance_of(const std::string& arch, const Args& args) {
  std::string id = explained(arch, args).instance;
  if (const auto split = id.find(".split"); split != std::string::npos) id.erase(split);
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.id == id) return {kernel.head_dim, kernel.head_dim_v};
  }
  return {0, 0};
}

std::vector<Dims> instances_of(const std::string& arch) {
  std::vector<Dims> found;
  for (const KernelInfo& kernel : kernels()) {
    const Dims dims{kernel.head_dim, kernel.head_dim_v};
    if (kernel.op == "fwd" && kernel.arch == arch && std::ranges::find(found, dims) == found.end())
      found.push_back(dims);
  }
  return found;
}

/// The architectures that this build has attention kernels of; none without CUDA.
std::vector<std::string> architectures() {
  std::vector<std::string> found;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op == "fwd" && std::ranges::find(found, kernel.arch) == found.end()) found.push_back(kernel.arch);
  }
  return found;
}

class HeadDims : public testing::TestWithParam<std::string> {
 protected:
  const std::string& arch() const { return GetParam(); }
  bool is_hopper() const { return arch() == "sm90"; }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(HeadDims);
INSTANTIATE_TEST_SUITE_P(Of, HeadDims, testing::ValuesIn(architectures()), [](const auto& one) { return one.param; });

TEST_P(HeadDims, RunInTheNextLargerInstance) {
  const std::pair<Dims, Dims> expected[] = {
      {{8, 8}, {64, 64}},       {{40, 40}, {64, 64}},     {{64, 64}, {64, 64}},     {{24, 56}, {64, 64}},
      {{72, 72}, {96, 96}},     {{80, 80}, {96, 96}},     {{96, 96}, {96, 96}},     {{64, 72}, {96, 96}},
      {{64, 128}, {128, 128}},  {{8, 112}, {128, 128}},   {{128, 64}, {128, 128}},  {{112, 112}, {128, 128}},
      {{112, 8}, {128, 128}},   {{128, 128}, {128, 128}}, {{136, 8}, {192, 128}},   {{192, 128}, {192, 128}},
      {{160, 160}, {192, 192}}, {{96, 192}, {192, 192}},  {{192, 192}, {192, 192}}, {{224, 224}, {256, 256}},
      {{8, 256}, {256, 256}},   {{200, 64}, {256, 256}},  {{256, 256}, {256, 256}},
  };
  for (const auto& [dims, instance] : expected)
    EXPECT_EQ(instance_of(arch(), call_of(dims)), instance) << dims.first << " / " << dims.second;
  for (const Dims& dims : {Dims{104, 104}, Dims{72, 120}}) {
    const Dims instance = is_hopper() ? Dims{192, 128} : Dims{128, 128};  // no halves that TMA can step between
    EXPECT_EQ(instance_of(arch(), call_of(dims)), instance) << dims.first << " / " << dims.second;
  }
}

/// Expects the forward's choice, though three of the backward's products have head_dim and two head_dim_v.
TEST_P(HeadDims, TheBackwardRunsInAnInstanceOfTheForwards) {
  for (int64_t head_dim = 8; head_dim <= 256; head_dim += 8) {
    for (int64_t head_dim_v = 8; head_dim_v <= 256; head_dim_v += 8) {
      const Dims dims{head_dim, head_dim_v};
      EXPECT_EQ(instance_of(arch(), backward_of(dims)), instance_of(arch(), call_of(dims)))
          << head_dim << " / " << head_dim_v;
    }
  }
}

/// However its kernel divides them, a plan's block of keys counts as one tile.
TEST_P(HeadDims, TilesOfTheBackwardHaveTheKeysOfThePlansBlocks) {
  for (const Dims& dims : instances_of(arch()))
    EXPECT_EQ(explained(arch(), backward_of(dims)).tile.keys, 128) << dims.first;
}

/// The tile of a pair holds it, and every lesser one that would has to refuse rows that it cannot divide: an odd
/// multiple of 8 has no two halves that TMA can step between. Kernels without TMA divide none.
TEST_P(HeadDims, NoLesserInstanceWouldDo) {
  const std::vector<Dims> instances = instances_of(arch());
  const auto work = [](const Dims& dims) { return dims.first + dims.second; };
  const auto indivisible = [this](int64_t dim, int64_t of_tile) {
    return is_hopper() && of_tile == 128 && dim > 64 && dim % 16 != 0;
  };
  for (int64_t head_dim = 8; head_dim <= 256; head_dim += 8) {
    for (int64_t head_dim_v = 8; head_dim_v <= 256; head_dim_v += 8) {
      const Dims dims{head_dim, head_dim_v}, chosen = instance_of(arch(), call_of(dims));
      EXPECT_TRUE(chosen.first >= head_dim && chosen.second >= head_dim_v) << head_dim << " / " << head_dim_v;
      for (const Dims& other : instances) {
        if (other.first < head_dim || other.second < head_dim_v || work(other) >= work(chosen)) continue;
        EXPECT_TRUE(indivisible(head_dim, other.first) || indivisible(head_dim_v, other.second))
            << head_dim << " / " << head_dim_v << " does not run in " << other.first << " / " << other.second;
      }
    }
  }
}

TEST_P(HeadDims, ShareOfPadding) {
  EXPECT_EQ(explained(arch(), call_of({64, 64})).padding_share, 0);
  EXPECT_EQ(explained(arch(), call_of({128, 128})).padding_share, 0);
  EXPECT_DOUBLE_EQ(explained(arch(), call_of({40, 40})).padding_share, 1 - 80. / 128);
  EXPECT_DOUBLE_EQ(explained(arch(), call_of({64, 128})).padding_share, 0.25);
  EXPECT_NE(explained(arch(), call_of({64, 128})).configuration.find("(25.0 % of its work is padding)"),
            std::string::npos);
  EXPECT_EQ(explained(arch(), call_of({64, 64})).configuration.find("padding"), std::string::npos);
  EXPECT_DOUBLE_EQ(explained(arch(), backward_of({40, 64})).padding_share, 1 - (3 * 40 + 2 * 64) / (5 * 64.));
}

/// Hopper has two tiles of these dims, and the others one.
TEST_P(HeadDims, LongCallsTakeTheTallTileOfTheSameDims) {
  EXPECT_EQ(explained(arch(), call_of({40, 40}, 1 << 20)).tile.rows, is_hopper() ? 192 : 128);
  EXPECT_EQ(explained(arch(), call_of({40, 40})).tile.rows, 128);
}

void expect_refused(const std::string& arch, const ForwardArgs& args, const std::string& why) {
  const Explanation found = explained(arch, args);
  EXPECT_TRUE(found.backend.empty()) << found.instance;
  ASSERT_FALSE(found.rejected.empty());
  EXPECT_NE(found.rejected.front().find(why), std::string::npos) << found.rejected.front();
}

TEST_P(HeadDims, OnesThatNoInstanceHoldsAreRefusedWithTheNearest) {
  expect_refused(arch(), call_of({12, 64}),
                 "head_dim 12 with head_dim_v 64 is not taken by the forward; it takes multiples of 8");
  expect_refused(arch(), call_of({111, 64}), "the nearest is 128 / 128");
  expect_refused(arch(), call_of({60, 60}), "the nearest is 64 / 64");
}

TEST_P(HeadDims, RowsThatAreNotAlignedAreRefusedByName) {
  ForwardArgs args = call_of({40, 40});
  args.k.stride[2] = 44;
  expect_refused(arch(), args, "k has stride 44 in dimension 2; it must be a multiple of 8");
}

TEST_P(HeadDims, StridesThatTmaCannotTakeAreRefusedByNameWhereThereIsTma) {
  const auto expect_tma_refuses = [&](const ForwardArgs& args, const std::string& why) {
    if (is_hopper()) return expect_refused(arch(), args, why);
    EXPECT_EQ(explained(arch(), args).backend, "cuda") << why;
  };
  ForwardArgs expanded = call_of({40, 40}), far = expanded;
  expanded.q.stride[2] = 0;
  expect_tma_refuses(expanded, "q is expanded (stride 0) in dimension 2; make it contiguous");
  far.v.stride[1] = int64_t{1} << 40;
  expect_tma_refuses(far, "v has stride 1099511627776 in dimension 1; it must be below 2^39");
}

/// True if the backward of a call of ungrouped heads has two CTAs share the rows of each key tile.
bool shares_rows(const Dims& dims, int64_t heads, int64_t seqlen_q, int64_t seqlen_k, const Options& options = {},
                 bool is_causal = true) {
  BackwardArgs args;
  if (is_causal) args.mask = masks::causal(seqlen_q, seqlen_k);
  args.q = args.dq = tensor({1, seqlen_q, heads, dims.first}, DataType::kBFloat16);
  args.k = args.dk = tensor({1, seqlen_k, heads, dims.first}, DataType::kBFloat16);
  args.v = args.dv = tensor({1, seqlen_k, heads, dims.second}, DataType::kBFloat16);
  args.out = args.dout = tensor({1, seqlen_q, heads, dims.second}, DataType::kBFloat16);
  args.lse = tensor({1, heads, seqlen_q}, DataType::kFloat32);
  Options of_hopper = options;
  of_hopper.kernels = "sm90";
  return explain(args, of_hopper, GpuModel{}).instance.ends_with(".shared");
}

/// In fast mode and plain calls alone, on a GPU of 132 multiprocessors.
TEST_P(HeadDims, FewKeyTilesWithManyRowsAreSharedByTwoCtas) {
  if (!is_hopper()) GTEST_SKIP() << "kernels for mma.sync share none";
  for (const Dims& dims : {Dims{64, 64}, Dims{128, 128}, Dims{40, 64}, Dims{112, 112}}) {
    EXPECT_TRUE(shares_rows(dims, 8, 2048, 2048));
    EXPECT_TRUE(shares_rows(dims, 1, 1024, 100));
    EXPECT_TRUE(shares_rows(dims, 8, 2048, 2048, {.max_ctas = 2}));
    EXPECT_FALSE(shares_rows(dims, 8, 2048, 2048, {.max_ctas = 1}));
    EXPECT_FALSE(shares_rows(dims, 8, 2048, 2048, {.deterministic = true}));
    EXPECT_FALSE(shares_rows(dims, 8, 2048, 2048, {.features = {.softcap = 20}}));
    EXPECT_FALSE(shares_rows(dims, 4, 1023, 2048));
  }
  for (const Dims& dims : {Dims{96, 96}, Dims{192, 128}, Dims{192, 192}, Dims{256, 256}})
    EXPECT_FALSE(shares_rows(dims, 8, 2048, 2048));
}

/// More than 66 key tiles take two rounds of clusters, which only uneven ones repay: those of a causal mask.
TEST_P(HeadDims, KeyTilesOfTwoRoundsAreSharedUnderTheDiagonal) {
  if (!is_hopper()) GTEST_SKIP() << "kernels for mma.sync share none";
  const Dims dims{128, 128};
  EXPECT_TRUE(shares_rows(dims, 132, 2048, 128) && !shares_rows(dims, 133, 2048, 128));
  EXPECT_TRUE(shares_rows(dims, 66, 2047, 128) && !shares_rows(dims, 67, 2047, 128));
  const auto shares_all_rows = [&](int64_t heads) { return shares_rows(dims, heads, 2048, 128, {}, false); };
  EXPECT_TRUE(shares_all_rows(66) && !shares_all_rows(67));
}

// --- How columns lie in blocks -----------------------------------------------------------------------

TEST(ColumnBlocks, AreEqualPartsThatTmaCanStepBetween) {
  for (const int64_t tile : {64, 128, 192, 256}) {
    for (int64_t dim = 8; dim <= tile; dim += 8) {
      const auto [width, count] = sm90::equal_blocks(dim, tile);
      if (count == 0) continue;
      EXPECT_EQ(width * count, dim);
      EXPECT_EQ(width % 8, 0) << dim;
      EXPECT_LE(width, 64) << dim;
      EXPECT_LE(count, tile / 64) << dim;
    }
    EXPECT_EQ(sm90::equal_blocks(tile, tile).width, 64) << "a whole tile is not divided otherwise";
    EXPECT_EQ(sm90::equal_blocks(tile, tile).count, tile / 64);
  }
  EXPECT_EQ(sm90::equal_blocks(104, 128).count, 0);
}

TEST(Tiles, HoldTheirOwnHeadDims) {
  const auto expect_held = [](const auto& tiles) {
    for (const auto& tile : tiles) {
      EXPECT_TRUE(sm90::holds(tile, tile.head_dim, tile.head_dim) &&
                  sm90::holds(tile, tile.head_dim_v, tile.head_dim_v));
      const auto* least = sm90::least_tile(tiles, tile.head_dim, tile.head_dim_v);
      ASSERT_TRUE(least);
      EXPECT_EQ(least->head_dim, tile.head_dim);
      EXPECT_EQ(least->head_dim_v, tile.head_dim_v);
      EXPECT_EQ(sm90::padding_share(tile, tile.head_dim, tile.head_dim_v), 0);
    }
  };
  expect_held(sm90::kForwardTiles);
  expect_held(sm90::kBackwardTiles);
  // dQ, dK and S have head_dim, dP and dV head_dim_v.
  EXPECT_DOUBLE_EQ(sm90::padding_share(sm90::kBackwardTiles[0], 32, 64), 1 - (3 * 32 + 2 * 64) / (5 * 64.));
}

}  // namespace
}  // namespace flashmask::test
