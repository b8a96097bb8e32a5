// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/fragments/element_mask.cuh"
#include "backends/cuda/fragments/softmax.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/forward/epilogue.cuh"
#include "backends/cuda/sm90/forward/params.h"
#include "backends/cuda/sm90/forward/traits.cuh"

namespace flashmask::sm90 {

/// One consumer warpgroup: 64 query rows of every work tile. Per tile it computes S = QK^T, the softmax and O += PV in
/// turn; the warpgroups do not wait for each other, so that one's softmax overlaps the others' products.
template <typename Traits>
class Consumer {
 public:
  using Shared = SharedStorage<Traits>;
  using Params = typename Traits::Params;
  using Element = typename Traits::Element;

  __device__ __forceinline__ Consumer(const Params& p, Shared& shared)
      : p_(p), shared_(shared), warpgroup_(static_cast<int>(ptx::uniform(threadIdx.x / 128)) - 1), weights_(p) {}

  __device__ __forceinline__ void run() {
    if (Traits::kTurns && warpgroup_ + 1 == Traits::kConsumers) pass_turn();
    while (true) {
      delay<Role::kConsumer>();
      ptx::wait(shared_.q_full[q_ring_.stage()], q_ring_.phase());
      read_work_tile();
      if (work_.tiles == WorkTile::kEnd) break;
      kv_ring_.count = ptx::uniform(kv_ring_.count);
      q_ring_.count = ptx::uniform(q_ring_.count);
      if constexpr (Traits::kOverlapFrom > 0) {
        if (work_.tiles >= Traits::kOverlapFrom) {
          run_work_tile<true>();
        } else {
          run_work_tile<false>();
        }
      } else {
        run_work_tile<false>();
      }
      q_ring_.advance();
    }
    release_stored_rows();
  }

 private:
  using Score = typename Traits::Score;
  using Weights = typename Traits::Weights;
  using Scores = typename Traits::Scores;
  using Outputs = typename Traits::Outputs;
  using HalfProbabilities = typename Traits::HalfProbabilities;
  using Probabilities = HalfProbabilities[2];
  using Swizzle = ptx::Swizzle128;
  static constexpr int kScores = sizeof(Scores) / sizeof(float);
  /// False if long rows overlap: short ones then go without turns.
  static constexpr bool kTurnsInEveryRow = Traits::kTurns && Traits::kOverlapFrom == 0;

  /// Lets one lane read the producer's announcement: the lane that later releases the slot.
  __device__ __forceinline__ void read_work_tile() {
    const WorkTile& from = shared_.work[q_ring_.stage()];
    work_ = {ptx::from_leader(from.row), ptx::from_leader(from.head), ptx::from_leader(from.batch),
             ptx::from_leader(from.tiles)};
  }

  /// Waits for the next tile; false if this warpgroup's rows see nothing of it.
  __device__ __forceinline__ bool next_tile(Tile& tile) {
    const uint32_t stage = kv_ring_.stage();
    delay<Role::kConsumer>();
    ptx::wait(shared_.k_full[stage][0], kv_ring_.phase());
    const uint32_t& code = shared_.tile[stage].code;
    tile.code = Traits::kAllLanesRead ? code : ptx::from_leader(code);
    return tile.is_live(warpgroup_);
  }
  __device__ __forceinline__ void release_keys(int part) {
    uint64_t& empty = shared_.k_empty[kv_ring_.stage()][part];
    if constexpr (Traits::kAllLanesRead) {
      ptx::arrive(empty);
    } else {
      ptx::arrive_once(empty);
    }
  }
  /// Waits for all parts although they are not read here: an arrival on a buffer must not overtake its load.
  __device__ __forceinline__ void skip_tile() {
    release_keys(0);
    release_rows_after_last_tile();
#pragma unroll
    for (int part = 1; part < Traits::kKParts; ++part) {
      ptx::wait(shared_.k_full[kv_ring_.stage()][part], kv_ring_.phase());
      release_keys(part);
    }
    wait_for_values(kv_ring_.count);
    release_values(kv_ring_.count);
    kv_ring_.advance();
  }

