// SPDX-License-Identifier: Apache-2.0
// Text drawings: read back cell by cell and compared with the elements they stand for.
#include <gtest/gtest.h>

#include <locale>
#include <sstream>

#include "families/families.h"
#include "flashmask/builders.h"
#include "flashmask/draw.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// The characters of UTF-8 text.
std::vector<std::string> characters(const std::string& text) {
  std::vector<std::string> all;
  for (const char c : text) {
    if ((static_cast<unsigned char>(c) & 0xc0) != 0x80) all.emplace_back();
    all.back() += c;
  }
  return all;
}

/// The cells of a drawing, two characters each, row by row: what stands right of the frame.
std::vector<std::vector<std::string>> cells_of(const std::string& drawing) {
  std::vector<std::vector<std::string>> rows;
  for (const std::string& line : lines_of(drawing)) {
    for (const std::string frame : {"│", "├"}) {
      const std::size_t at = line.find(frame);
      if (at == std::string::npos) continue;
      const std::vector<std::string> row = characters(line.substr(at + frame.size()));
      rows.emplace_back();
      for (std::size_t n = 0; n < row.size(); n += 2)
        rows.back().push_back(row[n] + (n + 1 < row.size() ? row[n + 1] : " "));
      break;
    }
  }
  return rows;
}

/// "a cell is 16 x 32 elements" -> {16, 32}; {1, 1} where cells are elements.
TileShape cell_of(const std::string& drawing) {
  const std::string before = "a cell is ";
  const std::size_t at = drawing.find(before);
  if (at == std::string::npos) return {1, 1};
  std::string text = drawing.substr(at + before.size(), drawing.find(" elements", at) - at - before.size());
  std::erase(text, ',');
  TileShape cell;
  char x = 0;
  std::istringstream(text) >> cell.rows >> x >> cell.keys;
  EXPECT_EQ(x, 'x') << text;
  return cell;
}

std::string symbol_of(int64_t visible, int64_t elements, bool element) {
  if (element) return visible ? "■ " : "⬚ ";
  if (visible == 0) return "··";
  if (visible == elements) return "██";
  if (3 * visible < elements) return "░░";
  return 3 * visible < 2 * elements ? "▒▒" : "▓▓";
}

/// Every cell of the drawing of (batch, head) against the elements of its rectangle.
void expect_drawing(const Mask& mask, const std::vector<uint8_t>& dense, const DrawOptions& options,
                    const std::string& what) {
  const std::string drawing = draw_text(mask, options);
  const TileShape cell = cell_of(drawing);
  const auto cells = cells_of(drawing);
  const int64_t rows = (mask.seqlen_q() + cell.rows - 1) / cell.rows,
                keys = (mask.seqlen_k() + cell.keys - 1) / cell.keys;
  const int64_t most = options.max_cells ? options.max_cells : 64;
  ASSERT_LE(std::max(rows, keys), most) << what;
  ASSERT_EQ(static_cast<int64_t>(cells.size()), rows) << what << "\n" << drawing;
  const auto* matrix = dense.data() + (options.batch * mask.heads() + options.head) * mask.seqlen_q() * mask.seqlen_k();
  for (int64_t r = 0; r < rows; ++r) {
    ASSERT_EQ(static_cast<int64_t>(cells[static_cast<std::size_t>(r)].size()), keys) << what << "\n" << drawing;
    for (int64_t k = 0; k < keys; ++k) {
      int64_t visible = 0, elements = 0;
      for (int64_t i = r * cell.rows; i < std::min((r + 1) * cell.rows, mask.seqlen_q()); ++i) {
        for (int64_t j = k * cell.keys; j < std::min((k + 1) * cell.keys, mask.seqlen_k()); ++j) {
          visible += matrix[i * mask.seqlen_k() + j];
          ++elements;
        }
      }
      ASSERT_EQ(cells[static_cast<std::size_t>(r)][static_cast<std::size_t>(k)],
                symbol_of(visible, elements, cell == TileShape{1, 1}))
          << what << " cell " << r << ", " << k << "\n"
          << drawing;
    }
  }
}

