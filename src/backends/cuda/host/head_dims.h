// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "call/launch.h"
#include "call/problem.h"
#include "common/message.h"

namespace flashmask::cuda {

// Which tile of an architecture's table a pair of head dims runs in. The architecture says what its tiles hold:
// holds(tile, dim, dim_of_tile), whether the kernels of `tile` take rows of `dim` where it has `dim_of_tile`.

/// Head dims are multiples of this, as rows are loaded 16 bytes at a time.
inline constexpr int64_t kHeadDimStep = 8;

/// Multiply-adds in the products of a pair of a row and a key.
template <typename Tile>
constexpr int64_t pair_work(int64_t head_dim, int64_t head_dim_v) {
  return Tile::kProductsOfQk * head_dim + Tile::kProductsOfV * head_dim_v;
}

/// Takes every tile.
struct AnyTile {
  template <typename Tile>
  constexpr bool operator()(const Tile&) const {
    return true;
  }
};

/// The first least-work tile among the `tiles` that hold the head dims and are `taken`; null if there is none.
template <typename Tile, std::size_t kCount, typename Taken = AnyTile>
constexpr const Tile* least_tile(const Tile (&tiles)[kCount], int64_t head_dim, int64_t head_dim_v,
                                 const Taken& taken = {}) {
  const auto work = [](const Tile& tile) { return pair_work<Tile>(tile.head_dim, tile.head_dim_v); };
  const Tile* least = nullptr;
  for (const Tile& tile : tiles) {
    if (!holds(tile, head_dim, tile.head_dim) || !holds(tile, head_dim_v, tile.head_dim_v)) continue;
    if ((!least || work(tile) < work(*least)) && taken(tile)) least = &tile;
  }
  return least;
}

/// Explanation::padding_share of a call that runs in `tile`.
template <typename Tile>
constexpr double padding_share(const Tile& tile, int64_t head_dim, int64_t head_dim_v) {
  return 1 - static_cast<double>(pair_work<Tile>(head_dim, head_dim_v)) /
                 static_cast<double>(pair_work<Tile>(tile.head_dim, tile.head_dim_v));
}

/// Why no `taken` tile among `tiles` holds the call's head dims, and the nearest head dims that a tile does hold.
template <typename Tile, std::size_t kCount, typename Taken = AnyTile>
Refusal head_dims_refusal(const Problem& p, const Tile (&tiles)[kCount], const Taken& taken = {}) {
  std::string known;
  const Tile* nearest = nullptr;
  const auto missing = [&](const Tile& tile) {
    return std::max(p.head_dim - tile.head_dim, int64_t{0}) + std::max(p.head_dim_v - tile.head_dim_v, int64_t{0});
  };
  for (const Tile& tile : tiles) {
    if (!taken(tile)) continue;
    const std::string dims = message(tile.head_dim, " / ", tile.head_dim_v);
    if (known.find(dims) == std::string::npos) known += (known.empty() ? "" : ", ") + dims;
    if (!nearest || missing(tile) < missing(*nearest)) nearest = &tile;
  }
  if (!nearest) {
    std::string asked;
    for (const std::string& name : names(p.features)) asked += (asked.empty() ? "" : " and ") + name;
    return {message(asked, " are set together; there are no kernels of both: leave one out")};
  }
  return {message("head_dim ", p.head_dim, " with head_dim_v ", p.head_dim_v, " is not taken by the ",
                  p.is_backward ? "backward" : "forward", "; it takes multiples of ", kHeadDimStep,
                  " that one of (head_dim / head_dim_v) ", known, " holds; the nearest is ", nearest->head_dim, " / ",
                  nearest->head_dim_v)};
}

}  // namespace flashmask::cuda
