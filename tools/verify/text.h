// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "flashmask/status.h"

// The values in a case's line, as text.
namespace flashmask::verify {

template <typename... Arguments>
[[noreturn]] void fail(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format(format, std::forward<Arguments>(arguments)...));
}

/// The words for the values of an enumeration.
template <typename T, std::size_t N>
using Words = std::array<std::pair<T, std::string_view>, N>;

template <typename T, std::size_t N>
std::string_view word(const Words<T, N>& words, T value) {
  for (const auto& [candidate, text] : words) {
    if (candidate == value) return text;
  }
  return "?";
}

template <typename T, std::size_t N>
T value_of(const Words<T, N>& words, std::string_view key, std::string_view text) {
  std::string known;
  for (const auto& [value, candidate] : words) {
    if (candidate == text) return value;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", candidate);
  }
  fail("{} is '{}'; it must be one of: {}", key, text, known);
}

template <typename T>
T number(std::string_view key, std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) fail("{} is '{}'; it must be a number", key, text);
  return value;
}

inline double finite(std::string_view key, std::string_view text) {
  const auto value = number<double>(key, text);
  if (!std::isfinite(value)) fail("{} is '{}'; it must be finite", key, text);
  return value;
}

}  // namespace flashmask::verify
