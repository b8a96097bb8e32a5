// SPDX-License-Identifier: Apache-2.0
#include "verify/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>

#include "numerics/accuracy.h"

namespace flashmask::verify {
namespace {

using numerics::kFloat32Relative;
using numerics::kPlainFactor;
using numerics::kPlainFloor;

constexpr int64_t kFewRows = 8;  // fewer are no sample of a head's errors

double largest_magnitude(std::span<const double> values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::fabs(value));
  return largest;
}

double largest_row_norm(std::span<const double> values, int64_t columns) {
  double largest = 0;
  for (std::size_t row = 0; row < values.size(); row += static_cast<std::size_t>(columns)) {
    double sum = 0;
    for (const double value : values.subspan(row, static_cast<std::size_t>(columns))) sum += value * value;
    largest = std::max(largest, std::sqrt(sum));
  }
  return largest;
}

/// Number of rows that are not all zeros, as they see a key that dropout keeps.
int64_t count_nonzero_rows(std::span<const double> values, int64_t columns) {
  int64_t rows = 0;
  for (std::size_t row = 0; row < values.size(); row += static_cast<std::size_t>(columns)) {
    const auto numbers = values.subspan(row, static_cast<std::size_t>(columns));
    rows += std::any_of(numbers.begin(), numbers.end(), [](double value) { return value != 0; });
  }
  return rows;
}

struct Error {
  double value = 0;
  std::size_t at = 0;
};

Error largest_error(std::span<const double> got, std::span<const double> want) {
  Error error;
  for (std::size_t at = 0; at < got.size(); ++at) {
    const double difference = std::fabs(got[at] - want[at]);
    if (difference > error.value) error = {difference, at};
  }
  return error;
}

/// Limit of an error, and its reason in words.
struct Limit {
  double value = 0;
  std::string rule;
};

std::string place(std::string_view name, int64_t b, int64_t h) {
  return fmt::format("{}: batch entry {}, head {}", name, b, h);
}

/// Reports the first NaN of a result; false if there is one.
bool has_no_nan(std::string_view name, const HeadArray& got, Verdict& verdict) {
  const auto is_nan = [](double value) { return std::isnan(value); };
  const auto first = std::find_if(got.values.begin(), got.values.end(), is_nan);
  if (first == got.values.end()) return true;
  const int64_t at = first - got.values.begin(), head = at / got.head_size(), element = at % got.head_size();
  verdict.failures.push_back(fmt::format(
      "{}, row {}, column {}: NaN, the first of {}", place(name, head / got.heads, head % got.heads),
      element / got.columns, element % got.columns, std::count_if(got.values.begin(), got.values.end(), is_nan)));
  return false;
}

/// A value that a result must be near, and the limit of the error in each head.
struct Target {
  const HeadArray& want;
  std::function<Limit(int64_t b, int64_t h)> limit;
};

/// A head's largest error, its limit, and the one over the other.
struct Excess {
  double ratio = 0;
  Error error;
  Limit limit;
};

Excess excess_of(const HeadArray& got, const Target& target, int64_t b, int64_t h) {
  const Error error = largest_error(got.head(b, h), target.want.head(b, h));
  if (error.value == 0) return {};
  Limit limit = target.limit(b, h);
  const double ratio = limit.value > 0 ? error.value / limit.value : std::numeric_limits<double>::infinity();
  return {ratio, error, std::move(limit)};
}

/// Compares one result head by head with the targets; each head has to be near one of them. Reports the head that is
/// furthest over its limit, with the first target's figures.
void check_heads(std::string_view name, const HeadArray& got, std::span<const Target> targets, Verdict& verdict) {
  if (!has_no_nan(name, got, verdict)) return;
  double worst = 0;
  std::string failure;
  for (int64_t b = 0; b < got.batch; ++b) {
    for (int64_t h = 0; h < got.heads; ++h) {
      const Excess first = excess_of(got, targets[0], b, h);
      double ratio = first.ratio;
      for (const Target& other : targets.subspan(1)) ratio = std::min(ratio, excess_of(got, other, b, h).ratio);
      if (ratio <= worst) continue;
      worst = ratio;
      if (ratio <= 1) continue;
      const auto at = static_cast<int64_t>(first.error.at);
      failure = fmt::format("{}, row {}, column {}: got {}, oracle {}; the error {:.3g} is over {:.3g} ({})",
                            place(name, b, h), at / got.columns, at % got.columns, got.head(b, h)[first.error.at],
                            targets[0].want.head(b, h)[first.error.at], first.error.value, first.limit.value,
                            first.limit.rule);
    }
  }
  verdict.figures[std::string(name)] = worst;
  if (!failure.empty()) verdict.failures.push_back(std::move(failure));
}

void check_heads(std::string_view name, const HeadArray& got, const Target& target, Verdict& verdict) {
  check_heads(name, got, std::span(&target, 1), verdict);
}

class AccuracyCheck {
 public:
  AccuracyCheck(const Problem& problem, const DenseMask& dense, const Results& got, const Results& oracle,
                const Plain& plain, Verdict& verdict)
      : problem_(problem),
        c_(problem.c),
        got_(got),
        oracle_(oracle),
        plain_(plain),
        verdict_(verdict),
        sight_(c_, dense) {}

