// SPDX-License-Identifier: Apache-2.0

// The C interface's functions of masks: dense matrices, startend_row_indices, segments, composition, statistics and
// cells.

#include "flashmask/c_api.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "flashmask/builders.h"
#include "flashmask/inspect.h"
#include "support/brute_force.h"
#include "support/c_tensor.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

template <typename Struct>
Struct make() {
  Struct s{};
  s.struct_size = sizeof(s);
  return s;
}

/// A mask in C, and what its tensors point to.
struct CMask {
  StartEndRowIndices indices;
  std::vector<uint8_t> block_mask;
  std::vector<int32_t> room;
  fm_mask mask = make<fm_mask>();

  /// Room for a mask of these columns.
  CMask(int64_t batch, int64_t heads, int64_t seqlen_k) {
    room.resize(static_cast<std::size_t>(batch * heads * seqlen_k * 4));
    mask.bounds = tensor(FM_INT32, {batch, heads, seqlen_k, 4}, room.data());
  }
  /// The vectors of `from`, which has no block mask.
  explicit CMask(const Mask& from) : indices(to_startend_row_indices(from)) {
    mask.flags = static_cast<uint32_t>(indices.causal ? FM_CAUSAL : 0);
    mask.seqlen_q = from.seqlen_q();
    mask.seqlen_k = from.seqlen_k();
    mask.bounds =
        tensor(FM_INT32, {indices.batch, indices.heads, indices.seqlen_k, indices.vectors}, indices.values.data());
  }
  void set_block_mask(const MaskParts& parts) {
    block_mask = parts.block_mask;
    mask.block_mask = tensor(
        FM_UINT8, {parts.block_batch, parts.block_heads, (parts.seqlen_q + 127) / 128, (parts.seqlen_k + 127) / 128},
        block_mask.data());
  }
  CMask(const CMask&) = delete;
  CMask& operator=(const CMask&) = delete;
};

std::vector<uint8_t> dense_of(const fm_mask& mask, int64_t batch, int64_t heads) {
  std::vector<uint8_t> dense(static_cast<std::size_t>(batch * heads * mask.seqlen_q * mask.seqlen_k));
  const fm_tensor visible = tensor(FM_BOOL, {batch, heads, mask.seqlen_q, mask.seqlen_k}, dense.data());
  EXPECT_EQ(fm_mask_to_dense(&mask, &visible), FM_OK) << fm_last_error();
  return dense;
}

void expect_refused(fm_status status, fm_status expected, const std::string& part) {
  EXPECT_EQ(status, expected);
  EXPECT_NE(std::string(fm_last_error()).find(part), std::string::npos)
      << "'" << part << "' is not in: " << fm_last_error();
}

bool fits(const std::vector<uint8_t>& dense, const MaskParts& shape) {
  const auto view =
      TensorView::contiguous(dense.data(), DataType::kBool, {shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k});
  return !from_dense(view).has_interval_lists();
}

/// A mask that does not fit two intervals is refused without room for lists, and exact with it.
void expect_lists(const fm_tensor& visible, const MaskParts& shape, CMask& out, const std::vector<uint8_t>& dense) {
  std::vector<int32_t> ptr(static_cast<std::size_t>(shape.batch * shape.heads * (shape.seqlen_k + 1)), -1);
  out.mask.column_ptr = tensor(FM_INT32, {shape.batch, shape.heads, shape.seqlen_k + 1}, ptr.data());
  ASSERT_EQ(fm_mask_from_dense(&visible, &out.mask), FM_OK) << fm_last_error();
  ASSERT_EQ(out.mask.intervals.data, nullptr);
  ASSERT_EQ(out.mask.bounds.dtype, FM_NONE);
  const int64_t count = out.mask.intervals.shape[0];
  ASSERT_EQ(count, ptr.back());
  CMask again(shape.batch, shape.heads, shape.seqlen_k);
  std::vector<int32_t> intervals(static_cast<std::size_t>(2 * count), -1);
  again.mask.column_ptr = out.mask.column_ptr;
  again.mask.intervals = tensor(FM_INT32, {count, 2}, intervals.data());
  ASSERT_EQ(fm_mask_from_dense(&visible, &again.mask), FM_OK) << fm_last_error();
  ASSERT_TRUE(dense_of(again.mask, shape.batch, shape.heads) == dense);
}

