// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/sm90/backward/wide/half.cuh"

namespace flashmask::sm90::bwd {

/// A consumer of a pair's CTA. The pair has the two halves of a plan's block of keys, and the same query tiles. Each
/// CTA sends its dS to the other, and computes half of dQ's columns over the keys of both: a block of 64 in the first
/// consumer, the others in the second. Two CTAs on their own would add twice as much to dq's sums. The product with the
/// other's dS is a tile's last, so that there is time for dS to arrive. dQ is added to its sums in the next tile, in
/// three parts, each under other products. In deterministic mode both products become integers before they are added,
/// as in two CTAs on their own. Where registers allow it, operands come from them as in RegisterHalf.
///
/// The CTAs never wait for each other in a circle. In each tile a consumer waits until the other CTA has read this
/// one's dS of two tiles before, then sends dS, and then waits for the other's. So a wait is for what the other CTA
/// does in an earlier tile, or in the same one before its last wait: the CTA that is behind can always go on. Loads
/// wait for their own CTA alone.
template <typename Traits, uint32_t kWarpgroup>
class PairHalf : public WideHalf<PairHalf<Traits, kWarpgroup>, Traits, kWarpgroup> {
 public:
  using Base = WideHalf<PairHalf, Traits, kWarpgroup>;
  __device__ __forceinline__ PairHalf(const typename Traits::Params& p, SharedStorage<Traits>& shared)
      : Base(p, shared), rank_(ptx::uniform(ptx::cluster_rank())) {}

 private:
  friend Base;
  using Base::kKeyBlock, Base::kOtherRows, Base::kOwnRows, Base::operand, Base::ring_, Base::shared_, Base::staging_,
      Base::warp_;
  using typename Base::Element, typename Base::KeyGradients, typename Base::Operand, typename Base::PackedScores,
      typename Base::Scores, typename Base::Shared, typename Base::ValueGradients;
  /// The consumer's columns of dQ, and a thread's values of them.
  static constexpr int kDqColumns = kWarpgroup == 0 ? 64 : Traits::kQkDim / 2 - 64, kDqValues = kDqColumns / 2;
  using QueryGradients = cuda::Accumulators<64, kDqColumns>;
  static constexpr bool kSumsIntegers = Traits::kDqSum == DqSum::kIntegers;
  /// True if V, and the consumer's own rows of P and dS, are operands from registers, and dP's steps that have V there.
  static constexpr bool kFromRegisters = Traits::kTile.dq_from_registers;
  static constexpr int kValueSteps = kSumsIntegers ? 8 : Traits::kVDim / 16;
  using Values = std::conditional_t<kFromRegisters, typename Base::template ValueSteps<kValueSteps>, NoStorage>;
  /// The rows of P and dS that dV and dK take from shared memory, and the groups of dK's products.
  static constexpr uint32_t kSharedFrom = kFromRegisters ? kOtherRows : 0;
  static constexpr int kSharedRows = kFromRegisters ? Traits::kScoreRows : Traits::kRows,
                       kDkGroups = kFromRegisters ? 2 : 1;
  /// The quarters of the tile before's dQ that are added under S and dP; what is left of half of it follows P.
  static constexpr int kEarlyQuarters = kFromRegisters ? 2 : 1;
  /// True if dQ's products with the CTA's own dS precede dV's and dK's, so that what follows hides all of dS's travel.
  static constexpr bool kDqFirst = kFromRegisters;
  /// The dQ of the tile before, not yet added to its sums.
  struct LateDq {
    QueryGradients values;
    uint32_t query_tile;
  };

