// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <charconv>
#include <string_view>
#include <vector>

#include "common/message.h"
#include "common/random.h"
#include "families/families.h"
#include "flashmask/builders.h"
#include "flashmask/model_masks.h"

namespace flashmask {

/// Reads a family's parameters and draws what is left out.
class Reader {
 public:
  Reader(std::string_view family, int64_t length, const FamilyParameters& parameters, uint64_t seed)
      : random(seed), seqlen(length), family_(family), parameters_(parameters) {}

  Random random;
  const int64_t seqlen;

  /// The integers of a parameter; empty if it is not given.
  std::vector<int64_t> integers(std::string_view name) const {
    std::vector<int64_t> values;
    const auto found = parameters_.find(name);
    if (found == parameters_.end()) return values;
    const char* at = found->second.data();
    const char* end = at + found->second.size();
    for (;;) {
      int64_t value = 0;
      const auto [next, error] = std::from_chars(at, end, value);
      if (error != std::errc() || (next != end && *next != ',')) {
        throw_invalid(family_, ": parameter ", name, " is '", found->second,
                      "'; it must be integers separated by commas");
      }
      values.push_back(value);
      if (next == end) return values;
      at = next + 1;
    }
  }

  int64_t integer(std::string_view name, int64_t otherwise) const {
    const std::vector<int64_t> values = integers(name);
    if (values.empty()) return otherwise;
    if (values.size() != 1) throw_invalid(family_, ": parameter ", name, " takes one integer, not ", values.size());
    return values[0];
  }

  /// `name` as lengths that add up to `total`, or 3 to 7 drawn ones (the paper's count at 8K).
  std::vector<int64_t> lengths(std::string_view name, int64_t total) {
    std::vector<int64_t> values = integers(name);
    if (values.empty()) return draw_lengths(total, random.integer(3, 7));
    int64_t sum = 0;
    for (const int64_t length : values) {
      if (length < 0)
        throw_invalid(family_, ": parameter ", name, " has the length ", length, "; it must be at least 0");
      if (__builtin_add_overflow(sum, length, &sum))
        throw_invalid(family_, ": parameter ", name, " adds up to more than 2^63; it must be ", total);
    }
    if (sum != total) throw_invalid(family_, ": parameter ", name, " adds up to ", sum, "; it must be ", total);
    return values;
  }

  /// `name` as lengths of documents that add up to `total`, or one document of all.
  Documents documents(std::string_view name, int64_t total) {
    return Documents::from_lengths(integers(name).empty() ? std::vector{total} : lengths(name, total));
  }

  /// An integer of at least 1.
  int64_t positive(std::string_view name, int64_t otherwise) const {
    const int64_t value = integer(name, otherwise);
    if (value < 1) throw_invalid(family_, ": parameter ", name, " is ", value, "; it must be at least 1");
    return value;
  }

  /// `name` as one length of all blocks, or as their lengths.
  Documents blocks(std::string_view name, const Documents& documents, int64_t otherwise) {
    const std::vector<int64_t> given = integers(name);
    const bool equal = given.empty() || (given.size() == 1 && given[0] != documents.total());
    return equal ? masks::equal_blocks(documents, integer(name, otherwise))
                 : Documents::from_lengths(lengths(name, documents.total()));
  }

  /// `name` as begin,end pairs; empty if it is not given.
  std::vector<Span> spans(std::string_view name) const {
    const std::vector<int64_t> bounds = integers(name);
    if (bounds.size() % 2 != 0) {
      throw_invalid(family_, ": parameter ", name, " has ", bounds.size(), " integers; it needs begin,end pairs");
    }
    std::vector<Span> pairs;
    for (std::size_t n = 0; n < bounds.size(); n += 2) pairs.push_back({bounds[n], bounds[n + 1]});
    return pairs;
  }

  /// `count` positive lengths (fewer if `total` is smaller) that add up to `total`.
  std::vector<int64_t> draw_lengths(int64_t total, int64_t count) {
    std::vector<int64_t> cuts{0, total};
    for (int64_t n = 1; n < std::min(count, total); ++n) cuts.push_back(random.integer(1, total - 1));
    std::sort(cuts.begin(), cuts.end());
    std::vector<int64_t> lengths;
    for (std::size_t n = 1; n < cuts.size(); ++n) {
      if (cuts[n] > cuts[n - 1]) lengths.push_back(cuts[n] - cuts[n - 1]);
    }
    return lengths;
  }

 private:
  std::string_view family_;
  const FamilyParameters& parameters_;
};

}  // namespace flashmask