/// fm_mask_gather says what gather says, with positions and block masks where it has them.
TEST(MasksInC, RowsAndKeysBySegments) {
  Random random(9);
  int64_t with_positions = 0;
  for (int64_t n = 0; n < scaled(300); ++n) {
    const int64_t seqlen = random.integer(1, 12) * (n % 3 == 0 ? 64 : 4);
    MaskParts parts = random_parts(random, ColumnKind::kTwoRuns, seqlen, seqlen, random.integer(1, 2), 1);
    parts.band = Band::none();
    CMask from{Mask(parts)};
    const int64_t left = random.integer(0, seqlen);
    parts.band = Band::window(left, 0);
    parts.q_offset = 0;
    from.mask.flags |= FM_HAS_WINDOW | FM_HAS_Q_OFFSET;
    from.mask.window_left = left;
    if (n % 3 == 0) {
      draw_block_mask(random, 1, 1, parts);
      from.set_block_mask(parts);
    }
    // Without the second quarter; the first's end is a multiple of 128 where there is a block mask.
    const int64_t cut = n % 3 == 0 ? std::min<int64_t>(128, seqlen) : seqlen / 4, next = std::min(2 * cut, seqlen);
    const int64_t pairs[] = {0, cut, next, seqlen};
    auto segments = make<fm_segments>();
    segments.rows = segments.keys = pairs;
    segments.row_count = segments.key_count = 2;
    const std::vector<RowSegment> runs{{0, cut}, {next, seqlen}};
    const Mask expected = gather(Mask(parts), runs, runs);
    const int64_t length = cut + seqlen - next;
    CMask out(from.indices.batch, from.indices.heads, length);
    std::vector<int32_t> q_pos(static_cast<std::size_t>(length)), k_pos = q_pos;
    std::vector<uint8_t> blocks(expected.block_mask().size());
    out.mask.q_pos = tensor(FM_INT32, {1, length}, q_pos.data());
    out.mask.k_pos = tensor(FM_INT32, {1, length}, k_pos.data());
    out.mask.block_mask = tensor(FM_UINT8, {1, 1, (length + 127) / 128, (length + 127) / 128}, blocks.data());
    ASSERT_EQ(fm_mask_gather(&from.mask, &segments, &out.mask), FM_OK) << n << ": " << fm_last_error();
    EXPECT_EQ(out.mask.q_pos.dtype, out.mask.k_pos.dtype);
    EXPECT_EQ(out.mask.block_mask.dtype != FM_NONE, expected.has_block_mask());
    with_positions += out.mask.q_pos.dtype != FM_NONE;
    ASSERT_EQ(dense_of(out.mask, expected.batch(), expected.heads()), to_dense(expected)) << n;
  }
  EXPECT_GT(with_positions, 0);
  const CMask from{masks::causal(8, 8)};
  CMask out(1, 1, 4);
  const int64_t wrong[] = {0, 2, 1, 3};
  auto segments = make<fm_segments>();
  segments.rows = segments.keys = wrong;
  segments.row_count = 2;
  expect_refused(fm_mask_gather(&from.mask, &segments, &out.mask), FM_INVALID_ARGUMENT, "row segment [1, 3)");
  segments.keys = nullptr;
  segments.key_count = 1;
  expect_refused(fm_mask_gather(&from.mask, &segments, &out.mask), FM_INVALID_ARGUMENT, "segments->keys");
}

TEST(MasksInC, PutTogether) {
  const std::vector<int64_t> lengths{3, 5};
  const Mask documents = masks::document(Documents::from_lengths(lengths)), window = masks::sliding_window(8, 8, 2);
  const CMask a(documents), b(window);
  CMask both(1, 1, 8);
  ASSERT_EQ(fm_mask_intersect(&a.mask, &b.mask, &both.mask), FM_OK) << fm_last_error();
  EXPECT_EQ(dense_of(both.mask, 1, 1), to_dense(intersect(documents, window)));
  const fm_mask* pieces[] = {&a.mask, &b.mask, &a.mask};
  CMask packed(1, 1, 24);
  ASSERT_EQ(fm_mask_concatenate(pieces, 3, &packed.mask), FM_OK) << fm_last_error();
  EXPECT_EQ(dense_of(packed.mask, 1, 1), to_dense(concatenate(std::vector{documents, window, documents})));
  expect_refused(fm_mask_concatenate(pieces, 3, &both.mask), FM_INVALID_ARGUMENT, "[1, 1, 24, 4]");
  expect_refused(fm_mask_concatenate(nullptr, 1, &both.mask), FM_INVALID_ARGUMENT, "pieces is NULL");
  expect_refused(fm_mask_intersect(&a.mask, nullptr, &both.mask), FM_INVALID_ARGUMENT, "b is NULL");
}

