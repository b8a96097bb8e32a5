// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "mask/families/buckets.h"
#include "mask/families/contents.h"
#include "mask/families/steps.h"

namespace flashmask::build {

/// Notes where runs of rows of one bucket begin and end. The last rows come first, after which few are kept.
struct NoteRuns {
  BucketTable table;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t after) const {
    const Integers& buckets = table.buckets;
    const int64_t row = buckets.count - 1 - after, bucket = buckets(lead, row);
    const bool is_first = row == 0 || buckets(lead, row - 1) != bucket;
    const bool is_last = after == 0 || buckets(lead, row + 1) != bucket;
    if (!is_first && !is_last) return;
    Bucket* const runs = table.find(lead, bucket, row);
    if (is_last) Bucket::keep(runs->last, row);
    if (is_first) Bucket::keep(runs->first, row);
  }
};

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

/// Rows and keys in the same bucket.
struct HashSparse : OfColumns<HashSparse> {
  static constexpr Declared kParameters[] = {
      {"query_buckets", Kind::kVector, "of each row"},
      {"key_buckets", Kind::kVector, "of each key"},
      {.name = "causal", .kind = Kind::kFlag, .doc = "1: also j <= i + seqlen_k - seqlen_q", .otherwise = 0}};
  static constexpr std::string_view kMisfit =
      "the hash-sparse mask does not fit two row intervals per key column; sort the queries by bucket, so that the "
      "rows of each are contiguous";
  static constexpr Form kForm{.vectors = kLts | kLte | kUts | kUte, .misfit = kMisfit};
  static constexpr Family kFamily{
      "hash_sparse", kParameters, kForm, "causal", {kForm.vectors, Edges::kDiagonal, false, kMisfit}};

  static void measure(Arguments& a) {
    a.shape.seqlen_q = a.vector("query_buckets").count;
    a.shape.seqlen_k = a.vector("key_buckets").count;
  }

  /// The rows from the diagonal on that are in another bucket than the key are hidden.
  struct Columns {
    int64_t seqlen_q, seqlen_k;
    bool causal;
    Integers key_buckets;
    BucketTable rows;
    int32_t* unfit;  ///< becomes 1 if a column takes more than two intervals; may be null

    /// The first row that the band lets see the key.
    FLASHMASK_COLUMN int64_t first_row(int64_t j) const {
      return causal ? smaller(larger(j - (seqlen_k - seqlen_q), 0), seqlen_q) : 0;
    }

    struct Hidden {
      Column column;
      int64_t intervals;  ///< how many it would take, if no more than two
    };
    /// From the first row on, of a key in the bucket.
    FLASHMASK_COLUMN Hidden hidden(const Bucket& runs, int64_t first) const {
      int count = 0;  // runs that reach the first row
      for (int n = 0; n < Bucket::kRuns; ++n) count += runs.last[n] > first;
      const int64_t begin = runs.first[smaller(larger(count, 1), Bucket::kRuns - 1) - 1] - 1, last = runs.last[0];
      const int64_t seen = count > 0 ? larger(begin, first) : seqlen_q, end = count > 0 ? last : seqlen_q;
      // Rows before the first run, between two and after the last are hidden. A column fits with two such parts at
      // most.
      Hidden its{{.lts = 0, .lte = 0, .uts = end, .ute = seqlen_q}, 0};
      const auto hide = [&its](int64_t from, int64_t to) {
        if (from >= to) return;
        if (its.intervals++ == 0) its.column.lts = from, its.column.lte = to;
        its.column.uts = from, its.column.ute = to;
      };
      hide(0, seen > first ? seen : 0);
      for (int n = count - 1; n > 0; --n) hide(runs.last[n], runs.first[n - 1] - 1);
      hide(end, seqlen_q);
      return its;
    }
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      const Hidden it = hidden(bucket_of(lead, key_buckets(lead, j)), first_row(j));
      if (it.intervals > 2 && unfit) *unfit = 1;
      return it.column;
    }

