// SPDX-License-Identifier: Apache-2.0
#include "plan/mask_memory.h"

#include <charconv>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include "common/message.h"

namespace flashmask {
namespace {

struct Limit {
  int64_t bytes = 0;  ///< 0: none
  const char* source = "";
};

/// The bytes that the environment variable asks for; 0 without it.
int64_t environment_bytes() {
  const char* const variable = std::getenv(kMaskBytesVariable);
  if (!variable || !*variable) return 0;
  const std::string_view text = variable;
  int64_t bytes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (error != std::errc() || end != text.data() + text.size() || bytes < 1)
    throw_invalid(kMaskBytesVariable, " is '", text, "'; it must be a number of bytes, at least 1");
  return bytes;
}

Limit limit_of(int64_t max_mask_bytes, int64_t device_memory) {
  check_max_mask_bytes(max_mask_bytes);
  if (max_mask_bytes > 0) return {max_mask_bytes, "as asked for"};
  if (const int64_t bytes = environment_bytes(); bytes > 0) return {bytes, kMaskBytesVariable};
  return {device_memory / 4, "a quarter of the device's memory"};
}

}  // namespace

MaskMemory::MaskMemory(const MaskView& mask, const PlanLayout& layout) : plan(layout.bytes) {
  constexpr int64_t kInt = sizeof(int32_t);
  if (mask.column_ptr)
    lists = kInt * (mask.bounds_batch * mask.bounds_heads * (mask.seqlen_k + 1) + 2 * mask.listed_intervals);
  if (layout.has_bits()) bits = layout.bit_tiles * kBitTileBytes;
}

std::string describe(const MaskMemory& memory) {
  return message("interval lists of ", memory.lists, " bytes and a plan of ", memory.plan, " bytes, ", memory.bits,
                 " of them bits of partial tiles");
}

void check_max_mask_bytes(int64_t max_mask_bytes) {
  if (max_mask_bytes < 0)
    throw_invalid("max_mask_bytes is ", max_mask_bytes, "; it must be 0 (a quarter of the device's memory) or more");
}

std::string mask_memory_refusal(const MaskView& mask, const PlanLayout& layout, int64_t max_mask_bytes,
                                int64_t device_memory) {
  if (!mask.column_ptr) return "";
  const MaskMemory memory(mask, layout);
  const Limit limit = limit_of(max_mask_bytes, device_memory);
  if (limit.bytes == 0 || memory.total() <= limit.bytes) return "";
  return message("the mask has ", describe(memory), ": ", memory.total(), " bytes; max_mask_bytes allows ", limit.bytes,
                 " (", limit.source, "): raise it, or the environment variable ", kMaskBytesVariable);
}

void check_mask_memory(const MaskView& mask, const PlanLayout& layout, int64_t max_mask_bytes, int64_t device_memory) {
  const std::string why = mask_memory_refusal(mask, layout, max_mask_bytes, device_memory);
  if (!why.empty()) throw_unsupported(why);
}

}  // namespace flashmask
