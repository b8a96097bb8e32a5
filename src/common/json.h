// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <locale>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace flashmask {

/// `text` as a JSON string, in quotes. Bytes from 0x80 on are taken to be UTF-8.
inline std::string json_string(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) {
      quoted += c;
      continue;
    }
    constexpr char kHex[] = "0123456789abcdef";
    quoted += "\\u00";
    quoted += kHex[c >> 4];
    quoted += kHex[c & 15];
  }
  return quoted + '"';
}

/// A JSON array of values that are JSON already.
inline std::string json_array(const std::vector<std::string>& values) {
  std::string text = "[";
  for (const std::string& value : values) text += (text.size() > 1 ? ", " : "") + value;
  return text + "]";
}

inline std::string json_string_array(std::vector<std::string> values) {
  for (std::string& value : values) value = json_string(value);
  return json_array(values);
}

/// A JSON object, member by member.
class JsonObject {
 public:
  /// `json` is a JSON value already.
  JsonObject& add(std::string_view name, std::string_view json) {
    text_ += (text_.size() > 1 ? ", " : "") + json_string(name) + ": ";
    text_ += json;
    return *this;
  }
  template <typename Number>
  JsonObject& add_number(std::string_view name, Number value) {
    std::ostringstream stream;
    stream.imbue(std::locale::classic());
    stream << value;
    return add(name, stream.str());
  }
  JsonObject& add_string(std::string_view name, std::string_view value) { return add(name, json_string(value)); }
  std::string text() const { return text_ + "}"; }

 private:
  std::string text_ = "{";
};

}  // namespace flashmask
