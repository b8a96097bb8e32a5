// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace flashmask::cli {
namespace {

constexpr double kSilentSeconds = 1.0;
constexpr double kTerminalInterval = 0.1;

constexpr const char* kEraseLine = "\r\033[K";

}  // namespace

std::string duration_text(double seconds) {
  if (seconds < 59.95) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
}

Progress::Progress(std::string what, int64_t total, bool show_counts)
    : what_(std::move(what)),
      total_(std::max<int64_t>(total, 1)),
      show_counts_(show_counts),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(Clock::now()) {}

Progress::~Progress() { clear(); }

void Progress::clear() {
  const std::lock_guard lock(mutex_);
  if (!terminal_ || last_report_ == 0) return;
  std::fputs(kEraseLine, stderr);
  std::fflush(stderr);
}

void Progress::advance(int64_t n) {
  const std::lock_guard lock(mutex_);
  done_ += n;
  const double elapsed = std::chrono::duration<double>(Clock::now() - start_).count();
  if (elapsed < kSilentSeconds) return;
  if (terminal_) {
    report_on_terminal(elapsed);
  } else {
    report_in_log(elapsed);
  }
}

void Progress::report_on_terminal(double elapsed) {
  if (last_report_ > 0 && elapsed - last_report_ < kTerminalInterval && done_ < total_) return;
  last_report_ = elapsed;
  std::fputs((kEraseLine + line(elapsed)).c_str(), stderr);
  std::fflush(stderr);
}

void Progress::report_in_log(double elapsed) {
  const int64_t tenth = std::min(done_, total_) * 10 / total_;
  if (last_report_ > 0 && tenth <= last_tenth_) return;
  last_report_ = elapsed;
  last_tenth_ = tenth;
  std::fputs((line(elapsed) + "\n").c_str(), stderr);
  std::fflush(stderr);
}

std::string Progress::line(double elapsed) const {
  const double share = std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_));
  std::string text = fmt::format("{}: {:.0f} %", what_, 100 * share);
  if (show_counts_) text += fmt::format(" ({} of {})", done_, total_);
  text += fmt::format(", {}", duration_text(elapsed));
  if (share > 0 && share < 1) text += fmt::format(", {} left", duration_text(elapsed / share - elapsed));
  return text;
}

}  // namespace flashmask::cli
