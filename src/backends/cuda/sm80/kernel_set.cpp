// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm80/kernel_set.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "backends/cuda/host/alignment.h"
#include "backends/cuda/host/call_params.h"
#include "backends/cuda/sm80/backward/backward.h"
#include "backends/cuda/sm80/common/shared_memory.h"
#include "backends/cuda/sm80/decode/decode.h"
#include "backends/cuda/sm80/forward/forward.h"
#include "backends/cuda/sm80/tile_config.h"
#include "common/message.h"

namespace flashmask::sm80 {
namespace {

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> all = forward_kernels();
  for (const std::vector<KernelInfo>& more : {backward_kernels(), decode_kernels()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

Prepared prepare(const Problem& p, int kilobytes) {
  if (std::ranges::find(cuda::kDataTypes, p.dtype) == std::end(cuda::kDataTypes))
    return Refusal{message(name(p.dtype), " tensors are not taken; cast to bfloat16 or float16")};
  Prepared prepared = p.is_backward ? prepare_backward(p, kilobytes) : prepare_forward(p, kilobytes);
  if (std::holds_alternative<Refusal>(prepared)) return prepared;
  if (std::string why = cuda::first_refusal(p, cuda::alignment_refusal); !why.empty()) return Refusal{std::move(why)};
  return prepared;
}

bool reads_float8(const CachedCapacities&) { return true; }

/// True if a block may have kLargeKilobytes of shared memory.
bool is_large(int major, int minor) { return multiprocessor_kilobytes(major, minor) > kLargeKilobytes; }

}  // namespace

constinit const cuda::KernelSet kKernelSet{
    .name = kArch,
    .needs = "8.0, 8.7 or 9.0 to 11.0",
    .runs_on = is_large,
    .kernels = kernels,
    .takes_arrivals = false,
    .prepare = [](const Problem& p) { return prepare(p, kLargeKilobytes); },
    .reads_float8 = reads_float8,
    .has_equal_bits = false,
    .prepare_cached = prepare_cached<kLargeKilobytes>,
    .cached_plan_bytes = cached_plan_bytes<kLargeKilobytes>,
    .build_cached_plan = build_cached_plan<kLargeKilobytes>,
};
constinit const cuda::KernelSet kSmallKernelSet{
    .name = "sm86",
    .needs = "8.0 or later",
    .runs_on = [](int major, int) { return major >= 8; },
    .kernels = [] { return std::vector<KernelInfo>(); },
    .takes_arrivals = false,
    .prepare = [](const Problem& p) { return prepare(p, kSmallKilobytes); },
    .reads_float8 = reads_float8,
    .has_equal_bits = false,
    .prepare_cached = prepare_cached<kSmallKilobytes>,
    .cached_plan_bytes = cached_plan_bytes<kSmallKilobytes>,
    .build_cached_plan = build_cached_plan<kSmallKilobytes>,
};

}  // namespace flashmask::sm80
