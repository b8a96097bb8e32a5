// SPDX-License-Identifier: Apache-2.0
#include "io/mask_json.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "families/families.h"
#include "flashmask/builders.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace flashmask::io {
namespace {

using nlohmann::json;
using test::expect_invalid;

/// Through text and back: the same parts, the same contents.
void expect_round_trip(const Mask& mask) {
  const Mask back = mask_from_json(json::parse(to_json(mask).dump()));
  EXPECT_EQ(back.view().content_hash, mask.view().content_hash);
  EXPECT_EQ(back.band(), mask.band());
  EXPECT_EQ(back.q_offset(), mask.q_offset());
  EXPECT_EQ(back.batch(), mask.batch());
  EXPECT_EQ(back.heads(), mask.heads());
  EXPECT_EQ(back.view().block_batch, mask.view().block_batch);
  EXPECT_EQ(back.view().block_heads, mask.view().block_heads);
  const auto same = [](auto a, auto b) { return std::vector(a.begin(), a.end()) == std::vector(b.begin(), b.end()); };
  EXPECT_TRUE(same(back.lts(), mask.lts()));
  EXPECT_TRUE(same(back.lte(), mask.lte()));
  EXPECT_TRUE(same(back.uts(), mask.uts()));
  EXPECT_TRUE(same(back.ute(), mask.ute()));
  EXPECT_TRUE(same(back.block_mask(), mask.block_mask()));
  EXPECT_EQ(to_json(back), to_json(mask));
}

TEST(MaskJson, EveryFamilyComesBack) {
  for (const Family& family : families()) {
    for (const int64_t seqlen : {0, 1, 17, 300}) {
      SCOPED_TRACE(std::string(family.name) + " " + std::to_string(seqlen));
      expect_round_trip(make_family(family.name, seqlen, {}, 5));
    }
  }
}

TEST(MaskJson, EveryPartComesBack) {
  expect_round_trip(Mask({.seqlen_q = 9, .seqlen_k = 2, .column_ptr = {0, 3, 3}, .intervals = {0, 1, 2, 3, 4, 5}}));
  expect_round_trip(masks::causal(3, 900, -7));
  expect_round_trip(masks::sliding_window(40, 30, 4, 2));
  expect_round_trip(
      Mask({.seqlen_q = 2, .seqlen_k = 3, .band = {.lo = -(int64_t{1} << 40), .hi = int64_t{1} << 40}, .q_offset = 5}));
  expect_round_trip(
      Mask({.seqlen_q = 2, .seqlen_k = 1, .batch = 2, .heads = 3, .lte = {INT32_MIN, -1, 0, 1, 2, INT32_MAX}}));
  expect_round_trip(Mask({.seqlen_q = 2, .seqlen_k = 2, .lts = {0, 1}, .lte = {1, 1}, .uts = {2, 0}, .ute = {0, 2}}));
  expect_round_trip(Mask({.seqlen_q = 129,
                          .seqlen_k = 2,
                          .heads = 2,
                          .lts = {0, 1, 2, 3},
                          .block_batch = 3,
                          .block_mask = {0, 1, 2, 255, 0, 0}}));
}

TEST(MaskJson, AbsentKeysAreTheDefaults) {
  const Mask mask = mask_from_json(json::parse(R"({"seqlen_q": 3, "seqlen_k": 5})"));
  EXPECT_EQ(mask.view().content_hash, masks::full(3, 5).view().content_hash);
  EXPECT_EQ(mask.q_offset(), 2);
  const Mask half = mask_from_json(json::parse(R"({"seqlen_q": 3, "seqlen_k": 5, "band": {"hi": 0}})"));
  EXPECT_EQ(half.band(), Band::causal());
  const char* open = R"({"seqlen_q": 3, "seqlen_k": 5, "band": {"hi": 9223372036854775807}})";
  EXPECT_EQ(mask_from_json(json::parse(open)).band(), Band::none()) << "an edge beyond all keys";
}

TEST(MaskJson, ErrorsNameTheKey) {
  const auto refuse = [](const char* text, std::initializer_list<std::string> parts) {
    SCOPED_TRACE(text);
    expect_invalid(parts, [&] { mask_from_json(json::parse(text)); });
  };
  refuse("[]", {"must be a JSON object", "array"});
  refuse("{}", {"lacks", "'seqlen_q'"});
  refuse(R"({"seqlen_q": 2})", {"lacks", "'seqlen_k'"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "lst": [1, 2]})", {"unknown key 'lst'", "lts"});
  refuse(R"({"seqlen_q": "2", "seqlen_k": 2})", {"'seqlen_q'", "integer", "string"});
  refuse(R"({"seqlen_q": 2.5, "seqlen_k": 2})", {"'seqlen_q'", "integer", "2.5"});
  refuse(R"({"seqlen_q": 2.0, "seqlen_k": 2})", {"'seqlen_q'", "integer"});
  refuse(R"({"seqlen_q": null, "seqlen_k": 2})", {"'seqlen_q'", "null"});
  refuse(R"({"seqlen_q": true, "seqlen_k": 2})", {"'seqlen_q'", "boolean"});
  refuse(R"({"seqlen_q": -1, "seqlen_k": 2})", {"'seqlen_q'", "-1", "between 0 and 2147483647"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2147483648})", {"'seqlen_k'", "2147483648"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 18446744073709551615})", {"'seqlen_k'", "18446744073709551615"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "batch": 0})", {"'batch'", "0"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "heads": -3})", {"'heads'", "-3"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "band": []})", {"'band'", "array"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "band": {"low": 1}})", {"'band'", "'low'"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "band": {"lo": "x"}})", {"'band.lo'"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "band": {"hi": 9223372036854775808}})", {"'band.hi'"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "q_offset": 9223372036854775807})", {"q_offset", "2^40"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "q_offset": null})", {"'q_offset'"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "lts": 1})", {"'lts'", "array"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "lts": [1]})", {"lts", "1"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "lts": []})", {"'lts'", "empty"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "lts": [1, "2"]})", {"'lts[1]'", "string"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "ute": [1, 2147483648]})", {"'ute[1]'", "2147483648"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "uts": [-2147483649, 1]})", {"'uts[0]'", "-2147483649"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "lte": [1.5, 1]})", {"'lte[0]'", "1.5"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "block_mask": [256]})", {"'block_mask[0]'", "256"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "block_mask": [1, 1]})", {"block_mask", "2"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "block_mask": []})", {"'block_mask'", "empty"});
}

