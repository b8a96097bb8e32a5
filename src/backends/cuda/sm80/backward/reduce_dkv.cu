// SPDX-License-Identifier: Apache-2.0
// The kernels that add up the parts of dk and dv, one for each element type. Names as in instance.cu.in.
#include "backends/cuda/device/row_products.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sm80/backward/instance.h"

namespace flashmask::sm80::bwd {
namespace {

/// The block's keys: of dk or of dv.
struct KeysPlace {
  int32_t first;
  uint32_t head;
  int64_t batch;
  bool is_dv;

  __device__ explicit KeysPlace(const KeyParams& p) {
    const uint32_t blocks = (p.seqlen_k + KeyParams::kReducedKeys - 1) / KeyParams::kReducedKeys;
    const uint32_t rest = blockIdx.x / 2, head_index = rest / blocks;
    first = static_cast<int32_t>(rest % blocks) * KeyParams::kReducedKeys;
    head = head_index % p.heads_kv;
    batch = head_index / p.heads_kv;
    is_dv = blockIdx.x % 2;
  }
};

/// Eight neighbours' sums over the splits, always in the same order. `part` is the first one's.
__device__ __forceinline__ void add_parts(const float* part, int64_t of_split, uint32_t splits, float (&sums)[8]) {
  for (uint32_t split = 0; split < splits; ++split) {
    const auto own = cuda::Eight<float>::load(part + split * of_split);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] += own.values()[i];
  }
}
template <typename Element>
__device__ __forceinline__ void store_rounded(const float (&sums)[8], Element* to) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = ptx::pack<Element>(sums[2 * i], sums[2 * i + 1]);
  *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
}
__device__ __forceinline__ void store(const float (&sums)[8], float* to) {
  reinterpret_cast<float4*>(to)[0] = {sums[0], sums[1], sums[2], sums[3]};
  reinterpret_cast<float4*>(to)[1] = {sums[4], sums[5], sums[6], sums[7]};
}

template <typename Element>
__device__ __forceinline__ void reduce_dkv(const KeyParams& p) {
  const KeysPlace place(p);
  const cuda::TensorRows& to = place.is_dv ? p.dv : p.dk;
  const cuda::TensorRows& from = place.is_dv ? p.dv_parts : p.dk_parts;
  const float* const parts = from.of_head<const float>(place.batch, place.head * p.splits);
  const int32_t eights = to.columns / 8, keys = min(p.seqlen_k - place.first, KeyParams::kReducedKeys);
  for (int32_t n = static_cast<int32_t>(threadIdx.x); n < keys * eights; n += cuda::kRowThreads) {
    const int64_t key = place.first + n / eights;
    const int32_t column = n % eights * 8;
    float sums[8] = {};
    add_parts(parts + key * from.row_stride + column, from.head_stride, p.splits, sums);
    const int64_t at = key * to.row_stride + column;
    if (p.float_keys) {
      store(sums, to.of_head<float>(place.batch, place.head) + at);
    } else {
      store_rounded(sums, to.of_head<Element>(place.batch, place.head) + at);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cuda::kRowThreads)
    flashmask_sm80_bwd_bf16_reduce_dkv(const __grid_constant__ KeyParams p) {
  reduce_dkv<__nv_bfloat16>(p);
}

extern "C" __global__ void __launch_bounds__(cuda::kRowThreads)
    flashmask_sm80_bwd_f16_reduce_dkv(const __grid_constant__ KeyParams p) {
  reduce_dkv<__half>(p);
}

ReduceInstance reduce_instance(DataType dtype) {
  if (dtype == DataType::kBFloat16) return {"sm80.bwd.bf16.reduce_dkv", flashmask_sm80_bwd_bf16_reduce_dkv};
  return {"sm80.bwd.f16.reduce_dkv", flashmask_sm80_bwd_f16_reduce_dkv};
}

}  // namespace flashmask::sm80::bwd
