// SPDX-License-Identifier: Apache-2.0
#include "verify/tally.h"

#include <fmt/format.h>

#include <algorithm>

namespace flashmask::verify {

void Tally::add(std::size_t index, const Case& c, const Verdict& verdict) {
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
  for (const auto& [reason, count] : tally.skipped) text += fmt::format("skipped {}: {}\n", count, reason);
  if (tally.forward_only > 0)
    text += fmt::format("forward only: the backend took no backward of {} cases\n", tally.forward_only);
  text += fmt::format("{} passed, {} failed", tally.passed, tally.failed);
  if (!tally.skipped.empty()) text += fmt::format(", {} skipped", tally.skipped_cases());
  return text + "\n";
}

}  // namespace flashmask::verify
