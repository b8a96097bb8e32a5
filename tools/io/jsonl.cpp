// SPDX-License-Identifier: Apache-2.0
#include "io/jsonl.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "io/fail.h"
#include "io/file.h"
#include "io/json_text.h"

namespace flashmask::io {
namespace {

using nlohmann::json;

template <typename... Arguments>
[[noreturn]] void bad_line(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  throw LineError(fmt::format(format, std::forward<Arguments>(arguments)...));
}

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == std::string_view::npos; }

json parse_line(std::string_view line) {
  const std::size_t invalid = find_invalid_utf8(line);
  if (invalid != std::string_view::npos) bad_line("invalid UTF-8 at byte {}", invalid + 1);
  json object;
  try {
    object = parse_json(line);
  } catch (const JsonError& error) {
    if (error.byte == 0) throw LineError(error.what());
    if (error.byte > line.size()) bad_line("truncated JSON: the line ends too early ({})", error.what());
    bad_line("malformed JSON at byte {}: {}", error.byte, error.what());
  }
  if (!object.is_object()) bad_line("a JSON object is needed, not {}", object.type_name());
  return object;
}

}  // namespace

std::size_t find_invalid_utf8(std::string_view text) {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  for (std::size_t at = 0; at < text.size();) {
    const unsigned lead = byte(at);
    const std::size_t length = lead < 0x80                   ? 1
                               : lead >= 0xc2 && lead < 0xe0 ? 2
                               : lead >= 0xe0 && lead < 0xf0 ? 3
                               : lead >= 0xf0 && lead < 0xf5 ? 4
                                                             : 0;
    if (length == 0 || at + length > text.size()) return at;
    for (std::size_t next = 1; next < length; ++next) {
      if ((byte(at + next) & 0xc0u) != 0x80u) return at;
    }
    // The second byte's range keeps out overlong forms, surrogates and what lies above U+10FFFF.
    if (lead == 0xe0 && byte(at + 1) < 0xa0) return at;
    if (lead == 0xed && byte(at + 1) > 0x9f) return at;
    if (lead == 0xf0 && byte(at + 1) < 0x90) return at;
    if (lead == 0xf4 && byte(at + 1) > 0x8f) return at;
    at += length;
  }
  return std::string_view::npos;
}

JsonlSummary read_jsonl(const std::string& path, const std::function<void(int64_t, const json&)>& take,
                        const std::function<void(int64_t)>& progress) {
  check_readable(path);
  std::ifstream stream(path, std::ios::binary);
  JsonlSummary summary;
  for (std::string line; std::getline(stream, line);) {
    ++summary.lines;
    if (progress) progress(static_cast<int64_t>(line.size()) + 1);
    if (is_blank(line)) {
      ++summary.blank_lines;
      continue;
    }
    try {
      take(summary.lines, parse_line(line));
    } catch (const LineError& error) {
      summary.bad_lines.push_back({summary.lines, error.what()});
    }
  }
  if (stream.bad()) fail("cannot read '{}': reading failed after line {}", path, summary.lines);
  return summary;
}

std::string describe_bad_lines(const std::string& path, const std::vector<BadLine>& bad_lines) {
  std::string text = fmt::format("{} has {} bad line{}:", path, bad_lines.size(), bad_lines.size() == 1 ? "" : "s");
  for (const BadLine& bad : bad_lines) text += fmt::format("\n  line {}: {}", bad.line, bad.reason);
  return text;
}

}  // namespace flashmask::io
