// SPDX-License-Identifier: Apache-2.0
// Conversions: startend_row_indices and dense matrices, in and out. The exhaustive part is in exhaustive_test.cpp.
#include <gtest/gtest.h>

#include <span>
#include <tuple>
#include <vector>

#include "flashmask/mask.h"
#include "support/brute_force.h"
#include "support/drawn_mask.h"
#include "support/expect_error.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

TensorView indices_view(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape) {
  return TensorView::contiguous(values.data(), DataType::kInt32, shape);
}

TensorView dense_view(const std::vector<uint8_t>& visible, std::initializer_list<int64_t> shape,
                      DataType dtype = DataType::kBool) {
  return TensorView::contiguous(visible.data(), dtype, shape);
}

// --- startend_row_indices -> mask -------------------------------------------------------------------

TEST(FromStartEnd, TheFourForms) {
  // Three columns, three rows; the vectors of a column lie next to each other.
  const auto read = [](std::vector<int32_t> values, int64_t vectors, bool causal) {
    return draw(to_dense(from_startend_row_indices(indices_view(values, {1, 1, 3, vectors}), causal, 3)), 3, 3);
  };
  EXPECT_EQ(read({1, 3, 3}, 1, true), "#..\n.#.\n.##\n") << "LTS";
  EXPECT_EQ(read({1, 2, 3, 3, 3, 3}, 2, true), "#..\n.#.\n###\n") << "LTS, LTE";
  EXPECT_EQ(read({2, 1, 3, 0, 1, 0}, 2, false), ".##\n##.\n.#.\n") << "LTS, UTE";
  EXPECT_EQ(read({1, 2, 0, 0, 3, 3, 0, 1, 2, 3, 0, 1}, 4, false), "#..\n.##\n##.\n") << "LTS, LTE, UTS, UTE";
}

TEST(FromStartEnd, VectorsBatchesAndHeadsInTheirPlace) {
  Random random(1);
  const int64_t batch = 2, heads = 3, keys = 5, rows = 7;
  for (const auto& [causal, vectors] : {std::pair<bool, int64_t>{true, 1}, {true, 2}, {false, 2}, {false, 4}}) {
    std::vector<int32_t> values;
    for (int64_t n = 0; n < batch * heads * keys * vectors; ++n)
      values.push_back(static_cast<int32_t>(random.integer(-2, rows + 2)));
    MaskParts parts{.seqlen_q = rows,
                    .seqlen_k = keys,
                    .band = causal ? Band::causal() : Band::none(),
                    .batch = batch,
                    .heads = heads};
    for (std::size_t at = 0; at < values.size(); at += static_cast<std::size_t>(vectors)) {
      parts.lts.push_back(values[at]);
      if (causal && vectors == 2) parts.lte.push_back(values[at + 1]);
      if (!causal && vectors == 2) parts.ute.push_back(values[at + 1]);
      if (vectors == 4) {
        parts.lte.push_back(values[at + 1]);
        parts.uts.push_back(values[at + 2]);
        parts.ute.push_back(values[at + 3]);
      }
    }
    const Mask mask = from_startend_row_indices(indices_view(values, {batch, heads, keys, vectors}), causal, rows);
    EXPECT_EQ(mask.batch(), batch);
    EXPECT_EQ(mask.heads(), heads);
    EXPECT_EQ(to_dense(mask), dense_by_rule(parts)) << causal << " " << vectors;
  }
}

