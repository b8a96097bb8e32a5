// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/backward/columns/part_exchange.cuh"
#include "backends/cuda/sm90/backward/columns/staging.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/score_consumer.cuh"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::bwd {

/// One consumer warpgroup: 64 keys of every work tile, whose dk and dv stay in registers. Per tile it computes,
/// key-major,
///   S = K Q^T - lse / scale, dP = V dout^T - delta, P = exp2(S scale log2(e)), dS = P dP, dV += P dout, dK += dS Q,
/// and, query-major, dQ = dS K from dS of both warpgroups in shared memory: half of it, or all of it in every other
/// tile. Where kHalves, dP comes in two halves of the rows, and dK, too, reads dS from shared memory.
/// All of this is inlined, so that a constant warpgroup number makes operands' addresses constants.
template <typename Traits>
class Consumer : ScoreConsumer<Traits, Staging<Traits>> {
 public:
  using Shared = SharedStorage<Traits>;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;

  __device__ __forceinline__ Consumer(const Params& p, Shared& shared, uint32_t warpgroup)
      : Base(p, shared, warpgroup) {}

  __device__ __forceinline__ void run() {
    for (uint32_t flags = next_tile(); !(flags & Tile::kEnd);) flags = run_work_tile(flags);
    this->pass_end();
    staging_.wait_stored();
  }

 private:
  using Outgoing = Staging<Traits>;
  using Base = ScoreConsumer<Traits, Outgoing>;
  using Base::dout_ring, Base::dq_phase, Base::issue_scores, Base::kDq, Base::kDs, Base::kExchange, Base::kWorkTile,
      Base::next_tile, Base::operand, Base::p_, Base::phases_, Base::ring_, Base::shared_, Base::staging_,
      Base::advance_phase, Base::warp_, Base::warpgroup_;
  using typename Base::Operand, typename Base::PackedScores, typename Base::Scores, typename Base::Swizzle;
  using KeyGradients = typename Traits::KeyGradients;
  using ValueGradients = typename Traits::ValueGradients;
  using Blocks = typename Outgoing::Blocks;
  using OwnDq = typename Outgoing::OwnDq;
  /// Keeps the previous tile's dq in deterministic mode, see store_late, if there are registers for it. Kernels for
  /// both modes would spend them from tile to tile in either.
  static constexpr bool kLate = Traits::kDqSum == DqSum::kIntegers && !kHalves<Traits>;
  struct NoDq {};
  using LateDq = std::conditional_t<kLate, typename Outgoing::KeptDq, NoDq>;
  /// Half of the rows, for dP in two halves.
  static constexpr int kHalfRows = Traits::kRows / 2;
  using HalfScores = cuda::Accumulators<64, kHalfRows>;
  using PackedHalf = cuda::PackedFragments<kHalfRows>;
  static constexpr uint32_t kScoreBytes = Traits::kRows * Traits::kKeys * sizeof(Element);

  /// Runs the tiles of the work tile that the current one begins. Returns the flags of the tile after them.
  __device__ __forceinline__ uint32_t run_work_tile(uint32_t flags) {
    const Tile& tile = shared_.tile[ring_.stage()];
    const int32_t key = ptx::from_leader(tile.key_tile) * Traits::kKeys;
    const auto group = static_cast<int32_t>(ptx::from_leader(tile.head_group)),
               batch = static_cast<int32_t>(ptx::from_leader(tile.query.batch));
    KeyGradients dk = {};
    ValueGradients dv = {};
    if (flags & Tile::kNothing) {
      flags = this->pass_nothing();
    } else {
      ptx::wait(shared_.k_full, advance_phase(kWorkTile));
      LateDq late;
      do {
        if constexpr (kHalves<Traits>) {
          flags = run_tile_by_halves(flags, dk, dv);
        } else {
          flags = run_tile(flags, dk, dv, late);
        }
      } while (!(flags & (Tile::kFirst | Tile::kEnd)));
      ptx::arrive_once(shared_.kv_empty);
      store_late(late);
    }
    if constexpr (Traits::kSharesRows) {
      if (!exchange_parts(dk, dv)) return flags;
    } else if constexpr (Traits::kAlternate && !Traits::kSplit) {
      // The other warpgroup may still have to store the last tile's dq, through this one's staging tiles, too.
      staging_.wait_store_read();
      this->template sync_consumers<kStagingBarrier>();
    }
    this->scale_kept(dv);
    staging_.store_dkv(dk, dv, key, group, batch, dq_phase());
    return flags;
  }

