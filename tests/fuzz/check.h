// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "flashmask/status.h"

/// Entry point that libFuzzer, or corpus_main.cpp in its place, calls with every input.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size);

namespace flashmask::fuzz {

/// Ends the program, and so makes the input a finding, unless `holds`.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "this does not hold: %s\n", what);
  std::abort();
}

/// True if `f` returned, false if it threw an Error with a message. Any other exception is a finding.
template <typename F>
bool succeeds(F&& f) {
  try {
    std::forward<F>(f)();
    return true;
  } catch (const Error& error) {
    require(error.what()[0] != '\0', "an Error says what is wrong");
    require(error.code() != ErrorCode::kInternal, "no Error is internal");
    return false;
  }
}

}  // namespace flashmask::fuzz