TEST(DrawText, CausalOfEight) {
  EXPECT_EQ(draw_text(masks::causal(8, 8)),
            "      key j\n"
            "row i  0       4\n"
            "      ┌────────────────\n"
            "    0 │■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚\n"
            "      │■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚\n"
            "      │■ ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚\n"
            "      │■ ■ ■ ■ ⬚ ⬚ ⬚ ⬚\n"
            "    4 │■ ■ ■ ■ ■ ⬚ ⬚ ⬚\n"
            "      │■ ■ ■ ■ ■ ■ ⬚ ⬚\n"
            "      │■ ■ ■ ■ ■ ■ ■ ⬚\n"
            "      │■ ■ ■ ■ ■ ■ ■ ■\n"
            "■ visible  ⬚ hidden\n"
            "8 query rows x 8 keys; j ≤ i; no hidden intervals\n"
            "visible 36 of 64 elements (56.2 %)\n"
            "1 tile of 128 x 128: 0 skipped (0 %), 1 partial (100 %), 0 full (0 %)\n"
            "FLOPs saved against a dense mask: 0 %\n");
}

TEST(DrawText, SmallMasksElementByElement) {
  Random random(1);
  for (int64_t n = 0; n < scaled(200); ++n) {
    const MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 64), random.integer(1, 64),
                                         random.integer(1, 2), random.integer(1, 2));
    const Mask mask(parts);
    const DrawOptions options{.batch = random.integer(0, mask.batch() - 1),
                              .head = random.integer(0, mask.heads() - 1),
                              .tile = {random.integer(1, 70), random.integer(1, 70)}};
    EXPECT_EQ(cell_of(draw_text(mask, options)), (TileShape{1, 1}));
    expect_drawing(mask, dense_by_rule(parts), options, "case " + std::to_string(n));
    if (HasFatalFailure()) return;
  }
}

TEST(DrawText, DownsampledCellsShowTheirShare) {
  Random random(2);
  for (int64_t n = 0; n < scaled(150); ++n) {
    MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 700), random.integer(1, 700), 1,
                                   random.integer(1, 2));
    if (random.integer(0, 2) == 0) draw_block_mask(random, 1, 2, parts);
    const Mask mask(parts);
    const TileShape tile = random.flip() ? TileShape{} : TileShape{random.integer(1, 200), random.integer(1, 200)};
    expect_drawing(mask, dense_by_rule(parts),
                   {.head = random.integer(0, mask.heads() - 1), .tile = tile, .max_cells = random.integer(0, 90)},
                   "case " + std::to_string(n));
    if (HasFatalFailure()) return;
  }
}

TEST(DrawText, ReadableFromEightToAMillion) {
  for (const std::string name : {"causal", "causal_document", "global_sliding_window", "random_eviction"}) {
    for (const int64_t seqlen : {8, 100, 1000, 1 << 13, 1 << 17, 1 << 20}) {
      const auto lines = lines_of(draw_text(make_family(name, seqlen, {}, 1)));
      EXPECT_LE(lines.size(), 64u + 8u) << name << " " << seqlen;
      EXPECT_GE(lines.size(), std::min<std::size_t>(static_cast<std::size_t>(seqlen), 32)) << name << " " << seqlen;
      // The picture and its legend fit a wide terminal.
      for (const std::string& line : lines) EXPECT_LE(characters(line).size(), 150u) << line;
    }
  }
}

TEST(DrawText, TheShorterSideIsNeverThin) {
  for (const auto& [q, k] : {std::pair<int64_t, int64_t>{100, 1000000}, {1000000, 100}, {3, 100000}}) {
    const std::string drawing = draw_text(masks::full(q, k));
    const TileShape cell = cell_of(drawing);
    // An eighth of the 64 cells; that a cell may not cross a tile's edge costs less than half of them.
    EXPECT_GT(2 * ((q + cell.rows - 1) / cell.rows), std::min<int64_t>(q, 8)) << drawing;
    EXPECT_GT(2 * ((k + cell.keys - 1) / cell.keys), std::min<int64_t>(k, 8)) << drawing;
  }
}

