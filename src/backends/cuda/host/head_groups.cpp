// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/host/head_groups.h"

#include <algorithm>

#include "backends/cuda/host/call_params.h"
#include "common/arithmetic.h"

namespace flashmask::cuda {
namespace {

/// Share of the L2 cache that should hold all that the heads of an L2 group read and add up for their rows.
constexpr int64_t kL2GroupBytes = int64_t{16} << 20;
/// Work tiles that an L2 group should have for each multiprocessor: the longest of fewer outlasts the others. More head
/// groups than fit in L2 pay for that up to these bytes.
constexpr int64_t kLeastRounds = 2, kMostBytes = int64_t{320} << 20;
/// Query heads are split up to this many work tiles for each multiprocessor, as one may be much longer than the others.
/// Each part writes and reads dk and dv once more, so for every part and work tile of a multiprocessor a key head must
/// have this many rows, counted under each of its query heads.
constexpr int64_t kManyRounds = 8, kRowsOfPart = 10240;

/// Bytes that the query heads of a head group read (q, dout) and add up (dq).
int64_t head_group_l2_bytes(const Problem& p, int64_t splits) {
  const auto element = static_cast<int64_t>(element_size(p.dtype));
  const int64_t of_row = (p.head_dim + p.head_dim_v) * element + p.head_dim * static_cast<int64_t>(sizeof(float));
  return std::max<int64_t>(1, p.group_size() / splits * p.seqlen_q * of_row);
}

}  // namespace

int64_t count_splits(const Problem& p, int64_t key_tiles) {
  const int64_t all = multiprocessors(p), group = p.group_size();
  const auto is_enough = [&](int64_t n) {
    const int64_t work_tiles = key_tiles * n;
    if (work_tiles < all) return false;
    return work_tiles >= kManyRounds * all || work_tiles * n * kRowsOfPart > group * p.seqlen_q * all;
  };
  int64_t n = 1;
  while (n < group && (group % n != 0 || !is_enough(n))) ++n;
  return n;
}

int64_t head_groups_in_l2(const Problem& p, int64_t splits) {
  const int64_t all = std::max<int64_t>(1, p.batch * p.heads_kv * splits);
  return std::clamp<int64_t>(kL2GroupBytes / head_group_l2_bytes(p, splits), 1, all);
}

int64_t head_groups_for_rounds(const Problem& p, int64_t splits, int64_t key_tiles) {
  const int64_t all = std::max<int64_t>(1, p.batch * p.heads_kv * splits);
  const int64_t enough = ceil_div(kLeastRounds * multiprocessors(p), std::max<int64_t>(1, key_tiles));
  const int64_t most = kMostBytes / head_group_l2_bytes(p, splits);
  const int64_t together = std::clamp<int64_t>(std::min(enough, most), head_groups_in_l2(p, splits), all);
  return ceil_div(all, ceil_div(all, together));
}

}  // namespace flashmask::cuda
