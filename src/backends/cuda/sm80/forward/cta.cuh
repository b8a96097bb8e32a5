// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/device/plan_bits.cuh"
#include "backends/cuda/fragments/softmax.cuh"
#include "backends/cuda/fragments/store_rows.cuh"
#include "backends/cuda/ptx/address.cuh"
#include "backends/cuda/ptx/cp_async.cuh"
#include "backends/cuda/sm80/common/operands.cuh"
#include "backends/cuda/sm80/forward/key_block_word.cuh"
#include "backends/cuda/sm80/forward/traits.cuh"

namespace flashmask::sm80 {

/// A CTA of the forward kernel. All warps load Q, K and V together, and each computes its own rows.
///
/// K and V have one buffer each, so that several CTAs fit a multiprocessor: V of a step arrives under its Q K^T, K of
/// the next under its softmax and P V. The barriers, each of all threads:
///
///   barrier            says that this is there   and that this has been read, and is overwritten after it
///   before Q K^T       K, Q at first, steps      V of the step before
///   before the softmax V                         K, steps
///   after the last     -                         Q, K and V of the work tile
///
/// A warp's mask bits are its own: between writing and reading them stand its own __syncwarp.
template <typename Traits>
class ForwardCta {
 public:
  using Params = typename Traits::Params;
  using Shared = SharedStorage<Traits>;
  __device__ __forceinline__ ForwardCta(const Params& p, Shared& shared)
      : p_(p), shared_(shared), warp_(static_cast<int>(ptx::uniform(threadIdx.x / 32))), weights_(p) {}

  __device__ __forceinline__ void run() {
    for (uint32_t n = ptx::uniform(blockIdx.x); n < p_.schedule.work_tiles; n += gridDim.x) {
      run_work_tile(cuda::WorkTilePlace(p_.schedule, p_.heads_q, n));
    }
  }

 private:
  using Element = typename Traits::Element;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using Scores = typename Traits::Scores;
  using Outputs = typename Traits::Outputs;
  using Step = ForwardStep<Traits>;
  using Blocks = KeyBlockWord<Traits::kGranules>;
  static constexpr int kSlabs = Traits::kSlabs, kSteps = Traits::kQkDim / 16;

  /// Q's fragments of the warp's rows, by steps, where they stay in registers.
  using Queries = uint32_t[Traits::kQInRegisters ? kSteps : 1][4];
  /// Running results of a work tile's rows.
  struct Rows {
    Outputs o[kSlabs] = {};
    cuda::RowState state[kSlabs];
  };

  __device__ __forceinline__ void run_work_tile(const cuda::WorkTilePlace& place) {
    batch_ = ptx::uniform(place.batch), head_ = ptx::uniform(place.head);
    mask_ = is_dense() ? 0 : ptx::uniform(cuda::mask_index(p_.plan, batch_, head_));
    row_ = static_cast<int32_t>(ptx::uniform(static_cast<uint32_t>(row_tile(place.rank) * Traits::kRows)));
    if (row_ >= p_.seqlen_q) return;
    kv_head_ = ptx::uniform(head_ / p_.query_heads_per_kv_head);
    const int32_t key_end = p_.extents.keys(batch_, p_.seqlen_k);
    if (threadIdx.x == 0) shared_.key_end = key_end;  // Read behind a barrier.
    Rows rows;
#pragma unroll
    for (cuda::RowState& state : rows.state) state.reset();
    if (warp_ == 0) list_steps(0);
    delay<Role::kWarp>();
    __syncthreads();
    Step step = shared_.steps[0];
    bool more = step.exists();
    if (more) {
      load<QTile>(shared_.q, p_.q, head_, row_, p_.seqlen_q);
      load_keys(step, key_end);
    }
    Queries q;
    if (more) {
      wait_for_loads();  // Steps read shared_.key_end ahead of their own barriers.
      if constexpr (Traits::kQInRegisters) read_rows(q);
    }
    while (more) more = run_step(step, q, rows);
    store(rows);
    delay<Role::kWarp>();
    __syncthreads();  // All have finished reading before the next work tile's rows, keys and values come.
  }

