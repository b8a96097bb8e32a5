// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/masks/build_masks.h"

#include <cub/device/device_radix_sort.cuh>

#include "backends/cuda/common/error.h"
#include "backends/cuda/common/launch_chain.h"
#include "backends/cuda/masks/steps.cuh"
#include "common/arithmetic.h"
#include "common/message.h"
#include "mask/build/build-inl.h"

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

  template <typename F>
  void each(int64_t count, const F& f) {
    if (!chain_ || count == 0) return;
    const auto per_lead = static_cast<uint32_t>(ceil_div(count, masks::kEachThreads * masks::kEachItems));
    chain_->launch("launch of a mask's build", masks::each<F>, blocks(leads_.count() * per_lead), masks::kEachThreads,
                   f, leads_, count, per_lead);
  }
  template <typename F>
  void scan(int64_t count, const F& f) {
    if (!chain_) return;
    chain_->launch("launch of a mask's scan", masks::scan<F>, blocks(leads_.count()), masks::kScanThreads, f, leads_,
                   count);
  }
  build::Pairs sort(int64_t count, const build::Pairs& given) {
    const build::Pairs sorted{array<int64_t>(count), array<int32_t>(count)};
    std::size_t own = 0;
    check(sort(nullptr, own, given, sorted, 0, count), "scratch of a mask's sort");
    std::byte* const memory = take(static_cast<int64_t>(own));
    if (!chain_) return sorted;
    for (int64_t lead = 0; lead < leads_.count(); ++lead)
      check(sort(memory, own, given, sorted, lead * count, count), "a mask's sort");
    return sorted;
  }

 private:
  std::byte* take(int64_t bytes) {
    std::byte* const memory = scratch_ + bytes_;
    bytes_ += round_up(bytes, kAlignment);
    return memory;
  }
  cudaError_t sort(std::byte* memory, std::size_t& bytes, const build::Pairs& from, const build::Pairs& to, int64_t at,
                   int64_t count) const {
    return cub::DeviceRadixSort::SortPairs(memory, bytes, from.keys + at, to.keys + at, from.values + at,
                                           to.values + at, count, 0, 64, stream_);
  }
  static int64_t blocks(int64_t count) {
    if (count > INT32_MAX)
      throw_unsupported("a mask of ", count, " blocks of 1024 columns is too large to be built on a device");
    return count;
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
  return run.bytes();
}

void launch_mask_build(const build::Arguments& arguments, const build::Output& output, std::byte* scratch,
                       cudaStream_t stream) {
  DeviceRun run(leads_of(arguments), scratch, stream);
  build::build(run, arguments, output);
}

}  // namespace flashmask::cuda
