// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/common/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/score_consumer.cuh"
#include "backends/cuda/sm90/backward/wide_staging.cuh"
#include "backends/cuda/sm90/backward/wide_traits.cuh"

namespace flashmask::sm90::bwd {

/// One of a wide kernel's two consumers. Per tile it computes P and dS of 32 rows, and puts them in shared memory for
/// the other one. Its own columns of
///   dQ = dS K, dV += P^T dout, dK += dS^T Q
/// are sums over the rows of both; dV and dK, which stay in registers, take its own rows from registers, too. There are
/// always products under way: dV's of its own rows until the other consumer's are there, and S of the next tile behind
/// dK. dQ leaves under the products after it, half of it in the next tile.
template <typename Traits, uint32_t kWarpgroup>
class WideHalf : ScoreConsumer<Traits, WideStaging<Traits>> {
 public:
  using Shared = SharedStorage<Traits>;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;

  __device__ __forceinline__ WideHalf(const Params& p, Shared& shared) : Base(p, shared, kWarpgroup) {}

  __device__ __forceinline__ void run() {
    for (uint32_t flags = next_tile(); !(flags & Tile::kEnd);) flags = run_work_tile(flags);
    // The end is announced to each stage, and there may be but one of dout.
    ptx::arrive_once(shared_.dout_empty[dout_ring().stage()]);
    staging_.wait_stored();
  }

 private:
  using Base = ScoreConsumer<Traits, WideStaging<Traits>>;
  using Base::issue_scores, Base::kMask, Base::kWorkTile, Base::next_tile, Base::operand, Base::p_, Base::phases_,
      Base::ring_, Base::shared_, Base::staging_, Base::take_phase, Base::warp_;
  using typename Base::Operand, typename Base::PackedScores, typename Base::Scores, typename Base::Swizzle;
  using Dq = DqShare<Traits, kWarpgroup>;
  using Dk = DkShare<Traits, kWarpgroup>;
  using Dv = DvShare<Traits, kWarpgroup>;
  using KeyGradients = cuda::Accumulators<64, 64 * Dk::kCount>;
  using ValueGradients = cuda::Accumulators<64, 64 * Dv::kCount>;
  using QueryGradients = cuda::Accumulators<64, 64 * Dq::kCount>;
  /// The half of a tile's dQ that has not been added to its sums.
  static constexpr int kHalfDq = 16 * Dq::kCount;
  struct LateDq {
    float values[kHalfDq];
    uint32_t query_tile;
  };
  /// Of dP's product, those that have V in registers: as many as there are registers for beside dQ.
  static constexpr int kValueSteps = !Traits::kSparesRegisters ? 0 : Dq::kCount == 2 ? 6 : Traits::kVDim / 16;
  using Values = uint32_t[kValueSteps + 1][4];
  static constexpr uint32_t kTurn = kMask + Traits::kStages;  ///< of phases_, as kMask
  static constexpr uint32_t kOwnRows = kWarpgroup * Swizzle::block(Traits::kScoreRows),
                            kOtherRows = (1 - kWarpgroup) * Swizzle::block(Traits::kScoreRows);
  static constexpr uint32_t kRowBlock = Swizzle::block(Traits::kRows), kKeyBlock = Swizzle::block(Traits::kKeys);

  __device__ __forceinline__ ptx::RingPosition<Traits::kDoutStages> dout_ring() const { return {ring_.count}; }

  /// Runs the tiles of the work tile that the current one begins. Returns the flags of the tile after them.
  __device__ __forceinline__ uint32_t run_work_tile(uint32_t flags) {
    const Tile& tile = shared_.tile[ring_.stage()];
    const int32_t key_tile = ptx::from_leader(tile.key_tile);
    const auto group = static_cast<int32_t>(ptx::from_leader(tile.head_group)),
               batch = static_cast<int32_t>(ptx::from_leader(tile.query.batch));
    KeyGradients dk = {};
    ValueGradients dv = {};
    Values v = {};
    LateDq late = {};
    if (flags & Tile::kNothing) {
      ptx::arrive(shared_.scores_full[ring_.stage()]);
      ptx::wait(shared_.dout_full[dout_ring().stage()], dout_ring().phase());
      ptx::arrive_once(shared_.dout_empty[dout_ring().stage()]);
      ptx::arrive_once(shared_.q_empty[ring_.stage()]);
      ring_.advance();
      flags = next_tile();
    } else {
      ptx::wait(shared_.k_full, take_phase(kWorkTile));
      Scores s;
      issue_s(s);
      while (true) {
        flags = run_tile(flags, s, v, late, dk, dv);
        if (flags & (Tile::kFirst | Tile::kEnd)) break;
        issue_s(s);
        finish_dk<1>(dk);
      }
      finish_dk<0>(dk);
      ptx::arrive_once(shared_.kv_empty);
      add_late(late);
    }
    store_dkv(dk, dv, key_tile, group, batch);
    return flags;
  }

