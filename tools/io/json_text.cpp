// SPDX-License-Identifier: Apache-2.0
#include "io/json_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <vector>

namespace flashmask::io {
namespace {

using nlohmann::json;

/// Follows the parser through the text. (A callback of the DOM parser would do as well, but after every object that
/// parser walks over all earlier neighbours of it, which takes quadratic time.)
class KeyWatch final : public nlohmann::json_sax<json> {
 public:
  std::optional<std::string> repeated;
  std::string out_of_range;  ///< the number at which the parser gave up

  bool key(string_t& key) override {
    if (open_.back().insert(key).second) return true;
    repeated = key;
    return false;
  }
  bool start_object(std::size_t) override {
    open_.emplace_back();
    return true;
  }
  bool end_object() override {
    open_.pop_back();
    return true;
  }
  bool start_array(std::size_t) override { return true; }
  bool end_array() override { return true; }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool parse_error(std::size_t, const std::string& token, const json::exception& error) override {
    if (dynamic_cast<const json::out_of_range*>(&error)) out_of_range = token;
    return false;
  }

 private:
  std::vector<std::set<std::string>> open_;  ///< the keys so far of each object that is open
};

/// True if all of `word` is one number of JSON that float64 cannot hold.
bool is_out_of_range(std::string_view word) {
  KeyWatch watch;
  json::sax_parse(word, &watch);
  return watch.out_of_range == word;
}

/// Replaces numbers that are out of range by +-9e307 and spaces; every byte keeps its place. (The parser stops at such
/// a number, whatever its handler says.)
std::string with_numbers_in_range(std::string_view text) {
  std::string result(text);
  bool in_string = false;
  for (std::size_t at = 0; at < result.size(); ++at) {
    if (result[at] == '"') in_string = !in_string;
    if (in_string && result[at] == '\\') ++at;
    if (in_string || at == result.size() || std::string_view("-0123456789").find(result[at]) == std::string::npos)
      continue;
    const std::size_t end = std::min(result.find_first_not_of("+-.0123456789eE", at), result.size());
    if (is_out_of_range(text.substr(at, end - at))) {
      const std::string largest = result[at] == '-' ? "-9e307" : "9e307";
      std::fill(std::copy(largest.begin(), largest.end(), result.begin() + static_cast<std::ptrdiff_t>(at)),
                result.begin() + static_cast<std::ptrdiff_t>(end), ' ');
    }
    at = end - 1;
  }
  return result;
}

/// The reason in a parser message, without its prefix and without the text it read last, which may be long.
std::string reason_of(const json::parse_error& error) {
  std::string text = error.what();
  text.resize(std::min(text.find("; last read: '"), text.size()));
  const std::size_t dash = text.find(" - ");
  if (dash != std::string::npos) return text.substr(dash + 3);
  // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
  const std::size_t colon = text.find(": ");
  return colon == std::string::npos ? "not JSON" : text.substr(colon + 2);
}

}  // namespace

json parse_json(std::string_view text) {
  std::string in_range;
  json value;
  try {
    try {
      value = json::parse(text);
    } catch (const json::out_of_range&) {
      in_range = with_numbers_in_range(text);
      text = in_range;
      value = json::parse(text);
    }
  } catch (const json::parse_error& error) {
    throw JsonError(error.byte, reason_of(error));
  } catch (const json::out_of_range&) {  // a word that merely begins with a number, as 1e400e5
    throw JsonError(0, "a number is malformed");
  }
  KeyWatch watch;
  json::sax_parse(text, &watch);
  if (watch.repeated) throw JsonError(0, fmt::format("the key {} comes twice", json(*watch.repeated).dump()));
  return value;
}

std::string place_in(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, std::max<std::size_t>(byte, 1) - 1);
  const auto line = std::count(before.begin(), before.end(), '\n') + 1;
  const std::size_t line_end = before.rfind('\n');
  const std::size_t column = before.size() - (line_end == std::string_view::npos ? 0 : line_end + 1) + 1;
  return fmt::format("line {}, column {}", line, column);
}

}  // namespace flashmask::io
