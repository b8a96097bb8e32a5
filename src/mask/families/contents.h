// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads and checks what parameters in host memory hold.

#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "mask/families/arguments.h"

namespace flashmask::build {

inline constexpr std::pair<std::string_view, SegmentForm> kSegmentForms[] = {
    {"cu_seqlens", SegmentForm::kCuSeqlens},
    {"seqlens", SegmentForm::kSeqlens},
    {"doc_ids", SegmentForm::kDocIds},
    {"position_ids", SegmentForm::kPositionIds}};

/// Throws if it is more than a mask can have.
void check_tokens(std::string_view name, int64_t tokens);

/// The length of the sequence of these segments: `seqlen`, if it is given, otherwise as long as they are, which is
/// read. Throws if the two contradict each other, or if there is nothing to go by.
int64_t tokens_of(const GivenSegments& segments, std::optional<int64_t> seqlen, const Leads& leads, Device device);

/// The largest of all entries, from 0 to what a mask can have.
int64_t largest(std::string_view name, const Integers& values, const Leads& leads, Device device);

/// Throws unless the segments lie within `seqlen` tokens, one after the other.
void check_segments(const GivenSegments& segments, int64_t seqlen, const Leads& leads);

/// Throws unless a number for each batch entry and head is between 0 and `most`, which `what` names.
void check_single(std::string_view name, const Integers& values, const Leads& leads, int64_t most, const char* what);

/// Throws unless there is an entry for each of so many.
void expect_count(std::string_view name, const Integers& values, int64_t count, const char* what);

/// Ends of the documents of a lead.
std::vector<int64_t> document_ends(const GivenSegments& documents, const Lead& lead);

/// "[n]", with the batch entry and head before it if there are several.
std::string at(const Leads& leads, const Lead& lead, int64_t n);

template <typename F>
void each_lead(const Leads& leads, F&& f) {
  for (int64_t n = 0; n < leads.count(); ++n) f(leads[n]);
}

/// Ids that were seen. They mostly ascend.
class SeenIds {
 public:
  /// Returns true if the id is new.
  bool insert(int64_t id);
  void clear();

 private:
  std::vector<int64_t> ascending_;
  std::unordered_set<int64_t> others_;
};

/// Throws kUnrepresentable, naming the column that does not fit two intervals.
[[noreturn]] void throw_misfit(const char* what, const Leads& leads, const Lead& lead, int64_t column, int64_t needs,
                               const char* advice);

}  // namespace flashmask::build
