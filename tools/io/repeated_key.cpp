// SPDX-License-Identifier: Apache-2.0
#include "io/repeated_key.h"

#include <cstdint>
#include <nlohmann/json.hpp>
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
  bool parse_error(std::size_t, const std::string&, const json::exception&) override { return false; }

 private:
  std::vector<std::set<std::string>> open_;  ///< the keys so far of each object that is open
};

}  // namespace

std::optional<std::string> repeated_key(std::string_view text) {
  KeyWatch watch;
  json::sax_parse(text, &watch);
  return watch.repeated;
}

}  // namespace flashmask::io
