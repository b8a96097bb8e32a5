// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads and checks what parameters in host memory hold.

#include <optional>
#include <string_view>
#include <utility>

#include "mask/families/arguments.h"

namespace flashmask::build {

inline constexpr std::pair<std::string_view, Form> kSegmentForms[] = {{"cu_seqlens", Form::kCuSeqlens},
                                                                      {"seqlens", Form::kSeqlens},
                                                                      {"doc_ids", Form::kDocIds},
                                                                      {"position_ids", Form::kPositionIds}};

/// Throws if it is more than a mask can have.
void check_tokens(std::string_view name, int64_t tokens);

/// The length of the sequence of these segments: `seqlen`, if it is given, otherwise as long as they are, which is
/// read. Throws if the two contradict each other, or if there is nothing to go by.
int64_t tokens_of(const GivenSegments& segments, std::optional<int64_t> seqlen, const Leads& leads, Device device);

/// The largest of all entries, from 0 to what a mask can have.
int64_t largest(std::string_view name, const Integers& values, const Leads& leads, Device device);

/// Throws naming the first of a prefix tree's nodes that do not come in depth-first order.
void check_tree(const Arguments& arguments);

/// Throws kUnrepresentable, naming the column, if the columns of hash_sparse or block_diffusion do not fit two
/// intervals.
[[noreturn]] void throw_misfit(const char* what, const Leads& leads, const Lead& lead, int64_t column, int64_t needs,
                               const char* advice);

}  // namespace flashmask::build
