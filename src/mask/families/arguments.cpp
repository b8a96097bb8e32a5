// SPDX-License-Identifier: Apache-2.0
#include "mask/families/arguments.h"

#include <algorithm>
#include <cassert>

#include "common/arithmetic.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "mask/families/contents.h"
#include "mask/families/families.h"
#include "mask/mask_tensors.h"

namespace flashmask::build {
namespace {

std::string joined(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text.empty() ? "none" : text;
}

const Family& find_family(std::string_view name) {
  std::vector<std::string_view> known;
  for (const Family* family : all_families()) {
    if (family->name == name) return *family;
    known.push_back(family->name);
  }
  throw_invalid("unknown mask family '", name, "'; known: ", joined(known));
}

/// Reads what a family declares.
class Reader {
 public:
  Reader(std::span<const Parameter> given, Arguments& arguments) : given_(given), a_(arguments) {}

  /// All parameters of the family, in its order.
  void read() {
    auto value = a_.values.begin();
    for (const Declared& declared : a_.family->parameters) {
      value->name = declared.name;
      value->is_given = has(declared.name);
      if (value->is_given || !declared.is_optional) read(declared, *value);
      ++value;
    }
  }

  void check_all_known() const {
    const std::vector<std::string_view> known = names_of(*a_.family);
    for (const Parameter& p : given_) {
      if (std::find(known.begin(), known.end(), p.name) == known.end())
        throw_invalid(a_.family->name, " has no parameter '", p.name, "'; known: ", joined(known));
    }
  }

  /// A tensor that is written: contiguous, of `count` elements.
  void* output(std::string_view name, DataType dtype, int64_t count) {
    const Parameter* const p = find(name);
    if (!p) return nullptr;
    const TensorView& t = p->vector;
    check_extent(std::string(name).c_str(), t);
    if (t.dtype != dtype || t.num_elements() != count)
      throw_invalid(name, " is ", describe(t), "; it must be ", flashmask::name(dtype), " and have ", count,
                    " contiguous elements");
    return t.data;
  }

 private:
  void read(const Declared& p, Value& value) {
    switch (p.kind) {
      case Kind::kLength:
        value.number = length(p.name);
        if (p.name == "seqlen") a_.seqlen = value.number;
        return;
      case Kind::kNumber:
        value.number = p.otherwise && !value.is_given ? *p.otherwise : number(p.name, p.least);
        return;
      case Kind::kReach:
        value.number = number(p.name).value_or(*p.otherwise);
        if (value.number < 1 && value.number != -1)
          throw_invalid(p.name, " is ", value.number, "; it must be at least 1, or -1 for all");
        return;
      case Kind::kFlag:
        value.number = flag(p.name);
        return;
      case Kind::kTokens:
        value.vector = vector(p.name);
        seqlen_ = a_.seqlen = value.vector.count;
        return;
      case Kind::kVector:
        value.vector = vector(p.name);
        return;
      case Kind::kFlags:
        value.vector = flags(p.name);
        return;
      case Kind::kSingle:
        value.vector = single(p.name);
        return;
      case Kind::kPairs:
        return pairs(p.name, value);
      case Kind::kBlocks:
        return blocks(p.name);
      case Kind::kDocuments:
      case Kind::kDocumentsOrOne:
      case Kind::kDocumentsOfTokens:
        return documents(p.kind != Kind::kDocuments);
    }
  }

  std::optional<int64_t> number(std::string_view name) {
    const Parameter* const p = find(name);
    if (!p) return std::nullopt;
    if (p->vector.defined()) throw_invalid(name, " is ", describe(p->vector), "; it must be a number");
    return p->number;
  }
  int64_t number(std::string_view name, int64_t least, const char* rule = nullptr) {
    const std::optional<int64_t> value = number(name);
    if (!value) throw_invalid(name, " is missing; it must be a number");
    if (*value < least) throw_invalid(name, " is ", *value, "; ", rule ? rule : message("it must be at least ", least));
    return *value;
  }
  bool flag(std::string_view name) {
    const int64_t value = number(name).value_or(0);
    if (value != 0 && value != 1) throw_invalid(name, " is ", value, "; it must be 0 or 1");
    return value != 0;
  }
  int64_t length(std::string_view name) {
    const int64_t value = number(name, 0);
    check_tokens(name, value);
    return value;
  }