  __device__ __forceinline__ void wait_for_values(uint32_t tile, int part) {
    const auto ring = value_ring<Traits>(tile, part);
    ptx::wait(shared_.v_full[ring.stage()], ring.phase());
  }
  __device__ __forceinline__ void release_values(uint32_t tile, int part) {
    ptx::arrive_once(shared_.v_empty[value_ring<Traits>(tile, part).stage()]);
  }
  __device__ __forceinline__ void wait_for_values(uint32_t tile) {
#pragma unroll
    for (int part = 0; part < Traits::kVParts; ++part) wait_for_values(tile, part);
  }
  __device__ __forceinline__ void release_values(uint32_t tile) {
#pragma unroll
    for (int part = 0; part < Traits::kVParts; ++part) release_values(tile, part);
  }

  /// kOverlapped: with a tile's product PV under the next tile's softmax, for small head dims, where the exponentials
  /// take as long as the products. Tiles that this warpgroup skips cut the work tile into streaks.
  template <bool kOverlapped>
  __device__ __forceinline__ void run_work_tile() {
    if constexpr (Weights::kMayDrop) {
      if (weights_.drops()) return run_work_tile<kOverlapped, true>();
    }
    run_work_tile<kOverlapped, false>();
  }

  template <bool kOverlapped, bool kDrops>
  __device__ __forceinline__ void run_work_tile() {
    Outputs o = {};
    cuda::RowState rows;
    rows.reset();
    end_ = kv_ring_.count + work_.tiles;
    if (!Traits::kOutputThroughQ && work_.tiles == 0) ptx::arrive_once(shared_.q_empty[0]);
    while (kv_ring_.count != end_) {
      Tile tile;
      if (next_tile(tile)) {
        if constexpr (kOverlapped) {
          run_streak<kDrops>(tile, o, rows);
        } else {
          run_tile<kDrops>(tile, o, rows);
        }
      } else {
        if constexpr (kOverlapped || kTurnsInEveryRow) {
          wait_for_turn();
          pass_turn();
        }
        skip_tile();
      }
    }
    finish_work_tile(o, rows);
  }

  template <bool kDrops>
  __device__ __forceinline__ void run_tile(const Tile& tile, Outputs& o, cuda::RowState& rows) {
    Scores s;
    if constexpr (kTurnsInEveryRow) wait_for_turn();
    issue_scores(s);
    if constexpr (kTurnsInEveryRow) pass_turn();
    release_stored_rows();
    const cuda::SlabBits visible = receive_mask(tile);
    const auto dropped = draw_dropped<kDrops>(tile);
    finish_scores();
    convert_scores(s, tile, visible);
    delay<Role::kConsumer>();
    wait_for_values(kv_ring_.count, 0);
    float factor[2];
    const cuda::Raised raised = rows.raise_row_max(s, p_.scale_log2, p_.score_of_bit, factor);
    if (raised.rescale) cuda::RowState::rescale(o, factor);
    Probabilities p;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.exponentiate(s, half, p_.scale_log2);
      pack(s, half, dropped, p);
      if (Traits::kVParts == 2 && half == 1) wait_for_values(kv_ring_.count, 1);
      issue_output(o, p[half], kv_ring_.count, half);
    }
    if (raised.row_max) rows.refresh_limits(p_.score_of_bit);
    if constexpr (Traits::kVParts == 2) {
      ptx::wgmma_wait<1>();
      release_values(kv_ring_.count, 0);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    release_values(kv_ring_.count, Traits::kVParts - 1);
    kv_ring_.advance();
  }