TEST(FromStartEnd, AnyStrides) {
  // Equal indices laid out as [vectors, seqlen_k, heads, batch] with gaps, and broadcast by stride 0.
  Random random(2);
  const int64_t batch = 2, heads = 2, keys = 3, vectors = 4, rows = 9;
  std::vector<int32_t> packed, spread(1000, 12345);
  TensorView strided = indices_view(spread, {batch, heads, keys, vectors});
  strided.stride = {2, 5, 20, 200};
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t j = 0; j < keys; ++j) {
        for (int64_t v = 0; v < vectors; ++v) {
          packed.push_back(static_cast<int32_t>(random.integer(0, rows)));
          spread[static_cast<std::size_t>(2 * b + 5 * h + 20 * j + 200 * v)] = packed.back();
        }
      }
    }
  }
  const auto expected =
      to_dense(from_startend_row_indices(indices_view(packed, {batch, heads, keys, vectors}), false, rows));
  EXPECT_EQ(to_dense(from_startend_row_indices(strided, false, rows)), expected);

  const std::vector<int32_t> one{4, 2, 7};
  TensorView expanded = indices_view(one, {1, 1, 3, 1});
  expanded.shape[1] = 6;
  expanded.stride[1] = 0;
  const Mask mask = from_startend_row_indices(expanded, true, rows);
  EXPECT_EQ(mask.heads(), 6);
  for (int64_t h = 0; h < 6; ++h) EXPECT_EQ(mask.lts()[static_cast<std::size_t>(3 * h + 1)], 2);

  // Backwards: a negative stride from the last key.
  TensorView reversed = indices_view(one, {1, 1, 3, 1});
  reversed.data = static_cast<int32_t*>(reversed.data) + 2;
  reversed.stride[2] = -1;
  const Mask backwards = from_startend_row_indices(reversed, true, rows);
  EXPECT_EQ(std::vector<int32_t>(backwards.lts().begin(), backwards.lts().end()), (std::vector<int32_t>{7, 2, 4}));
}

TEST(FromStartEnd, OffsetAndEmpty) {
  const std::vector<int32_t> values{3, 3};
  EXPECT_EQ(from_startend_row_indices(indices_view(values, {1, 1, 2, 1}), true, 3, 7).q_offset(), 7);
  EXPECT_EQ(from_startend_row_indices(indices_view(values, {1, 1, 2, 1}), true, 3).q_offset(), -1);
  const Mask no_keys =
      from_startend_row_indices(TensorView::contiguous(nullptr, DataType::kInt32, {2, 3, 0, 4}), false, 5);
  EXPECT_EQ(no_keys.seqlen_k(), 0);
  const Mask no_rows = from_startend_row_indices(indices_view(values, {1, 1, 2, 1}), true, 0);
  EXPECT_EQ(no_rows.seqlen_q(), 0);
  EXPECT_EQ(to_startend_row_indices(no_rows).values.size(), 2u);
}

TEST(FromStartEnd, EveryWrongPairingShowsTheTable) {
  const std::vector<int32_t> values(100, 0);
  for (const bool causal : {false, true}) {
    for (int64_t vectors = 0; vectors <= 6; ++vectors) {
      const bool right = causal ? vectors == 1 || vectors == 2 : vectors == 2 || vectors == 4;
      const auto read = [&] { from_startend_row_indices(indices_view(values, {1, 1, 2, vectors}), causal, 4); };
      if (right) {
        EXPECT_NO_THROW(read());
        continue;
      }
      expect_invalid({"startend_row_indices has " + std::to_string(vectors) + " vectors",
                      causal ? "causal is true" : "causal is false", "causal with 1 vector (LTS) or 2 (LTS, LTE)",
                      "not causal with 2 (LTS, UTE) or 4 (LTS, LTE, UTS, UTE)"},
                     read);
    }
  }
}

