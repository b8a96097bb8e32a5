// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/common/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/forward/element_mask.cuh"
#include "backends/cuda/sm90/forward/params.h"
#include "backends/cuda/sm90/forward/softmax.cuh"
#include "backends/cuda/sm90/forward/traits.cuh"

namespace flashmask::sm90 {

/// One consumer warpgroup: 64 query rows of every item. Per tile S = QK^T, softmax, O += PV, one after the other:
/// the warpgroups do not wait for each other, so that one's softmax runs under the others' products.
template <typename Traits>
class Consumer {
 public:
  using Shared = SharedStorage<Traits>;
  using Element = typename Traits::Element;

  __device__ __forceinline__ Consumer(const ForwardParams& p, Shared& shared)
      : p_(p), shared_(shared), warpgroup_(static_cast<int>(ptx::uniform(threadIdx.x / 128)) - 1) {}

  __device__ __forceinline__ void run() {
    if (Traits::kOverlapFrom > 0 && warpgroup_ + 1 == Traits::kConsumers) pass_turn();
    while (true) {
      delay<Role::kConsumer>();
      ptx::wait(shared_.q_full[q_ring_.stage()], q_ring_.phase());
      take_item();
      if (item_.tiles == Item::kEnd) break;
      kv_ring_.count = ptx::uniform(kv_ring_.count);
      q_ring_.count = ptx::uniform(q_ring_.count);
      if constexpr (Traits::kOverlapFrom > 0) {
        if (item_.tiles >= Traits::kOverlapFrom) {
          run_item_overlapped();
        } else {
          run_item();
        }
      } else {
        run_item();
      }
      q_ring_.advance();
    }
    release_stored_rows();
  }

 private:
  /// Named barriers: of each warpgroup's own threads, and of the turns.
  static constexpr int kOwn = 1, kTurns = 8;

  __device__ __forceinline__ static bool leader() { return threadIdx.x % 32 == 0; }
  __device__ __forceinline__ static void release(uint64_t& barrier) {
    __syncwarp();
    if (leader()) ptx::arrive(barrier);
  }
  /// The warp's first row in the tile.
  __device__ __forceinline__ static int slab_row() { return Slab::kRows * (static_cast<int>(threadIdx.x / 32) - 4); }

  /// One lane reads what the producer wrote, the one that later says that it may be overwritten.
  __device__ __forceinline__ void take_item() {
    const Item& from = shared_.item[q_ring_.stage()];
    item_ = {ptx::from_leader(from.row), ptx::from_leader(from.head), ptx::from_leader(from.batch),
             ptx::from_leader(from.tiles)};
  }

  using Outputs = float[Traits::kHeadDim / 2];
  using Probabilities = uint32_t[2][4][4];

  /// Waits for the next tile; false if this warpgroup's rows see nothing of it.
  __device__ __forceinline__ bool next_tile(Tile& tile) {
    const uint32_t stage = kv_ring_.stage();
    delay<Role::kConsumer>();
    ptx::wait(shared_.k_full[stage], kv_ring_.phase());
    tile.code = ptx::from_leader(shared_.tile[stage].code);
    return tile.is_live(warpgroup_);
  }
  /// V is waited for although nobody reads it here: an arrival for its buffer must not overtake its load.
  __device__ __forceinline__ void skip_tile() {
    const uint32_t stage = kv_ring_.stage();
    release(shared_.k_empty[stage]);
    ptx::wait(shared_.v_full[stage], kv_ring_.phase());
    release(shared_.v_empty[stage]);
  }

  __device__ __forceinline__ void run_item() {
    Outputs o = {};
    RowState rows;
    rows.reset();
    for (const uint32_t end = kv_ring_.count + item_.tiles; kv_ring_.count != end;) {
      Tile tile;
      if (next_tile(tile)) {
        run_tile(tile, o, rows);
      } else {
        skip_tile();
      }
      kv_ring_.advance();
    }
    finish_item(o, rows);
  }

  __device__ __forceinline__ void run_tile(const Tile& tile, Outputs& o, RowState& rows) {
    const uint32_t stage = kv_ring_.stage();
    float s[64];
    issue_scores(s, stage);
    release_stored_rows();
    const SlabBits visible = take_mask(tile);
    ptx::wgmma_wait<0>();
    take_scores(s, tile, visible);
    delay<Role::kConsumer>();
    ptx::wait(shared_.v_full[stage], kv_ring_.phase());
    float factor[2];
    const Raised raised = rows.raise_reference(s, p_.scale_log2, p_.score_of_bit, factor);
    if (raised.rescale) RowState::rescale(o, factor);
    Probabilities p;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.exponentiate(s, half, p_.scale_log2);
      RowState::pack<Element>(s, half, p[half]);
      issue_output(o, p[half], stage, half);
    }
    if (raised.reference) rows.refresh_limits(p_.score_of_bit);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    release(shared_.v_empty[stage]);
  }