  void run() {
    check_output();
    check_lse();
    check_zeros("out", got_.out, sight_.row_keys, "row");
    if (!got_.forward_only) check_gradients();
  }

 private:
  void check_gradients() {
    check_gradient("dq", true, got_.dq, oracle_.dq, plain_.results.dq, plain_.inherited_dq, plain_.dq_for_given_out);
    check_gradient("dk", false, got_.dk, oracle_.dk, plain_.results.dk, plain_.inherited_dk, plain_.dk_for_given_out);
    check_value("dv", got_.dv, oracle_.dv, plain_.results.dv);
    check_zeros("dq", got_.dq, sight_.row_keys, "row");
    check_zeros("dk", got_.dk, sight_.key_rows, "key");
    check_zeros("dv", got_.dv, sight_.key_rows, "key");
    if (problem_.sink()) check_dsink();
  }

  /// dsink is the sum of a term for each row, -exp(sink - lse) (dout . out - dlse). In float32 it may be off from the
  /// oracle's by 1e-5 of such a sum's usual size: that of terms of these magnitudes with random signs. A 16-bit type's
  /// out has been rounded before the backward gets it; dsink must then be as near to the one that follows from the
  /// given out and lse. Both limits grow by the rounding to the sink's dtype.
  void check_dsink() {
    HeadArray usual = got_.dsink, want = got_.dsink;
    const HeadArray sink = problem_.sink()->values(),
                    dlse = problem_.dlse ? problem_.dlse->values() : HeadArray(c_.batch, c_.heads_q, c_.seqlen_q, 1);
    for (int64_t h = 0; h < c_.heads_q; ++h) {
      double sum = 0, squares = 0;
      for (int64_t b = 0; b < c_.batch; ++b) {
        for (int64_t i = 0; i < c_.seqlen_q; ++i) {
          const auto at = static_cast<std::size_t>(i);
          const auto row = [&](const HeadArray& array) {
            return array.head(b, h).subspan(at * static_cast<std::size_t>(c_.head_dim_v),
                                            static_cast<std::size_t>(c_.head_dim_v));
          };
          const double p = std::exp(sink.head(0, h)[0] - got_.lse.head(b, h)[at]), of_lse = dlse.head(b, h)[at];
          const auto out = row(got_.out), dout = row(dout_);
          sum -= p * (std::inner_product(out.begin(), out.end(), dout.begin(), 0.0) - of_lse);
          const double size = largest_row_norm(out, c_.head_dim_v) * largest_row_norm(dout, c_.head_dim_v) /
                                  std::sqrt(static_cast<double>(c_.head_dim_v)) +
                              std::fabs(of_lse);
          squares += p * size * p * size;
        }
      }
      usual.head(0, h)[0] = std::sqrt(squares);
      want.head(0, h)[0] = is_float32() ? oracle_.dsink.head(0, h)[0] : sum;
    }
    const auto limit = [&](int64_t, int64_t h) {
      const double value = want.head(0, h)[0],
                   rounding = std::max(numerics::half_unit(c_.sink_dtype()) * std::fabs(value),
                                       numerics::rounding(c_.sink_dtype(), value));
      return Limit{numerics::float32_limit(usual.head(0, h)[0]) + rounding,
                   fmt::format("{} x the usual size of such a sum, {:.3g}, and rounding", kFloat32Relative,
                               usual.head(0, h)[0])};
    };
    check_heads("dsink", got_.dsink, {want, limit}, verdict_);
  }

  bool is_float32() const { return c_.dtype == DataType::kFloat32; }

  void check_output() {
    const auto limit = [&](int64_t b, int64_t h) {
      if (is_float32()) return largest_limit(oracle_.out, b, h);
      const Limit of_plain = output_limit(oracle_.out, plain_.results.out, b, h);
      return c_.features.partial ? of_plain : at_least_rounding(of_plain, oracle_.out.head(b, h));
    };
    check_heads("out", got_.out, {oracle_.out, limit}, verdict_);
  }

