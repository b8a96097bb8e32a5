// SPDX-License-Identifier: Apache-2.0
// SVG drawings: well-formed, small, and their rectangles painted back into elements.
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <vector>

#include "draw/svg_cells.h"
#include "families/families.h"
#include "flashmask/builders.h"
#include "flashmask/draw.h"
#include "support/brute_force.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

/// One element of a parsed document.
struct Element {
  std::string name;
  std::map<std::string, std::string> attributes;
  std::string text;
  int depth = 0;
};

/// Reads XML as an SVG needs it: elements with quoted attributes, text with entities. Adds a failure where it is not
/// well-formed.
class XmlReader {
 public:
  explicit XmlReader(const std::string& source) : source_(source) {
    while (at_ < source_.size() && !failed_) {
      if (source_[at_] == '<') {
        read_tag();
      } else {
        read_text();
      }
    }
    if (!open_.empty()) fail("unclosed " + elements[open_.back()].name);
  }
  std::vector<Element> elements;

 private:
  void fail(const std::string& what) {
    failed_ = true;
    ADD_FAILURE() << "not well-formed at byte " << at_ << ": " << what << "\n"
                  << source_.substr(at_ > 40 ? at_ - 40 : 0, 120);
  }
  std::string until(char end) {
    const std::size_t from = at_;
    at_ = source_.find(end, at_);
    if (at_ == std::string::npos) {
      at_ = source_.size();
      fail(std::string("missing ") + end);
      return {};
    }
    return source_.substr(from, at_++ - from);
  }
  void check_text(const std::string& text) {
    for (std::size_t n = 0; n < text.size(); ++n) {
      if (text[n] != '&') continue;
      const std::string entity = text.substr(n, text.find(';', n) - n + 1);
      if (entity != "&amp;" && entity != "&lt;" && entity != "&gt;" && entity != "&quot;")
        fail("a bare & or unknown entity");
    }
  }
  void read_text() {
    const std::size_t from = at_;
    at_ = std::min(source_.find('<', at_), source_.size());
    const std::string text = source_.substr(from, at_ - from);
    if (text.find('>') != std::string::npos) fail("a bare >");
    check_text(text);
    if (!open_.empty()) {
      elements[open_.back()].text += text;
    } else if (text.find_first_not_of(" \n") != std::string::npos) {
      fail("text outside of the root");
    }
  }
  void read_tag() {
    ++at_;
    std::string tag = until('>');
    if (tag.starts_with("/")) {
      if (open_.empty() || elements[open_.back()].name != tag.substr(1)) return fail("closing " + tag);
      open_.pop_back();
      return;
    }
    const bool closed = tag.ends_with("/");
    if (closed) tag.pop_back();
    Element element{
        .name = tag.substr(0, tag.find(' ')), .attributes = {}, .text = {}, .depth = static_cast<int>(open_.size())};
    std::size_t n = element.name.size();
    while ((n = tag.find_first_not_of(' ', n)) != std::string::npos) {
      const std::size_t equals = tag.find("=\"", n),
                        end = equals == std::string::npos ? equals : tag.find('"', equals + 2);
      if (end == std::string::npos) return fail("attribute of " + element.name);
      const std::string key = tag.substr(n, equals - n), value = tag.substr(equals + 2, end - equals - 2);
      check_text(value);
      if (value.find('<') != std::string::npos || !element.attributes.emplace(key, value).second)
        return fail("attribute " + key);
      n = end + 1;
    }
    if (element.depth == 0 && !elements.empty()) return fail("a second root");
    elements.push_back(element);
    if (!closed) open_.push_back(elements.size() - 1);
  }

  const std::string source_;
  std::size_t at_ = 0;
  bool failed_ = false;
  std::vector<std::size_t> open_;
};

bool contains_text(const XmlReader& svg, const std::string& text) {
  return std::any_of(svg.elements.begin(), svg.elements.end(),
                     [&](const Element& e) { return e.text.find(text) != std::string::npos; });
}

