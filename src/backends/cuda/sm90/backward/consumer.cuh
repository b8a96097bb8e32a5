// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/common/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/row_bias.cuh"
#include "backends/cuda/sm90/backward/staging.cuh"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::bwd {

/// One consumer warpgroup: 64 keys of every work tile, whose dk and dv stay in registers. Per tile it computes,
/// key-major,
///   S = K Q^T - lse / scale, dP = V dout^T - delta, P = exp2(S scale log2(e)), dS = P dP, dV += P dout, dK += dS Q,
/// and, query-major, dQ = dS K from dS of both warpgroups in shared memory: half of it, or all of it in every other
/// tile. All of this is inlined, so that a constant warpgroup number makes operands' addresses constants.
template <typename Traits>
class Consumer {
 public:
  using Shared = SharedStorage<Traits>;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;

  __device__ __forceinline__ Consumer(const Params& p, Shared& shared, uint32_t warpgroup)
      : p_(p),
        shared_(shared),
        warpgroup_(warpgroup),
        staging_(p, shared, warpgroup),
        base_(ptx::shared_address(&shared) >> 4),
        warp_(ptx::uniform(threadIdx.x / 32 % 4)) {}

  __device__ __forceinline__ void run() {
    for (uint32_t flags = next_tile(); !(flags & Tile::kEnd);) flags = run_work_tile(flags);
    staging_.wait_stored();
  }

