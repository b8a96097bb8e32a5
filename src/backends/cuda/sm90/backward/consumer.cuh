// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/common/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/pieces.cuh"
#include "backends/cuda/sm90/backward/row_bias.cuh"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::grad {

/// One consumer warpgroup: 64 keys of every item, whose dk and dv stay in registers. Per tile, with keys along the
/// rows,
///   S = K Q^T - lse / scale, dP = V dout^T - delta, P = exp2(S scale log2(e)), dS = P dP, dV += P dout, dK += dS Q,
/// and with rows along the rows, from the dS of all warpgroups in shared memory, its part of dQ = dS K, or all of it in
/// every other tile. All of it is inlined, so that a warpgroup that is a constant where it is given makes operands'
/// addresses constants.
template <typename Traits>
class Consumer {
 public:
  using Shared = SharedStorage<Traits>;
  using Element = typename Traits::Element;
  using Part = Fragments<Traits::kHeadDim>;

  __device__ __forceinline__ Consumer(const BackwardParams& p, Shared& shared, uint32_t warpgroup)
      : p_(p),
        shared_(shared),
        warpgroup_(warpgroup),
        pieces_(p, shared, warpgroup),
        base_(ptx::shared_address(&shared) >> 4),
        warp_(ptx::uniform(threadIdx.x / 32 % 4)) {}

  __device__ __forceinline__ void run() {
    for (uint32_t flags = next_tile(); !(flags & Tile::kEnd);) flags = run_item(flags);
    pieces_.leave_kernel();
  }

 private:
  static constexpr int kScores = Traits::kRows / 2;
  using Scores = float[kScores];                   ///< 64 keys x the tile's rows
  using Packed = uint32_t[Traits::kRows / 16][4];  ///< the same in 16 bits, as operand of a product over the rows
  using Outgoing = Pieces<Traits>;
  using Gradients = typename Outgoing::Gradients;
  using RowGradients = typename Outgoing::RowGradients;
  /// A matrix in shared memory as an operand: see ptx::MatrixDescriptor. What varies is added last and in units of 16
  /// bytes, so that it takes one instruction, on the way to a tile's first product.
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
  static constexpr uint32_t kRowBytes = Traits::kRowBytes,
                            kScoreBytes = Traits::kRows * Traits::kKeys * sizeof(Element);

  /// Bits of phases_: the parity that the next wait is for. One register for all of them.
  enum Phase : uint32_t { kItem, kRowGradients, kMask };  // and one for each stage after kMask
  __device__ __forceinline__ uint32_t take_phase(uint32_t which) {
    const uint32_t phase = phases_ >> which & 1;
    phases_ ^= 1u << which;
    return phase;
  }

  /// The parity of dq_empty's phase that ends when the pieces are free.
  __device__ __forceinline__ uint32_t row_gradients_phase() const { return ~phases_ >> kRowGradients & 1; }

  __device__ __forceinline__ static uint32_t lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static bool leader() { return lane() == 0; }
  __device__ __forceinline__ static void release(uint64_t& barrier) {
    __syncwarp();
    if (leader()) ptx::arrive(barrier);
  }

  /// Waits for the next tile and returns its flags, which every lane reads for itself: faster than to pass them on. The
  /// slot is written again when all of them have come as far as scores_full.
  __device__ __forceinline__ uint32_t next_tile() {
    delay<Role::kConsumer>();
    ptx::wait(shared_.q_full[ring_.stage()], ring_.phase());
    return shared_.tile[ring_.stage()].flags;
  }

  /// Runs the tiles of the item that the current one begins. Returns the flags of the tile after them.
  __device__ __forceinline__ uint32_t run_item(uint32_t flags) {
    const Tile& tile = shared_.tile[ring_.stage()];
    const int32_t key = ptx::from_leader(tile.key_tile) * Traits::kKeys;
    const auto group = static_cast<int32_t>(ptx::from_leader(tile.head_group)),
               batch = static_cast<int32_t>(ptx::from_leader(tile.query.batch));
    Gradients dk = {}, dv = {};
    if (flags & Tile::kNothing) {
      ptx::arrive(shared_.scores_full[ring_.stage()]);
      ptx::wait(shared_.dout_full[ring_.stage()], ring_.phase());
      release(shared_.dout_empty[ring_.stage()]);
      release(shared_.q_empty[ring_.stage()]);
      ring_.advance();
      flags = next_tile();
    } else {
      ptx::wait(shared_.k_full, take_phase(kItem));
      do {
        flags = run_tile(flags, dk, dv);
      } while (!(flags & (Tile::kFirst | Tile::kEnd)));
      release(shared_.kv_empty);
    }
    if constexpr (Traits::kAlternate) {
      // The other warpgroup may still have to give the last tile's dq, for which it takes this one's pieces, too.
      pieces_.leave();
      meet<3>();
    }
    pieces_.store(dk, dv, key, group, batch, row_gradients_phase());
    return flags;
  }