  /// Runs a tile whose S is under way, until only its dK is. Returns the flags of the next tile.
  __device__ __forceinline__ uint32_t run_tile(uint32_t flags, Scores& s, Values& v, LateDq& late, KeyGradients& dk,
                                               ValueGradients& dv) {
    const uint32_t stage = ring_.stage(), dout_stage = dout_ring().stage();
    const Operand q = operand(offsetof(Shared, q) + Dk::kBegin * kRowBlock, kRowBlock, stage, Traits::kQBytes),
                  dout = operand(offsetof(Shared, dout) + Dv::kBegin * kRowBlock, kRowBlock, dout_stage,
                                 Traits::kDoutBytes),
                  p = operand(offsetof(Shared, p), 16, dout_stage, Traits::kScoreBytes),
                  ds = operand(offsetof(Shared, ds), 16, stage, Traits::kScoreBytes);
    PackedScores own_p, own_ds;
    Scores dp;
    delay<Role::kConsumer>();
    ptx::wait(shared_.dout_full[dout_stage], dout_ring().phase());
    if (kValueSteps > 0 && flags & Tile::kFirst) read_values(v);
    issue_dp(dp, v, dout_stage);
    if (!(flags & Tile::kFirst)) add_late(late);
    take_probabilities(s, dp, flags, dout_stage, own_p);
    ptx::pin(dv);
    issue_own(dv, own_p, dout);
    ptx::wgmma_wait<1>();
    take_score_gradients(s, dp, stage, own_ds);
    this->template sync_consumers<kScoresBarrier>();
    QueryGradients dq;
    issue_dq(dq, ds);
    issue_rows<kOtherRows>(dv, p, dout);
    ptx::pin(dk);
    if constexpr (Traits::kSparesRegisters) {
      issue_own(dk, own_ds, q);
    } else {
      issue_rows<kOwnRows>(dk, ds, q);
    }
    issue_rows<kOtherRows>(dk, ds, q);
    late.query_tile = ptx::from_leader(shared_.tile[stage].query.index);
    ptx::wgmma_wait<3>();
    add_dq(dq, late);
    ptx::wgmma_wait<2>();
    ptx::pin(dv);
    ptx::arrive_once(shared_.dout_empty[dout_stage]);
    ring_.advance();
    return next_tile();
  }

  /// Releases the rows of the tile before the current one, once its dK is done.
  template <int kPending>
  __device__ __forceinline__ void finish_dk(KeyGradients& dk) const {
    static_assert(Traits::kStages > 1, "the current tile is there before the rows of the one before are released");
    ptx::wgmma_wait<kPending>();
    ptx::pin(dk);
    ptx::arrive_once(shared_.q_empty[(ring_.count - 1) % Traits::kStages]);
    __syncwarp();  // lets ptxas see that warps go round the loop whole, and keep addresses in uniform registers
  }

  /// S of the consumer's rows of the current tile.
  __device__ __forceinline__ void issue_s(Scores& s) const {
    issue_scores<Bias::kScore, Traits::kQkDim>(
        s, offsetof(Shared, k), operand(offsetof(Shared, q) + kOwnRows, 16, ring_.stage(), Traits::kQBytes));
  }

  /// Reads the warp's 16 keys of V.
  __device__ __forceinline__ void read_values(Values& v) const {
    const uint32_t row = warp_ * 16 + ptx::lane() % 16, from = ptx::shared_address(shared_.v) + row * Swizzle::kRow;
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      const uint32_t chunk = step % Swizzle::kStepsInBlock * 2 + ptx::lane() / 16;
      ptx::ldmatrix_x4(from + step / Swizzle::kStepsInBlock * kKeyBlock + Swizzle::chunk(row, chunk), v[step]);
    }
  }
  /// dP of the consumer's rows: as issue_scores, with some of V from registers.
  __device__ __forceinline__ void issue_dp(Scores& dp, const Values& v, uint32_t dout_stage) const {
    const BiasStep<Bias::kGradient, Traits::kScoreRows> bias(
        ptx::shared_address(shared_.biases[ring_.stage()] + this->first_row()));
    const Operand a = operand(offsetof(Shared, v)),
                  dout = operand(offsetof(Shared, dout) + kOwnRows, 16, dout_stage, Traits::kDoutBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kVDim / 16; ++step) {
      const uint64_t b = dout.at(Swizzle::step_along_row(step, Traits::kRows));
      if (step < kValueSteps) {
        ptx::wgmma_rs<Element, Traits::kScoreRows, ptx::Major::kInner>(dp, v[step], b, step > 0);
      } else {
        ptx::wgmma_ss<Element, Traits::kScoreRows, ptx::Major::kInner, ptx::Major::kInner>(
            dp, a.at(Swizzle::step_along_row(step, Traits::kKeys)), b, step > 0);
      }
    }
    bias.issue(dp);
    ptx::wgmma_commit();
  }

  /// Once S is there, turns it into P, and puts that in shared memory.
  __device__ __forceinline__ void take_probabilities(Scores& s, Scores& dp, uint32_t flags, uint32_t dout_stage,
                                                     PackedScores& packed) {
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    if constexpr (!Traits::Score::kFoldsLse) {
      ptx::wgmma_wait<0>();
      ptx::pin(dp);
      this->take_scores(s, dp);
    }
    Base::take_probabilities(s, flags & Tile::kPartial);
    this->pack(s, packed);
    this->write(packed, ptx::shared_address(shared_.p[dout_stage]) + kOwnRows);
  }

