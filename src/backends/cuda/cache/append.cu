// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/cache/append.h"

#include <algorithm>

#include "backends/cuda/cache/append_pages.cuh"
#include "backends/cuda/cache/append_rows.cuh"
#include "backends/cuda/device/launch_overlap.cuh"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/launch_chain.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask::cuda {
namespace {

/// A warp for each new row and key head.
template <typename From, typename To>
__device__ __forceinline__ void append(const AppendParams& p) {
  wait_for_previous();
  allow_next();
  const int64_t n = int64_t{blockIdx.x} * kAppendWarps + threadIdx.x / 32, at = n / p.heads, head = n % p.heads;
  if (at >= p.all_rows) return;
  const Placed row = placed_row(p, at);
  if (row.at.page < 0) return;
  write_row<From, To>(p, p.k, p.to_k, row, head);
  write_row<From, To>(p, p.v, p.to_v, row, head);
  write_bounds(p, row, head);
}

}  // namespace
}  // namespace flashmask::cuda

// The kernels, with names of their own; see KernelInfo. Elements that are stored as they are count by their bits. For
// pages ptxas is told how many blocks fit: left alone, it spills.
using flashmask::cuda::AppendParams, flashmask::cuda::kAppendThreads;
#define FLASHMASK_APPEND(name, bounds, ...)                                               \
  extern "C" __global__ void __launch_bounds__ bounds flashmask_sm90_cache_append_##name( \
      const __grid_constant__ AppendParams p) {                                           \
    flashmask::cuda::__VA_ARGS__(p);                                                      \
  }
FLASHMASK_APPEND(16, (kAppendThreads), append<uint16_t, uint16_t>)
FLASHMASK_APPEND(32, (kAppendThreads), append<uint32_t, uint32_t>)
FLASHMASK_APPEND(64, (kAppendThreads), append<uint64_t, uint64_t>)
FLASHMASK_APPEND(f32_e4m3, (kAppendThreads), append<float, __nv_fp8_storage_t>)
FLASHMASK_APPEND(bf16_e4m3, (kAppendThreads), append<__nv_bfloat16, __nv_fp8_storage_t>)
FLASHMASK_APPEND(f16_e4m3, (kAppendThreads), append<__half, __nv_fp8_storage_t>)
FLASHMASK_APPEND(pages_f32, (kAppendThreads, 2), append_pages<float>)
FLASHMASK_APPEND(pages_bf16, (kAppendThreads, 2), append_pages<__nv_bfloat16>)
FLASHMASK_APPEND(pages_f16, (kAppendThreads, 2), append_pages<__half>)
#undef FLASHMASK_APPEND

namespace flashmask::cuda {
namespace {

using AppendKernel = void (*)(AppendParams);

/// True if scales of pages are written: by a block for each page, in place of a warp for each row and head.
bool writes_pages(const AppendProblem& a) {
  return a.k_scales == WrittenScales::kOfPages || a.v_scales == WrittenScales::kOfPages;
}

AppendKernel kernel_of(const AppendProblem& a) {
  const CachedProblem& p = a.call;
  if (p.cache_dtype != DataType::kFloat8E4M3) {
    const auto bytes = element_size(p.dtype);
    return bytes == 2   ? flashmask_sm90_cache_append_16
           : bytes == 4 ? flashmask_sm90_cache_append_32
                        : flashmask_sm90_cache_append_64;
  }
  const bool pages = writes_pages(a);
  if (p.dtype == DataType::kFloat32)
    return pages ? flashmask_sm90_cache_append_pages_f32 : flashmask_sm90_cache_append_f32_e4m3;
  if (p.dtype == DataType::kBFloat16)
    return pages ? flashmask_sm90_cache_append_pages_bf16 : flashmask_sm90_cache_append_bf16_e4m3;
  if (p.dtype == DataType::kFloat16)
    return pages ? flashmask_sm90_cache_append_pages_f16 : flashmask_sm90_cache_append_f16_e4m3;
  throw_unsupported("k is ", name(p.dtype), "; a float8 cache on a device takes float32, bfloat16 and float16");
}

NewRows rows_of(const TensorView& t) {
  const auto& s = t.stride;
  return t.rank == 4 ? NewRows{t.data, s[0], s[1], s[2], s[3]} : NewRows{t.data, 0, s[0], s[1], s[2]};
}
Stored stored(const TensorView& t, const TensorView& scale) {
  return {t.data,
          t.stride[0],
          t.stride[1],
          t.stride[2],
          static_cast<float*>(scale.data),
          {scale.stride[0], scale.stride[1], scale.stride[2]},
          static_cast<int32_t>(t.shape[3])};
}

}  // namespace

void launch_append(const AppendProblem& a) {
  const CachedProblem& p = a.call;
  const bool has_batch = a.k.rank == 4;
  AppendParams params{.call = p.view,
                      .k = rows_of(a.k),
                      .v = rows_of(a.v),
                      .bounds = rows_of(a.bounds),
                      .to_k = stored(p.cache.k, p.cache.k_scale),
                      .to_v = stored(p.cache.v, p.cache.v_scale),
                      .all_rows = has_batch ? p.batch * p.rows : p.rows,
                      .rows_of_batch = has_batch ? p.rows : 0,
                      .slots = a.slots.data,
                      .slots_batch_stride = has_batch ? a.slots.stride[0] : 0,
                      .slots_row_stride = a.slots.stride[has_batch ? 1 : 0],
                      .slots_are_long = a.slots.dtype == DataType::kInt64,
                      .heads = static_cast<int32_t>(p.heads_kv),
                      .bound_heads = a.bounds.defined() ? static_cast<int32_t>(a.bounds.shape[a.bounds.rank - 2]) : 0,
                      .write_scales = a.k_scales != WrittenScales::kNone};
  const int64_t blocks = writes_pages(a) ? 2 * std::min(params.all_rows, kMostRowsAtOnce)
                                         : ceil_div(params.all_rows * p.heads_kv, int64_t{kAppendWarps});
  LaunchChain(static_cast<cudaStream_t>(p.stream), LaunchChain::kOverlapPrevious)
      .launch("launch of the kernel that appends to a cache", kernel_of(a), blocks, kAppendThreads, params);
}

std::vector<KernelInfo> append_kernels() {
  std::vector<KernelInfo> all;
  for (const char* what :
       {"16", "32", "64", "f32_e4m3", "bf16_e4m3", "f16_e4m3", "pages_f32", "pages_bf16", "pages_f16"})
    all.push_back(named({.id = message("sm90.cache.append_", what), .op = "cache", .threads = kAppendThreads}));
  return all;
}

}  // namespace flashmask::cuda
