// SPDX-License-Identifier: Apache-2.0

// struct_size: which sizes a struct of the C interface may say that it has, and what is read of it then.

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "c_api/read.h"
#include "support/expect_error.h"

namespace flashmask {
namespace c_api {
namespace {

/// A struct that has grown once.
struct Grown {
  uint32_t struct_size;
  uint32_t flags;
  int64_t first;
  int64_t added;
};

}  // namespace

template <>
inline constexpr std::array<uint32_t, 1> kEarlierSizes<Grown>{16};

}  // namespace c_api

namespace test {
namespace {

using c_api::Grown;
using c_api::read_struct;

/// A struct of `size` bytes in memory that ends where it does, each byte beyond struct_size `value`.
template <typename Struct>
class Given {
 public:
  Given(uint32_t size, unsigned char value) : bytes_(std::max<std::size_t>(size, sizeof(size)), value) {
    std::memcpy(bytes_.data(), &size, sizeof(size));
    bytes_.shrink_to_fit();
  }
  const Struct* get() const { return reinterpret_cast<const Struct*>(bytes_.data()); }

 private:
  std::vector<unsigned char> bytes_;
};

template <typename Struct>
void expect_refused(uint32_t size) {
  const Given<Struct> given(size, 0);
  expect_invalid(
      {"argument->struct_size is " + std::to_string(size) + ",", "it must be " + std::to_string(sizeof(Struct))},
      [&] { read_struct(given.get(), "argument"); });
}

template <typename Struct>
class StructSizes : public testing::Test {};

using Structs = testing::Types<fm_mask, fm_options, fm_forward_args, fm_backward_args, fm_gpu_model, fm_mask_parameters,
                               fm_statistics, fm_cells, fm_segments, fm_placement, fm_kv_cache, fm_sequence_mask,
                               fm_cached_plan, fm_cached_args, fm_append_args>;
TYPED_TEST_SUITE(StructSizes, Structs);

TYPED_TEST(StructSizes, AVersionsAreTakenAndNoOther) {
  constexpr uint32_t kOwn = sizeof(TypeParam), kAlignment = alignof(TypeParam);
  for (uint32_t size = 0; size <= kOwn + 64; ++size) {
    SCOPED_TRACE(size);
    if (size < kOwn || size % kAlignment != 0) {
      expect_refused<TypeParam>(size);
      continue;
    }
    const TypeParam read = read_struct(Given<TypeParam>(size, 0).get(), "argument");
    EXPECT_EQ(read.struct_size, size);
    const Given<TypeParam> unknown(size, 1);
    if (size > kOwn)
      expect_error(ErrorCode::kUnsupported, {"argument has fields that this version"},
                   [&] { read_struct(unknown.get(), "argument"); });
  }
  for (const uint32_t size : {65536u + kAlignment, UINT32_MAX}) EXPECT_FALSE(c_api::is_size_of<TypeParam>(size));
}

TEST(StructSizes, FieldsThatAnEarlierVersionLacksAreZero) {
  for (uint32_t size = 0; size < sizeof(Grown); ++size) {
    if (size != 16) expect_refused<Grown>(size);
  }
  const Grown earlier = read_struct(Given<Grown>(16, 1).get(), "argument");
  EXPECT_EQ(earlier.first, 0x0101010101010101);
  EXPECT_EQ(earlier.added, 0);
  EXPECT_EQ(read_struct(Given<Grown>(24, 1).get(), "argument").added, 0x0101010101010101);
}

TEST(StructSizes, AreThoseOfTheFunctionsThatTakeTheStruct) {
  fm_mask mask{};
  fm_options options{};
  mask.struct_size = sizeof(mask);
  for (uint32_t size = 0; size < sizeof(options); ++size) {
    options.struct_size = size;
    EXPECT_EQ(fm_plan_build(&mask, nullptr, 0, &options), FM_INVALID_ARGUMENT) << size;
    EXPECT_NE(std::string(fm_last_error()).find("options->struct_size is "), std::string::npos) << fm_last_error();
  }
}

}  // namespace
}  // namespace test
}  // namespace flashmask
