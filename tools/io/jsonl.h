// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace flashmask::io {

/// A line that cannot be used, and why.
struct BadLine {
  int64_t line = 0;  ///< counted from 1
  std::string reason;
};

/// Thrown by a JSONL reader for a line that is bad by the reader's own rules.
class LineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct JsonlSummary {
  int64_t lines = 0;  ///< all of them, blank ones too
  int64_t blank_lines = 0;
  std::vector<BadLine> bad_lines{};
};

/// Reads a file of one JSON object per line. `take` gets every line that holds one, and throws LineError if it
/// is not as it should be. Blank lines are skipped. Lines that are not valid UTF-8, not JSON, cut short, not an
/// object, or that name a key twice are collected together with lines that `take` refused: the reader always
/// goes on to the end of the file. `progress`, if given, receives the bytes read since its last call.
/// Throws if the file cannot be read.
JsonlSummary read_jsonl(const std::string& path,
                        const std::function<void(int64_t line, const nlohmann::json& object)>& take,
                        const std::function<void(int64_t bytes)>& progress = {});

/// Finds the place where `text` stops being valid UTF-8 (no overlong forms, no surrogates, nothing above U+10FFFF),
/// or npos.
std::size_t find_invalid_utf8(std::string_view text);

/// "FILE has 2 bad lines:\n  line 3: ...\n  line 9: ...".
std::string describe_bad_lines(const std::string& path, const std::vector<BadLine>& bad_lines);

}  // namespace flashmask::io
