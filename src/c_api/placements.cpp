// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <span>
#include <vector>

#include "c_api/read.h"
#include "flashmask/placement.h"

namespace flashmask::c_api {
namespace {

/// The default of fm_placement::load_slack, which is 0 there.
constexpr double kLoadSlack = 0.02;

template <typename T>
void copy_out(const std::vector<T>& from, T* to, const char* argument) {
  if (!from.empty()) std::copy(from.begin(), from.end(), &required(to, argument));
}

void write_placement(const fm_mask* const* masks, int64_t count, fm_placement* placement) {
  auto out = read_struct(placement, "placement");
  if (count < 1) throw_invalid("count is ", count, "; a placement needs at least one mask");
  required(masks, "masks");
  std::deque<CallMask> read;  // views point into them
  std::vector<MaskView> views;
  for (int64_t m = 0; m < count; ++m) views.push_back(read.emplace_back(masks[m], Device{}).contents());
  const Placement placed = place(views, out.ranks, static_cast<PlacementScheme>(out.scheme),
                                 out.load_slack == 0 ? kLoadSlack : out.load_slack);
  const auto units = static_cast<int64_t>(placed.owner.size());
  if (out.owner_count < units)
    throw_invalid("placement->owner_count is ", out.owner_count, "; the placement has ", units, " units of ",
                  placed.unit, " rows");
  copy_out(placed.owner, out.owner, "placement->owner");
  copy_out(placed.live_tiles, out.live_tiles, "placement->live_tiles");
  copy_out(placed.received, out.received, "placement->received");
  out.unit = placed.unit;
  out.units = units;
  write_struct(out, placement);
}

}  // namespace
}  // namespace flashmask::c_api

fm_status fm_place(const fm_mask* const* masks, int64_t count, fm_placement* placement) {
  return flashmask::c_api::guarded([&] { flashmask::c_api::write_placement(masks, count, placement); });
}
