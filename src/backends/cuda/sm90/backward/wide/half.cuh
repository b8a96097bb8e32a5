// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/ldmatrix.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/backward/columns/float_keys.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/score_consumer.cuh"
#include "backends/cuda/sm90/backward/wide/staging.cuh"
#include "backends/cuda/sm90/backward/wide/traits.cuh"

namespace flashmask::sm90::bwd {

/// Common base of a wide kernel's two consumers, whichever way dq leaves them. Per tile each computes P and dS of 32
/// rows, puts them in shared memory, and multiplies P and dS of all 64 rows for its own columns of
///   dQ = dS K, dV += P^T dout, dK += dS^T Q;
/// dV and dK stay in registers.
/// Half derives from it, and has
///   Values, LateDq: parts of V and of dQ that stay in registers from tile to tile of a work tile, beside dk and dv,
///   run_tile(flags, Values&, LateDq&, dk, dv): returns the flags of the next tile,
///   add_late(LateDq): after a work tile's last,
///   exchange_nothing(), in a pair: before a tile without rows.
template <typename Half, typename Traits, uint32_t kWarpgroup>
class WideHalf : protected ScoreConsumer<Traits, WideStaging<Traits>> {
 public:
  using Shared = SharedStorage<Traits>;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;

  __device__ __forceinline__ WideHalf(const Params& p, Shared& shared) : Base(p, shared, kWarpgroup) {}

  __device__ __forceinline__ void run() {
    for (uint32_t flags = next_tile(); !(flags & Tile::kEnd);) flags = run_work_tile(flags);
    this->pass_end();
    staging_.wait_stored();
  }

 protected:
  using Base = ScoreConsumer<Traits, WideStaging<Traits>>;
  using Base::dout_ring, Base::dq_phase, Base::issue_scores, Base::kWorkTile, Base::next_tile, Base::operand, Base::p_,
      Base::ring_, Base::shared_, Base::staging_, Base::advance_phase, Base::warp_;
  using typename Base::Operand, typename Base::PackedScores, typename Base::Scores, typename Base::Swizzle;
  using Dq = DqShare<Traits, kWarpgroup>;
  using Dk = DkShare<Traits, kWarpgroup>;
  using Dv = DvShare<Traits, kWarpgroup>;
  using KeyGradients = cuda::Accumulators<64, 64 * Dk::kCount>;
  using ValueGradients = cuda::Accumulators<64, 64 * Dv::kCount>;
  static constexpr uint32_t kOwnRows = kWarpgroup * Swizzle::block(Traits::kScoreRows),
                            kOtherRows = (1 - kWarpgroup) * Swizzle::block(Traits::kScoreRows);
  static constexpr uint32_t kRowBlock = Swizzle::block(Traits::kRows), kKeyBlock = Swizzle::block(Traits::kKeys);

  /// Operands of dQ, dV and dK: P and dS of the current tile, and the consumer's columns of its Q and dout.
  __device__ __forceinline__ Operand p() const {
    return operand(offsetof(Shared, p), 16, dout_ring().stage(), Traits::kScoreBytes);
  }
  __device__ __forceinline__ Operand ds() const {
    return operand(offsetof(Shared, ds), 16, ring_.stage(), Traits::kScoreBytes);
  }
  __device__ __forceinline__ Operand q_columns() const {
    return operand(offsetof(Shared, q) + Dk::kBegin * kRowBlock, kRowBlock, ring_.stage(), Traits::kQBytes);
  }
  __device__ __forceinline__ Operand dout_columns() const {
    return operand(offsetof(Shared, dout) + Dv::kBegin * kRowBlock, kRowBlock, dout_ring().stage(), Traits::kDoutBytes);
  }
  /// The consumer's rows of dout, for dP.
  __device__ __forceinline__ Operand dout_rows() const {
    return operand(offsetof(Shared, dout) + kOwnRows, 16, dout_ring().stage(), Traits::kDoutBytes);
  }

