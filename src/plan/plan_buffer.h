// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "common/message.h"
#include "flashmask/plan.h"

namespace flashmask {

/// The layout of a mask's plan, from its shapes.
inline PlanLayout plan_layout(const MaskView& mask, int64_t bit_tiles = kNoBits, PlanForm form = PlanForm::kBits) {
  return {mask.seqlen_q, mask.seqlen_k, mask.batch(), mask.heads(), bit_tiles, form};
}
/// The layout of the plan that a call on `device` makes.
inline PlanLayout plan_layout(const MaskView& mask, Device device) {
  return plan_layout(mask, most_bit_tiles(mask, device));
}
/// The layout of a plan on `device` in a buffer of so many bytes: with bit tiles as many as there is room for, up to
/// most_bit_tiles(); in runs if they have room and bits have not, and the mask's plan may be in runs.
PlanLayout plan_layout(const MaskView& mask, Device device, std::size_t bytes);

/// The layout in runs of a plan whose form follows from its mask's contents; none if it is in bits whatever they are.
std::optional<PlanLayout> runs_layout(const MaskView& mask);

/// A finished plan's PlanLayout::most_runs; 0 in bits.
int32_t most_runs(const PlanLayout& layout, std::span<const std::byte> buffer);
/// Writes a plan, which is not the mask's if most_runs() is not 0.
void write_plan(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> buffer);
/// Throws kInvalidArgument unless most_runs is 0.
void check_runs(const PlanLayout& layout, int32_t most_runs);

/// Throws kInvalidArgument, naming the argument, unless a plan of this layout can be written to `buffer`.
inline void check_plan_buffer(const char* argument, std::span<const std::byte> buffer, const PlanLayout& layout) {
  if (static_cast<int64_t>(buffer.size()) < layout.bytes)
    throw_invalid(argument, " has ", buffer.size(), " bytes; this mask's plan needs ", layout.bytes);
  if (!buffer.data()) throw_invalid(argument, " has no data");
  if (reinterpret_cast<std::uintptr_t>(buffer.data()) % 8 != 0) throw_invalid(argument, " must be aligned to 8 bytes");
}

/// Makes all visible tiles of a plan in host memory partial, as a source beside the plan's mask says which of their
/// elements are visible.
void make_full_tiles_partial(std::span<std::byte> buffer, const PlanLayout& layout);

}  // namespace flashmask