  /// Waits for this warpgroup's turn to issue products, one tile each, so that the warpgroups do not drift into step.
  __device__ __forceinline__ void wait_for_turn() const {
    if constexpr (Traits::kTurns) ptx::named_barrier_sync(kTurnBarrier + warpgroup_, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (!Traits::kTurns) return;
    ptx::named_barrier_arrive(kTurnBarrier + (warpgroup_ + 1 == Traits::kConsumers ? 0 : warpgroup_ + 1), 256);
  }

  template <bool kDrops>
  __device__ __forceinline__ void run_streak(Tile tile, Outputs& o, cuda::RowState& rows) {
    kv_ring_.count = ptx::uniform(kv_ring_.count);
    Scores s;
    float factor[2];
    Probabilities p;
    wait_for_turn();
    issue_scores(s);
    pass_turn();
    release_stored_rows();
    const cuda::SlabBits first_visible = receive_mask(tile);
    const auto first_dropped = draw_dropped<kDrops>(tile);
    ptx::wgmma_wait<0>();
    convert_scores(s, tile, first_visible);
    const cuda::Raised first_raised = rows.raise_row_max(s, p_.scale_log2, p_.score_of_bit, factor);
    if (first_raised.rescale) cuda::RowState::rescale(o, factor);
    exponentiate_and_pack(s, first_dropped, p, rows);
    if (first_raised.row_max) rows.refresh_limits(p_.score_of_bit);
    kv_ring_.advance();
    while (kv_ring_.count != end_ && next_tile(tile)) {
      const uint32_t before = kv_ring_.count - 1;
      wait_for_turn();
      issue_scores(s);
      issue_output(o, p, before);
      pass_turn();
      const cuda::SlabBits visible = receive_mask(tile);
      const auto dropped = draw_dropped<kDrops>(tile);
      ptx::wgmma_wait<Traits::kVParts>();
      convert_scores(s, tile, visible);
      const cuda::Raised raised = rows.raise_row_max(s, p_.scale_log2, p_.score_of_bit, factor);
      rows.exponentiate(s, 0, p_.scale_log2);
      rows.exponentiate(s, 1, p_.scale_log2);
      if constexpr (Traits::kVParts == 2) {
        ptx::wgmma_wait<1>();
        release_values(before, 0);
      }
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      release_values(before, Traits::kVParts - 1);
      if (raised.rescale) cuda::RowState::rescale(o, factor);
      if (raised.row_max) rows.refresh_limits(p_.score_of_bit);
      pack(s, 0, dropped, p);
      pack(s, 1, dropped, p);
      kv_ring_.advance();
    }
    const uint32_t last = kv_ring_.count - 1;
    issue_output(o, p, last);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    release_values(last);
  }

  template <typename Dropped>
  __device__ __forceinline__ void exponentiate_and_pack(Scores& s, const Dropped& dropped, Probabilities& p,
                                                        cuda::RowState& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.exponentiate(s, half, p_.scale_log2);
      pack(s, half, dropped, p);
    }
  }

  /// Placeholder: the dropout bits are drawn in pack().
  struct DeferredDraw {
    int32_t first_key;
  };

  /// Which weights of the tile P V leaves out, for pack. Drawn while QK^T is under way, if registers allow it.
  template <bool kDrops>
  __device__ __forceinline__ auto draw_dropped(const Tile& tile) const {
    if constexpr (!kDrops) {
      return cuda::NoneDropped{};
    } else if constexpr (Traits::kDrawsLate) {
      return DeferredDraw{tile.key_block() * Traits::kKeys};
    } else {
      return draw<Traits::kKeys>(tile.key_block() * Traits::kKeys);
    }
  }
  /// The draws of this warp's rows and kKeys keys from first_key on.
  template <int kKeys>
  __device__ __forceinline__ cuda::DroppedBits draw(int32_t first_key) const {
    // Takes uniform registers, as others are scarce beside a draw.
    const uint32_t batch = ptx::uniform(static_cast<uint32_t>(work_.batch)),
                   head = ptx::uniform(static_cast<uint32_t>(work_.head));
    return weights_.template draw<kKeys>(batch, head, work_.row + slab_row(), first_key);
  }