TEST(MasksInC, ADenseMatrixAndBack) {
  Random random(1);
  int64_t lists = 0;
  for (int64_t n = 0; n < scaled(300); ++n) {
    const ColumnKind kind = n % 2 ? ColumnKind::kLists : random_kind(random);
    const MaskParts parts = random_parts(random, kind, random.integer(1, 40), random.integer(1, 40),
                                         random.integer(1, 2), random.integer(1, 3));
    const std::vector<uint8_t> dense = dense_by_rule(parts, parts.batch, parts.heads);
    const fm_tensor visible =
        tensor(FM_UINT8, {parts.batch, parts.heads, parts.seqlen_q, parts.seqlen_k}, dense.data());
    CMask out(parts.batch, parts.heads, parts.seqlen_k);
    const fm_status status = fm_mask_from_dense(&visible, &out.mask);
    ASSERT_EQ(status == FM_OK, fits(dense, parts)) << "case " << n << ": " << fm_last_error();
    if (status != FM_OK) {
      ASSERT_EQ(status, FM_UNREPRESENTABLE);
      expect_lists(visible, parts, out, dense);
      if (HasFatalFailure()) return;
      ++lists;
      continue;
    }
    const bool has_vectors = out.mask.bounds.dtype != FM_NONE;
    const int64_t masks = parts.batch * parts.heads;
    const std::vector<uint8_t> got = dense_of(out.mask, has_vectors ? parts.batch : 1, has_vectors ? parts.heads : 1);
    const std::size_t one = dense.size() / static_cast<std::size_t>(masks);
    for (std::size_t at = 0; at < dense.size(); ++at)
      ASSERT_EQ(got[has_vectors ? at : at % one], dense[at]) << "case " << n << ", element " << at;
  }
  EXPECT_GT(lists, 0);
}

TEST(MasksInC, TheBandOfADenseMatrix) {
  // Row i sees keys i - 1 to i + 1, whatever the lengths: a window around the band's upper edge, and no vectors.
  std::vector<uint8_t> dense;
  for (int64_t i = 0; i < 6; ++i) {
    for (int64_t j = 0; j < 9; ++j) dense.push_back(j - i >= -1 && j - i <= 1);
  }
  const fm_tensor visible = tensor(FM_BOOL, {1, 1, 6, 9}, dense.data());
  CMask out(1, 1, 9);
  ASSERT_EQ(fm_mask_from_dense(&visible, &out.mask), FM_OK) << fm_last_error();
  EXPECT_EQ(out.mask.flags, FM_CAUSAL | FM_HAS_Q_OFFSET | FM_HAS_WINDOW);
  EXPECT_EQ(out.mask.seqlen_q, 6);
  EXPECT_EQ(out.mask.seqlen_k, 9);
  EXPECT_EQ(out.mask.q_offset, 1);
  EXPECT_EQ(out.mask.window_left, 2);
  EXPECT_EQ(out.mask.window_right, 0);
  EXPECT_EQ(out.mask.bounds.dtype, FM_NONE);
}

TEST(MasksInC, AMatrixThatDoesNotFitNamesTheColumn) {
  const std::vector<uint8_t> dense = {1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1};  // column 1 is hidden in three runs
  const fm_tensor visible = tensor(FM_BOOL, {1, 1, 7, 2}, dense.data());
  CMask out(1, 1, 2);
  expect_refused(fm_mask_from_dense(&visible, &out.mask), FM_UNREPRESENTABLE, "(batch 0, head 0, column 1) needs 3");
  EXPECT_EQ(fm_last_error_column(), 1);
  const fm_tensor flat = tensor(FM_BOOL, {7, 2}, dense.data());
  expect_refused(fm_mask_from_dense(&flat, &out.mask), FM_INVALID_ARGUMENT, "[batch, heads, seqlen_q, seqlen_k]");
  EXPECT_EQ(fm_last_error_column(), -1);
}