TEST(FromStartEnd, WrongTensor) {
  const std::vector<int32_t> values(100, 0);
  const auto read = [](const TensorView& tensor) { return [tensor] { from_startend_row_indices(tensor, true, 4); }; };
  const std::string wanted = "int32 [batch, heads, seqlen_k, vectors]";
  expect_invalid({"startend_row_indices is absent", wanted}, read(TensorView{}));
  expect_invalid({"startend_row_indices is float32 [1, 1, 2, 1]", wanted},
                 read(TensorView::contiguous(values.data(), DataType::kFloat32, {1, 1, 2, 1})));
  expect_invalid({"startend_row_indices is int32 [1, 2, 1]", wanted}, read(indices_view(values, {1, 2, 1})));
  expect_invalid({"startend_row_indices is int32 [1, 1, 1, 2, 1]", wanted},
                 read(indices_view(values, {1, 1, 1, 2, 1})));
  expect_invalid({"startend_row_indices is int32 [0, 1, 2, 1]", "at least 1"},
                 read(indices_view(values, {0, 1, 2, 1})));
  expect_invalid({"startend_row_indices is int32 [1, -1, 2, 1]", "at least 1"},
                 read(indices_view(values, {1, -1, 2, 1})));
  expect_invalid({"startend_row_indices is int32 [1, 1, -2, 1]", "seqlen_k"},
                 read(indices_view(values, {1, 1, -2, 1})));
  TensorView too_long = indices_view(values, {1, 1, 2, 1});
  too_long.shape[2] = kMaxSeqlen + 1;
  too_long.stride[2] = 0;
  expect_invalid({"startend_row_indices is int32 [1, 1, 2147483648, 1]", "2147483647"}, read(too_long));
  TensorView too_many = indices_view(values, {1, 1, 2, 1});
  too_many.shape[0] = too_many.shape[1] = int64_t{1} << 40;
  expect_invalid({"startend_row_indices is int32 [1099511627776, 1099511627776, 2, 1]"}, read(too_many));
  expect_invalid({"startend_row_indices", "null"},
                 read(TensorView::contiguous(nullptr, DataType::kInt32, {1, 1, 2, 1})));
  expect_invalid({"seqlen_q is -1"}, [&] { from_startend_row_indices(indices_view(values, {1, 1, 2, 1}), true, -1); });
}

// --- mask -> startend_row_indices -------------------------------------------------------------------

TEST(ToStartEnd, BlockMaskIsRefused) {
  const Mask mask({.seqlen_q = 4, .seqlen_k = 4, .block_mask = {1}});
  expect_error(ErrorCode::kUnsupported, {"block mask", "with_block_mask({})"}, [&] { to_startend_row_indices(mask); });
  EXPECT_NO_THROW(to_startend_row_indices(mask.with_block_mask({})));
}

