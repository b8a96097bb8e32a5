// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <string>
#include <system_error>
#include <type_traits>

namespace flashmask::cli {

/// Accepts numbers from `low` to `high` that fill the whole text, and says what is accepted if they do not. CLI11's own
/// range takes -1 for an unsigned option, NaN, and (by its conversion) 010 for 8.
template <typename Number>
CLI::Validator number_between(Number low, Number high) {
  const auto refusal = [low, high](const std::string& text) -> std::string {
    constexpr bool kWhole = std::is_integral_v<Number>;
    const char* const end = text.data() + text.size();
    Number value{};
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    const bool plain = !kWhole || fmt::to_string(value) == text;  // no leading zeros: octal to some, decimal to others
    // NaN compares false with everything.
    if (error == std::errc() && stop == end && plain && low <= value && value <= high) return "";
    return fmt::format("'{}' is not {} from {} to {}", text, kWhole ? "a whole number" : "a number", low, high);
  };
  return CLI::Validator(refusal, "");
}

/// Whole numbers from `low` to `high`, in decimal.
inline CLI::Validator between(int64_t low, int64_t high) { return number_between<int64_t>(low, high); }

/// All seeds.
inline CLI::Validator any_seed() { return between(0, INT64_MAX); }

}  // namespace flashmask::cli
