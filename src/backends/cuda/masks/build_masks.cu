// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/masks/build_masks.h"

#include "backends/cuda/host/error.h"
#include "backends/cuda/host/launch_chain.h"
#include "backends/cuda/masks/steps.cuh"
#include "common/arithmetic.h"
#include "common/message.h"
#include "mask/families/families.h"

namespace flashmask::cuda {
namespace {

constexpr int64_t kAlignment = 256;

/// Launches the steps one after the other, or, without a stream's scratch, only adds up what they need of it.
class DeviceRun {
 public:
  static constexpr bool kInOrder = false;
  explicit DeviceRun(const build::Leads& leads) : leads_(leads) {}
  DeviceRun(const build::Leads& leads, std::byte* scratch, cudaStream_t stream)
      : leads_(leads), scratch_(scratch), stream_(stream), chain_(std::in_place, stream) {}

  const build::Leads& leads() const { return leads_; }
  int64_t bytes() const { return bytes_; }

  template <typename T>
  T* array(int64_t count) {
    return reinterpret_cast<T*>(take(leads_.count() * count * static_cast<int64_t>(sizeof(T))));
  }

  template <typename T>
  T* zeros(int64_t count) {
    const int64_t begin = bytes_;
    T* const memory = array<T>(count);
    const int64_t words = (bytes_ - begin) / static_cast<int64_t>(sizeof(int4));
    if (chain_) launch(masks::clear, ceil_div(words, masks::kThreads), reinterpret_cast<int4*>(memory), words);
    return memory;
  }

  template <typename F>
  void each(int64_t count, const F& f) {
    if (!chain_ || count == 0) return;
    const int neighbours = leads_.count() * count > kThreadsAtOnce ? 4 : 1;
    const auto per_lead = static_cast<uint32_t>(ceil_div(count, masks::kThreads * neighbours));
    launch(masks::each<F>, leads_.count() * per_lead, f, leads_, count, per_lead, neighbours);
  }
  template <typename F>
  void scan(int64_t count, const F& f) {
    if (count == 0) return;
    const int64_t length = ceil_div(ceil_div(count, masks::kTile), kMostParts) * masks::kTile;
    const masks::Parts parts{count, length, static_cast<uint32_t>(ceil_div(count, length))};
    int64_t* const sums = parts.per_lead > 1 ? array<int64_t>(parts.per_lead) : nullptr;
    if (!chain_) return;
    const int64_t blocks = leads_.count() * parts.per_lead;
    if (sums) launch(masks::sums<F>, blocks, f, leads_, parts, sums);
    launch(masks::scan<F>, blocks, f, leads_, parts, static_cast<const int64_t*>(sums));
  }
  template <typename F>
  void minima(int64_t count, const F& f) {
    if (!chain_ || count == 0) return;
    const auto tiles = static_cast<uint32_t>(ceil_div(count, masks::kTile));
    launch(masks::minima<F>, leads_.count() * tiles, f, leads_, count, tiles);
  }

 private:
  /// About as many as a device runs side by side: more entries than that are shared out among fewer threads.
  static constexpr int64_t kThreadsAtOnce = int64_t{1} << 18;
  /// Most parts of a scan: each block reads the sums of all parts before its own.
  static constexpr int64_t kMostParts = 1024;

  std::byte* take(int64_t bytes) {
    std::byte* const memory = scratch_ + bytes_;
    bytes_ += round_up(bytes, kAlignment);
    return memory;
  }
  template <typename... Args>
  void launch(void (*kernel)(Args...), int64_t blocks, std::type_identity_t<Args>... args) {
    if (blocks > INT32_MAX)
      throw_unsupported("a mask of ", blocks, " blocks of threads is too large to be built on a device");
    chain_->launch("launch of a mask's build", kernel, blocks, masks::kThreads, args...);
  }

  build::Leads leads_;
  std::byte* scratch_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::optional<LaunchChain> chain_;
  int64_t bytes_ = 0;
};

build::Leads leads_of(const build::Arguments& arguments) { return {arguments.shape.batch, arguments.shape.heads}; }

}  // namespace

int64_t mask_build_scratch(const build::Arguments& arguments) {
  DeviceRun run(leads_of(arguments));
  build::build(run, arguments, {});
  return run.bytes() > 0 ? run.bytes() + kAlignment : 0;
}

void launch_mask_build(const build::Arguments& arguments, const build::Output& output, std::byte* scratch,
                       cudaStream_t stream) {
  const auto beyond = static_cast<int64_t>(reinterpret_cast<uintptr_t>(scratch) % kAlignment);
  DeviceRun run(leads_of(arguments), beyond > 0 ? scratch + (kAlignment - beyond) : scratch, stream);
  build::build(run, arguments, output);
}

}  // namespace flashmask::cuda