TEST(DrawText, TheLegendSaysTheStatistics) {
  const std::string text = draw_text(make_family("causal_document", 2048, {{"lengths", "1024,1024"}}));
  for (const std::string part : {"2,048 query rows x 2,048 keys", "j ≤ i", "1 hidden interval per key",
                                 "visible 1,049,600 of 4,194,304 elements (25.0 %)",
                                 "256 tiles of 128 x 128: 184 skipped (71.9 %), 16 partial (6.2 %), 56 full (21.9 %)",
                                 "FLOPs saved against a dense mask: 71.9 %"}) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in\n" << text;
  }
  const std::string window = draw_text(masks::sliding_window(10, 14, 3, 2));
  EXPECT_NE(window.find("i + 1 ≤ j ≤ i + 6"), std::string::npos) << window;
  const std::string full = draw_text(masks::full(10, 10));
  EXPECT_NE(full.find("no band"), std::string::npos) << full;
  const Mask heads({.seqlen_q = 4,
                    .seqlen_k = 4,
                    .heads = 2,
                    .lts = std::vector<int32_t>(8, 4),
                    .uts = std::vector<int32_t>(8, 4),
                    .block_mask = {1}});
  const std::string second = draw_text(heads, {.head = 1});
  EXPECT_NE(second.find("head 1 of 2"), std::string::npos) << second;
  EXPECT_NE(second.find("2 hidden intervals per key, block mask"), std::string::npos) << second;
}

TEST(DrawText, AlmostAllIsNotAll) {
  // One element of 2^20 hidden, or visible: never 0 % or 100 %.
  const int64_t n = 1024;
  MaskParts parts{
      .seqlen_q = n, .seqlen_k = n, .lts = std::vector<int32_t>(1024, 5), .lte = std::vector<int32_t>(1024, 5)};
  parts.lte[7] = 6;
  const std::string almost = draw_text(Mask(parts));
  EXPECT_NE(almost.find("visible 1,048,575 of 1,048,576 elements (>99.9 %)"), std::string::npos) << almost;
  for (int32_t& end : parts.lte) end = 0;
  for (int32_t& start : parts.lts) start = 0;
  parts.lte.assign(1024, 1024);
  parts.lts[7] = 1;
  const std::string one = draw_text(Mask(parts));
  EXPECT_NE(one.find("visible 1 of 1,048,576 elements (<0.1 %)"), std::string::npos) << one;
}

TEST(DrawText, Empty) {
  for (const auto& [q, k] : {std::pair<int64_t, int64_t>{0, 0}, {0, 5}, {5, 0}}) {
    const std::string text = draw_text(masks::causal(q, k));
    EXPECT_NE(text.find("no elements"), std::string::npos) << text;
    EXPECT_NE(text.find("0 of 0 elements"), std::string::npos) << text;
  }
}

/// Numbers with dots between the digits and a comma before decimals.
struct OtherNumbers : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(DrawText, DoesNotDependOnTheLocale) {
  const Mask mask = make_family("causal_document", 5000, {}, 1);
  const std::string text = draw_text(mask), svg = draw_svg(mask);
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new OtherNumbers));
  const std::string other_text = draw_text(mask), other_svg = draw_svg(mask);
  std::locale::global(before);
  EXPECT_EQ(other_text, text);
  EXPECT_EQ(other_svg, svg);
}

TEST(DrawErrors, Options) {
  const Mask mask({.seqlen_q = 4, .seqlen_k = 1, .batch = 2, .heads = 3, .lts = {1, 1, 1, 1, 1, 1}});
  for (const auto draw : {+[](const Mask& m, const DrawOptions& o) { draw_text(m, o); },
                          +[](const Mask& m, const DrawOptions& o) { draw_svg(m, o); }}) {
    expect_invalid({"batch 2", "[2, 3]"}, [&] { draw(mask, {.batch = 2}); });
    expect_invalid({"batch -1", "[2, 3]"}, [&] { draw(mask, {.batch = -1}); });
    expect_invalid({"head 3", "[2, 3]"}, [&] { draw(mask, {.head = 3}); });
    expect_invalid({"head -1", "[2, 3]"}, [&] { draw(mask, {.head = -1}); });
    expect_invalid({"tile is 0x128", "at least 1"}, [&] { draw(mask, {.tile = {0, 128}}); });
    expect_invalid({"tile is 128x-1", "at least 1"}, [&] { draw(mask, {.tile = {128, -1}}); });
    expect_invalid({"max_cells is -1", "4096"}, [&] { draw(mask, {.max_cells = -1}); });
    expect_invalid({"max_cells is 4097", "4096"}, [&] { draw(mask, {.max_cells = 4097}); });
    EXPECT_NO_THROW(draw(mask, {.batch = 1, .head = 2, .max_cells = 4096}));
    EXPECT_NO_THROW(draw(mask, {.max_cells = 1}));
  }
}

}  // namespace
}  // namespace flashmask::test
