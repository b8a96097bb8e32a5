// SPDX-License-Identifier: Apache-2.0
// How long a plan takes on the device: medians of one call, of one replay of a CUDA graph that holds the call, and of
// the time per replay when many are queued. Long plans in bits and in runs, even where a line has too many of these.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backends/cuda/plan/device_plan.h"
#include "common/random.h"
#include "flashmask/plan.h"
#include "gpu/device_mask.h"
#include "plan/plan_buffer.h"

namespace flashmask::test {
namespace {

enum class Kind { kCausalDocument, kFourRandomBounds, kRandomEviction, kGlobalWindow };
constexpr std::pair<Kind, const char*> kKinds[] = {{Kind::kCausalDocument, "causal document"},
                                                   {Kind::kFourRandomBounds, "four random bounds"},
                                                   {Kind::kRandomEviction, "random eviction"},
                                                   {Kind::kGlobalWindow, "global + window"}};

Mask make_mask(Kind kind, int64_t seqlen, int64_t batch) {
  Random random(1);
  MaskParts parts{.seqlen_q = seqlen, .seqlen_k = seqlen, .batch = batch};
  const auto add = [](std::vector<int32_t>& vector, int64_t row) { vector.push_back(static_cast<int32_t>(row)); };
  const auto any = [&] { return random.integer(0, seqlen); };
  const int64_t document = seqlen / 12 + 1, window = seqlen / 16, global = 16;
  if (kind == Kind::kCausalDocument || kind == Kind::kRandomEviction) parts.band = Band::causal();
  for (int64_t n = 0; n < batch * seqlen; ++n) {
    const int64_t j = n % seqlen;
    switch (kind) {
      case Kind::kCausalDocument:
        add(parts.lts, std::min(seqlen, (j / document + 1) * document));
        break;
      case Kind::kFourRandomBounds:
        for (auto* vector : {&parts.lts, &parts.lte, &parts.uts, &parts.ute}) add(*vector, any());
        break;
      case Kind::kRandomEviction:
        add(parts.lts, std::max(j + 1, any()));
        break;
      case Kind::kGlobalWindow:
        add(parts.lts, j < global ? seqlen : std::min(seqlen, j + window));
        add(parts.lte, seqlen);
        add(parts.uts, j < global + window ? 0 : global);
        add(parts.ute, j < global + window ? 0 : j - window);
        break;
    }
  }
  return Mask(parts);
}

class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    require(cudaEventCreate(&begin_), "cudaEventCreate");
    require(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  /// Median microseconds of `work`, each time from an idle stream.
  double median(const std::function<void()>& work) {
    std::vector<float> times(51);
    for (int n = 0; n < 5; ++n) work();
    for (float& time : times) {
      require(cudaStreamSynchronize(stream_), "warm-up");
      require(cudaEventRecord(begin_, stream_), "cudaEventRecord");
      work();
      require(cudaEventRecord(end_, stream_), "cudaEventRecord");
      require(cudaEventSynchronize(end_), "the plan's kernels");
      require(cudaEventElapsedTime(&time, begin_, end_), "cudaEventElapsedTime");
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2] * 1e3;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

void measure(const DeviceMask& mask, const char* name, const PlanLayout& layout, cudaStream_t stream) {
  constexpr int kReplays = 20;
  const DeviceBytes buffer(static_cast<std::size_t>(layout.bytes));
  const auto call = [&] { cuda::launch_plan(mask.view(), layout, buffer.data(), stream); };
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  call();
  require(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  require(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  const auto launch = [&] { require(cudaGraphLaunch(replay, stream), "cudaGraphLaunch"); };
  Timer timer(stream);
  const double one_call = timer.median(call), one_replay = timer.median(launch);
  const double queued = timer.median([&] {
    for (int n = 0; n < kReplays; ++n) launch();
  });
  const int32_t lacking = most_runs(layout, buffer.read());
  std::printf("%8lld %6lld  %-20s %5s %10lld %10.1f %10.1f %10.1f%s\n", static_cast<long long>(layout.seqlen_q),
              static_cast<long long>(layout.batch), name, layout.in_runs() ? "runs" : "bits",
              static_cast<long long>(layout.bytes), one_call, one_replay, queued / kReplays,
              lacking > 0 ? (" (too many runs: " + std::to_string(lacking) + ")").c_str() : "");
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

int run() {
  if (const std::string why = no_device(); !why.empty()) {
    std::printf("skipped: %s\n", why.c_str());
    return 77;  // ctest counts it as skipped
  }
  cudaDeviceProp device;
  require(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  cudaStream_t stream;
  require(cudaStreamCreate(&stream), "cudaStreamCreate");
  std::printf("%s; microseconds, medians of 51\n%8s %6s  %-20s %5s %10s %10s %10s %10s\n", device.name, "seqlen",
              "masks", "mask", "form", "bytes", "call", "graph", "queued");
  for (const auto& [seqlen, batch] :
       {std::pair<int64_t, int64_t>{8192, 1}, {8192, 16}, {32768, 1}, {131072, 1}, {1048576, 1}}) {
    for (const auto& [kind, name] : kKinds) {
      const DeviceMask mask(make_mask(kind, seqlen, batch));
      measure(mask, name, plan_layout(mask.view()), stream);
      if (const std::optional<PlanLayout> runs = runs_layout(mask.view())) measure(mask, name, *runs, stream);
    }
  }
  cudaStreamDestroy(stream);
  return 0;
}

}  // namespace
}  // namespace flashmask::test

int main() {
  try {
    return flashmask::test::run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