  /// The same with a tile's product PV under the next tile's softmax, for small head dims, where the exponentials take
  /// as long as the products. Tiles that this warpgroup skips part the item into streaks.
  __device__ __forceinline__ void run_item_overlapped() {
    Outputs o = {};
    RowState rows;
    rows.reset();
    for (const uint32_t end = kv_ring_.count + item_.tiles; kv_ring_.count != end;) {
      Tile tile;
      if (next_tile(tile)) {
        run_streak(tile, end, o, rows);
      } else {
        take_turn();
        pass_turn();
        skip_tile();
        kv_ring_.advance();
      }
    }
    finish_item(o, rows);
  }

  /// The warpgroups take turns, one tile each, in issuing their products, so that they do not drift into doing the
  /// same thing at the same time.
  __device__ __forceinline__ void take_turn() const { ptx::named_barrier_sync(kTurns + warpgroup_, 256); }
  __device__ __forceinline__ void pass_turn() const {
    ptx::named_barrier_arrive(kTurns + (warpgroup_ + 1 == Traits::kConsumers ? 0 : warpgroup_ + 1), 256);
  }

  __device__ __forceinline__ void run_streak(Tile tile, uint32_t end, Outputs& o, RowState& rows) {
    kv_ring_.count = ptx::uniform(kv_ring_.count);
    float s[64], factor[2];
    Probabilities p;
    take_turn();
    issue_scores(s, kv_ring_.stage());
    pass_turn();
    release_stored_rows();
    const SlabBits first_visible = take_mask(tile);
    ptx::wgmma_wait<0>();
    take_scores(s, tile, first_visible);
    const Raised first_raised = rows.raise_reference(s, p_.scale_log2, p_.score_of_bit, factor);
    if (first_raised.rescale) RowState::rescale(o, factor);
    exponentiate_and_pack(s, p, rows);
    if (first_raised.reference) rows.refresh_limits(p_.score_of_bit);
    kv_ring_.advance();
    while (kv_ring_.count != end && next_tile(tile)) {
      const ptx::RingPosition<Traits::kStages> before{kv_ring_.count - 1};
      take_turn();
      issue_scores(s, kv_ring_.stage());
      delay<Role::kConsumer>();
      ptx::wait(shared_.v_full[before.stage()], before.phase());
      issue_output(o, p, before.stage());
      pass_turn();
      const SlabBits visible = take_mask(tile);
      ptx::wgmma_wait<1>();
      take_scores(s, tile, visible);
      const Raised raised = rows.raise_reference(s, p_.scale_log2, p_.score_of_bit, factor);
      rows.exponentiate(s, 0, p_.scale_log2);
      rows.exponentiate(s, 1, p_.scale_log2);
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      release(shared_.v_empty[before.stage()]);
      if (raised.rescale) RowState::rescale(o, factor);
      if (raised.reference) rows.refresh_limits(p_.score_of_bit);
      RowState::pack<Element>(s, 0, p[0]);
      RowState::pack<Element>(s, 1, p[1]);
      kv_ring_.advance();
    }
    const ptx::RingPosition<Traits::kStages> last{kv_ring_.count - 1};
    delay<Role::kConsumer>();
    ptx::wait(shared_.v_full[last.stage()], last.phase());
    issue_output(o, p, last.stage());
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    release(shared_.v_empty[last.stage()]);
  }

