// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "flashmask/attention.h"

namespace flashmask {

// The table of features beyond the softmax of masked scores. Checks, names() and refusals follow from it; a new option
// is a member of Features and a row here.

/// A number of Features.
struct NumberOption {
  const char* name;                  ///< in errors, and of the field of fm_options
  const char* feature;               ///< in names()
  double (*value)(const Features&);  ///< 0: not asked for
  bool (*accepts)(double);           ///< other than 0
  const char* accepted;              ///< in words
};

/// A tensor [heads_q] of Features; undefined: not asked for.
struct TensorOption {
  const char* name;
  const TensorView& (*value)(const Features&);
  bool takes_own_type;  ///< q's dtype, beside float32
};

/// A flag of Features.
struct FlagOption {
  const char* name;
  bool (*value)(const Features&);
};

/// From a softcap whose inverse is an ordinary number in float32 up to where the error of a GPU's tanh, in units of the
/// softcap, is below 1e-4.
inline constexpr NumberOption kNumberOptions[] = {
    {"softcap", "softcap", [](const Features& f) { return f.softcap; }, [](double c) { return c >= 1e-18 && c <= 256; },
     "0 (none) or between 1e-18 and 256"},
    {"dropout_p", "dropout", [](const Features& f) { return f.dropout.p; }, [](double p) { return p >= 0 && p < 1; },
     "at least 0 and less than 1"},
};
inline constexpr TensorOption kTensorOptions[] = {
    {"sink", [](const Features& f) -> const TensorView& { return f.sink; }, true},
};
inline constexpr FlagOption kFlagOptions[] = {
    {"partial_out", [](const Features& f) { return f.partial_out; }},
};

/// Throws kInvalidArgument unless the option is accepted.
void check_number(const NumberOption& option, const Features& features);
/// The row of that name, which there is.
const NumberOption& option_of(std::string_view name);

}  // namespace flashmask
