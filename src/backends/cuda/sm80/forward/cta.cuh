// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "backends/cuda/attention/plan_bits.cuh"
#include "backends/cuda/attention/softmax.cuh"
#include "backends/cuda/attention/store_rows.cuh"
#include "backends/cuda/ptx/address.cuh"
#include "backends/cuda/ptx/cp_async.cuh"
#include "backends/cuda/sm80/common/live_key_blocks.cuh"
#include "backends/cuda/sm80/common/operands.cuh"
#include "backends/cuda/sm80/forward/traits.cuh"

namespace flashmask::sm80 {

/// A CTA of the forward kernel. All warps load Q, K and V together, and each computes its own rows.
///
/// K and V have one buffer each, so that several CTAs fit a multiprocessor: V of a step arrives under its Q K^T, K of
/// the next under its softmax and P V. Two barriers a step say that what was loaded is there for all, and that all have
/// finished reading what is overwritten next.
template <typename Traits>
class ForwardCta {
 public:
  using Params = typename Traits::Params;
  using Shared = SharedStorage<Traits>;
  __device__ __forceinline__ ForwardCta(const Params& p, Shared& shared)
      : p_(p),
        shared_(shared),
        warp_(static_cast<int>(ptx::uniform(threadIdx.x / 32))),
        q_(ptx::shared_address(shared.q) + warp_ * Traits::kRowsOfWarp * QTile::kRowBytes),
        k_(ptx::shared_address(shared.k)),
        v_(ptx::shared_address(shared.v)),
        weights_(p) {}

  __device__ __forceinline__ void run() {
    for (uint32_t n = blockIdx.x; n < p_.schedule.work_tiles; n += gridDim.x) {
      run_work_tile(cuda::WorkTilePlace(p_.schedule, p_.heads_q, n));
    }
    if (p_.executed && threadIdx.x == 0) atomicAdd(p_.executed, executed_);
  }

 private:
  using Element = typename Traits::Element;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using Blocks = LiveKeyBlocks<Traits::kGranules>;
  using Scores = typename Traits::Scores;
  using Outputs = typename Traits::Outputs;
  static constexpr int kSlabs = Traits::kSlabs;

  /// What a work tile's rows are, and what they have seen so far.
  struct Rows {
    Outputs o[kSlabs] = {};
    cuda::RowState state[kSlabs];
  };

  /// The keys of a step: `step` of a key block.
  struct Step {
    KeyBlock block;
    int step;
    __device__ __forceinline__ int32_t first_key() const { return block.index * 128 + step * Traits::kKeys; }
  };

  __device__ __forceinline__ void run_work_tile(const cuda::WorkTilePlace& place) {
    batch_ = place.batch, head_ = place.head;
    const bool dense = p_.element_mask == cuda::ElementMask::kDense;
    mask_offset_ = (dense ? p_.dense.place : p_.mask.place).offset(batch_, head_);
    const uint32_t mask = dense ? 0 : cuda::mask_index(p_.plan, batch_, head_);
    row_ = row_tile(dense, mask, place.rank) * Traits::kRows;
    const uint32_t kv_head = head_ / p_.query_heads_per_kv_head;
    keys_ = p_.k.template of_head<const Element>(batch_, kv_head);
    values_ = p_.v.template of_head<const Element>(batch_, kv_head);

    Rows rows;
#pragma unroll
    for (cuda::RowState& state : rows.state) state.reset();
    Blocks blocks(p_.plan, mask, row_ / 64);
    Step step{};
    bool more = next_block(dense, blocks, -1, step.block);
    if (more) {
      const Element* q = p_.q.template of_head<const Element>(batch_, head_) + row_ * p_.q.row_stride;
      q_loader_.load(ptx::shared_address(shared_.q), q, p_.q.row_stride, p_.seqlen_q - row_, p_.q.columns);
      load_keys(step);
    }
    while (more) {
      Step next = step;
      more = next_step(dense, blocks, next);
      run_step(step, next, more, rows);
      step = next;
    }
    store(rows);
    __syncthreads();  // All have finished reading before the next work tile's rows, keys and values come.
  }

  /// Without a plan tiles come in their own order. 64 rows take half of a tile of 128, for which the plan has an order.
  __device__ __forceinline__ int32_t row_tile(bool dense, uint32_t mask, uint32_t rank) const {
    if (dense) return static_cast<int32_t>(rank);
    constexpr uint32_t kTilesOfOrder = 128 / Traits::kRows;
    const int64_t of_mask = static_cast<int64_t>(mask) * ((p_.schedule.tiles + kTilesOfOrder - 1) / kTilesOfOrder);
    const int32_t ordered = __ldg(p_.plan.row_tile_order + of_mask + rank / kTilesOfOrder);
    return ordered * static_cast<int32_t>(kTilesOfOrder) + static_cast<int32_t>(rank % kTilesOfOrder);
  }