  __device__ __forceinline__ void exponentiate_and_pack(float (&s)[64], Probabilities& p, RowState& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.exponentiate(s, half, p_.scale_log2);
      RowState::pack<Element>(s, half, p[half]);
    }
  }

  /// What lies between QK^T and the softmax; the product must be finished.
  __device__ __forceinline__ void take_scores(float (&s)[64], const Tile& tile, const SlabBits& visible) {
    ptx::pin(s);
    release(shared_.k_empty[kv_ring_.stage()]);
    if (p_.negate) {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = -s[i];
    }
    if (tile.is_partial(warpgroup_)) visible.hide(s);
  }

  /// What a mask warp has worked out for a partial granule; not to be looked at for a full one. Asked for before the
  /// scores are there, to let it go on.
  __device__ __forceinline__ SlabBits take_mask(const Tile& tile) {
    SlabBits visible{};
    if (tile.is_partial(warpgroup_)) {
      const uint32_t number = tile.number(warpgroup_), slot = number % Traits::kMaskSlots,
                     phase = number / Traits::kMaskSlots & 1;
      constexpr int kWarps = Traits::kMaskRows / Slab::kRows;  // that share a part
      const int warp = static_cast<int>(threadIdx.x / 32) % 4, part = warp / kWarps;
      delay<Role::kConsumer>();
      ptx::wait(shared_.mask_full[warpgroup_][slot][part], phase);
      visible = shared_.mask_bits[warpgroup_][slot].slab(warp % kWarps * Slab::kRows);
      ptx::arrive(shared_.mask_empty[warpgroup_][slot][part]);
    }
    return visible;
  }

  /// S = Q K^T of this warpgroup's 64 rows and the stage's 128 keys.
  __device__ __forceinline__ void issue_scores(float (&s)[64], uint32_t stage) {
    const ptx::MatrixDescriptor q(ptx::shared_address(shared_.q[q_ring_.stage()]) + warpgroup_ * 64 * 128);
    const ptx::MatrixDescriptor k(ptx::shared_address(shared_.k[stage]));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      const uint32_t block = step / 4, inside = step % 4 * 32;
      ptx::wgmma_ss<Element, 128, ptx::Major::kInner, ptx::Major::kInner>(
          s, q.at(block * Traits::kRows * 128 + inside), k.at(block * Traits::kKeys * 128 + inside), step > 0);
    }
    ptx::wgmma_commit();
  }

  /// O += P V for one half of the stage's keys.
  __device__ __forceinline__ void issue_output(Outputs& o, const uint32_t (&p)[4][4], uint32_t stage, int half) {
    ptx::wgmma_fence();
    multiply_values(o, p, stage, half);
    ptx::wgmma_commit();
  }
  /// O += P V.
  __device__ __forceinline__ void issue_output(Outputs& o, const Probabilities& p, uint32_t stage) {
    ptx::wgmma_fence();
    multiply_values(o, p[0], stage, 0);
    multiply_values(o, p[1], stage, 1);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void multiply_values(Outputs& o, const uint32_t (&p)[4][4], uint32_t stage, int half) {
    const ptx::MatrixDescriptor v(ptx::shared_address(shared_.v[stage]), Traits::kKeys * 128);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::wgmma_rs<Element, Traits::kHeadDim, ptx::Major::kOuter>(o, p[step], v.at(half * 64 * 128 + step * 2048),
                                                                   true);
    }
  }

  /// Normalises, and sends the rows out through their own part of Q's buffer.
  __device__ __forceinline__ void finish_item(Outputs& o, RowState& rows) {
    release_stored_rows();
    const int32_t row = item_.row + slab_row();
    rows.finish(o);
    store_lse(row, rows);
    // Other warps of the warpgroup may still have products that read Q under way.
    ptx::named_barrier_sync(kOwn + warpgroup_, 128);
    const uint32_t slab = ptx::shared_address(shared_.q[q_ring_.stage()]) + slab_row() * 128;
    const uint32_t lane = threadIdx.x % 32, slab_lane_row = lane % 16;
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
      const uint32_t block = step / 4, chunk = step % 4 * 2 + lane / 16;
      const uint32_t address =
          slab + block * Traits::kRows * 128 + slab_lane_row * 128 + ((chunk ^ (slab_lane_row & 7)) << 4);
      const float* of_step = o + 8 * step;
      ptx::stmatrix_x4(address, ptx::pack<Element>(of_step[0], of_step[1]), ptx::pack<Element>(of_step[2], of_step[3]),
                       ptx::pack<Element>(of_step[4], of_step[5]), ptx::pack<Element>(of_step[6], of_step[7]));
    }
    ptx::fence_async_proxy();
    __syncwarp();
    delay<Role::kStore>();
    if (leader() && row < p_.seqlen_q) {
      const Element* from = shared_.q[q_ring_.stage()] + slab_row() * 64;
#pragma unroll
      for (int block = 0; block < Traits::kBlocks; ++block) {
        ptx::tma_store(p_.out, from + block * Traits::kRows * 64, {row, block, item_.head, item_.batch});
      }
    }
    if (leader()) ptx::bulk_commit();
    rows_leaving_ = true;
  }

  __device__ __forceinline__ void store_lse(int32_t slab_first_row, const RowState& rows) const {
    if (Slab::column_pair() != 0) return;
    const int64_t head = item_.batch * p_.lse_batch_stride + item_.head * p_.lse_head_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = slab_first_row + Slab::row_in_eight() + 8 * half;
      if (row < p_.seqlen_q) p_.lse[head + row * p_.lse_row_stride] = rows.lse(half, p_.scale_log2);
    }
  }

  /// Lets the producer have the buffer that the last item's rows left through, once they have. Waiting for that
  /// is put off to where products are under way.
  __device__ __forceinline__ void release_stored_rows() {
    if (!rows_leaving_) return;
    if (leader()) {
      ptx::bulk_wait_read();
      ptx::arrive(shared_.q_empty[q_ring_.stage() ^ 1]);
    }
    rows_leaving_ = false;
  }

  const ForwardParams& p_;
  Shared& shared_;
  const int warpgroup_;
  Item item_{};                ///< the one in work, in uniform registers
  bool rows_leaving_ = false;  ///< the last item's, through the other buffer of Q
  ptx::RingPosition<2> q_ring_;
  ptx::RingPosition<Traits::kStages> kv_ring_;
};

}  // namespace flashmask::sm90
