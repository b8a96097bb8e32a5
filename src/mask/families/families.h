// SPDX-License-Identifier: Apache-2.0
#pragma once

// All families; each is described where it is defined, and everything else asks for it here.

#include "mask/families/bands.h"
#include "mask/families/documents.h"
#include "mask/families/models.h"
#include "mask/families/padding.h"
#include "mask/families/sequences.h"
#include "mask/families/sparse.h"
#include "mask/families/trees.h"

namespace flashmask::build {

template <typename... Lists>
struct Joined;
template <typename... Own>
struct Joined<FamilyList<Own...>> {
  using Type = FamilyList<Own...>;
};
template <typename... First, typename... Second, typename... Rest>
struct Joined<FamilyList<First...>, FamilyList<Second...>, Rest...> : Joined<FamilyList<First..., Second...>, Rest...> {
};

using Families = Joined<Bands, OfDocuments, OfSequences, OfTrees, OfBatches, OfModels, Sparse>::Type;

/// f(Own{}) for each family.
template <typename F, typename... Own>
void each_family(const F& f, FamilyList<Own...>) {
  (f(Own{}), ...);
}

/// f(Own{}) for the type of a family.
template <typename F>
void with_family(const Family& family, const F& f) {
  each_family(
      [&](auto own) {
        if (&decltype(own)::kFamily == &family) f(own);
      },
      Families{});
}

/// All of a mask of the arguments.
template <typename Run>
void build(Run& run, const Arguments& a, const Output& output) {
  with_family(*a.family, [&](auto own) {
    if (a.unfit && !own.template clears_flag<Run>(a)) run.each(1, ClearFlag{a.unfit});
    own.write(run, a, output);
  });
}

}  // namespace flashmask::build