  /// The next live key block after `last`; with a dense mask each is, and partial.
  __device__ __forceinline__ bool next_block(bool dense, Blocks& blocks, int32_t last, KeyBlock& block) {
    if (dense) {
      block = {last + 1, (1u << Traits::kGranules) - 1, 0};
      if (block.index >= p_.key_blocks) return false;
    } else {
      if (!blocks.next(block)) return false;
      // Keys past the last are hidden: the last block is full only if it is whole.
      if ((block.index + 1) * 128 > p_.seqlen_k) block.full = 0;
    }
    ++executed_;
    return true;
  }
  __device__ __forceinline__ bool next_step(bool dense, Blocks& blocks, Step& step) {
    if (++step.step < Traits::kSteps && step.first_key() < p_.seqlen_k) return true;
    step.step = 0;
    return next_block(dense, blocks, step.block.index, step.block);
  }

  __device__ __forceinline__ void load_keys(const Step& step) const {
    const int32_t first = step.first_key();
    k_loader_.load(ptx::shared_address(shared_.k), keys_ + first * p_.k.row_stride, p_.k.row_stride,
                   p_.seqlen_k - first, p_.k.columns);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void load_values(const Step& step) const {
    const int32_t first = step.first_key();
    v_loader_.load(ptx::shared_address(shared_.v), values_ + first * p_.v.row_stride, p_.v.row_stride,
                   p_.seqlen_k - first, p_.v.columns);
    ptx::cp_async_commit();
  }
  /// What every thread has loaded is there, and every warp has come here.
  __device__ __forceinline__ static void wait_for_loads() {
    ptx::cp_async_wait<0>();
    __syncthreads();
  }

  __device__ __forceinline__ void run_step(const Step& step, const Step& next, bool more, Rows& rows) {
    const uint32_t granule = 1u << warp_ * Traits::kRowsOfWarp / 64;
    const bool live = step.block.live & granule, partial = !(step.block.full & granule);
    wait_for_loads();
    load_values(step);
    Scores s[kSlabs] = {};
    cuda::SlabBits visible[kSlabs];
    if (live) {
      if (partial) make_mask(step, visible);
      multiply_keys(s);
    }
    wait_for_loads();
    if (more) load_keys(next);
    if (live) {
      take_scores(s, partial, visible);
      add_values(step, s, rows);
    }
  }

  /// The warp's bits of the step's keys, by way of shared memory, where each lane finds those of its rows.
  __device__ __forceinline__ void make_mask(const Step& step, cuda::SlabBits (&visible)[kSlabs]) {
    constexpr int kRows = ElementBits<Params>::kRows;
    const int32_t first = warp_ * Traits::kRowsOfWarp / kRows * kRows;
    auto& buffer = shared_.mask_bits[warp_];
    if (step.step == 0) {
      uint32_t bits[4];
      ElementBits<Params>(p_, mask_offset_, batch_, row_ + first, step.block.index * 128).compute(bits);
      __syncwarp();  // All lanes have read the block before.
      *reinterpret_cast<uint4*>(buffer.row[ptx::lane()]) = {bits[0], bits[1], bits[2], bits[3]};
      __syncwarp();
    }
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      visible[slab] = buffer.slab(warp_ * Traits::kRowsOfWarp - first + slab * cuda::Slab::kRows);
      for (uint32_t& word : visible[slab].row) word >>= step.step * (Traits::kKeys / 4);
    }
  }

