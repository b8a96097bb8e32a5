// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
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

inline int64_t integer(std::string_view key, std::string_view text, int64_t smallest, int64_t largest) {
  const auto value = number<int64_t>(key, text);
  if (value < smallest || value > largest)
    fail("{} is {}; it must be between {} and {}", key, value, smallest, largest);
  return value;
}

inline constexpr Words<bool, 2> kYesNo{{{false, "no"}, {true, "yes"}}};

/// How a kind of case reads the value of each key.
template <typename C>
using Setters = std::map<std::string_view, std::function<void(C&, std::string_view key, std::string_view value)>>;

template <typename C>
auto integer_setter(int64_t C::* member, int64_t smallest, int64_t largest) {
  return
      [=](C& c, std::string_view key, std::string_view value) { c.*member = integer(key, value, smallest, largest); };
}

template <typename C, typename T, std::size_t N>
auto word_setter(T C::* member, const Words<T, N>& words) {
  return
      [member, &words](C& c, std::string_view key, std::string_view value) { c.*member = value_of(words, key, value); };
}

template <typename C>
void set(C& c, const Setters<C>& setters, std::string_view word) {
  const std::size_t equals = word.find('=');
  const auto found = equals == std::string_view::npos ? setters.end() : setters.find(word.substr(0, equals));
  if (found == setters.end()) {
    std::string known;
    for (const auto& [key, setter] : setters) known += fmt::format("{}{}", known.empty() ? "" : ", ", key);
    fail("a case has no '{}'; it is made of key=value with the keys {}", word, known);
  }
  found->second(c, found->first, word.substr(equals + 1));
}

/// Sets what each word of a line says.
template <typename C>
void set_all(C& c, const Setters<C>& setters, std::string_view line) {
  constexpr std::string_view kBlank = " \t\r\n";
  for (std::size_t at = line.find_first_not_of(kBlank); at != std::string_view::npos;) {
    const std::size_t end = std::min(line.find_first_of(kBlank, at), line.size());
    set(c, setters, line.substr(at, end - at));
    at = line.find_first_not_of(kBlank, end);
  }
}

}  // namespace flashmask::verify
