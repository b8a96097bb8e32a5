// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "support/cpu_time.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/temporary_folder.h"

namespace flashmask::io {
namespace {

using test::contents_of;
using test::expect_invalid;
using test::TemporaryFolder;

template <typename Element>
SafetensorsEntry entry(std::string name, std::string dtype, std::vector<int64_t> shape,
                       const std::vector<Element>& values) {
  return {std::move(name), std::move(dtype), std::move(shape), std::as_bytes(std::span(values))};
}

TEST(Safetensors, RoundTrip) {
  TemporaryFolder folder;
  const std::vector<int64_t> wide{1, -2, int64_t{1} << 60};
  const std::vector<int32_t> ints{1, 2, 3, 4, 5, 6};
  const std::vector<uint8_t> flags{0, 1, 1};
  const std::vector<float> nothing;
  const std::vector<int32_t> scalar{7};
  const std::vector<SafetensorsEntry> entries{entry("wide", "I64", {3}, wide), entry("ints", "I32", {2, 3, 1}, ints),
                                              entry("empty", "F32", {0, 4}, nothing),
                                              entry("scalar", "I32", {}, scalar), entry("flags", "BOOL", {3}, flags)};
  write_safetensors(folder / "x", entries, {{"task", "sft"}, {"quote", "\"a\"\n\u00e4"}});

  const SafetensorsFile file(folder / "x");
  EXPECT_EQ(file.metadata().at("task"), "sft");
  EXPECT_EQ(file.metadata().at("quote"), "\"a\"\n\u00e4");
  ASSERT_EQ(file.entries().size(), 5u);
  for (std::size_t n = 0; n < 5; ++n) {
    const SafetensorsEntry& got = file.at(entries[n].name);
    EXPECT_EQ(got.dtype, entries[n].dtype);
    EXPECT_EQ(got.shape, entries[n].shape);
    ASSERT_EQ(got.data.size(), entries[n].data.size());
    EXPECT_TRUE(got.data.empty() || std::memcmp(got.data.data(), entries[n].data.data(), got.data.size()) == 0);
  }
  EXPECT_FALSE(file.contains("other"));
  expect_invalid({"other"}, [&] { (void)file.at("other"); });
}

TEST(Safetensors, BytesAreAsTheFormatSays) {
  TemporaryFolder folder;
  const std::vector<int32_t> values{1, 256};
  write_safetensors(folder / "x", std::vector{entry("a", "I32", {2}, values)}, {});
  const std::string bytes = contents_of(folder / "x");
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  ASSERT_EQ(bytes.size(), 8 + length + 8);
  EXPECT_EQ(length % 8, 0u);
  EXPECT_EQ(bytes[8], '{');
  const auto header = nlohmann::json::parse(bytes.substr(8, length));
  EXPECT_EQ(header["a"], nlohmann::json::parse(R"({"dtype": "I32", "shape": [2], "data_offsets": [0, 8]})"));
  EXPECT_EQ(bytes.substr(8 + length), std::string("\1\0\0\0\0\1\0\0", 8));
}

TEST(Safetensors, RefusesEntriesThatDoNotFit) {
  TemporaryFolder folder;
  const std::vector<int32_t> values{1, 2};
  expect_invalid({"'a'", "I32"},
                 [&] { write_safetensors(folder / "x", std::vector{entry("a", "I32", {3}, values)}, {}); });
  expect_invalid({"'a'"},
                 [&] { write_safetensors(folder / "x", std::vector{entry("a", "I32", {-2, -1}, values)}, {}); });
  expect_invalid({"'I33'"}, [&] { write_safetensors(folder / "x", std::vector{entry("a", "I33", {2}, values)}, {}); });
  expect_invalid({"two tensors", "'a'"}, [&] {
    write_safetensors(folder / "x", std::vector{entry("a", "I32", {2}, values), entry("a", "I32", {2}, values)}, {});
  });
  EXPECT_TRUE(folder.names().empty());
}

std::string file_with(const std::string& header, std::size_t data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(data, 'x');
}

TEST(Safetensors, RefusesFilesThatAreWrong) {
  TemporaryFolder folder;
  const auto refuse = [&](const std::string& contents, const std::string& part) {
    expect_invalid({part}, [&] { SafetensorsFile file(folder.write("bad", contents)); });
  };
  const std::string good = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
  EXPECT_EQ(SafetensorsFile(folder.write("good", file_with(good, 4))).entries().size(), 1u);
  refuse("", "shorter than the length");
  refuse(std::string("\xff\xff\0\0\0\0\0\0{}", 10), "shorter than its safetensors header");
  refuse(std::string(8, '\xff'), "shorter than its safetensors header");
  refuse(file_with("[]", 0), "not a JSON object");
  refuse(file_with("{", 0), "is not JSON: byte 2: unexpected end of input");
  refuse(file_with(good, 3), "outside of the file");
  refuse(file_with(good, 5), "belong to no tensor");
  refuse(file_with(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,4]}})", 4), "does not have the size");
  refuse(file_with(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[1,4]}})", 4), "hole");
  refuse(
      file_with(
          R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
          4),
      "overlap");
  refuse(file_with(R"({"a":{"shape":[4],"data_offsets":[0,4]}})", 4),
         "': it must be a JSON object with the key 'dtype'");
  refuse(file_with(R"({"a":{"dtype":"U8","shape":[4]}})", 4), "with the key 'data_offsets'");
  refuse(file_with(R"({"a":[1]})", 4), "tensor 'a' of");
  refuse(file_with(R"({"a":{"dtype":8,"shape":[4],"data_offsets":[0,4]}})", 4), "'dtype' must be a string, not number");
  refuse(file_with(R"({"__metadata__":{"x":1}})", 0), "'x' must be a string, not number");
  refuse(file_with(R"({"__metadata__":[]})", 0), "must be a JSON object of strings, not array");
  refuse(file_with(R"({"a":{"dtype":"X","shape":[4],"data_offsets":[0,4]}})", 4), "'X'");
}