  /// The same of dS = P dP.
  __device__ __forceinline__ void take_score_gradients(const Scores& p, Scores& dp, uint32_t stage,
                                                       PackedScores& packed) {
    ptx::pin(dp);
    Base::take_score_gradients(p, dp, packed);
    this->write(packed, ptx::shared_address(shared_.ds[stage]) + kOwnRows);
    ptx::fence_async_proxy();
    ptx::arrive(shared_.scores_full[stage]);
    delay<Role::kConsumer>();
  }

  /// The consumer's columns of dQ = dS K.
  __device__ __forceinline__ void issue_dq(QueryGradients& dq, Operand ds) const {
    const Operand b = operand(offsetof(Shared, k) + Dq::kBegin * kKeyBlock, kKeyBlock);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
      ptx::wgmma_ss<Element, 64 * Dq::kCount, ptx::Major::kInner, ptx::Major::kOuter>(
          dq, ds.at(step * Swizzle::kStepAlongRow), b.at(step * Swizzle::kStepDownRows), step > 0);
    }
    ptx::wgmma_commit();
  }
  /// Adds half of them to their sums; in deterministic mode, when it is the key tile's turn, all.
  __device__ __forceinline__ void add_dq(QueryGradients& dq, LateDq& late) {
    const uint32_t stage = ring_.stage();
    ptx::pin(dq);
    ptx::copy(dq + kHalfDq, late.values);
    delay<Role::kConsumer>();
    if (p_.dq_sums.deterministic) ptx::wait(shared_.turn[stage], take_phase(kTurn + stage));
    staging_.template add_dq<0, kHalfDq>(dq, Dq::kBegin, late.query_tile);
    if (!p_.dq_sums.deterministic) return;
    add_other_half(late);
    ptx::arrive_once(shared_.dq_added[stage]);
  }
  __device__ __forceinline__ void add_late(const LateDq& dq) const {
    if (!p_.dq_sums.deterministic) add_other_half(dq);
  }
  __device__ __forceinline__ void add_other_half(const LateDq& dq) const {
    staging_.template add_dq<kHalfDq, kHalfDq>(dq.values, Dq::kBegin, dq.query_tile);
  }

  /// Columns of dK or dV += the consumer's `scores` times its rows of `b`.
  template <int kValues>
  __device__ __forceinline__ static void issue_own(float (&gradients)[kValues], const PackedScores& scores, Operand b) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kScoreRows / 16; ++step) {
      ptx::wgmma_rs<Element, 2 * kValues, ptx::Major::kOuter>(gradients, scores[step],
                                                              b.at(kOwnRows + step * Swizzle::kStepDownRows), true);
    }
    ptx::wgmma_commit();
  }
  /// The same of the consumer's or the other one's from shared memory, transposed.
  template <uint32_t kFrom, int kValues>
  __device__ __forceinline__ static void issue_rows(float (&gradients)[kValues], Operand scores, Operand b) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kScoreRows / 16; ++step) {
      const uint32_t rows = kFrom + step * Swizzle::kStepDownRows;
      ptx::wgmma_ss<Element, 2 * kValues, ptx::Major::kOuter, ptx::Major::kOuter>(gradients, scores.at(rows),
                                                                                  b.at(rows), true);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void store_dkv(const KeyGradients& dk, const ValueGradients& dv, int32_t key_tile,
                                            int32_t group, int32_t batch) const {
    constexpr int kDkFloats = KeyFragments<Traits::kKeys, Traits::kQkDim>::kTileFloats,
                  kDvFloats = KeyFragments<Traits::kKeys, Traits::kVDim>::kTileFloats;
    float* parts =
        p_.key_parts + ((static_cast<int64_t>(batch) * p_.head_groups + group) * p_.schedule.tiles + key_tile) *
                           (kDkFloats + kDvFloats);
    const int32_t key = key_tile * Traits::kKeys + static_cast<int32_t>(warp_ * 16);
    staging_.template store_keys<Traits::kVDim>(p_.dv, dv, 1, {key, Dv::kBegin, group, batch}, parts + kDkFloats);
    staging_.template store_keys<Traits::kQkDim>(p_.dk, dk, p_.softmax_scale, {key, Dk::kBegin, group, batch}, parts);
  }
};

/// A consumer, by a number that has to be a constant.
template <typename Traits>
class WideConsumer {
 public:
  using Shared = SharedStorage<Traits>;
  using Params = typename Traits::Params;
  __device__ __forceinline__ WideConsumer(const Params& p, Shared& shared, uint32_t warpgroup)
      : p_(p), shared_(shared), warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
    if (warpgroup_ == 0) {
      WideHalf<Traits, 0>(p_, shared_).run();
    } else {
      WideHalf<Traits, 1>(p_, shared_).run();
    }
  }

 private:
  const Params& p_;
  Shared& shared_;
  const uint32_t warpgroup_;
};

}  // namespace flashmask::sm90::bwd
