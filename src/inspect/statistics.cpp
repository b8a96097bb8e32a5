// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "common/arithmetic.h"
#include "common/message.h"
#include "flashmask/inspect.h"
#include "inspect/element_counts.h"

namespace flashmask {
namespace {

int64_t count_tiles(std::span<const TileRun> runs) {
  int64_t count = 0;
  for (const TileRun& run : runs) count += run.end - run.begin;
  return count;
}

void add_tiles(const TileColumn& column, MaskStatistics& sum) {
  const int64_t full = count_tiles(column.full);
  sum.full_tiles += full;
  sum.partial_tiles += count_tiles(column.live) - full;
}

void add_visible(const Mask& mask, int64_t batch, int64_t head, MaskStatistics& sum) {
  // In one cell that holds everything.
  const int64_t rows = std::max<int64_t>(mask.seqlen_q(), 1), keys = std::max<int64_t>(mask.seqlen_k(), 1);
  for_each_visible_column(mask.view(), {.batch = batch, .head = head, .row_step = rows, .key_step = keys},
                          [&sum](int64_t, int64_t, std::span<const int64_t> visible) {
                            for (const int64_t count : visible) sum.visible += count;
                          });
}

/// Returns first * ... * rest or throws an error that names `what`.
template <typename... Factors>
int64_t counted(const char* what, Factors... factors) {
  const auto product = checked_product(factors...);
  if (!product) throw_invalid("the mask has more than 2^63 ", what);
  return *product;
}

void check_flops_argument(const char* argument, int64_t value) {
  if (value < 0) throw_invalid(argument, " is ", value, "; it must be at least 0");
}

}  // namespace

MaskStatistics statistics(const Mask& mask, TileShape tile) {
  check_tile(tile);
  MaskStatistics sum;
  sum.tile = tile;
  sum.elements = counted("elements", mask.batch(), mask.heads(), mask.seqlen_q(), mask.seqlen_k());
  sum.tiles = counted("tiles", mask.batch(), mask.heads(), ceil_div(mask.seqlen_q(), tile.rows),
                      ceil_div(mask.seqlen_k(), tile.keys));
  for (int64_t b = 0; b < mask.batch(); ++b) {
    for (int64_t h = 0; h < mask.heads(); ++h) {
      add_visible(mask, b, h, sum);
      for_each_tile_column(mask.view(), b, h, tile, [&sum](const TileColumn& column) { add_tiles(column, sum); });
    }
  }
  return sum;
}

AttentionFlops attention_flops(int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim,
                               int64_t head_dim_v, double share) {
  check_flops_argument("batch", batch);
  check_flops_argument("heads", heads);
  check_flops_argument("seqlen_q", seqlen_q);
  check_flops_argument("seqlen_k", seqlen_k);
  check_flops_argument("head_dim", head_dim);
  check_flops_argument("head_dim_v", head_dim_v);
  if (!(share >= 0 && share <= 1)) throw_invalid("share is ", share, "; it must be between 0 and 1");
  const double scores = static_cast<double>(batch) * static_cast<double>(heads) * static_cast<double>(seqlen_q) *
                        static_cast<double>(seqlen_k) * share;
  const auto d = static_cast<double>(head_dim), dv = static_cast<double>(head_dim_v);
  // Forward: Q K^T over d, P V over dv. Backward: Q K^T, dS K and dS^T Q over d; dO V^T and P^T dO over dv.
  return {.forward = 2 * scores * (d + dv), .backward = 2 * scores * (3 * d + 2 * dv)};
}

}  // namespace flashmask
