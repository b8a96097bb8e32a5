// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/masks/dense_extents.h"

#include "backends/cuda/device/row_threads.h"
#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device_call.h"
#include "backends/cuda/host/error.h"
#include "backends/cuda/host/kernel_info.h"
#include "backends/cuda/host/launch_chain.h"
#include "common/arithmetic.h"

namespace flashmask::cuda {
namespace {

/// Parameters of the kernel that finds a dense mask's extents, with a block for each kRows rows of a query head.
struct DenseExtentParams {
  static constexpr int kRows = 64;
  DenseMask dense;
  VisibleExtent* extents;              ///< [batch], zeroed
  int32_t seqlen_q, seqlen_k, blocks;  ///< blocks: per head
  uint32_t heads;
};

/// Extends the batch entry's extent by some rows of a head.
__device__ __forceinline__ void extend(const DenseExtentParams& p) {
  const auto block = static_cast<int32_t>(blockIdx.x);
  const uint32_t batch_head = static_cast<uint32_t>(block / p.blocks), batch = batch_head / p.heads;
  const uint8_t* const visible = p.dense.visible + p.dense.place.offset(batch, batch_head % p.heads);
  const int32_t first = block % p.blocks * DenseExtentParams::kRows,
                end = min(first + DenseExtentParams::kRows, p.seqlen_q);
  int32_t rows = 0, keys = 0;
  for (int32_t row = first; row < end; ++row) {
    for (auto key = static_cast<int32_t>(threadIdx.x); key < p.seqlen_k; key += kRowThreads) {
      if (visible[row * p.dense.row_stride + key * p.dense.key_stride] == 0) continue;
      rows = row + 1;
      keys = max(keys, key + 1);
    }
  }
  rows = __reduce_max_sync(0xffffffff, rows);
  keys = __reduce_max_sync(0xffffffff, keys);
  if (threadIdx.x % 32 != 0 || keys == 0) return;
  atomicMax(&p.extents[batch].rows, rows);
  atomicMax(&p.extents[batch].keys, keys);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kRowThreads)
    flashmask_sm90_masks_dense_extents(const __grid_constant__ DenseExtentParams p) {
  extend(p);
}

void find_dense_extents(const Problem& p, VisibleExtent* extents) {
  const cudaStream_t stream = stream_of(p);
  const int64_t blocks = ceil_div(p.seqlen_q, int64_t{DenseExtentParams::kRows});
  check(cudaMemsetAsync(extents, 0, static_cast<std::size_t>(p.batch) * sizeof(VisibleExtent), stream),
        "cudaMemsetAsync of a dense mask's extents");
  LaunchChain(stream).launch("launch of a dense mask's extents", flashmask_sm90_masks_dense_extents,
                             p.batch * p.heads_q * blocks, kRowThreads,
                             DenseExtentParams{.dense = dense_mask(p),
                                               .extents = extents,
                                               .seqlen_q = static_cast<int32_t>(p.seqlen_q),
                                               .seqlen_k = static_cast<int32_t>(p.seqlen_k),
                                               .blocks = static_cast<int32_t>(blocks),
                                               .heads = static_cast<uint32_t>(p.heads_q)});
}

std::vector<KernelInfo> dense_extent_kernels() {
  return {named({.id = kDenseExtents, .op = "bwd", .threads = kRowThreads})};
}

}  // namespace flashmask::cuda