  /// Adds the other CTA's part of dk and dv, or sends it this one's. Returns true if dk and dv are the sums.
  __device__ __forceinline__ bool exchange_parts(KeyGradients& dk, ValueGradients& dv) {
    const PartExchange<Traits> parts(shared_, warp_);
    const uint32_t phase = advance_phase(kExchange);
    const bool adds = warpgroup_ == ptx::uniform(ptx::cluster_rank());
    staging_.wait(dq_phase());
    this->template sync_consumers<kStagingBarrier>();
    if (adds) {
      parts.add(dk, dv, phase);
    } else {
      parts.send(dk, dv, phase);
    }
    this->template sync_consumers<kExchangeBarrier>();
    return adds;
  }

  /// Returns the flags of the next tile.
  __device__ __forceinline__ uint32_t run_tile(uint32_t flags, KeyGradients& dk, ValueGradients& dv, LateDq& late) {
    const uint32_t stage = ring_.stage();
    Scores s, dp;
    issue_scores<Bias::kScore, Traits::kQkDim>(s, offsetof(Shared, k),
                                               operand(offsetof(Shared, q), 16, stage, Traits::kQBytes));
    if (!(flags & Tile::kFirst)) store_late_under_scores(late);
    delay<Role::kConsumer>();
    ptx::wait(shared_.dout_full[stage], ring_.phase());
    issue_scores<Bias::kGradient, Traits::kVDim>(dp, offsetof(Shared, v),
                                                 operand(offsetof(Shared, dout), 16, stage, Traits::kDoutBytes));
    PackedScores p, ds;
    if constexpr (kTermsLast<Traits>) {
      const auto dropped = this->draw_dropped();
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      this->compute_weights(s, flags & Tile::kPartial, dropped, p);
      ptx::wgmma_wait<0>();
      ptx::pin(dp);
      this->compute_score_gradients(s, dp, flags & Tile::kPartial, dropped, p, ds);
    } else {
      ptx::wgmma_wait<1>();
      ptx::pin(s);
      this->compute_probabilities(s, flags & Tile::kPartial);
      this->pack(s, p);
      ptx::wgmma_wait<0>();
      ptx::pin(dp);
      this->multiply_probabilities(s, dp, ds);
    }
    this->write(ds, ptx::shared_address(shared_.ds[stage]) + warpgroup_ * Swizzle::block(Traits::kRows));
    ptx::pin(dv);
    issue_gradients<Traits::kVDim>(
        dv, p, operand(offsetof(Shared, dout), Swizzle::block(Traits::kRows), stage, Traits::kDoutBytes));
    ptx::fence_async_proxy();
    ptx::arrive(shared_.scores_full[stage]);
    delay<Role::kConsumer>();
    if constexpr (Traits::kAlternate) {
      finish_tile_alternating(flags, dk, dv, ds, late);
    } else {
      finish_tile_together(flags, dk, dv, ds, late);
    }
    if (!(flags & Tile::kAlone)) phases_ ^= 1u << kDq;
    this->release_rows();
    ring_.advance();
    return next_tile();
  }

