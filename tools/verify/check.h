// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "flashmask/tiles.h"
#include "verify/case_masks.h"
#include "verify/oracle.h"
#include "verify/problem.h"

namespace flashmask::verify {

/// Result of a case.
struct Verdict {
  std::vector<std::string> failures;  ///< one line each; none: the case passed
  /// Largest error of each result, in units of its limit.
  std::map<std::string, double> figures;
  /// The backend does not take such calls: why; nothing was checked then.
  std::string skipped;
  bool forward_only = false;  ///< the backend takes no backward of it

  bool passed() const { return failures.empty(); }
};

/// Runs f; an exception is a failure of the case.
template <typename F>
void catching(Verdict& verdict, F&& f) {
  try {
    f();
  } catch (const std::exception& error) {
    verdict.failures.push_back(std::string("threw: ") + error.what());
  }
}

/// Counts of the keys that each row sees, and of the rows that see each key.
struct Sight {
  Sight(const Case& c, const DenseMask& dense);
  std::vector<int32_t> row_keys;  ///< [batch, heads_q, seqlen_q]
  std::vector<int32_t> key_rows;  ///< [batch, heads_kv, seqlen_k], over the query heads of the group
};

Results results_of(const Outputs& outputs, const Case& c);

/// The accuracy rule (numerics/accuracy.h), per head; for dq and dk of float32 also the rounding of the terms, where
/// they cancel almost entirely. NaN is a failure everywhere; rows and keys that see nothing have exact zeros. `plain`
/// is read for 16-bit types only.
void check_accuracy(const Problem& problem, const DenseMask& dense, const Results& got, const Results& oracle,
                    const Plain& plain, Verdict& verdict);

/// Requires equality bit for bit (-0 equals +0). `other_name` describes the other run: "with the dense mask".
void check_identical(const Results& masked, const Results& other, std::string_view other_name, Verdict& verdict);

/// Nothing but the tensors' elements was written.
void check_gaps(const Outputs& outputs, std::string_view which_run, Verdict& verdict);

/// Tiles with a visible element, counted one by one, over all batch entries and query heads.
int64_t count_live_tiles(const Case& c, const DenseMask& dense, TileShape tile);

}  // namespace flashmask::verify
