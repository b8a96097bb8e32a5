// SPDX-License-Identifier: Apache-2.0
// Masks built on a device: vectors equal to those built in host memory, from parameters of either width, captured in a
// graph or not; wrong values do no harm; the cost of a build.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "common/message.h"
#include "common/random.h"
#include "flashmask/c_api.h"
#include "gpu/device_vector.h"
#include "support/family_cases.h"

namespace flashmask::test {
namespace {

constexpr int32_t kPoison = -77;

/// A case's parameters in host or device memory, in 32 or 64 bits.
class Given {
 public:
  Given(const FamilyCase& c, bool on_device, bool is_wide) {
    for (const FamilyVector& v : c.vectors) {
      const void* data = v.values.data();
      if (!is_wide)
        data = keep(narrow_, std::vector<int32_t>(v.values.begin(), v.values.end()), on_device);
      else if (on_device)
        data = keep(wide_, v.values, true);
      items_.push_back({v.name.c_str(), v.tensor(data, is_wide ? FM_INT64 : FM_INT32), 0});
    }
    for (const auto& [name, number] : c.numbers) items_.push_back({name.c_str(), {}, number});
  }
  const fm_mask_parameters* get() {
    all_ = {sizeof(all_), static_cast<uint32_t>(items_.size()), items_.data()};
    return &all_;
  }

 private:
  template <typename T>
  struct Memory {
    std::vector<T> host;
    std::unique_ptr<DeviceVector<T>> device;
  };
  template <typename T>
  static const void* keep(std::vector<std::unique_ptr<Memory<T>>>& all, const std::vector<T>& values, bool on_device) {
    all.push_back(std::make_unique<Memory<T>>());
    all.back()->host = values;
    if (!on_device) return all.back()->host.data();
    all.back()->device = std::make_unique<DeviceVector<T>>(values);
    return all.back()->device->data();
  }

