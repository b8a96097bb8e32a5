// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashmask/attention.h"
#include "numerics/plain.h"
#include "numerics/tensor.h"
#include "verify/text.h"

namespace flashmask::verify {

/// The dtype of the sinks, if there are any.
enum class SinkKind { kNone, kFloat32, kOwn };

/// ALiBi's slopes: none, a vector for all batch entries, or each entry's own.
enum class AlibiKind { kNone, kShared, kEach };

/// The mask's positions of rows and keys: none, shared by all batch entries, or each entry's own.
enum class Positions { kNone, kShared, kEach };

/// The rows and keys of the case are the whole that dropout numbers, or a part of it, for all batch entries or each
/// one's own; a part's query heads are not the first either.
enum class Part { kNone, kShared, kEach };

/// The features that a case asks for, as Features in attention.h and MaskParts have them.
struct CaseFeatures {
  SinkKind sink = SinkKind::kNone;
  double softcap = 0;
  double dropout = 0;
  AlibiKind alibi = AlibiKind::kNone;
  Positions positions = Positions::kNone;
  bool partial = false;    ///< partial_out
  int64_t split_size = 0;  ///< 0: none
  Part part = Part::kNone;
  bool operator==(const CaseFeatures&) const = default;

  /// True if scores are scaled products.
  bool scores_are_products() const { return softcap == 0 && alibi == AlibiKind::kNone; }
  /// A scaled product under the softcap, if there is one.
  template <typename T>
  T capped(T scaled) const {
    const auto cap = static_cast<T>(softcap);
    return cap == 0 ? scaled : cap * std::tanh(scaled / cap);
  }
};

struct Case;
struct Problem;
class Random;

/// A tensor of a case's features.
struct FeatureTensor {
  TensorView Features::* member;
  numerics::Tensor tensor;
};

/// A feature of cases: a row of case_features().
struct CaseFeature {
  std::string_view key;              ///< in a case's line
  std::string_view name;             ///< in names() and Explanation::features
  int (*kind)(const CaseFeatures&);  ///< which of its kinds is asked for; 0: it is not
  std::string (*write)(const CaseFeatures&);
  void (*read)(CaseFeatures&, std::string_view key, std::string_view value);
  int percent;                              ///< share of random cases that ask for it
  bool of_scores;                           ///< changes scores, and calls over caches take it, too
  void (*draw)(Random&, CaseFeatures&);     ///< asks for it
  bool (*fits)(const Case&) = nullptr;      ///< null: every case
  TensorView Features::* member = nullptr;  ///< its tensor, if it has one, and how that is drawn
  numerics::Tensor (*tensor)(const Case&, Random&) = nullptr;
};
/// In the order in which lines have them and random cases draw them.
std::span<const CaseFeature> case_features();
/// The rows that change scores.
std::span<const CaseFeature> score_features();

/// " key=value" of each feature that is asked for.
std::string describe(const CaseFeatures& features, std::span<const CaseFeature> rows);

/// The keys of a kind of case, with those of its features.
template <typename C>
Setters<C> with_features(Setters<C> table, std::span<const CaseFeature> rows) {
  for (const CaseFeature& row : rows) {
    table[row.key] = [&row](C& c, std::string_view key, std::string_view value) { row.read(c.features, key, value); };
  }
  return table;
}

/// The combinations that covering cases ask for, the first of them none.
const std::vector<CaseFeatures>& covering_combinations();

/// The numbers and flags of the features that a case asks for.
Features numbers(const CaseFeatures& features);

/// How scores are made of scaled products for a batch entry and query head, in float32; empty: they are products.
std::function<numerics::PlainScore(float scaled, int64_t row, int64_t key)> plain_score(const Problem& problem,
                                                                                        int64_t b, int64_t h);

/// Factor of kept weights under a dropout of this share.
double dropout_scale(double p);

/// Names of the features that a backend refuses, found out by asking it: no case is to ask for one of these.
std::vector<std::string> refused_features(const std::string& backend);

/// True if a case asks for one of the features in `names`.
bool asks_for_any(const CaseFeatures& features, const std::vector<std::string>& names);

}  // namespace flashmask::verify
