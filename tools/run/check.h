// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "flashmask/mask.h"
#include "run/packing.h"
#include "run/sampled_attention.h"

namespace flashmask::run {

/// The largest difference between a result and the fp64 oracle over all samples, and what is allowed.
struct Accuracy {
  std::string tensor;
  double max_error = 0;      ///< lse: relative to max(1, |lse|)
  double max_reference = 0;  ///< largest absolute value of the oracle
  double max_sum = 0;        ///< dq and dk: largest absolute value of the two sums whose difference they are
  double plain_error = 0;    ///< max_error of a plain implementation in the same dtype; 0 for float32
  double limit = 0;

  bool passed() const { return max_error <= limit; }
};

struct CheckFigures {
  int64_t rows = 0, columns = 0;
  std::vector<Accuracy> accuracy{};
  int64_t wrong_visibility = 0;  ///< keys of sampled rows on which documents and mask disagree
  int64_t unwritten_or_nan = 0;  ///< elements of all results that are NaN; they were NaN before the calls
  int64_t dirty_padding = 0;     ///< elements of padding rows and keys that are not what hidden ones must be

  bool passed() const;
};

/// Compares results with an oracle that knows nothing of masks, tiles or plans: for each sampled query row of one head
/// it tells from documents, answers and nodes which keys the row sees, and computes out, lse and dq over these in fp64;
/// for each sampled key column it does so for every row that sees the key and sums up dk and dv. Limits:
/// numerics/accuracy.h, over all samples.
class SampleCheck {
 public:
  /// Draws the samples among the first `sequences` sequences of `packed`.
  SampleCheck(const Packed& packed, int64_t sequences, const AttentionShape& shape, DataType dtype, uint64_t seed,
              int threads);
  ~SampleCheck();

  /// Checks sequences [first, first + count): their samples, and the padding and NaNs of every element.
  void check(int64_t first, int64_t count, const Mask& mask, const Inputs& inputs, const Outputs& outputs);
  CheckFigures figures() const;

 private:
  struct RowSample {
    int64_t sequence, row, head;
  };
  struct ColumnSample {
    int64_t sequence, key, kv_head;
  };
  enum Result { kOut, kLse, kDq, kDk, kDv, kResults };

  void draw_rows(int64_t sequences, uint64_t seed);
  void draw_columns(int64_t sequences, uint64_t seed);
  void check_row(const RowSample& sample, int64_t entry, const Mask& mask, const Inputs& inputs,
                 const Outputs& outputs);
  void check_column(const ColumnSample& sample, int64_t entry, const Inputs& inputs, const Outputs& outputs);
  void check_every_element(int64_t first, int64_t count, const Outputs& outputs);
  /// The elements of a result from `offset` on.
  void compare(Result result, const Tensor& got, int64_t offset, const Expected& expected);

  const Packed& packed_;
  std::unique_ptr<const Lineage> lineage_;
  AttentionShape shape_;
  DataType dtype_;
  int threads_;
  std::vector<RowSample> rows_;
  std::vector<ColumnSample> columns_;
  Accuracy accuracy_[kResults];
  double given_out_error_[kResults] = {};  ///< dq and dk: against the exact gradients for the rounded out
  int64_t wrong_visibility_ = 0, unwritten_or_nan_ = 0, dirty_padding_ = 0;
};

}  // namespace flashmask::run