  /// dv.
  void check_value(std::string_view name, const HeadArray& got, const HeadArray& oracle, const HeadArray& plain) {
    const auto limit = [&](int64_t b, int64_t h) {
      return is_float32() ? largest_limit(oracle, b, h) : gradient_limit(oracle, plain);
    };
    check_heads(name, got, {oracle, limit}, verdict_);
  }

  /// dq (`of_queries`) and dk.
  void check_gradient(std::string_view name, bool of_queries, const HeadArray& got, const HeadArray& oracle,
                      const HeadArray& plain, const HeadArray& inherited, const HeadArray& plain_for_given_out) {
    const auto or_cancellation = [&](const Limit& ordinary, int64_t b, int64_t h) {
      const Limit cancelled = cancellation_limit(of_queries, oracle, b, h);
      return cancelled.value > ordinary.value ? cancelled : ordinary;
    };
    if (is_float32()) {
      const auto limit = [&](int64_t b, int64_t h) { return or_cancellation(largest_limit(oracle, b, h), b, h); };
      return check_heads(name, got, {oracle, limit}, verdict_);
    }
    HeadArray exact_for_given_out = oracle;
    for (std::size_t n = 0; n < inherited.values.size(); ++n) exact_for_given_out.values[n] += inherited.values[n];
    const Limit of_oracle = gradient_limit(oracle, plain),
                of_given_out = gradient_limit(exact_for_given_out, plain_for_given_out);
    const Target targets[] = {
        {oracle, [&](int64_t, int64_t) { return of_oracle; }},
        {exact_for_given_out, [&](int64_t b, int64_t h) { return or_cancellation(of_given_out, b, h); }}};
    check_heads(name, got, targets, verdict_);
  }

  /// The limit of `out`. In a head of a few rows, not counting those of zeros, the plain implementation's error is a
  /// matter of luck (one row at head_dim 64 is 64 numbers that share their probabilities), so there the heads of the
  /// call are taken together.
  static Limit output_limit(const HeadArray& oracle, const HeadArray& plain, int64_t b, int64_t h) {
    return count_nonzero_rows(oracle.head(b, h), oracle.columns) < kFewRows ? call_limit(oracle, plain)
                                                                            : plain_limit(oracle, plain, b, h);
  }

  /// Limit by the plain implementation's error in all heads of the call.
  static Limit call_limit(const HeadArray& oracle, const HeadArray& plain) {
    const double error = largest_error(plain.values, oracle.values).value;
    return {numerics::plain_limit(error),
            fmt::format("{} x the plain implementation's {:.3g} in all heads + {}", kPlainFactor, error, kPlainFloor)};
  }

  Limit gradient_limit(const HeadArray& oracle, const HeadArray& plain) const {
    return at_least_rounding(call_limit(oracle, plain), oracle.values);
  }

  /// Raises a limit to the rounding's of the largest value: where few are large, the plain implementation's rounding of
  /// that one, which may be none, is no measure of rounding.
  Limit at_least_rounding(const Limit& of_plain, std::span<const double> oracle) const {
    const double rounding = numerics::rounding(c_.dtype, largest_magnitude(oracle)),
                 of_rounding = numerics::plain_limit(rounding);
    if (of_plain.value >= of_rounding) return of_plain;
    return {of_rounding, fmt::format("{} x half a unit in the last place of the largest, {:.3g}, + {}", kPlainFactor,
                                     rounding, kPlainFloor)};
  }

  /// Limit by the plain implementation's error in this head.
  static Limit plain_limit(const HeadArray& oracle, const HeadArray& plain, int64_t b, int64_t h) {
    const double error = largest_error(plain.head(b, h), oracle.head(b, h)).value;
    return {numerics::plain_limit(error),
            fmt::format("{} x the plain implementation's {:.3g} + {}", kPlainFactor, error, kPlainFloor)};
  }

  static Limit largest_limit(const HeadArray& oracle, int64_t b, int64_t h) {
    const double largest = largest_magnitude(oracle.head(b, h));
    return {numerics::float32_limit(largest),
            fmt::format("{} x the oracle's largest, {:.3g}", kFloat32Relative, largest)};
  }

