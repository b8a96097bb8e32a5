// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <utility>

#include "flashmask/status.h"

namespace flashmask::io {

/// Throws an Error for wrong input with a message in fmt's format.
template <typename... Arguments>
[[noreturn]] void fail(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format(format, std::forward<Arguments>(arguments)...));
}

}  // namespace flashmask::io