TEST(ToStartEnd, RandomMasksOfManyHeads) {
  // The smallest form for all batch entries and heads together, exact; or an error that names the first column
  // with more than two runs.
  Random random(3);
  int64_t refused = 0;
  for (int64_t n = 0; n < scaled(3000); ++n) {
    const MaskParts parts = random_parts(random, random_kind(random), random.integer(0, 9), random.integer(0, 9),
                                         random.integer(1, 2), random.integer(1, 2));
    const Mask mask(parts);
    const auto expected = to_dense(mask);
    std::vector<Dense> matrices;
    for (int64_t m = 0; m < mask.batch() * mask.heads(); ++m)
      matrices.push_back(matrix(expected, m, mask.seqlen_q(), mask.seqlen_k()));
    const SmallestForm form = smallest_form(matrices);
    if (form.vectors == 0) {
      ++refused;
      const Fit fit = fit_beside(matrices, Band::none(), 0);
      expect_error(ErrorCode::kUnrepresentable,
                   {"batch " + std::to_string(fit.matrix / mask.heads()) + ", head " +
                        std::to_string(fit.matrix % mask.heads()) + ", column " + std::to_string(fit.column) + ")",
                    "needs " + std::to_string(fit.needs)},
                   [&] { to_startend_row_indices(mask); });
      continue;
    }
    const StartEndRowIndices indices = to_startend_row_indices(mask);
    ASSERT_EQ(indices.vectors, form.vectors) << "case " << n << "\n"
                                             << draw(expected, mask.seqlen_q(), mask.seqlen_k());
    ASSERT_FALSE(form.must_be_causal && !indices.causal) << "case " << n;
    ASSERT_FALSE(form.must_not_be_causal && indices.causal) << "case " << n;
    ASSERT_EQ(static_cast<int64_t>(indices.values.size()),
              indices.batch * indices.heads * indices.seqlen_k * indices.vectors);
    const Mask read = from_startend_row_indices(
        indices_view(indices.values, {indices.batch, indices.heads, indices.seqlen_k, indices.vectors}), indices.causal,
        mask.seqlen_q());
    ASSERT_EQ(read.batch(), mask.seqlen_k() > 0 ? mask.batch() : 1) << "case " << n;
    ASSERT_EQ(read.heads(), mask.seqlen_k() > 0 ? mask.heads() : 1) << "case " << n;
    ASSERT_EQ(to_dense(read), expected) << "case " << n;
    for (const int32_t value : indices.values)
      ASSERT_TRUE(value >= 0 && value <= mask.seqlen_q()) << "values are rows of the call";
    std::vector<int32_t> by_column;
    const StartEndRowIndices form_read = read_startend_row_indices(mask, [&](std::span<const int32_t> values) {
      by_column.insert(by_column.end(), values.begin(), values.end());
    });
    ASSERT_EQ(by_column, indices.values) << "case " << n;
    ASSERT_EQ(std::tuple(form_read.causal, form_read.batch, form_read.heads, form_read.seqlen_k, form_read.vectors),
              std::tuple(indices.causal, indices.batch, indices.heads, indices.seqlen_k, indices.vectors));
    ASSERT_TRUE(form_read.values.empty());
  }
  EXPECT_GT(refused, 0);
}

// --- dense -> mask ----------------------------------------------------------------------------------

TEST(FromDense, BoolAndBytes) {
  // Any nonzero byte is visible.
  const std::vector<uint8_t> visible{1, 0, 255, 2};
  for (const DataType dtype : {DataType::kBool, DataType::kUInt8}) {
    EXPECT_EQ(to_dense(from_dense(dense_view(visible, {2, 2}, dtype))), (std::vector<uint8_t>{1, 0, 1, 1}));
  }
}

TEST(FromDense, BatchesAndHeads) {
  Random random(4);
  for (int n = 0; n < 200; ++n) {
    const int64_t batch = random.integer(1, 3), heads = random.integer(1, 3), rows = random.integer(0, 4),
                  keys = random.integer(0, 6);
    std::vector<uint8_t> visible;
    for (int64_t e = 0; e < batch * heads * rows * keys; ++e) visible.push_back(random.flip());
    const Mask mask =
        from_dense(dense_view(visible, {batch, heads, rows, keys}));  // four rows never need three intervals
    EXPECT_EQ(mask.seqlen_q(), rows);
    EXPECT_EQ(mask.seqlen_k(), keys);
    std::vector<Dense> matrices;
    for (int64_t m = 0; m < batch * heads; ++m) matrices.push_back(matrix(visible, m, rows, keys));
    const Fit fit = best_fit(matrices, keys - rows);
    ASSERT_EQ(mask.band(), fit.band) << "case " << n;
    ASSERT_EQ(mask.num_intervals(), fit.most) << "case " << n;
    const auto back = to_dense(mask);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        // A mask without vectors is the same for all.
        const int64_t own = mask.num_intervals() > 0 ? b * heads + h : 0;
        const auto got = matrix(back, own, rows, keys).visible;
        ASSERT_TRUE(std::ranges::equal(got, matrices[static_cast<std::size_t>(b * heads + h)].visible)) << "case " << n;
      }
    }
  }
}

