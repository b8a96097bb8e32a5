// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "flashmask/mask.h"
#include "flashmask/tiles.h"
#include "mask/column_rows.h"
#include "mask/rules.h"

namespace flashmask {

/// Classifies the row tiles of one range of key columns at a time: linear in the number of columns and hidden intervals
/// plus one 64th of the number of row tiles, and exact but for a band over positions. Such a band is judged by the
/// least and the greatest position of a tile's rows and of its keys, in time linear in the row tiles: a tile called
/// live may have no visible element, and a full tile may be called partial, never the other way round. Reuse one object
/// for all ranges.
class TileClassifier {
 public:
  TileClassifier(int64_t seqlen_q, int64_t tile_rows);

  /// From now on tiles are judged by this band, too.
  void set_positions(const rules::PositionBand& band);

  /// 64-bit words of one answer.
  int64_t words() const { return static_cast<int64_t>(dirty_.size()); }

  /// Bit r % 64 of word r / 64 of `live` (`full`) is set if some (every) element of row tile r and keys
  /// [key_begin, key_end) is visible. Both spans have words() entries; bits past the last tile are clear.
  void classify(const ColumnRows& columns, int64_t key_begin, int64_t key_end, std::span<uint64_t> live,
                std::span<uint64_t> full);

 private:
  void add(std::vector<int32_t>& events, rules::Interval tiles);
  void judge_positions(int64_t key_begin, int64_t key_end, std::span<uint64_t> live, std::span<uint64_t> full) const;

  int32_t seqlen_q_, tile_rows_, tiles_;
  // Difference arrays over the row tiles: how many columns begin or stop to be hidden from whole tiles, and
  // to touch tiles. Only words of 64 tiles in which something happens are marked and walked.
  std::vector<int32_t> covered_, touched_;
  std::vector<uint8_t> dirty_;
  rules::PositionBand band_{};
  std::vector<rules::PositionRange> row_positions_;  // range of each row tile, if the band has positions
};

/// The public classify_tiles, of a view.
TileGrid classify_tiles(const MaskView& view, int64_t batch, int64_t head, TileShape shape);

}  // namespace flashmask
