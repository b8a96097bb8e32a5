// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace flashmask::test {

/// FLASHMASK_TEST_SCALE in percent, 5 to 100; 100 if it is not set.
inline int64_t test_scale() {
  const char* text = std::getenv("FLASHMASK_TEST_SCALE");
  const int64_t percent = text ? std::strtoll(text, nullptr, 10) : 100;
  return std::clamp<int64_t>(percent, 5, 100);
}

/// True if FLASHMASK_TEST_LONG asks for the tests that are too long for every run.
inline bool test_long() {
  const char* text = std::getenv("FLASHMASK_TEST_LONG");
  return text && text[0] == '1';
}

/// How many of `count` cases to run: all at 100 percent, at least one.
inline int64_t scaled(int64_t count) { return std::max<int64_t>(1, count * test_scale() / 100); }

/// How far to step through an exhaustive set at this scale: 1 at 100 percent. The step is odd, so that a
/// reduced run does not keep to one bit pattern of the index.
inline int64_t stride() {
  const int64_t step = (100 + test_scale() - 1) / test_scale();
  return step == 1 ? 1 : step | 1;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// True if figures of speed and heap mean anything in this build.
#if defined(NDEBUG)
inline constexpr bool kMeasured = !kSanitized;
#else
inline constexpr bool kMeasured = false;
#endif

}  // namespace flashmask::test
