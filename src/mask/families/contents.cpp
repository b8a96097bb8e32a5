// SPDX-License-Identifier: Apache-2.0
#include "mask/families/contents.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <vector>

#include "common/message.h"
#include "mask/families/build-inl.h"

namespace flashmask::build {
namespace {

/// The batch entry and head, as far as there are several.
std::string mask_at(const Leads& leads, const Lead& lead) {
  if (leads.heads > 1) return message(lead.batch, ", ", lead.head);
  return leads.batch > 1 ? message(lead.batch) : "";
}

/// "[n]", with the batch entry and head before it if there are several.
std::string at(const Leads& leads, const Lead& lead, int64_t n) {
  const std::string mask = mask_at(leads, lead);
  return mask.empty() ? message("[", n, "]") : message("[", mask, ", ", n, "]");
}

template <typename F>
void each_lead(const Leads& leads, F&& f) {
  for (int64_t n = 0; n < leads.count(); ++n) f(leads[n]);
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

/// Ids that were seen. They mostly ascend.
class SeenIds {
 public:
  /// Whether the id is new.
  bool insert(int64_t id) {
    if (ascending_.empty() || id > ascending_.back()) {
      ascending_.push_back(id);
      return true;
    }
    return !std::binary_search(ascending_.begin(), ascending_.end(), id) && others_.insert(id).second;
  }
  void clear() {
    ascending_.clear();
    others_.clear();
  }

 private:
  std::vector<int64_t> ascending_;
  std::unordered_set<int64_t> others_;
};

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

/// Where the last segment of each lead ends, the contents being checked.
int64_t total_of(const GivenSegments& given, const Lead& lead) {
  const Integers& values = given.values;
  if (given.form == Form::kCuSeqlens) return values(lead, values.count - 1);
  if (!values.data && values.count <= kMaxSeqlen) return values.count;  // all are 1
  int64_t total = 0;
  for (int64_t n = 0; n < values.count; ++n) {
    if (__builtin_add_overflow(total, values(lead, n), &total) || total > kMaxSeqlen)
      throw_invalid(given.name, " add up to more than ", kMaxSeqlen, " tokens");
  }
  return total;
}

void check_segments(const GivenSegments& given, int64_t seqlen, const Leads& leads) {
  switch (given.form) {
    case Form::kNone:
    case Form::kPositionIds:
      return;
    case Form::kDocIds:
      return check_ids(given, leads);
    case Form::kCuSeqlens:
      check_ascent(given, leads);
      break;
    case Form::kSeqlens:
      check_lengths(given, leads);
      break;
  }
  each_lead(leads, [&](const Lead& lead) {
    const int64_t total = total_of(given, lead);
    if (total <= seqlen) return;
    const std::string entry = mask_at(leads, lead);
    throw_invalid(given.form == Form::kSeqlens ? "the sum of " : "the end of ", given.name,
                  entry.empty() ? "" : "[" + entry + "]", " is ", total,
                  "; it must be at most the length of the sequence, ", seqlen);
  });
}

[[noreturn]] void throw_no_seqlen(std::string_view name) {
  throw_invalid("seqlen is missing; ", name,
                " is on a device, where it is not read, so the length of the sequence must be given");
}

/// The documents' lengths, which prefixes are compared with; those of ids follow from the tokens.
struct Lengths {
  const GivenSegments& given;
  int64_t operator()(const Lead& lead, int64_t n) const {
    const Integers& values = given.values;
    if (given.form == Form::kSeqlens) return values(lead, n);
    return values(lead, n + 1) - values(lead, n);
  }
};

std::vector<int64_t> lengths_of_tokens(const GivenSegments& given, const Lead& lead) {
  std::vector<int64_t> lengths;
  each_run(given.values, lead, step_of(given.form),
           [&lengths](int64_t begin, int64_t end) { lengths.push_back(end - begin); });
  return lengths;
}

void check_prefix(const Arguments& a, const Leads& leads) {
  const bool of_tokens = are_of_tokens(a.documents.form);
  each_lead(leads, [&](const Lead& lead) {
    const std::vector<int64_t> found = of_tokens ? lengths_of_tokens(a.documents, lead) : std::vector<int64_t>{};
    const int64_t documents = of_tokens ? static_cast<int64_t>(found.size()) : a.prefix.count;
    for (int64_t n = 0; n < std::min(documents, a.prefix.count); ++n) {
      const int64_t length = of_tokens ? found[static_cast<std::size_t>(n)] : Lengths{a.documents}(lead, n);
      const int64_t own = a.prefix(lead, n);
      if (own < 0 || own > length)
        throw_invalid("prefix", at(leads, lead, n), " is ", own, "; it must be between 0 and the document's length, ",
                      length);
    }
  });
}

void check_spans(const Arguments& a, const Leads& leads) {
  each_lead(leads, [&](const Lead& lead) {
    int64_t reached = 0;
    for (int64_t n = 0; n < a.span_begin.count; ++n) {
      const int64_t begin = a.span_begin(lead, n), end = a.span_end(lead, n);
      if (begin < reached || end < begin || end > a.seqlen)
        throw_invalid("dropped", at(leads, lead, n), " is [", begin, ", ", end,
                      "); spans must be ascending, disjoint and within [0, ", a.seqlen, ")");
      reached = end;
    }
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

}  // namespace

void check_tree(const Arguments& a) {
  const Leads leads{a.shape.batch, a.shape.heads};
  each_lead(leads, [&](const Lead& lead) {
    for (int64_t n = 0; n < a.parents.count; ++n) {
      const int64_t parent = a.parents(lead, n);
      if (parent < -1 || parent >= n)
        throw_invalid("parents", at(leads, lead, n), " is ", parent,
                      "; a parent must be -1 (a root) or an earlier node");
      int64_t open = n - 1;  // the subtrees that end before the node, from the innermost on
      while (open >= 0 && open != parent) open = a.parents(lead, open);
      if (open != parent)
        throw_invalid("node ", n, " with parent ", parent,
                      " breaks the depth-first order: the parent's subtree ended before it");
    }
  });
}

namespace {

void check_intervals(const Arguments& a, const Leads& leads) {
  each_lead(leads, [&](const Lead& lead) {
    std::vector<int64_t> open;  // ends of the subtrees around the current node
    int64_t written = 0;        // tokens that have their node
    const auto close = [&] {
      while (!open.empty() && open.back() == written) open.pop_back();
    };
    for (int64_t n = 0; n < a.tin.count; ++n) {
      close();
      const int64_t tin = a.tin(lead, n), tout = a.tout(lead, n), around = open.empty() ? a.seqlen : open.back();
      if (tin != written || tout < tin || tout > around)
        throw_invalid("node ", n, " has the interval [", tin, ", ", tout, "); in depth-first order it must begin at ",
                      written, " and end in [", written, ", ", around, "], inside of its parent's");
      const bool has_child = n + 1 < a.tin.count && a.tin(lead, n + 1) < tout;
      written = has_child ? std::max(a.tin(lead, n + 1), tin) : tout;
      open.push_back(tout);
    }
    close();
    if (!open.empty())
      throw_invalid("a node's interval ends at ", open.back(), ", but its last child ends at ", written,
                    "; a node's own tokens come before its children");
  });
}

/// Where the documents end.
std::vector<int64_t> ends_of_documents(const GivenSegments& given, const Lead& lead) {
  std::vector<int64_t> ends;
  if (are_of_tokens(given.form)) {
    each_run(given.values, lead, step_of(given.form), [&ends](int64_t, int64_t end) { ends.push_back(end); });
  } else if (given.form != Form::kNone) {
    const int64_t count = given.values.count - (given.form == Form::kCuSeqlens ? 1 : 0);
    for (int64_t n = 0, end = 0; n < count; ++n) ends.push_back(end += Lengths{given}(lead, n));
  }
  return ends;
}

void check_block_ids(const Arguments& a, const Leads& leads) {
  each_lead(leads, [&](const Lead& lead) {
    const std::vector<int64_t> ends = ends_of_documents(a.documents, lead);
    auto end = ends.begin();
    SeenIds seen;
    each_run(a.block_ids, lead, 0, [&](int64_t begin, int64_t run_end) {
      const int64_t id = a.block_ids(lead, begin);
      for (int64_t n = begin; n < run_end; n = end != ends.end() ? std::min(*end, run_end) : run_end) {
        for (; end != ends.end() && *end <= n; ++end) seen.clear();  // ids may be used again in another document
        if (id >= 0 && !seen.insert(id))
          throw_invalid("block id ", id, " comes back at block_ids", at(leads, lead, n),
                        "; the tokens of a block must be contiguous, as a block in parts may need more than two row "
                        "intervals per key column (from_dense takes it if it does not)");
      }
    });
  });
}

void check_anchors(const Arguments& a, const Leads& leads) {
  each_lead(leads, [&](const Lead& lead) {
    for (int64_t n = 0; n < a.anchors.count; ++n) {
      const int64_t anchor = a.anchors(lead, n), before = n > 0 ? a.anchors(lead, n - 1) : 0;
      if (anchor > a.seqlen)
        throw_invalid("anchors", at(leads, lead, n), " is ", anchor,
                      "; it must be between 0 and the length of the context, ", a.seqlen,
                      ", or negative where there is no block");
      if (anchor >= 0 && (before < 0 || anchor < before))
        throw_invalid("anchors", at(leads, lead, n), " is ", anchor, ", ",
                      before < 0 ? "after a negative one" : message("less than the one before it, ", before),
                      "; sort the blocks by anchor, negative ones last: only then do those that see a key follow each "
                      "other, and the mask fits two row intervals");
    }
  });
}

}  // namespace

void check_tokens(std::string_view name, int64_t tokens) {
  if (tokens > kMaxSeqlen) throw_invalid(name, " is ", tokens, "; a sequence has no more than ", kMaxSeqlen, " tokens");
}

int64_t tokens_of(const GivenSegments& given, std::optional<int64_t> seqlen, const Leads& leads, Device device) {
  if (are_of_tokens(given.form)) {
    check_tokens(given.name, given.values.count);
    if (seqlen && *seqlen != given.values.count)
      throw_invalid("seqlen is ", *seqlen, ", but ", given.name, " has ", given.values.count,
                    " tokens; leave seqlen out, or make them equal");
    return given.values.count;
  }
  if (given.form == Form::kCuSeqlens && given.values.count == 0)
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
  const Leads leads{a.shape.batch, a.shape.heads};
  check_segments(a.documents, a.seqlen, leads);
  check_segments(a.blocks, a.seqlen, leads);
  switch (a.kind) {
    case Kind::kPrefixLmDocument:
      return check_prefix(a, leads);
    case Kind::kPrefixLmCausal:
      return check_single("prefix", a.prefix, leads, a.seqlen, "seqlen");
    case Kind::kQkSparse:
      return check_spans(a, leads);
    case Kind::kPrefixTreeFromIntervals:
      return check_intervals(a, leads);
    case Kind::kPadding:
      check_single("key_lengths", a.key_lengths, leads, a.shape.seqlen_k, "seqlen_k");
      return check_single("query_lengths", a.query_lengths, leads, a.shape.seqlen_q, "seqlen_q");
    case Kind::kCausalWithBlocks:
      return check_block_ids(a, leads);
    case Kind::kDflash:
      return check_anchors(a, leads);
    default:
      return;
  }
}

}  // namespace flashmask::build
