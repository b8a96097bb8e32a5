// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace flashmask::cli {

/// Progress of a long task on stderr: percent, elapsed and remaining time. Silent for the first second, so
/// that short tasks say nothing. On a terminal one line is rewritten; elsewhere a line is added every 10 %.
class Progress {
 public:
  /// advance() adds up to `total`. `show_counts` is false if that number, a cost say, means nothing to a reader.
  Progress(std::string what, int64_t total, bool show_counts = true);
  /// Leaves the terminal's line clean.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `n` more of `total` are done. May be called from any thread.
  void advance(int64_t n = 1);

  /// Takes the line off the terminal, so that something else can be printed there.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;

  void report_on_terminal(double elapsed);
  void report_in_log(double elapsed);
  std::string line(double elapsed) const;

  const std::string what_;
  const int64_t total_;
  const bool show_counts_;
  const bool terminal_;
  const Clock::time_point start_;
  std::mutex mutex_;
  int64_t done_ = 0;
  double last_report_ = 0;  ///< seconds after the start; 0: nothing was printed yet
  int64_t last_tenth_ = 0;
};

/// "3.2 s", "4 min 05 s", "2 h 03 min".
std::string duration_text(double seconds);

}  // namespace flashmask::cli