    /// Neighbouring keys often share a bucket.
    struct Found {
      int64_t lead = -1, key = 0;
      const Bucket* bucket = nullptr;
    };
    FLASHMASK_COLUMN const Bucket& bucket_of(const Lead& lead, int64_t key) const {
      if (lead.index != found.lead || key != found.key) found = {lead.index, key, rows.find(lead, key)};
      return *found.bucket;
    }
    mutable Found found{};
  };

  /// The columns of hash_sparse, which a bucket's keys share between the rows where its runs begin and end.
  struct ColumnsInOrder {
    struct Known {
      int64_t from, until;  ///< the first rows that it is known for; zeros for none
      int32_t lts, lte, uts, ute;
    };
    Columns columns;
    Known* known;  ///< zeros, of each bucket in the table
    Column operator()(const Lead& lead, int64_t j) const {
      const Bucket& bucket = columns.bucket_of(lead, columns.key_buckets(lead, j));
      const int64_t first = columns.first_row(j);
      Known& its = known[&bucket - columns.rows.memory];
      if (first < its.from || first >= its.until) its = known_of(bucket, first);
      return {its.lts, its.lte, its.uts, its.ute};
    }

   private:
    Known known_of(const Bucket& bucket, int64_t first) const {
      const auto [column, intervals] = columns.hidden(bucket, first);
      if (intervals > 2) *columns.unfit = 1;
      Known its{0,
                columns.seqlen_q + 1,
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
      limit(columns.seqlen_q);
      for (const int32_t last : bucket.last) limit(last);
      for (const int32_t begin : bucket.first) limit(begin - 1);
      return its;
    }
  };

  template <typename Run>
  static Columns columns(Run& run, const Arguments& a) {
    const int64_t rows = a.shape.seqlen_q;
    BucketTable table{a.vector("query_buckets"), rows, nullptr};
    if constexpr (Run::kInOrder) {
      const Integers ends = ordered_run_ends(run, table.buckets, 0);
      int64_t most = 0;
      for (int64_t n = 0; n < run.leads().count(); ++n) most = larger(most, count_runs(ends, run.leads()[n]));
      table.most = larger(most, 64);  // few buckets do not collide then
      table.memory = run.template zeros<Bucket>(BucketTable::size(table.most));
      run.each(1, NoteRunsInOrder{table, ends});
    } else {
      table.memory = run.template zeros<Bucket>(BucketTable::size(rows));
      run.each(rows, NoteRuns{table});
    }
    return {rows, a.shape.seqlen_k, a.number("causal") != 0, a.vector("key_buckets"), table, a.unfit};
  }
  template <typename Run>
  static void write(Run& run, const Arguments& a, const Output& output) {
    const Columns own = columns(run, a);
    if constexpr (Run::kInOrder) {
      using Known = ColumnsInOrder::Known;
      Known* const known = run.template zeros<Known>(BucketTable::size(own.rows.most));
      write_columns(run, a, output, ColumnsInOrder{own, known});
    } else {
      write_columns(run, a, output, own);
    }
  }

  template <typename Run>
  static void throw_first_misfit(Run& run, const Arguments& a) {
    const Columns own = columns(run, a);
    run.each(a.shape.seqlen_k, [&](const Lead& lead, int64_t j) {
      if (own.hidden(own.bucket_of(lead, own.key_buckets(lead, j)), own.first_row(j)).intervals > 2)
        throw_misfit("the hash-sparse mask", run.leads(), lead, j, hidden_runs(own, lead, j),
                     "sort the queries by bucket, so that the rows of each are contiguous");
    });
  }

 private:
  /// How many runs of rows from the diagonal on are in another bucket than the key.
  static int64_t hidden_runs(const Columns& columns, const Lead& lead, int64_t j) {
    const int64_t key = columns.key_buckets(lead, j);
    int64_t count = 0;
    bool was_hidden = false;
    for (int64_t row = columns.first_row(j); row < columns.seqlen_q; ++row) {
      const bool is_hidden = columns.rows.buckets(lead, row) != key;
      count += is_hidden && !was_hidden;
      was_hidden = is_hidden;
    }
    return count;
  }
};

}  // namespace flashmask::build