  /// dS = P (dP - mean of dP + dlse) of a row cancels to nearly nothing where one key has nearly all of P and
  /// dlse is small: rows that see one key, saturated ones. If that is so for all rows of a head, the largest
  /// value of dq or dk is no measure of their error; the limit is the rounding of the terms, half a unit in
  /// the last place of products of the vectors' norms. A head is such if the oracle's gradient is far below
  /// these products. 0 for all other heads.
  Limit cancellation_limit(bool of_queries, const HeadArray& oracle, int64_t b, int64_t h) const {
    const int64_t group = c_.heads_q / c_.heads_kv, kv = of_queries ? h / group : h;
    const int64_t first = of_queries ? h : h * group, last = of_queries ? h + 1 : (h + 1) * group;
    double dout_norm = 0, q_largest = 0;
    int32_t keys = 1;  // most keys that a row sees
    for (int64_t head = first; head < last; ++head) {
      keys = std::max(keys, largest_count(sight_.row_keys, b * c_.heads_q + head, c_.seqlen_q));
      dout_norm = std::max(dout_norm, largest_row_norm(dout_.head(b, head), c_.head_dim_v));
      q_largest = std::max(q_largest, largest_magnitude(q_.head(b, head)));
    }
    const int32_t rows = largest_count(sight_.key_rows, b * c_.heads_kv + kv, c_.seqlen_k);
    const double factor =
        of_queries ? largest_magnitude(k_.head(b, kv)) : q_largest * std::sqrt(static_cast<double>(std::max(rows, 1)));
    const double terms = std::fabs(c_.scale()) * dropout_scale(c_.features.dropout) * dout_norm *
                         largest_row_norm(v_.head(b, kv), c_.head_dim_v) * factor;
    const double usual = terms / std::sqrt(static_cast<double>(c_.head_dim_v * keys));
    constexpr double kFarBelow = 0.05, kHalfUnit = 0x1p-24;
    if (largest_magnitude(oracle.head(b, h)) > kFarBelow * usual) return {};
    return {kHalfUnit * terms, "rounding of terms that cancel"};
  }

  static int32_t largest_count(const std::vector<int32_t>& counts, int64_t head, int64_t length) {
    const auto begin = counts.begin() + head * length;
    return length > 0 ? *std::max_element(begin, begin + length) : 0;
  }

  void check_lse() {
    if (!has_no_nan("lse", got_.lse, verdict_)) return;
    double worst = 0;
    std::string failure;
    for (std::size_t at = 0; at < got_.lse.values.size(); ++at) {
      const double got = got_.lse.values[at], want = oracle_.lse.values[at];
      if (got == want) continue;  // both -inf, among others
      const double limit = numerics::lse_limit(c_.dtype) * numerics::lse_unit(want);
      const double ratio = std::isinf(want) ? std::numeric_limits<double>::infinity() : std::fabs(got - want) / limit;
      if (ratio <= worst) continue;
      worst = ratio;
      if (ratio <= 1) continue;
      const auto head = static_cast<int64_t>(at) / got_.lse.rows;
      failure =
          fmt::format("{}, row {}: got {}, oracle {}; the error may be {:.0e} x max(1, |lse|), and -inf must be -inf",
                      place("lse", head / c_.heads_q, head % c_.heads_q), static_cast<int64_t>(at) % got_.lse.rows, got,
                      want, numerics::lse_limit(c_.dtype));
    }
    verdict_.figures["lse"] = worst;
    if (!failure.empty()) verdict_.failures.push_back(std::move(failure));
  }

  /// Requires exact zeros in rows of `got` that see nothing (or that nothing sees).
  void check_zeros(std::string_view name, const HeadArray& got, const std::vector<int32_t>& counts,
                   std::string_view what) {
    for (std::size_t row = 0; row < counts.size(); ++row) {
      if (counts[row] > 0) continue;
      const auto begin = got.values.begin() + static_cast<int64_t>(row) * got.columns;
      if (std::all_of(begin, begin + got.columns, [](double value) { return value == 0; })) continue;
      const auto head = static_cast<int64_t>(row) / got.rows;
      verdict_.failures.push_back(fmt::format("{}, {} {}: sees nothing, but is not exactly 0",
                                              place(name, head / got.heads, head % got.heads), what,
                                              static_cast<int64_t>(row) % got.rows));
      return;
    }
  }