/// The cells painted by the inner drawing: a colour for each, the background's where nothing was painted. Painting a
/// cell twice or one that is not there is a failure.
std::vector<std::string> paint(const XmlReader& svg, int64_t rows, int64_t keys) {
  std::vector<std::string> colour(static_cast<std::size_t>(rows * keys), hex(colours::kSkipped));
  std::vector<bool> painted(colour.size());
  for (const Element& element : svg.elements) {
    if (element.name != "path" || element.depth != 2) continue;
    std::istringstream path(element.attributes.at("d"));
    char command = 0;
    for (int64_t key = 0, row = 0, width = 0, height = 0, back = 0; path >> command;) {
      EXPECT_EQ(command, 'M');
      path >> key >> row >> command >> width;
      EXPECT_EQ(command, 'h');
      path >> command >> height;
      EXPECT_EQ(command, 'v');
      path >> command >> back;
      EXPECT_EQ(command, 'h');
      EXPECT_EQ(back, -width);
      for (int64_t r = row; r < row + height; ++r) {
        for (int64_t k = key; k < key + width; ++k) {
          if (r < 0 || r >= rows || k < 0 || k >= keys || painted[static_cast<std::size_t>(r * keys + k)]) {
            ADD_FAILURE() << "cell " << r << ", " << k << " is outside or painted twice";
            return colour;
          }
          painted[static_cast<std::size_t>(r * keys + k)] = true;
          colour[static_cast<std::size_t>(r * keys + k)] = element.attributes.at("fill");
        }
      }
    }
  }
  return colour;
}

TEST(DrawSvg, ElementsHaveTheColourOfTheirTile) {
  Random random(1);
  for (int64_t n = 0; n < scaled(150); ++n) {
    const MaskParts parts = random_parts(random, random_kind(random), random.integer(1, 90), random.integer(1, 90),
                                         random.integer(1, 2), random.integer(1, 2));
    const Mask mask(parts);
    const DrawOptions options{.batch = random.integer(0, mask.batch() - 1),
                              .head = random.integer(0, mask.heads() - 1),
                              .tile = {random.integer(1, 40), random.integer(1, 40)}};
    const auto all = dense_by_rule(parts);
    const Dense dense = matrix(all, options.batch * mask.heads() + options.head, mask.seqlen_q(), mask.seqlen_k());
    const XmlReader svg(draw_svg(mask, options));
    const auto colour = paint(svg, mask.seqlen_q(), mask.seqlen_k());
    for (int64_t i = 0; i < mask.seqlen_q(); ++i) {
      for (int64_t j = 0; j < mask.seqlen_k(); ++j) {
        const TileClass tile = class_of(dense, options.tile, i / options.tile.rows, j / options.tile.keys);
        const Colour expected = tile == TileClass::kFull    ? colours::kFull
                                : tile == TileClass::kEmpty ? colours::kSkipped
                                : dense.at(i, j)            ? colours::kPartialVisible
                                                            : colours::kPartialHidden;
        ASSERT_EQ(colour[static_cast<std::size_t>(i * mask.seqlen_k() + j)], hex(expected))
            << "case " << n << " (" << i << ", " << j << ")";
      }
    }
    if (HasFailure()) FAIL() << "case " << n;
  }
}

TEST(DrawSvg, DownsampledCells) {
  // Two documents of 1024 at 256 cells of 8 x 8: away from the diagonal and the tiles' edges cells are of one kind.
  const Mask mask = make_family("causal_document", 2048, {{"lengths", "1024,1024"}});
  const XmlReader svg(draw_svg(mask));
  EXPECT_TRUE(contains_text(svg, "8 × 8 elements"));
  const auto colour = paint(svg, 256, 256);
  const auto at = [&](std::size_t row, std::size_t key) { return colour[row * 256 + key]; };
  EXPECT_EQ(at(100, 10), hex(colours::kFull));
  EXPECT_EQ(at(10, 100), hex(colours::kSkipped));
  EXPECT_EQ(at(200, 10), hex(colours::kSkipped)) << "another document";
  EXPECT_EQ(at(200, 140), hex(colours::kFull));
  EXPECT_EQ(at(15, 0), hex(colours::kPartialVisible)) << "the visible corner of a tile on the diagonal";
  EXPECT_EQ(at(0, 15), hex(colours::kPartialHidden)) << "its hidden corner";
}

