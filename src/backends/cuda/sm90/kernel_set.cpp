// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/kernel_set.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <span>
#include <utility>

#include "backends/cuda/host/call_params.h"
#include "backends/cuda/sm90/backward/backward.h"
#include "backends/cuda/sm90/common/tensor_map.h"
#include "backends/cuda/sm90/decode/decode.h"
#include "backends/cuda/sm90/forward/forward.h"
#include "backends/cuda/sm90/tile_config.h"
#include "common/message.h"

namespace flashmask::sm90 {
namespace {

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> all = forward_kernels();
  for (const std::vector<KernelInfo>& more : {backward_kernels(), decode_kernels()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

Prepared prepare(const Problem& p) {
  if (std::ranges::find(cuda::kDataTypes, p.dtype) == std::end(cuda::kDataTypes))
    return Refusal{message(name(p.dtype), " tensors are not taken; cast to bfloat16 or float16")};
  Prepared prepared = p.is_backward ? prepare_backward(p) : prepare_forward(p);
  if (std::holds_alternative<Refusal>(prepared)) return prepared;
  if (std::string why = tensor_maps_refusal(p); !why.empty()) return Refusal{std::move(why)};
  return prepared;
}

}  // namespace

// The code is compiled for sm_90a, which runs on 9.0 alone.
constinit const cuda::KernelSet kKernelSet{
    .name = kArch,
    .needs = "9.0 (Hopper)",
    .runs_on = [](int major, int minor) { return major == 9 && minor == 0; },
    .kernels = kernels,
    .takes_arrivals = true,
    .prepare = prepare,
    .reads_float8 = reads_float8,
    .has_equal_bits = true,
    .prepare_cached = prepare_cached,
    .cached_plan_bytes = cached_plan_bytes,
    .build_cached_plan = build_cached_plan,
};

}  // namespace flashmask::sm90