TEST(FromDense, AnyStrides) {
  // Transposed, with gaps, backwards, and broadcast over heads.
  const Drawing drawing = parse_drawing({"#.##", ".###", "##.#"});
  std::vector<uint8_t> spread(1000, 77);
  TensorView tensor = dense_view(spread, {3, 4});
  tensor.stride = {3, 50};
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = 0; j < 4; ++j) spread[3 * i + 50 * j] = drawing.visible[4 * i + j];
  }
  EXPECT_EQ(to_dense(from_dense(tensor)), drawing.visible);

  TensorView upside_down = dense_view(drawing.visible, {3, 4});
  upside_down.data = static_cast<uint8_t*>(upside_down.data) + 8;
  upside_down.stride[0] = -4;
  EXPECT_EQ(draw(to_dense(from_dense(upside_down)), 3, 4), "##.#\n.###\n#.##\n");

  TensorView expanded = dense_view(drawing.visible, {1, 1, 3, 4});
  expanded.shape[1] = 2;
  expanded.stride[1] = 0;
  const Mask mask = from_dense(expanded);
  EXPECT_EQ(mask.heads(), 2);
  std::vector<uint8_t> twice = drawing.visible;
  twice.insert(twice.end(), drawing.visible.begin(), drawing.visible.end());
  EXPECT_EQ(to_dense(mask), twice);
}

TEST(FromDense, StoresNoVectorThatSaysNothing) {
  // Causal documents: one vector, because every hidden tail ends with the mask.
  const Drawing documents = parse_drawing({"#....", "##...", "..#..", "..##.", "..###"});
  EXPECT_EQ(from_dense(documents.tensor()).memory_bytes(), 5 * 4);
  // Hidden heads and tails: no vector for row 0 and none for the end.
  const Drawing both = parse_drawing({"##..", "##..", ".##.", ".##.", "..##"});
  EXPECT_EQ(from_dense(both.tensor()).memory_bytes(), 2 * 4 * 4);
  EXPECT_EQ(from_dense(parse_drawing({"##", "##"}).tensor()).memory_bytes(), 0);
}

TEST(FromDense, EmptySides) {
  for (const auto& [rows, keys] : {std::pair<int64_t, int64_t>{0, 0}, {0, 5}, {5, 0}}) {
    const Mask flat = from_dense(TensorView::contiguous(nullptr, DataType::kBool, {rows, keys}));
    EXPECT_EQ(flat.seqlen_q(), rows);
    EXPECT_EQ(flat.seqlen_k(), keys);
    const Mask deep = from_dense(TensorView::contiguous(nullptr, DataType::kBool, {2, 3, rows, keys}));
    EXPECT_EQ(deep.seqlen_q(), rows);
    EXPECT_EQ(deep.seqlen_k(), keys);
  }
}

TEST(FromDense, MoreThanTwoIntervalsBecomeLists) {
  // [batch 2, heads 2, 7 rows, 3 keys], all visible but for column 1 of (1, 0) and column 0 of (1, 1).
  std::vector<uint8_t> visible(2 * 2 * 7 * 3, 1);
  const auto hide = [&](std::size_t b, std::size_t h, std::size_t i, std::size_t j) {
    visible[((b * 2 + h) * 7 + i) * 3 + j] = 0;
  };
  for (const std::size_t i : {0, 2, 4, 6}) hide(1, 0, i, 1);
  for (const std::size_t i : {1, 3, 5}) hide(1, 1, i, 0);
  const Mask mask = from_dense(dense_view(visible, {2, 2, 7, 3}));
  EXPECT_TRUE(to_dense(mask) == visible);
  EXPECT_EQ(mask.num_intervals(), 4);
  EXPECT_TRUE(
      std::ranges::equal(mask.column_ptr(), std::vector<int32_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 7, 7, 7}));
  EXPECT_TRUE(std::ranges::equal(mask.intervals(), std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6}));
  expect_error(ErrorCode::kUnrepresentable,
               {"does not fit two row intervals per key column", "batch 1, head 0, column 1) needs 4"},
               [&] { to_startend_row_indices(mask); });
}

