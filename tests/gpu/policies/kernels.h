// SPDX-License-Identifier: Apache-2.0
#pragma once

// Kernels of other policies than the library's, one for each place where features enter: they show that a policy is all
// that such a feature needs. All are of bfloat16 and head dim 64.

#include <cstdint>

#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/forward/params.h"

namespace flashmask::test {

/// Epilogue: O in fp32, [batch, heads_q, seqlen_q, head_dim_v], as one part of a merge.
struct PartialRowsParams : sm90::ForwardParams {
  float* partial;
};

/// Score: q.k times a factor of its query head.
struct HeadFactorParams : sm90::ForwardParams {
  const float* factors;  ///< [heads_q]
};
struct HeadFactorBackwardParams : sm90::bwd::BackwardParams {
  const float* factors;
};

struct Kernel {
  const void* entry;
  int threads, shared_bytes;
  int rows, keys;  ///< per tile
};

Kernel partial_rows_kernel();  ///< takes PartialRowsParams
Kernel head_factor_kernel();   ///< takes HeadFactorParams

struct BackwardKernel : Kernel {
  const void* preprocess;  ///< takes RowParams
};
struct BackwardKernels {
  BackwardKernel head_factor;  ///< takes HeadFactorBackwardParams
  const void* convert_dq;      ///< takes RowParams
  int row_threads;             ///< per block of the kernels that take RowParams
};
BackwardKernels backward_kernels();

}  // namespace flashmask::test
