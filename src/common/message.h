// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <locale>
#include <sstream>
#include <string>

#include "flashmask/status.h"

namespace flashmask {

/// The parts, streamed one after the other.
template <typename... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());  // plain numbers, whatever the program's locale
  (stream << ... << parts);
  return stream.str();
}

template <typename... Parts>
[[noreturn]] void throw_invalid(const Parts&... parts) {
  throw Error(ErrorCode::kInvalidArgument, message(parts...));
}

template <typename... Parts>
[[noreturn]] void throw_unsupported(const Parts&... parts) {
  throw Error(ErrorCode::kUnsupported, message(parts...));
}

}  // namespace flashmask
