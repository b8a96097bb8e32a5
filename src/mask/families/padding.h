// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks of a batch.

#include "mask/families/contents.h"
#include "mask/families/steps.h"

namespace flashmask::build {

struct Padding : OfColumns<Padding> {
  static constexpr Declared kParameters[] = {{"seqlen_q", Kind::kLength, "query rows"},
                                             {"seqlen_k", Kind::kLength, "keys"},
                                             {"key_lengths", Kind::kSingle, "visible keys"},
                                             {.name = "query_lengths",
                                              .kind = Kind::kSingle,
                                              .doc = "rows that see anything; all if left out",
                                              .is_optional = true}};
  static constexpr Family kFamily{"padding", kParameters, {kLts}};

  static void measure(Arguments& a) {
    a.shape.seqlen_q = a.number("seqlen_q");
    a.shape.seqlen_k = a.number("seqlen_k");
    if (!a["query_lengths"].is_given) a["query_lengths"].vector.constant = a.shape.seqlen_q;
  }
  static void check(const Arguments& a, const Leads& leads) {
    check_single("key_lengths", a.vector("key_lengths"), leads, a.shape.seqlen_k, "seqlen_k");
    check_single("query_lengths", a.vector("query_lengths"), leads, a.shape.seqlen_q, "seqlen_q");
  }

  struct Columns {
    Integers key_lengths, query_lengths;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      return {.lts = j < key_lengths(lead, 0) ? query_lengths(lead, 0) : 0};
    }
  };
  template <typename Run>
  static Columns columns(Run&, const Arguments& a) {
    return {a.vector("key_lengths"), a.vector("query_lengths")};
  }
};

using OfBatches = FamilyList<Padding>;

}  // namespace flashmask::build
