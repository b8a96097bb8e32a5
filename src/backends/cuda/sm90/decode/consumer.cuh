// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "backends/cuda/cache/packed_rows.cuh"
#include "backends/cuda/ptx/async_arrive.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/decode/arrivals.cuh"
#include "backends/cuda/sm90/decode/float8_scales.cuh"
#include "backends/cuda/sm90/decode/row_state.cuh"
#include "backends/cuda/sm90/decode/split_fold.cuh"
#include "backends/cuda/sm90/decode/traits.cuh"

namespace flashmask::sm90 {

/// A consumer warpgroup: 64 packed rows of a tile. For each block of keys it computes S = QK^T, the softmax and O +=
/// PV, the latter under the next tile's S and softmax where registers allow it.
template <typename Traits>
class DecodeConsumer {
 public:
  using Shared = DecodeShared<Traits>;
  using Element = typename Traits::Element;
  using Product = typename Traits::Product;
  __device__ __forceinline__ DecodeConsumer(const DecodeParams& p, Shared& shared)
      : p_(p), shared_(shared), scales_(p, shared) {}

  __device__ __forceinline__ void run() {
    if (Traits::kTurns && warpgroup() + 1 == Traits::kConsumers) pass_turn();
    while (true) {
      const uint32_t at = works_.stage();
      ptx::wait(shared_.work_full[at], works_.phase());
      const Work& work = shared_.works[at];
      if (work.tiles == Work::kEnd) return;
      ptx::wait(shared_.q_full[queries().stage()], queries().phase());
      ptx::fence_async_proxy();  // the rows have been copied by threads
      if (!has_rows(work)) {
        skip_work(work);
      } else if (Layout(p_, work.count()).spread) {
        run_work<1>(work);
      } else {
        run_work<2>(work);
      }
      if (work.is_merged_here() && is_last_to_arrive(work)) merge(work);
      arrive_warp(shared_.work_empty[at]);
      works_.advance();
    }
  }

 private:
  using Scores = typename Traits::Scores;
  using Outputs = typename Traits::Outputs;
  using HalfProbabilities = typename Traits::HalfProbabilities;
  using Probabilities = HalfProbabilities[2];
  using Swizzle = ptx::Swizzle128;
  using Layout = PackedLayout<Traits::kSpreadRows>;
  /// The barrier of all consumers, and with several the first of those of one.
  static constexpr int kBarrier = 1, kBarrierOfOne = 2, kTurnBarrier = kBarrierOfOne + Traits::kConsumers;
  static constexpr int kParts = Traits::kParts;
  static constexpr bool kFolds = Traits::kFolds, kFloat8 = Traits::kFloat8;

  __device__ __forceinline__ static void join_all() { ptx::named_barrier_sync(kBarrier, Traits::kConsumerThreads); }
  __device__ __forceinline__ static void join() {
    if constexpr (Traits::kConsumers == 1) {
      join_all();
    } else {
      ptx::named_barrier_sync(kBarrierOfOne + warpgroup(), 128);
    }
  }
  __device__ __forceinline__ static int warpgroup() {
    return Traits::kConsumers == 1 ? 0 : static_cast<int>(ptx::uniform(threadIdx.x / 128));
  }
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(Traits::kConsumers == 1 ? threadIdx.x : threadIdx.x % 128);
  }

  /// Waits for this warpgroup's turn to issue products, one tile each, so that the warpgroups do not drift into step.
  __device__ __forceinline__ static void wait_for_turn() {
    if constexpr (Traits::kTurns) ptx::named_barrier_sync(kTurnBarrier + warpgroup(), Traits::kConsumerThreads);
  }
  __device__ __forceinline__ static void pass_turn() {
    if constexpr (Traits::kTurns) ptx::named_barrier_arrive(kTurnBarrier + 1 - warpgroup(), Traits::kConsumerThreads);
  }

