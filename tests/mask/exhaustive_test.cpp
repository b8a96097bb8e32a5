// SPDX-License-Identifier: Apache-2.0
// Every small mask: all 4x4 matrices under all bands within [-4, 4], all three-column masks of 6 rows, 100,000
// seeded 6x6. Conversions are exact, and tiles of every small size have the class that brute force finds.
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "flashmask/mask.h"
#include "flashmask/tiles.h"
#include "mask/tile_classifier.h"
#include "mask/view.h"
#include "support/brute_force.h"
#include "support/drawn_mask.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/small_masks.h"

namespace flashmask::test {
namespace {

constexpr TileShape kShapes[] = {{1, 1}, {1, 2}, {2, 1}, {2, 2}, {3, 2}, {4, 4}};

/// Both classifiers against brute force, all heads: TileClassifier at every shape, classify_tiles (which
/// allocates) at every eighth head.
void expect_classes(const SmallMasks& small, const std::string& what) {
  const MaskView& view = small.mask.view();
  for (const TileShape shape : kShapes) {
    TileClassifier classifier(view.seqlen_q, shape.rows);
    ASSERT_EQ(classifier.words(), 1);
    uint64_t live = 0, full = 0;
    for (int64_t h = 0; h < view.heads(); ++h) {
      const Dense dense = matrix(small.visible, h, view.seqlen_q, view.seqlen_k);
      const rules::Columns column = columns(view, 0, h);
      for (int64_t c = 0; c * shape.keys < view.seqlen_k; ++c) {
        classifier.classify(column, c * shape.keys, std::min((c + 1) * shape.keys, view.seqlen_k), {&live, 1},
                            {&full, 1});
        uint64_t expected_live = 0, expected_full = 0;
        for (int64_t r = 0; r * shape.rows < view.seqlen_q; ++r) {
          const TileClass expected = class_of(dense, shape, r, c);
          expected_live |= uint64_t{expected != TileClass::kEmpty} << r;
          expected_full |= uint64_t{expected == TileClass::kFull} << r;
        }
        if (live != expected_live || full != expected_full) {
          FAIL() << what << " head " << h << ", tiles of " << shape.rows << "x" << shape.keys << ", column " << c
                 << ": live " << live << " for " << expected_live << ", full " << full << " for " << expected_full;
        }
      }
      if (h % 8 == (shape.rows + shape.keys) % 8) {
        ASSERT_EQ(classify_tiles(small.mask, 0, h, shape).classes, classes_of(dense, shape)) << what << " head " << h;
      }
    }
  }
}

/// One head of a batch, as drawn.
std::string draw_head(const SmallMasks& small, int64_t head) {
  return draw(matrix(small.visible, head, small.mask.seqlen_q(), small.mask.seqlen_k()).visible, small.mask.seqlen_q(),
              small.mask.seqlen_k());
}

/// from_dense: exact, with the band and the number of intervals that brute force finds best.
/// to_startend_row_indices: exact, or the error that it must be.
void expect_conversions(const Dense& dense) {
  const auto picture = [&] { return draw(dense.visible, dense.seqlen_q, dense.seqlen_k); };
  const auto tensor = TensorView::contiguous(dense.visible.data(), DataType::kBool, {dense.seqlen_q, dense.seqlen_k});
  const Fit fit = best_fit(dense, dense.seqlen_k - dense.seqlen_q);
  const Mask mask = from_dense(tensor);
  ASSERT_EQ(mask.has_interval_lists(), fit.most > 2) << picture();
  ASSERT_EQ(mask.band(), fit.band) << picture();
  ASSERT_EQ(mask.num_intervals(), fit.most) << picture();
  ASSERT_TRUE(std::ranges::equal(to_dense(mask), dense.visible)) << picture();
  const SmallestForm form = smallest_form(dense);
  if (form.vectors == 0) {
    expect_error(ErrorCode::kUnrepresentable, {"(batch 0, head 0, column "}, [&] { to_startend_row_indices(mask); });
    return;
  }
  const StartEndRowIndices indices = to_startend_row_indices(mask);
  ASSERT_EQ(indices.vectors, form.vectors) << picture();
  ASSERT_FALSE(indices.causal ? form.must_not_be_causal : form.must_be_causal) << picture();
  const auto view =
      TensorView::contiguous(indices.values.data(), DataType::kInt32, {1, 1, dense.seqlen_k, indices.vectors});
  ASSERT_TRUE(
      std::ranges::equal(to_dense(from_startend_row_indices(view, indices.causal, dense.seqlen_q)), dense.visible))
      << picture();
}

// The sizes of the sets themselves: nothing below is exhaustive if these are wrong.
TEST(Exhaustive, SetsAreComplete) {
  EXPECT_EQ(small_bands().size(), 1u + 9u + 9u + 45u);
  EXPECT_EQ(hidden_6_row_sets().size(), 57u);
  const SmallMasks all = masks_4x4(Band::none(), 0, kMatrices4x4, 1);
  std::vector<bool> seen(65536);
  for (int64_t h = 0; h < all.mask.heads(); ++h) {
    std::size_t number = 0;
    for (std::size_t bit = 0; bit < 16; ++bit)
      number |= static_cast<std::size_t>(all.visible[static_cast<std::size_t>(h) * 16 + bit]) << bit;
    seen[number] = true;
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), true), 65536);
}

