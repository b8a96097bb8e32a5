// SPDX-License-Identifier: Apache-2.0
#include "verify/tally.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace flashmask::verify {
namespace {

/// A reason without its numbers.
std::string kind_of(const std::string& reason) {
  std::string kind;
  for (const char c : reason) {
    const bool is_digit = c >= '0' && c <= '9';
    if (!is_digit) kind += c;
    if (is_digit && (kind.empty() || kind.back() != '#')) kind += '#';
  }
  return kind;
}

struct Skipped {
  std::string first;  ///< first reason
  int64_t reasons = 0, cases = 0;
};

/// Groups reasons that differ in numbers alone: hardly two strides, say, are equal.
std::map<std::string, Skipped> by_kind(const std::map<std::string, int64_t>& skipped) {
  std::map<std::string, Skipped> kinds;
  for (const auto& [reason, count] : skipped) {
    Skipped& kind = kinds[kind_of(reason)];
    if (kind.reasons++ == 0) kind.first = reason;
    kind.cases += count;
  }
  return kinds;
}

}  // namespace

void Tally::add(std::size_t index, const AnyCase& c, const Verdict& verdict) {
  if (verdict.passed() && !verdict.skipped.empty()) {
    ++skipped[verdict.skipped];
    return;
  }
  forward_only += verdict.forward_only;
  for (const auto& [name, figure] : verdict.figures) largest[name] = std::max(largest[name], figure);
  ++(verdict.passed() ? passed : failed);
  if (!verdict.passed()) failures.push_back({index, describe(c), verdict.failures});
}

int64_t Tally::skipped_cases() const {
  int64_t cases = 0;
  for (const auto& [reason, count] : skipped) cases += count;
  return cases;
}

bool Tally::succeeded() const { return failed == 0 && (passed > 0 || skipped.empty()); }

std::string summary(const Tally& tally) {
  std::string text;
  if (!tally.largest.empty()) {
    text += "largest errors, in units of what is allowed:";
    for (const auto& [name, figure] : tally.largest) text += fmt::format("  {} {:.3g}", name, figure);
    text += "\n";
  }
  for (const auto& [kind, skipped] : by_kind(tally.skipped)) {
    text += fmt::format("skipped {}: {}{}\n", skipped.cases, skipped.first,
                        skipped.reasons > 1 ? ", or with other numbers" : "");
  }
  if (tally.forward_only > 0)
    text += fmt::format("forward only: the backend took no backward of {} cases\n", tally.forward_only);
  text += fmt::format("{} passed, {} failed", tally.passed, tally.failed);
  if (!tally.skipped.empty()) text += fmt::format(", {} skipped", tally.skipped_cases());
  return text + "\n";
}

}  // namespace flashmask::verify