  /// Without a plan tiles come in their own order. 64 rows take half of a tile of 128, for which the plan has an order.
  __device__ __forceinline__ int32_t row_tile(uint32_t rank) const {
    if (is_dense()) return static_cast<int32_t>(rank);
    constexpr uint32_t kTilesOfOrder = 128 / Traits::kRows;
    const int64_t of_mask = static_cast<int64_t>(mask_) * ((p_.schedule.tiles + kTilesOfOrder - 1) / kTilesOfOrder);
    const int32_t ordered = __ldg(p_.plan.row_tile_order + of_mask + rank / kTilesOfOrder);
    return ordered * static_cast<int32_t>(kTilesOfOrder) + static_cast<int32_t>(rank % kTilesOfOrder);
  }

  __device__ __forceinline__ bool is_dense() const { return p_.element_mask == cuda::ElementMask::kDense; }

  /// Lists the steps of the plan's next word with a live key block, from `word` on. One warp calls it, and all read the
  /// list behind a barrier.
  __device__ __forceinline__ void list_steps(int32_t word) {
    const uint32_t lane = ptx::lane();
    Blocks blocks;
    const bool found =
        is_dense() ? blocks.mark_all_live(word, p_.key_blocks) : blocks.find(p_.plan, mask_, row_ / 64, word);
    if (lane == 0) {
      if (!found) shared_.steps[0] = {};
      if (p_.executed) atomicAdd(p_.executed, static_cast<unsigned long long>(__popc(blocks.any)));
    }
    if (!(blocks.any >> lane & 1)) return;
    const int32_t first_key = (word * 32 + static_cast<int32_t>(lane)) * 128;
    // Keys past the last are hidden: a block is full only if it is whole.
    const bool is_last = blocks.any >> lane == 1, is_whole = first_key + 128 <= p_.seqlen_k;
    const uint32_t classes = blocks.classes(lane, is_whole);
    int32_t place = __popc(blocks.any & ((1u << lane) - 1)) * Traits::kSteps;
#pragma unroll
    for (int32_t key = first_key; key < first_key + 128 && key < p_.seqlen_k; key += Traits::kKeys, ++place) {
      const bool ends = is_last && (key + Traits::kKeys >= min(first_key + 128, p_.seqlen_k));
      shared_.steps[place] = {key, classes | static_cast<uint32_t>(ends ? 0 : place + 1) << Step::kNextBit};
    }
  }

