// SPDX-License-Identifier: Apache-2.0
// Composition: what comes out is compared element by element with the same operation on dense matrices; where it
// is refused, a brute-force search over all bands says that it had to be.
#include <gtest/gtest.h>

#include <optional>

#include "flashmask/builders.h"
#include "flashmask/mask.h"
#include "support/brute_force.h"
#include "support/drawn_mask.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

/// [batch, heads, seqlen_q, seqlen_k] with broadcasting: entry b of 1 or all, head h of a group.
struct DenseMask {
  int64_t batch, heads, seqlen_q, seqlen_k;
  std::vector<uint8_t> visible;

  explicit DenseMask(const MaskParts& parts)
      : DenseMask(Mask(parts).batch(), Mask(parts).heads(), parts.seqlen_q, parts.seqlen_k) {
    visible = dense_by_rule(parts);
  }
  DenseMask(int64_t b, int64_t h, int64_t q, int64_t k)
      : batch(b), heads(h), seqlen_q(q), seqlen_k(k), visible(static_cast<std::size_t>(b * h * q * k)) {}

  bool at(int64_t b, int64_t h, int64_t all_heads, int64_t i, int64_t j) const {
    const int64_t own_b = batch == 1 ? 0 : b, own_h = h / (all_heads / heads);
    return visible[static_cast<std::size_t>(((own_b * heads + own_h) * seqlen_q + i) * seqlen_k + j)] != 0;
  }
  std::vector<Dense> matrices() const {
    std::vector<Dense> all;
    for (int64_t m = 0; m < batch * heads; ++m) all.push_back(matrix(visible, m, seqlen_q, seqlen_k));
    return all;
  }
};

/// True if any band that hides nothing visible leaves at most two runs in every column.
bool fits_beside_some_band(const DenseMask& dense) {
  const std::vector<Dense> matrices = dense.matrices();
  const int64_t reach = dense.seqlen_q + dense.seqlen_k;
  for (int64_t lo = -reach; lo <= reach; ++lo) {
    for (int64_t hi = lo; hi <= reach; ++hi) {
      const Band band{.lo = lo, .hi = hi};
      bool legal = true;
      for (const Dense& m : matrices) {
        for (int64_t i = 0; i < m.seqlen_q && legal; ++i) {
          for (int64_t j = 0; j < m.seqlen_k; ++j) legal &= !m.at(i, j) || in_band(band, 0, i, j);
        }
      }
      if (legal && fit_beside(matrices, band, 0).most <= 2) return true;
    }
  }
  return false;
}

void expect_equals(const Mask& mask, const DenseMask& expected, const std::string& what) {
  ASSERT_EQ(mask.seqlen_q(), expected.seqlen_q) << what;
  ASSERT_EQ(mask.seqlen_k(), expected.seqlen_k) << what;
  ASSERT_EQ(expected.batch % mask.batch(), 0) << what;
  ASSERT_EQ(expected.heads % mask.heads(), 0) << what;
  ASSERT_TRUE(dense_by_rule(parts_of(mask), expected.batch, expected.heads) == expected.visible) << what;
  if (mask.batch() == expected.batch && mask.heads() == expected.heads) {
    ASSERT_TRUE(to_dense(mask) == expected.visible) << what;
  }
}

/// Expects the dense result, in interval lists only where no band makes it fit two. Returns whether it has lists.
bool expect_exact(const DenseMask& expected, const std::string& what, const Mask& mask) {
  expect_equals(mask, expected, what);
  EXPECT_FALSE(mask.has_interval_lists() && fits_beside_some_band(expected)) << what << ": in lists, but it fits";
  return mask.has_interval_lists();
}

DenseMask dense_intersection(const DenseMask& a, const DenseMask& b) {
  DenseMask both(std::max(a.batch, b.batch), std::max(a.heads, b.heads), a.seqlen_q, a.seqlen_k);
  std::size_t at = 0;
  for (int64_t n = 0; n < both.batch; ++n) {
    for (int64_t h = 0; h < both.heads; ++h) {
      for (int64_t i = 0; i < a.seqlen_q; ++i) {
        for (int64_t j = 0; j < a.seqlen_k; ++j)
          both.visible[at++] = a.at(n, h, both.heads, i, j) && b.at(n, h, both.heads, i, j);
      }
    }
  }
  return both;
}