  /// Returns the flags of the next tile.
  __device__ __forceinline__ uint32_t run_tile(uint32_t flags, Gradients& dk, Gradients& dv) {
    const uint32_t stage = ring_.stage();
    Scores s, dp;
    issue_scores<Bias::kScore>(s, offsetof(Shared, k), operand(offsetof(Shared, q), 16, stage, kRowBytes));
    delay<Role::kConsumer>();
    ptx::wait(shared_.dout_full[stage], ring_.phase());
    issue_scores<Bias::kGradient>(dp, offsetof(Shared, v), operand(offsetof(Shared, dout), 16, stage, kRowBytes));
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    take_probabilities(s, flags & Tile::kPartial);
    Packed p, ds;
    pack(s, p);
    ptx::wgmma_wait<0>();
    ptx::pin(dp);
    take_score_gradients(s, dp, ds);
    write_score_gradients(ds);
    ptx::pin(dv);
    issue_gradients(dv, p, operand(offsetof(Shared, dout), Traits::kRows * 128, stage, kRowBytes));
    ptx::fence_async_proxy();
    ptx::arrive(shared_.scores_full[stage]);
    delay<Role::kConsumer>();
    if constexpr (Traits::kAlternate) {
      finish_tile_alternating(flags, dk, dv, ds);
    } else {
      finish_tile_together(flags, dk, dv, ds);
    }
    if (!(flags & Tile::kAlone)) phases_ ^= 1u << kRowGradients;
    release(shared_.q_empty[stage]);
    ring_.advance();
    return next_tile();
  }

  /// dQ, half of it, when everybody's dS is there; dK; dq leaves beside dK's product.
  __device__ __forceinline__ void finish_tile_together(uint32_t flags, Gradients& dk, Gradients& dv, const Packed& ds) {
    meet<1>();
    RowGradients dq;
    issue_row_gradients(dq);
    ptx::wgmma_wait<1>();
    ptx::pin(dv);
    release(shared_.dout_empty[ring_.stage()]);
    issue_key_gradients(dk, ds);
    ptx::wgmma_wait<1>();
    pin(dq);
    pieces_.give(dq, flags, ring_.stage(), row_gradients_phase());
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
  }

  /// dK, and in every other tile dQ, when the other warpgroup's dS is there, which goes on meanwhile. It does so for no
  /// more than a tile: for the next dQ it needs this one's dS.
  __device__ __forceinline__ void finish_tile_alternating(uint32_t flags, Gradients& dk, Gradients& dv,
                                                          const Packed& ds) {
    const bool own_tile = ring_.stage() == warpgroup_;
    if (!own_tile) {
      pieces_.leave();
      ptx::named_barrier_arrive(2 - warpgroup_, 256);
    }
    issue_key_gradients(dk, ds);
    ptx::wgmma_wait<1>();
    ptx::pin(dv);
    release(shared_.dout_empty[ring_.stage()]);
    ptx::wgmma_wait<0>();
    ptx::pin(dk);
    if (!own_tile) return;
    ptx::named_barrier_sync(1 + warpgroup_, 256);
    RowGradients dq;
    issue_row_gradients(dq);
    ptx::wgmma_wait<0>();
    pin(dq);
    pieces_.give(dq, flags, ring_.stage(), row_gradients_phase());
  }

  /// 64 keys of K or V, at `keys`, times all rows of `b`, with the rows' bias.
  template <Bias kBias>
  __device__ __forceinline__ void issue_scores(Scores& s, uint32_t keys, Operand b) const {
    const Operand a = operand(keys + warpgroup_ * 64 * 128);
    const BiasStep<kBias, Traits::kRows> bias((base_ << 4) + offsetof(Shared, biases) +
                                              ring_.stage() * Traits::kBiasBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      const uint32_t block = step / 4, inside = step % 4 * 32;
      ptx::wgmma_ss<Element, Traits::kRows, ptx::Major::kInner, ptx::Major::kInner>(
          s, a.at(block * Traits::kKeys * 128 + inside), b.at(block * Traits::kRows * 128 + inside), step > 0);
    }
    bias.issue(s);
    ptx::wgmma_commit();
  }