TEST(MasksInC, TheRoomForVectorsIsChecked) {
  const std::vector<uint8_t> dense(12, 1);
  const fm_tensor visible = tensor(FM_BOOL, {1, 1, 3, 4}, dense.data());
  std::vector<int32_t> room(16, 7);
  auto out = make<fm_mask>();
  expect_refused(fm_mask_from_dense(&visible, &out), FM_INVALID_ARGUMENT, "out->bounds is absent");
  out.bounds = tensor(FM_INT32, {1, 1, 4, 2}, room.data());
  expect_refused(fm_mask_from_dense(&visible, &out), FM_INVALID_ARGUMENT, "[1, 1, 4, 4]");
  out.bounds = tensor(FM_INT32, {1, 1, 4, 4}, nullptr);
  expect_refused(fm_mask_from_dense(&visible, &out), FM_INVALID_ARGUMENT, "out->bounds");
  out.bounds = tensor(FM_INT32, {1, 1, 4, 4}, room.data());
  out.bounds.stride[2] = 8;
  expect_refused(fm_mask_from_dense(&visible, &out), FM_INVALID_ARGUMENT, "contiguous");
  out.struct_size = 40;
  expect_refused(fm_mask_from_dense(&visible, &out), FM_INVALID_ARGUMENT, "out->struct_size is 40");
  EXPECT_EQ(room, std::vector<int32_t>(16, 7));
}

TEST(MasksInC, StartEndRowIndices) {
  Random random(2);
  for (int64_t n = 0; n < scaled(200); ++n) {
    const Mask mask(random_parts(random, random_kind(random), random.integer(1, 40), random.integer(1, 40),
                                 random.integer(1, 2), random.integer(1, 2)));
    StartEndRowIndices expected;
    try {
      expected = to_startend_row_indices(mask);
    } catch (const Error&) {
      continue;
    }
    const CMask from(mask);
    CMask out(expected.batch, expected.heads, expected.seqlen_k);
    ASSERT_EQ(fm_mask_to_startend(&from.mask, &out.mask), FM_OK) << fm_last_error();
    EXPECT_EQ(out.mask.flags, static_cast<uint32_t>(expected.causal ? FM_CAUSAL : 0));
    ASSERT_EQ(out.mask.bounds.shape[3], expected.vectors);
    EXPECT_EQ(out.mask.bounds.stride[2], expected.vectors);
    out.room.resize(expected.values.size());
    ASSERT_EQ(out.room, expected.values) << "case " << n;
  }
  auto with_blocks = make<fm_mask>();
  with_blocks.seqlen_q = with_blocks.seqlen_k = 100;
  const uint8_t keep = 1;
  with_blocks.block_mask = tensor(FM_BOOL, {1, 1, 1, 1}, &keep);
  CMask out(1, 1, 100);
  expect_refused(fm_mask_to_startend(&with_blocks, &out.mask), FM_UNSUPPORTED, "block mask");
}

TEST(MasksInC, Statistics) {
  Random random(3);
  for (int64_t n = 0; n < scaled(60); ++n) {
    MaskParts parts =
        random_parts(random, ColumnKind::kDocuments, random.integer(1, 300), random.integer(1, 300), 2, 1);
    parts.band = Band::none();
    const CMask plain{Mask(parts)};
    for (const int64_t tile : {int64_t{0}, int64_t{50}}) {
      const MaskStatistics expected = statistics(Mask(parts), tile ? TileShape{tile, tile + 1} : TileShape{128, 128});
      auto out = make<fm_statistics>();
      out.tile_rows = tile;
      out.tile_keys = tile ? tile + 1 : 0;
      ASSERT_EQ(fm_mask_statistics(&plain.mask, &out), FM_OK) << fm_last_error();
      EXPECT_EQ(out.elements, expected.elements);
      EXPECT_EQ(out.visible, expected.visible);
      EXPECT_EQ(out.tiles, expected.tiles);
      EXPECT_EQ(out.full_tiles, expected.full_tiles);
      EXPECT_EQ(out.partial_tiles, expected.partial_tiles);
    }
  }
  auto mask = make<fm_mask>();
  auto out = make<fm_statistics>();
  out.tile_keys = -1;
  expect_refused(fm_mask_statistics(&mask, &out), FM_INVALID_ARGUMENT, "tile is 128x-1");
  out = make<fm_statistics>();
  out.reserved = 1;
  expect_refused(fm_mask_statistics(&mask, &out), FM_UNSUPPORTED, "reserved");
  expect_refused(fm_mask_statistics(&mask, nullptr), FM_INVALID_ARGUMENT, "out is NULL");
}

/// Output of fm_mask_count_cells.
struct Counted {
  std::vector<int64_t> visible, elements;
};

