// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks that are only a band.

#include "common/message.h"
#include "mask/families/steps.h"
#include "mask/mask_tensors.h"

namespace flashmask::build {

template <typename Own>
struct OfBand : OfColumns<Own> {
  static void measure(Arguments& a) {
    a.shape.seqlen_q = a.number("seqlen_q");
    a.shape.seqlen_k = a.optional_number("seqlen_k").value_or(a.shape.seqlen_q);
  }
  template <typename Run>
  static void write(Run&, const Arguments&, const Output&) {}
};

inline constexpr Declared kSeqlenQ{"seqlen_q", Kind::kLength, "query rows"};
inline constexpr Declared kSeqlenK{
    .name = "seqlen_k", .kind = Kind::kLength, .doc = "keys; seqlen_q if left out", .is_optional = true};
inline constexpr Declared kQOffset{.name = "q_offset",
                                   .kind = Kind::kNumber,
                                   .doc = "row i stands at key position i + q_offset; seqlen_k - seqlen_q if left out",
                                   .is_optional = true};

struct Full : OfBand<Full> {
  static constexpr Declared kParameters[] = {kSeqlenQ, kSeqlenK};
  static constexpr Family kFamily{"full", kParameters, {}};
};

template <typename Own>
struct OfBandWithOffset : OfBand<Own> {
  static void measure(Arguments& a) {
    OfBand<Own>::measure(a);
    a.shape.q_offset = a.optional_number("q_offset");
    if (a.shape.q_offset) check_offset(*a.shape.q_offset);
  }
};

struct Causal : OfBandWithOffset<Causal> {
  static constexpr Declared kParameters[] = {kSeqlenQ, kSeqlenK, kQOffset};
  static constexpr Family kFamily{"causal", kParameters, {0, Edges::kCausal}};
};

struct SlidingWindow : OfBandWithOffset<SlidingWindow> {
  static constexpr Declared kParameters[] = {
      kSeqlenQ,
      kSeqlenK,
      kQOffset,
      {"left", Kind::kNumber, "keys before the row's own, -1 all"},
      {.name = "right", .kind = Kind::kNumber, .doc = "keys after it, -1 all", .otherwise = 0}};
  static constexpr Family kFamily{"sliding_window", kParameters, {0, Edges::kGiven}};
};

using Bands = FamilyList<Full, Causal, SlidingWindow>;

}  // namespace flashmask::build
