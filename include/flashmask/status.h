// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "flashmask/export.h"

namespace flashmask {

/// Kind of failure that an Error reports. The values are those of `fm_status` in c_api.h.
enum class ErrorCode : int32_t {
  kInvalidArgument = 1,  ///< an argument is wrong in itself or contradicts another
  kUnsupported = 2,      ///< legal, but not supported by the chosen (or any) backend
  kUnrepresentable = 3,  ///< a mask that does not fit two row intervals per key column
  kNoDevice = 4,         ///< the device or backend asked for is not present
  kOutOfMemory = 5,      ///< an allocation failed
  kInternal = 6,         ///< a defect of the library
};

/// The one exception type of the library. The message names the argument, what was got and what is
/// accepted. Nothing else is thrown, and the library never prints, aborts or exits.
class FLASHMASK_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, int64_t column = -1)
      : std::runtime_error(message), code_(code), column_(column) {}
  ErrorCode code() const noexcept { return code_; }
  /// First key column that does not fit, for kUnrepresentable; otherwise -1.
  int64_t column() const noexcept { return column_; }

 private:
  ErrorCode code_;
  int64_t column_;
};

}  // namespace flashmask
