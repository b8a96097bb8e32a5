// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/backward/wide/half.cuh"

namespace flashmask::sm90::bwd {

/// A wide kernel's consumer that hands dQ to its store warp: the blocks of 64 columns leave through the staging tile,
/// one after the other, under the products after them.
template <typename Traits, uint32_t kWarpgroup>
class StagingHalf : public WideHalf<StagingHalf<Traits, kWarpgroup>, Traits, kWarpgroup> {
 public:
  using Base = WideHalf<StagingHalf, Traits, kWarpgroup>;
  using Base::Base;

 private:
  friend Base;
  using Base::dq_phase, Base::kDq, Base::operand, Base::phases_, Base::ring_, Base::shared_, Base::staging_;
  using typename Base::Dq, typename Base::KeyGradients, typename Base::Operand, typename Base::PackedScores,
      typename Base::Scores, typename Base::Shared, typename Base::ValueGradients;
  using DqBlock = cuda::Accumulators<64, 64>;
  static_assert(Dq::kCount == 1 || Dq::kCount == 2);
  struct Values {};
  struct LateDq {};

  __device__ __forceinline__ uint32_t run_tile(uint32_t flags, Values&, LateDq&, KeyGradients& dk, ValueGradients& dv) {
    write_scores(flags);
    const Operand ds = this->ds();
    DqBlock dq;
    issue_dq_block(dq, ds, Dq::kBegin);
    ptx::pin(dv);
    this->template issue_rows<0, Traits::kRows>(dv, this->p(), this->dout_columns());
    ptx::wgmma_wait<1>();
    store_dq(dq);
    DqBlock second;
    if constexpr (Dq::kCount == 2) issue_dq_block(second, ds, Dq::kBegin + 1);
    ptx::pin(dk);
    this->template issue_rows<0, Traits::kRows>(dk, ds, this->q_columns());
    ptx::wgmma_wait<Dq::kCount>();
    ptx::pin(dv);
    ptx::arrive_once(shared_.dout_empty[this->dout_ring().stage()]);
    if constexpr (Dq::kCount == 2) {
      ptx::wgmma_wait<1>();
      store_dq(second);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    this->release_rows();
    ring_.advance();
    return this->next_tile();
  }
  __device__ __forceinline__ void add_late(const LateDq&) const {}

  /// Computes P and dS of the consumer's rows, and puts them in shared memory.
  __device__ __forceinline__ void write_scores(uint32_t flags) {
    Scores s, dp;
    PackedScores p, ds;
    const auto dropped = this->draw_dropped();
    this->issue_s(s);
    this->template issue_scores<Bias::kGradient, Traits::kVDim>(dp, offsetof(Shared, v), this->dout_rows());
    this->compute_probabilities(s, flags, dropped, p);
    ptx::wgmma_wait<0>();
    this->compute_score_gradients(s, dp, flags, dropped, p, ds);
  }

  __device__ __forceinline__ void issue_dq_block(DqBlock& dq, Operand ds, int block) const {
    this->issue_dq(dq, ds, operand(offsetof(Shared, k) + block * Base::kKeyBlock));
  }
  __device__ __forceinline__ void store_dq(DqBlock& dq) {
    ptx::pin(dq);
    staging_.store_dq(dq, ring_.stage(), dq_phase());
    phases_ ^= 1u << kDq;
  }
};

}  // namespace flashmask::sm90::bwd
