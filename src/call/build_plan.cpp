// SPDX-License-Identifier: Apache-2.0

// Plans where the tensors are. Here and not in src/plan/, which knows no backend.

#include <optional>

#include "call/backend.h"
#include "common/host_memory.h"
#include "common/message.h"
#include "flashmask/plan.h"
#include "mask/host_only.h"
#include "plan/mask_memory.h"
#include "plan/plan_buffer.h"

namespace flashmask {
namespace {

void check_mask_device(const MaskView& mask, const Device& device) {
  if (!has_contents(mask) || mask.device == device) return;
  const char* const contents = mask.column_ptr ? "interval lists" : "vectors";
  throw_invalid("the mask's ", contents, " are on ", describe(mask.device), " and the plan is to be on ",
                describe(device), "; copy the ", contents, " there and make the mask from the copy");
}

void check_layout(const MaskView& mask, const PlanLayout& layout, const Device& device) {
  if (layout != plan_layout(mask, layout.bit_tiles, layout.form))
    throw_invalid("layout is of batch ", layout.batch, ", heads ", layout.heads, ", seqlen_q ", layout.seqlen_q,
                  " and seqlen_k ", layout.seqlen_k, "; the mask has ", mask.batch(), ", ", mask.heads(), ", ",
                  mask.seqlen_q, " and ", mask.seqlen_k);
  if (device.kind == Device::Kind::kCpu) return;
  if (layout.in_runs() && (mask.column_ptr || mask.has_positions))
    throw_invalid("layout is in runs, and the mask has ", mask.column_ptr ? "interval lists" : "positions",
                  "; a CUDA device makes their plans in bits alone");
  if (layout.has_bits() != (most_bit_tiles(mask, device) != kNoBits))
    throw_invalid("layout has ", layout.has_bits() ? "" : "no ",
                  "bit tiles; on a CUDA device plans of interval lists, ", "and of no other mask, have them");
}

[[noreturn]] void throw_other_mask() {
  throw_invalid(
      "plan is not the plan of this mask as it is now: the mask's contents changed since it was built, or it is "
      "another's; build it anew");
}

}  // namespace

void build_plan(const MaskView& mask, std::span<std::byte> buffer, Device device, void* stream) {
  build_plan(mask, plan_layout(mask, device, buffer.size()), buffer, device, stream);
}

void build_plan(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> buffer, Device device,
                void* stream) {
  check_mask_device(mask, device);
  check_stream(device, stream);
  check_layout(mask, layout, device);
  check_plan_buffer("plan buffer", buffer, layout);
  backend_for(device.kind).build_plan(mask, layout, buffer, device, stream);
}

void validate_plan(const MaskView& mask, const PlanView& plan, std::span<std::byte> scratch, void* stream) {
  if (!plan.defined()) throw_invalid("plan is undefined");
  // A plan with bits has any number of tiles.
  const PlanLayout layout = plan_layout(mask, plan.device(), static_cast<std::size_t>(plan.layout().bytes));
  check_mask_device(mask, plan.device());
  if (plan.layout() != layout) throw_other_mask();
  check_stream(plan.device(), stream);
  if (plan.device().kind != Device::Kind::kCpu) check_plan_buffer("scratch", scratch, layout);
  if (!backend_for(plan.device().kind).is_plan_of(mask, plan, scratch, stream)) throw_other_mask();
}

int64_t count_bit_tiles(const MaskView& mask, std::span<std::byte> scratch, Device device, void* stream,
                        int64_t max_mask_bytes) {
  check_mask_device(mask, device);
  check_stream(device, stream);
  const Backend& backend = backend_for(device.kind);
  int64_t tiles = most_bit_tiles(mask, device);
  if (tiles != kNoBits) {
    check_plan_buffer("scratch", scratch, plan_layout(mask, int64_t{0}));
    tiles = backend.count_bit_tiles(mask, scratch, device, stream);
  }
  check_mask_memory(mask, plan_layout(mask, tiles), max_mask_bytes, backend.memory_bytes(device));
  return tiles;
}

PlanLayout count_plan_layout(const MaskView& mask, std::span<std::byte> scratch, Device device, void* stream,
                             int64_t max_mask_bytes) {
  const int64_t bit_tiles = count_bit_tiles(mask, scratch, device, stream, max_mask_bytes);
  const std::optional<PlanLayout> runs = runs_layout(mask);
  if (!runs) return plan_layout(mask, bit_tiles);
  if (!has_contents(mask)) return *runs;
  check_plan_buffer("scratch", scratch, *runs);
  const int32_t most = backend_for(device.kind).count_runs(mask, *runs, scratch, device, stream);
  return most == 0 ? *runs : plan_layout(mask);
}

int64_t count_plan_scratch(const MaskView& mask, Device device) {
  if (most_bit_tiles(mask, device) != kNoBits) return plan_layout(mask, int64_t{0}).bytes;
  const std::optional<PlanLayout> runs = runs_layout(mask);
  return runs && has_contents(mask) ? runs->bytes : 0;
}

int64_t Backend::memory_bytes(const Device& device) const {
  return device.kind == Device::Kind::kCpu ? host_memory_bytes() : 0;
}

int64_t Backend::count_bit_tiles(const MaskView&, std::span<std::byte>, const Device&, void*) const { return kNoBits; }

int32_t Backend::count_runs(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> scratch, const Device&,
                            void*) const {
  write_plan(mask, layout, scratch);
  return most_runs(layout, scratch);
}

void Backend::build_plan(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> buffer, const Device&,
                         void*) const {
  flashmask::build_plan(mask, layout, buffer);
}

bool Backend::is_plan_of(const MaskView& mask, const PlanView& plan, std::span<std::byte>, void*) const {
  return plan.mask_hash() == mask.content_hash;
}

}  // namespace flashmask
