// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace flashmask::cli {

/// Options that every command obeys.
struct Global {
  /// One JSON object on stdout and nothing else there.
  bool json = false;
};

/// Thrown by a command that has said all it has to say and ends with this status.
struct Exit {
  int status = 0;
};

/// The exit statuses of the program.
inline constexpr int kSuccess = 0;
inline constexpr int kFailure = 1;
inline constexpr int kUsageError = 2;

}  // namespace flashmask::cli
