// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "backends/cuda/cache/append.h"
#include "backends/cuda/cache/split_forward.h"
#include "backends/cuda/cache/work_plan.h"
#include "backends/cuda/host/device.h"
#include "backends/cuda/host/error.h"
#include "backends/cuda/kernel_sets.h"
#include "backends/cuda/masks/build_masks.h"
#include "backends/cuda/masks/dense_extents.h"
#include "backends/cuda/peers/signals.h"
#include "backends/cuda/plan/device_plan.h"
#include "call/backend.h"
#include "common/message.h"
#include "mask/host_only.h"
#include "plan/plan_buffer.h"

namespace flashmask {
namespace {

void require_usable(int32_t index) {
  if (const std::string why = cuda::device_refusal(index); !why.empty()) throw Error(ErrorCode::kNoDevice, why);
}

class CudaBackend final : public Backend {
 public:
  std::string_view name() const override { return "cuda"; }
  BackendInfo info() const override;
  bool takes_split_size() const override { return true; }
  bool takes_arrivals() const override { return true; }
  Device::Kind device_kind() const override { return Device::Kind::kCuda; }
  bool has_device(const Device& device) const override { return cuda::device_refusal(device.index).empty(); }
  int64_t memory_bytes(const Device& device) const override {
    return has_device(device) ? cuda::device(device.index).memory_bytes : 0;
  }
  Prepared prepare(const Problem& p) const override;
  PreparedCached prepare_cached(const CachedProblem& p) const override;
  std::size_t cached_plan_bytes(const CachedCapacities& capacities, const Device& device) const override;
  void build_cached_plan(const CachedProblem& p, const CachedPlan& plan) const override;
  void append(const AppendProblem& problem) const override;
  std::vector<KernelInfo> kernels() const override;
  void build_plan(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> buffer, const Device& device,
                  void* stream) const override;
  int64_t count_bit_tiles(const MaskView& mask, std::span<std::byte> scratch, const Device& device,
                          void* stream) const override;
  int32_t count_runs(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> scratch, const Device& device,
                     void* stream) const override;
  bool is_plan_of(const MaskView& mask, const PlanView& plan, std::span<std::byte> scratch,
                  void* stream) const override;
  void build_vectors(const build::Arguments& arguments, const build::Output& output,
                     const std::function<std::byte*(std::size_t)>& allocate, void* stream) const override;
};

BackendInfo CudaBackend::info() const {
  const cuda::DeviceList& list = cuda::device_list();
  if (!list.problem.empty()) return {"cuda", false, list.problem};
  BackendInfo info{"cuda", false, ""};
  for (std::size_t n = 0; n < list.devices.size(); ++n) {
    const cuda::DeviceProperties& d = list.devices[n];
    const bool usable = cuda::device_refusal(static_cast<int32_t>(n)).empty();
    info.usable |= usable;
    info.detail += message(d.name, ", compute capability ", d.major, ".", d.minor,
                           usable ? "" : message(", the kernels need ", cuda::needed_capabilities()), "; ");
  }
  info.detail += message("driver for CUDA ", cuda::version_text(list.driver), ", built with CUDA ",
                         cuda::version_text(list.runtime));
  return info;
}

std::vector<KernelInfo> CudaBackend::kernels() const {
  std::vector<KernelInfo> all = cuda::plan_kernels({.positions = true});
  for (const cuda::PlanVariant variant : {cuda::PlanVariant{.lists = true}, cuda::PlanVariant{.runs = true}}) {
    for (const KernelInfo& kernel : cuda::plan_kernels(variant)) {
      if (std::ranges::find(all, kernel.id, &KernelInfo::id) == all.end()) all.push_back(kernel);
    }
  }
  for (const std::vector<KernelInfo>& more :
       {cuda::work_plan_kernels(), cuda::append_kernels(), cuda::dense_extent_kernels(), cuda::peer_kernels()})
    all.insert(all.end(), more.begin(), more.end());
  for (const cuda::KernelSet* set : cuda::kernel_sets()) {
    const std::vector<KernelInfo> own = set->kernels();
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

Prepared CudaBackend::prepare(const Problem& p) const {
  if (p.device.kind != Device::Kind::kCuda) return Refusal{"takes CUDA tensors only"};
  auto set = cuda::kernel_set_for(p);
  if (auto* refusal = std::get_if<Refusal>(&set)) return std::move(*refusal);
  const cuda::KernelSet& found = *std::get<const cuda::KernelSet*>(set);
  if (p.early.defined() && !found.takes_arrivals)
    return Refusal{message("gradients of some keys come early (early); sm90's kernels have them, and this call is for ",
                           found.name)};
  if (p.arrivals.defined() && (!found.takes_arrivals || p.features.split_size != 0))
    return Refusal{
        message("keys arrive while the call runs (arrivals); sm90's kernels take them, without split_size, and "
                "this call is for ",
                found.name)};
  if (p.features.split_size != 0 && !p.is_backward) return cuda::prepare_split_forward(found, p);
  return found.prepare(p);
}

/// The kernels that a plan is for.
const cuda::KernelSet& require_cache_kernels(const Device& device, const CachedCapacities& capacities) {
  require_usable(device.index);
  const auto set = cuda::cache_kernel_set_for(device, "auto", capacities);
  if (const auto* refusal = std::get_if<Refusal>(&set)) throw Error(ErrorCode::kUnsupported, refusal->why);
  return *std::get<const cuda::KernelSet*>(set);
}

PreparedCached CudaBackend::prepare_cached(const CachedProblem& p) const {
  if (p.device.kind != Device::Kind::kCuda) return Refusal{"takes CUDA tensors only"};
  auto set = cuda::cache_kernel_set_for(p.device, p.kernels, cuda::plan_capacities(p));
  if (auto* refusal = std::get_if<Refusal>(&set)) return std::move(*refusal);
  const cuda::KernelSet& found = *std::get<const cuda::KernelSet*>(set);
  if (!p.plan) return found.prepare_cached(p);
  const cuda::KernelSet& planned = require_cache_kernels(p.device, p.plan->capacities);
  if (&planned != &found)
    return Refusal{message("kernels '", found.name, "' (Options::kernels) read no plan of this device, which is for '",
                           planned.name, "'; leave out one of the two")};
  return found.prepare_cached(p);
}

std::size_t CudaBackend::cached_plan_bytes(const CachedCapacities& capacities, const Device& device) const {
  return require_cache_kernels(device, capacities).cached_plan_bytes(capacities, device);
}

void CudaBackend::build_cached_plan(const CachedProblem& p, const CachedPlan& plan) const {
  require_cache_kernels(p.device, plan.capacities).build_cached_plan(p, plan);
}

void CudaBackend::append(const AppendProblem& problem) const {
  require_usable(problem.call.device.index);
  const cuda::DeviceGuard guard(problem.call.device.index);
  cuda::launch_append(problem);
}

/// Reads a number of a plan. Waits for the stream.
int32_t read_number(const std::byte* plan, int64_t offset, cudaStream_t stream) {
  int32_t number = 0;
  cuda::check(cudaMemcpyAsync(&number, plan + offset, sizeof(number), cudaMemcpyDeviceToHost, stream),
              "cudaMemcpyAsync of a number of the plan");
  cuda::check(cudaStreamSynchronize(stream), "the plan's kernels");
  return number;
}

/// The number of tiles of a plan with bits.
int64_t read_bit_tiles(const PlanLayout& layout, const std::byte* plan, cudaStream_t stream) {
  const int64_t words = layout.batch * layout.heads * layout.row_granules * layout.words_per_row * 2;
  return read_number(plan, layout.tiles_before + words * static_cast<int64_t>(sizeof(int32_t)), stream);
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda::check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void CudaBackend::build_plan(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> buffer,
                             const Device& device, void* stream) const {
  require_usable(device.index);
  const cuda::DeviceGuard guard(device.index);
  const auto on = static_cast<cudaStream_t>(stream);
  const int64_t most = most_bit_tiles(mask, device);
  const auto refuse = [&](const auto&... why) {
    throw_invalid("plan buffer has ", buffer.size(), " bytes, room for ", layout.bit_tiles,
                  " bit tiles (128 keys x 64 rows, ", kBitTileBytes, " bytes) of a mask with interval lists; ", why...);
  };
  if (layout.bit_tiles < most && is_capturing(on))
    refuse("while a graph is captured it needs ", plan_layout(mask, most).bytes, ", room for all that there can be");
  const bool may_lack_runs = layout.in_runs() && has_contents(mask);
  if (may_lack_runs && is_capturing(on))
    throw_invalid("plan buffer has ", buffer.size(), " bytes, for ", kLineRuns,
                  " runs of granules a line; while a graph is captured it needs ", plan_layout(mask).bytes,
                  ", for bits, as contents may change");
  cuda::launch_plan(mask, layout, buffer.data(), on);
  if (may_lack_runs) check_runs(layout, read_number(buffer.data(), layout.most_runs, on));
  if (layout.bit_tiles >= most) return;
  if (const int64_t tiles = read_bit_tiles(layout, buffer.data(), on); tiles > layout.bit_tiles)
    refuse("its contents have ", tiles, ": it needs ", plan_layout(mask, tiles).bytes);
}

int64_t CudaBackend::count_bit_tiles(const MaskView& mask, std::span<std::byte> scratch, const Device& device,
                                     void* stream) const {
  require_usable(device.index);
  const cuda::DeviceGuard guard(device.index);
  const auto on = static_cast<cudaStream_t>(stream);
  const PlanLayout layout = plan_layout(mask, int64_t{0});
  cuda::launch_plan(mask, layout, scratch.data(), on);
  return read_bit_tiles(layout, scratch.data(), on);
}

int32_t CudaBackend::count_runs(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> scratch,
                                const Device& device, void* stream) const {
  require_usable(device.index);
  const cuda::DeviceGuard guard(device.index);
  const auto on = static_cast<cudaStream_t>(stream);
  cuda::launch_plan(mask, layout, scratch.data(), on);
  return read_number(scratch.data(), layout.most_runs, on);
}

bool CudaBackend::is_plan_of(const MaskView& mask, const PlanView& plan, std::span<std::byte> scratch,
                             void* stream) const {
  build_plan(mask, plan.layout(), scratch, plan.device(), stream);
  const cuda::DeviceGuard guard(plan.device().index);
  const auto on = static_cast<cudaStream_t>(stream);
  // Before the bits comes a header with the shapes and the hash of the contents.
  const auto header = static_cast<std::size_t>(plan.layout().row_live);
  std::vector<std::byte> was(header), is(header);
  cuda::check(cudaMemcpyAsync(was.data(), plan.data(), header, cudaMemcpyDeviceToHost, on),
              "cudaMemcpyAsync of the plan");
  cuda::check(cudaMemcpyAsync(is.data(), scratch.data(), header, cudaMemcpyDeviceToHost, on),
              "cudaMemcpyAsync of the plan made anew");
  cuda::check(cudaStreamSynchronize(on), "validate_plan");
  return was == is;
}

void CudaBackend::build_vectors(const build::Arguments& arguments, const build::Output& output,
                                const std::function<std::byte*(std::size_t)>& allocate, void* stream) const {
  require_usable(arguments.device.index);
  const cuda::DeviceGuard guard(arguments.device.index);
  const int64_t bytes = cuda::mask_build_scratch(arguments);
  cuda::launch_mask_build(arguments, output, bytes > 0 ? allocate(static_cast<std::size_t>(bytes)) : nullptr,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace

const Backend& cuda_backend() {
  static const CudaBackend backend;
  return backend;
}

}  // namespace flashmask