  __device__ __forceinline__ uint32_t run_tile(uint32_t flags, Values& v, LateDq& late, KeyGradients& dk,
                                               ValueGradients& dv) {
    const bool is_first = flags & Tile::kFirst;
    PackedScores own_ds;
    write_scores(flags, v, late, dv, own_ds);
    send_scores();
    const Operand ds = this->ds();
    QueryGradients dq;
    if constexpr (kDqFirst) this->issue_dq(dq, ds, dq_columns(offsetof(Shared, k)));
    ptx::pin(dv);
    this->template issue_rows<kSharedFrom, kSharedRows>(dv, this->p(), this->dout_columns());
    if constexpr (!kDqFirst) this->issue_dq(dq, ds, dq_columns(offsetof(Shared, k)));
    ptx::pin(dk);
    if constexpr (kFromRegisters) this->template issue_rows<kOwnRows>(dk, own_ds, this->q_columns());
    this->template issue_rows<kSharedFrom, kSharedRows>(dk, ds, this->q_columns());
    ptx::wgmma_wait<kDkGroups + (kDqFirst ? 0 : 1)>();
    ptx::pin(dv);
    ptx::arrive_once(shared_.dout_empty[this->dout_ring().stage()]);
    if (!is_first) add<2, 4>(late);
    if constexpr (kSumsIntegers) {
      finish_integers(dq, dk, late);
    } else {
      finish_floats(dq, dk, late);
    }
    ring_.advance();
    return this->next_tile();
  }
  __device__ __forceinline__ void add_late(const LateDq& late) const { add<0, 4>(late); }

  /// Adds the product with the other CTA's dS to dQ, while dK's run, and keeps dQ for the next tile.
  __device__ __forceinline__ void finish_floats(QueryGradients& dq, KeyGradients& dk, LateDq& late) const {
    issue_other_dq<true>(dq);
    late.query_tile = ptx::from_leader(shared_.tile[ring_.stage()].query.index);
    ptx::wgmma_wait<1>();
    ptx::pin(dk);
    this->release_rows();
    ptx::wgmma_wait<0>();
    release_other();
    ptx::pin(dq);
    ptx::copy(dq, late.values);
  }
  /// finish_floats in deterministic mode, with the integers of both products.
  __device__ __forceinline__ void finish_integers(QueryGradients& dq, KeyGradients& dk, LateDq& late) const {
    const uint32_t stage = ring_.stage();
    ptx::wgmma_wait<kDkGroups>();
    ptx::pin(dq);
    QueryGradients other;
    issue_other_dq<false>(other);
    staging_.make_integers(dq, stage);
    late.query_tile = ptx::from_leader(shared_.tile[stage].query.index);
    ptx::wgmma_wait<1>();
    ptx::pin(dk);
    ptx::wgmma_wait<0>();
    release_other();
    ptx::pin(other);
    staging_.make_integers(other, stage);
    this->release_rows();
    ptx::add_integers(dq, other, late.values);
  }

  /// Computes P and dS of the consumer's rows, and puts them in shared memory. Adds half of the tile before's dQ, and
  /// issues dV's products that take P from registers.
  __device__ __forceinline__ void write_scores(uint32_t flags, Values& v, const LateDq& late, ValueGradients& dv,
                                               PackedScores& ds) {
    const bool is_first = flags & Tile::kFirst;
    Scores s, dp;
    PackedScores p;
    const auto dropped = this->draw_dropped();
    this->issue_s(s);
    if constexpr (kFromRegisters) {
      if (is_first) this->template read_values<kValueSteps>(v);
      this->template issue_dp<kValueSteps>(dp, v);
    } else {
      this->template issue_scores<Bias::kGradient, Traits::kVDim>(dp, offsetof(Shared, v), this->dout_rows());
    }
    if (!is_first) add<0, kEarlyQuarters>(late);
    this->compute_probabilities(s, flags, dropped, p);
    if constexpr (kFromRegisters) {
      ptx::pin(dv);
      this->template issue_rows<kOwnRows>(dv, p, this->dout_columns());
    }
    if constexpr (kEarlyQuarters < 2) {
      if (!is_first) add<kEarlyQuarters, 2>(late);
    }
    ptx::wgmma_wait<kFromRegisters ? 1 : 0>();
    wait_sent();
    this->compute_score_gradients(s, dp, flags, dropped, p, ds);
  }

