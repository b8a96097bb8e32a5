// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace flashmask::run {

/// A table; cells are markup already. The first column is left-aligned, the others right-aligned.
std::string table(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows);

/// A whole page with the report's style sheet around `body`.
std::string page(std::string_view title, std::string_view body);

}  // namespace flashmask::run
