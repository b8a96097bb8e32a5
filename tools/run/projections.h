// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "numerics/tensor.h"
#include "run/packing.h"

namespace flashmask::run {

using numerics::Tensor;

/// Heads and their width, as in the tensors [batch, seqlen, heads, head_dim].
struct AttentionShape {
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t head_dim = 64;
};

/// Inputs of an attention layer in the first step of a training run: every token has a seeded embedding,
/// three seeded matrices project it to q, k and v, and rotary embeddings turn q and k by the position id.
/// Embeddings are standard normal and the matrices scaled so that every element of q, k and v has about unit
/// variance, and so has a score q.k / sqrt(head_dim).
class Projections {
 public:
  Projections(const AttentionShape& shape, int64_t max_position, uint64_t seed);

  /// q, k and v of sequences [first, first + count) of `packed`, into the tensors' first `count` entries.
  void fill(const Packed& packed, int64_t first, int64_t count, int threads, Tensor& q, Tensor& k, Tensor& v) const;

 private:
  void rotate(const float* from, int64_t position, float* to) const;

  AttentionShape shape_;
  int64_t columns_;                   ///< (heads + 2 * kv_heads) * head_dim
  std::vector<float> projected_;      ///< [kVocabulary, columns_]: a token's q, k and v before rotation
  std::vector<float> cosine_, sine_;  ///< [max_position, head_dim / 2]
};

/// A seeded output gradient: uniform with mean 0 and unit variance, the same for a sequence however the
/// sequences are divided into calls.
void fill_gradient(uint64_t seed, int64_t first, int64_t count, int threads, Tensor& dout);

}  // namespace flashmask::run
