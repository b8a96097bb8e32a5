// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "flashmask/mask.h"

// The families as the command and the tests name them: parameters are text, and what is left out is drawn.

namespace flashmask {

/// A parameter of a mask family, as text: an integer, or integers separated by commas.
struct FamilyParameter {
  std::string_view name;
  std::string_view help;  ///< its meaning, and its value when left out
};

/// A builder by name, from text parameters.
struct Family {
  std::string_view name;        ///< as in builders.h
  std::string_view definition;  ///< which (i, j) are visible
  std::span<const FamilyParameter> parameters;
};

using FamilyParameters = std::map<std::string, std::string, std::less<>>;

/// Every family, in the paper's order, ours after it.
std::span<const Family> families();

/// Builds family `name` at `seqlen` rows and keys. What `parameters` leaves out is drawn from `seed`, so
/// that every family has a sensible sample at any length >= 0. Throws naming an unknown family or
/// parameter, a value that is not a number, or lengths that do not add up to `seqlen`.
Mask make_family(std::string_view name, int64_t seqlen, const FamilyParameters& parameters = {}, uint64_t seed = 0);

/// Random parameters of a family at a length, all of them written out, so that another rule can be given them. What
/// makes the band is drawn from `common_seed`, so that masks with other `own_seed`s can be stacked. None if the family
/// draws its own.
FamilyParameters draw_family_parameters(std::string_view name, int64_t seqlen, uint64_t common_seed, uint64_t own_seed);

}  // namespace flashmask
