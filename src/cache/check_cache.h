// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks that calls over a cache and appending to it share. Problems are filled in from the top: device, dtype, batch,
// heads_q and head_dim first.

#include <cstdint>
#include <initializer_list>

#include "call/cached_problem.h"
#include "common/message.h"

namespace flashmask {

bool has_shape(const TensorView& t, std::initializer_list<int64_t> shape);

/// Throws unless the tensor can be read on the call's device.
void check_readable(const CachedProblem& p, const char* argument, const TensorView& t, bool with_data);

/// Throws unless an int32 tensor is what `accepts` says, in words `accepted`, and can be read. The words are put
/// together only for the error: that takes longer than the check.
template <typename... Parts>
void check_int32(const CachedProblem& p, const char* argument, const TensorView& t, bool with_data, bool accepts,
                 const Parts&... accepted) {
  if (!accepts || t.dtype != DataType::kInt32)
    throw_invalid(argument, " is ", describe(t), "; it must be int32 ", accepted...);
  check_readable(p, argument, t, with_data);
}

void check_cu_seqlens(const CachedProblem& p, const char* argument, bool with_data);

/// Checks a call and takes it apart. `with_data`: also that pointers are there (not for workspace queries).
CachedProblem check_cached(const CachedForwardArgs& args, const Options& options, bool with_data);
AppendProblem check_append(const AppendArgs& args, const Options& options);

/// Checks cache, tables, scales, band and bounds, and reads their sizes.
void read_sequences(CachedProblem& p, bool with_data);

}  // namespace flashmask
