// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "call/cached_launch.h"
#include "call/launch.h"
#include "call/problem.h"
#include "common/message.h"
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
  /// A call over a cache, likewise.
  virtual PreparedCached prepare_cached(const CachedProblem& problem) const = 0;
  /// True if its forward adds up keys in splits where a call asks for it (Features::split_size).
  virtual bool takes_split_size() const { return false; }
  /// True if its forward waits for keys that arrive while it runs (ForwardArgs::arrivals), and its backward has some
  /// keys' gradients early.
  virtual bool takes_arrivals() const { return false; }
  /// Chosen by "auto" when it takes the call; otherwise only by name.
  virtual bool automatic() const { return true; }
  /// Kernels compiled in, whatever this machine can run.
  virtual std::vector<KernelInfo> kernels() const { return {}; }

  /// Bytes of the device's memory; 0 if they are not known.
  virtual int64_t memory_bytes(const Device& device) const;

  // Plans and masks where the tensors are, on a device of this backend's kind; in host memory unless overridden.
  // Arguments are checked.

  /// Fills `buffer` as the free function does.
  virtual void build_plan(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> buffer,
                          const Device& device, void* stream) const;
  /// The bit tiles of a mask with interval lists, as the free function counts them; a device's backend alone.
  virtual int64_t count_bit_tiles(const MaskView& mask, std::span<std::byte> scratch, const Device& device,
                                  void* stream) const;
  /// Makes the plan of `layout`, in runs, in `scratch`, and returns its PlanLayout::most_runs. Waits for the stream.
  virtual int32_t count_runs(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> scratch,
                             const Device& device, void* stream) const;
  /// True if `plan` equals a plan made of `mask` now, for which a device has `scratch`. Waits for the stream.
  virtual bool is_plan_of(const MaskView& mask, const PlanView& plan, std::span<std::byte> scratch, void* stream) const;
  /// Builds a mask's vectors as the free function does.
  virtual void build_vectors(const build::Arguments& arguments, const build::Output& output,
                             const std::function<std::byte*(std::size_t)>& allocate, void* stream) const;
  /// Writes rows into a cache as the free function does.
  virtual void append(const AppendProblem& problem) const;
  /// Bytes of a plan of calls over caches, and how it is filled. Host memory's is a header.
  virtual std::size_t cached_plan_bytes(const CachedCapacities& capacities, const Device& device) const;
  virtual void build_cached_plan(const CachedProblem& problem, const CachedPlan& plan) const;
};

/// Throws unless the stream is null or the device has streams.
inline void check_stream(const Device& device, const void* stream) {
  if (stream && device.kind == Device::Kind::kCpu) throw_invalid("stream must be null on the CPU");
}

/// The backends, the preferred first; one that is not compiled in is listed too, and says so.
std::span<const Backend* const> backend_list();

/// The preferred backend of a kind of device, for plans and masks.
const Backend& backend_for(Device::Kind kind);

const Backend& reference_backend();
const Backend& cuda_backend();
#ifdef FLASHMASK_WITH_CPU
const Backend& cpu_backend();
#endif

}  // namespace flashmask
