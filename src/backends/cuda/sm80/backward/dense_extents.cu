// SPDX-License-Identifier: Apache-2.0
// The kernel that finds the visible extents of a dense mask, which has no plan to hold them. Named as in
// instance.cu.in.
#include "backends/cuda/sm80/backward/instance.h"

namespace flashmask::sm80::bwd {
namespace {

/// Extends the batch entry's extent by some rows of a head.
__device__ __forceinline__ void extend(const DenseExtentParams& p) {
  const auto block = static_cast<int32_t>(blockIdx.x);
  const uint32_t batch_head = static_cast<uint32_t>(block / p.blocks), batch = batch_head / p.heads;
  const uint8_t* const visible = p.dense.visible + p.dense.place.offset(batch, batch_head % p.heads);
  const int32_t first = block % p.blocks * DenseExtentParams::kRows,
                end = min(first + DenseExtentParams::kRows, p.seqlen_q);
  int32_t rows = 0, keys = 0;
  for (int32_t row = first; row < end; ++row) {
    for (auto key = static_cast<int32_t>(threadIdx.x); key < p.seqlen_k; key += cuda::kRowThreads) {
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

extern "C" __global__ void __launch_bounds__(cuda::kRowThreads)
    flashmask_sm80_bwd_dense_extents(const __grid_constant__ DenseExtentParams p) {
  extend(p);
}

DenseExtentInstance dense_extent_instance() { return {"sm80.bwd.dense_extents", flashmask_sm80_bwd_dense_extents}; }

}  // namespace flashmask::sm80::bwd
