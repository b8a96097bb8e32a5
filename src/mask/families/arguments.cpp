// SPDX-License-Identifier: Apache-2.0
#include "mask/families/arguments.h"

#include <algorithm>
#include <array>
#include <optional>

#include "common/arithmetic.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "mask/families/contents.h"
#include "mask/mask_tensors.h"

namespace flashmask::build {
namespace {

struct Name {
  std::string_view text;
  Kind kind;
};

constexpr Name kNames[] = {
    {"full", Kind::kFull},
    {"causal", Kind::kCausal},
    {"sliding_window", Kind::kSlidingWindow},
    {"causal_document", Kind::kCausalDocument},
    {"document", Kind::kDocument},
    {"prefix_lm_document", Kind::kPrefixLmDocument},
    {"causal_blockwise", Kind::kCausalBlockwise},
    {"shared_question", Kind::kSharedQuestion},
    {"global_sliding_window", Kind::kGlobalSlidingWindow},
    {"prefix_lm_causal", Kind::kPrefixLmCausal},
    {"qk_sparse", Kind::kQkSparse},
    {"eviction", Kind::kEviction},
    {"hash_sparse", Kind::kHashSparse},
    {"prefix_tree", Kind::kPrefixTree},
    {"prefix_tree_from_intervals", Kind::kPrefixTreeFromIntervals},
    {"padding", Kind::kPadding},
    {"attention_sink_window", Kind::kAttentionSinkWindow},
    {"block_causal", Kind::kBlockCausal},
    {"causal_with_blocks", Kind::kCausalWithBlocks},
    {"block_diffusion", Kind::kBlockDiffusion},
    {"eagle3_ttt", Kind::kEagle3Ttt},
    {"dflash", Kind::kDflash},
};

std::string joined(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text.empty() ? "none" : text;
}

Kind kind_of(std::string_view family) {
  for (const Name& name : kNames) {
    if (name.text == family) return name.kind;
  }
  std::vector<std::string_view> known;
  for (const Name& name : kNames) known.push_back(name.text);
  throw_invalid("unknown mask family '", family, "'; known: ", joined(known));
}

/// Looks parameters up and remembers which names it was asked for.
class Reader {
 public:
  Reader(std::string_view family, std::span<const Parameter> given, Arguments& arguments)
      : family_(family), given_(given), a_(arguments) {}

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
  std::array<Integers, 2> pairs(std::string_view name) {
    constexpr const char* kShape = "[n, 2], [batch, n, 2] or [batch, heads, n, 2]";
    const TensorView t = tensor(name, kShape);
    if (t.rank < 2 || t.shape[static_cast<std::size_t>(t.rank - 1)] != 2)
      throw_invalid(name, " is ", describe(t), "; it must be ", kShape, ", the begin and end of each");
    const int64_t step = t.stride[static_cast<std::size_t>(t.rank - 1)];
    TensorView begin = t;
    begin.rank -= 1;
    Integers first = integers(name, begin, kShape, 1, false), second = first;
    second.data = static_cast<const char*>(first.data) + step * static_cast<int64_t>(element_size(t.dtype));
    return {first, second};
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

  /// Documents in one of their four forms, of `seqlen` tokens if that is given; with `or_one` they may be left out.
  void documents(bool or_one, std::optional<int64_t> seqlen) {
    std::vector<std::string_view> given;
    for (const auto& [name, form] : kSegmentForms) {
      if (!has_vector(name)) continue;
      given.push_back(name);
      a_.documents = {form, name, vector(name)};
    }
    if (given.empty() && or_one && seqlen) {
      a_.seqlen = *seqlen;
    } else if (given.size() != 1) {
      throw_invalid(given.empty() ? "nothing is" : joined(given) + " are",
                    " given; it must be one of cu_seqlens, seqlens, doc_ids and position_ids");
    } else {
      a_.seqlen = tokens_of(a_.documents, seqlen, leads(), a_.device);
    }
  }
  void documents(bool or_one = false) { documents(or_one, optional_length("seqlen")); }
  /// Blocks of one length or of given ones; documents may be left out.
  void blocks() {
    std::optional<int64_t> seqlen = optional_length("seqlen");
    if (has_vector("blocks")) {
      a_.blocks = {Form::kSeqlens, "blocks", vector("blocks")};
      if (!has_documents()) seqlen = tokens_of(a_.blocks, seqlen, leads(), a_.device);
    } else {
      a_.block = number("blocks", 1, "a block must have at least 1 token");
    }
    documents(true, seqlen);
    a_.block = std::min(a_.block, std::max<int64_t>(a_.seqlen, 1));
  }
  void window() {
    a_.window = number("window").value_or(-1);
    if (a_.window < 1 && a_.window != -1)
      throw_invalid("window is ", a_.window, "; it must be at least 1, or -1 for all");
  }

  bool has_documents() {
    return std::any_of(std::begin(kSegmentForms), std::end(kSegmentForms),
                       [this](const auto& form) { return has_vector(form.first); });
  }
  Leads leads() const { return {a_.shape.batch, a_.shape.heads}; }

  void check_all_known() const {
    for (const Parameter& p : given_) {
      if (std::find(asked_.begin(), asked_.end(), p.name) == asked_.end())
        throw_invalid(family_, " has no parameter '", p.name, "'; known: ", joined(asked_));
    }
  }

 private:
  const Parameter* find(std::string_view name) {
    if (std::find(asked_.begin(), asked_.end(), name) == asked_.end()) asked_.push_back(name);
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
  /// Whether a leading dimension is the mask's; otherwise it is 1 and serves all.
  static bool lead(std::string_view name, int64_t size, int64_t& all) {
    if (size < 1) throw_invalid(name, " has a leading dimension of ", size, "; it must be at least 1");
    if (size == 1) return false;
    if (all != 1 && all != size)
      throw_invalid(name, " has a leading dimension of ", size, " and another parameter one of ", all,
                    "; they must be equal, or one of them 1");
    all = size;
    return true;
  }

  std::string_view family_;
  std::span<const Parameter> given_;
  Arguments& a_;
  std::vector<std::string_view> asked_;
};

void expect_count(std::string_view name, const Integers& x, int64_t count, const char* what) {
  if (x.count != count)
    throw_invalid(name, " has ", x.count, " entries; it needs one for each of the ", count, " ", what);
}

void read_bands(Reader& r, Arguments& a) {
  a.shape.seqlen_q = r.length("seqlen_q");
  a.shape.seqlen_k = r.optional_length("seqlen_k").value_or(a.shape.seqlen_q);
  if (a.kind == Kind::kFull) return;
  if ((a.shape.q_offset = r.number("q_offset"))) check_offset(*a.shape.q_offset);
  a.shape.causal = a.kind == Kind::kCausal;
  if (a.shape.causal)
    a.shape.band = Band::causal();
  else
    a.shape.band = Band::window(r.number("left", INT64_MIN), r.number("right").value_or(0));
}

void read_tree(Reader& r, Arguments& a) {
  a.parents = r.vector("parents");
  const bool has_lengths = r.has_vector("lengths");
  a.documents = {Form::kSeqlens, "lengths",
                 has_lengths ? r.vector("lengths") : Integers{.count = a.parents.count, .constant = 1}};
  expect_count("lengths", a.documents.values, a.parents.count, "nodes");
  a.seqlen = tokens_of(a.documents, r.optional_length("seqlen"), r.leads(), a.device);
}

void read_intervals(Reader& r, Arguments& a) {
  a.tin = r.vector("tin");
  a.tout = r.vector("tout");
  if (a.tin.count != a.tout.count)
    throw_invalid("tin has ", a.tin.count, " entries and tout ", a.tout.count, "; they must be equal");
  const std::optional<int64_t> seqlen = r.optional_length("seqlen");
  a.seqlen = seqlen ? *seqlen : largest("tout", a.tout, r.leads(), a.device);
}

void read_eagle(Reader& r, Arguments& a) {
  a.steps = r.number("steps", 1);
  r.documents(true);
  if (a.seqlen > 0 && a.steps > kMaxSeqlen / a.seqlen)
    throw_invalid("steps is ", a.steps, "; with ", a.seqlen, " tokens that is more than ", kMaxSeqlen, " keys");
  a.shape.seqlen_q = a.seqlen;
  a.shape.seqlen_k = a.seqlen > 0 ? a.steps * a.seqlen : 0;
}

void read_dflash(Reader& r, Arguments& a) {
  a.anchors = r.vector("anchors");
  a.block = r.number("block", 1);
  r.documents(true);
  if (a.anchors.count > 0 && a.block > (kMaxSeqlen - a.seqlen) / a.anchors.count)
    throw_invalid("block is ", a.block, "; ", a.anchors.count, " of them and ", a.seqlen,
                  " tokens of context are more than ", kMaxSeqlen, " keys");
  a.shape.seqlen_q = a.anchors.count * a.block;
  a.shape.seqlen_k = a.seqlen + a.shape.seqlen_q;
}

/// What a family is given, and the vectors it writes; a square mask of a.seqlen unless the lengths are set.
/// The tree that has been read, causal or with a window over its positions.
void read_window_of_tree(Reader& r, Arguments& a) {
  Shape& shape = a.shape;
  r.window();
  if (a.window == -1) {
    shape.band = Band::causal();
    shape.causal = true;
    shape.vectors = kLts;
    return;
  }
  if (shape.heads > 1)
    throw_invalid("window is ", a.window, " and the tree has ", shape.heads,
                  " heads; positions are those of all heads, so with a window it must have 1");
  shape.band = Band::window(a.window - 1, -1);
  shape.vectors = kLts | kUte;
  shape.has_positions = true;
}

void read_family(Reader& r, Arguments& a) {
  Shape& shape = a.shape;
  const auto causal = [&](uint32_t vectors) {
    shape.band = Band::causal();
    shape.causal = true;
    shape.vectors = vectors;
  };
  switch (a.kind) {
    case Kind::kFull:
    case Kind::kCausal:
    case Kind::kSlidingWindow:
      return read_bands(r, a);
    case Kind::kCausalDocument:
      r.documents();
      return causal(kLts);
    case Kind::kDocument:
      r.documents();
      shape.vectors = kLts | kUte;
      return;
    case Kind::kPrefixLmDocument:
      r.documents();
      a.prefix = r.vector("prefix");
      if (a.documents.form == Form::kCuSeqlens)
        expect_count("prefix", a.prefix, a.documents.values.count - 1, "documents");
      if (a.documents.form == Form::kSeqlens) expect_count("prefix", a.prefix, a.documents.values.count, "documents");
      shape.vectors = kLts | kUte;
      return;
    case Kind::kCausalBlockwise:
      r.documents();
      return causal(kLts | kLte);
    case Kind::kSharedQuestion:
      a.documents = {Form::kSeqlens, "seqlens", r.vector("seqlens")};
      a.is_question = r.flags("is_question");
      expect_count("is_question", a.is_question, a.documents.values.count, "segments");
      a.seqlen = tokens_of(a.documents, r.optional_length("seqlen"), r.leads(), a.device);
      return causal(kLts);
    case Kind::kGlobalSlidingWindow:
      a.seqlen = r.length("seqlen");
      a.global_tokens = r.number("global_tokens", 0);
      a.window = r.number("window", 0);
      shape.vectors = kLts | kUts | kUte;
      return;
    case Kind::kPrefixLmCausal:
      a.seqlen = r.length("seqlen");
      a.prefix = r.single("prefix");
      shape.vectors = kUte;
      return;
    case Kind::kQkSparse: {
      a.seqlen = r.length("seqlen");
      const auto [begin, end] = r.pairs("dropped");
      a.span_begin = begin;
      a.span_end = end;
      return causal(kLts | kLte);
    }
    case Kind::kEviction:
      a.evicted_at = r.vector("evicted_at");
      a.seqlen = a.evicted_at.count;
      return causal(kLts);
    case Kind::kHashSparse:
      a.query_buckets = r.vector("query_buckets");
      a.key_buckets = r.vector("key_buckets");
      shape.seqlen_q = a.query_buckets.count;
      shape.seqlen_k = a.key_buckets.count;
      shape.band = r.flag("causal") ? Band::causal() : Band::none();
      shape.vectors = kLts | kLte | kUts | kUte;
      return;
    case Kind::kPrefixTree:
      read_tree(r, a);
      return read_window_of_tree(r, a);
    case Kind::kPrefixTreeFromIntervals:
      read_intervals(r, a);
      return read_window_of_tree(r, a);
    case Kind::kPadding:
      shape.seqlen_q = r.length("seqlen_q");
      shape.seqlen_k = r.length("seqlen_k");
      a.key_lengths = r.single("key_lengths");
      a.query_lengths = r.has("query_lengths") ? r.single("query_lengths") : Integers{.constant = a.shape.seqlen_q};
      shape.vectors = kLts;
      return;
    case Kind::kAttentionSinkWindow:
      a.sink = r.number("sink", 0);
      r.window();
      r.documents(true);
      return causal(kLts);
    case Kind::kBlockCausal:
      r.blocks();
      r.window();
      shape.vectors = kLts | kUte;
      return;
    case Kind::kCausalWithBlocks:
      a.block_ids = r.vector("block_ids");
      r.window();
      r.documents(true, a.block_ids.count);
      shape.vectors = kLts | kUte;
      return;
    case Kind::kBlockDiffusion:
      r.blocks();
      a.concatenated = r.flag("concatenated");
      if (a.seqlen > kMaxSeqlen / 2) throw_invalid("two copies of ", a.seqlen, " tokens are more than ", kMaxSeqlen);
      shape.seqlen_q = shape.seqlen_k = 2 * a.seqlen;
      shape.vectors = a.concatenated ? kLts | kLte | kUts | kUte : kLts | kUte;
      return;
    case Kind::kEagle3Ttt:
      read_eagle(r, a);
      shape.vectors = kLts | kUte;
      return;
    case Kind::kDflash:
      read_dflash(r, a);
      shape.vectors = kLts | kUte;
      return;
  }
}

bool is_square(Kind kind) {
  switch (kind) {
    case Kind::kFull:
    case Kind::kCausal:
    case Kind::kSlidingWindow:
    case Kind::kHashSparse:
    case Kind::kPadding:
    case Kind::kBlockDiffusion:
    case Kind::kEagle3Ttt:
    case Kind::kDflash:
      return false;
    default:
      return true;
  }
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

Arguments read_arguments(std::string_view family, std::span<const Parameter> parameters, Device device) {
  Arguments a;
  a.kind = kind_of(family);
  a.device = device;
  Reader reader(family, parameters, a);
  read_family(reader, a);
  if (is_square(a.kind)) a.shape.seqlen_q = a.shape.seqlen_k = a.seqlen;
  const int64_t leads = check_size(a.shape);
  if (a.kind == Kind::kBlockDiffusion)
    a.order = static_cast<int64_t*>(reader.output("order_out", DataType::kInt64, leads * a.shape.seqlen_k));
  a.unfit = static_cast<int32_t*>(reader.output("unfit_out", DataType::kInt32, 1));
  reader.check_all_known();
  return a;
}

}  // namespace flashmask::build
