// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace flashmask::io {

/// The first key that an object somewhere in the JSON `text` names twice. JSON allows it, but a parsed value keeps one
/// of the two and silently drops the other.
std::optional<std::string> repeated_key(std::string_view text);

}  // namespace flashmask::io