  /// Returns the flags of the next tile.
  __device__ __forceinline__ uint32_t run_tile_by_halves(uint32_t flags, KeyGradients& dk, ValueGradients& dv) {
    const uint32_t stage = ring_.stage();
    Scores s;
    HalfScores dp;
    issue_scores<Bias::kScore, Traits::kQkDim>(s, offsetof(Shared, k),
                                               operand(offsetof(Shared, q), 16, stage, Traits::kQBytes));
    delay<Role::kConsumer>();
    ptx::wait(shared_.dout_full[0], dout_ring().phase());
    issue_score_gradients<0>(dp);
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    ptx::pin(dv);
    PackedHalf first, second;
    compute_half<0>(s, dp, flags, first);
    issue_score_gradients<1>(dp);
    issue_dv<0>(dv, first);
    compute_half<1>(s, dp, flags, second);
    issue_dv<1>(dv, second);
    ptx::fence_async_proxy();
    ptx::arrive(shared_.scores_full[stage]);
    delay<Role::kConsumer>();
    this->template sync_consumers<kScoresBarrier>();
    ptx::wgmma_wait<0>();
    ptx::pin(dv);
    ptx::arrive_once(shared_.dout_empty[0]);
    OwnDq dq;
    issue_dq(dq);
    issue_dk_from_shared(dk);
    ptx::wgmma_wait<1>();
    pin(dq);
    ptx::arrive_once(shared_.halves.ds_empty);
    NoDq none;
    hand_over_dq(dq, flags, none);
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    if (!(flags & Tile::kAlone)) phases_ ^= 1u << kDq;
    this->release_rows();
    ring_.advance();
    return next_tile();
  }

  /// dP of a half of the rows.
  template <int kHalf>
  __device__ __forceinline__ void issue_score_gradients(HalfScores& dp) const {
    issue_scores<Bias::kGradient, Traits::kVDim>(dp, offsetof(Shared, v),
                                                 operand(offsetof(Shared, dout) + kHalf * Swizzle::block(kHalfRows)),
                                                 kHalf * kHalfRows);
  }

  /// P of a half of the rows, and dS, which goes to shared memory.
  template <int kHalf>
  __device__ __forceinline__ void compute_half(Scores& of_all, HalfScores& dp, uint32_t flags, PackedHalf& p) {
    constexpr int kFirst = kHalf * kHalfRows, kPending = kHalf == 0 ? 0 : 1;  // dV's first half comes after dP's second
    HalfScores& s = cuda::part_of<kFirst / 2, kHalfRows / 2>(of_all);
    ptx::pin(s);
    this->template compute_probabilities<kFirst>(s, flags & Tile::kPartial);
    this->pack(s, p);
    ptx::wgmma_wait<kPending>();
    ptx::pin(dp);
    PackedHalf ds;
    this->multiply_probabilities(s, dp, ds);
    if constexpr (kHalf == 0) ptx::wait(shared_.halves.ds_empty, advance_phase(kDs) ^ 1);
    this->write(
        ds, ptx::shared_address(shared_.ds[0]) + warpgroup_ * Swizzle::block(Traits::kRows) + Swizzle::block(kFirst));
  }

  /// dV += 64 keys of P times the rows of dout, of a half of the rows.
  template <int kHalf>
  __device__ __forceinline__ void issue_dv(ValueGradients& dv, const PackedHalf& p) const {
    issue_gradients<Traits::kVDim>(
        dv, p, operand(offsetof(Shared, dout) + kHalf * Swizzle::block(kHalfRows), Swizzle::block(Traits::kRows)));
  }

