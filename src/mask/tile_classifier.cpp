// SPDX-License-Identifier: Apache-2.0
#include "mask/tile_classifier.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/arithmetic.h"
#include "common/message.h"
#include "flashmask/tiles.h"
#include "mask/host_only.h"
#include "mask/view.h"

namespace flashmask {
namespace {

/// Part in which tiles are classified before they are put together. Under a block mask it lies within one block. By
/// positions it is a granule of the plan if possible, so that a tile is classified as it is executed.
TileShape classified_part(const MaskView& view, TileShape tile) {
  if (compares_positions(view)) {
    const auto part = [](int64_t side, int64_t granule, int64_t seqlen) {
      return side >= seqlen ? granule : std::gcd(side, granule);  // parts beyond the end do not matter
    };
    return {part(tile.rows, kGranuleRows, view.seqlen_q), part(tile.keys, kGranuleKeys, view.seqlen_k)};
  }
  if (view.block_mask) return {std::gcd(tile.rows, kBlockMaskSize), std::gcd(tile.keys, kBlockMaskSize)};
  return tile;
}

}  // namespace

TileClassifier::TileClassifier(int64_t seqlen_q, int64_t tile_rows)
    : seqlen_q_(static_cast<int32_t>(seqlen_q)),
      tile_rows_(static_cast<int32_t>(std::min(tile_rows, kMaxSeqlen))),
      tiles_(static_cast<int32_t>(ceil_div(seqlen_q, tile_rows))) {
  const int64_t words = ceil_div(tiles_, 64);
  covered_.assign(static_cast<std::size_t>(words * 64), 0);
  touched_.assign(static_cast<std::size_t>(words * 64), 0);
  dirty_.assign(static_cast<std::size_t>(words), 0);
}

void TileClassifier::add(std::vector<int32_t>& events, rules::Interval tiles) {
  if (tiles.begin >= tiles.end) return;
  ++events[static_cast<std::size_t>(tiles.begin)];
  dirty_[static_cast<std::size_t>(tiles.begin / 64)] = 1;
  if (static_cast<std::size_t>(tiles.end) == events.size()) return;
  --events[static_cast<std::size_t>(tiles.end)];
  dirty_[static_cast<std::size_t>(tiles.end / 64)] = 1;
}

void TileClassifier::set_positions(const rules::PositionBand& band) {
  band_ = band;
  if (!band.q_pos) return;
  row_positions_.assign(static_cast<std::size_t>(tiles_), {});
  for (int32_t i = 0; i < seqlen_q_; ++i) {
    rules::PositionRange& range = row_positions_[static_cast<std::size_t>(i / tile_rows_)];
    range = rules::with(range, band.q_pos[i]);
  }
}

void TileClassifier::judge_positions(int64_t key_begin, int64_t key_end, std::span<uint64_t> live,
                                     std::span<uint64_t> full) const {
  rules::PositionRange keys;
  for (int64_t j = key_begin; j < key_end; ++j) keys = rules::with(keys, band_.k_pos[j]);
  for (std::size_t r = 0; r < row_positions_.size(); ++r) {
    const uint64_t bit = uint64_t{1} << (r % 64);
    if (!rules::some_in_band(band_, row_positions_[r], keys)) live[r / 64] &= ~bit;
    if (!rules::all_in_band(band_, row_positions_[r], keys)) full[r / 64] &= ~bit;
  }
}

void TileClassifier::classify(const ColumnRows& columns, int64_t key_begin, int64_t key_end, std::span<uint64_t> live,
                              std::span<uint64_t> full) {
  for (int64_t j = key_begin; j < key_end; ++j) {
    columns.for_each_hidden(static_cast<int32_t>(j), [this](rules::Interval hidden) {
      add(covered_, rules::covered_tiles(hidden, tile_rows_, seqlen_q_));
      add(touched_, rules::touched_tiles(hidden, tile_rows_));
    });
  }
  const auto count = static_cast<int32_t>(key_end - key_begin);
  int32_t covered = 0, touched = 0;
  for (std::size_t w = 0; w < dirty_.size(); ++w) {
    uint64_t live_word = 0, full_word = 0;
    if (dirty_[w]) {
      for (std::size_t bit = 0; bit < 64; ++bit) {
        covered += std::exchange(covered_[w * 64 + bit], 0);
        touched += std::exchange(touched_[w * 64 + bit], 0);
        live_word |= uint64_t{rules::is_live(covered, count)} << bit;
        full_word |= uint64_t{rules::is_full(touched)} << bit;
      }
      dirty_[w] = 0;
    } else {
      live_word = rules::is_live(covered, count) ? ~uint64_t{0} : 0;
      full_word = rules::is_full(touched) ? ~uint64_t{0} : 0;
    }
    const uint64_t existing = rules::low_bits(tiles_ - static_cast<int32_t>(w) * 64);
    live[w] = live_word & existing;
    full[w] = full_word & existing;
  }
  if (band_.q_pos) judge_positions(key_begin, key_end, live, full);
}

TileGrid classify_tiles(const Mask& mask, int64_t batch, int64_t head, TileShape shape) {
  return classify_tiles(mask.view(), batch, head, shape);
}

TileGrid classify_tiles(const MaskView& view, int64_t batch, int64_t head, TileShape shape) {
  require_host(view, "classify_tiles");
  if (shape.rows < 1 || shape.keys < 1)
    throw_invalid("tile is ", shape.rows, "x", shape.keys, "; both sides must be at least 1");
  if (batch < 0 || batch >= view.batch() || head < 0 || head >= view.heads()) {
    throw_invalid("(batch ", batch, ", head ", head, ") is outside of the mask's [", view.batch(), ", ", view.heads(),
                  "]");
  }
  TileGrid grid{.shape = shape,
                .row_tiles = ceil_div(view.seqlen_q, shape.rows),
                .key_tiles = ceil_div(view.seqlen_k, shape.keys),
                .classes = {}};
  if (grid.row_tiles == 0 || grid.key_tiles == 0) return grid;
  const uint8_t* keep = block_mask(view, batch, head);
  const TileShape part = classified_part(view, shape);
  const int64_t part_rows = ceil_div(view.seqlen_q, part.rows), part_keys = ceil_div(view.seqlen_k, part.keys);
  const int64_t key_blocks = ceil_div(view.seqlen_k, kBlockMaskSize);
  const auto cells = static_cast<std::size_t>(grid.row_tiles * grid.key_tiles);
  std::vector<uint8_t> any(cells, 0), all(cells, 1);
  TileClassifier classifier(view.seqlen_q, part.rows);
  classifier.set_positions(position_band(view, batch));
  std::vector<uint64_t> live(static_cast<std::size_t>(classifier.words())), full(live.size());
  const ColumnRows column = column_rows(view, batch, head);
  for (int64_t c = 0; c < part_keys; ++c) {
    classifier.classify(column, c * part.keys, std::min((c + 1) * part.keys, view.seqlen_k), live, full);
    for (int64_t r = 0; r < part_rows; ++r) {
      const auto bit = [r](const std::vector<uint64_t>& words) {
        return (words[static_cast<std::size_t>(r / 64)] >> (r % 64) & 1) != 0;
      };
      const bool kept =
          !keep || keep[r * part.rows / kBlockMaskSize * key_blocks + c * part.keys / kBlockMaskSize] != 0;
      const auto at =
          static_cast<std::size_t>(r * part.rows / shape.rows * grid.key_tiles + c * part.keys / shape.keys);
      any[at] |= kept && bit(live);
      all[at] &= kept && bit(full);
    }
  }
  grid.classes.resize(cells);
  for (std::size_t at = 0; at < cells; ++at)
    grid.classes[at] = all[at] ? TileClass::kFull : any[at] ? TileClass::kPartial : TileClass::kEmpty;
  return grid;
}

}  // namespace flashmask
