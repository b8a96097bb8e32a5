// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>

namespace flashmask::cli {

/// Accepts whole numbers from `low` to `high`; the help text does not repeat the range.
inline CLI::Validator between(int64_t low, int64_t high) { return CLI::Range(low, high).description(""); }

}  // namespace flashmask::cli