  /// The weights of one half of the tile's keys that P V takes, as its operand.
  template <typename Dropped>
  __device__ __forceinline__ void pack(const Scores& s, int half, const Dropped& dropped, Probabilities& p) const {
    cuda::RowState::pack<Element>(s, half, p[half]);
    if constexpr (std::is_same_v<Dropped, DeferredDraw>) {
      constexpr int kKeys = Traits::kKeys / 2;
      cuda::leave_out(draw<kKeys>(dropped.first_key + half * kKeys), 0, p[half]);
    } else {
      cuda::leave_out(dropped, half, p[half]);
    }
  }

  /// Makes scores of the finished product QK^T and releases K, and after the last one Q.
  __device__ __forceinline__ void convert_scores(Scores& s, const Tile& tile, const cuda::SlabBits& visible) {
    ptx::pin(s);
    release_keys(Traits::kKParts - 1);
    release_rows_after_last_tile();
    const Score score(p_, work_.batch, work_.head);
    const auto places = [&] {
      return cuda::Places<cuda::SlabSteps>{
          {work_.row + slab_row() + cuda::Slab::row(0), tile.key_block() * Traits::kKeys + cuda::Slab::column(0)}};
    };
    if (score.form == cuda::ScoreForm::kShifted) {
      score.shift(s, places);
    } else if (score.form == cuda::ScoreForm::kOther) {
      score.transform(s, places);
    }
    if (tile.is_partial(warpgroup_)) visible.hide(s);
  }

  /// Mask bits that a mask warp has computed for a partial granule; meaningless for a full one. Called before the
  /// scores are there, so that the mask warp can go on.
  __device__ __forceinline__ cuda::SlabBits receive_mask(const Tile& tile) {
    cuda::SlabBits visible{};
    if (tile.is_partial(warpgroup_)) {
      const uint32_t number = tile.number(warpgroup_), slot = number % Traits::kMaskSlots,
                     phase = number / Traits::kMaskSlots & 1;
      constexpr int kWarps = Traits::kMaskRows / cuda::Slab::kRows;  // warps that share a part
      const int warp = static_cast<int>(threadIdx.x / 32) % 4, part = warp / kWarps;
      delay<Role::kConsumer>();
      ptx::wait(shared_.mask_full[warpgroup_][slot][part], phase);
      visible = shared_.mask_bits[warpgroup_][slot].slab(warp % kWarps * cuda::Slab::kRows);
      ptx::arrive(shared_.mask_empty[warpgroup_][slot][part]);
    }
    return visible;
  }

  /// With one stage no stage number makes the address uniform; without `uniform` the compiler takes vector registers.
  __device__ __forceinline__ static uint32_t operand_at(const Element* operand) {
    const uint32_t address = ptx::shared_address(operand);
    return Traits::kStages == 1 ? ptx::uniform(address) : address;
  }

  /// S = Q K^T of this warpgroup's 64 rows and the tile's keys, in as many groups as K has parts.
  __device__ __forceinline__ void issue_scores(Scores& s) {
    const uint32_t stage = kv_ring_.stage();
    const ptx::MatrixDescriptor q(operand_at(shared_.q[q_ring_.stage()]) + warpgroup_ * 64 * Swizzle::kRow);
    const ptx::MatrixDescriptor k(operand_at(shared_.k[stage]));
    constexpr int kSteps = Traits::kQkDim / 16 / Traits::kKParts;  // per part; the first has been waited for
#pragma unroll
    for (int part = 0; part < Traits::kKParts; ++part) {
      if (part > 0) ptx::wait(shared_.k_full[stage][part], kv_ring_.phase());
      ptx::wgmma_fence();
#pragma unroll
      for (int step = part * kSteps; step < (part + 1) * kSteps; ++step) {
        ptx::wgmma_ss<Element, Traits::kKeys, ptx::Major::kInner, ptx::Major::kInner>(
            s, q.at(Swizzle::step_along_row(step, Traits::kRows)), k.at(Swizzle::step_along_row(step, Traits::kKeys)),
            step > 0);
      }
      ptx::wgmma_commit();
    }
  }
  /// Waits for S, and releases all parts of K but the last.
  template <int kPart = 0>
  __device__ __forceinline__ void finish_scores() {
    ptx::wgmma_wait<Traits::kKParts - 1 - kPart>();
    if constexpr (kPart + 1 < Traits::kKParts) {
      release_keys(kPart);
      finish_scores<kPart + 1>();
    }
  }