TEST(Exhaustive, Matrices4x4FromDense) {
  const SmallMasks all = masks_4x4(Band::none());
  for (int64_t n = 0; n < kMatrices4x4; n += stride()) {
    expect_conversions(matrix(all.visible, n, 4, 4));
    if (HasFailure()) FAIL() << "matrix " << n;
  }
}

TEST(Exhaustive, Matrices4x4InOneCall) {
  // All matrices as heads of one mask.
  const int64_t heads = scaled(kMatrices4x4);
  const SmallMasks all = masks_4x4(Band::none(), 0, heads, kMatrices4x4 / heads);
  const Mask mask = from_dense(TensorView::contiguous(all.visible.data(), DataType::kBool, {1, heads, 4, 4}));
  EXPECT_EQ(mask.heads(), heads);
  EXPECT_TRUE(to_dense(mask) == all.visible);
  EXPECT_TRUE(to_dense(all.mask) == all.visible);
}

TEST(Exhaustive, Matrices4x4UnderEveryBand) {
  const int64_t heads = (kMatrices4x4 + stride() - 1) / stride();
  const SmallMasks whole = masks_4x4(Band::none(), 0, heads, stride());
  for (const Band& band : small_bands()) {
    const std::string what =
        "band [" + (band.lo ? std::to_string(*band.lo) : "") + ", " + (band.hi ? std::to_string(*band.hi) : "") + "]";
    const SmallMasks small = masks_4x4(band, 0, heads, stride());
    ASSERT_TRUE(dense_by_rule(parts_of(small.mask)) == small.visible) << what << ": the tests' own rule";
    ASSERT_TRUE(to_dense(whole.mask.with_band(band)) == small.visible) << what;
    const Mask only_band({.seqlen_q = 4, .seqlen_k = 4, .band = band});
    // A band that hides everything leaves nothing for the vectors to say, and so one mask for all heads.
    ASSERT_TRUE(dense_by_rule(parts_of(intersect(whole.mask, only_band)), 1, heads) == small.visible) << what;
    expect_classes(small, what);
    if (HasFailure()) return;
  }
}

TEST(Exhaustive, Masks6x3) {
  const int64_t heads = (kMasks6x3 + stride() - 1) / stride();
  const SmallMasks all = masks_6x3(Band::none(), 0, heads, stride());
  ASSERT_TRUE(to_dense(all.mask) == all.visible);
  ASSERT_TRUE(dense_by_rule(parts_of(all.mask)) == all.visible) << "the tests' own rule";
  const Mask read = from_dense(TensorView::contiguous(all.visible.data(), DataType::kBool, {1, heads, 6, 3}));
  ASSERT_TRUE(to_dense(read) == all.visible);
  for (int64_t h = 0; h < heads; ++h) {
    expect_conversions(matrix(all.visible, h, 6, 3));
    if (HasFailure()) FAIL() << draw_head(all, h);
  }
  expect_classes(all, "6x3");
}

TEST(Exhaustive, Masks6x3UnderSomeBands) {
  // Every mask under a band; which one goes round with the mask's number.
  const std::vector<Band> bands = small_bands();
  const auto groups = static_cast<int64_t>(bands.size());
  for (int64_t n = 0; n < groups; ++n) {
    const int64_t step = groups * stride();
    const SmallMasks small = masks_6x3(bands[static_cast<std::size_t>(n)], n, (kMasks6x3 - n + step - 1) / step, step);
    ASSERT_TRUE(to_dense(small.mask) == small.visible) << n;
    for (int64_t h = 0; h < small.mask.heads(); h += 16) expect_conversions(matrix(small.visible, h, 6, 3));
    expect_classes(small, "6x3, band " + std::to_string(n));
    if (HasFailure()) return;
  }
}

TEST(Exhaustive, Random6x6) {
  for (int64_t group = 0; group < kGroups6x6; group += stride()) {
    const SmallMasks small = masks_6x6(group);
    ASSERT_EQ(small.mask.heads(), kHeads6x6) << "group " << group;
    ASSERT_TRUE(to_dense(small.mask) == small.visible) << "group " << group;
    for (int64_t h = 0; h < kHeads6x6; ++h) {
      expect_conversions(matrix(small.visible, h, 6, 6));
      if (HasFailure()) FAIL() << "group " << group << ", head " << h << "\n" << draw_head(small, h);
    }
    expect_classes(small, "6x6, group " + std::to_string(group));
    if (HasFailure()) return;
  }
}

TEST(Exhaustive, RandomMatrices6x6) {
  // Any matrix at all, so that many need three intervals.
  Random random(66);
  int64_t lists = 0;
  for (int64_t n = 0; n < scaled(20000); ++n) {
    std::vector<uint8_t> visible;
    for (int e = 0; e < 36; ++e) visible.push_back(random.integer(0, 3) != 0);
    const Dense dense{visible, 6, 6};
    lists += best_fit(dense, 0).most > 2;
    expect_conversions(dense);
    if (HasFailure()) FAIL() << "matrix " << n;
  }
  EXPECT_GT(lists, 0);
}

}  // namespace
}  // namespace flashmask::test
