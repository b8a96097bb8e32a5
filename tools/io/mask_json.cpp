// SPDX-License-Identifier: Apache-2.0
#include "io/mask_json.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "io/fail.h"
#include "io/file.h"
#include "io/json_text.h"

namespace flashmask::io {
namespace {

using nlohmann::json;

constexpr std::array<std::pair<const char*, std::vector<int32_t> MaskParts::*>, 4> kVectors{
    {{"lts", &MaskParts::lts}, {"lte", &MaskParts::lte}, {"uts", &MaskParts::uts}, {"ute", &MaskParts::ute}}};
constexpr std::array<std::pair<const char*, std::vector<int32_t> MaskParts::*>, 2> kLists{
    {{"column_ptr", &MaskParts::column_ptr}, {"intervals", &MaskParts::intervals}}};

void check_object(const json& value, std::string_view what, std::initializer_list<std::string_view> known) {
  if (!value.is_object()) fail("{} must be a JSON object, not {}", what, value.type_name());
  for (const auto& [key, unused] : value.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end())
      fail("{} has the unknown key '{}'; known are {}", what, key, fmt::join(known, ", "));
  }
}

/// An integer between `low` and `high`; numbers with a fraction or exponent are refused.
int64_t integer(const json& value, std::string_view key, int64_t low, int64_t high) {
  if (!value.is_number_integer())
    fail("'{}' must be an integer, not {}", key, value.is_number() ? value.dump() : value.type_name());
  // Beyond int64 the parser keeps an unsigned number.
  const bool too_large =
      value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (too_large || value.get<int64_t>() < low || value.get<int64_t>() > high) {
    fail("'{}' is {}; it must be between {} and {}", key, value.dump(), low, high);
  }
  return value.get<int64_t>();
}

template <typename Element>
std::vector<Element> integers(const json& value, std::string_view key) {
  if (!value.is_array()) fail("'{}' must be an array of integers, not {}", key, value.type_name());
  std::vector<Element> elements;
  elements.reserve(value.size());
  for (std::size_t at = 0; at < value.size(); ++at) {
    const int64_t element = integer(value[at], fmt::format("{}[{}]", key, at), std::numeric_limits<Element>::min(),
                                    std::numeric_limits<Element>::max());
    elements.push_back(static_cast<Element>(element));
  }
  return elements;
}

constexpr int64_t kInt64Min = std::numeric_limits<int64_t>::min(), kInt64Max = std::numeric_limits<int64_t>::max();

int64_t required_size(const json& value, const char* key) {
  if (!value.contains(key)) fail("the mask lacks the key '{}'", key);
  return integer(value[key], key, 0, kMaxSeqlen);
}

/// Batch and head counts: at least 1.
int64_t count_or_one(const json& value, const char* key) {
  return value.contains(key) ? integer(value[key], key, 1, kInt64Max) : 1;
}

std::optional<int64_t> edge(const json& band, const char* key, std::string_view name) {
  if (!band.contains(key) || band[key].is_null()) return std::nullopt;
  return integer(band[key], name, kInt64Min, kInt64Max);
}

/// An array that is given may be empty only if the lengths say so: an absent vector is left out.
void check_not_emptied(const json& value, const char* key, bool empty, bool may_be_empty) {
  if (value.contains(key) && empty && !may_be_empty) fail("'{}' is empty; leave the key out if the mask has none", key);
}

json parse(const std::string& path, const std::string& text) {
  try {
    return parse_json(text);
  } catch (const JsonError& error) {
    if (error.byte == 0) fail("{}: {}", path, error.what());
    fail("{} is not JSON: {}: {}", path, place_in(text, error.byte), error.what());
  }
}

}  // namespace

json to_json(const Mask& mask) {
  const MaskView& view = mask.view();
  const auto edge_or_null = [](const std::optional<int64_t>& value) { return value ? json(*value) : json(nullptr); };
  json out = {{"seqlen_q", view.seqlen_q},
              {"seqlen_k", view.seqlen_k},
              {"band", {{"lo", edge_or_null(mask.band().lo)}, {"hi", edge_or_null(mask.band().hi)}}},
              {"q_offset", mask.q_offset()},
              {"batch", view.bounds_batch},
              {"heads", view.bounds_heads}};
  for (const auto& [key, vector] :
       {std::pair{"lts", mask.lts()}, {"lte", mask.lte()}, {"uts", mask.uts()}, {"ute", mask.ute()}}) {
    if (!vector.empty()) out[key] = vector;
  }
  if (mask.has_interval_lists()) {
    out["column_ptr"] = mask.column_ptr();
    out["intervals"] = mask.intervals();
  }
  if (mask.has_block_mask()) {
    out["block_batch"] = view.block_batch;
    out["block_heads"] = view.block_heads;
    out["block_mask"] = mask.block_mask();
  }
  return out;
}

Mask mask_from_json(const json& value) {
  check_object(value, "the mask",
               {"seqlen_q", "seqlen_k", "band", "q_offset", "batch", "heads", "lts", "lte", "uts", "ute", "column_ptr",
                "intervals", "block_batch", "block_heads", "block_mask"});
  MaskParts parts;
  parts.seqlen_q = required_size(value, "seqlen_q");
  parts.seqlen_k = required_size(value, "seqlen_k");
  if (value.contains("band")) {
    check_object(value["band"], "'band'", {"lo", "hi"});
    parts.band = {.lo = edge(value["band"], "lo", "band.lo"), .hi = edge(value["band"], "hi", "band.hi")};
  }
  if (value.contains("q_offset")) parts.q_offset = integer(value["q_offset"], "q_offset", kInt64Min, kInt64Max);
  parts.batch = count_or_one(value, "batch");
  parts.heads = count_or_one(value, "heads");
  parts.block_batch = count_or_one(value, "block_batch");
  parts.block_heads = count_or_one(value, "block_heads");
  for (const auto& [key, vector] : kVectors) {
    if (value.contains(key)) parts.*vector = integers<int32_t>(value[key], key);
    check_not_emptied(value, key, (parts.*vector).empty(), parts.seqlen_k == 0);
  }
  for (const auto& [key, list] : kLists) {
    if (value.contains(key)) parts.*list = integers<int32_t>(value[key], key);
  }
  if (value.contains("block_mask")) parts.block_mask = integers<uint8_t>(value["block_mask"], "block_mask");
  check_not_emptied(value, "block_mask", parts.block_mask.empty(), parts.seqlen_q == 0 || parts.seqlen_k == 0);
  return Mask(std::move(parts));
}

Mask read_mask(const std::string& path) {
  const json value = parse(path, read_file(path));
  const bool printed = value.is_object() && value.contains("mask");
  if (printed && value["mask"].is_null())
    fail("{} has no mask: --json leaves out masks of more than {} columns", path, kMostJsonColumns);
  try {
    return mask_from_json(printed ? value["mask"] : value);
  } catch (const Error& error) {
    fail("{}: {}", path, error.what());
  }
}

}  // namespace flashmask::io
