// SPDX-License-Identifier: Apache-2.0
#include "cli/family_list.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "families/families.h"
#include "flashmask/status.h"

namespace flashmask::cli {
namespace {

constexpr std::array<std::string_view, 12> kPaper{"full",
                                                  "causal",
                                                  "sliding_window",
                                                  "causal_document",
                                                  "document",
                                                  "shared_question",
                                                  "global_sliding_window",
                                                  "causal_blockwise",
                                                  "prefix_lm_document",
                                                  "prefix_lm_causal",
                                                  "qk_sparse",
                                                  "random_eviction"};

bool is_family(std::string_view name) {
  return std::any_of(families().begin(), families().end(), [&](const Family& family) { return family.name == name; });
}

[[noreturn]] void throw_unknown(std::string_view name) {
  std::string known;
  for (const Family& family : families()) known += fmt::format(", {}", family.name);
  throw Error(ErrorCode::kInvalidArgument, fmt::format("unknown mask family '{}'; known: all, paper{}", name, known));
}

}  // namespace

std::vector<std::string> family_list(std::string_view text) {
  std::vector<std::string> names;
  if (text == "paper") return {kPaper.begin(), kPaper.end()};
  if (text == "all") {
    for (const Family& family : families()) names.emplace_back(family.name);
    return names;
  }
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    const std::string_view name = text.substr(at, end - at);
    if (!is_family(name)) throw_unknown(name);
    names.emplace_back(name);
    at = end + 1;
  }
  return names;
}

}  // namespace flashmask::cli
