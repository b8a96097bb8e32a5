// SPDX-License-Identifier: Apache-2.0
#pragma once

// Goes through the entries of a lead one after the other; for the host.

#include "mask/families/integers.h"

namespace flashmask::build {

/// f(entry), where entry(n) is x(lead, n): the type is asked for once, not for each entry.
template <typename F>
inline auto with_entries(const Integers& x, const Lead& lead, const F& f) {
  const auto of = [&](const auto* entries) {
    entries += lead.batch * x.batch_stride + lead.head * x.head_stride;
    if (x.stride == 1) return f([entries](int64_t n) { return static_cast<int64_t>(entries[n]); });
    return f([entries, stride = x.stride](int64_t n) { return static_cast<int64_t>(entries[n * stride]); });
  };
  if (x.data && x.dtype == DataType::kInt32) return of(static_cast<const int32_t*>(x.data));
  if (x.data && x.dtype == DataType::kInt64) return of(static_cast<const int64_t*>(x.data));
  return f([&](int64_t n) { return x(lead, n); });
}

/// f(begin, end) for each run of entries that go up by `step`.
template <typename F>
inline void each_run(const Integers& x, const Lead& lead, int64_t step, const F& f) {
  constexpr int kAtOnce = 8;
  with_entries(x, lead, [&](const auto& entry) {
    // Differences wrap where they would overflow; entries of a run are never that far apart.
    const auto breaks = [&](int64_t n) {
      return (static_cast<uint64_t>(entry(n)) - static_cast<uint64_t>(entry(n - 1))) ^ static_cast<uint64_t>(step);
    };
    int64_t begin = 0, n = 1;
    const auto end_at = [&](int64_t end) {
      f(begin, end);
      begin = end;
    };
    for (; n + kAtOnce <= x.count; n += kAtOnce) {
      uint64_t any = 0;
      for (int k = 0; k < kAtOnce; ++k) any |= breaks(n + k);
      if (!any) continue;
      // Without branches: where runs end is not to be foreseen.
      int64_t ends[kAtOnce];
      int count = 0;
      for (int k = 0; k < kAtOnce; ++k) {
        ends[count] = n + k;
        count += breaks(n + k) != 0;
      }
      for (int k = 0; k < count; ++k) end_at(ends[k]);
    }
    for (; n < x.count; ++n)
      if (breaks(n)) end_at(n);
    if (x.count > 0) end_at(x.count);
  });
}

// Steps that do a lead as a whole, for which they are asked once.

/// Ends of runs of entries that go up by `step`, then the number of entries.
struct EndsOfRunsInOrder {
  Integers entries;
  int64_t step;
  int32_t* ends;
  void operator()(const Lead& lead, int64_t) const {
    int32_t* at = ends + lead.index * entries.count;
    int32_t* const end_of_all = at + entries.count;
    each_run(entries, lead, step, [&at](int64_t, int64_t end) { *at++ = static_cast<int32_t>(end); });
    while (at < end_of_all) *at++ = static_cast<int32_t>(entries.count);
  }
};

/// Counts the runs that end at `ends`.
inline int64_t count_runs(const Integers& ends, const Lead& lead) {
  return ends.count > 0 ? lower_bound(ends, lead, 0, ends.count, ends.count) + 1 : 0;
}

}  // namespace flashmask::build
