// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "call/launch.h"
#include "call/problem.h"
#include "mask/families/arguments.h"

namespace flashmask {

/// Computes attention. Backends are stateless singletons.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  virtual BackendInfo info() const = 0;
  /// Kind of device that holds its tensors.
  virtual Device::Kind device_kind() const { return Device::Kind::kCpu; }
  /// True if the device is there and can run this backend.
  virtual bool has_device(const Device&) const { return true; }
  /// The call configured, or why this backend does not take it. Reads shapes, strides and addresses, no contents.
  virtual Prepared prepare(const Problem& problem) const = 0;
  /// Chosen by "auto" when it takes the call; otherwise only by name.
  virtual bool automatic() const { return true; }
  /// Kernels compiled in, whatever this machine can run.
  virtual std::vector<KernelInfo> kernels() const { return {}; }
};

/// The backends, the preferred first; one that is not compiled in is listed too, and says so.
std::span<const Backend* const> backend_list();

const Backend& reference_backend();
const Backend& cuda_backend();
#ifdef FLASHMASK_WITH_CPU
const Backend& cpu_backend();
#endif

namespace cuda {

/// build_plan on CUDA device `index`, arguments checked.
void build_plan(const MaskView& mask, std::span<std::byte> buffer, int32_t index, void* stream);
/// build_vectors on the arguments' CUDA device.
void build_mask(const build::Arguments& arguments, const build::Output& output,
                const std::function<std::byte*(std::size_t)>& allocate, void* stream);
/// True if `plan` equals a plan made of `mask` now, in `scratch`. Waits for the stream.
bool is_plan_of(const MaskView& mask, const PlanView& plan, std::span<std::byte> scratch, void* stream);

}  // namespace cuda

}  // namespace flashmask
