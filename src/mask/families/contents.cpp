// SPDX-License-Identifier: Apache-2.0
#include "mask/families/contents.h"

#include <algorithm>

#include "common/message.h"
#include "mask/families/families.h"

namespace flashmask::build {
namespace {

/// The batch entry and head, as far as there are several.
std::string mask_at(const Leads& leads, const Lead& lead) {
  if (leads.heads > 1) return message(lead.batch, ", ", lead.head);
  return leads.batch > 1 ? message(lead.batch) : "";
}

/// Throws naming the first entry that is not ok(lead, n, value).
template <typename Ok>
void check_values(std::string_view name, const Integers& values, const Leads& leads, const std::string& rule, Ok&& ok) {
  each_lead(leads, [&](const Lead& lead) {
    for (int64_t n = 0; n < values.count; ++n) {
      const int64_t value = values(lead, n);
      if (!ok(lead, n, value)) throw_invalid(name, at(leads, lead, n), " is ", value, "; ", rule);
    }
  });
}

void check_lengths(const GivenSegments& given, const Leads& leads) {
  if (!given.values.data) return;  // all are 1
  check_values(given.name, given.values, leads, "a length must be at least 0",
               [](const Lead&, int64_t, int64_t length) { return length >= 0; });
}

void check_ascent(const GivenSegments& given, const Leads& leads) {
  check_values(
      given.name, given.values, leads, message(given.name, " must begin with 0 and ascend; lengths go in as seqlens"),
      [&](const Lead& lead, int64_t n, int64_t end) { return n == 0 ? end == 0 : end >= given.values(lead, n - 1); });
}

void check_ids(const GivenSegments& given, const Leads& leads) {
  each_lead(leads, [&](const Lead& lead) {
    SeenIds seen;
    each_run(given.values, lead, 0, [&](int64_t n, int64_t) {
      const int64_t id = given.values(lead, n);
      if (!seen.insert(id))
        throw_invalid("document id ", id, " comes back at ", given.name, at(leads, lead, n),
                      "; the tokens of a document must be contiguous");
    });
  });
}

/// End of the last segment of a lead, once the contents are checked.
int64_t total_of(const GivenSegments& given, const Lead& lead) {
  const Integers& values = given.values;
  if (given.form == SegmentForm::kCuSeqlens) return values(lead, values.count - 1);
  if (!values.data && values.count <= kMaxSeqlen) return values.count;  // all are 1
  int64_t total = 0;
  for (int64_t n = 0; n < values.count; ++n) {
    if (__builtin_add_overflow(total, values(lead, n), &total) || total > kMaxSeqlen)
      throw_invalid(given.name, " add up to more than ", kMaxSeqlen, " tokens");
  }
  return total;
}

[[noreturn]] void throw_no_seqlen(std::string_view name) {
  throw_invalid("seqlen is missing; ", name,
                " is on a device, where it is not read, so the length of the sequence must be given");
}

}  // namespace

/// "[n]", with the batch entry and head before it if there are several.
std::string at(const Leads& leads, const Lead& lead, int64_t n) {
  const std::string mask = mask_at(leads, lead);
  return mask.empty() ? message("[", n, "]") : message("[", mask, ", ", n, "]");
}

bool SeenIds::insert(int64_t id) {
  if (ascending_.empty() || id > ascending_.back()) {
    ascending_.push_back(id);
    return true;
  }
  return !std::binary_search(ascending_.begin(), ascending_.end(), id) && others_.insert(id).second;
}

void SeenIds::clear() {
  ascending_.clear();
  others_.clear();
}

void check_segments(const GivenSegments& given, int64_t seqlen, const Leads& leads) {
  switch (given.form) {
    case SegmentForm::kNone:
    case SegmentForm::kPositionIds:
      return;
    case SegmentForm::kDocIds:
      return check_ids(given, leads);
    case SegmentForm::kCuSeqlens:
      check_ascent(given, leads);
      break;
    case SegmentForm::kSeqlens:
      check_lengths(given, leads);
      break;
  }
  each_lead(leads, [&](const Lead& lead) {
    const int64_t total = total_of(given, lead);
    if (total <= seqlen) return;
    const std::string entry = mask_at(leads, lead);
    throw_invalid(given.form == SegmentForm::kSeqlens ? "the sum of " : "the end of ", given.name,
                  entry.empty() ? "" : "[" + entry + "]", " is ", total,
                  "; it must be at most the length of the sequence, ", seqlen);
  });
}

void check_single(std::string_view name, const Integers& values, const Leads& leads, int64_t most, const char* what) {
  each_lead(leads, [&](const Lead& lead) {
    const int64_t value = values(lead, 0);
    if (value >= 0 && value <= most) return;
    const std::string mask = mask_at(leads, lead);
    throw_invalid(name,
                  !values.data   ? ""
                  : mask.empty() ? "[0]"
                                 : "[" + mask + "]",
                  " is ", value, "; it must be between 0 and ", what, ", ", most);
  });
}

void expect_count(std::string_view name, const Integers& x, int64_t count, const char* what) {
  if (x.count != count)
    throw_invalid(name, " has ", x.count, " entries; it needs one for each of the ", count, " ", what);
}

std::vector<int64_t> document_ends(const GivenSegments& given, const Lead& lead) {
  std::vector<int64_t> ends;
  if (is_per_token(given.form)) {
    each_run(given.values, lead, step_of(given.form), [&ends](int64_t, int64_t end) { ends.push_back(end); });
  } else if (given.form == SegmentForm::kCuSeqlens) {
    for (int64_t n = 1; n < given.values.count; ++n) ends.push_back(given.values(lead, n));
  } else if (given.form == SegmentForm::kSeqlens) {
    for (int64_t n = 0, end = 0; n < given.values.count; ++n) ends.push_back(end += given.values(lead, n));
  }
  return ends;
}

void check_tokens(std::string_view name, int64_t tokens) {
  if (tokens > kMaxSeqlen) throw_invalid(name, " is ", tokens, "; a sequence has no more than ", kMaxSeqlen, " tokens");
}

int64_t tokens_of(const GivenSegments& given, std::optional<int64_t> seqlen, const Leads& leads, Device device) {
  if (is_per_token(given.form)) {
    check_tokens(given.name, given.values.count);
    if (seqlen && *seqlen != given.values.count)
      throw_invalid("seqlen is ", *seqlen, ", but ", given.name, " has ", given.values.count,
                    " tokens; leave seqlen out, or make them equal");
    return given.values.count;
  }
  if (given.form == SegmentForm::kCuSeqlens && given.values.count == 0)
    throw_invalid("cu_seqlens is empty; it must begin with 0, then give the end of each document");
  if (seqlen) return *seqlen;
  if (device.kind != Device::Kind::kCpu && given.values.data) throw_no_seqlen(given.name);
  int64_t most = 0;
  check_segments(given, kMaxSeqlen, leads);
  each_lead(leads, [&](const Lead& lead) { most = std::max(most, total_of(given, lead)); });
  return most;
}

int64_t largest(std::string_view name, const Integers& values, const Leads& leads, Device device) {
  if (device.kind != Device::Kind::kCpu) throw_no_seqlen(name);
  int64_t most = 0;
  each_lead(leads, [&](const Lead& lead) {
    for (int64_t n = 0; n < values.count; ++n) most = std::max(most, values(lead, n));
  });
  return std::min(most, kMaxSeqlen);  // a larger one is wrong, as the check of the contents says
}

void throw_misfit(const char* what, const Leads& leads, const Lead& lead, int64_t column, int64_t needs,
                  const char* advice) {
  const std::string mask = leads.count() == 1 ? "" : message("batch ", lead.batch, ", head ", lead.head, ", ");
  throw Error(ErrorCode::kUnrepresentable,
              message(what, " does not fit two row intervals per key column: ", mask, "column ", column, " needs ",
                      needs, "; ", advice),
              column);
}

void check_contents(const Arguments& a) {
  check_segments(a.documents, a.seqlen, a.leads());
  check_segments(a.blocks, a.seqlen, a.leads());
  with_family(*a.family, [&a](auto family) { family.check(a, a.leads()); });
}

}  // namespace flashmask::build
