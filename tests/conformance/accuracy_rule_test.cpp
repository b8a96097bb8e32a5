// SPDX-License-Identifier: Apache-2.0

// The accuracy rule for out in 16 bits (numerics/accuracy.h): a forward without any error but the two roundings of
// every tiled kernel obeys it, and one that rounds weights more coarsely does not.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "families/families.h"
#include "numerics/accuracy.h"
#include "support/extent.h"
#include "verify/check.h"
#include "verify/features.h"
#include "verify/oracle.h"
#include "verify/random_cases.h"

namespace flashmask::test {
namespace {

using numerics::HeadArray;
using verify::Case;

/// Rounds to the type's precision less `fewer` bits.
double rounded(DataType dtype, double value, int fewer = 0) {
  const double unit = std::ldexp(2 * numerics::rounding(dtype, value), fewer);
  return unit == 0 ? 0 : std::nearbyint(value / unit) * unit;
}

/// A forward in float64 that rounds exp(score - largest) to the type's precision less `fewer` bits, and out to the
/// type.
class IdealForward {
 public:
  IdealForward(const verify::Problem& problem, const verify::DenseMask& dense, int fewer)
      : problem_(problem), c_(problem.c), dense_(dense), fewer_(fewer) {}

  HeadArray run() {
    for (int64_t b = 0; b < c_.batch; ++b) {
      for (int64_t h = 0; h < c_.heads_q; ++h) run_head(b, h);
    }
    return std::move(out_);
  }

 private:
  void run_head(int64_t b, int64_t h) {
    const auto score = verify::plain_score(problem_, b, h);
    const int64_t kv = h / (c_.heads_q / c_.heads_kv);
    const double sink = sink_.heads > 0 ? sink_.head(0, h)[0] : -std::numeric_limits<double>::infinity();
    const uint8_t* visible = visible_matrix(c_, dense_, b, h);
    for (int64_t i = 0; i < c_.seqlen_q; ++i) {
      std::vector<std::pair<int64_t, double>> scores;  // each key that the row sees, and its score
      for (int64_t j = 0; j < c_.seqlen_k; ++j) {
        if (!visible[i * c_.seqlen_k + j]) continue;
        const double scaled = c_.scale() * product(row(q_, b, h, i), row(k_, b, kv, j));
        scores.emplace_back(j, score ? score(static_cast<float>(scaled), i, j).value : scaled);
      }
      if (!scores.empty()) write_row(b, h, kv, i, scores, sink);
    }
  }

  void write_row(int64_t b, int64_t h, int64_t kv, int64_t i, const std::vector<std::pair<int64_t, double>>& scores,
                 double sink) {
    const auto less = [](const auto& left, const auto& right) { return left.second < right.second; };
    const double largest = std::max_element(scores.begin(), scores.end(), less)->second;
    double sum = std::exp(sink - largest);
    std::vector<double> values(static_cast<std::size_t>(c_.head_dim_v));
    for (const auto& [j, value] : scores) {
      const double weight = std::exp(value - largest);
      sum += weight;
      if (!kept_.empty() &&
          !kept_[static_cast<std::size_t>(((b * c_.heads_q + h) * c_.seqlen_q + i) * c_.seqlen_k + j)])
        continue;
      const double factor = rounded(c_.dtype, weight, fewer_) * verify::dropout_scale(c_.features.dropout);
      const auto v = row(v_, b, kv, j);
      for (std::size_t d = 0; d < values.size(); ++d) values[d] += factor * v[d];
    }
    const auto to = out_.head(b, h).subspan(static_cast<std::size_t>(i) * values.size());
    for (std::size_t d = 0; d < values.size(); ++d)
      to[d] = c_.features.partial ? values[d] / sum : rounded(c_.dtype, values[d] / sum);
  }

  static std::span<const double> row(const HeadArray& array, int64_t b, int64_t h, int64_t at) {
    const auto columns = static_cast<std::size_t>(array.columns);
    return array.head(b, h).subspan(static_cast<std::size_t>(at) * columns, columns);
  }
  static double product(std::span<const double> left, std::span<const double> right) {
    double sum = 0;
    for (std::size_t d = 0; d < left.size(); ++d) sum += left[d] * right[d];
    return sum;
  }

