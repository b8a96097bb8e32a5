// SPDX-License-Identifier: Apache-2.0
#pragma once

// Steps of a family's build, for any Run, which does them on the host or a device (or only adds up memory):
//   Run::kInOrder               whether one entry is done after the other
//   run.leads()                 Leads: batch entries and heads
//   run.array<T>(count)         scratch of `count` elements for each lead, as a T*; contents undefined
//   run.zeros<T>(count)         such scratch; contents 0
//   run.each(count, f)          f(lead, n) for each lead and n < count
//   run.scan(count, f)          f.prepare(lead, n) likewise, and after all of them f.store(lead, n, value, sum):
//                               f.value(lead, n), which may be asked for more than once, and the sum of those up to it
//   run.minima(count, f)        f.store(lead, power, n, least) for powers 1 and 2: the least f.value(lead, k), an int32
//                               asked for once, of the entries k < count of which the n-th Minima::kRun^power consist
// A run that does the steps in order needs no minima.

#include <type_traits>

#include "mask/families/arguments.h"
#include "mask/families/column.h"
#include "mask/families/on_host.h"
#include "mask/families/segments.h"

namespace flashmask::build {

/// Scratch of `count` elements for each lead.
template <typename T>
Integers integers_of(const T* data, const Leads& leads, int64_t count) {
  static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t>);
  return {data, std::is_same_v<T, int32_t> ? DataType::kInt32 : DataType::kInt64, count, leads.heads * count, count, 1};
}

FLASHMASK_COLUMN int32_t row_of(int64_t value, int64_t seqlen_q) {
  return static_cast<int32_t>(larger(0, smaller(value, seqlen_q)));
}

/// Ends of segments from their lengths.
struct EndsOfLengths {
  Integers lengths;
  int64_t* ends;
  FLASHMASK_COLUMN void prepare(const Lead&, int64_t) const {}
  FLASHMASK_COLUMN int64_t value(const Lead& lead, int64_t n) const { return lengths(lead, n); }
  FLASHMASK_COLUMN void store(const Lead& lead, int64_t n, int64_t, int64_t sum) const {
    ends[lead.index * lengths.count + n] = sum;
  }
};

/// Runs of tokens whose numbers go up by `step`.
struct RunsOfTokens {
  Integers tokens;
  int64_t step;
  int32_t* ends;   ///< each run's end, then the sequence's
  int32_t* index;  ///< the run of each token
  /// True if a run begins at token n; n > 0.
  FLASHMASK_COLUMN bool begins(const Lead& lead, int64_t n) const {
    // Wraps where a sum would overflow; positions are never that far apart.
    return static_cast<uint64_t>(tokens(lead, n)) - static_cast<uint64_t>(tokens(lead, n - 1)) !=
           static_cast<uint64_t>(step);
  }
};

/// Finds runs of one or two kinds, which 32 bits of a sum each count.
template <int kinds>
struct FindRuns {
  RunsOfTokens of[kinds];
  int64_t seqlen;
  FLASHMASK_COLUMN void prepare(const Lead& lead, int64_t n) const {
    FLASHMASK_UNROLL
    for (int k = 0; k < kinds; ++k) of[k].ends[lead.index * seqlen + n] = static_cast<int32_t>(seqlen);
  }
  FLASHMASK_COLUMN int64_t value(const Lead& lead, int64_t n) const {
    int64_t begins = 0;
    FLASHMASK_UNROLL
    for (int k = 0; k < kinds; ++k) begins |= static_cast<int64_t>(n > 0 && of[k].begins(lead, n)) << (32 * k);
    return begins;
  }
  FLASHMASK_COLUMN void store(const Lead& lead, int64_t n, int64_t begins, int64_t sum) const {
    const int64_t first = lead.index * seqlen;
    FLASHMASK_UNROLL
    for (int k = 0; k < kinds; ++k) {
      const auto run = static_cast<int32_t>(sum >> (32 * k));
      of[k].index[first + n] = run;
      if (begins >> (32 * k) & 1) of[k].ends[first + run - 1] = static_cast<int32_t>(n);
    }
  }
};

/// Two steps that do not depend on each other.
template <typename F, typename G>
struct IndependentSteps {
  F f;
  int64_t count;  ///< entries of f; g's come after them
  G g;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t n) const {
    if (n < count)
      f(lead, n);
    else
      g(lead, n - count);
  }
};

struct ClearFlag {
  int32_t* flag;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t) const {
    if (lead.index == 0) *flag = 0;
  }
};

/// Writes columns, clamped to the rows.
struct Writer {
  VectorOutput out;
  int64_t seqlen_q, seqlen_k;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t j, const Column& column) const {
    const int64_t at = (lead.index * seqlen_k + j) * out.stride;
    if (out.lts) out.lts[at] = row_of(column.lts, seqlen_q);
    if (out.lte) out.lte[at] = row_of(column.lte, seqlen_q);
    if (out.uts) out.uts[at] = row_of(column.uts, seqlen_q);
    if (out.ute) out.ute[at] = row_of(column.ute, seqlen_q);
  }
};

