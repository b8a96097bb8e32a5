// SPDX-License-Identifier: Apache-2.0
#include "numerics/device_copies.h"

#include <array>
#include <vector>

#include "flashmask/status.h"

namespace flashmask::numerics {
namespace {

template <typename T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

/// A mask's vectors in the order of startend_row_indices, in a form that holds them all.
struct Form {
  bool causal = false;
  std::vector<std::vector<int32_t>> vectors;
};

/// Fills in the missing vectors of a pair.
void complete(std::vector<int32_t>& begin, std::vector<int32_t>& end, std::size_t size, int32_t seqlen_q) {
  const bool none = begin.empty() && end.empty();
  if (begin.empty()) begin.assign(size, 0);
  if (end.empty()) end.assign(size, none ? 0 : seqlen_q);
}

Form form_of(const Mask& mask) {
  const auto copy = [](std::span<const int32_t> v) { return std::vector<int32_t>(v.begin(), v.end()); };
  std::vector<int32_t> lts = copy(mask.lts()), lte = copy(mask.lte()), uts = copy(mask.uts()), ute = copy(mask.ute());
  const bool a = !lts.empty(), b = !lte.empty(), c = !uts.empty(), d = !ute.empty();
  if (!a && !b && !c && !d) return {};
  if (a && !b && !c && !d) return {true, {lts}};
  if (a && b && !c && !d) return {true, {lts, lte}};
  if (a && !b && !c && d) return {false, {lts, ute}};
  const MaskView& view = mask.view();
  const auto size = static_cast<std::size_t>(view.bounds_batch * view.bounds_heads * view.seqlen_k);
  complete(lts, lte, size, static_cast<int32_t>(view.seqlen_q));
  complete(uts, ute, size, static_cast<int32_t>(view.seqlen_q));
  return {false, {lts, lte, uts, ute}};
}

std::optional<int64_t> q_offset_of(const Mask& mask) {
  return mask.has_positions() ? std::nullopt : std::optional(mask.q_offset());
}

Mask without_contents(const Mask& mask) {
  return Mask(
      {.seqlen_q = mask.seqlen_q(), .seqlen_k = mask.seqlen_k(), .band = mask.band(), .q_offset = q_offset_of(mask)});
}

TensorView on_device(const DeviceMemory& memory, DataType dtype, std::initializer_list<int64_t> shape) {
  TensorView view = TensorView::contiguous(memory.bytes().data(), dtype, shape);
  view.device = kDevice;
  return view;
}

}  // namespace

DeviceTensor::DeviceTensor(const Tensor& host) : memory_(host.storage()), view_(host.view()) {
  view_.data = memory_.bytes().data() + host.first_byte();
  view_.device = kDevice;
}

TensorView DeviceTensor::view(int64_t count) const {
  TensorView view = view_;
  view.shape[0] = count;
  return view;
}

DeviceMask::DeviceMask(const Mask& host) : mask_(without_contents(host)) {
  const MaskView& view = host.view();
  if (host.has_interval_lists()) {
    column_ptr_.emplace(std::as_bytes(host.column_ptr()));
    intervals_.emplace(std::as_bytes(host.intervals()));
    mask_ = from_interval_lists(
                on_device(*column_ptr_, DataType::kInt32, {view.bounds_batch, view.bounds_heads, view.seqlen_k + 1}),
                on_device(*intervals_, DataType::kInt32, {view.listed_intervals, 2}), view.seqlen_q, q_offset_of(host))
                .with_band(host.band());
  }
  if (const Form form = form_of(host); !form.vectors.empty()) {
    std::vector<int32_t> interleaved;
    for (std::size_t at = 0; at < form.vectors[0].size(); ++at) {
      for (const std::vector<int32_t>& vector : form.vectors) interleaved.push_back(vector[at]);
    }
    indices_.emplace(bytes_of(interleaved));
    const auto vectors = static_cast<int64_t>(form.vectors.size());
    const TensorView indices =
        on_device(*indices_, DataType::kInt32, {view.bounds_batch, view.bounds_heads, view.seqlen_k, vectors});
    mask_ = from_startend_row_indices(indices, form.causal, view.seqlen_q, q_offset_of(host)).with_band(host.band());
  }
  if (host.has_positions()) {
    q_pos_.emplace(std::as_bytes(host.q_pos()));
    k_pos_.emplace(std::as_bytes(host.k_pos()));
    mask_ = mask_.with_positions(on_device(*q_pos_, DataType::kInt32, {view.q_pos_batch, view.seqlen_q}),
                                 on_device(*k_pos_, DataType::kInt32, {view.k_pos_batch, view.seqlen_k}));
  }
  if (!host.has_block_mask()) return;
  const std::span<const uint8_t> keep = host.block_mask();
  blocks_.emplace(std::as_bytes(keep));
  const auto blocks = [](int64_t seqlen) { return (seqlen + kBlockMaskSize - 1) / kBlockMaskSize; };
  mask_ = mask_.with_block_mask(on_device(
      *blocks_, DataType::kUInt8, {view.block_batch, view.block_heads, blocks(view.seqlen_q), blocks(view.seqlen_k)}));
}

namespace {

PlanLayout plan_layout_of(const Mask& mask) {
  const DeviceMemory scratch(static_cast<std::size_t>(count_plan_scratch(mask.view(), kDevice)));
  return count_plan_layout(mask.view(), scratch.bytes(), kDevice);
}

}  // namespace

DevicePlan::DevicePlan(const Mask& mask) : DevicePlan(plan_layout_of(mask)) {}

DevicePlan::DevicePlan(const PlanLayout& layout)
    : memory_(std::vector<std::byte>(static_cast<std::size_t>(layout.bytes), PoisonedBytes::kPoison)),
      view_(PlanView::on_device(layout, memory_.bytes(), kDevice)) {}

}  // namespace flashmask::numerics
