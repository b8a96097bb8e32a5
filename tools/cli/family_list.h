// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace flashmask::cli {

/// The families of an option: names separated by commas, "all", or "paper" (the twelve masks of the
/// FlashMask paper's kernel table). Throws Error on a name that is not known.
std::vector<std::string> family_list(std::string_view text);

}  // namespace flashmask::cli
