// SPDX-License-Identifier: Apache-2.0
// Never run: that it compiles shows that every function of rules.h is device code.
#include "single_columns.h"

namespace rules = flashmask::rules;
namespace test = flashmask::test;

__global__ void use_every_rule(rules::Columns columns, int32_t i, int32_t j, int32_t tile_rows, uint64_t* out) {
  const rules::HiddenRows hidden = rules::hidden_rows(columns, j);
  out[0] = rules::is_visible(columns, i, j) && rules::is_visible(hidden, i);
  out[1] = test::visible_bits(hidden, i) & rules::low_bits(j);
  out[1] &= test::visible_bits<uint32_t>(hidden, i) & rules::low_bits<uint32_t>(j);
  const rules::HiddenRows apart = rules::merge(hidden);
  rules::Interval merged[4];
  const int n = rules::merge(hidden, merged);
  int32_t covered = 0, touched = rules::clamp_row(i, columns.seqlen_q) + apart.interval[0].begin;
  for (int k = 0; k < n; ++k) {
    const rules::Interval whole = rules::covered_tiles(merged[k], tile_rows, columns.seqlen_q);
    const rules::Interval some = rules::touched_tiles(merged[k], tile_rows);
    covered += whole.end - whole.begin;
    touched += some.end - some.begin;
  }
  const rules::Interval stored = rules::stored_interval(columns.lts, columns.lte, j * columns.stride, columns.seqlen_q);
  const int32_t near[4] = {0, 1, j, j + 1};
  uint32_t one[1][1], two[2][2], four[1][4];
  const int32_t single[1] = {i}, pair[2] = {0, i};
  rules::visible_windows<128>(columns, test::StoredBounds<1>{columns, j, single}, j, single, i, one);
  rules::visible_windows<128>(columns, test::StoredBounds<2>{columns, j, pair}, j, pair, i, two);
  rules::visible_windows<128>(columns, test::StoredBounds<4>{columns, j, near}, j, near, i, four);
  const rules::Interval seen = rules::columns_in_band(rules::tile_band(columns, j, i), i);
  out[6] = static_cast<uint64_t>(seen.begin) + static_cast<uint64_t>(seen.end);
  out[3] = (one[0][0] & two[0][0] & two[1][1] & four[0][0] & four[0][1] & four[0][2] & four[0][3]) |
           (rules::window_from(i, 1) & rules::bits_from<uint32_t>(i) & rules::bits_from<uint64_t>(j));
  out[3] += static_cast<uint64_t>(rules::rows_to_diagonal(j, i, columns.seqlen_q));
  out[4] = static_cast<uint64_t>(rules::clamp_row_on_diagonal(j, i, columns.seqlen_q));
  rules::Interval first = stored, second = apart.interval[1];
  rules::order(first, second);
  out[5] = static_cast<uint64_t>(first.begin);
  const rules::PositionBand band{i, j, columns.lts, columns.lte};
  const rules::SeenPositions of_row = rules::seen_positions(band, j);
  const rules::PositionRange range = rules::with({of_row.first, of_row.last}, i);
  out[8] = rules::last_visible_row<64>(columns, band, j, [i](int32_t granule) { return granule < i; });
  out[7] = rules::in_band(band, i, j) + rules::some_in_band(band, range, {i, j}) + rules::all_in_band(band, range, {});
  out[2] = rules::is_live(covered, stored.begin) && rules::is_full(touched + stored.end);
}