  std::optional<int64_t> optional_length(std::string_view name) {
    return has(name) ? std::optional(length(name)) : std::nullopt;
  }

  bool has(std::string_view name) { return find(name) != nullptr; }
  bool has_vector(std::string_view name) {
    const Parameter* const p = find(name);
    return p && p->vector.defined();
  }
  /// [..., n].
  Integers vector(std::string_view name) { return integers(name, "[n], [batch, n] or [batch, heads, n]", 1, false); }
  Integers flags(std::string_view name) { return integers(name, "[n], [batch, n] or [batch, heads, n]", 1, true); }
  /// One for each batch entry and head: [batch] or [batch, heads], or a number.
  Integers single(std::string_view name) {
    const Parameter* const p = find(name);
    if (p && !p->vector.defined()) return {.count = 1, .constant = p->number};
    return integers(name, "a number, [batch] or [batch, heads]", 0, false);
  }
  /// [..., n, 2], as two vectors.
  void pairs(std::string_view name, Value& value) {
    constexpr const char* kShape = "[n, 2], [batch, n, 2] or [batch, heads, n, 2]";
    const TensorView t = tensor(name, kShape);
    if (t.rank < 2 || t.shape[static_cast<std::size_t>(t.rank - 1)] != 2)
      throw_invalid(name, " is ", describe(t), "; it must be ", kShape, ", the begin and end of each");
    const int64_t step = t.stride[static_cast<std::size_t>(t.rank - 1)];
    TensorView begin = t;
    begin.rank -= 1;
    value.vector = value.ends = integers(name, begin, kShape, 1, false);
    value.ends.data = static_cast<const char*>(value.vector.data) + step * static_cast<int64_t>(element_size(t.dtype));
  }
  /// Documents in one of their four forms, of `seqlen_` tokens if it is known; with `or_one` they may be left out.
  void documents(bool or_one) {
    if (!seqlen_) seqlen_ = optional_length("seqlen");
    std::vector<std::string_view> given;
    for (const auto& [name, form] : kSegmentForms) {
      if (!has_vector(name)) continue;
      given.push_back(name);
      a_.documents = {form, name, vector(name)};
    }
    if (given.empty() && or_one && seqlen_) {
      a_.seqlen = *seqlen_;
    } else if (given.size() != 1) {
      throw_invalid(given.empty() ? "nothing is" : joined(given) + " are",
                    " given; it must be one of cu_seqlens, seqlens, doc_ids and position_ids");
    } else {
      a_.seqlen = tokens_of(a_.documents, seqlen_, a_.leads(), a_.device);
    }
    a_.block = std::min(a_.block, std::max<int64_t>(a_.seqlen, 1));
  }
  /// Blocks of one length or of given ones, which give the sequence its length if documents are left out.
  void blocks(std::string_view name) {
    seqlen_ = optional_length("seqlen");
    if (!has_vector(name)) {
      a_.block = number(name, 1, "a block must have at least 1 token");
      return;
    }
    a_.blocks = {SegmentForm::kSeqlens, name, vector(name)};
    if (!has_documents()) seqlen_ = tokens_of(a_.blocks, seqlen_, a_.leads(), a_.device);
  }

