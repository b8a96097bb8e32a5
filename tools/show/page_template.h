// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace flashmask::show {

/// The files of tools/show/page/ put together; what a page shows goes where kShownMark stands.
extern const std::string_view kPageTemplate;
inline constexpr std::string_view kShownMark = "@page_shown@";

}  // namespace flashmask::show