  std::vector<std::unique_ptr<Memory<int32_t>>> narrow_;
  std::vector<std::unique_ptr<Memory<int64_t>>> wide_;
  std::vector<fm_mask_parameter> items_;
  fm_mask_parameters all_{};
};

/// Scratch on the device, given once for a build.
struct Scratch {
  std::unique_ptr<DeviceVector<uint8_t>> memory;
  static void* allocate(void* context, std::size_t bytes) {
    auto* const scratch = static_cast<Scratch*>(context);
    scratch->memory = std::make_unique<DeviceVector<uint8_t>>(std::vector<uint8_t>(bytes, 0xA5));
    return scratch->memory->data();
  }
};

fm_options options_on(cudaStream_t stream, Scratch& scratch) {
  fm_options options{};
  options.struct_size = sizeof(options);
  options.device = 1;
  options.stream = stream;
  options.allocate = Scratch::allocate;
  options.allocate_context = &scratch;
  return options;
}

fm_mask shape_of(const std::string& family, Given& given, const fm_options* options) {
  fm_mask mask{};
  mask.struct_size = sizeof(mask);
  EXPECT_EQ(fm_mask_shape(family.c_str(), given.get(), &mask, options), FM_OK) << family << ": " << fm_last_error();
  return mask;
}

std::size_t numbers_in(const fm_tensor& t) {
  int64_t numbers = t.dtype == FM_NONE ? 0 : 1;
  for (int d = 0; d < t.ndim; ++d) numbers *= t.shape[d];
  return static_cast<std::size_t>(numbers);
}

/// Counts all numbers that are built: the vectors and, after them, positions.
std::size_t numbers_in(const fm_mask& mask) { return numbers_in(mask.bounds) + numbers_in(mask.q_pos); }

void set_memory(fm_mask& mask, int32_t* memory) {
  mask.bounds.data = memory;
  if (mask.q_pos.dtype != FM_NONE) mask.q_pos.data = mask.k_pos.data = memory + numbers_in(mask.bounds);
}

std::vector<int32_t> on_host(const FamilyCase& c) {
  Given given(c, false, true);
  fm_mask mask = shape_of(c.family, given, nullptr);
  std::vector<int32_t> bounds(numbers_in(mask), kPoison);
  set_memory(mask, bounds.data());
  EXPECT_EQ(fm_mask_build(c.family.c_str(), given.get(), &mask, nullptr), FM_OK) << c.family << ": " << fm_last_error();
  return bounds;
}

/// With `kGuard` more numbers after the vectors, which nothing may touch.
constexpr std::size_t kGuard = 64;
std::vector<int32_t> on_device(const FamilyCase& c, bool is_wide) {
  Given given(c, true, is_wide);
  Scratch scratch;
  const fm_options options = options_on(nullptr, scratch);
  fm_mask mask = shape_of(c.family, given, &options);
  const DeviceVector<int32_t> bounds(std::vector<int32_t>(numbers_in(mask) + kGuard, kPoison));
  set_memory(mask, bounds.data());
  EXPECT_EQ(fm_mask_build(c.family.c_str(), given.get(), &mask, &options), FM_OK)
      << c.family << ": " << fm_last_error();
  std::vector<int32_t> all = bounds.to_host();
  EXPECT_TRUE(std::all_of(all.end() - kGuard, all.end(), [](int32_t x) { return x == kPoison; })) << c.family;
  all.resize(all.size() - kGuard);
  return all;
}

TEST(MaskBuildOnDevice, TheSameVectorsAsInHostMemory) {
  FLASHMASK_NEEDS_GPU();
  for (const int64_t longest : {70, 3000, 20000}) {
    FamilyCases cases(static_cast<uint64_t>(longest), longest);
    for (const std::string& family : known_families()) {
      for (int repetition = 0; repetition < 12; ++repetition) {
        const FamilyCase c = cases.next(family);
        const std::vector<int32_t> want = on_host(c);
        for (const bool is_wide : {false, true}) {
          ASSERT_TRUE(on_device(c, is_wide) == want) << family << " up to " << longest << ", repetition " << repetition
                                                     << ", " << (is_wide ? 64 : 32) << " bits";
        }
      }
    }
  }
}

/// Ids that go up after a few tokens each, or only once, in leads that differ.
FamilyVector ids(const std::string& name, int64_t batch, int64_t heads, int64_t count, int64_t longest) {
  Random random(static_cast<uint64_t>(count + longest));
  FamilyVector v{name, {}, batch, heads, count};
  for (int64_t lead = 0; lead < batch * heads; ++lead) {
    int64_t id = -3, left = random.integer(1, longest);
    for (int64_t n = 0; n < count; ++n) {
      if (left-- == 0) left = random.integer(0, longest), id += 1 + random.integer(0, 9);
      v.values.push_back(id);
    }
  }
  return v;
}

/// `count` segments of 0 to 2 tokens, and a flag for each.
FamilyCase many_segments(int64_t batch, int64_t heads, int64_t count) {
  Random random(static_cast<uint64_t>(count));
  FamilyCase c{"shared_question", {{"seqlens", {}, batch, heads, count}}, {{"seqlen", 2 * count}}};
  FamilyVector flags{"is_question", {}, 1, heads, count};
  for (int64_t n = 0; n < batch * heads * count; ++n) c.vectors[0].values.push_back(random.integer(0, 2));
  for (int64_t n = 0; n < heads * count; ++n) flags.values.push_back(random.integer(0, 4) == 0);
  c.vectors.push_back(flags);
  return c;
}

/// Cases whose steps go over `count` entries of batch * heads leads.
std::vector<FamilyCase> cases_over(int64_t batch, int64_t heads, int64_t count) {
  std::vector<FamilyCase> cases;
  for (const int64_t longest : {1, 40, 5000, 2000000}) {
    const FamilyVector doc_ids = ids("doc_ids", batch, heads, count, longest);
    const FamilyVector block_ids = ids("block_ids", 1, heads, count, longest / 7 + 1);
    FamilyVector queries = doc_ids, keys = doc_ids;
    queries.name = "query_buckets";
    keys.name = "key_buckets";
    std::reverse(keys.values.begin(), keys.values.end());
    for (const char* family : {"document", "causal_blockwise"}) cases.push_back({family, {doc_ids}, {}});
    cases.push_back({"causal_with_blocks", {doc_ids, block_ids}, {{"window", 3}}});
    cases.push_back({"hash_sparse", {queries, keys}, {{"causal", longest > 40}}});
  }
  cases.push_back(many_segments(batch, heads, count));
  return cases;
}

void expect_same_as_on_host(const FamilyCase& c, const std::string& where) {
  const std::vector<int32_t> want = on_host(c);
  for (const bool is_wide : {false, true}) ASSERT_TRUE(on_device(c, is_wide) == want) << c.family << " of " << where;
}

/// A block of a scan takes 1024 entries, and a lead has 1024 blocks at most.
TEST(MaskBuildOnDevice, AroundTheBlocksOfAScan) {
  FLASHMASK_NEEDS_GPU();
  const auto expect_all = [](int64_t batch, int64_t heads, int64_t count) {
    const std::string where = message(batch, " x ", heads, " x ", count);
    for (const FamilyCase& c : cases_over(batch, heads, count))
      ASSERT_NO_FATAL_FAILURE(expect_same_as_on_host(c, where));
  };
  for (const int64_t count : {1, 2, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049, 4097, 131071, 131072, 131073})
    ASSERT_NO_FATAL_FAILURE(expect_all(1, 1, count));
  for (const int64_t count : {1, 1023, 1025, 9000}) ASSERT_NO_FATAL_FAILURE(expect_all(7, 5, count));
  for (const int64_t count : {1048576, 1048577, 2100000}) ASSERT_NO_FATAL_FAILURE(expect_all(1, 1, count));
}

TEST(MaskBuildOnDevice, LongTrees) {
  FLASHMASK_NEEDS_GPU();
  for (const int64_t nodes : {1, 31, 32, 33, 1023, 1024, 1025, 32769, 131072, 1048577}) {
    for (const FamilyCase& c : long_trees(nodes))
      ASSERT_NO_FATAL_FAILURE(expect_same_as_on_host(c, message(nodes, " nodes")));
  }
}

/// Few buckets, many runs: all threads note theirs in the same places.
TEST(MaskBuildOnDevice, ManyRunsOfFewBuckets) {
  FLASHMASK_NEEDS_GPU();
  constexpr int64_t kCount = 131072;
  FamilyCase c{
      "hash_sparse", {{"query_buckets", {}, 1, 1, kCount}, {"key_buckets", {}, 1, 1, kCount}}, {{"causal", 1}}};
  Random random(6);
  for (int64_t n = 0; n < kCount; ++n) {
    // The last rows of two buckets are two runs each; only keys whose first row is among them are of these buckets.
    const int64_t left = kCount - n;
    c.vectors[0].values.push_back(left > 40 ? random.integer(0, 9) : left / 10 % 2);
    c.vectors[1].values.push_back(left > 20 ? 99 : left / 10 % 2);
  }
  ASSERT_NO_FATAL_FAILURE(expect_same_as_on_host(c, "many runs"));
}

TEST(MaskBuildOnDevice, ScratchOfAnyAlignment) {
  FLASHMASK_NEEDS_GPU();
  struct Unaligned : Scratch {
    static void* allocate(void* context, std::size_t bytes) {
      return static_cast<uint8_t*>(Scratch::allocate(context, bytes + 1)) + 1;
    }
  };
  FamilyCases cases(12, 5000);
  for (const char* family : {"hash_sparse", "causal_document", "prefix_tree"}) {
    const FamilyCase c = cases.next(family);
    Given given(c, true, true);
    Unaligned scratch;
    fm_options options = options_on(nullptr, scratch);
    options.allocate = Unaligned::allocate;
    fm_mask mask = shape_of(c.family, given, &options);
    const DeviceVector<int32_t> bounds(std::vector<int32_t>(numbers_in(mask), kPoison));
    set_memory(mask, bounds.data());
    ASSERT_EQ(fm_mask_build(family, given.get(), &mask, &options), FM_OK) << fm_last_error();
    EXPECT_TRUE(bounds.to_host() == on_host(c)) << family;
  }
}

TEST(MaskBuildOnDevice, WrongValuesDoNoHarm) {
  FLASHMASK_NEEDS_GPU();
  FamilyCases cases(3, 2000);
  Random random(4);
  for (const std::string& family : known_families()) {
    for (int repetition = 0; repetition < 12; ++repetition) {
      FamilyCase c = cases.next(family);
      for (FamilyVector& v : c.vectors) {
        for (int64_t& value : v.values) {
          if (random.integer(0, 2) == 0)
            value = random.integer(0, 1) ? random.integer(-9, 4000) : random.integer(INT64_MIN / 2, INT64_MAX / 2);
        }
      }
      on_device(c, true);
    }
  }
}

TEST(MaskBuildOnDevice, UnfitValuesRaiseTheFlag) {
  FLASHMASK_NEEDS_GPU();
  const DeviceVector<int64_t> mixed({0, 1, 0, 1, 0, 1, 0}), sorted({0, 0, 0, 0, 1, 1, 1}), keys({0, 1, 2});
  for (const auto& [queries, expected] : {std::pair{&mixed, 1}, {&sorted, 0}}) {
    const DeviceVector<int32_t> unfit({5}), bounds(std::vector<int32_t>(12));
    fm_mask_parameter items[3] = {{"query_buckets", {}, 0}, {"key_buckets", {}, 0}, {"unfit_out", {}, 0}};
    items[0].vector = FamilyVector{"", {}, 1, 1, 7}.tensor(queries->data(), FM_INT64);
    items[1].vector = FamilyVector{"", {}, 1, 1, 3}.tensor(keys.data(), FM_INT64);
    items[2].vector = FamilyVector{"", {}, 1, 1, 1}.tensor(unfit.data(), FM_INT32);
    const fm_mask_parameters parameters{sizeof(parameters), 3, items};
    Scratch scratch;
    const fm_options options = options_on(nullptr, scratch);
    fm_mask mask{};
    mask.struct_size = sizeof(mask);
    ASSERT_EQ(fm_mask_shape("hash_sparse", &parameters, &mask, &options), FM_OK) << fm_last_error();
    set_memory(mask, bounds.data());
    ASSERT_EQ(fm_mask_build("hash_sparse", &parameters, &mask, &options), FM_OK) << fm_last_error();
    EXPECT_EQ(unfit.to_host()[0], expected);
  }
}

TEST(MaskBuildOnDevice, TreesThatDoNotFitRaiseTheFlag) {
  FLASHMASK_NEEDS_GPU();
  for (const int64_t nodes : {40, 1100, 140000}) {
    // The subtree of node 1 ends at node 20 at the latest; what is misplaced comes last.
    FamilyVector parents{"parents", std::vector<int64_t>(static_cast<std::size_t>(nodes), 0), 1, 1, nodes};
    std::fill(parents.values.begin() + 2, parents.values.begin() + 20, 1);
    parents.values[0] = -1;
    for (const auto& [last, expected] : {std::pair<int64_t, int32_t>{0, 0},
                                         {-1, 0},
                                         {1, 1},
                                         {nodes - 1, 1},
                                         {-2, 1},
                                         {INT64_MIN, 1},
                                         {INT64_MAX, 1}}) {
      parents.values.back() = last;
      const DeviceVector<int64_t> memory(parents.values);
      const DeviceVector<int32_t> unfit({5}), bounds(std::vector<int32_t>(static_cast<std::size_t>(nodes)));
      fm_mask_parameter items[2] = {{"parents", parents.tensor(memory.data(), FM_INT64), 0},
                                    {"unfit_out", FamilyVector{"", {}, 1, 1, 1}.tensor(unfit.data(), FM_INT32), 0}};
      const fm_mask_parameters parameters{sizeof(parameters), 2, items};
      Scratch scratch;
      const fm_options options = options_on(nullptr, scratch);
      fm_mask mask{};
      mask.struct_size = sizeof(mask);
      ASSERT_EQ(fm_mask_shape("prefix_tree", &parameters, &mask, &options), FM_OK) << fm_last_error();
      set_memory(mask, bounds.data());
      ASSERT_EQ(fm_mask_build("prefix_tree", &parameters, &mask, &options), FM_OK) << fm_last_error();
      EXPECT_EQ(unfit.to_host()[0], expected) << nodes << " nodes, the last below " << last;
    }
  }
}

/// Microseconds of a captured build, the median of 51 replays from an idle stream.
double replayed(const FamilyCase& c) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  Given given(c, true, true);
  Scratch scratch;
  const fm_options options = options_on(stream, scratch);
  fm_mask mask = shape_of(c.family, given, &options);
  const DeviceVector<int32_t> bounds(std::vector<int32_t>(numbers_in(mask), kPoison));
  set_memory(mask, bounds.data());
  // The scratch of a first call serves the captured one.
  EXPECT_EQ(fm_mask_build(c.family.c_str(), given.get(), &mask, &options), FM_OK) << fm_last_error();
  check(cudaStreamSynchronize(stream));
  fm_options captured = options;
  captured.allocate = [](void* context, std::size_t) -> void* {
    return static_cast<Scratch*>(context)->memory->data();
  };
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  EXPECT_EQ(fm_mask_build(c.family.c_str(), given.get(), &mask, &captured), FM_OK) << fm_last_error();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times(51);
  for (float& time : times) {
    check(cudaStreamSynchronize(stream));
    check(cudaEventRecord(begin, stream));
    check(cudaGraphLaunch(replay, stream));
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&time, begin, end));
  }
  EXPECT_TRUE(bounds.to_host() == on_host(c)) << c.family;
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::nth_element(times.begin(), times.begin() + 25, times.end());
  return times[25] * 1e3;
}

TEST(MaskBuildOnDevice, CapturedAndTimedAt128K) {
  FLASHMASK_NEEDS_GPU();
  constexpr int64_t kLength = 131072;
  for (const std::string& family : known_families()) {
    double slowest = 0;
    int64_t seqlen = 0;
    FamilyCases cases(11, kLength);
    for (int repetition = 0; repetition < 6; ++repetition) {
      const FamilyCase c = cases.next(family);
      slowest = std::max(slowest, replayed(c));
      for (const FamilyVector& v : c.vectors) seqlen = std::max(seqlen, v.count);
      for (const auto& [name, number] : c.numbers) seqlen = std::max(seqlen, number);
    }
    std::printf("%-28s at most %6.1f us (up to %lld tokens, 9 masks at a time)\n", family.c_str(), slowest,
                static_cast<long long>(seqlen));
  }
}

}  // namespace
}  // namespace flashmask::test
