// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <string>

#include "backends/cuda/sm90/common/column_blocks.h"
#include "call/problem.h"

namespace flashmask::sm90 {

/// Why TMA cannot read or write a tensor [batch, seqlen, heads, dim] of 16 or 8 bits, or a kernel one of fp32, naming
/// `argument`; empty if it can. Rows must be contiguous and lie on 16-byte boundaries (the pointer, and the stride of
/// every dimension of more than one element); strides must be below 2^40 bytes and, where the size is above 1, not 0.
std::string tensor_map_refusal(const char* argument, const TensorView& t);

/// tensor_map_refusal for all tensors of a call that its kernels read or write by TMA.
std::string tensor_maps_refusal(const Problem& p);

/// The TMA map of `t` [batch, seqlen, heads, dim], without empty dimensions, whose columns lie in `blocks`:
///   dimensions {blocks.width, seqlen, blocks.count, heads, batch}, box {64, box_rows, box_blocks, box_heads, 1},
/// that is, blocks of 64 columns, 128-byte swizzle if they are of 16 bits and none if of 8; rows, columns and blocks
/// that the tensor lacks are read as zero and not written. `argument` is the tensor's name in error messages.
/// `promotion`: what L2 fetches for less.
CUtensorMap tensor_map(const TensorView& t, const ColumnBlocks& blocks, int box_rows, int box_blocks,
                       const char* argument = "tensor",
                       CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B, int box_heads = 1);
/// tensor_map of a tensor whose dim is a multiple of 64.
CUtensorMap tensor_map(const TensorView& t, int box_rows, int box_blocks, const char* argument = "tensor");

}  // namespace flashmask::sm90