TEST(Safetensors, SizesAreIntegers) {
  TemporaryFolder folder;
  const auto refuse = [&](const std::string& shape, const std::string& offsets,
                          std::initializer_list<std::string> parts) {
    const std::string header = R"({"a":{"dtype":"U8","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
    expect_invalid(parts, [&] { SafetensorsFile file(folder.write("bad", file_with(header, 1))); });
  };
  refuse("[1.5]", "[0,1]", {"'a'", "'shape'", "1.5"});
  refuse("[1e300]", "[0,1]", {"'shape'", "1e+300"});
  refuse("[true]", "[0,1]", {"'shape'", "boolean"});
  refuse("[-1,-1]", "[0,1]", {"'shape'", "-1"});
  refuse("[9223372036854775808]", "[0,1]", {"'shape'", "9223372036854775808"});
  refuse("1", "[0,1]", {"'shape'", "array"});
  refuse("[1]", "[0,1.0]", {"'data_offsets'", "1.0"});
  refuse("[1]", "[false,true]", {"'data_offsets'", "boolean"});
  refuse("[1]", "[0,1,2]", {"'data_offsets'", "3 elements"});
  refuse("[1]", "[0]", {"'data_offsets'", "1 elements"});
}

TEST(Safetensors, NoKeyComesTwice) {
  TemporaryFolder folder;
  const std::string a = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})",
                    b = R"("a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]})";
  for (const std::string& header :
       {"{" + a + "," + b + "}", std::string(R"({"a":{"dtype":"U8","shape":[2],"shape":[1],"data_offsets":[0,1]}})"),
        std::string(R"({"__metadata__":{"x":"1","x":"2"}})")}) {
    expect_invalid({"comes twice"}, [&] { SafetensorsFile file(folder.write("bad", file_with(header, 1))); });
  }
}

TEST(Safetensors, EntriesAreInTheOrderOfTheirData) {
  TemporaryFolder folder;
  const std::string header =
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"z":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  const SafetensorsFile file(folder.write("x", file_with(header, 2)));
  EXPECT_EQ(file.entries()[0].name, "z");
  EXPECT_EQ(file.entries()[1].name, "a");
}

TEST(Safetensors, AHeaderOfManyTensorsTakesNoLongTime) {
  if (!test::kMeasured) GTEST_SKIP() << "needs an optimised build without sanitizers";
  TemporaryFolder folder;
  std::string header = "{";
  for (int n = 0; n < 50000; ++n)
    header += (n ? ",\"" : "\"") + std::to_string(n) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  const std::string path = folder.write("x", file_with(header + "}", 0));
  const double begin = test::cpu_seconds();
  EXPECT_EQ(SafetensorsFile(path).entries().size(), 50000u);
  EXPECT_LT(test::cpu_seconds() - begin, 3);
}

}  // namespace
}  // namespace flashmask::io
