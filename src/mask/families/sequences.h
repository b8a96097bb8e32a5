// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks of one sequence.

#include "common/message.h"
#include "mask/families/contents.h"
#include "mask/families/hash_sparse.h"
#include "mask/families/steps.h"

namespace flashmask::build {

struct GlobalSlidingWindow : OfColumns<GlobalSlidingWindow> {
  static constexpr Declared kParameters[] = {
      kSeqlen,
      {"global_tokens", Kind::kNumber, "first tokens, which see and are seen by all", 0},
      {"window", Kind::kNumber, "reach to either side", 0}};
  static constexpr Family kFamily{"global_sliding_window", kParameters, {kLts | kUts | kUte}};

  struct Columns {
    int64_t seqlen, global_tokens, window;
    FLASHMASK_COLUMN Column operator()(const Lead&, int64_t j) const {
      const int64_t global = smaller(global_tokens, seqlen), reach = smaller(window, seqlen);
      if (j < global) return {.uts = global, .ute = global};
      return {.lts = j + reach + 1, .uts = global, .ute = larger(j - reach, global)};
    }
  };
  template <typename Run>
  static Columns columns(Run&, const Arguments& a) {
    return {a.shape.seqlen_k, a.number("global_tokens"), a.number("window")};
  }
};

struct PrefixLmCausal : OfColumns<PrefixLmCausal> {
  static constexpr Declared kParameters[] = {kSeqlen, {"prefix", Kind::kSingle, "keys that every row sees"}};
  static constexpr Family kFamily{"prefix_lm_causal", kParameters, {kUte}};

  static void check(const Arguments& a, const Leads& leads) {
    check_single("prefix", a.vector("prefix"), leads, a.seqlen, "seqlen");
  }

  struct Columns {
    Integers prefix;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      return {.ute = j < prefix(lead, 0) ? 0 : j};
    }
  };
  template <typename Run>
  static Columns columns(Run&, const Arguments& a) {
    return {a.vector("prefix")};
  }
};

struct QkSparse : OfColumns<QkSparse> {
  static constexpr Declared kParameters[] = {kSeqlen, {"dropped", Kind::kPairs, "begin and end of each dropped span"}};
  static constexpr Family kFamily{"qk_sparse", kParameters, {kLts | kLte, Edges::kCausal}};

  static void check(const Arguments& a, const Leads& leads) {
    const Integers &begins = a["dropped"].vector, &ends = a["dropped"].ends;
    each_lead(leads, [&](const Lead& lead) {
      int64_t reached = 0;
      for (int64_t n = 0; n < begins.count; ++n) {
        const int64_t begin = begins(lead, n), end = ends(lead, n);
        if (begin < reached || end < begin || end > a.seqlen)
          throw_invalid("dropped", at(leads, lead, n), " is [", begin, ", ", end,
                        "); spans must be ascending, disjoint and within [0, ", a.seqlen, ")");
        reached = end;
      }
    });
  }

  struct Columns {
    Integers begin, end;  ///< the dropped spans
    Search search;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      const int64_t spans = search(begin, lead, begin.count, j);  // spans that begin at or before the key
      const int64_t until = spans > 0 ? end(lead, spans - 1) : 0;
      return j < until ? Column{.lts = j, .lte = until} : Column{};
    }
  };
  template <typename Run>
  static Columns columns(Run&, const Arguments& a) {
    const Value& dropped = a["dropped"];
    return {dropped.vector, dropped.ends, {}};
  }
};

struct Eviction : OfColumns<Eviction> {
  static constexpr Declared kParameters[] = {
      {"evicted_at", Kind::kTokens, "of each key, the first row that no longer sees it"}};
  static constexpr Family kFamily{"eviction", kParameters, {kLts, Edges::kCausal}};

  struct Columns {
    Integers evicted_at;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const { return {.lts = evicted_at(lead, j)}; }
  };
  template <typename Run>
  static Columns columns(Run&, const Arguments& a) {
    return {a.vector("evicted_at")};
  }
};

using OfSequences = FamilyList<GlobalSlidingWindow, PrefixLmCausal, QkSparse, Eviction, HashSparse>;

}  // namespace flashmask::build
