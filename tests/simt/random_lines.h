// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/random.h"
#include "plan/runs.h"

namespace flashmask {

/// Lines of a plan's granules at random, each of a few runs, in both of the plan's forms.
class RandomLines {
 public:
  RandomLines(Random& random, int32_t lines, int32_t words) : words_(words) {
    for (int32_t line = 0; line < lines; ++line) draw(random);
  }

  /// As the kernels take them: words of bits, or runs.
  const uint32_t* granules(bool in_runs) const {
    return in_runs ? reinterpret_cast<const uint32_t*>(runs_.data()) : bits_.data();
  }
  bool has(int32_t line, int32_t granule) const {
    return (bits_[static_cast<std::size_t>(line * words_ + granule / 32)] >> granule % 32 & 1) != 0;
  }

 private:
  void draw(Random& random) {
    std::vector<uint32_t> line(static_cast<std::size_t>(words_));
    const int64_t pieces = random.integer(0, kLineRuns);
    for (int64_t n = 0; n < pieces; ++n) {
      const int64_t begin = random.integer(0, words_ * 32 - 1);
      const int64_t end = std::min<int64_t>(begin + random.integer(1, 200), words_ * 32);
      for (int64_t at = begin; at < end; ++at) line[static_cast<std::size_t>(at / 32)] |= 1u << at % 32;
    }
    runs_.resize(runs_.size() + kLineRuns);
    RunWriter writer(&runs_[runs_.size() - kLineRuns]);
    for (int32_t word = 0; word < words_; ++word) writer.add(line[static_cast<std::size_t>(word)], word * 32);
    ASSERT_LE(writer.finish(words_ * 32), kLineRuns);
    bits_.insert(bits_.end(), line.begin(), line.end());
  }

  int32_t words_;
  std::vector<uint32_t> bits_;
  std::vector<GranuleRun> runs_;
};

}  // namespace flashmask