Counted count(const fm_mask& mask, fm_cells cells) {
  const int64_t rows = (mask.seqlen_q + cells.row_step - 1) / cells.row_step,
                keys = (mask.seqlen_k + cells.key_step - 1) / cells.key_step;
  Counted counted;
  counted.visible.assign(static_cast<std::size_t>(rows * keys), -1);
  counted.elements = counted.visible;
  cells.visible = counted.visible.data();
  cells.elements = counted.elements.data();
  cells.count = rows * keys;
  EXPECT_EQ(fm_mask_count_cells(&mask, &cells), FM_OK) << fm_last_error();
  return counted;
}

fm_cells cells_of(int64_t row_step, int64_t key_step) {
  auto cells = make<fm_cells>();
  cells.row_step = row_step;
  cells.key_step = key_step;
  return cells;
}

/// Counts from a dense matrix, in the columns that `is_counted` selects.
template <typename F>
Counted count(const Dense& dense, const fm_cells& cells, F&& is_counted) {
  const int64_t keys = (dense.seqlen_k + cells.key_step - 1) / cells.key_step,
                rows = (dense.seqlen_q + cells.row_step - 1) / cells.row_step;
  Counted counted;
  counted.visible.resize(static_cast<std::size_t>(rows * keys));
  counted.elements = counted.visible;
  for (int64_t i = 0; i < dense.seqlen_q; ++i) {
    for (int64_t j = 0; j < dense.seqlen_k; ++j) {
      const auto at = static_cast<std::size_t>(i / cells.row_step * keys + j / cells.key_step);
      counted.visible[at] += is_counted(j) && dense.at(i, j);
      counted.elements[at] += is_counted(j);
    }
  }
  return counted;
}

TEST(MasksInC, Cells) {
  Random random(4);
  for (int64_t n = 0; n < scaled(100); ++n) {
    MaskParts parts =
        random_parts(random, ColumnKind::kFourBounds, random.integer(1, 400), random.integer(1, 400), 1, 2);
    parts.band = Band::none();
    CMask plain{Mask(parts)};
    if (random.flip()) {
      draw_block_mask(random, 2, 1, parts);
      plain.set_block_mask(parts);
    }
    const std::vector<uint8_t> dense = dense_by_rule(parts);
    fm_cells cells = cells_of(random.integer(1, 300), random.integer(1, 300));
    cells.batch = parts.block_mask.empty() ? 0 : 1;
    cells.head = 1;
    const Dense own = matrix(dense, cells.batch * 2 + 1, parts.seqlen_q, parts.seqlen_k);
    const Counted all = count(own, cells, [](int64_t) { return true; });
    EXPECT_EQ(count(plain.mask, cells).visible, all.visible) << "case " << n;
    EXPECT_EQ(count(plain.mask, cells).elements, all.elements) << "case " << n;
    // A sample: the middles of equal parts, and the last key.
    cells.most_keys = random.integer(1, parts.seqlen_k);
    std::vector<bool> is_counted(static_cast<std::size_t>(parts.seqlen_k));
    for (int64_t at = 0; at < cells.most_keys - 1; ++at)
      is_counted[static_cast<std::size_t>((2 * at + 1) * parts.seqlen_k / (2 * cells.most_keys))] = true;
    is_counted.back() = true;
    const Counted sample = count(own, cells, [&](int64_t j) { return is_counted[static_cast<std::size_t>(j)]; });
    EXPECT_EQ(count(plain.mask, cells).visible, sample.visible) << "case " << n;
    ASSERT_EQ(count(plain.mask, cells).elements, sample.elements) << "case " << n;
  }
}

TEST(MasksInC, CellsOfTensorsThatAreNotBorrowed) {
  // Every second vector entry, and a block mask of int32.
  std::vector<int32_t> every_second(2 * 150, -5);
  for (std::size_t j = 0; j < 150; ++j) every_second[2 * j] = static_cast<int32_t>(j);
  const std::vector<int32_t> keep = {1, 1, 1, 0};
  auto mask = make<fm_mask>();
  mask.flags = FM_CAUSAL;
  mask.seqlen_q = mask.seqlen_k = 150;
  mask.bounds = tensor(FM_INT32, {1, 1, 150, 1}, every_second.data());
  mask.bounds.stride[2] = 2;
  mask.block_mask = tensor(FM_INT32, {1, 1, 2, 2}, keep.data());
  const std::vector<uint8_t> dense = dense_of(mask, 1, 1);
  const fm_cells cells = cells_of(64, 100);
  const Counted expected = count(matrix(dense, 0, 150, 150), cells, [](int64_t) { return true; });
  EXPECT_EQ(count(mask, cells).visible, expected.visible);
}