DenseMask dense_concatenation(const std::vector<DenseMask>& pieces) {
  DenseMask packed(1, 1, 0, 0);
  for (const DenseMask& p : pieces) {
    packed.batch = std::max(packed.batch, p.batch);
    packed.heads = std::max(packed.heads, p.heads);
    packed.seqlen_q += p.seqlen_q;
    packed.seqlen_k += p.seqlen_k;
  }
  packed.visible.assign(static_cast<std::size_t>(packed.batch * packed.heads * packed.seqlen_q * packed.seqlen_k), 0);
  for (int64_t n = 0; n < packed.batch; ++n) {
    for (int64_t h = 0; h < packed.heads; ++h) {
      int64_t row0 = 0, key0 = 0;
      for (const DenseMask& p : pieces) {
        for (int64_t i = 0; i < p.seqlen_q; ++i) {
          for (int64_t j = 0; j < p.seqlen_k; ++j) {
            packed.visible[static_cast<std::size_t>(
                ((n * packed.heads + h) * packed.seqlen_q + row0 + i) * packed.seqlen_k + key0 + j)] =
                p.at(n, h, packed.heads, i, j);
          }
        }
        row0 += p.seqlen_q;
        key0 += p.seqlen_k;
      }
    }
  }
  return packed;
}

DenseMask dense_crop(const DenseMask& m, int64_t row_begin, int64_t row_end, int64_t key_begin, int64_t key_end) {
  DenseMask piece(m.batch, m.heads, row_end - row_begin, key_end - key_begin);
  std::size_t at = 0;
  for (int64_t n = 0; n < m.batch; ++n) {
    for (int64_t h = 0; h < m.heads; ++h) {
      for (int64_t i = row_begin; i < row_end; ++i) {
        for (int64_t j = key_begin; j < key_end; ++j) piece.visible[at++] = m.at(n, h, m.heads, i, j);
      }
    }
  }
  return piece;
}

// --- intersect ----------------------------------------------------------------------------------------