 private:
  using Scores = typename Traits::Scores;
  using PackedScores = typename Traits::PackedScores;
  using KeyGradients = typename Traits::KeyGradients;
  using ValueGradients = typename Traits::ValueGradients;
  using Score = typename Traits::Score;
  using Outgoing = Staging<Traits>;
  using Blocks = typename Outgoing::Blocks;
  using OwnDq = typename Outgoing::OwnDq;
  using Swizzle = ptx::Swizzle128;
  static constexpr int kScores = sizeof(Scores) / sizeof(float);
  /// A matrix in shared memory as an operand: see ptx::MatrixDescriptor. The variable part is added last and in units
  /// of 16 bytes, so that it takes one instruction on the way to a tile's first product.
  struct Operand {
    uint32_t low;
    __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
      return ptx::MatrixDescriptor(0, 0).at(0) | (low + (bytes >> 4));
    }
  };
  __device__ __forceinline__ Operand operand(uint32_t offset, uint32_t leading_bytes = 16, uint32_t index = 0,
                                             uint32_t bytes = 0) const {
    return {base_ + ((offset >> 4) | leading_bytes >> 4 << 16) + index * (bytes >> 4)};
  }
  static constexpr uint32_t kScoreBytes = Traits::kRows * Traits::kKeys * sizeof(Element);

  /// Bits of phases_: the parity that the next wait is for. One register for all of them.
  enum Phase : uint32_t { kWorkTile, kDq, kMask };  // and one for each stage after kMask
  __device__ __forceinline__ uint32_t take_phase(uint32_t which) {
    const uint32_t phase = phases_ >> which & 1;
    phases_ ^= 1u << which;
    return phase;
  }

  /// The parity of dq_empty's phase that ends when the staging tiles are free.
  __device__ __forceinline__ uint32_t dq_phase() const { return ~phases_ >> kDq & 1; }

  /// Waits for the next tile and returns its flags, which every lane reads for itself: that is faster than to pass them
  /// on. The slot is not overwritten before all of them have arrived at scores_full.
  __device__ __forceinline__ uint32_t next_tile() {
    delay<Role::kConsumer>();
    ptx::wait(shared_.q_full[ring_.stage()], ring_.phase());
    return shared_.tile[ring_.stage()].flags;
  }

  /// Runs the tiles of the work tile that the current one begins. Returns the flags of the tile after them.
  __device__ __forceinline__ uint32_t run_work_tile(uint32_t flags) {
    const Tile& tile = shared_.tile[ring_.stage()];
    const int32_t key = ptx::from_leader(tile.key_tile) * Traits::kKeys;
    const auto group = static_cast<int32_t>(ptx::from_leader(tile.head_group)),
               batch = static_cast<int32_t>(ptx::from_leader(tile.query.batch));
    KeyGradients dk = {};
    ValueGradients dv = {};
    if (flags & Tile::kNothing) {
      ptx::arrive(shared_.scores_full[ring_.stage()]);
      ptx::wait(shared_.dout_full[ring_.stage()], ring_.phase());
      ptx::arrive_once(shared_.dout_empty[ring_.stage()]);
      ptx::arrive_once(shared_.q_empty[ring_.stage()]);
      ring_.advance();
      flags = next_tile();
    } else {
      ptx::wait(shared_.k_full, take_phase(kWorkTile));
      do {
        flags = run_tile(flags, dk, dv);
      } while (!(flags & (Tile::kFirst | Tile::kEnd)));
      ptx::arrive_once(shared_.kv_empty);
    }
    if constexpr (Traits::kAlternate) {
      // The other warpgroup may still have to store the last tile's dq, through this one's staging tiles, too.
      staging_.wait_store_read();
      sync_consumers<kStagingBarrier>();
    }
    staging_.store_dkv(dk, dv, key, group, batch, dq_phase());
    return flags;
  }

  /// Returns the flags of the next tile.
  __device__ __forceinline__ uint32_t run_tile(uint32_t flags, KeyGradients& dk, ValueGradients& dv) {
    const uint32_t stage = ring_.stage();
    Scores s, dp;
    issue_scores<Bias::kScore, Traits::kQkDim>(s, offsetof(Shared, k),
                                               operand(offsetof(Shared, q), 16, stage, Traits::kQBytes));
    delay<Role::kConsumer>();
    ptx::wait(shared_.dout_full[stage], ring_.phase());
    issue_scores<Bias::kGradient, Traits::kVDim>(dp, offsetof(Shared, v),
                                                 operand(offsetof(Shared, dout), 16, stage, Traits::kDoutBytes));
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    if constexpr (!Score::kFoldsLse) {
      // There are no registers for the derivatives, so they are multiplied into dP at once.
      ptx::wgmma_wait<0>();
      ptx::pin(dp);
      take_scores(s, dp);
    }
    take_probabilities(s, flags & Tile::kPartial);
    PackedScores p, ds;
    pack(s, p);
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    take_score_gradients(s, dp, ds);
    write_score_gradients(ds);
    ptx::pin(dv);
    issue_gradients<Traits::kVDim>(
        dv, p, operand(offsetof(Shared, dout), Swizzle::block(Traits::kRows), stage, Traits::kDoutBytes));
    ptx::fence_async_proxy();
    ptx::arrive(shared_.scores_full[stage]);
    delay<Role::kConsumer>();
    if constexpr (Traits::kAlternate) {
      finish_tile_alternating(flags, dk, dv, ds);
    } else {
      finish_tile_together(flags, dk, dv, ds);
    }
    if (!(flags & Tile::kAlone)) phases_ ^= 1u << kDq;
    ptx::arrive_once(shared_.q_empty[stage]);
    ring_.advance();
    return next_tile();
  }

  /// Half of dQ, once dS of both warpgroups is there, and dK; dq is stored beside dK's product.
  __device__ __forceinline__ void finish_tile_together(uint32_t flags, KeyGradients& dk, ValueGradients& dv,
                                                       const PackedScores& ds) {
    sync_consumers<kScoresBarrier>();
    OwnDq dq;
    issue_dq(dq);
    ptx::wgmma_wait<1>();
    ptx::pin(dv);
    ptx::arrive_once(shared_.dout_empty[ring_.stage()]);
    issue_dk(dk, ds);
    ptx::wgmma_wait<1>();
    pin(dq);
    staging_.store_dq(dq, flags, ring_.stage(), dq_phase());
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
  }

  /// dK, and in every other tile dQ, once the other warpgroup's dS is there. That warpgroup goes on meanwhile, by no
  /// more than a tile: its next dQ needs this one's dS.
  __device__ __forceinline__ void finish_tile_alternating(uint32_t flags, KeyGradients& dk, ValueGradients& dv,
                                                          const PackedScores& ds) {
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
    if (!own_tile) return;
    ptx::named_barrier_sync(kScoresBarrier + warpgroup_, 256);
    OwnDq dq;
    issue_dq(dq);
    ptx::wgmma_wait<0>();
    pin(dq);
    staging_.store_dq(dq, flags, ring_.stage(), dq_phase());
  }

  /// 64 keys of K or V, at `keys`, times all rows of `b`, with the rows' bias. A score that is more than the product
  /// gets its bias later.
  template <Bias kBias, int kDim>
  __device__ __forceinline__ void issue_scores(Scores& s, uint32_t keys, Operand b) const {
    constexpr bool kBiased = kBias == Bias::kGradient || Score::kFoldsLse;
    const Operand a = operand(keys + warpgroup_ * 64 * Swizzle::kRow);
    const BiasStep<kBias, Traits::kRows> bias((base_ << 4) + offsetof(Shared, biases) +
                                              ring_.stage() * Traits::kBiasBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      ptx::wgmma_ss<Element, Traits::kRows, ptx::Major::kInner, ptx::Major::kInner>(
          s, a.at(Swizzle::step_along_row(step, Traits::kKeys)), b.at(Swizzle::step_along_row(step, Traits::kRows)),
          step > 0);
    }
    if constexpr (kBiased) bias.issue(s);
    ptx::wgmma_commit();
  }

  /// dK or dV += 64 keys of `scores` times the rows of `b`.
  template <int kDim>
  __device__ __forceinline__ static void issue_gradients(cuda::Accumulators<64, kDim>& gradients,
                                                         const PackedScores& scores, Operand b) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kRows / 16; ++step) {
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
    constexpr uint32_t kColumnBlock = Swizzle::block(Traits::kKeys);  // of K
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
        ptx::wgmma_ss<Element, 64, ptx::Major::kInner, ptx::Major::kOuter>(
            dq[block], a.at(rows + Swizzle::step_along_row(step, Traits::kRows)),
            b.at(columns + step * Swizzle::kStepDownRows), step > 0);
      }
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ static void pin(OwnDq& dq) {
#pragma unroll
    for (auto& block : dq) ptx::pin(block);
  }

  /// Turns the products K Q^T into scores with the rows' bias, and multiplies dP by their derivatives.
  __device__ __forceinline__ void take_scores(Scores& s, Scores& dp) const {
    const QueryTile& query = shared_.tile[ring_.stage()].query;
    const Score score(p_, query.batch, query.head);
    const RowBias* biases = shared_.biases[ring_.stage()] + 2 * (ptx::lane() % 4);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float transformed = score.transform(s[i]);
      dp[i] *= score.gradient(transformed);
      s[i] = transformed + score_bias(biases[i / 4 * 8 + i % 2]);
    }
  }

  /// P = exp2(S scale log2(e)), 0 where hidden. The early exponentials stand in both branches, where the compiler has
  /// to leave them, beside dP's product; the others it mixes with what follows that.
  __device__ __forceinline__ void take_probabilities(Scores& s, bool partial) {
    constexpr int kEarly = Traits::kEarlyScores;
#pragma unroll
    for (float& score : s) score *= p_.scale_log2;
    if (partial) {
      hide(s);
      exponentiate<0, kEarly>(s);
    } else {
      exponentiate<0, kEarly>(s);
    }
    exponentiate<kEarly, kScores>(s);
  }
  template <int kBegin, int kEnd>
  __device__ __forceinline__ static void exponentiate(Scores& s) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) s[i] = ptx::exp2_approx(s[i]);
  }

  /// Makes the scores of hidden elements -inf: a thread's are of two keys.
  __device__ __forceinline__ void hide(Scores& s) {
    delay<Role::kConsumer>();
    ptx::wait(shared_.mask_full[ring_.stage()], take_phase(kMask + ring_.stage()));
    const uint32_t key = warpgroup_ * 64 + warp_ * 16 + ptx::lane() / 4, shift = 8 * (ptx::lane() % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ColumnBits<Traits::kRows> bits = shared_.mask_bits[ring_.stage()][key + 8 * half];
#pragma unroll
      for (int word = 0; word < Traits::kRows / 32; ++word) {
        const uint32_t visible = bits.word[word] >> shift;
#pragma unroll
        for (int n = 0; n < 8; ++n) ptx::hide_unless(visible & 1u << n, s[16 * word + n / 2 * 4 + 2 * half + n % 2]);
      }
    }
  }

  __device__ __forceinline__ static void pack(const Scores& s, PackedScores& packed) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) packed[i / 4][i % 4] = ptx::pack<Element>(s[2 * i], s[2 * i + 1]);
  }

  /// dS = P dP.
  __device__ __forceinline__ static void take_score_gradients(const Scores& p, const Scores& dp, PackedScores& ds) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      ds[i / 4][i % 4] = ptx::pack<Element>(p[2 * i] * dp[2 * i], p[2 * i + 1] * dp[2 * i + 1]);
  }

  /// Waits for the other warpgroup. An mbarrier would wake the warps later.
  template <NamedBarrier kFirstBarrier>
  __device__ __forceinline__ void sync_consumers() const {
    static_assert(Traits::kConsumers == 2);
    ptx::named_barrier_arrive(kFirstBarrier + warpgroup_, 256);
    ptx::named_barrier_sync(kFirstBarrier + 1 - warpgroup_, 256);
  }

  /// Puts dS where the product over the keys reads it, query-major.
  __device__ __forceinline__ void write_score_gradients(const PackedScores& ds) const {
    const uint32_t row = ptx::lane() % 8 + ptx::lane() / 16 * 8, chunk = warp_ * 2 + ptx::lane() / 8 % 2;
    const uint32_t to = ptx::shared_address(shared_.ds[ring_.stage()]) + warpgroup_ * Swizzle::block(Traits::kRows) +
                        row * Swizzle::kRow;
#pragma unroll
    for (int step = 0; step < Traits::kRows / 16; ++step) {
      ptx::stmatrix_x4_transposed(to + step * Swizzle::kStepDownRows + Swizzle::chunk(row, chunk), ds[step][0],
                                  ds[step][1], ds[step][2], ds[step][3]);
    }
  }

  const Params& p_;
  Shared& shared_;
  const uint32_t warpgroup_;
  const Outgoing staging_;
  const uint32_t base_;  ///< of shared memory, in units of 16 bytes
  const uint32_t warp_;  ///< of the warpgroup
  ptx::RingPosition<Traits::kStages> ring_;
  uint32_t phases_ = 0;
};

}  // namespace flashmask::sm90::bwd
