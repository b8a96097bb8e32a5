// SPDX-License-Identifier: Apache-2.0
#include "verify/device_views.h"

#include <algorithm>
#include <span>

#include "numerics/device_copies.h"

namespace flashmask::verify {
namespace {

std::size_t bytes_of(const TensorView& t) {
  if (t.num_elements() == 0) return 0;
  int64_t last = 0;
  for (int d = 0; d < t.rank; ++d) last += (t.shape[d] - 1) * t.stride[d];
  return static_cast<std::size_t>(last + 1) * element_size(t.dtype);
}

}  // namespace

DeviceViews::DeviceViews(const std::vector<TensorView*>& views) {
  for (TensorView* view : views) {
    if (!view->defined()) continue;
    auto* const host = static_cast<std::byte*>(view->data);
    const std::size_t bytes = bytes_of(*view);
    // A copy of no bytes has an address, too.
    numerics::DeviceMemory memory = bytes > 0 ? numerics::DeviceMemory(std::span<const std::byte>(host, bytes))
                                              : numerics::DeviceMemory(std::size_t{16});
    view->data = memory.bytes().data();
    view->device = numerics::kDevice;
    copies_.push_back({host, bytes, std::move(memory)});
  }
}

void DeviceViews::copy_back(const TensorView& view) const {
  const auto found =
      std::ranges::find_if(copies_, [&](const Copy& copy) { return copy.memory.bytes().data() == view.data; });
  if (found != copies_.end() && found->bytes > 0) found->memory.copy_to({found->host, found->bytes});
}

}  // namespace flashmask::verify