  /// Waits until the other CTA has read the dS of two tiles before, in whose place this tile's comes.
  __device__ __forceinline__ void wait_sent() const {
    delay<Role::kConsumer>();
    ptx::wait(shared_.pair.ds_empty[ring_.stage()], ring_.phase() ^ 1);
  }
  /// Sends dS of both consumers to the other CTA, and expects its own.
  __device__ __forceinline__ void send_scores() const {
    if constexpr (kWarpgroup == 0) {
      if (warp_ == 0 && ptx::is_leader()) {
        auto& pair = shared_.pair;
        const uint32_t stage = ring_.stage(), other = 1 - rank_;
        ptx::arrive_expect(pair.ds_full[stage], Traits::kScoreBytes);
        ptx::bulk_copy_remote(ptx::shared_address_in(shared_.other.ds[stage], other), shared_.ds[stage],
                              Traits::kScoreBytes, ptx::shared_address_in(&pair.ds_full[stage], other));
      }
      __syncwarp();
    }
  }
  __device__ __forceinline__ void wait_received() const {
    delay<Role::kConsumer>();
    ptx::wait(shared_.pair.ds_full[ring_.stage()], ring_.phase());
  }
  /// dQ = the other CTA's dS times its keys, or with kAdds dQ +=, once that dS is there.
  template <bool kAdds>
  __device__ __forceinline__ void issue_other_dq(QueryGradients& dq) const {
    const uint32_t stage = ring_.stage();
    wait_received();
    this->template issue_dq<kAdds>(dq, operand(offsetof(Shared, other.ds), 16, stage, Traits::kScoreBytes),
                                   dq_columns(offsetof(Shared, other.k), PairShare<Traits>::kFirst * rank_));
  }
  /// Lets the other CTA send another dS in place of this tile's.
  __device__ __forceinline__ void release_other() const {
    __syncwarp();
    if (ptx::is_leader())
      ptx::arrive_remote_after_reads(ptx::shared_address_in(&shared_.pair.ds_empty[ring_.stage()], 1 - rank_));
  }
  /// Exchanges a dS of no use for a tile without rows, so that the barriers keep step with the ring. It is sent once
  /// all threads have waited, as in other tiles: the other CTA's answer ends the next phase of the barrier.
  __device__ __forceinline__ void exchange_nothing() const {
    wait_sent();
    this->template sync_consumers<kExchangeBarrier>();
    send_scores();
    wait_received();
    release_other();
  }

  /// The block of dq's columns where the consumer's are, and the first of them in it.
  __device__ __forceinline__ uint32_t dq_block() const { return kDqColumns == 64 ? 2 * rank_ + kWarpgroup : 1; }
  __device__ __forceinline__ uint32_t dq_column() const { return kDqColumns == 64 ? 0 : kDqColumns * rank_; }
  /// The consumer's columns of keys that are at `keys` in shared memory, in blocks from number `first` on.
  __device__ __forceinline__ Operand dq_columns(uint32_t keys, uint32_t first = 0) const {
    const Operand block = operand(keys, 16, dq_block() - first, kKeyBlock);
    return {block.low + (dq_column() * static_cast<uint32_t>(sizeof(Element)) >> 4)};
  }
  /// Adds quarters kBegin to kEnd of a thread's values to their sums.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void add(const LateDq& late) const {
    constexpr int kFrom = kBegin * kDqValues / 4, kCount = (kEnd - kBegin) * kDqValues / 4;
    delay<Role::kConsumer>();
    const auto block = static_cast<int>(dq_block());
    if constexpr (kSumsIntegers) {
      staging_.template add_integers<kFrom, kCount>(late.values + kFrom, block, late.query_tile, dq_column());
    } else {
      staging_.template add_dq<kFrom, kCount>(late.values + kFrom, block, late.query_tile, dq_column());
    }
  }

  const uint32_t rank_;  ///< the CTA's number in its pair
};

}  // namespace flashmask::sm90::bwd
