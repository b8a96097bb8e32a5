// SPDX-License-Identifier: Apache-2.0
#include "verify/any_case.h"

namespace flashmask::verify {

std::string describe(const AnyCase& c) {
  return std::visit([](const auto& of_kind) { return describe(of_kind); }, c);
}

AnyCase parse_any_case(std::string_view line) {
  if (is_cached(line)) return parse_cached_case(line);
  return parse_case(line);
}

int64_t cost(const AnyCase& c) {
  return std::visit([](const auto& of_kind) { return of_kind.cost(); }, c);
}

}  // namespace flashmask::verify
