// SPDX-License-Identifier: Apache-2.0
#include "verify/cached_case.h"

#include <algorithm>
#include <cmath>

#include "verify/text.h"

namespace flashmask::verify {
namespace {

constexpr Words<CacheTables, 3> kTables{
    {{CacheTables::kContiguous, "contiguous"}, {CacheTables::kTable, "table"}, {CacheTables::kLists, "lists"}}};
constexpr Words<ScaleShape, 6> kScales{{{ScaleShape::kNone, "none"},
                                        {ScaleShape::kTensor, "tensor"},
                                        {ScaleShape::kHead, "head"},
                                        {ScaleShape::kPage, "page"},
                                        {ScaleShape::kToken, "token"},
                                        {ScaleShape::kTokenHead, "token_head"}}};
constexpr Words<CachedPositions, 3> kPositions{{{CachedPositions::kNone, "none"},
                                                {CachedPositions::kRows, "rows"},
                                                {CachedPositions::kRowsAndKeys, "rows_and_keys"}}};
constexpr Words<CachedBlocks, 3> kBlocks{
    {{CachedBlocks::kNone, "none"}, {CachedBlocks::kKeys, "keys"}, {CachedBlocks::kRowsAndKeys, "rows_and_keys"}}};
constexpr Words<Layout, 3> kLayouts{{{Layout::kBshd, "nhd"}, {Layout::kBhsd, "hnd"}, {Layout::kPadded, "padded"}}};
constexpr Words<KeyLayout, 2> kKeyLayouts{{{KeyLayout::kSequences, "sequences"}, {KeyLayout::kPages, "pages"}}};
constexpr Words<DataType, 3> kDtypes{
    {{DataType::kFloat32, "float32"}, {DataType::kBFloat16, "bfloat16"}, {DataType::kFloat16, "float16"}}};

constexpr int64_t kMostKeys = 1 << 20;

std::vector<int64_t> parse_list(std::string_view key, std::string_view text) {
  std::vector<int64_t> numbers;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    numbers.push_back(integer(key, text.substr(at, end - at), 0, kMostKeys));
    at = end + 1;
  }
  return numbers;
}

auto list_setter(std::vector<int64_t> CachedCase::* member) {
  return [member](CachedCase& c, std::string_view key, std::string_view value) { c.*member = parse_list(key, value); };
}

void parse_window(CachedCase& c, std::string_view key, std::string_view text) {
  const std::size_t comma = text.find(',');
  if (comma == std::string_view::npos) fail("{} is '{}'; it must be left,right", key, text);
  c.window = {integer(key, text.substr(0, comma), -1, kMostKeys), integer(key, text.substr(comma + 1), -1, kMostKeys)};
}

const Setters<CachedCase>& setters() {
  using C = CachedCase;
  using Text = std::string_view;
  static const Setters<C> own{
      {"cache", word_setter(&C::tables, kTables)},
      {"seed", [](C& c, Text key, Text value) { c.seed = number<uint64_t>(key, value); }},
      {"page_size", integer_setter(&C::page_size, 1, kMostKeys)},
      {"keys", list_setter(&C::keys)},
      {"rows", list_setter(&C::rows)},
      {"packed", word_setter(&C::packed, kYesNo)},
      {"shared", integer_setter(&C::shared, 0, kMostKeys)},
      {"bad", word_setter(&C::bad, kYesNo)},
      {"heads_q", integer_setter(&C::heads_q, 1, 4096)},
      {"heads_kv", integer_setter(&C::heads_kv, 1, 4096)},
      {"head_dim", integer_setter(&C::head_dim, 1, 4096)},
      {"head_dim_v", integer_setter(&C::head_dim_v, 1, 4096)},
      {"dtype", word_setter(&C::dtype, kDtypes)},
      {"float8", word_setter(&C::float8, kYesNo)},
      {"layout", word_setter(&C::layout, kLayouts)},
      {"causal", word_setter(&C::causal, kYesNo)},
      {"window", parse_window},
      {"vectors", integer_setter(&C::vectors, 0, 4)},
      {"vectors_by_head", word_setter(&C::vectors_by_head, kYesNo)},
      {"vectors_by_request", word_setter(&C::vectors_by_request, kYesNo)},
      {"short_columns", word_setter(&C::short_columns, kYesNo)},
      {"beside", word_setter(&C::key_layout, kKeyLayouts)},
      {"positions", word_setter(&C::positions, kPositions)},
      {"tail", integer_setter(&C::tail, 0, kMaxTail)},
      {"tail_lens", word_setter(&C::tail_lens, kYesNo)},
      {"tail_depth", word_setter(&C::tail_depth, kYesNo)},
      {"blocks", word_setter(&C::blocks, kBlocks)},
      {"blocks_by_head", word_setter(&C::blocks_by_head, kYesNo)},
      {"sink", word_setter(&C::sink, kYesNo)},
      {"k_scale", word_setter(&C::k_scale, kScales)},
      {"v_scale", word_setter(&C::v_scale, kScales)},
      {"scale", [](C& c, Text key, Text value) { c.given_scale = finite(key, value); }},
      {"split_size", integer_setter(&C::split_size, 128, kMostKeys)},
      {"batch_invariant", word_setter(&C::batch_invariant, kYesNo)},
  };
  static const Setters<C> table = with_features(own, score_features());
  return table;
}

/// Throws unless the case can be drawn; a call that the library refuses is drawn all the same.
void check_shapes(const CachedCase& c) {
  if (c.heads_q % c.heads_kv != 0)
    fail("heads_q is {} and heads_kv {}; heads_q must be a multiple of heads_kv", c.heads_q, c.heads_kv);
  if (c.keys.size() != c.rows.size())
    fail("keys has {} requests and rows {}; they must have as many", c.keys.size(), c.rows.size());
  if (c.bad && c.shared > 0) fail("shared is {} and bad yes; pages of bad tables are not shared", c.shared);
  if (!c.packed && std::ranges::adjacent_find(c.rows, std::ranges::not_equal_to()) != c.rows.end())
    fail("packed is no and rows differ; without cu_seqlens_q all requests have as many");
}

}  // namespace