  const Problem& problem_;
  const Case& c_;
  const Results &got_, &oracle_;
  const Plain& plain_;
  Verdict& verdict_;
  const Sight sight_;
  const HeadArray q_ = problem_.q.values(), k_ = problem_.k.values(), v_ = problem_.v.values(),
                  dout_ = problem_.dout.values();
};

void check_same(std::string_view name, const HeadArray& masked, const HeadArray& other, std::string_view other_name,
                Verdict& verdict) {
  for (std::size_t n = 0; n < masked.values.size(); ++n) {
    if (masked.values[n] == other.values[n]) continue;
    const auto at = static_cast<int64_t>(n);
    const int64_t head = at / masked.head_size(), element = at % masked.head_size();
    verdict.failures.push_back(
        fmt::format("{}, row {}, column {}: {} with the mask, {} {}; they must have the same bits",
                    place(name, head / masked.heads, head % masked.heads), element / masked.columns,
                    element % masked.columns, masked.values[n], other.values[n], other_name));
    return;
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Live tiles of one matrix [seqlen_q, seqlen_k].
int64_t count_live_tiles(const Case& c, const uint8_t* visible, TileShape tile) {
  int64_t live = 0;
  std::vector<uint8_t> seen(static_cast<std::size_t>(ceil_div(c.seqlen_k, tile.keys)));
  for (int64_t i = 0; i < c.seqlen_q; ++i) {
    for (int64_t j = 0; j < c.seqlen_k; ++j)
      seen[static_cast<std::size_t>(j / tile.keys)] |= visible[i * c.seqlen_k + j];
    const bool last_of_tile = (i + 1) % tile.rows == 0 || i + 1 == c.seqlen_q;
    if (!last_of_tile) continue;
    live += std::count_if(seen.begin(), seen.end(), [](uint8_t any) { return any != 0; });
    std::fill(seen.begin(), seen.end(), uint8_t{0});
  }
  return live;
}

}  // namespace

Sight::Sight(const Case& c, const DenseMask& dense)
    : row_keys(static_cast<std::size_t>(c.batch * c.heads_q * c.seqlen_q)),
      key_rows(static_cast<std::size_t>(c.batch * c.heads_kv * c.seqlen_k)) {
  const int64_t group = c.heads_q / c.heads_kv;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads_q; ++h) {
      const uint8_t* visible = visible_matrix(c, dense, b, h);
      int32_t* keys = row_keys.data() + (b * c.heads_q + h) * c.seqlen_q;
      int32_t* rows = key_rows.data() + (b * c.heads_kv + h / group) * c.seqlen_k;
      for (int64_t i = 0; i < c.seqlen_q; ++i) {
        for (int64_t j = 0; j < c.seqlen_k; ++j) {
          const int32_t sees = visible[i * c.seqlen_k + j] != 0;
          keys[i] += sees;
          rows[j] += sees;
        }
      }
    }
  }
}

Results results_of(const Outputs& outputs, const Case& c) {
  Results results(c.sizes());
  results.out = outputs.out.values();
  results.lse = outputs.lse.values();
  results.dq = outputs.dq.values();
  results.dk = outputs.dk.values();
  results.dv = outputs.dv.values();
  if (outputs.dsink) results.dsink = outputs.dsink->values();
  return results;
}

void check_accuracy(const Problem& problem, const DenseMask& dense, const Results& got, const Results& oracle,
                    const Plain& plain, Verdict& verdict) {
  AccuracyCheck(problem, dense, got, oracle, plain, verdict).run();
}

void check_identical(const Results& masked, const Results& other, std::string_view other_name, Verdict& verdict) {
  check_same("out", masked.out, other.out, other_name, verdict);
  check_same("lse", masked.lse, other.lse, other_name, verdict);
  if (masked.forward_only || other.forward_only) return;
  check_same("dq", masked.dq, other.dq, other_name, verdict);
  check_same("dk", masked.dk, other.dk, other_name, verdict);
  check_same("dv", masked.dv, other.dv, other_name, verdict);
  check_same("dsink", masked.dsink, other.dsink, other_name, verdict);
}

void check_gaps(const Outputs& outputs, std::string_view which_run, Verdict& verdict) {
  for (const auto& [name, tensor] : {std::pair<std::string_view, const Tensor*>{"out", &outputs.out},
                                     {"lse", &outputs.lse},
                                     {"dq", &outputs.dq},
                                     {"dk", &outputs.dk},
                                     {"dv", &outputs.dv},
                                     {"dsink", outputs.dsink ? &*outputs.dsink : nullptr}}) {
    if (tensor && !tensor->gaps_intact())
      verdict.failures.push_back(fmt::format("{}: the {} wrote outside of the tensor's elements", name, which_run));
  }
}

int64_t count_live_tiles(const Case& c, const DenseMask& dense, TileShape tile) {
  int64_t live = 0;
  for (int64_t m = 0; m < dense.batch * dense.heads; ++m)
    live += count_live_tiles(c, dense.visible.data() + m * c.seqlen_q * c.seqlen_k, tile);
  // Every matrix serves the same number of (batch entry, query head) pairs.
  return live * (c.batch / dense.batch) * (c.heads_q / dense.heads);
}

}  // namespace flashmask::verify
