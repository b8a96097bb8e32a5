// SPDX-License-Identifier: Apache-2.0
#include "io/jsonl.h"

#include <array>
#include <map>
#include <nlohmann/json.hpp>

#include "support/cpu_time.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/temporary_folder.h"

namespace flashmask::io {
namespace {

using test::expect_invalid;
using test::TemporaryFolder;

struct Result {
  std::map<int64_t, nlohmann::json> taken;
  JsonlSummary summary;
};

/// Reads `contents`; a line whose "n" is 13 is refused.
Result read(const std::string& contents) {
  TemporaryFolder folder;
  Result result;
  const auto take = [&](int64_t line, const nlohmann::json& object) {
    if (object.value("n", 0) == 13) throw LineError("13 is refused");
    result.taken[line] = object;
  };
  int64_t bytes = 0;
  result.summary = read_jsonl(folder.write("x.jsonl", contents), take, [&](int64_t read) { bytes += read; });
  EXPECT_GE(bytes, static_cast<int64_t>(contents.size()));
  return result;
}

/// One bad line between two good ones: its number and a part of its reason.
void expect_bad(const std::string& line, const std::string& reason) {
  const Result result = read("{\"n\":1}\n" + line + "\n{\"n\":3}\n");
  ASSERT_EQ(result.summary.bad_lines.size(), 1u) << line;
  EXPECT_EQ(result.summary.bad_lines[0].line, 2) << line;
  EXPECT_NE(result.summary.bad_lines[0].reason.find(reason), std::string::npos)
      << line << ": " << result.summary.bad_lines[0].reason;
  EXPECT_EQ(result.summary.bad_lines[0].reason.find("json.exception"), std::string::npos);
  EXPECT_EQ(result.taken.size(), 2u) << line;
}

TEST(Jsonl, ReadsObjectsWithTheirLineNumbers) {
  const Result result = read("{\"n\":1}\n\n  \t\r\n{\"n\":4}\r\n{\"n\":5}");
  EXPECT_TRUE(result.summary.bad_lines.empty());
  EXPECT_EQ(result.summary.lines, 5);
  EXPECT_EQ(result.summary.blank_lines, 2);
  ASSERT_EQ(result.taken.size(), 3u);
  EXPECT_EQ(result.taken.at(1)["n"], 1);
  EXPECT_EQ(result.taken.at(4)["n"], 4);
  EXPECT_EQ(result.taken.at(5)["n"], 5);
}

TEST(Jsonl, AnEmptyFileHasNoLines) {
  EXPECT_EQ(read("").summary.lines, 0);
  EXPECT_EQ(read("\n\n").summary.blank_lines, 2);
}

TEST(Jsonl, EveryKindOfBadLine) {
  expect_bad("{\"n\":", "truncated JSON");
  expect_bad("{\"n\": \"abc", "truncated JSON");
  expect_bad("{\"n\": 1", "truncated JSON");
  expect_bad("{", "truncated JSON");
  expect_bad("{n: 1}", "malformed JSON at byte 3");
  expect_bad("{\"n\": 1} {\"n\": 2}", "malformed JSON at byte 10");
  expect_bad("{\"n\": nul}", "malformed JSON");
  expect_bad("{\"n\": 1,}", "malformed JSON");
  expect_bad("{\"n\": \"a\tb\"}", "malformed JSON");     // a control character must be escaped
  expect_bad("{\"s\": \"\\ud800\"}", "malformed JSON");  // half of a surrogate pair
  expect_bad("{\"x\": 1e999e}", "malformed");
  expect_bad("{\"x\": 1e999e5}", "malformed");
  expect_bad("{\"x\": 01e999}", "malformed");
  expect_bad("{\"x\": 1e999, \"n\": nul}", "malformed JSON at byte 22");
  expect_bad("{\"x\": 1e999, \"n\": 1, \"n\": 2}", "the key \"n\" comes twice");
  expect_bad("[1]", "a JSON object is needed, not array");
  expect_bad("\"text\"", "a JSON object is needed, not string");
  expect_bad("7", "a JSON object is needed, not number");
  expect_bad("null", "a JSON object is needed, not null");
  expect_bad("{\"n\": 1, \"n\": 2}", "the key \"n\" comes twice");
  expect_bad("{\"x\": [{\"n\": 1, \"n\": 2}]}", "the key \"n\" comes twice");
  expect_bad("{\"s\": \"a\xff\"}", "invalid UTF-8 at byte 9");
  expect_bad("\xc3", "invalid UTF-8 at byte 1");
  expect_bad("{\"n\": 13}", "13 is refused");
}

TEST(Jsonl, ANumberBeyondFloat64HarmsNobodyWhoDoesNotReadIt) {
  const std::string digits(400, '7');
  for (const std::string& number : {std::string("1e999"), std::string("-1.5E+309"), digits, "-" + digits + ".5"}) {
    const Result result = read(R"({"s": "\"1e999", "x": [)" + number + R"(, 2, {"y":)" + number +
                               R"(}], "n": 3, "z": ")" + number + "\"}\n");
    EXPECT_TRUE(result.summary.bad_lines.empty()) << io::describe_bad_lines("x", result.summary.bad_lines);
    ASSERT_EQ(result.taken.size(), 1u);
    const nlohmann::json& taken = result.taken.at(1);
    EXPECT_EQ(taken["n"], 3);
    EXPECT_EQ(taken["s"], "\"1e999");
    EXPECT_EQ(taken["z"], number);
    EXPECT_EQ(taken["x"][0], number[0] == '-' ? -9e307 : 9e307);
    EXPECT_EQ(taken["x"][1], 2);
  }
}

TEST(Jsonl, KeysMayComeTwiceInDifferentObjects) {
  const Result result = read("{\"x\": {\"a\": 1}, \"a\": {\"a\": 2}}\n");
  EXPECT_TRUE(result.summary.bad_lines.empty());
}

TEST(Jsonl, ALineOfManyObjectsTakesNoLongTime) {
  if (!test::kMeasured) GTEST_SKIP() << "needs an optimised build without sanitizers";
  std::string line = "{\"n\":1,\"x\":[{}";
  for (int n = 0; n < 200000; ++n) line += ",{}";
  const double begin = test::cpu_seconds();
  EXPECT_EQ(read(line + "]}\n").taken.size(), 1u);
  EXPECT_LT(test::cpu_seconds() - begin, 3);
}

TEST(Jsonl, AllBadLinesAreCollected) {
  std::string contents;
  for (int n = 0; n < 100; ++n) contents += n % 3 == 0 ? "{\"n\":\n" : "{\"n\":1}\n";
  const Result result = read(contents);
  ASSERT_EQ(result.summary.bad_lines.size(), 34u);
  for (std::size_t n = 0; n < 34; ++n) EXPECT_EQ(result.summary.bad_lines[n].line, static_cast<int64_t>(3 * n + 1));
  EXPECT_EQ(result.taken.size(), 66u);
}

TEST(Jsonl, FilesThatCannotBeRead) {
  TemporaryFolder folder;
  const auto ignore = [](int64_t, const nlohmann::json&) {};
  expect_invalid({"cannot read", "missing"}, [&] { read_jsonl(folder / "missing", ignore); });
  expect_invalid({"cannot read", "it is a directory"}, [&] { read_jsonl(folder / ".", ignore); });
}

TEST(Jsonl, BadLinesInWords) {
  EXPECT_EQ(describe_bad_lines("a.jsonl", {{3, "x"}}), "a.jsonl has 1 bad line:\n  line 3: x");
  EXPECT_EQ(describe_bad_lines("a.jsonl", {{3, "x"}, {9, "y"}}), "a.jsonl has 2 bad lines:\n  line 3: x\n  line 9: y");
}

std::string encoded(uint32_t code) {
  std::string text;
  const auto tail = [&](int shift) { text += static_cast<char>(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) {
    text += static_cast<char>(code);
  } else if (code < 0x800) {
    text += static_cast<char>(0xc0 | code >> 6);
    tail(0);
  } else if (code < 0x10000) {
    text += static_cast<char>(0xe0 | code >> 12);
    tail(6), tail(0);
  } else {
    text += static_cast<char>(0xf0 | code >> 18);
    tail(12), tail(6), tail(0);
  }
  return text;
}

TEST(Utf8, EveryCodePoint) {
  for (uint32_t code = 0; code < 0x120000; ++code) {
    const bool valid = code < 0x110000 && (code < 0xd800 || code > 0xdfff);
    EXPECT_EQ(find_invalid_utf8(encoded(code)) == std::string_view::npos, valid) << code;
  }
}

TEST(Utf8, AgreesWithTheJsonLibraryOnOddBytes) {
  constexpr std::array<unsigned char, 23> kBytes{0x00, 0x41, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc2,
                                                 0xdf, 0xe0, 0xe1, 0xed, 0xee, 0xef, 0xf0, 0xf1, 0xf4, 0xf5, 0xff};
  int64_t valid = 0;
  for (std::size_t n = 0; n < 23 * 23 * 23 * 23; ++n) {
    std::string text;
    for (std::size_t rest = n, length = 0; length < 4; ++length, rest /= 23)
      text += static_cast<char>(kBytes[rest % 23]);
    bool accepted = true;
    try {
      (void)nlohmann::json(text).dump();
    } catch (const nlohmann::json::type_error&) {
      accepted = false;
    }
    valid += accepted;
    ASSERT_EQ(find_invalid_utf8(text) == std::string_view::npos, accepted) << n;
  }
  EXPECT_GT(valid, 0);
}

TEST(Utf8, SaysWhere) {
  EXPECT_EQ(find_invalid_utf8("abc\x80"), 3u);
  EXPECT_EQ(find_invalid_utf8("\xc3\xa4\xe2\x82"), 2u);
}

}  // namespace
}  // namespace flashmask::io
