// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/dropout.h"
#include "mask/rules.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace flashmask::cuda {

/// Softcap: a score is softcap * tanh(factor * q.k). Kernels take the tanh for the score and `softcap` for its unit, in
/// place of softmax_scale.
struct SoftcapParams {
  float softcap;  ///< 0: none
  float factor;   ///< softmax_scale / softcap

#if defined(__CUDACC__)
  __device__ __forceinline__ bool is_set() const { return softcap != 0; }
#endif
};

/// Sinks: the score, softmax_scale not applied, of one more column for each query head.
struct SinkParams {
  const void* scores;  ///< null: none
  int64_t stride;      ///< in elements
  bool is_float;       ///< else of the tensors' type

#if defined(__CUDACC__)
  /// A query head's sink; without sinks -inf, which has no effect.
  template <typename Element>
  __device__ __forceinline__ float of_head(int64_t head) const {
    if (!scores) return -INFINITY;
    if (is_float) return static_cast<const float*>(scores)[head * stride];
    return static_cast<float>(static_cast<const Element*>(scores)[head * stride]);
  }
#endif
};

/// Dropout, see common/dropout.h. Kernels that draw have dropout::Origins at the end of their parameters, which leaves
/// the machine code of others alone.
struct DropoutParams {
  uint32_t threshold;     ///< 0: none
  float scale;            ///< factor of kept weights
  const uint64_t* state;  ///< seed and offset, in device memory; read while the work runs

#if defined(__CUDACC__)
  __device__ __forceinline__ bool is_set() const { return threshold != 0; }
  /// Reads the state, if there is dropout.
  __device__ __forceinline__ dropout::Key key() const {
    return is_set() ? dropout::key_of(__ldg(reinterpret_cast<const unsigned long long*>(state)),
                                      __ldg(reinterpret_cast<const unsigned long long*>(state) + 1))
                    : dropout::Key{};
  }
#endif
};

/// The band over positions of rows and keys, see rules::PositionBand.
struct PositionParams {
  rules::PositionBand first;   ///< batch entry 0's; without positions: none
  int64_t q_stride, k_stride;  ///< between batch entries of the call

#if defined(__CUDACC__)
  __device__ __forceinline__ bool is_set() const { return first.q_pos != nullptr; }
#endif
};

/// ALiBi: scores are lowered by slope * |row - key|. Kernels add it in the scores' unit.
struct AlibiParams {
  const float* slopes;                  ///< null: none
  uint32_t batch_stride, head_stride;   ///< in elements
  float per_unit;                       ///< 1 / the scores' unit
  const int32_t *q_pos, *k_pos;         ///< batch entry 0's; null: indices, and q_offset for rows
  uint32_t q_pos_stride, k_pos_stride;  ///< between batch entries of the call
  int32_t last_row, last_key;

#if defined(__CUDACC__)
  __device__ __forceinline__ bool is_set() const { return slopes != nullptr; }
  /// Index of a head's slope.
  __device__ __forceinline__ uint32_t index(uint32_t batch, uint32_t head) const {
    return batch * batch_stride + head * head_stride;
  }
#endif
};

/// The features that calls over tensors and over caches have alike.
struct SharedFeatureParams {
  SoftcapParams softcap;
  SinkParams sink;

#if defined(__CUDACC__)
  /// True if products are changed before a mask or bias is applied.
  __device__ __forceinline__ bool changes_products() const { return softcap.is_set(); }
#endif
};

/// Parameters of a call's features for kernels. All threads agree on which features the call has.
struct FeatureParams : SharedFeatureParams {
  DropoutParams dropout;
  PositionParams positions;
};

/// Parameters, beside features, of kernels whose scores are more than products. Other kernels' do not have them, so
/// that a score that needs one more leaves their machine code alone.
struct ScoreParams {
  int32_t q_offset;  ///< key position of row 0, see MaskView
  AlibiParams alibi;
};

}  // namespace flashmask::cuda