  /// S = Q K^T.
  __device__ __forceinline__ void multiply_keys(Scores (&s)[kSlabs]) const {
#pragma unroll
    for (int step = 0; step < Traits::kQkDim / 16; ++step) {
      uint32_t q[kSlabs][4];
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) q_.read(slab * cuda::Slab::kRows, step, q[slab]);
#pragma unroll
      for (int piece = 0; piece < Traits::kKeys / 16; ++piece) {
        uint32_t k[4];
        k_.read(16 * piece, step, k);
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) multiply<Element>(s[slab], piece, q[slab], k);
      }
    }
  }

  /// Makes scores of the product.
  __device__ __forceinline__ void take_scores(Scores (&s)[kSlabs], bool partial,
                                              const cuda::SlabBits (&visible)[kSlabs]) const {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      typename Traits::Score(p_, batch_, head_).transform(s[slab]);
      if (p_.negate) {
#pragma unroll
        for (float& score : s[slab]) score = -score;
      }
      if (partial) visible[slab].hide(s[slab]);
    }
  }

  /// Softmax, and O += P V.
  __device__ __forceinline__ void add_values(const Step& step, Scores (&s)[kSlabs], Rows& rows) const {
    typename Traits::HalfProbabilities p[kSlabs][2];
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      cuda::RowState& state = rows.state[slab];
      float factor[2];
      const cuda::Raised raised = state.raise_row_max(s[slab], p_.scale_log2, p_.score_of_bit, factor);
      if (raised.rescale) cuda::RowState::rescale(rows.o[slab], factor);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state.exponentiate(s[slab], half, p_.scale_log2);
        cuda::RowState::pack<Element>(s[slab], half, p[slab][half]);
      }
      if (raised.row_max) state.refresh_limits(p_.score_of_bit);
      leave_out_dropped(step, slab, p[slab]);
    }
#pragma unroll
    for (int piece = 0; piece < Traits::kKeys / 16; ++piece) {
#pragma unroll
      for (int columns = 0; columns < Traits::kVDim / 16; ++columns) {
        uint32_t v[4];
        v_.read(16 * piece, columns, v);
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          constexpr int kPiecesOfHalf = Traits::kKeys / 32;
          multiply<Element>(rows.o[slab], columns, p[slab][piece / kPiecesOfHalf][piece % kPiecesOfHalf], v);
        }
      }
    }
  }

  __device__ __forceinline__ void leave_out_dropped(const Step& step, int slab,
                                                    typename Traits::HalfProbabilities (&p)[2]) const {
    if constexpr (Traits::Weights::kMayDrop) {
      if (!weights_.drops()) return;
      const cuda::DroppedBits dropped =
          weights_.template draw<Traits::kKeys>(batch_, head_, slab_row(slab), step.first_key());
#pragma unroll
      for (int half = 0; half < 2; ++half) cuda::leave_out(dropped, half, p[half]);
    }
  }

  __device__ __forceinline__ int32_t slab_row(int slab) const {
    return row_ + warp_ * Traits::kRowsOfWarp + slab * cuda::Slab::kRows;
  }

  __device__ __forceinline__ void store(Rows& rows) const {
    Element* out = p_.out.template of_head<Element>(batch_, head_);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      float lse[2];
      finish(rows.state[slab], rows.o[slab], lse);
      store_lse(slab_row(slab), lse);
      cuda::store_slab(rows.o[slab], out, p_.out.row_stride, slab_row(slab), p_.seqlen_q, p_.out.columns);
    }
  }
  __device__ __forceinline__ void finish(cuda::RowState& state, Outputs& o, float (&lse)[2]) const {
    if constexpr (Traits::kFeatured) {
      const float sink = p_.features.sink.template of_head<Element>(head_);
      state.finish(o, sink, p_.features.dropout.scale, p_.scale_log2, lse);
    } else {
      state.finish(o);
#pragma unroll
      for (int half = 0; half < 2; ++half) lse[half] = state.lse(half, p_.scale_log2);
    }
  }
  __device__ __forceinline__ void store_lse(int32_t first_row, const float (&lse)[2]) const {
    if (cuda::Slab::column_pair() != 0) return;
    float* const to = p_.lse + batch_ * p_.lse_batch_stride + head_ * p_.lse_head_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first_row + cuda::Slab::row_in_eight() + 8 * half;
      if (row < p_.seqlen_q) to[row * p_.lse_row_stride] = lse[half];
    }
  }

  const Params& p_;
  Shared& shared_;
  const int warp_;
  const RowsOfA<QTile> q_;
  const RowsOfB<KTile> k_;
  const ColumnsOfB<VTile> v_;
  const TileLoader<QTile, Traits::kThreads> q_loader_;
  const TileLoader<KTile, Traits::kThreads> k_loader_;
  const TileLoader<VTile, Traits::kThreads> v_loader_;
  const typename Traits::Weights weights_;
  // Of the work tile.
  uint32_t batch_ = 0, head_ = 0;
  int32_t row_ = 0;
  int64_t mask_offset_ = 0;
  const Element* keys_ = nullptr;
  const Element* values_ = nullptr;
  unsigned long long executed_ = 0;
};

}  // namespace flashmask::sm80
