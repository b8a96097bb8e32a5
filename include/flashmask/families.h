// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "flashmask/export.h"
#include "flashmask/mask.h"

namespace flashmask {

/// A parameter of a mask family, as text: an integer, or integers separated by commas.
struct FamilyParameter {
  std::string_view name;
  std::string_view help;  ///< what it is, and what it is when left out
};

/// A builder by name, for tools and bindings.
struct Family {
  std::string_view name;        ///< as in builders.h
  std::string_view definition;  ///< which (i, j) are visible
  std::span<const FamilyParameter> parameters;
};

using FamilyParameters = std::map<std::string, std::string, std::less<>>;

/// Every family, in the paper's order, ours after it.
FLASHMASK_API std::span<const Family> families();

/// Builds family `name` at `seqlen` rows and keys. What `parameters` leaves out is drawn from `seed`, so
/// that every family has a sensible sample at any length >= 0. Throws naming an unknown family or
/// parameter, a value that is not a number, or lengths that do not add up to `seqlen`.
FLASHMASK_API Mask make_family(std::string_view name, int64_t seqlen, const FamilyParameters& parameters = {},
                               uint64_t seed = 0);

}  // namespace flashmask
