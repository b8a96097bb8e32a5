// SPDX-License-Identifier: Apache-2.0
#include "show/ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <numbers>
#include <utility>
#include <vector>

#include "draw/svg_markup.h"
#include "draw/words.h"
#include "flashmask/tiles.h"

namespace flashmask::show {
namespace {

/// Bytes of a key and its value in one head of this size, in 16-bit elements.
constexpr int64_t kHeadDim = 128, kKeyBytes = 2 * kHeadDim * 2;
constexpr std::size_t kMostSegments = 4;
constexpr int64_t kMostCells = 128;  // a side
// Pixels.
constexpr double kLeft = 72, kTop = 92, kSize = 512, kGap = 40, kBars = 300, kBar = 14, kLine = 22, kMargin = 28;
constexpr std::string_view kFaded = "#66727f", kFrame = "#9aa5b1";

struct Share {
  int64_t rows = 0, live_tiles = 0, received = 0;
  std::vector<RowSegment> segments;
};

std::vector<Share> shares(const Placement& p) {
  std::vector<Share> result;
  for (int64_t r = 0; r < p.ranks; ++r) {
    const auto at = static_cast<std::size_t>(r);
    Share share{.live_tiles = p.live_tiles[at], .received = p.received[at], .segments = p.segments(r)};
    for (const RowSegment& segment : share.segments) share.rows += segment.end - segment.begin;
    result.push_back(std::move(share));
  }
  return result;
}

double mean_load(const std::vector<Share>& all) {
  int64_t sum = 0;
  for (const Share& share : all) sum += share.live_tiles;
  return static_cast<double>(sum) / static_cast<double>(all.size());
}

/// A share's load relative to the mean; 1 if nobody has anything to do.
double load(const Share& share, double mean) { return mean > 0 ? static_cast<double>(share.live_tiles) / mean : 1; }

double largest_load(const std::vector<Share>& all) {
  double most = 0;
  for (const Share& share : all) most = std::max(most, load(share, mean_load(all)));
  return most;
}

std::string segments_text(const std::vector<RowSegment>& segments) {
  std::string text;
  for (std::size_t n = 0; n < std::min(segments.size(), kMostSegments); ++n)
    text += fmt::format(" [{}, {})", segments[n].begin, segments[n].end);
  if (segments.size() > kMostSegments) text += fmt::format(" and {} more", segments.size() - kMostSegments);
  return text;
}

/// Ranks next to each other get hues far apart.
Colour rank_colour(int64_t rank, double lightness) {
  const double hue = std::fmod(static_cast<double>(rank) * std::numbers::phi, 1) * 6, chroma = 0.62;
  const auto channel = [&](double shift) {
    const double k = std::fmod(hue + shift, 6);
    const double part = std::clamp(std::abs(k - 3) - 1, 0.0, 1.0);
    return static_cast<int>(std::lround(255 * std::clamp(lightness + chroma * (part - 0.5) * (1 - lightness), 0., 1.)));
  };
  return {channel(0), channel(4), channel(2)};
}

/// Rows and keys of a cell: whole units, so that few cells hold rows of two ranks.
int64_t cell_side(const Placement& p) {
  int64_t side = p.unit;
  while (side * kMostCells < p.seqlen) side += p.unit;
  return side;
}

std::string cells(const Mask& mask, const Placement& p, const DrawOptions& draw) {
  const int64_t side = cell_side(p);
  const TileGrid grid = classify_tiles(mask, draw.batch, draw.head, {side, side});
  const double scale = kSize / static_cast<double>(std::max<int64_t>(p.seqlen, 1));
  std::string text;
  for (int64_t r = 0; r < grid.row_tiles; ++r) {
    const int64_t owner = p.owner[static_cast<std::size_t>((r * side) / p.unit)];
    const int64_t rows = std::min(side, p.seqlen - r * side);
    for (int64_t k = 0; k < grid.key_tiles;) {
      const TileClass kind = grid.at(r, k);
      const int64_t begin = k;
      while (k < grid.key_tiles && grid.at(r, k) == kind) ++k;
      if (kind == TileClass::kEmpty) continue;
      const double width = static_cast<double>(std::min(k * side, p.seqlen) - begin * side) * scale;
      text += rectangle_at(kLeft + static_cast<double>(begin * side) * scale,
                           kTop + static_cast<double>(r * side) * scale, width, static_cast<double>(rows) * scale,
                           markup("fill=\"", hex(rank_colour(owner, kind == TileClass::kFull ? 0.45 : 0.65)), "\""));
    }
  }
  return text;
}

/// Beside the rows: whose they are, and whose keys the columns are, above them.
std::string owners(const Placement& p) {
  const double scale = kSize / static_cast<double>(std::max<int64_t>(p.seqlen, 1));
  std::string text;
  for (int64_t r = 0; r < p.ranks; ++r) {
    const std::string fill = markup("fill=\"", hex(rank_colour(r, 0.45)), "\"");
    for (const RowSegment& segment : p.segments(r)) {
      const double at = static_cast<double>(segment.begin) * scale;
      const double length = static_cast<double>(segment.end - segment.begin) * scale;
      text +=
          rectangle_at(kLeft - 12, kTop + at, 8, length, fill) + rectangle_at(kLeft + at, kTop - 12, length, 8, fill);
      if (length >= 12)
        text += text_at(kLeft - 18, kTop + at + length / 2 + 4, fmt::format("{}", r),
                        {.anchor = "end", .colour = kFaded, .size = 11});
    }
  }
  return text;
}

std::string bars(const Placement& p) {
  const std::vector<Share> all = shares(p);
  const double left = kLeft + kSize + kGap, mean = mean_load(all), most = std::max(largest_load(all), 1.0);
  const double half = kBars / 2 - 20;
  int64_t most_received = 1;
  for (const Share& share : all) most_received = std::max(most_received, share.received);
  std::string text = text_at(left + 24, kTop - 4, "load", {.bold = true}) +
                     text_at(left + kBars / 2 + 24, kTop - 4, "received keys", {.bold = true});
  for (std::size_t r = 0; r < all.size(); ++r) {
    const double y = kTop + 10 + kLine * static_cast<double>(r);
    const std::string fill = markup("fill=\"", hex(rank_colour(static_cast<int64_t>(r), 0.6)), "\"");
    const auto bar = [&](double x, double share, const std::string& word) {
      text += rectangle_at(x, y, share * (half - 24), kBar, fill) + text_at(x + 4, y + 11, word, {.size = 11});
    };
    text += text_at(left + 16, y + 11, fmt::format("{}", r), {.anchor = "end", .colour = kFaded, .size = 11});
    bar(left + 24, load(all[r], mean) / most, fmt::format("{:.3f}", load(all[r], mean)));
    bar(left + kBars / 2 + 24, static_cast<double>(all[r].received) / static_cast<double>(most_received),
        grouped(all[r].received));
  }
  return text;
}

}  // namespace

std::string ranks_text(const Placement& p) {
  const std::vector<Share> all = shares(p);
  std::string text = fmt::format(
      "{} ranks: largest load {:.3f} of the mean\n"
      "bytes are those of one head's k and v with head dim {} and 16-bit elements, forward\n"
      "rank     rows  live tiles   load   received keys       bytes  segments\n",
      p.ranks, largest_load(all), kHeadDim);
  for (std::size_t r = 0; r < all.size(); ++r) {
    text += fmt::format("{:>4} {:>8} {:>11} {:>6.3f} {:>15} {:>11} {}\n", r, all[r].rows, all[r].live_tiles,
                        load(all[r], mean_load(all)), all[r].received, all[r].received * kKeyBytes,
                        segments_text(all[r].segments));
  }
  return text;
}

nlohmann::ordered_json ranks_json(const Placement& p) {
  using Json = nlohmann::ordered_json;
  const std::vector<Share> all = shares(p);
  Json ranks = Json::array();
  for (const Share& share : all) {
    Json segments = Json::array();
    for (const RowSegment& segment : share.segments) segments.push_back({segment.begin, segment.end});
    ranks.push_back({{"rows", share.rows},
                     {"live_tiles", share.live_tiles},
                     {"received_keys", share.received},
                     {"segments", std::move(segments)}});
  }
  return {{"unit", p.unit}, {"largest_load", largest_load(all)}, {"ranks", std::move(ranks)}};
}

std::string draw_ranks(const Mask& mask, const Placement& p, const DrawOptions& draw) {
  const double width = kLeft + kSize + kGap + kBars + kMargin;
  const double height = kTop + std::max(kSize, 10 + kLine * static_cast<double>(p.ranks)) + kMargin;
  const std::string title = fmt::format("{} rows on {} ranks", grouped(p.seqlen), p.ranks);
  return markup("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", width, "\" height=\"", height,
                "\" viewBox=\"0 0 ", width, " ", height,
                "\" role=\"img\" font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, "
                "sans-serif\">\n<title>",
                escaped(title), "</title>\n<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#fff\"/>\n",
                text_at(kLeft, 34, title, {.size = 16, .bold = true}),
                text_at(kLeft, 54,
                        fmt::format("largest load {:.3f} of the mean; the colour is the rank that computes a tile and "
                                    "that holds the rows and keys beside it",
                                    largest_load(shares(p))),
                        {.colour = kFaded}),
                rectangle_at(kLeft, kTop, kSize, kSize, "fill=\"#e8ecf1\""), cells(mask, p, draw), owners(p),
                rectangle_at(kLeft, kTop, kSize, kSize, markup("fill=\"none\" stroke=\"", kFrame, "\"")), bars(p),
                "</svg>\n");
}

}  // namespace flashmask::show
