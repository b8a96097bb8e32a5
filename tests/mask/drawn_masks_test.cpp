// SPDX-License-Identifier: Apache-2.0
// Masks drawn by hand. Each drawing is what the contract's words say about the parts beside it; nothing here
// was computed by the library or by another rule of the tests.
#include <gtest/gtest.h>

#include "flashmask/mask.h"
#include "flashmask/tiles.h"
#include "support/brute_force.h"
#include "support/drawn_mask.h"
#include "support/independent_rule.h"

namespace flashmask::test {
namespace {

struct Drawn {
  std::string name;
  MaskParts parts;
  std::vector<std::string> rows;
  bool causal;                  // as the smallest startend_row_indices has it
  int64_t vectors;              // 1, 2 or 4
  std::vector<int32_t> values;  // [seqlen_k, vectors]
};

const std::vector<Drawn>& drawn_masks() {
  static const std::vector<Drawn> all = {
      {"causal",
       {.seqlen_q = 5, .seqlen_k = 5, .band = Band::causal()},
       {"#....", "##...", "###..", "####.", "#####"},
       true,
       1,
       {5, 5, 5, 5, 5}},
      {"full", {.seqlen_q = 2, .seqlen_k = 4}, {"####", "####"}, false, 2, {2, 0, 2, 0, 2, 0, 2, 0}},
      {"causal documents of 3 and 2 tokens",
       {.seqlen_q = 5, .seqlen_k = 5, .band = Band::causal(), .lts = {3, 3, 3, 5, 5}},
       {"#....", "##...", "###..", "...#.", "...##"},
       true,
       1,
       {3, 3, 3, 5, 5}},
      {"causal blockwise, two examples and a test example of 2 tokens each",
       {.seqlen_q = 6, .seqlen_k = 6, .band = Band::causal(), .lts = {2, 2, 4, 4, 6, 6}, .lte = {4, 4, 4, 4, 6, 6}},
       {"#.....", "##....", "..#...", "..##..", "#####.", "######"},
       true,
       2,
       {2, 4, 2, 4, 6, 6, 6, 6, 6, 6, 6, 6}},
      {"documents of 2 and 3 tokens, both directions",
       {.seqlen_q = 5, .seqlen_k = 5, .lts = {2, 2, 5, 5, 5}, .ute = {0, 0, 2, 2, 2}},
       {"##...", "##...", "..###", "..###", "..###"},
       false,
       2,
       {2, 0, 2, 0, 5, 2, 5, 2, 5, 2}},
      {"one global token and a window of one to either side",
       {.seqlen_q = 7,
        .seqlen_k = 7,
        .lts = {7, 3, 4, 5, 6, 7, 7},
        .lte = {7, 7, 7, 7, 7, 7, 7},
        .uts = {0, 1, 1, 1, 1, 1, 1},
        .ute = {0, 1, 1, 2, 3, 4, 5}},
       {"#######", "###....", "####...", "#.###..", "#..###.", "#...###", "#....##"},
       false,
       4,
       {7, 7, 0, 0, 3, 7, 0, 0, 4, 7, 0, 0, 5, 7, 1, 2, 6, 7, 1, 3, 7, 7, 1, 4, 7, 7, 1, 5}},
      {"causal with fewer rows than keys: the last rows meet the last keys",
       {.seqlen_q = 3, .seqlen_k = 5, .band = Band::causal()},
       {"###..", "####.", "#####"},
       true,
       1,
       {3, 3, 3, 3, 3}},
      {"causal with more rows than keys: the first rows see nothing",
       {.seqlen_q = 5, .seqlen_k = 3, .band = Band::causal()},
       {"...", "...", "#..", "##.", "###"},
       true,
       1,
       {5, 5, 5}},
      {"window of one key to the left: two visible keys a row",
       {.seqlen_q = 5, .seqlen_k = 5, .band = Band::window(1, 0)},
       {"#....", "##...", ".##..", "..##.", "...##"},
       true,
       1,
       {2, 3, 4, 5, 5}},
      {"window of one key to either side, fewer rows than keys",
       {.seqlen_q = 4, .seqlen_k = 6, .band = Band::window(1, 1)},
       {".###..", "..###.", "...###", "....##"},
       false,
       2,
       {0, 0, 1, 0, 2, 0, 3, 0, 4, 1, 4, 2}},
      {"window without a left edge, one to the right",
       {.seqlen_q = 4, .seqlen_k = 4, .band = Band::window(-1, 1)},
       {"##..", "###.", "####", "####"},
       false,
       2,
       {4, 0, 4, 0, 4, 1, 4, 2}},
      {"window of nothing to the left and all to the right",
       {.seqlen_q = 4, .seqlen_k = 4, .band = Band::window(0, -1)},
       {"####", ".###", "..##", "...#"},
       false,
       2,
       {1, 0, 2, 0, 3, 0, 4, 0}},
      {"causal from the top left: q_offset 0 with fewer rows than keys",
       {.seqlen_q = 3, .seqlen_k = 5, .band = Band::causal(), .q_offset = 0},
       {"#....", "##...", "###.."},
       true,
       2,
       {3, 3, 0, 1, 0, 2, 1, 3, 2, 3}},
      {"causal, each row one position earlier: q_offset -1",
       {.seqlen_q = 4, .seqlen_k = 4, .band = Band::causal(), .q_offset = -1},
       {"....", "#...", "##..", "###."},
       true,
       2,
       {0, 1, 1, 2, 2, 3, 3, 4}},
      {"intervals that overlap, are reversed, out of range or in the other order",
       {.seqlen_q = 6,
        .seqlen_k = 4,
        .lts = {1, 4, -7, 5},
        .lte = {4, 2, 1, 5},
        .uts = {3, 0, 4, 6},
        .ute = {5, 1, 99, -1}},
       {"#..#", ".###", ".###", ".###", ".#.#", "##.#"},
       false,
       4,
       {1, 5, 0, 0, 6, 6, 0, 1, 4, 6, 0, 1, 6, 6, 0, 0}},
      {"window and intervals, more rows than keys",
       {.seqlen_q = 6, .seqlen_k = 4, .band = Band::window(2, 0), .lts = {3, 6, 5, 6}},
       {"....", "....", "#...", ".#..", ".##.", ".#.#"},
       true,
       1,
       {3, 6, 5, 6}},
      {"an end without a start and a start without an end",
       {.seqlen_q = 4, .seqlen_k = 3, .lte = {1, 0, 2}, .uts = {4, 3, 2}},
       {".#.", "##.", "##.", "#.."},
       false,
       2,
       {4, 1, 3, 0, 0, 0}},
      {"nothing visible", {.seqlen_q = 3, .seqlen_k = 3, .lts = {0, 0, 0}}, {"...", "...", "..."}, true, 1, {0, 1, 2}},
      {"prefix tree: a root, a child, another child with a child of its own",
       {.seqlen_q = 4, .seqlen_k = 4, .band = Band::causal(), .lts = {4, 2, 4, 4}},
       {"#...", "##..", "#.#.", "#.##"},
       true,
       1,
       {4, 2, 4, 4}},
      {"prefix of two tokens seen by all, causal after it",
       {.seqlen_q = 4, .seqlen_k = 4, .ute = {0, 0, 2, 3}},
       {"##..", "##..", "###.", "####"},
       false,
       2,
       {4, 0, 4, 0, 4, 2, 4, 3}},
      {"an empty band: the left edge is right of the right edge",
       {.seqlen_q = 2, .seqlen_k = 3, .band = {.lo = 1, .hi = 0}},
       {"...", "..."},
       true,
       1,
       {0, 0, 1}},
      {"one row, one key", {.seqlen_q = 1, .seqlen_k = 1, .band = Band::causal()}, {"#"}, true, 1, {1}},
  };
  return all;
}

class DrawnMask : public testing::TestWithParam<std::size_t> {
 protected:
  const Drawn& drawn = drawn_masks()[GetParam()];
  const Drawing drawing = parse_drawing(drawn.rows);
  const Mask mask{drawn.parts};
  std::string text(const std::vector<uint8_t>& visible) const {
    return draw(visible, drawing.seqlen_q, drawing.seqlen_k);
  }
};

TEST_P(DrawnMask, ToDense) {
  ASSERT_EQ(drawing.seqlen_q, mask.seqlen_q());
  ASSERT_EQ(drawing.seqlen_k, mask.seqlen_k());
  EXPECT_EQ(text(to_dense(mask)), text(drawing.visible)) << drawn.name;
}

TEST_P(DrawnMask, TheTestsOwnRule) { EXPECT_EQ(text(dense_by_rule(drawn.parts)), text(drawing.visible)) << drawn.name; }

TEST_P(DrawnMask, Visible) {
  for (int64_t i = 0; i < mask.seqlen_q(); ++i) {
    for (int64_t j = 0; j < mask.seqlen_k(); ++j) {
      EXPECT_EQ(mask.visible(0, 0, i, j), drawing.visible[static_cast<std::size_t>(i * mask.seqlen_k() + j)] != 0)
          << drawn.name << " (" << i << ", " << j << ")";
    }
  }
}

TEST_P(DrawnMask, FromDenseAndBack) {
  EXPECT_EQ(text(to_dense(from_dense(drawing.tensor()))), text(drawing.visible)) << drawn.name;
}

TEST_P(DrawnMask, SmallestStartEndRowIndices) {
  for (const Mask& source : {mask, from_dense(drawing.tensor())}) {
    const StartEndRowIndices indices = to_startend_row_indices(source);
    EXPECT_EQ(indices.causal, drawn.causal) << drawn.name;
    EXPECT_EQ(indices.vectors, drawn.vectors) << drawn.name;
    EXPECT_EQ(indices.batch, 1);
    EXPECT_EQ(indices.heads, 1);
    EXPECT_EQ(indices.seqlen_k, drawing.seqlen_k);
    EXPECT_EQ(static_cast<int64_t>(indices.values.size()), drawing.seqlen_k * drawn.vectors);
    const auto tensor =
        TensorView::contiguous(indices.values.data(), DataType::kInt32, {1, 1, indices.seqlen_k, indices.vectors});
    EXPECT_EQ(text(to_dense(from_startend_row_indices(tensor, indices.causal, drawing.seqlen_q))),
              text(drawing.visible))
        << drawn.name;
  }
}

TEST_P(DrawnMask, FromStartEndRowIndicesByHand) {
  const auto tensor =
      TensorView::contiguous(drawn.values.data(), DataType::kInt32, {1, 1, drawing.seqlen_k, drawn.vectors});
  const Mask read = from_startend_row_indices(tensor, drawn.causal, drawing.seqlen_q);
  EXPECT_EQ(text(to_dense(read)), text(drawing.visible)) << drawn.name;
}

TEST_P(DrawnMask, EveryCrop) {
  for (int64_t row_begin = 0; row_begin <= mask.seqlen_q(); ++row_begin) {
    for (int64_t row_end = row_begin; row_end <= mask.seqlen_q(); ++row_end) {
      for (int64_t key_begin = 0; key_begin <= mask.seqlen_k(); ++key_begin) {
        for (int64_t key_end = key_begin; key_end <= mask.seqlen_k(); ++key_end) {
          std::vector<uint8_t> expected;
          for (int64_t i = row_begin; i < row_end; ++i) {
            for (int64_t j = key_begin; j < key_end; ++j)
              expected.push_back(drawing.visible[static_cast<std::size_t>(i * mask.seqlen_k() + j)]);
          }
          const Mask piece = crop(mask, row_begin, row_end, key_begin, key_end);
          ASSERT_EQ(piece.seqlen_q(), row_end - row_begin);
          ASSERT_EQ(piece.seqlen_k(), key_end - key_begin);
          ASSERT_EQ(to_dense(piece), expected)
              << drawn.name << " [" << row_begin << ", " << row_end << ") x [" << key_begin << ", " << key_end << ")";
        }
      }
    }
  }
}

TEST_P(DrawnMask, ClassesOfTiles) {
  for (const TileShape shape : {TileShape{1, 1}, {1, 2}, {2, 1}, {2, 2}, {3, 2}, {4, 4}, {64, 128}}) {
    const TileGrid grid = classify_tiles(mask, 0, 0, shape);
    EXPECT_EQ(grid.classes, classes_of({drawing.visible, drawing.seqlen_q, drawing.seqlen_k}, shape))
        << drawn.name << " " << shape.rows << "x" << shape.keys;
  }
}

INSTANTIATE_TEST_SUITE_P(All, DrawnMask, testing::Range(std::size_t{0}, drawn_masks().size()));

TEST(DrawnMasks, ClassesByHand) {
  // The documents of 2 and 3 tokens in tiles of 2x2, and the window of one to the left.
  using enum TileClass;
  const Mask documents({.seqlen_q = 5, .seqlen_k = 5, .lts = {2, 2, 5, 5, 5}, .ute = {0, 0, 2, 2, 2}});
  EXPECT_EQ(classify_tiles(documents, 0, 0, {2, 2}).classes,
            (std::vector{kFull, kEmpty, kEmpty, kEmpty, kFull, kFull, kEmpty, kFull, kFull}));
  const Mask window({.seqlen_q = 5, .seqlen_k = 5, .band = Band::window(1, 0)});
  EXPECT_EQ(classify_tiles(window, 0, 0, {2, 2}).classes,
            (std::vector{kPartial, kEmpty, kEmpty, kPartial, kPartial, kEmpty, kEmpty, kPartial, kFull}));
}

TEST(DrawnMasks, AHeadAndABatchEntryOfItsOwn) {
  // [batch 2, heads 2]: each draws another document boundary into the causal triangle.
  const Mask mask({.seqlen_q = 3,
                   .seqlen_k = 3,
                   .band = Band::causal(),
                   .batch = 2,
                   .heads = 2,
                   .lts = {3, 3, 3, 1, 3, 3, 2, 2, 3, 1, 2, 3}});
  const std::vector<std::vector<std::string>> rows = {
      {"#..", "##.", "###"}, {"#..", ".#.", ".##"}, {"#..", "##.", "..#"}, {"#..", ".#.", "..#"}};
  std::vector<uint8_t> expected;
  for (const auto& matrix : rows) {
    const Drawing drawing = parse_drawing(matrix);
    expected.insert(expected.end(), drawing.visible.begin(), drawing.visible.end());
  }
  EXPECT_EQ(to_dense(mask), expected);
  EXPECT_TRUE(mask.visible(1, 0, 1, 0));
  EXPECT_FALSE(mask.visible(1, 1, 1, 0));
}

TEST(DrawnMasks, BlocksOf128) {
  // Two by two blocks, the last ones 1 row and 2 keys wide; block (0, 1) and (1, 0) are cleared.
  const Mask mask({.seqlen_q = 129, .seqlen_k = 130, .block_mask = {1, 0, 0, 255}});
  EXPECT_TRUE(mask.visible(0, 0, 127, 127));
  EXPECT_FALSE(mask.visible(0, 0, 127, 128));
  EXPECT_FALSE(mask.visible(0, 0, 128, 127));
  EXPECT_TRUE(mask.visible(0, 0, 128, 128));
  EXPECT_TRUE(mask.visible(0, 0, 128, 129));
  using enum TileClass;
  EXPECT_EQ(classify_tiles(mask, 0, 0, {128, 128}).classes, (std::vector{kFull, kEmpty, kEmpty, kFull}));
  EXPECT_EQ(classify_tiles(mask, 0, 0, {129, 128}).classes, (std::vector{kPartial, kPartial}));
  EXPECT_EQ(classify_tiles(mask, 0, 0, {100, 65}).classes, (std::vector{kFull, kPartial, kPartial, kPartial}));
}

TEST(DrawnMasks, TheBandThatFromDenseChooses) {
  const auto chosen = [](const std::vector<std::string>& rows) {
    const Mask mask = from_dense(parse_drawing(rows).tensor());
    return std::pair(mask.band(), mask.num_intervals());
  };
  const auto band = [](std::optional<int64_t> lo, std::optional<int64_t> hi) { return Band{.lo = lo, .hi = hi}; };
  EXPECT_EQ(chosen({"##", "##"}), std::pair(Band::none(), 0));
  EXPECT_EQ(chosen({"#.", "##"}), std::pair(Band::causal(), 0));
  EXPECT_EQ(chosen({"#...", "##..", "###."}), std::pair(band(std::nullopt, -1), 0)) << "the offset is 4 - 3";
  EXPECT_EQ(chosen({"##", ".#"}), std::pair(band(0, std::nullopt), 0));
  EXPECT_EQ(chosen({"##.", "###", ".##"}), std::pair(band(-1, 1), 0));
  EXPECT_EQ(chosen({"..", ".."}), std::pair(Band::none(), 1)) << "nothing visible: no band to find";
  // A tie at one interval: no band comes before causal.
  EXPECT_EQ(chosen({"##..", "##..", "..##", "..##"}), std::pair(Band::none(), 1));
  // Holes on the diagonal and a hidden head: two without a band, one beside the upper edge.
  EXPECT_EQ(chosen({"#...", "##..", "#.#.", "####"}), std::pair(Band::causal(), 1));
  // The mirror image: one beside the left edge.
  EXPECT_EQ(chosen({"####", ".#.#", "..##", "...#"}), std::pair(band(0, std::nullopt), 1));
  // Two needed in any case: no band wins.
  EXPECT_EQ(chosen({"###", ".##", "###", ".##", "###"}), std::pair(Band::none(), 2));
}

}  // namespace
}  // namespace flashmask::test