TEST(MaskJson, FilesThatHoldNoMask) {
  const test::TemporaryFolder folder;
  const auto refuse = [&](const char* text, std::initializer_list<std::string> parts) {
    SCOPED_TRACE(text);
    expect_invalid(parts, [&] { read_mask(folder.write("x.json", text)); });
  };
  refuse("", {"x.json is not JSON: line 1, column 1: unexpected end of input"});
  refuse("{\"seqlen_q\":", {"x.json is not JSON: line 1, column 13: unexpected end of input"});
  refuse("{\n  \"seqlen_q\": 2,\n  oops}", {"x.json is not JSON: line 3, column 3: invalid literal"});
  refuse(R"({"seqlen_q": 1e999})", {"x.json", "'seqlen_q' must be an integer, not 9e+307"});
  refuse(R"({"mask": null})", {"x.json", "has no mask", "4096"});
  refuse(R"({"mask": {"seqlen_q": 2}})", {"x.json", "'seqlen_k'"});
  refuse(R"({"seqlen_q": 2, "seqlen_k": 2, "lts": [1, 2], "lts": [0, 0]})", {"x.json", "\"lts\" comes twice"});
  refuse(R"({"mask": {"seqlen_q": 2, "seqlen_k": 2, "band": {"hi": 0, "hi": 1}}})", {"x.json", "\"hi\" comes twice"});
  EXPECT_EQ(read_mask(folder.write("x.json", R"({"mask": {"seqlen_q": 2, "seqlen_k": 3}})")).seqlen_k(), 3);
  EXPECT_EQ(read_mask(folder.write("x.json", R"({"x": 1e999, "mask": {"seqlen_q": 2, "seqlen_k": 3}})")).seqlen_k(), 3);
}

}  // namespace
}  // namespace flashmask::io