  /// dK or dV += 64 keys of `scores` times the rows of `b`.
  __device__ __forceinline__ static void issue_gradients(Gradients& gradients, const Packed& scores, Operand b) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kRows / 16; ++step) {
      ptx::wgmma_rs<Element, Traits::kHeadDim, ptx::Major::kOuter>(gradients, scores[step], b.at(step * 2048), true);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_key_gradients(Gradients& dk, const Packed& ds) const {
    ptx::pin(dk);
    issue_gradients(dk, ds, operand(offsetof(Shared, q), Traits::kRows * 128, ring_.stage(), kRowBytes));
  }

  /// This warpgroup's part of dQ = dS K, see Fragments.
  __device__ __forceinline__ void issue_row_gradients(RowGradients& dq) const {
    const Operand a = operand(offsetof(Shared, ds), 16, ring_.stage(), kScoreBytes);
    const Operand b =
        operand(offsetof(Shared, k) + (Part::kByRows ? 0 : warpgroup_ * Traits::kKeys * 128), Traits::kKeys * 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kKeys / 16; ++step) {
#pragma unroll
      for (int block = 0; block < Outgoing::kRowBlocks; ++block) {
        const uint32_t rows = block * 64 * 128 + step / 4 * Traits::kRows * 128 + step % 4 * 32;
        ptx::wgmma_ss<Element, 64, ptx::Major::kInner, ptx::Major::kOuter>(dq[block], a.at(rows), b.at(step * 2048),
                                                                           step > 0);
      }
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ static void pin(RowGradients& dq) {
#pragma unroll
    for (auto& block : dq) ptx::pin(block);
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
    const uint32_t key = warpgroup_ * 64 + warp_ * 16 + lane() / 4, shift = 8 * (lane() % 4);
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

  __device__ __forceinline__ static void pack(const Scores& s, Packed& packed) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) packed[i / 4][i % 4] = ptx::pack<Element>(s[2 * i], s[2 * i + 1]);
  }

  /// dS = P dP.
  __device__ __forceinline__ static void take_score_gradients(const Scores& p, const Scores& dp, Packed& ds) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      ds[i / 4][i % 4] = ptx::pack<Element>(p[2 * i] * dp[2 * i], p[2 * i + 1] * dp[2 * i + 1]);
  }

  /// Waits until the other warpgroup is here, too. A barrier for each of them to wait at, as compute-sanitizer does not
  /// take a barrier that is reached from two places; a barrier in shared memory wakes later.
  template <int kFirstBarrier>
  __device__ __forceinline__ void meet() const {
    static_assert(Traits::kConsumers == 2);
    ptx::named_barrier_arrive(kFirstBarrier + warpgroup_, 256);
    ptx::named_barrier_sync(kFirstBarrier + 1 - warpgroup_, 256);
  }

  /// Puts dS where the product over the keys reads it, rows along the rows.
  __device__ __forceinline__ void write_score_gradients(const Packed& ds) const {
    const uint32_t row = lane() % 8 + lane() / 16 * 8, chunk = warp_ * 2 + lane() / 8 % 2;
    const uint32_t to = ptx::shared_address(shared_.ds[ring_.stage()]) + warpgroup_ * Traits::kRows * 128 + row * 128;
#pragma unroll
    for (int step = 0; step < Traits::kRows / 16; ++step) {
      ptx::stmatrix_x4_transposed(to + step * 16 * 128 + ((chunk ^ row % 8) << 4), ds[step][0], ds[step][1],
                                  ds[step][2], ds[step][3]);
    }
  }

  const BackwardParams& p_;
  Shared& shared_;
  const uint32_t warpgroup_;
  const Outgoing pieces_;
  const uint32_t base_;  ///< of shared memory, in units of 16 bytes
  const uint32_t warp_;  ///< of the warpgroup
  ptx::RingPosition<Traits::kStages> ring_;
  uint32_t phases_ = 0;
};

}  // namespace flashmask::sm90::grad