  /// Rows of a tensor, from `first` to `end`, as a group of copies.
  template <typename Tile>
  __device__ __forceinline__ void load(const unsigned char* tile, const cuda::TensorRows& tensor, uint32_t head,
                                       int32_t first, int32_t end) const {
    const Element* from = tensor.template of_head<const Element>(batch_, head) + first * tensor.row_stride;
    TileLoader<Tile, Traits::kThreads>().load(ptx::shared_address(tile), from, tensor.row_stride, end - first,
                                              tensor.columns);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void load_keys(const Step& step, int32_t end) const {
    load<KTile>(shared_.k, p_.k, kv_head_, step.first_key, end);
  }
  __device__ __forceinline__ void load_values(const Step& step, int32_t end) const {
    load<VTile>(shared_.v, p_.v, kv_head_, step.first_key, end);
  }
  /// Waits until all threads' loads have arrived and every warp has come here.
  __device__ __forceinline__ static void wait_for_loads() {
    ptx::cp_async_wait<0>();
    delay<Role::kWarp>();
    __syncthreads();
  }

  /// Leaves the next step in `step`; false if there is none.
  __device__ __forceinline__ bool run_step(Step& step, const Queries& q, Rows& rows) {
    // Between the barriers all warps would wait for the plan's bits.
    if (warp_ == 0 && step.next() == 0) list_steps(step.block() / 32 + 1);
    int32_t key_end = shared_.key_end;
    wait_for_loads();
    load_values(step, key_end);
    Scores s[kSlabs];
    if (is_live(step)) {
      if (is_partial(step) && step.in_block() == 0) make_mask(step.block());
      multiply_keys(q, s);
    } else {
      // Opaque, or the zeros would be written before the branch.
      clear(s, [] { return __uint_as_float(ptx::opaque(0)); });
    }
    key_end = shared_.key_end;
    const Step next = shared_.steps[step.next()];
    const bool more = next.exists();
    wait_for_loads();
    if (more) load_keys(next, key_end);
    if (is_live(step)) {
      convert_scores(step, s);
      add_values(step, s, rows);
    }
    step = next;
    return more;
  }
  __device__ __forceinline__ bool is_live(const Step& step) const { return own_classes(step) & Blocks::kLive; }
  __device__ __forceinline__ bool is_partial(const Step& step) const { return !(own_classes(step) & Blocks::kFull); }
  /// The classes of the warp's rows. Opaque, so that no register holds conditions on them.
  __device__ __forceinline__ uint32_t own_classes(const Step& step) const {
    return ptx::opaque(step.classes) >> Blocks::kBits * (warp_ * Traits::kRowsOfWarp / 64);
  }

  /// Writes the mask bits of a key block to shared memory, for each lane to read the bits of its rows. They are
  /// computed for 32 rows; a warp's own may be half of them.
  __device__ __forceinline__ void make_mask(int32_t block) {
    using Bits = ElementBits<Params>;
    const int own = warp_ * Traits::kRowsOfWarp, first = own / Bits::kRows * Bits::kRows;
    // Opaque, so that nothing derived from them stays in registers.
    const uint32_t batch = ptx::opaque(batch_), head = ptx::opaque(head_);
    const auto first_row = static_cast<int32_t>(ptx::opaque(static_cast<uint32_t>(row_ + first)));
    const int64_t offset = (is_dense() ? p_.dense.place : p_.mask.place).offset(batch, head);
    uint32_t bits[4];
    Bits(p_, offset, batch, first_row, block * Bits::kKeys).compute(bits);
    const uint32_t row = ptx::lane() - static_cast<uint32_t>(own - first);
    __syncwarp();  // All lanes have read the bits before.
    if (row < Traits::kRowsOfWarp)
      *reinterpret_cast<uint4*>(shared_.mask_bits[warp_].row[row]) = {bits[0], bits[1], bits[2], bits[3]};
    __syncwarp();
  }
  __device__ __forceinline__ cuda::SlabBits visible(const Step& step, int slab) const {
    cuda::SlabBits bits = shared_.mask_bits[warp_].slab(slab * cuda::Slab::kRows);
    for (uint32_t& word : bits.row) word >>= step.in_block() * (Traits::kKeys / 4);
    return bits;
  }

  /// The lane's number, in no register between its uses.
  __device__ __forceinline__ static uint32_t lane() {
    return Traits::kHoldsThread ? ptx::opaque(threadIdx.x) % 32 : ptx::reload_lane();
  }

  /// Q's fragments, where they stay in registers.
  __device__ __forceinline__ void read_rows(Queries& q) const {
    const RowsOfA<QTile> rows = q_rows();
#pragma unroll
    for (int step = 0; step < static_cast<int>(std::extent_v<Queries>); ++step) rows.read(0, step, q[step]);
  }
  __device__ __forceinline__ RowsOfA<QTile> q_rows() const {
    return RowsOfA<QTile>(ptx::shared_address(shared_.q) + warp_ * Traits::kRowsOfWarp * QTile::kRowBytes, 0, lane());
  }

  template <typename Zero>
  __device__ __forceinline__ static void clear(Scores (&s)[kSlabs], const Zero& zero) {
#pragma unroll
    for (Scores& of_slab : s) {
#pragma unroll
      for (float& score : of_slab) score = zero();
    }
  }

  /// S = Q K^T.
  __device__ __forceinline__ void multiply_keys(const Queries& held, Scores (&s)[kSlabs]) const {
    clear(s, [] { return 0.f; });
    const RowsOfA<QTile> rows = q_rows();
    const RowsOfB<KTile> keys(ptx::shared_address(shared_.k), 0, lane());
    multiply_steps<Element, kSteps>(
        s,
        [&](int slab, int step, uint32_t (&q)[4]) {
          if constexpr (Traits::kQInRegisters) {
#pragma unroll
            for (int i = 0; i < 4; ++i) q[i] = held[step][i];
          } else {
            rows.read(slab * cuda::Slab::kRows, step, q);
          }
        },
        [&](int piece, int step, uint32_t (&k)[4]) { keys.read(16 * piece, step, k); });
  }

  /// Makes scores of the product.
  __device__ __forceinline__ void convert_scores(const Step& step, Scores (&s)[kSlabs]) const {
    const typename Traits::Score score(p_, batch_, head_);
    const bool partial = is_partial(step);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      const auto places = [&] {
        const int slab_row = row_ + warp_ * Traits::kRowsOfWarp + slab * cuda::Slab::kRows;
        return cuda::Places<cuda::SlabSteps>{{slab_row + cuda::Slab::row(0), step.first_key + cuda::Slab::column(0)}};
      };
      if (score.form == cuda::ScoreForm::kShifted) {
        score.shift(s[slab], places);
      } else if (score.form == cuda::ScoreForm::kOther) {
        score.transform(s[slab], places);
      }
      if (partial) visible(step, slab).hide(s[slab]);
    }
  }

