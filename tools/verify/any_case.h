// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

#include "verify/cached_case.h"
#include "verify/case.h"

namespace flashmask::verify {

/// A case of either kind.
using AnyCase = std::variant<Case, CachedCase>;

std::string describe(const AnyCase& c);

/// Reads a line of either kind; one with "cache=" is a CachedCase.
AnyCase parse_any_case(std::string_view line);

/// Multiply-adds that a case takes.
inline int64_t cost(const Case& c) { return c.cost(); }
inline int64_t cost(const CachedCase& c) { return c.cost(); }
int64_t cost(const AnyCase& c);

}  // namespace flashmask::verify
