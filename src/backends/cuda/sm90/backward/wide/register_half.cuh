// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/sm90/backward/wide/half.cuh"

namespace flashmask::sm90::bwd {

/// A wide kernel's consumer that adds dQ to its sums from registers, under the products after it, half of it in the
/// next tile. Its own rows of P and dS, and as much of V as fits, are operands from registers, too: registers are left,
/// and shared memory is busy for less time. dV's products of its own rows run before the other consumer's P is there.
template <typename Traits, uint32_t kWarpgroup>
class RegisterHalf : public WideHalf<RegisterHalf<Traits, kWarpgroup>, Traits, kWarpgroup> {
 public:
  using Base = WideHalf<RegisterHalf, Traits, kWarpgroup>;
  using Base::Base;

 private:
  friend Base;
  using Base::kKeyBlock, Base::kOtherRows, Base::kOwnRows, Base::operand, Base::p_, Base::ring_, Base::shared_,
      Base::staging_, Base::warp_;
  using typename Base::Dq, typename Base::Element, typename Base::KeyGradients, typename Base::Operand,
      typename Base::PackedScores, typename Base::Scores, typename Base::Shared, typename Base::Swizzle,
      typename Base::ValueGradients;
  using QueryGradients = cuda::Accumulators<64, 64 * Dq::kCount>;
  static constexpr int kHalfDq = 16 * Dq::kCount;  ///< half of a thread's values of dQ
  /// Steps of dP's product that have V in registers: as many as fit beside dQ.
  static constexpr int kValueSteps = Dq::kCount == 1 ? Traits::kVDim / 16 : kMaySumIntegers<Traits> ? 7 : 8;
  using Values = typename Base::template ValueSteps<kValueSteps>;
  /// The half of a tile's dQ that has not been added to its sums.
  struct LateDq {
    float values[kHalfDq];
    uint32_t query_tile;
  };

  __device__ __forceinline__ uint32_t run_tile(uint32_t flags, Values& v, LateDq& late, KeyGradients& dk,
                                               ValueGradients& dv) {
    const uint32_t stage = ring_.stage();
    const Operand q = this->q_columns(), dout = this->dout_columns(), p = this->p(), ds = this->ds();
    PackedScores own_p, own_ds;
    Scores s, dp;
    const auto dropped = this->draw_dropped();  // beside S there would be no registers for it
    this->issue_s(s);
    if (flags & Tile::kFirst) this->template read_values<kValueSteps>(v);
    this->template issue_dp<kValueSteps>(dp, v);
    if (!(flags & Tile::kFirst)) add_late(late);
    this->compute_probabilities(s, flags, dropped, own_p);
    ptx::pin(dv);
    this->template issue_rows<kOwnRows>(dv, own_p, dout);
    ptx::wgmma_wait<1>();
    this->compute_score_gradients(s, dp, flags, dropped, own_p, own_ds);
    QueryGradients dq;
    this->issue_dq(dq, ds, operand(offsetof(Shared, k) + Dq::kBegin * kKeyBlock, kKeyBlock));
    this->template issue_rows<kOtherRows, Traits::kScoreRows>(dv, p, dout);
    ptx::pin(dk);
    this->template issue_rows<kOwnRows>(dk, own_ds, q);
    this->template issue_rows<kOtherRows, Traits::kScoreRows>(dk, ds, q);
    late.query_tile = ptx::from_leader(shared_.tile[stage].query.index);
    ptx::wgmma_wait<3>();
    add_dq(dq, late);
    ptx::wgmma_wait<2>();
    ptx::pin(dv);
    ptx::arrive_once(shared_.dout_empty[this->dout_ring().stage()]);
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    this->release_rows();
    ring_.advance();
    return this->next_tile();
  }
  /// Adds the rest of the previous tile's dQ.
  __device__ __forceinline__ void add_late(const LateDq& late) const {
    if (!sums_integers<Traits>(p_))
      staging_.template add_dq<kHalfDq, kHalfDq>(late.values, Dq::kBegin, late.query_tile);
  }

  /// Adds half of dQ to its sums and keeps the other; in deterministic mode adds all, as integers.
  __device__ __forceinline__ void add_dq(QueryGradients& dq, LateDq& late) const {
    ptx::pin(dq);
    ptx::copy(dq + kHalfDq, late.values);
    delay<Role::kConsumer>();
    if (sums_integers<Traits>(p_)) {
      add_integers<0>(cuda::part_of<0, kHalfDq>(dq));
      add_integers<kHalfDq>(late.values);
    } else {
      staging_.template add_dq<0, kHalfDq>(dq, Dq::kBegin, late.query_tile);
    }
  }
  /// Adds half of the current tile's dQ, from value kBegin on, as integers.
  template <int kBegin>
  __device__ __forceinline__ void add_integers(float (&dq)[kHalfDq]) const {
    const uint32_t stage = ring_.stage();
    staging_.make_integers(dq, stage);
    staging_.template add_integers<kBegin, kHalfDq>(dq, Dq::kBegin, shared_.tile[stage].query.index);
  }
};

}  // namespace flashmask::sm90::bwd