double CachedCase::scale() const { return given_scale.value_or(1 / std::sqrt(static_cast<double>(head_dim))); }

int64_t CachedCase::columns() const {
  const int64_t most = *std::ranges::max_element(keys);
  return short_columns && !in_pages() ? most * 2 / 3 : most;
}

int64_t CachedCase::shared_keys() const { return has_tables() ? std::min(shared, keys[0]) / page_size * page_size : 0; }

int64_t CachedCase::cost() const {
  int64_t pairs = 0;
  for (std::size_t b = 0; b < keys.size(); ++b) pairs += keys[b] * rows[b];
  return pairs * heads_q * (head_dim + head_dim_v);
}

bool is_cached(std::string_view line) { return line.starts_with("cache=") || line.find(" cache=") != line.npos; }

std::string describe(const CachedCase& c) {
  const auto yes_no = [](bool value) { return word(kYesNo, value); };
  std::string line = fmt::format(
      "cache={} seed={} page_size={} keys={} rows={} packed={} heads_q={} heads_kv={} head_dim={} head_dim_v={} "
      "dtype={} float8={} layout={} causal={}",
      word(kTables, c.tables), c.seed, c.page_size, fmt::join(c.keys, ","), fmt::join(c.rows, ","), yes_no(c.packed),
      c.heads_q, c.heads_kv, c.head_dim, c.head_dim_v, word(kDtypes, c.dtype), yes_no(c.float8),
      word(kLayouts, c.layout), yes_no(c.causal));
  const CachedCase usual;
  const auto add = [&line](bool unusual, std::string_view key, const auto& value) {
    if (unusual) line += fmt::format(" {}={}", key, value);
  };
  add(c.shared != 0, "shared", c.shared);
  add(c.bad, "bad", yes_no(c.bad));
  add(c.window != usual.window, "window", fmt::format("{},{}", c.window.left, c.window.right));
  add(c.vectors != 0, "vectors", c.vectors);
  add(c.vectors_by_head, "vectors_by_head", yes_no(c.vectors_by_head));
  add(!c.vectors_by_request, "vectors_by_request", yes_no(c.vectors_by_request));
  add(c.short_columns, "short_columns", yes_no(c.short_columns));
  add(c.key_layout != usual.key_layout, "beside", word(kKeyLayouts, c.key_layout));
  add(c.positions != usual.positions, "positions", word(kPositions, c.positions));
  add(c.tail != 0, "tail", c.tail);
  add(c.tail_lens, "tail_lens", yes_no(c.tail_lens));
  add(c.tail_depth, "tail_depth", yes_no(c.tail_depth));
  add(c.blocks != usual.blocks, "blocks", word(kBlocks, c.blocks));
  add(c.blocks_by_head, "blocks_by_head", yes_no(c.blocks_by_head));
  add(c.sink, "sink", yes_no(c.sink));
  line += describe(c.features, score_features());
  add(c.k_scale != usual.k_scale, "k_scale", word(kScales, c.k_scale));
  add(c.v_scale != usual.v_scale, "v_scale", word(kScales, c.v_scale));
  add(c.given_scale.has_value(), "scale", c.given_scale.value_or(0));
  add(c.split_size != usual.split_size, "split_size", c.split_size);
  add(c.batch_invariant, "batch_invariant", yes_no(c.batch_invariant));
  return line;
}

CachedCase parse_cached_case(std::string_view line) {
  CachedCase c;
  set_all(c, setters(), line);
  check_shapes(c);
  return c;
}

}  // namespace flashmask::verify
