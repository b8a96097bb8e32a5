// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "backends/backend.h"
#include "backends/cuda/common/device.h"
#include "backends/cuda/common/error.h"
#include "backends/cuda/common/tensor_map.h"
#include "backends/cuda/plan/device_plan.h"
#include "backends/cuda/sm90/backward/backward.h"
#include "backends/cuda/sm90/forward/forward.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask {
namespace {

constexpr int64_t kAlignment = 256;  // what cudaMalloc gives, so that nothing in the workspace has less

bool makes_plan(const Problem& p) { return !p.plan.defined() && !p.dense.defined(); }

PlanLayout plan_layout(const Problem& p) {
  const MaskView& mask = p.mask.view();
  return {mask.seqlen_q, mask.seqlen_k, mask.batch(), mask.heads()};
}

/// What the workspace holds, in this order.
struct Layout {
  int64_t plan = 0, kernels = 0, counter = kAlignment;

  explicit Layout(const Problem& p) {
    if (makes_plan(p)) plan = round_up(plan_layout(p).bytes, kAlignment);
    const std::size_t own = p.is_backward ? sm90::backward_workspace(p) : sm90::forward_workspace(p);
    kernels = round_up(static_cast<int64_t>(own), kAlignment);
  }
  int64_t bytes() const { return plan + kernels + counter + kAlignment; }
};

std::byte* aligned(std::span<std::byte> memory) {
  void* begin = memory.data();
  std::size_t space = memory.size();
  return static_cast<std::byte*>(std::align(kAlignment, memory.size() - kAlignment, begin, space));
}

void require_usable(int32_t index) {
  if (const std::string why = cuda::device_refusal(index); !why.empty()) throw Error(ErrorCode::kNoDevice, why);
}

cudaStream_t stream_of(const Problem& p) { return static_cast<cudaStream_t>(p.stream); }

/// Executed tiles, counted on the device.
class Counter {
 public:
  Counter(const Problem& p, std::byte* memory)
      : count_(p.executed_tiles ? reinterpret_cast<unsigned long long*>(memory) : nullptr), stream_(stream_of(p)) {
    if (count_)
      cuda::check(cudaMemsetAsync(count_, 0, sizeof(*count_), stream_), "cudaMemsetAsync of the tile counter");
  }
  unsigned long long* on_device() const { return count_; }
  /// Waits for the stream, if tiles are counted at all.
  int64_t read(const char* call) const {
    if (!count_) return 0;
    unsigned long long count = 0;
    cuda::check(cudaMemcpyAsync(&count, count_, sizeof(count), cudaMemcpyDeviceToHost, stream_),
                "cudaMemcpyAsync of the tile counter");
    cuda::check(cudaStreamSynchronize(stream_), call);
    return static_cast<int64_t>(count);
  }

 private:
  unsigned long long* count_;
  cudaStream_t stream_;
};

class CudaBackend final : public Backend {
 public:
  std::string_view name() const override { return "cuda"; }
  BackendInfo info() const override;
  Device::Kind device_kind() const override { return Device::Kind::kCuda; }
  bool has_device(const Device& device) const override { return cuda::device_refusal(device.index).empty(); }
  std::string refusal(const Problem& p) const override;
  void describe(const Problem& p, Explanation& e) const override;
  std::vector<KernelInfo> kernels() const override;
  std::size_t workspace(const Problem& p) const override { return static_cast<std::size_t>(Layout(p).bytes()); }
  void forward(const Problem& problem, std::span<std::byte> memory) const override;
  void backward(const Problem& problem, std::span<std::byte> memory) const override;
};

/// A call's problem as the kernels take it, with a plan unless it has a dense mask, and its part of the workspace.
struct Prepared {
  Problem p;
  cuda::DeviceGuard guard;
  std::byte* workspace;
  Counter counter;