TEST(MasksInC, CellsThatCannotBeCounted) {
  auto mask = make<fm_mask>();
  mask.seqlen_q = mask.seqlen_k = 100;
  int64_t room[4] = {};
  fm_cells cells = cells_of(50, 50);
  cells.count = 3;
  cells.visible = room;
  expect_refused(fm_mask_count_cells(&mask, &cells), FM_INVALID_ARGUMENT, "count is 3; the mask has 2 x 2 cells");
  cells.count = 4;
  cells.visible = nullptr;
  expect_refused(fm_mask_count_cells(&mask, &cells), FM_INVALID_ARGUMENT, "cells->visible is NULL");
  cells.visible = room;
  cells.head = 1;
  expect_refused(fm_mask_count_cells(&mask, &cells), FM_INVALID_ARGUMENT, "head 1");
  cells.head = 0;
  cells.key_step = 0;
  expect_refused(fm_mask_count_cells(&mask, &cells), FM_INVALID_ARGUMENT, "50x0");
  cells.key_step = 50;
  cells.most_keys = -1;
  expect_refused(fm_mask_count_cells(&mask, &cells), FM_INVALID_ARGUMENT, "most_keys is -1");
  cells.most_keys = 0;
  EXPECT_EQ(fm_mask_count_cells(&mask, &cells), FM_OK) << "elements may be absent";
}

TEST(MasksInC, Positions) {
  const std::vector<int32_t> rows{5, 7, 6, 0, 1, 2}, keys{5, 6, 7, 8};
  auto mask = make<fm_mask>();
  mask.flags = FM_CAUSAL | FM_HAS_WINDOW;
  mask.seqlen_q = 3;
  mask.seqlen_k = 4;
  mask.window_left = 1;
  mask.window_right = -1;
  mask.q_pos = tensor(FM_INT32, {2, 3}, rows.data());
  mask.k_pos = tensor(FM_INT32, {1, 4}, keys.data());
  EXPECT_EQ(dense_of(mask, 2, 1), (std::vector<uint8_t>{1, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0,     // rows at 5, 7 and 6
                                                        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));  // at 0, 1 and 2
  auto sums = make<fm_statistics>();
  ASSERT_EQ(fm_mask_statistics(&mask, &sums), FM_OK) << fm_last_error();
  EXPECT_EQ(sums.visible, 5);
  EXPECT_EQ(sums.tiles, 2);
  EXPECT_EQ(sums.partial_tiles, 1);
  std::vector<int64_t> visible(12);
  auto cells = make<fm_cells>();
  cells.row_step = cells.key_step = 1;
  cells.visible = visible.data();
  cells.count = 12;
  ASSERT_EQ(fm_mask_count_cells(&mask, &cells), FM_OK) << fm_last_error();
  EXPECT_EQ(visible, (std::vector<int64_t>{1, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0}));
  std::size_t bytes = 0, bytes_of_one = 0;
  ASSERT_EQ(fm_plan_bytes(&mask, &bytes), FM_OK);
  mask.q_pos = tensor(FM_INT32, {1, 3}, rows.data());
  ASSERT_EQ(fm_plan_bytes(&mask, &bytes_of_one), FM_OK);
  EXPECT_GT(bytes, bytes_of_one) << "a plan for each batch entry";
}

TEST(MasksInC, PositionsThatAreRefused) {
  const std::vector<int32_t> numbers(8);
  std::size_t bytes = 0;
  const auto refused = [&](auto&& change, const std::string& part) {
    auto mask = make<fm_mask>();
    mask.seqlen_q = mask.seqlen_k = 4;
    mask.q_pos = mask.k_pos = tensor(FM_INT32, {1, 4}, numbers.data());
    change(mask);
    expect_refused(fm_plan_bytes(&mask, &bytes), FM_INVALID_ARGUMENT, part);
  };
  refused([](fm_mask& m) { m.k_pos = {}; }, "k_pos is absent and q_pos is given");
  refused([](fm_mask& m) { m.q_pos = {}; }, "q_pos is absent and k_pos is given");
  refused([](fm_mask& m) { m.q_pos.dtype = FM_INT64; }, "q_pos is int64 [1, 4]");
  refused([](fm_mask& m) { m.k_pos.shape[1] = 3; }, "with 4 positions");
  refused([](fm_mask& m) { m.flags = FM_HAS_Q_OFFSET; }, "q_offset is 0; it must be absent");
  refused([](fm_mask& m) { m.q_pos.shape[0] = 2, m.k_pos.shape[0] = 3; }, "its k_pos 3");
}

}  // namespace
}  // namespace flashmask::test