TEST(DrawSvg, ATraceStaysVisible) {
  // One visible element in 2^22: its cell is not the background's colour.
  MaskParts parts{.seqlen_q = 2048, .seqlen_k = 2048, .lts = std::vector<int32_t>(2048, 0)};
  parts.lts[777] = 1;
  const XmlReader svg(draw_svg(Mask(parts), {.tile = {8, 8}}));
  const auto colour = paint(svg, 256, 256);
  EXPECT_NE(colour[777 / 8], hex(colours::kSkipped));
  EXPECT_NE(colour[777 / 8], hex(colours::kPartialHidden));
  EXPECT_EQ(colour[777 / 8 + 1], hex(colours::kSkipped));
}

TEST(DrawSvg, EveryFamilyAtEveryLengthIsWellFormedAndSmall) {
  for (const Family& family : families()) {
    for (const int64_t seqlen : {0, 1, 8, 100, 300, 5000, 1 << 17}) {
      const std::string source = draw_svg(make_family(family.name, seqlen, {}, 2));
      EXPECT_LT(source.size(), 300'000u) << family.name << " " << seqlen;
      const XmlReader svg(source);
      if (HasFailure()) FAIL() << family.name << " " << seqlen;
      EXPECT_EQ(svg.elements[0].name, "svg");
      EXPECT_EQ(svg.elements[0].attributes.at("xmlns"), "http://www.w3.org/2000/svg");
      for (const Element& element : svg.elements) {
        EXPECT_NE(element.name, "script");
        EXPECT_FALSE(element.attributes.contains("href")) << "self-contained";
      }
      EXPECT_EQ(source.find("nan"), std::string::npos) << family.name << " " << seqlen;
      EXPECT_EQ(source.find("inf"), std::string::npos) << family.name << " " << seqlen;
    }
  }
}

TEST(DrawSvg, AMillionTokens) {
  const std::string source = draw_svg(make_family("causal_document", 1 << 20, {}, 1));
  EXPECT_LT(source.size(), 300'000u);
  const XmlReader svg(source);
  EXPECT_TRUE(contains_text(svg, "1,048,576 query rows × 1,048,576 keys"));
  EXPECT_TRUE(contains_text(svg, "4,096 × 4,096 elements"));
}

TEST(DrawSvg, IrregularMasksStaySmall) {
  Random random(3);
  for (const int64_t seqlen : {300, 3000}) {
    for (const int64_t max_cells : {0, 256, 1024}) {
      MaskParts parts{.seqlen_q = seqlen, .seqlen_k = seqlen};
      draw_columns(random, ColumnKind::kFourBounds, parts);
      const std::string source = draw_svg(Mask(parts), {.tile = {1, 1}, .max_cells = max_cells});
      EXPECT_LT(source.size(), 300'000u) << seqlen << " " << max_cells;
      XmlReader svg(source);
    }
  }
}

TEST(DrawSvg, TheLegendSaysTheStatistics) {
  const Mask mask = make_family("causal_document", 2048, {{"lengths", "1024,1024"}});
  const XmlReader svg(draw_svg(mask));
  for (const std::string text : {"2,048 query rows × 2,048 keys", "j ≤ i, 1 hidden interval per key",
                                 "tiles of 128 × 128", "256", "184", "71.9 %", "25.0 %"}) {
    EXPECT_TRUE(contains_text(svg, text)) << text;
  }
  EXPECT_TRUE(contains_text(
      svg, "visible 1,049,600 of 4,194,304 elements; 256 tiles of 128 × 128: 184 skipped, 16 partial, 56 full"));
}

TEST(DrawSvg, UnequalSides) {
  for (const auto& [q, k] : {std::pair<int64_t, int64_t>{1, 1}, {1, 5000}, {5000, 1}, {100, 1000000}, {0, 7}, {7, 0}}) {
    const std::string source = draw_svg(masks::causal(q, k));
    EXPECT_LT(source.size(), 300'000u);
    XmlReader svg(source);
    if (q == 0 || k == 0) {
      EXPECT_TRUE(contains_text(svg, "no elements"));
    }
  }
}

}  // namespace
}  // namespace flashmask::test