  Prepared(const Problem& problem, std::byte* base, const Layout& layout)
      : p(problem), guard(p.device.index), workspace(base + layout.plan), counter(p, workspace + layout.kernels) {
    if (p.dense.defined()) p.plan = {};
    if (!makes_plan(p)) return;
    cuda::launch_plan(p.mask.view(), base, stream_of(p));
    p.plan = PlanView::on_device(plan_layout(p), {base, static_cast<std::size_t>(layout.plan)}, p.device);
  }
  Prepared(const Problem& problem, std::span<std::byte> memory) : Prepared(problem, aligned(memory), Layout(problem)) {}
};

/// Why TMA cannot read or write the tensors of the call; empty if it can.
std::string tensor_maps_refusal(const Problem& p) {
  using Argument = std::pair<const char*, const TensorView*>;
  std::vector<Argument> arguments{{"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"out", &p.out}};
  if (p.is_backward)
    arguments.insert(arguments.end(), {{"dout", &p.dout}, {"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}});
  for (const auto& [argument, tensor] : arguments) {
    if (std::string why = cuda::tensor_map_refusal(argument, *tensor); !why.empty()) return why;
  }
  return "";
}

BackendInfo CudaBackend::info() const {
  const cuda::DeviceList& list = cuda::device_list();
  if (!list.problem.empty()) return {"cuda", false, list.problem};
  BackendInfo info{"cuda", false, ""};
  for (std::size_t n = 0; n < list.devices.size(); ++n) {
    const cuda::DeviceProperties& d = list.devices[n];
    const bool usable = cuda::device_refusal(static_cast<int32_t>(n)).empty();
    info.usable |= usable;
    info.detail +=
        message(d.name, ", compute capability ", d.major, ".", d.minor, usable ? "" : " (the kernels need 9.0)", "; ");
  }
  info.detail += message("driver for CUDA ", cuda::version_text(list.driver), ", built with CUDA ",
                         cuda::version_text(list.runtime));
  return info;
}

void CudaBackend::describe(const Problem& p, Explanation& e) const {
  e.arch = "sm90";
  if (makes_plan(p) && !p.is_empty()) {
    for (const KernelInfo& kernel : cuda::plan_kernels()) e.kernels.push_back(kernel.id);
  }
  if (p.is_backward) {
    sm90::describe_backward(p, e);
  } else {
    sm90::describe_forward(p, e);
  }
  const char* plan = p.dense.defined()  ? "dense mask: every tile executed"
                     : p.plan.defined() ? "plan given"
                                        : "plan made in the call";
  const std::string ctas = p.max_ctas > 0 ? message(", at most ", p.max_ctas, " CTAs") : "";
  e.configuration = message(e.arch, " ", e.tile.rows, "x", e.tile.keys, " tiles, ", plan, ctas);
}

std::vector<KernelInfo> CudaBackend::kernels() const {
  std::vector<KernelInfo> all = cuda::plan_kernels();
  for (const auto& part : {sm90::forward_kernels(), sm90::backward_kernels()})
    all.insert(all.end(), part.begin(), part.end());
  return all;
}

/// Why the call's GPU, or the one that an explanation takes in its place, cannot run it.
std::string gpu_refusal(const Problem& p) {
  if (!p.gpu) return cuda::device_refusal(p.device.index);
  const std::string why = cuda::capability_refusal(p.gpu->compute_major, p.gpu->compute_minor);
  return why.empty() ? "" : message("the GPU ", why);
}

std::string CudaBackend::refusal(const Problem& p) const {
  if (p.device.kind != Device::Kind::kCuda) return "takes CUDA tensors only";
  if (std::string why = gpu_refusal(p); !why.empty()) return why;
  if (p.dtype != DataType::kBFloat16 && p.dtype != DataType::kFloat16)
    return message(flashmask::name(p.dtype), " tensors are not taken; cast to bfloat16 or float16");
  if (std::string why = p.is_backward ? sm90::backward_refusal(p) : sm90::forward_refusal(p); !why.empty()) return why;
  return tensor_maps_refusal(p);
}

void CudaBackend::forward(const Problem& problem, std::span<std::byte> memory) const {
  const Prepared call(problem, memory);
  sm90::forward(call.p, call.workspace, call.counter.on_device());
  if (call.p.executed_tiles) call.p.executed_tiles->forward += call.counter.read("forward");
}

void CudaBackend::backward(const Problem& problem, std::span<std::byte> memory) const {
  const Prepared call(problem, memory);
  sm90::backward(call.p, call.workspace, call.counter.on_device());
  if (!call.p.executed_tiles) return;
  const int64_t executed = call.counter.read("backward");
  call.p.executed_tiles->backward_rows += executed;
  call.p.executed_tiles->backward_keys += executed;
}

}  // namespace

const Backend& cuda_backend() {
  static const CudaBackend backend;
  return backend;
}

void cuda::build_plan(const MaskView& mask, std::span<std::byte> buffer, int32_t index, void* stream) {
  require_usable(index);
  const DeviceGuard guard(index);
  launch_plan(mask, buffer.data(), static_cast<cudaStream_t>(stream));
}

bool cuda::is_plan_of(const MaskView& mask, const PlanView& plan, std::span<std::byte> scratch, void* stream) {
  require_usable(plan.device().index);
  const DeviceGuard guard(plan.device().index);
  const auto on = static_cast<cudaStream_t>(stream);
  launch_plan(mask, scratch.data(), on);
  // Before the bits comes a header with the shapes and the hash of the contents.
  const auto header = static_cast<std::size_t>(plan.layout().row_live_bits);
  std::vector<std::byte> was(header), is(header);
  check(cudaMemcpyAsync(was.data(), plan.data(), header, cudaMemcpyDeviceToHost, on), "cudaMemcpyAsync of the plan");
  check(cudaMemcpyAsync(is.data(), scratch.data(), header, cudaMemcpyDeviceToHost, on),
        "cudaMemcpyAsync of the plan made anew");
  check(cudaStreamSynchronize(on), "validate_plan");
  return was == is;
}

}  // namespace flashmask
