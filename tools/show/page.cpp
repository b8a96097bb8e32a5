// SPDX-License-Identifier: Apache-2.0
#include "show/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "draw/svg_cells.h"
#include "flashmask/inspect.h"
#include "flashmask/plan.h"
#include "flashmask/status.h"
#include "flashmask/tiles.h"
#include "flashmask/version.h"
#include "io/mask_json.h"
#include "show/page_template.h"

namespace flashmask::show {
namespace {

using Json = nlohmann::ordered_json;

/// Up to this many tiles a page knows the class of each, to compare with its own.
constexpr int64_t kMostClasses = 65'536;

template <typename... Arguments>
[[noreturn]] void fail(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format(format, std::forward<Arguments>(arguments)...));
}

void check_size(const Mask& mask, TileShape tile) {
  if (mask.has_block_mask()) fail("a page draws the band and the row intervals; the mask has a block mask, too");
  if (std::ssize(mask.intervals()) / 2 > kMostPageIntervals)
    fail("a page takes at most {} intervals in lists; the mask has {}", kMostPageIntervals,
         std::ssize(mask.intervals()) / 2);
  if (std::max(mask.seqlen_q(), mask.seqlen_k()) > kMostPageLength) {
    fail("a page takes at most {} query rows and keys; the mask has {} and {}", kMostPageLength, mask.seqlen_q(),
         mask.seqlen_k());
  }
  const auto tiles_of = [](int64_t length, int64_t side) { return (length + side - 1) / side; };
  const int64_t tiles = tiles_of(mask.seqlen_q(), tile.rows) * tiles_of(mask.seqlen_k(), tile.keys);
  if (tiles > kMostPageTiles) {
    fail("a page takes at most {} tiles; --tile {}x{} makes {}", kMostPageTiles, tile.rows, tile.keys, tiles);
  }
}

/// The one mask of this batch entry and head.
Mask single_entry(const Mask& mask, int64_t batch, int64_t head) {
  const MaskView& view = mask.view();
  const int64_t b = view.bounds_batch == 1 ? 0 : batch, h = view.bounds_heads == 1 ? 0 : head;
  const auto own = [&](std::span<const int32_t> vector) {
    const auto begin = vector.begin() + (vector.empty() ? 0 : (b * view.bounds_heads + h) * view.seqlen_k);
    return std::vector<int32_t>(begin, begin + (vector.empty() ? 0 : view.seqlen_k));
  };
  MaskParts parts{.seqlen_q = mask.seqlen_q(),
                  .seqlen_k = mask.seqlen_k(),
                  .band = mask.band(),
                  .q_offset = mask.q_offset(),
                  .lts = own(mask.lts()),
                  .lte = own(mask.lte()),
                  .uts = own(mask.uts()),
                  .ute = own(mask.ute())};
  if (mask.has_interval_lists()) {
    const auto ptr =
        mask.column_ptr().subspan(static_cast<std::size_t>((b * view.bounds_heads + h) * (view.seqlen_k + 1)),
                                  static_cast<std::size_t>(view.seqlen_k + 1));
    for (const int32_t place : ptr) parts.column_ptr.push_back(place - ptr.front());
    const auto ends = mask.intervals().subspan(2 * static_cast<std::size_t>(ptr.front()),
                                               2 * static_cast<std::size_t>(ptr.back() - ptr.front()));
    parts.intervals.assign(ends.begin(), ends.end());
  }
  return Mask(std::move(parts));
}

Json colours_json() {
  const auto channels = [](Colour colour) { return Json{colour.red, colour.green, colour.blue}; };
  return {{"skipped", channels(colours::kSkipped)},
          {"partial_hidden", channels(colours::kPartialHidden)},
          {"partial_visible", channels(colours::kPartialVisible)},
          {"full", channels(colours::kFull)}};
}

/// One word of digits for each row of tiles.
Json classes_json(const TileGrid& grid) {
  Json rows = Json::array();
  for (int64_t r = 0; r < grid.row_tiles; ++r) {
    std::string row;
    for (int64_t k = 0; k < grid.key_tiles; ++k) row += static_cast<char>('0' + static_cast<int>(grid.at(r, k)));
    rows.push_back(std::move(row));
  }
  return rows;
}

/// The library's figures of the mask, for the page to compare with its own.
Json library_json(const Mask& mask, TileShape tile) {
  const MaskStatistics s = statistics(mask, tile);
  Json json{
      {"visible", s.visible}, {"partial_tiles", s.partial_tiles}, {"full_tiles", s.full_tiles}, {"classes", nullptr}};
  if (s.tiles <= kMostClasses) json["classes"] = classes_json(classify_tiles(mask, 0, 0, tile));
  const bool is_plan_kernel =
      tile.keys == kGranuleKeys && (tile.rows == 2 * kGranuleRows || tile.rows == 3 * kGranuleRows);
  if (is_plan_kernel) {
    const Plan plan(mask);
    json["row_counts"] = plan.view().row_tile_counts(0, tile.rows / kGranuleRows);
    json["row_order"] = plan.view().row_tile_order(0, tile.rows / kGranuleRows);
  }
  return json;
}

std::string_view definition_of(const PageSource& source) {
  if (!source.is_family) return "";
  for (const Family& family : families()) {
    if (family.name == source.name) return family.definition;
  }
  return "";
}

Json shown_json(const Mask& mask, const DrawOptions& draw, const PageSource& source) {
  return {
      {"version", fmt::format("{}.{}.{}", FLASHMASK_VERSION_MAJOR, FLASHMASK_VERSION_MINOR, FLASHMASK_VERSION_PATCH)},
      {"source", source.name},
      {"family", source.is_family ? Json(source.name) : Json(nullptr)},
      {"definition", definition_of(source)},
      {"seqlen", source.seqlen},
      {"seed", std::to_string(source.seed)},  // JavaScript's numbers would round it
      {"parameters", source.parameters},
      {"tile", {draw.tile.rows, draw.tile.keys}},
      {"most_tiles", kMostPageTiles},
      {"colours", colours_json()},
      {"mask", io::to_json(mask)},
      {"library", library_json(mask, draw.tile)}};
}

/// Text for a script element, which "</script" would end.
std::string script_text(const Json& json) {
  std::string result;
  for (const char c : json.dump(-1, ' ', false, Json::error_handler_t::replace))
    c == '<' ? result += "\\u003c" : result += c;
  return result;
}

}  // namespace

std::string draw_page(const Mask& mask, const DrawOptions& draw, const PageSource& source) {
  check_size(mask, draw.tile);
  const std::string shown = script_text(shown_json(single_entry(mask, draw.batch, draw.head), draw, source));
  const std::size_t mark = kPageTemplate.find(kShownMark);
  return fmt::format("{}{}{}", kPageTemplate.substr(0, mark), shown, kPageTemplate.substr(mark + kShownMark.size()));
}

}  // namespace flashmask::show
