// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "verify/any_case.h"
#include "verify/check.h"

namespace flashmask::verify {

/// A case that failed.
struct FailedCase {
  std::size_t index;                  ///< in the list of cases
  std::string line;                   ///< as `describe` has it
  std::vector<std::string> failures;  ///< one line each
};

/// Results of all cases of a run.
struct Tally {
  int64_t passed = 0, failed = 0;
  int64_t forward_only = 0;                ///< among the passed and failed ones
  std::map<std::string, int64_t> skipped;  ///< how many for each reason
  std::map<std::string, double> largest;   ///< error of each result in units of what is allowed
  std::vector<FailedCase> failures;

  void add(std::size_t index, const AnyCase& c, const Verdict& verdict);
  int64_t skipped_cases() const;
  /// None failed, and not all were skipped: a run that checks nothing is no success.
  bool succeeded() const;
};

/// Lines that end with "N passed, M failed" or "N passed, M failed, K skipped", before it the largest errors, and each
/// reason to skip with the number of its cases; of reasons that differ in numbers alone, the first.
std::string summary(const Tally& tally);

}  // namespace flashmask::verify