TEST(FromDense, RandomMatricesTakeTheFewestIntervals) {
  Random random(5);
  int64_t lists = 0;
  for (int64_t n = 0; n < scaled(5000); ++n) {
    const int64_t rows = random.integer(1, 9), keys = random.integer(1, 5);
    const int64_t density = random.integer(0, 4);
    std::vector<uint8_t> visible;
    for (int64_t e = 0; e < rows * keys; ++e) visible.push_back(random.integer(0, 4) <= density);
    const Fit fit = best_fit(Dense{visible, rows, keys}, keys - rows);
    const auto tensor = dense_view(visible, {rows, keys});
    const Mask mask = from_dense(tensor);
    lists += mask.has_interval_lists();
    ASSERT_EQ(mask.has_interval_lists(), fit.most > 2) << draw(visible, rows, keys);
    ASSERT_EQ(mask.band(), fit.band) << draw(visible, rows, keys);
    ASSERT_EQ(mask.num_intervals(), fit.most) << draw(visible, rows, keys);
    ASSERT_EQ(draw(to_dense(mask), rows, keys), draw(visible, rows, keys));
  }
  EXPECT_GT(lists, 0);
}

TEST(FromDense, WrongTensor) {
  const std::vector<uint8_t> visible(64, 1);
  const auto read = [](const TensorView& tensor) { return [tensor] { from_dense(tensor); }; };
  const std::string wanted = "bool or uint8, [seqlen_q, seqlen_k] or [batch, heads, seqlen_q, seqlen_k]";
  expect_invalid({"visible is absent", wanted}, read(TensorView{}));
  expect_invalid({"visible is int32 [2, 2]", wanted}, read(dense_view(visible, {2, 2}, DataType::kInt32)));
  expect_invalid({"visible is bool [4]", wanted}, read(dense_view(visible, {4})));
  expect_invalid({"visible is bool [1, 2, 2]", wanted}, read(dense_view(visible, {1, 2, 2})));
  expect_invalid({"visible is bool [1, 1, 1, 2, 2]", wanted}, read(dense_view(visible, {1, 1, 1, 2, 2})));
  expect_invalid({"visible is bool [0, 1, 2, 2]", "at least 1"}, read(dense_view(visible, {0, 1, 2, 2})));
  expect_invalid({"visible is bool [1, 0, 2, 2]", "at least 1"}, read(dense_view(visible, {1, 0, 2, 2})));
  expect_invalid({"visible is bool [-1, 2]", "between 0 and 2147483647"}, read(dense_view(visible, {-1, 2})));
  expect_invalid({"visible is bool [2, -1]", "between 0 and 2147483647"}, read(dense_view(visible, {2, -1})));
  TensorView too_long = dense_view(visible, {2, 2});
  too_long.shape[0] = kMaxSeqlen + 1;
  too_long.stride[0] = 0;
  expect_invalid({"visible is bool [2147483648, 2]", "between 0 and 2147483647"}, read(too_long));
  TensorView too_many = dense_view(visible, {1, 1, 2, 2});
  too_many.shape[0] = too_many.shape[1] = int64_t{1} << 40;
  expect_invalid({"visible is bool [1099511627776, 1099511627776, 2, 2]"}, read(too_many));
  expect_invalid({"visible", "null"}, read(TensorView::contiguous(nullptr, DataType::kBool, {2, 2})));
  TensorView on_device = dense_view(visible, {2, 2});
  on_device.device = {Device::Kind::kCuda, 1};
  expect_invalid({"visible", "host memory"}, read(on_device));
}

TEST(ToDense, TooLargeIsAnError) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer ends the program where an allocation fails";
  const Mask mask({.seqlen_q = kMaxSeqlen, .seqlen_k = kMaxSeqlen});
  expect_error(ErrorCode::kOutOfMemory, {"dense", "2147483647"}, [&] { to_dense(mask); });
}

}  // namespace
}  // namespace flashmask::test