  const verify::Problem& problem_;
  const Case& c_;
  const verify::DenseMask& dense_;
  const int fewer_;
  const HeadArray q_ = problem_.q.values(), k_ = problem_.k.values(), v_ = problem_.v.values(),
                  sink_ = problem_.sink() ? problem_.sink()->values() : HeadArray();
  const std::vector<uint8_t> kept_ = kept_matrix(problem_);
  HeadArray out_{c_.batch, c_.heads_q, c_.seqlen_q, c_.head_dim_v};
};

double largest_error(std::span<const double> got, std::span<const double> exact) {
  double largest = 0;
  for (std::size_t n = 0; n < got.size(); ++n) largest = std::max(largest, std::fabs(got[n] - exact[n]));
  return largest;
}

/// An out of IdealForward judged by the rule, and by the plain implementation's error in each head alone.
struct Judged {
  verify::Verdict verdict;
  double over_plain = 0;  ///< largest error over its limit
};

Judged judge(const Case& c, int fewer) {
  const verify::Problem problem(c);
  const verify::DenseMask dense = verify::dense_of(verify::make_mask(c));
  verify::Results got = run_oracle(problem, dense);
  const verify::Results oracle = got;
  got.forward_only = true;
  got.out = IdealForward(problem, dense, fewer).run();
  const verify::Plain plain = run_plain(problem, dense, got.out, oracle.out);
  Judged judged;
  check_accuracy(problem, dense, got, oracle, plain, judged.verdict);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads_q; ++h) {
      const auto exact = oracle.out.head(b, h);
      judged.over_plain =
          std::max(judged.over_plain, largest_error(got.out.head(b, h), exact) /
                                          numerics::plain_limit(largest_error(plain.results.out.head(b, h), exact)));
    }
  }
  return judged;
}

/// The cases in 16 bits among a number of random ones.
std::vector<Case> drawn_cases(int64_t draws) {
  std::vector<std::string> names{std::string(verify::kNoMask), std::string(verify::kRandomMatrix)};
  for (const Family& family : families()) names.emplace_back(family.name);
  std::vector<Case> cases;
  for (int64_t index = 0; index < draws; ++index) {
    Case c = verify::random_case(77, index, names);
    if (c.dtype != DataType::kFloat32) cases.push_back(std::move(c));
  }
  return cases;
}

TEST(AccuracyRule, TakesAnIdealForward) {
  const std::vector<Case> cases = drawn_cases(test_long() ? 5000 : 200);
  double worst = 0;
  for (const Case& c : cases) {
    const verify::Verdict verdict = judge(c, 0).verdict;
    EXPECT_TRUE(verdict.failures.empty()) << verdict.failures[0] << "\n  " << describe(c);
    worst = std::max(worst, verdict.figures.at("out"));
  }
  std::printf("an ideal forward of %zu calls: at most %.3f of what is allowed\n", cases.size(), worst);
}

/// Random calls that the plain implementation's error alone refuses.
TEST(AccuracyRule, TakesAnIdealForwardOfFewLargeNumbers) {
  for (const std::string_view line :
       {"family=dflash seed=12550543619238019563 batch=1 seqlen_q=35 seqlen_k=35 heads_q=21 heads_kv=3 head_dim=64 "
        "head_dim_v=40 dtype=float16 mask_heads=kv mask_batch=1 block_mask=shared layout=bhsd dout=normal dlse=yes "
        "plan=yes sink=own",
        "family=qk_sparse seed=13260491366728478331 batch=1 seqlen_q=449 seqlen_k=39 heads_q=7 heads_kv=1 head_dim=72 "
        "head_dim_v=72 dtype=float16 mask_heads=kv mask_batch=1 block_mask=none layout=bshd dout=expanded dlse=no "
        "plan=yes scale=0.0650992957533931 softcap=43.328762171502504"}) {
    const auto [verdict, over_plain] = judge(verify::parse_case(line), 0);
    EXPECT_TRUE(verdict.failures.empty()) << verdict.failures[0];
    EXPECT_GT(over_plain, 1);
    std::printf("an ideal forward: %.2f of what the plain implementation's error allows, %.2f of what is allowed\n",
                over_plain, verdict.figures.at("out"));
  }
}

TEST(AccuracyRule, RefusesWeightsOfFourBitsFewer) {
  const std::vector<Case> cases = drawn_cases(60);
  const auto refused =
      std::count_if(cases.begin(), cases.end(), [](const Case& c) { return !judge(c, 4).verdict.failures.empty(); });
  EXPECT_GE(refused, static_cast<int64_t>(cases.size()) * 8 / 10);
}

}  // namespace
}  // namespace flashmask::test