  /// Softmax, and O += P V.
  __device__ __forceinline__ void add_values(const Step& step, Scores (&s)[kSlabs], Rows& rows) const {
    typename Traits::HalfProbabilities p[kSlabs][2];
    const bool raised = raise_row_maxima(s, rows);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      cuda::RowState& state = rows.state[slab];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state.exponentiate(s[slab], half, p_.scale_log2);
        cuda::RowState::pack<Element>(s[slab], half, p[slab][half]);
        leave_out_dropped(step, slab, half, p[slab][half]);
      }
    }
    if (raised) {
#pragma unroll
      for (cuda::RowState& state : rows.state) state.refresh_limits(p_.score_of_bit);
    }
    multiply_values(p, rows.o);
  }

  /// True if a row_max was raised. One vote is of all slabs: a branch between them would part their exponentials.
  __device__ __forceinline__ bool raise_row_maxima(const Scores (&s)[kSlabs], Rows& rows) const {
    bool settled = true;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) settled &= rows.state[slab].is_settled(s[slab]);
    if (__all_sync(0xffffffff, settled)) return false;
    bool any = false;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      float factor[2];
      const cuda::Raised raised = rows.state[slab].raise_row_max(s[slab], p_.scale_log2, p_.score_of_bit, factor);
      if (raised.rescale) cuda::RowState::rescale(rows.o[slab], factor);
      any |= raised.row_max;
    }
    return any;
  }

  __device__ __forceinline__ void multiply_values(const typename Traits::HalfProbabilities (&p)[kSlabs][2],
                                                  Outputs (&o)[kSlabs]) const {
    constexpr int kPiecesOfHalf = Traits::kKeys / 32;
    const ColumnsOfB<VTile> values(ptx::shared_address(shared_.v), 0, lane());
#pragma unroll
    for (int piece = 0; piece < Traits::kKeys / 16; ++piece) {
#pragma unroll
      for (int columns = 0; columns < Traits::kVDim / 16; ++columns) {
        uint32_t v[4];
        values.read(16 * piece, columns, v);
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab)
          multiply<Element>(o[slab], columns, p[slab][piece / kPiecesOfHalf][piece % kPiecesOfHalf], v);
      }
    }
  }

  __device__ __forceinline__ void leave_out_dropped(const Step& step, int slab, int half,
                                                    typename Traits::HalfProbabilities& p) const {
    if constexpr (Traits::Weights::kMayDrop) {
      if (!weights_.drops()) return;
      constexpr int kHalf = Traits::kKeys / 2;
      cuda::leave_out(weights_.template draw<kHalf>(batch_, head_, slab_row(slab), step.first_key + half * kHalf), 0,
                      p);
    }
  }

  __device__ __forceinline__ int32_t slab_row(int slab) const {
    return row_ + warp_ * Traits::kRowsOfWarp + slab * cuda::Slab::kRows;
  }

  __device__ __forceinline__ void store(Rows& rows) const {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      float lse[2];
      finish(rows.state[slab], rows.o[slab], lse);
      store_lse(slab_row(slab), lse);
      if (p_.float_out) {
        cuda::store_float_slab(rows.o[slab], p_.out.template of_head<float>(batch_, head_), p_.out.row_stride,
                               slab_row(slab), p_.seqlen_q, p_.out.columns);
      } else {
        cuda::store_slab(rows.o[slab], p_.out.template of_head<Element>(batch_, head_), p_.out.row_stride,
                         slab_row(slab), p_.seqlen_q, p_.out.columns);
      }
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
  const typename Traits::Weights weights_;
  // The current work tile.
  uint32_t batch_ = 0, head_ = 0, kv_head_ = 0, mask_ = 0;
  int32_t row_ = 0;
};

}  // namespace flashmask::sm80
