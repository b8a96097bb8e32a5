// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

namespace flashmask::io {

/// Text that is not JSON, or not JSON that can be read without loss, and why in words for a reader.
struct JsonError : std::runtime_error {
  /// `position` is the byte, counted from 1, at which `reason` was found; past the end where the text ends too early,
  /// and 0 where no byte is to blame.
  JsonError(std::size_t position, const std::string& reason) : std::runtime_error(reason), byte(position) {}
  std::size_t byte;
};

/// Parses all of `text` as one JSON value; throws JsonError. A key that an object names twice is an error, as one of
/// the two values would be lost. A number beyond the range of float64 is none: it becomes +-9e307, which readers of
/// integers refuse, so that it does no harm where nobody reads it.
nlohmann::json parse_json(std::string_view text);

/// "line 3, column 7" of a byte that is counted from 1.
std::string place_in(std::string_view text, std::size_t byte);

}  // namespace flashmask::io
