// SPDX-License-Identifier: Apache-2.0
#pragma once

// Goes through the entries of a lead one after the other; for the host.

#include "mask/families/columns.h"

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

/// The first node after each node's subtree: its next sibling, or else what comes after its parent's.
struct NextOutsideInOrder {
  Integers parents;
  int32_t* first_child;  ///< parents.count + 1 zeros for each lead: of the roots, then of each node; 0: none so far
  int32_t* next;         ///< parents.count + 1 for each lead: after the roots, then after each node
  int32_t* unfit;        ///< raised where nodes do not come in depth-first order
  void operator()(const Lead& lead, int64_t) const {
    with_entries(parents, lead, [&](const auto& parent) {
      const int64_t first = lead.index * (parents.count + 1);
      const bool fits =
          note_siblings(parent, first_child + first, next + first + 1) && follow_parents(parent, next + first + 1);
      if (!fits) *unfit = 1;
    });
  }

 private:
  // Without branches: in any tree neighbouring nodes may be in any relation.
  template <typename Parent>
  bool note_siblings(const Parent& parent, int32_t* child, int32_t* sibling) const {
    bool are_earlier = true;
    for (int64_t node = parents.count - 1; node >= 0; --node) {
      const int64_t above = parent(node);
      const bool is_earlier = above >= -1 && above < node;
      are_earlier &= is_earlier;
      int32_t& latest = child[is_earlier ? above + 1 : 0];
      sibling[node] = latest;
      latest = static_cast<int32_t>(node);
    }
    return are_earlier;
  }
  /// Each node must be the first child of the one before it, or come next after its subtree.
  template <typename Parent>
  bool follow_parents(const Parent& parent, int32_t* own) const {
    bool are_in_order = true;
    own[-1] = static_cast<int32_t>(parents.count);
    for (int64_t node = 0; node < parents.count; ++node) {
      const int64_t above = parent(node);
      are_in_order &= (above == node - 1) | (own[node - 1] == node);
      const int32_t sibling = own[node], after_parent = own[above];
      own[node] = sibling > 0 ? sibling : after_parent;
    }
    return are_in_order;
  }
};

/// How many runs there are, of which these are the ends.
inline int64_t count_runs(const Integers& ends, const Lead& lead) {
  return ends.count > 0 ? lower_bound(ends, lead, 0, ends.count, ends.count) + 1 : 0;
}

/// Notes where runs of rows of one bucket begin and end. The last come first, after which few are kept.
struct NoteRunsInOrder {
  BucketTable table;
  Integers ends;
  void operator()(const Lead& lead, int64_t) const {
    for (int64_t run = count_runs(ends, lead) - 1; run >= 0; --run) {
      const int64_t first = run > 0 ? ends(lead, run - 1) : 0, last = ends(lead, run) - 1;
      Bucket* const bucket = table.find(lead, table.buckets(lead, last), last);
      Bucket::keep(bucket->last, last);
      Bucket::keep(bucket->first, first);
    }
  }
};

/// The columns of hash_sparse, which a bucket's keys share between the rows where its runs begin and end.
struct HashSparseInOrder {
  struct Known {
    int64_t from, until;  ///< the first rows that it is known for; zeros for none
    int32_t lts, lte, uts, ute;
  };
  HashSparse family;
  Known* known;  ///< zeros, of each bucket in the table
  Column operator()(const Lead& lead, int64_t j) const {
    const Bucket& bucket = family.bucket_of(lead, family.key_buckets(lead, j));
    const int64_t first = family.first_row(j);
    Known& its = known[&bucket - family.rows.memory];
    if (first < its.from || first >= its.until) its = known_of(bucket, first);
    return {its.lts, its.lte, its.uts, its.ute};
  }

 private:
  Known known_of(const Bucket& bucket, int64_t first) const {
    const auto [column, intervals] = family.hidden(bucket, first);
    if (intervals > 2) *family.unfit = 1;
    Known its{0,
              family.seqlen_q + 1,
              static_cast<int32_t>(column.lts),
              static_cast<int32_t>(column.lte),
              static_cast<int32_t>(column.uts),
              static_cast<int32_t>(column.ute)};
    const auto limit = [&its, first](int64_t row) {
      if (row <= first)
        its.from = larger(its.from, row);
      else
        its.until = smaller(its.until, row);
    };
    limit(family.seqlen_q);
    for (const int32_t last : bucket.last) limit(last);
    for (const int32_t begin : bucket.first) limit(begin - 1);
    return its;
  }
};

}  // namespace flashmask::build