  /// dK += dS Q, dS from shared memory.
  __device__ __forceinline__ void issue_dk_from_shared(KeyGradients& dk) const {
    const Operand a = operand(offsetof(Shared, ds) + warpgroup_ * Swizzle::block(Traits::kRows)),
                  b = operand(offsetof(Shared, q), Swizzle::block(Traits::kRows), ring_.stage(), Traits::kQBytes);
    ptx::pin(dk);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kRows / 16; ++step) {
      ptx::wgmma_ss<Element, Traits::kQkDim, ptx::Major::kOuter, ptx::Major::kOuter>(
          dk, a.at(step * Swizzle::kStepDownRows), b.at(step * Swizzle::kStepDownRows), true);
    }
    ptx::wgmma_commit();
  }

  /// Stores a tile's dq. In deterministic mode keeps it for store_late, or hands it over as integers itself.
  __device__ __forceinline__ void hand_over_dq(OwnDq& dq, uint32_t flags, [[maybe_unused]] LateDq& late) const {
    const uint32_t stage = ring_.stage();
    if constexpr (kLate) {
      staging_.keep(dq, late, stage);
    } else if constexpr (!kMaySumIntegers<Traits>) {
      staging_.store_dq(dq, flags, stage, dq_phase());
    } else if (sums_integers<Traits>(p_)) {
      if constexpr (Traits::kAlternate) {
        staging_.store_integers(dq, stage, dq_phase());
      } else {
        staging_.keep(dq, dq, stage);
        staging_.store_kept(dq, stage, dq_phase());
      }
    } else {
      staging_.store_dq(dq, flags, stage, dq_phase());
    }
  }
  /// Ends the lifetime of `late`, which would otherwise stay in registers after it has been handed over.
  __device__ __forceinline__ static void forget([[maybe_unused]] LateDq& late) {
    if constexpr (kLate) {
#pragma unroll
      for (auto& block : late.dq) ptx::clear(block);
    }
  }
  /// Hands over the previous tile's dq as integers, if this warpgroup had one.
  __device__ __forceinline__ void store_late([[maybe_unused]] LateDq& late) const {
    if constexpr (kLate) {
      static_assert(Traits::kStages == 2);
      const uint32_t before = ring_.stage() ^ 1;
      if (!Traits::kAlternate || before == warpgroup_) staging_.store_kept(late, before, dq_phase() ^ 1);
    }
  }
  /// store_late under S's product: making integers takes longer than dK's product, but not longer than S's. Until a
  /// wait that follows S, ptxas takes registers that a product wrote for pending, and would wait for S itself.
  __device__ __forceinline__ void store_late_under_scores([[maybe_unused]] LateDq& late) const {
    if constexpr (kLate && Traits::kAlternate) {
      ptx::wgmma_wait<1>();
      pin(late.dq);
    }
    store_late(late);
  }

  /// Half of dQ, once dS of both warpgroups is there, and dK; dq is stored beside dK's product.
  __device__ __forceinline__ void finish_tile_together(uint32_t flags, KeyGradients& dk, ValueGradients& dv,
                                                       const PackedScores& ds, LateDq& late) {
    this->template sync_consumers<kScoresBarrier>();
    OwnDq dq;
    issue_dq(dq);
    ptx::wgmma_wait<1>();
    ptx::pin(dv);
    ptx::arrive_once(shared_.dout_empty[ring_.stage()]);
    issue_dk(dk, ds);
    ptx::wgmma_wait<1>();
    pin(dq);
    hand_over_dq(dq, flags, late);
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
  }

  /// dK, and in every other tile dQ, once the other warpgroup's dS is there. That warpgroup goes on meanwhile, by no
  /// more than a tile: its next dQ needs this one's dS.
  __device__ __forceinline__ void finish_tile_alternating(uint32_t flags, KeyGradients& dk, ValueGradients& dv,
                                                          const PackedScores& ds, LateDq& late) {
    const bool own_tile = ring_.stage() == warpgroup_;
    if (!own_tile) {
      staging_.wait_store_read();
      ptx::named_barrier_arrive(kScoresBarrier + 1 - warpgroup_, 256);
    }
    issue_dk(dk, ds);
    ptx::wgmma_wait<1>();
    ptx::pin(dv);
    ptx::arrive_once(shared_.dout_empty[ring_.stage()]);
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    if (!own_tile) return forget(late);
    ptx::named_barrier_sync(kScoresBarrier + warpgroup_, 256);
    OwnDq dq;
    issue_dq(dq);
    ptx::wgmma_wait<0>();
    pin(dq);
    hand_over_dq(dq, flags, late);
  }

  /// dK or dV += 64 keys of `scores` times the rows of `b`.
  template <int kDim, int kSteps>
  __device__ __forceinline__ static void issue_gradients(cuda::Accumulators<64, kDim>& gradients,
                                                         const uint32_t (&scores)[kSteps][4], Operand b) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::wgmma_rs<Element, kDim, ptx::Major::kOuter>(gradients, scores[step], b.at(step * Swizzle::kStepDownRows),
                                                       true);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_dk(KeyGradients& dk, const PackedScores& ds) const {
    ptx::pin(dk);
    issue_gradients<Traits::kQkDim>(
        dk, ds, operand(offsetof(Shared, q), Swizzle::block(Traits::kRows), ring_.stage(), Traits::kQBytes));
  }

  /// This warpgroup's blocks of dQ = dS K, see DqBlocks.
  __device__ __forceinline__ void issue_dq(OwnDq& dq) const {
    constexpr uint32_t kColumnBlock = Swizzle::block(Traits::kKeys);  // in K
    if constexpr (kHalves<Traits>) {
      if (warpgroup_ == 0) {
        issue_dq_columns<0>(dq[0]);
      } else {
        issue_dq_columns<Blocks::kBlockColumns>(dq[0]);
      }
      return;
    }
    const uint32_t first = Traits::kAlternate ? 0 : warpgroup_ * Outgoing::kOwnBlocks;
    const Operand a = operand(offsetof(Shared, ds), 16, ring_.stage(), kScoreBytes);
    const Operand b = operand(offsetof(Shared, k) + first / Blocks::kRowBlocks * kColumnBlock, kColumnBlock);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
#pragma unroll
      for (int block = 0; block < Outgoing::kOwnBlocks; ++block) {
        const uint32_t rows = block % Blocks::kRowBlocks * Swizzle::block(64),
                       columns = block / Blocks::kRowBlocks * kColumnBlock;
        ptx::wgmma_ss<Element, Blocks::kBlockColumns, ptx::Major::kInner, ptx::Major::kOuter>(
            dq[block], a.at(rows + Swizzle::step_along_row(step, Traits::kRows)),
            b.at(columns + step * Swizzle::kStepDownRows), step > 0);
      }
    }
    ptx::wgmma_commit();
  }
  /// A block of dQ from column kFirst on. Products begin with a block of K, or end with one.
  template <int kFirst>
  __device__ __forceinline__ void issue_dq_columns(typename Outgoing::Block& dq) const {
    constexpr uint32_t kColumnBlock = Swizzle::block(Traits::kKeys);  // in K
    constexpr int kRest = (64 - kFirst % 64) % 64, kWhole = Blocks::kBlockColumns - kRest;
    const Operand a = operand(offsetof(Shared, ds)),
                  b = operand(offsetof(Shared, k) + (kFirst + kRest) / 64 * kColumnBlock, kColumnBlock),
                  b_of_rest = operand(offsetof(Shared, k) + kFirst / 64 * kColumnBlock + kFirst % 64 * sizeof(Element));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
      const uint64_t ds = a.at(Swizzle::step_along_row(step, Traits::kRows));
      if constexpr (kRest > 0)
        ptx::wgmma_ss<Element, kRest, ptx::Major::kInner, ptx::Major::kOuter>(
            cuda::part_of<0, kRest / 2>(dq), ds, b_of_rest.at(step * Swizzle::kStepDownRows), step > 0);
      ptx::wgmma_ss<Element, kWhole, ptx::Major::kInner, ptx::Major::kOuter>(
          cuda::part_of<kRest / 2, kWhole / 2>(dq), ds, b.at(step * Swizzle::kStepDownRows), step > 0);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ static void pin(OwnDq& dq) {
#pragma unroll
    for (auto& block : dq) ptx::pin(block);
  }
};

}  // namespace flashmask::sm90::bwd
