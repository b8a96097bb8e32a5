// SPDX-License-Identifier: Apache-2.0
#include "flashmask/placement.h"

#include <algorithm>
#include <utility>

#include "common/arithmetic.h"
#include "common/message.h"
#include "placement/exchange.h"
#include "placement/visibility.h"

namespace flashmask {
namespace {

constexpr int64_t kMostRanks = 65'536;
constexpr int64_t kUnit = 128, kMostUnits = 16'384;

void check(std::span<const MaskView> masks, int64_t ranks, double load_slack) {
  if (masks.empty()) throw_invalid("masks is empty; a placement needs at least one mask");
  if (ranks < 1 || ranks > kMostRanks) throw_invalid("ranks is ", ranks, "; it must be between 1 and ", kMostRanks);
  if (!(load_slack >= 0 && load_slack <= 1))
    throw_invalid("load_slack is ", load_slack, "; it must be between 0 and 1");
  for (std::size_t m = 0; m < masks.size(); ++m) {
    const MaskView& mask = masks[m];
    if (mask.device.kind != Device::Kind::kCpu)
      throw_invalid("mask ", m, " is on a CUDA device; placing reads it and needs it in host memory");
    if (mask.seqlen_q != mask.seqlen_k || mask.seqlen_q != masks[0].seqlen_q)
      throw_invalid("mask ", m, " has ", mask.seqlen_q, " query rows and ", mask.seqlen_k,
                    " keys; all masks of a placement must have as many of both, the first has ", masks[0].seqlen_q,
                    " rows");
  }
}

/// Number of units of a rank; two ranks differ by at most one.
int64_t units_of(int64_t rank, int64_t units, int64_t ranks) {
  return units * (rank + 1) / ranks - units * rank / ranks;
}

std::vector<int32_t> contiguous(int64_t units, int64_t ranks) {
  std::vector<int32_t> owner;
  for (int64_t r = 0; r < ranks; ++r)
    owner.insert(owner.end(), static_cast<std::size_t>(units_of(r, units, ranks)), static_cast<int32_t>(r));
  return owner;
}

/// The first half of each rank's units from the beginning on, the second from the end.
std::vector<int32_t> zigzag(int64_t units, int64_t ranks) {
  std::vector<int32_t> first, second;
  for (int64_t r = 0; r < ranks; ++r) {
    const auto all = static_cast<std::size_t>(units_of(r, units, ranks));
    first.insert(first.end(), all - all / 2, static_cast<int32_t>(r));
    second.insert(second.end(), all / 2, static_cast<int32_t>(r));
  }
  first.insert(first.end(), second.rbegin(), second.rend());
  return first;
}

using Seen = std::vector<placement::Visibility>;

/// Live tiles of the ranks under one mask.
std::vector<int64_t> rank_tiles(const placement::Visibility& seen, std::span<const int32_t> owner, int64_t ranks) {
  std::vector<int64_t> tiles(static_cast<std::size_t>(ranks), 0);
  for (std::size_t u = 0; u < owner.size(); ++u) tiles[static_cast<std::size_t>(owner[u])] += seen.tiles[u];
  return tiles;
}

/// A finished placement, with the numbers that it is judged by.
Placement made(std::span<const MaskView> masks, const Seen& seen, std::vector<int32_t> owner, int64_t ranks) {
  Placement result{.seqlen = masks[0].seqlen_q, .ranks = ranks, .unit = seen[0].unit, .owner = std::move(owner)};
  for (std::size_t m = 0; m < masks.size(); ++m) {
    const std::vector<int64_t> tiles = rank_tiles(seen[m], result.owner, ranks);
    const std::vector<int64_t> keys = placement::received_keys(seen[m], result.owner, ranks);
    result.live_tiles.insert(result.live_tiles.end(), tiles.begin(), tiles.end());
    result.received.insert(result.received.end(), keys.begin(), keys.end());
  }
  return result;
}

/// Largest load over the mean, of the mask where it is largest; nothing to do is balanced.
double imbalance(const Placement& p) {
  double worst = 1;
  for (auto mask = p.live_tiles.begin(); mask != p.live_tiles.end(); mask += p.ranks) {
    int64_t total = 0;
    for (auto rank = mask; rank != mask + p.ranks; ++rank) total += *rank;
    if (total == 0) continue;
    const auto most = static_cast<double>(*std::max_element(mask, mask + p.ranks) * p.ranks);
    worst = std::max(worst, most / static_cast<double>(total));
  }
  return worst;
}

/// Keys that the rank receives that receives most, summed over the masks.
int64_t most_received(const Placement& p) {
  int64_t sum = 0;
  for (auto mask = p.received.begin(); mask != p.received.end(); mask += p.ranks)
    sum += *std::max_element(mask, mask + p.ranks);
  return sum;
}

Placement balanced(std::span<const MaskView> masks, const Seen& seen, int64_t ranks, double load_slack) {
  const int64_t units = seen[0].units;
  const auto from = [&](std::vector<int32_t> start) {
    return made(masks, seen, placement::exchange(seen, std::move(start), ranks, load_slack), ranks);
  };
  Placement first = from(contiguous(units, ranks)), second = from(zigzag(units, ranks));
  const auto rank_of = [&](const Placement& p) {
    return std::pair(std::max(imbalance(p), 1 + load_slack), most_received(p));
  };
  return rank_of(second) < rank_of(first) ? second : first;
}

}  // namespace

std::vector<RowSegment> Placement::segments(int64_t rank) const {
  std::vector<RowSegment> result;
  for (std::size_t u = 0; u < owner.size(); ++u) {
    if (owner[u] != rank) continue;
    const int64_t begin = static_cast<int64_t>(u) * unit, end = std::min(begin + unit, seqlen);
    if (!result.empty() && result.back().end == begin) {
      result.back().end = end;
    } else {
      result.push_back({begin, end});
    }
  }
  return result;
}

int64_t placement_unit(int64_t seqlen, int64_t ranks, bool has_block_mask) {
  int64_t unit = kUnit;
  while (ceil_div(seqlen, unit) > kMostUnits) unit *= 2;
  while (!has_block_mask && unit > 1 && ceil_div(seqlen, unit) < 2 * ranks) unit /= 2;
  return unit;
}

Placement place(std::span<const MaskView> masks, int64_t ranks, PlacementScheme scheme, double load_slack) {
  check(masks, ranks, load_slack);
  const bool blocks = std::any_of(masks.begin(), masks.end(), [](const MaskView& m) { return m.block_mask; });
  const int64_t unit = placement_unit(masks[0].seqlen_q, ranks, blocks);
  Seen seen;
  for (const MaskView& mask : masks) seen.push_back(placement::visibility(mask, unit));
  switch (scheme) {
    case PlacementScheme::kContiguous:
      return made(masks, seen, contiguous(seen[0].units, ranks), ranks);
    case PlacementScheme::kZigzag:
      return made(masks, seen, zigzag(seen[0].units, ranks), ranks);
    case PlacementScheme::kBalanced:
      return balanced(masks, seen, ranks, load_slack);
  }
  throw_invalid("scheme is ", static_cast<int>(scheme), "; it must be 0 (contiguous), 1 (zigzag) or 2 (balanced)");
}

}  // namespace flashmask
