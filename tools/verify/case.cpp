// SPDX-License-Identifier: Apache-2.0
#include "verify/case.h"

#include <cmath>

#include "verify/text.h"

namespace flashmask::verify {
namespace {

constexpr Words<MaskHeads, 3> kMaskHeads{{{MaskHeads::kOne, "1"}, {MaskHeads::kKv, "kv"}, {MaskHeads::kQuery, "q"}}};
constexpr Words<BlockMask, 3> kBlockMask{
    {{BlockMask::kNone, "none"}, {BlockMask::kShared, "shared"}, {BlockMask::kEach, "each"}}};
constexpr Words<Layout, 4> kLayout{
    {{Layout::kBshd, "bshd"}, {Layout::kBhsd, "bhsd"}, {Layout::kPadded, "padded"}, {Layout::kAligned, "aligned"}}};
constexpr Words<bool, 2> kMaskBatch{{{false, "1"}, {true, "batch"}}};
constexpr Words<bool, 2> kDout{{{false, "normal"}, {true, "expanded"}}};
constexpr Words<DataType, 3> kDtype{
    {{DataType::kFloat32, "float32"}, {DataType::kBFloat16, "bfloat16"}, {DataType::kFloat16, "float16"}}};

Window parse_window(std::string_view key, std::string_view text) {
  const std::size_t comma = text.find(',');
  if (comma == std::string_view::npos) fail("{} is '{}'; it must be left,right", key, text);
  return {integer(key, text.substr(0, comma), -1, kMaxSeqlen), integer(key, text.substr(comma + 1), -1, kMaxSeqlen)};
}

const Setters<Case>& setters() {
  constexpr int64_t kMost = 1 << 20;
  static const Setters<Case> own{
      {"batch", integer_setter(&Case::batch, 0, kMost)},
      {"seqlen_q", integer_setter(&Case::seqlen_q, 0, kMaxSeqlen)},
      {"seqlen_k", integer_setter(&Case::seqlen_k, 0, kMaxSeqlen)},
      {"heads_q", integer_setter(&Case::heads_q, 1, kMost)},
      {"heads_kv", integer_setter(&Case::heads_kv, 1, kMost)},
      {"head_dim", integer_setter(&Case::head_dim, 1, kMost)},
      {"head_dim_v", integer_setter(&Case::head_dim_v, 1, kMost)},
      {"dtype", word_setter(&Case::dtype, kDtype)},
      {"family", [](Case& c, std::string_view, std::string_view value) { c.family = value; }},
      {"seed", [](Case& c, std::string_view key, std::string_view value) { c.seed = number<uint64_t>(key, value); }},
      {"mask_heads", word_setter(&Case::mask_heads, kMaskHeads)},
      {"mask_batch", word_setter(&Case::mask_per_batch, kMaskBatch)},
      {"block_mask", word_setter(&Case::block_mask, kBlockMask)},
      {"window", [](Case& c, std::string_view key, std::string_view value) { c.window = parse_window(key, value); }},
      {"q_offset", [](Case& c, std::string_view key,
                      std::string_view value) { c.q_offset = integer(key, value, -kMaxSeqlen, kMaxSeqlen); }},
      {"layout", word_setter(&Case::layout, kLayout)},
      {"dout", word_setter(&Case::expanded_dout, kDout)},
      {"dlse", word_setter(&Case::dlse, kYesNo)},
      {"scale", [](Case& c, std::string_view key, std::string_view value) { c.given_scale = finite(key, value); }},
      {"plan", word_setter(&Case::ready_plan, kYesNo)},
  };
  static const Setters<Case> table = with_features(own, case_features());
  return table;
}

}  // namespace

double Case::scale() const { return given_scale.value_or(1 / std::sqrt(static_cast<double>(head_dim))); }

std::string describe(const Case& c) {
  std::string line = fmt::format(
      "family={} seed={} batch={} seqlen_q={} seqlen_k={} heads_q={} heads_kv={} head_dim={} head_dim_v={} dtype={} "
      "mask_heads={} mask_batch={} block_mask={} layout={} dout={} dlse={} plan={}",
      c.family, c.seed, c.batch, c.seqlen_q, c.seqlen_k, c.heads_q, c.heads_kv, c.head_dim, c.head_dim_v,
      word(kDtype, c.dtype), word(kMaskHeads, c.mask_heads), word(kMaskBatch, c.mask_per_batch),
      word(kBlockMask, c.block_mask), word(kLayout, c.layout), word(kDout, c.expanded_dout), word(kYesNo, c.dlse),
      word(kYesNo, c.ready_plan));
  if (c.window) line += fmt::format(" window={},{}", c.window->left, c.window->right);
  if (c.q_offset) line += fmt::format(" q_offset={}", *c.q_offset);
  if (c.given_scale) line += fmt::format(" scale={}", *c.given_scale);  // shortest text that reads back the same
  return line + describe(c.features, case_features());
}

Case parse_case(std::string_view line) {
  Case c;
  set_all(c, setters(), line);
  if (c.heads_q % c.heads_kv != 0)
    fail("heads_q is {} and heads_kv {}; heads_q must be a multiple of heads_kv", c.heads_q, c.heads_kv);
  if (c.q_offset && c.has_positions())
    fail("q_offset is {} and the case has positions, which take its place; leave one of them out", *c.q_offset);
  return c;
}

DataType parse_dtype(std::string_view text, std::string_view argument) { return value_of(kDtype, argument, text); }

Layout parse_layout(std::string_view text, std::string_view argument) { return value_of(kLayout, argument, text); }

}  // namespace flashmask::verify