  /// False if none of the unit's rows are this warpgroup's.
  __device__ __forceinline__ static bool has_rows(const Work& work) {
    return Traits::kConsumers == 1 || work.count() > Traits::kSlabRows * warpgroup();
  }
  /// Passes over a unit, waiting for each copy, which an arrival on its slot must not overtake.
  __device__ __forceinline__ void skip_work(const Work& work) {
    release_queries();
    for (int32_t n = work.tiles; n > 0; --n, slot_ += kParts) {
      wait_for_turn();
      pass_turn();
      const KeyTile tile = tile_of(slot_);
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part) wait_for_keys(Slot{slot_ + part});
      release(shared_.k_empty, slot_);
      if constexpr (kFloat8) {
        scales_.wait(slot_ / kParts);
        scales_.release(slot_ / kParts);
      }
      if (tile.is_masked()) {
        wait_for_mask();
        release_mask();
      }
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part) wait_for_values(Slot{slot_ + part});
      release(shared_.v_empty, slot_);
    }
  }

  template <int kRows>
  __device__ __forceinline__ void run_work(const Work& work) {
    if constexpr (kFloat8) begin_scales(work);
    Outputs o = {};
    DecodeRows<kRows> rows;
    rows.reset();
    Folded folded(p_, work);
    if constexpr (Traits::kOverlaps && (kRows == 1 || Traits::kSpreadRows == 0)) {  // registers do not hold more
      run_overlapped(work, o, rows, folded);
    } else {
      for (int32_t n = work.tiles; n > 0; --n) run_tile(work, n == 1, o, rows, folded);
    }
    if (folded.is_on()) folded.finish(o, rows);
    if constexpr (kFloat8) scales_.finish(o);
    finish<kRows>(work, o, rows, folded);
  }
  /// Makes the rows of q ready for products with e4m3.
  __device__ __forceinline__ void begin_scales(const Work& work) {
    auto* const q = reinterpret_cast<unsigned char*>(shared_.q[queries().stage()]);
    scales_.begin(q + static_cast<int>(threadIdx.x / 32) * cuda::Slab::kRows * Swizzle::kRow, work);
    join();
  }

  /// In place of SplitFold in tiles whose units have one split.
  struct NothingFolded {
    __device__ __forceinline__ NothingFolded(const DecodeParams&, const Work&) {}
    __device__ __forceinline__ static constexpr bool is_on() { return false; }
    __device__ __forceinline__ static void add(Outputs&, cuda::RowState&) {}
    __device__ __forceinline__ static void finish(Outputs&, const cuda::RowState&) {}
    __device__ __forceinline__ static float2 result(int) { return {}; }
  };
  using Folded = std::conditional_t<kFolds, SplitFold<Traits>, NothingFolded>;

  /// The place of one of this thread's two rows. Computed where it is needed: registers are few.
  __device__ __forceinline__ cuda::PackedPlace place_of(const Work& work, int half) const {
    const auto lane = static_cast<int32_t>(ptx::opaque(ptx::lane()));
    const int32_t row = cuda::Slab::kRows * static_cast<int32_t>(threadIdx.x / 32) + lane / 4 + 8 * half;
    const int32_t packed = Layout(p_, work.count()).packed(row), heads = work.tile.head_count;
    if (packed >= work.count()) return {packed, -1, 0};
    return {packed, packed / heads, packed % heads};
  }

  using Slot = ptx::RingPosition<Traits::kSlots>;
  /// The tile whose keys' first part is in a slot.
  __device__ __forceinline__ KeyTile tile_of(uint32_t slot) const {
    const ptx::RingPosition<Traits::kTiles> tiles{slot / kParts};
    ptx::wait(shared_.tile_full[tiles.stage()], tiles.phase());
    const KeyTile tile = shared_.tiles[tiles.stage()];
    arrive_warp(shared_.tile_empty[tiles.stage()]);
    return tile;
  }
  __device__ __forceinline__ void wait_for_keys(Slot at) const { wait_for_copies(shared_.k_full, at); }
  __device__ __forceinline__ void wait_for_values(Slot at) const { wait_for_copies(shared_.v_full, at); }
  __device__ __forceinline__ void wait_for_copies(uint64_t (&full)[Traits::kSlots], Slot at) const {
    ptx::wait(full[at.stage()], at.phase());
    delay<Role::kConsumer>();
    if (!kFloat8 && p_.gathers) ptx::fence_async_proxy();  // threads have copied
  }
  /// Releases the parts of a tile's keys, or values, of which `slot` is the first.
  __device__ __forceinline__ static void release(uint64_t (&empty)[Traits::kSlots], uint32_t slot) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) arrive_warp(empty[Slot{slot + part}.stage()]);
  }
  /// Rows come with works.
  __device__ __forceinline__ ptx::RingPosition<Traits::kQueries> queries() const { return {works_.count}; }
  __device__ __forceinline__ void release_queries() const { arrive_warp(shared_.q_empty[queries().stage()]); }

  template <typename Rows>
  __device__ __forceinline__ void run_overlapped(const Work& work, Outputs& o, Rows& rows, Folded& folded) {
    SplitBegin begin{tile_of(slot_), work.tiles};
    begin = run_split(work, begin, o, rows);
    if constexpr (kFolds) {
      while (begin.left > 0) {
        folded.add(o, rows);
        begin = run_split(work, begin, o, rows);
      }
    }
  }
  /// The first tile of a split, and how many are left with those of the splits behind it.
  struct SplitBegin {
    KeyTile tile;
    int32_t left;
  };
  /// Runs the tiles of a split, and returns where the next one begins.
  template <typename Rows>
  __device__ __forceinline__ SplitBegin run_split(const Work& work, const SplitBegin& begin, Outputs& o, Rows& rows) {
    Scores s;
    Probabilities weights;
    KeyTile tile = begin.tile;
    int32_t left = begin.left - 1;
    uint32_t slot = ptx::uniform(slot_);
    wait_for_turn();
    issue_scores(s, slot);
    pass_turn();
    ptx::wgmma_wait<0>();
    softmax(work, tile, slot, s, weights, rows, [](bool, const float (&)[2]) {}, [](int) {});
    for (; left > 0; --left) {
      tile = tile_of(slot + kParts);
      if (kFolds && tile.begins_next_split()) break;
      const uint32_t before = slot;
      slot = ptx::uniform(slot + kParts);
      wait_for_turn();
      issue_scores(s, slot);
      issue_output(o, weights, before);
      pass_turn();
      ptx::wgmma_wait<2>();
      softmax<true>(
          work, tile, slot, s, weights, rows,
          [&](bool rescale, const float (&factor)[2]) {
            ptx::wgmma_wait<0>();
            ptx::pin(o);
            release(shared_.v_empty, before);
            if (rescale) Rows::rescale(o, factor);
          },
          [](int) {});
    }
    if (!kFolds || left == 0) {
      release_queries();
      clear_absent_values(work, tile, slot);
    }
    issue_output(o, weights, slot);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    release(shared_.v_empty, slot);
    slot_ = slot + kParts;
    return {tile, left};
  }

  template <typename Rows>
  __device__ __forceinline__ void run_tile(const Work& work, bool is_last, Outputs& o, Rows& rows, Folded& folded) {
    const uint32_t slot = ptx::uniform(slot_);
    const KeyTile tile = tile_of(slot);
    if (kFolds && tile.begins_next_split()) folded.add(o, rows);
    Scores s;
    Probabilities weights;
    wait_for_turn();
    issue_scores(s, slot);
    pass_turn();
    ptx::wgmma_wait<0>();
    if (is_last) {
      release_queries();
      clear_absent_values(work, tile, slot);
    }
    softmax(
        work, tile, slot, s, weights, rows,
        [&](bool rescale, const float (&factor)[2]) {
          if (rescale) Rows::rescale(o, factor);
        },
        [&](int half) { issue_output(o, weights, slot, half); });
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    release(shared_.v_empty, slot);
    slot_ += kParts;
  }

  /// Makes weights of the finished products S, and releases the keys. `settle` has O ready for the factors by which it
  /// is to be rescaled, if it is; with kPending a product reads the weights of the tile before until then. use(half)
  /// follows on a half's weights.
  template <bool kPending = false, typename Rows, typename Settle, typename Use>
  __device__ __forceinline__ void softmax(const Work& work, const KeyTile& tile, uint32_t slot, Scores& s,
                                          Probabilities& weights, Rows& rows, const Settle& settle, const Use& use) {
    ptx::pin(s);
    release(shared_.k_empty, slot);
    if constexpr (kFloat8) {
      scales_.wait(slot / kParts);
      scales_.scale_scores(slot / kParts, s);
    }
    if (tile.is_masked()) wait_for_mask();
    if constexpr (Rows::kBoth) change_scores(work, tile, s);
    if (tile.is_masked()) {
      Rows::hide(visible_of(work), s);
      release_mask();
    }
    float factor[2];
    const cuda::Raised raised = rows.raise_row_max(s, p_.scale_log2, p_.score_of_bit, factor);
    constexpr bool kTogether = kPending || kFloat8;
    if constexpr (!kTogether) settle(raised.rescale, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.exponentiate(s, half, p_.scale_log2);
      if constexpr (!kTogether) {
        Rows::template pack<Product>(s, half, weights[half]);
        use(half);
      }
    }
    if constexpr (kTogether) {
      if constexpr (kFloat8) {
        settle(scale_weights(slot, raised.rescale, s, factor), factor);
      } else {
        settle(raised.rescale, factor);
      }
      Rows::template pack<Product>(s, 0, weights[0]);
      Rows::template pack<Product>(s, 1, weights[1]);
    }
    if (raised.row_max) rows.refresh_limits(p_.score_of_bit);
  }

  /// Multiplies weights by the factors of e4m3 values, and `factor`, by which O is to be rescaled if it is, by the
  /// change of its units; true if O is to be rescaled.
  __device__ __forceinline__ bool scale_weights(uint32_t slot, bool rescale, Scores& s, float (&factor)[2]) {
    float change[2];
    const bool changes = scales_.scale_weights(slot / kParts, s, change);
    scales_.release(slot / kParts);
    if (!changes) return rescale;
#pragma unroll
    for (int half = 0; half < 2; ++half) factor[half] = rescale ? factor[half] * change[half] : change[half];
    return true;
  }

  /// S = Q K^T.
  __device__ __forceinline__ void issue_scores(Scores& s, uint32_t slot) const {
    issue_scores_of<0>(s, slot);
    if constexpr (kParts == 2) issue_scores_of<1>(s, slot);
    ptx::wgmma_commit();
  }
  template <int kPart>
  __device__ __forceinline__ void issue_scores_of(Scores& s, uint32_t slot) const {
    constexpr int kCount = Traits::kSlotKeys / 2;
    const Slot at{slot + kPart};
    wait_for_keys(at);
    const ptx::MatrixDescriptor q(ptx::shared_address(shared_.q[queries().stage()]) +
                                  warpgroup() * Traits::kSlabRows * Swizzle::kRow),
        k(ptx::shared_address(shared_.k[at.stage()]));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kQkDim / 16; ++step) {
      ptx::wgmma_ss<Product, Traits::kSlotKeys, ptx::Major::kInner, ptx::Major::kInner>(
          cuda::part_of<kPart * kCount, kCount>(s), q.at(Swizzle::step_along_row(step, Traits::kRows)),
          k.at(Swizzle::step_along_row(step, Traits::kSlotKeys)), step > 0);
    }
  }

  /// O += P V, for the tile's keys or a half of them.
  __device__ __forceinline__ void issue_output(Outputs& o, const Probabilities& weights, uint32_t slot) const {
    issue_output(o, weights, slot, 0);
    issue_output(o, weights, slot, 1);
  }
  __device__ __forceinline__ void issue_output(Outputs& o, const Probabilities& weights, uint32_t slot,
                                               int half) const {
    constexpr int kSteps = Traits::kKeys / 2 / 16;
    const int part = kParts == 1 ? 0 : half, half_of_slot = kParts == 1 ? half : 0;
    const Slot at{slot + part};
    if (half == 0 || kParts == 2) wait_for_values(at);
    const ptx::MatrixDescriptor v(ptx::shared_address(shared_.v[at.stage()]), Swizzle::block(Traits::kSlotKeys));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::wgmma_rs<Product, Traits::kVDim, ptx::Major::kOuter>(
          o, weights[half][step], v.at((half_of_slot * kSteps + step) * Swizzle::kStepDownRows), true);
    }
    ptx::wgmma_commit();
  }

  /// Zeros for the values past the last key, of which the copies have brought whatever the slots hold: 0 times NaN is
  /// NaN. Only a unit's last tile has any. Each warpgroup clears all of them, so that none waits for another.
  __device__ __forceinline__ void clear_absent_values(const Work& work, const KeyTile& tile, uint32_t slot) const {
    if (tile.first_key() + Traits::kKeys <= work.tile.keys) return;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int32_t first = max(work.tile.keys - tile.first_key() - part * Traits::kSlotKeys, 0);
      const Slot at{slot + part};
      wait_for_values(at);
      auto* const chunks = reinterpret_cast<uint4*>(shared_.v[at.stage()]);
      for (int block = 0; block < Traits::kVBlocks; ++block) {
        for (int32_t chunk = 8 * first + thread(); chunk < 8 * Traits::kSlotKeys; chunk += 128)
          chunks[block * 8 * Traits::kSlotKeys + chunk] = {};
      }
    }
    ptx::fence_async_proxy();
    join();
  }

  /// The masked tile's bits, asked for when its scores are there: registers do not hold them before.
  __device__ __forceinline__ cuda::SlabBits visible_of(const Work& work) const {
    cuda::SlabBits visible{};
    const cuda::MaskBits<Traits::kRows>& bits = mask().bits;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = place_of(work, half).row;
      visible.row[half] = row < 0 ? 0 : bits.row[row][cuda::Slab::column_pair()];
    }
    return visible;
  }
  __device__ __forceinline__ const TileMask<Traits::kRows>& mask() const { return shared_.masks[masks_.stage()]; }
  __device__ __forceinline__ void wait_for_mask() const {
    ptx::wait(shared_.mask_full[masks_.stage()], masks_.phase());
  }
  __device__ __forceinline__ void release_mask() {
    arrive_warp(shared_.mask_empty[masks_.stage()]);
    masks_.advance();
  }

  __device__ __forceinline__ void change_scores(const Work& work, const KeyTile& tile, Scores& s) const {
    cuda::change_scores<Product>(p_, s, [&] {
      cuda::apply_alibi(
          p_, work, [&](int half) { return place_of(work, half); }, mask().positions, tile.first_key(), s);
    });
  }

  template <int kRows>
  __device__ __forceinline__ void finish(const Work& work, Outputs& o, cuda::RowState& rows, const Folded& folded) {
#pragma unroll
    for (int half = 0; half < kRows; ++half) {
      float largest = rows.row_max[half] * p_.scale_log2, sum = cuda::quad_sum(rows.sum[half]);
      if (folded.is_on()) {
        const float2 all = folded.result(half);
        largest = all.x, sum = all.y;
      }
      const cuda::PackedPlace place = place_of(work, half);
      if (place.row < 0) continue;
      cuda::RowStore<Element, Traits::kVDim, cuda::NaturalColumns, Traits::kRows>{p_, work}.store(place, half, o,
                                                                                                  largest, sum);
    }
  }

  /// Counts this partial result, and is true for the CTA that counts the unit's last.
  __device__ __forceinline__ bool is_last_to_arrive(const Work& work) {
    delay<Role::kStore>();
    join_all();
    if (threadIdx.x == 0) cuda::count_partial(p_, work, shared_.arrived);
    join_all();
    return shared_.arrived;
  }
  __device__ __forceinline__ void merge(const Work& work) const {
    cuda::merge_unit<Element, Traits::kVDim, Traits::kConsumerThreads / 32, Traits::kRows>(
        p_, work, static_cast<int32_t>(ptx::opaque(threadIdx.x) / 32));
  }

  const DecodeParams& p_;
  Shared& shared_;
  std::conditional_t<kFloat8, Float8Scales<Traits>, NoScales<Traits>> scales_;
  uint32_t slot_ = 0;  ///< the next tile's first, of keys and values, counted through
  ptx::RingPosition<Traits::kWorks> works_;
  ptx::RingPosition<Traits::kMasks> masks_;
};

}  // namespace flashmask::sm90