  /// O += P V for one half of the tile's keys.
  __device__ __forceinline__ void issue_output(Outputs& o, const HalfProbabilities& p, uint32_t tile, int half) {
    ptx::wgmma_fence();
    multiply_values(o, p, tile, half);
    ptx::wgmma_commit();
  }
  /// O += P V, when V is there, in as many groups as V has parts.
  __device__ __forceinline__ void issue_output(Outputs& o, const Probabilities& p, uint32_t tile) {
    delay<Role::kConsumer>();
    if constexpr (Traits::kVParts == 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        wait_for_values(tile, half);
        issue_output(o, p[half], tile, half);
      }
    } else {
      wait_for_values(tile);
      ptx::wgmma_fence();
      multiply_values(o, p[0], tile, 0);
      multiply_values(o, p[1], tile, 1);
      ptx::wgmma_commit();
    }
  }
  __device__ __forceinline__ void multiply_values(Outputs& o, const HalfProbabilities& p, uint32_t tile, int half) {
    constexpr int kSteps = Traits::kKeys / 2 / 16;
    const int part = Traits::kVParts == 1 ? 0 : half, first_step = Traits::kVParts == 1 ? half * kSteps : 0;
    const uint32_t slot = value_ring<Traits>(tile, part).stage();
    const ptx::MatrixDescriptor v(ptx::shared_address(shared_.v[slot]), Swizzle::block(Traits::kKeysOfVPart));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::wgmma_rs<Element, Traits::kVDim, ptx::Major::kOuter>(
          o, p[step], v.at((first_step + step) * Swizzle::kStepDownRows), true);
    }
  }

  __device__ __forceinline__ void finish_work_tile(Outputs& o, cuda::RowState& rows) {
    release_stored_rows();
    const int32_t row = work_.row + slab_row();
    Traits::Epilogue::template store<Traits>(p_, shared_, q_ring_, warpgroup_, work_, row, o, rows);
    rows_leaving_ = true;
  }

  /// Releases the buffer that the last work tile's rows left through, once they have. Called where products are under
  /// way, so that the wait costs nothing.
  __device__ __forceinline__ void release_stored_rows() {
    if (!Traits::kOutputThroughQ || !rows_leaving_) return;
    if (ptx::is_leader()) {
      ptx::bulk_wait_read();
      ptx::arrive(shared_.q_empty[q_ring_.stage() ^ 1]);
    }
    rows_leaving_ = false;
  }
  /// Releases Q as soon as this warp has no more products that read it, unless the output leaves through it.
  __device__ __forceinline__ void release_rows_after_last_tile() {
    if (!Traits::kOutputThroughQ && kv_ring_.count + 1 == end_) ptx::arrive_once(shared_.q_empty[0]);
  }

  const Params& p_;
  Shared& shared_;
  const int warpgroup_;
  WorkTile work_{};            ///< in uniform registers
  uint32_t end_ = 0;           ///< end of the work tile's tiles, in the count of kv_ring_
  bool rows_leaving_ = false;  ///< the last work tile's, through the other buffer of Q
  ptx::RingPosition<Traits::kQBuffers> q_ring_;
  ptx::RingPosition<Traits::kStages> kv_ring_;
  const Weights weights_;
};

}  // namespace flashmask::sm90