  /// S of the consumer's rows. Returns when dout is there, too.
  __device__ __forceinline__ void issue_s(Scores& s) const {
    issue_scores<Bias::kScore, Traits::kQkDim>(
        s, offsetof(Shared, k), operand(offsetof(Shared, q) + kOwnRows, 16, ring_.stage(), Traits::kQBytes));
    delay<Role::kConsumer>();
    ptx::wait(shared_.dout_full[dout_ring().stage()], dout_ring().phase());
  }

  /// V of the warp's 16 keys as operands in registers: kSteps steps of 16 columns. One step more than is read: it takes
  /// no registers, but without it ptxas arranges the others differently.
  template <int kSteps>
  using ValueSteps = uint32_t[kSteps + 1][4];
  template <int kSteps>
  __device__ __forceinline__ void read_values(ValueSteps<kSteps>& v) const {
    const uint32_t row = warp_ * 16 + ptx::lane() % 16, from = ptx::shared_address(shared_.v) + row * Swizzle::kRow;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t chunk = step % Swizzle::kStepsInBlock * 2 + ptx::lane() / 16;
      ptx::ldmatrix_x4(from + step / Swizzle::kStepsInBlock * kKeyBlock + Swizzle::chunk(row, chunk), v[step]);
    }
  }
  /// dP of the consumer's rows: as issue_scores, with kSteps steps of V from registers.
  template <int kSteps>
  __device__ __forceinline__ void issue_dp(Scores& dp, const ValueSteps<kSteps>& v) const {
    const uint32_t biases = ptx::shared_address(shared_.biases[ring_.stage()] + this->first_row());
    const auto bias = this->template bias_step<Bias::kGradient, Traits::kScoreRows>(biases & kAddressBits<Traits>);
    const Operand a = operand(offsetof(Shared, v)), dout = dout_rows();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kVDim / 16; ++step) {
      const uint64_t b = dout.at(Swizzle::step_along_row(step, Traits::kRows));
      if (step < kSteps) {
        ptx::wgmma_rs<Element, Traits::kScoreRows, ptx::Major::kInner>(dp, v[step], b, step > 0);
      } else {
        ptx::wgmma_ss<Element, Traits::kScoreRows, ptx::Major::kInner, ptx::Major::kInner>(
            dp, a.at(Swizzle::step_along_row(step, Traits::kKeys)), b, step > 0);
      }
    }
    bias.issue(dp);
    ptx::wgmma_commit();
  }

  /// Once S is there, turns it into P or, with kTermsLast, into compute_score_gradients' factor, and puts P in shared
  /// memory.
  template <typename Dropped>
  __device__ __forceinline__ void compute_probabilities(Scores& s, uint32_t flags, const Dropped& dropped,
                                                        PackedScores& p) {
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    if constexpr (kTermsLast<Traits>) {
      this->compute_weights(s, flags & Tile::kPartial, dropped, p);
    } else {
      Base::compute_probabilities(s, flags & Tile::kPartial);
      this->pack(s, p);
    }
    this->write(p, ptx::shared_address(shared_.p[dout_ring().stage()]) + kOwnRows);
  }

  /// Computes dS from compute_probabilities' `s` and from dP, which the caller has waited for, and puts it in shared
  /// memory. Returns when the other consumer's dS is there, too.
  template <typename Dropped>
  __device__ __forceinline__ void compute_score_gradients(Scores& s, Scores& dp, uint32_t flags, const Dropped& dropped,
                                                          PackedScores& p, PackedScores& ds) {
    ptx::pin(dp);
    if constexpr (kTermsLast<Traits>) {
      static_assert(2 * Base::kEarlyWeights == Traits::kScoreRows, "P is in shared memory");
      Base::compute_score_gradients(s, dp, flags & Tile::kPartial, dropped, p, ds);
    } else {
      Base::multiply_probabilities(s, dp, ds);
    }
    this->write(ds, ptx::shared_address(shared_.ds[ring_.stage()]) + kOwnRows);
    ptx::fence_async_proxy();
    ptx::arrive(shared_.scores_full[ring_.stage()]);
    delay<Role::kConsumer>();
    this->template sync_consumers<kScoresBarrier>();
  }

  /// The columns of dQ = dS K that `k` has; with kAdds of dQ += dS K.
  template <bool kAdds = false, int kValues>
  __device__ __forceinline__ static void issue_dq(float (&dq)[kValues], Operand ds, Operand k) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
      ptx::wgmma_ss<Element, 2 * kValues, ptx::Major::kInner, ptx::Major::kOuter>(
          dq, ds.at(step * Swizzle::kStepAlongRow), k.at(step * Swizzle::kStepDownRows), kAdds || step > 0);
    }
    ptx::wgmma_commit();
  }

  /// Columns of dK or dV += the transposed `scores` times the rows of `b`: kRows of them from `kFrom` on.
  template <uint32_t kFrom, int kRows, int kValues>
  __device__ __forceinline__ static void issue_rows(float (&gradients)[kValues], Operand scores, Operand b) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      const uint32_t rows = kFrom + step * Swizzle::kStepDownRows;
      ptx::wgmma_ss<Element, 2 * kValues, ptx::Major::kOuter, ptx::Major::kOuter>(gradients, scores.at(rows),
                                                                                  b.at(rows), true);
    }
    ptx::wgmma_commit();
  }
  /// issue_rows with `scores` of 16 * kSteps rows from registers.
  template <uint32_t kFrom, int kSteps, int kValues>
  __device__ __forceinline__ static void issue_rows(float (&gradients)[kValues], const uint32_t (&scores)[kSteps][4],
                                                    Operand b) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::wgmma_rs<Element, 2 * kValues, ptx::Major::kOuter>(gradients, scores[step],
                                                              b.at(kFrom + step * Swizzle::kStepDownRows), true);
    }
    ptx::wgmma_commit();
  }

 private:
  /// Runs the tiles of the work tile that the current one begins. Returns the flags of the tile after them.
  __device__ __forceinline__ uint32_t run_work_tile(uint32_t flags) {
    Half& half = static_cast<Half&>(*this);
    const Tile& tile = shared_.tile[ring_.stage()];
    const int32_t key_tile = ptx::from_leader(tile.key_tile);
    const auto group = static_cast<int32_t>(ptx::from_leader(tile.head_group)),
               batch = static_cast<int32_t>(ptx::from_leader(tile.query.batch));
    KeyGradients dk = {};
    ValueGradients dv = {};
    typename Half::Values v = {};
    typename Half::LateDq late = {};
    if (flags & Tile::kNothing) {
      if constexpr (Traits::kPair) half.exchange_nothing();
      flags = this->pass_nothing();
    } else {
      ptx::wait(shared_.k_full, advance_phase(kWorkTile));
      do {
        flags = half.run_tile(flags, v, late, dk, dv);
      } while (!(flags & (Tile::kFirst | Tile::kEnd)));
      half.add_late(late);
      if constexpr (!Traits::kPair) ptx::arrive_once(shared_.kv_empty);
    }
    this->scale_kept(dv);
    store_dkv(dk, dv, key_tile, group, batch);
    if constexpr (Traits::kPair) ptx::arrive_once(shared_.kv_empty);
    return flags;
  }

  __device__ __forceinline__ void store_dkv(const KeyGradients& dk, const ValueGradients& dv, int32_t key_tile,
                                            int32_t group, int32_t batch) const {
    if constexpr (Traits::kSplit) {
      const FloatKeys<Traits> keys(p_, key_tile, group, batch, warp_);
      keys.template store_dk<64 * Dk::kBegin>(dk);
      keys.template store_dv<64 * Dv::kBegin>(dv);
    } else if constexpr (Traits::kPair) {
      this->template sync_consumers<kStagingBarrier>();
      const int32_t key = key_tile * Traits::kKeys + static_cast<int32_t>(warp_ * 16);
      staging_.template store_through_operands<Dk, Dv>(dk, dv, {key, 0, group, batch});
    } else {
      const int32_t key = key_tile * Traits::kKeys + static_cast<int32_t>(warp_ * 16);
      staging_.store_keys(p_.keys.maps.dv, dv, 1, {key, Dv::kBegin, group, batch}, dq_phase());
      staging_.store_keys(p_.keys.maps.dk, dk, p_.scale, {key, Dk::kBegin, group, batch}, dq_phase());
    }
  }
};

}  // namespace flashmask::sm90::bwd