  bool has_documents() {
    return std::any_of(std::begin(kSegmentForms), std::end(kSegmentForms),
                       [this](const auto& form) { return has_vector(form.first); });
  }
  const Parameter* find(std::string_view name) const {
    const auto found = std::find_if(given_.begin(), given_.end(), [&](const Parameter& p) { return p.name == name; });
    return found == given_.end() ? nullptr : &*found;
  }
  TensorView tensor(std::string_view name, const char* shape) {
    const Parameter* const p = find(name);
    if (!p || !p->vector.defined())
      throw_invalid(name, p ? " is a number" : " is missing", "; it must be integers ", shape);
    return p->vector;
  }
  Integers integers(std::string_view name, const char* shape, int own_rank, bool are_flags) {
    return integers(name, tensor(name, shape), shape, own_rank, are_flags);
  }
  Integers integers(std::string_view name, const TensorView& t, const char* shape, int own_rank, bool are_flags) {
    const bool is_flag = t.dtype == DataType::kBool || t.dtype == DataType::kUInt8;
    if (t.dtype != DataType::kInt32 && t.dtype != DataType::kInt64 && !(are_flags && is_flag))
      throw_invalid(name, " is ", describe(t), "; it must be int32 or int64", are_flags ? ", bool or uint8" : "");
    if (t.rank < own_rank || t.rank > own_rank + 2 || (own_rank == 0 && t.rank == 0))
      throw_invalid(name, " is ", describe(t), "; it must be ", shape);
    const std::string text(name);
    check_extent(text.c_str(), t);
    check_data(text.c_str(), t);
    Integers x{.data = t.data,
               .dtype = t.dtype,
               .count = own_rank ? last(t.shape, t.rank) : 1,
               .stride = own_rank ? last(t.stride, t.rank) : 0};
    const int lead_rank = t.rank - own_rank;
    if (lead_rank > 0) x.batch_stride = lead(name, t.shape[0], a_.shape.batch) ? t.stride[0] : 0;
    if (lead_rank > 1) x.head_stride = lead(name, t.shape[1], a_.shape.heads) ? t.stride[1] : 0;
    return x;
  }
  static int64_t last(const std::array<int64_t, TensorView::kMaxRank>& sizes, int rank) {
    return sizes[static_cast<std::size_t>(rank - 1)];
  }
  /// True if a leading dimension is the mask's; otherwise it is 1 and broadcasts.
  static bool lead(std::string_view name, int64_t size, int64_t& all) {
    if (size < 1) throw_invalid(name, " has a leading dimension of ", size, "; it must be at least 1");
    if (size == 1) return false;
    if (all != 1 && all != size)
      throw_invalid(name, " has a leading dimension of ", size, " and another parameter one of ", all,
                    "; they must be equal, or one of them 1");
    all = size;
    return true;
  }

  std::span<const Parameter> given_;
  Arguments& a_;
  std::optional<int64_t> seqlen_;  ///< tokens of the sequence, as far as they are known
};

/// The form of the masks of these arguments, whose numbers are read.
const Form& form_of(const Arguments& a) {
  const Family& family = *a.family;
  if (family.option.empty()) return family.form;
  const auto option = std::find_if(family.parameters.begin(), family.parameters.end(),
                                   [&](const Declared& p) { return p.name == family.option; });
  return a.number(family.option) == option->otherwise ? family.form : family.other;
}

Band band_of(const Arguments& a) {
  switch (a.shape.form.edges) {
    case Edges::kNone:
      return Band::none();
    case Edges::kCausal:
    case Edges::kDiagonal:
      return Band::causal();
    case Edges::kReach:
      return Band::window(a.number("window") - 1, -1);
    case Edges::kGiven:
      return Band::window(a.number("left"), a.number("right"));
  }
  return Band::none();
}

/// Batch entries times heads. Throws if they, or the numbers of the mask, are too many to count.
int64_t check_size(const Shape& shape) {
  constexpr int64_t kBytes = 48;  // more than the scratch of a key or a row
  const std::optional<int64_t> leads = checked_product(shape.batch, shape.heads);
  const int64_t longest = std::max<int64_t>({shape.seqlen_q, shape.seqlen_k, 1});
  if (!leads || *leads > INT32_MAX || !checked_product(*leads, longest, kBytes))
    throw_invalid("the parameters have ", shape.batch, " batch entries and ", shape.heads,
                  " heads; these are too many for masks of ", shape.seqlen_k, " keys");
  return *leads;
}

}  // namespace

const Value& Arguments::operator[](std::string_view name) const {
  const auto* const found =
      std::find_if(values.begin(), values.end(), [name](const Value& value) { return value.name == name; });
  assert(found != values.end());
  return *found;
}

Arguments read_arguments(std::string_view family, std::span<const Parameter> parameters, Device device) {
  Arguments a;
  a.family = &find_family(family);
  a.device = device;
  Reader reader(parameters, a);
  reader.read();
  a.shape.form = form_of(a);
  a.shape.band = band_of(a);
  with_family(*a.family, [&a](auto own) { own.measure(a); });
  const int64_t leads = check_size(a.shape);
  if (a.family->has_order)
    a.order = static_cast<int64_t*>(reader.output("order_out", DataType::kInt64, leads * a.shape.seqlen_k));
  a.unfit = static_cast<int32_t*>(reader.output("unfit_out", DataType::kInt32, 1));
  reader.check_all_known();
  return a;
}

}  // namespace flashmask::build