TEST(Intersect, RandomMasks) {
  Random random(1);
  int64_t lists = 0;
  const int64_t cases = scaled(4000);
  for (int64_t n = 0; n < cases; ++n) {
    const int64_t rows = random.integer(0, 12), keys = random.integer(0, 6);
    const int64_t heads = random.integer(1, 2), batch = random.integer(1, 2);
    // Two masks of two runs a column each are what most often does not fit.
    const bool runs = random.flip();
    const auto kind = [&] { return runs ? ColumnKind::kTwoRuns : random_kind(random); };
    MaskParts a = random_parts(random, kind(), rows, keys, random.flip() ? batch : 1, random.flip() ? heads : 1);
    MaskParts b = random_parts(random, kind(), rows, keys, random.flip() ? batch : 1, random.flip() ? heads * 2 : 1);
    if (runs) a.band = b.band = Band::none();
    const DenseMask expected = dense_intersection(DenseMask(a), DenseMask(b));
    lists += expect_exact(expected, "case " + std::to_string(n), intersect(Mask(a), Mask(b)));
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(lists, 0);
  EXPECT_LT(lists, cases / 2);
}

TEST(Intersect, BlockMasks) {
  Random random(2);
  for (int n = 0; n < 40; ++n) {
    const int64_t rows = random.integer(1, 300), keys = random.integer(1, 300);
    MaskParts a{.seqlen_q = rows, .seqlen_k = keys},
        b{.seqlen_q = rows, .seqlen_k = keys, .band = Band::window(random.integer(0, 100), random.integer(0, 100))};
    draw_columns(random, ColumnKind::kDocuments, b);
    draw_block_mask(random, random.integer(1, 2), random.flip() ? 1 : 2, a);
    if (random.flip()) draw_block_mask(random, a.block_batch, random.flip() ? 1 : 4, b);
    const Mask both = intersect(Mask(a), Mask(b));
    EXPECT_TRUE(both.has_block_mask());
    expect_equals(both, dense_intersection(DenseMask(a), DenseMask(b)), "case " + std::to_string(n));
    expect_equals(intersect(Mask(b), Mask(a)), dense_intersection(DenseMask(a), DenseMask(b)),
                  "swapped, case " + std::to_string(n));
    if (HasFatalFailure()) return;
  }
}

TEST(Intersect, KeepsTheBandThatWasWritten) {
  // Causal and a document mask: the band stays causal, the result is the causal document mask.
  const std::vector<int64_t> lengths{3, 4, 2};
  const Mask both = intersect(masks::causal(9, 9), masks::document(Documents::from_lengths(lengths)));
  EXPECT_EQ(both.band(), Band::causal());
  EXPECT_EQ(both.num_intervals(), 1);
  EXPECT_EQ(to_dense(both), to_dense(masks::causal_document(Documents::from_lengths(lengths))));
  const Mask window = intersect(masks::causal(9, 9), masks::sliding_window(9, 9, 2, 5));
  EXPECT_EQ(window.band(), Band::window(2, 0));
  EXPECT_EQ(window.num_intervals(), 0);
  // Documents under a window: a hidden tail is written up to the end of the mask, not up to where the band hides the
  // rest of the column, so that one vector is enough.
  const Mask documents =
      intersect(masks::sliding_window(9, 9, 2), masks::causal_document(Documents::from_lengths(lengths)));
  EXPECT_EQ(documents.band(), Band::window(2, 0));
  EXPECT_EQ(documents.memory_bytes(), 9 * 4);
}

TEST(Intersect, ThreeIntervalsBecomeLists) {
  const Mask a({.seqlen_q = 8, .seqlen_k = 2, .lts = {8, 1}, .lte = {8, 2}, .uts = {0, 3}, .ute = {0, 4}});
  const Mask b({.seqlen_q = 8, .seqlen_k = 2, .lts = {8, 5}, .lte = {8, 6}});
  const Mask both = intersect(a, b);
  EXPECT_TRUE(std::ranges::equal(both.column_ptr(), std::vector<int32_t>{0, 0, 3}));
  EXPECT_TRUE(std::ranges::equal(both.intervals(), std::vector<int32_t>{1, 2, 3, 4, 5, 6}));
}

TEST(Intersect, WrongShapes) {
  expect_invalid({"(3, 4)", "(4, 4)"}, [] { intersect(masks::full(3, 4), masks::full(4, 4)); });
  expect_invalid({"(4, 4)", "(4, 5)"}, [] { intersect(masks::full(4, 4), masks::full(4, 5)); });
  const Mask two({.seqlen_q = 1, .seqlen_k = 1, .batch = 2, .lts = {1, 1}}),
      three({.seqlen_q = 1, .seqlen_k = 1, .batch = 3, .lts = {1, 1, 1}});
  expect_invalid({"2 and 3 batch entries"}, [&] { intersect(two, three); });
  const Mask four({.seqlen_q = 1, .seqlen_k = 1, .batch = 4, .lts = {1, 1, 1, 1}});
  expect_invalid({"2 and 4 batch entries"}, [&] { intersect(two, four); });
  const Mask two_heads({.seqlen_q = 1, .seqlen_k = 1, .heads = 2, .lts = {1, 1}}),
      three_heads({.seqlen_q = 1, .seqlen_k = 1, .heads = 3, .lts = {1, 1, 1}});
  expect_invalid({"2 and 3 heads"}, [&] { intersect(two_heads, three_heads); });
}

// --- concatenate --------------------------------------------------------------------------------------

TEST(Concatenate, RandomMasks) {
  Random random(3);
  int64_t lists = 0;
  const int64_t cases = scaled(3000);
  for (int64_t n = 0; n < cases; ++n) {
    std::vector<Mask> pieces;
    std::vector<DenseMask> dense;
    const int64_t count = random.integer(0, 4);
    const int64_t heads = random.integer(1, 3), batch = random.integer(1, 2);
    for (int64_t p = 0; p < count; ++p) {
      // Square and mostly document-like pieces fit often enough; the rest shows the refusals.
      const int64_t rows = random.integer(0, 5), keys = random.flip() ? rows : random.integer(0, 5);
      MaskParts parts = random_parts(random, random.flip() ? ColumnKind::kDocuments : random_kind(random), rows, keys,
                                     random.flip() ? batch : 1, random.flip() ? heads : 1);
      pieces.emplace_back(parts);
      dense.emplace_back(parts);
    }
    const DenseMask expected = dense_concatenation(dense);
    lists += expect_exact(expected, "case " + std::to_string(n), concatenate(pieces));
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(lists, 0);
  EXPECT_LT(lists, cases / 2);
}

TEST(Concatenate, CausalPiecesAreACausalDocumentMask) {
  const std::vector<Mask> pieces{masks::causal(3, 3), masks::causal(0, 0), masks::causal(4, 4), masks::causal(2, 2)};
  const std::vector<int64_t> lengths{3, 0, 4, 2};
  const Mask packed = concatenate(pieces);
  EXPECT_EQ(to_dense(packed), to_dense(masks::causal_document(Documents::from_lengths(lengths))));
  EXPECT_EQ(packed.band(), Band::causal());
  EXPECT_EQ(to_startend_row_indices(packed).vectors, 1);
}

TEST(Concatenate, Nothing) {
  const Mask empty = concatenate({});
  EXPECT_EQ(empty.seqlen_q(), 0);
  EXPECT_EQ(empty.seqlen_k(), 0);
}

TEST(Concatenate, BlockMasks) {
  Random random(4);
  for (int n = 0; n < 40; ++n) {
    // Every piece but the last ends on a block; pieces without a block mask may stand anywhere among them.
    std::vector<Mask> pieces;
    std::vector<DenseMask> dense;
    const int64_t count = random.integer(1, 3), block_heads = random.integer(1, 2);
    for (int64_t p = 0; p < count; ++p) {
      const bool last = p + 1 == count;
      MaskParts parts{.seqlen_q = last ? random.integer(1, 200) : 128 * random.integer(0, 2),
                      .seqlen_k = last ? random.integer(1, 200) : 128 * random.integer(0, 2)};
      draw_columns(random, ColumnKind::kEviction, parts);
      if (random.integer(0, 2) > 0) draw_block_mask(random, 1, block_heads, parts);
      pieces.emplace_back(parts);
      dense.emplace_back(parts);
    }
    expect_equals(concatenate(pieces), dense_concatenation(dense), "case " + std::to_string(n));
    if (HasFatalFailure()) return;
  }
}

TEST(Concatenate, ABlockReachesIntoTheNextPiece) {
  // A cleared last block of 100x100 would, at 128x128, also clear elements of the piece after it. Along one side
  // alone it reaches only what no row sees anyway.
  const auto blocked = [](int64_t rows, int64_t keys) {
    return Mask({.seqlen_q = rows, .seqlen_k = keys, .block_mask = {0}});
  };
  const auto packed = [](const Mask& first) { return concatenate(std::vector{first, masks::full(60, 60)}); };
  expect_error(ErrorCode::kUnsupported, {"block mask", "row 100, key 100", "128"}, [&] { packed(blocked(100, 100)); });
  for (const auto& [rows, keys] : {std::pair<int64_t, int64_t>{128, 100}, {100, 128}, {128, 128}}) {
    const Mask first = blocked(rows, keys);
    expect_equals(packed(first),
                  dense_concatenation({DenseMask(parts_of(first)), DenseMask(parts_of(masks::full(60, 60)))}),
                  std::to_string(rows));
  }
  // An empty piece between them changes nothing.
  expect_error(ErrorCode::kUnsupported, {"row 100, key 100"},
               [&] { concatenate(std::vector{blocked(100, 100), masks::full(0, 0), masks::full(60, 60)}); });
  EXPECT_NO_THROW(concatenate(std::vector{blocked(100, 100), masks::full(0, 0)}));
  // And where a piece that fills the block up lets another block mask begin on a block.
  expect_error(ErrorCode::kUnsupported, {"row 100, key 100"},
               [&] { concatenate(std::vector{blocked(100, 100), masks::full(28, 28), blocked(128, 128)}); });
}

TEST(Concatenate, Errors) {
  const Mask blocked({.seqlen_q = 128, .seqlen_k = 128, .block_mask = {0}});
  expect_error(ErrorCode::kUnsupported, {"block mask", "row 5, key 5", "128"},
               [&] { concatenate(std::vector{masks::full(5, 5), blocked}); });
  const Mask two({.seqlen_q = 1, .seqlen_k = 1, .heads = 2, .lts = {1, 1}}),
      three({.seqlen_q = 1, .seqlen_k = 1, .heads = 3, .lts = {1, 1, 1}});
  expect_invalid({"2 and 3 heads"}, [&] { concatenate(std::vector{two, three}); });
  const Mask two_batch({.seqlen_q = 1, .seqlen_k = 1, .batch = 2, .lts = {1, 1}}),
      three_batch({.seqlen_q = 1, .seqlen_k = 1, .batch = 3, .lts = {1, 1, 1}});
  expect_invalid({"2 and 3 batch entries"}, [&] { concatenate(std::vector{two_batch, three_batch}); });
  expect_invalid({"2147483647", "rows or keys"},
                 [&] { concatenate(std::vector{masks::full(kMaxSeqlen, 0), masks::full(1, 0)}); });
  expect_invalid({"2147483647", "rows or keys"},
                 [&] { concatenate(std::vector{masks::full(0, kMaxSeqlen), masks::full(0, 1)}); });
}

// --- crop ---------------------------------------------------------------------------------------------

TEST(Crop, RandomMasks) {
  Random random(5);
  for (int64_t n = 0; n < scaled(3000); ++n) {
    MaskParts parts = random_parts(random, random_kind(random), random.integer(0, 20), random.integer(0, 20),
                                   random.integer(1, 2), random.integer(1, 3));
    const int64_t row_begin = random.integer(0, parts.seqlen_q), row_end = random.integer(row_begin, parts.seqlen_q);
    const int64_t key_begin = random.integer(0, parts.seqlen_k), key_end = random.integer(key_begin, parts.seqlen_k);
    const Mask mask(parts);
    const DenseMask expected = dense_crop(DenseMask(parts), row_begin, row_end, key_begin, key_end);
    const Mask piece = crop(mask, row_begin, row_end, key_begin, key_end);
    expect_equals(piece, expected, "case " + std::to_string(n));
    if (HasFatalFailure()) return;
    EXPECT_EQ(piece.band(), mask.band());
    EXPECT_EQ(crop(mask, 0, mask.seqlen_q(), 0, mask.seqlen_k()).view().diagonal_hi, mask.view().diagonal_hi);
  }
}

TEST(Crop, BlockMasks) {
  Random random(6);
  for (int n = 0; n < 40; ++n) {
    MaskParts parts = random_parts(random, ColumnKind::kEviction, random.integer(1, 500), random.integer(1, 500), 1,
                                   random.flip() ? 1 : 2);
    draw_block_mask(random, random.integer(1, 2), 2, parts);
    const int64_t row_begin = random.integer(0, parts.seqlen_q / 128) * 128,
                  row_end = random.integer(row_begin, parts.seqlen_q);
    const int64_t key_begin = random.integer(0, parts.seqlen_k / 128) * 128,
                  key_end = random.integer(key_begin, parts.seqlen_k);
    expect_equals(crop(Mask(parts), row_begin, row_end, key_begin, key_end),
                  dense_crop(DenseMask(parts), row_begin, row_end, key_begin, key_end), "case " + std::to_string(n));
    if (HasFatalFailure()) return;
  }
}

TEST(Crop, Errors) {
  const Mask mask = masks::causal(10, 20);
  expect_invalid({"row range [-1, 5)", "[0, 10)"}, [&] { crop(mask, -1, 5, 0, 20); });
  expect_invalid({"row range [6, 5)", "[0, 10)"}, [&] { crop(mask, 6, 5, 0, 20); });
  expect_invalid({"row range [0, 11)", "[0, 10)"}, [&] { crop(mask, 0, 11, 0, 20); });
  expect_invalid({"key range [-2, 5)", "[0, 20)"}, [&] { crop(mask, 0, 10, -2, 5); });
  expect_invalid({"key range [3, 2)", "[0, 20)"}, [&] { crop(mask, 0, 10, 3, 2); });
  expect_invalid({"key range [0, 21)", "[0, 20)"}, [&] { crop(mask, 0, 10, 0, 21); });
  const Mask blocked({.seqlen_q = 300, .seqlen_k = 300, .block_mask = std::vector<uint8_t>(9, 1)});
  expect_error(ErrorCode::kUnsupported, {"block mask", "row 1, key 0", "128"}, [&] { crop(blocked, 1, 300, 0, 300); });
  expect_error(ErrorCode::kUnsupported, {"block mask", "row 128, key 64", "128"},
               [&] { crop(blocked, 128, 300, 64, 300); });
}

}  // namespace
}  // namespace flashmask::test