template <typename Columns>
struct WriteColumns {
  Columns columns;
  Writer write;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t j) const { write(lead, j, columns(lead, j)); }
};

template <typename Run>
Integers ordered_run_ends(Run& run, const Integers& entries, int64_t step) {
  int32_t* const ends = run.template array<int32_t>(entries.count);
  run.each(1, EndsOfRunsInOrder{entries, step, ends});
  return integers_of(ends, run.leads(), entries.count);
}

/// Runs of tokens whose ends a scan is to find.
template <typename Run>
RunsOfTokens runs_to_find(Run& run, const Integers& tokens, int64_t step) {
  return {tokens, step, run.template array<int32_t>(tokens.count), run.template array<int32_t>(tokens.count)};
}

inline Segments segments_of(const RunsOfTokens& found, const Leads& leads) {
  const int64_t seqlen = found.tokens.count;
  return Segments(integers_of(found.ends, leads, seqlen), seqlen - 1, found.index);
}

/// The runs of tokens whose numbers go up by `step`.
template <typename Run>
Segments runs(Run& run, const Integers& tokens, int64_t step) {
  if constexpr (Run::kInOrder) {
    return Segments(ordered_run_ends(run, tokens, step), tokens.count - 1);
  } else {
    const RunsOfTokens own = runs_to_find(run, tokens, step);
    run.scan(tokens.count, FindRuns<1>{{own}, tokens.count});
    return segments_of(own, run.leads());
  }
}

template <typename Run>
Segments segments(Run& run, const GivenSegments& given, int64_t seqlen) {
  const Leads leads = run.leads();
  switch (given.form) {
    case SegmentForm::kNone:  // one of all tokens
      return Segments({.count = 1, .constant = seqlen});
    case SegmentForm::kCuSeqlens:
      return Segments(given.values.from(1));
    case SegmentForm::kSeqlens: {
      int64_t* ends = run.template array<int64_t>(given.values.count);
      run.scan(given.values.count, EndsOfLengths{given.values, ends});
      return Segments(integers_of(ends, leads, given.values.count));
    }
    default:
      return runs(run, given.values, step_of(given.form));
  }
}

template <typename Run>
Segments documents(Run& run, const Arguments& a) {
  return segments(run, a.documents, a.seqlen);
}

/// Blocks of one length, counted from where a document begins, or of given lengths.
struct Blocks {
  int64_t length;  ///< 0: given lengths
  Segments given;

  struct Bounds {
    int64_t begin, until;  ///< the block's begin, and where the first block begins that does not see it
  };
  /// reach: in blocks, the own one included. Both ends are within the document.
  FLASHMASK_COLUMN Bounds bounds(const Lead& lead, const Place& document, int64_t token, int64_t reach) const {
    int64_t begin, until;
    if (length > 0) {
      begin = token - remainder(token - document.begin, length);
      until = begin + reach * length;
    } else {
      const Place own = given.place(lead, token);
      begin = own.begin;
      until = given.end_after(lead, smaller(own.index + smaller(reach, given.count()), given.count()));
    }
    return {larger(begin, document.begin), smaller(until, document.end)};
  }
};

template <typename Run>
Blocks blocks(Run& run, const Arguments& a) {
  if (a.block > 0) return {a.block, Segments({})};
  return {0, segments(run, a.blocks, a.seqlen)};
}

/// How far a window reaches, in tokens or blocks.
inline int64_t reach_of(const Arguments& a) {
  const int64_t window = a.number("window");
  return window == -1 ? kFarthest : smaller(window, kFarthest);
}

inline Writer writer_of(const Arguments& a, const Output& output) {
  return {output.vectors, a.shape.seqlen_q, a.shape.seqlen_k};
}

/// Writes all columns, each by itself.
template <typename Run, typename Columns>
void write_columns(Run& run, const Arguments& a, const Output& output, const Columns& columns) {
  run.each(a.shape.seqlen_k, WriteColumns<Columns>{columns, writer_of(a, output)});
}

/// The usual family: Own has `kFamily` and columns(run, arguments), which is a function of a lead and a key column.
template <typename Own>
struct OfColumns {
  /// Sets the mask's lengths from the parameters, and refuses parameters that do not go together.
  static void measure(Arguments& a) { a.shape.seqlen_q = a.shape.seqlen_k = a.seqlen; }
  /// Refuses contents in host memory that make no mask of the family; documents and blocks are checked.
  static void check(const Arguments&, const Leads&) {}
  /// True if write() begins with a step that clears the flag `unfit`.
  template <typename Run>
  static bool clears_flag(const Arguments&) {
    return false;
  }
  template <typename Run>
  static void write(Run& run, const Arguments& a, const Output& output) {
    write_columns(run, a, output, Own::columns(run, a));
  }
  /// After a build that raised `unfit`: throws naming the first mistake.
  template <typename Run>
  static void throw_first_misfit(Run&, const Arguments&) {}
};

}  // namespace flashmask::build
