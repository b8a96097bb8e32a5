// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/cache/decode_rows.cuh"
#include "backends/cuda/cache/packed_rows.cuh"
#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/device/launch_overlap.cuh"
#include "backends/cuda/fragments/element_mask.cuh"
#include "backends/cuda/fragments/softmax.cuh"
#include "backends/cuda/sm80/decode/cache_operands.cuh"
#include "backends/cuda/sm80/decode/key_loader.cuh"
#include "backends/cuda/sm80/decode/query_loader.cuh"

namespace flashmask::sm80 {

/// A CTA of the decode kernel: four warps that divide the rows of a unit, 16 each, and where there are fewer rows the
/// keys of each step. Up to 16 packed rows each warp has the keys that it has loaded, and waits for no other until
/// the unit's end, where their results are added up in ascending order of keys; so a request's bits depend on how many
/// packed rows it has.
///
/// An item of the ring, keys or values of a step, is there once its copies have come and the warps that share its rows
/// have met; the slot of the item before is free from then on.
template <typename Traits>
class DecodeCta {
 public:
  using Shared = DecodeShared<Traits>;
  __device__ __forceinline__ DecodeCta(const cuda::CachedParams& p, Shared& shared)
      : p_(p), shared_(shared), warp_(static_cast<int>(ptx::uniform(threadIdx.x / 32))), loader_(p, shared, warp_) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) shared_.units.begin();
    loader_.start();
    while (true) {
      join();  // All have read the unit before: its rows, and its last items.
      if (threadIdx.x == 0) find_unit();
      join();
      if (shared_.work.tiles == cuda::UnitPart::kEnd) return;
      QueryLoader<Traits>(p_, shared_, warp_).load(shared_.work);
      if constexpr (kFloat8) loader_.put_unit_scales(shared_.work);
      join();
      run_unit(shared_.work);
    }
  }

 private:
  using Element = typename Traits::Element;
  using QTile = typename Traits::QTile;
  using KTile = typename Traits::KTile;
  using VTile = typename Traits::VTile;
  using Outputs = typename Traits::Outputs;
  using Product = typename Traits::Product;
  static constexpr bool kFloat8 = Traits::kFloat8;
  static constexpr int kWarps = Traits::kWarps, kSteps = Traits::kQkDim / 16;
  static constexpr int kSlabRows = cuda::Slab::kRows;

  /// Running results of a warp's 16 rows.
  struct Rows {
    Outputs o = {};
    cuda::RowState state;
  };
  /// Q's fragments of a warp's rows, where they stay in registers.
  using Queries = uint32_t[Traits::kQInRegisters ? kSteps : 1][4];

  /// Weights of a warp's rows and at most all keys of a step.
  using Weights = cuda::PackedFragments<Traits::kKeys>;

  /// A warp's place among the four: its 16 rows of the tile, of which lanes have but their first where kLaneRows is 1,
  /// and its keys of each step.
  template <int kKeyWarps_, int kLaneRows_ = 2>
  struct Place {
    static constexpr int kKeyWarps = kKeyWarps_, kLaneRows = kLaneRows_, kKeys = Traits::kKeys / kKeyWarps;
    static constexpr int kScores = kSlabRows * kKeys / 32;
    using Scores = cuda::Accumulators<kSlabRows, kKeys>;
    int warp;
    __device__ __forceinline__ int slab() const { return warp / kKeyWarps; }
    __device__ __forceinline__ int key_warp() const { return warp % kKeyWarps; }
    __device__ __forceinline__ int first_row() const { return kSlabRows * slab(); }
    __device__ __forceinline__ int first_key() const { return kKeys * key_warp(); }
  };

  template <typename OwnReference>
  using ScoresOf = typename std::remove_cvref_t<OwnReference>::Scores;

  /// True if a step's weights and the next one's scores do not fit in registers together.
  template <typename OwnReference>
  static constexpr bool kIsCrowded = std::remove_cvref_t<OwnReference>::kScores + Traits::kVDim / 2 > 96 &&
                                     std::remove_cvref_t<OwnReference>::kKeyWarps == 1;

  /// A step as the loop over steps knows it.
  struct Step {
    int32_t first_key;
    bool is_masked, is_last;
  };

  /// Finds the CTA's next unit.
  __device__ __forceinline__ void find_unit() {
    ShareWalk& walk = shared_.units;
    if (walk.next(p_)) {
      shared_.work = walk.part(p_);
    } else {
      shared_.work.tiles = cuda::UnitPart::kEnd;
    }
  }

  __device__ __forceinline__ void run_unit(const cuda::UnitPart& work) {
    const int32_t slabs = (work.count() + kSlabRows - 1) / kSlabRows;
    key_warps_ = slabs > 2 ? 1 : slabs > 1 ? 2 : kWarps;
    is_half_slab_ = work.count() <= kSlabRows / 2;
    run_rows(work);
    if (work.is_merged_here()) finish_unit(work);
  }
  /// Calls f with this warp's place.
  template <typename F>
  __device__ __forceinline__ void with_place(const F& f) const {
    // Another way for the widest O would spill.
    constexpr bool kHasHalfSlabs = Traits::kVDim < 256;
    if (kHasHalfSlabs && is_half_slab_) {
      f(Place<4, kHasHalfSlabs ? 1 : 2>{warp_});
    } else if (key_warps_ == 4) {
      f(Place<4>{warp_});
    } else if (key_warps_ == 2) {
      f(Place<2>{warp_});
    } else {
      f(Place<1>{warp_});
    }
  }

  __device__ __forceinline__ static void join() {
    delay<Role::kWarp>();
    __syncthreads();
  }

  __device__ __forceinline__ void run_rows(const cuda::UnitPart& work) {
    const int first_row = kSlabRows * (warp_ / key_warps_);
    const bool has_rows = first_row < work.count();
    Rows rows;
    rows.state.reset();
    if constexpr (kFloat8) reset_units();
    Queries q;
    if constexpr (Traits::kQInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) q_rows(first_row).read(0, step, q[step]);
    }
    Weights weights = {};
    const auto with_rows = [&](const auto& f) {
      if (has_rows) with_place(f);
    };
    if constexpr (Traits::kOverlaps) {
      int32_t n = 0;
      for (bool is_last = false; !is_last; n = min(n + 1, 2)) {
        const Step step = next_step(work);
        is_last = step.is_last;
        wait_for_items(n);
        // At a unit's first step keys stand for the values before it: their weights are zeros.
        const unsigned char *const values = n == 0 ? slot() : next_slot(), *const keys = next_slot();
        load_items(n);
        with_rows([&](const auto& own) {
          ScoresOf<decltype(own)> s = {};
          if constexpr (kIsCrowded<decltype(own)>) add_values(own, values, weights, rows.o);
          multiply_keys(own, keys, q, s);
          if constexpr (!kIsCrowded<decltype(own)>) add_values(own, values, weights, rows.o);
          weigh(work, own, step, s, rows, weights);
        });
      }
      wait_for_items(1);
      const unsigned char* const values = next_slot();
      load_items(n);
      with_rows([&](const auto& own) { add_values(own, values, weights, rows.o); });
    } else {
      for (bool is_last = false; !is_last;) {
        const Step step = next_step(work);
        is_last = step.is_last;
        wait_for_items(0);
        const unsigned char* const keys = next_slot();
        loader_.load_values();
        with_rows([&](const auto& own) {
          ScoresOf<decltype(own)> s = {};
          multiply_keys(own, keys, q, s);
          weigh(work, own, step, s, rows, weights);
        });
        wait_for_items(0);
        const unsigned char* const values = next_slot();
        loader_.load_keys();
        with_rows([&](const auto& own) { add_values(own, values, weights, rows.o); });
      }
    }
    if constexpr (kFloat8) finish_units(rows);
    with_place([&](const auto& own) { add_up(own, rows); });
    if (has_rows && warp_ % key_warps_ == 0) store(work, first_row, rows);
  }

  static constexpr uint32_t kSteppedBits = Traits::kOverlaps + 1;

  /// The unit's next step. Whoever looked at the bits of the step before the last has met all others since.
  __device__ __forceinline__ Step next_step(const cuda::UnitPart& work) {
    const KeyStep& found = loader_.step(++step_);
    const Step step{found.first_key, found.is_masked, found.is_last};
    if (step.is_masked) find_visible(work, step.first_key);
    return step;
  }
  /// Waits for the ring's next items, and until nobody reads the items before. `more`: the items, beyond one, that have
  /// been loaded since or are waited for; where steps overlap, a unit's first step has none, its second one, others
  /// two.
  __device__ __forceinline__ void wait_for_items(int32_t more) {
    constexpr int kLoading = Traits::kSlots - 2;
    loader_.put_scales();
    if (more == 0 || !Traits::kOverlaps) {
      ptx::cp_async_wait<kLoading>();
    } else if (more == 1) {
      ptx::cp_async_wait<kLoading - Traits::kOverlaps>();
    } else {
      ptx::cp_async_wait<kLoading - 2 * Traits::kOverlaps>();
    }
    if (key_warps_ == kWarps) {
      __syncwarp();
    } else {
      join();
    }
  }
  /// The ring's next slot.
  __device__ __forceinline__ const unsigned char* slot() const { return shared_.slots[item_ % Traits::kSlots]; }
  __device__ __forceinline__ const unsigned char* next_slot() { return shared_.slots[item_++ % Traits::kSlots]; }
  /// Loads as many items as have been read since the last ones, at a unit's n-th step: at its first one, its second one
  /// and others two.
  __device__ __forceinline__ void load_items(int32_t n) {
    if (n != 1) loader_.load_values();
    if (n != 0) loader_.load_keys();
  }

  __device__ __forceinline__ RowsOfA<QTile> q_rows(int first_row) const {
    return RowsOfA<QTile>(ptx::shared_address(shared_.rows.q) + static_cast<uint32_t>(first_row) * QTile::kRowBytes);
  }

  /// S += Q K^T for the warp's keys of a step.
  template <typename Own>
  __device__ __forceinline__ void multiply_keys(const Own& own, const unsigned char* keys, const Queries& held,
                                                typename Own::Scores& s) const {
    const RowsOfA<QTile> queries = q_rows(own.first_row());
    using Keys = KeyOperand<KTile, kFloat8>;
    const Keys columns(ptx::shared_address(keys) + static_cast<uint32_t>(own.first_key()) * KTile::kRowBytes);
    static_assert(!kIsCrowded<Own> || !Traits::kQInRegisters, "registers have no indices");
    [[maybe_unused]] constexpr int kUnroll = kIsCrowded<Own> ? 1 : kSteps;
#pragma unroll kUnroll
    for (int n = 0; n < kSteps; n += Keys::kSteps) {
      uint32_t q[Keys::kSteps][4];
#pragma unroll
      for (int i = 0; i < Keys::kSteps; ++i) read_query_step(held, queries, n + i, q[i]);
#pragma unroll
      for (int piece = 0; piece < Own::kKeys / 16; ++piece) {
        uint32_t k[Keys::kSteps][4];
        columns.read(16 * piece, n / Keys::kSteps, k);
#pragma unroll
        for (int i = 0; i < Keys::kSteps; ++i) multiply<Product>(s, piece, q[i], k[i]);
      }
    }
  }

  /// Makes weights of products: their softmax.
  template <typename Own>
  __device__ __forceinline__ void weigh(const cuda::UnitPart& work, const Own& own, const Step& step,
                                        typename Own::Scores& s, Rows& rows, Weights& weights) const {
    if constexpr (kFloat8) scale_scores(own, s);
    change_scores(work, own, step.first_key, s);
    if (step.is_masked) visible_to(work, own).hide(s);
    cuda::DecodeRows<Own::kLaneRows> state{rows.state};
    float factor[2];
    const cuda::Raised raised = state.raise_row_max(s, p_.scale_log2, p_.score_of_bit, factor);
    if (raised.rescale) state.rescale(rows.o, factor);
    state.exponentiate(s, 0, p_.scale_log2);
    state.exponentiate(s, 1, p_.scale_log2);
    if constexpr (kFloat8) scale_weights(own, s, rows.o);
#pragma unroll
    for (int n = 0; n < Own::kKeys / 16; ++n) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair)
        weights[n][pair] =
            pair % 2 < Own::kLaneRows ? ptx::pack<Product>(s[8 * n + 2 * pair], s[8 * n + 2 * pair + 1]) : 0;
    }
    if (raised.row_max) state.refresh_limits(p_.score_of_bit);
    rows.state = state;
  }

  /// O += P V.
  template <typename Own>
  __device__ __forceinline__ void add_values(const Own& own, const unsigned char* values, const Weights& weights,
                                             Outputs& o) const {
    using Values = ValueOperand<VTile, kFloat8>;
    const Values rows(ptx::shared_address(values) + static_cast<uint32_t>(own.first_key()) * VTile::kRowBytes);
#pragma unroll
    for (int n = 0; n < Own::kKeys / 16; ++n) {
#pragma unroll
      for (int piece = 0; piece < Traits::kVDim / 16; piece += Values::kPieces) {
        uint32_t v[Values::kPieces][4];
        rows.read(16 * n, piece / Values::kPieces, v);
#pragma unroll
        for (int i = 0; i < Values::kPieces; ++i) multiply<Product>(o, piece + i, weights[n], v[i]);
      }
    }
  }

  /// Q's fragments of a step of 16 columns.
  __device__ __forceinline__ static void read_query_step(const Queries& held, const RowsOfA<QTile>& queries, int step,
                                                         uint32_t (&q)[4]) {
    if constexpr (Traits::kQInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[i] = held[step][i];
    } else {
      queries.read(0, step, q);
    }
  }

  // --- Factors of a cache of e4m3 --------------------------------------------------------------------

  __device__ __forceinline__ const auto& scales() const { return shared_.scales[step_ % Traits::kSteps]; }

  /// Makes products: rows of Q lack a power of two, keys their factors.
  template <typename Own>
  __device__ __forceinline__ void scale_scores(const Own& own, typename Own::Scores& s) const {
    const int row = own.first_row() + cuda::Slab::row_in_eight();
    const float unit[2] = {shared_.rows.q_unit[row], shared_.rows.q_unit[row + 8]};
#pragma unroll
    for (int i = 0; i < Own::kScores; ++i) {
      if (i / 2 % 2 < Own::kLaneRows) s[i] *= unit[i / 2 % 2] * scales().k[own.first_key() + cuda::Slab::column(i)];
    }
  }
  /// Multiplies weights by the values' factors, in the unit of their row, to which O goes over.
  template <typename Own>
  __device__ __forceinline__ void scale_weights(const Own& own, typename Own::Scores& s, Outputs& o) const {
    if (!p_.v_scale.data) return;
    const float* const factors = scales().v + own.first_key();
    float change[2] = {1, 1};
#pragma unroll
    for (int half = 0; half < Own::kLaneRows; ++half) {
      float largest = 0;
#pragma unroll
      for (int i = 0; i < Own::kScores; ++i) {
        if (i / 2 % 2 != half) continue;
        s[i] *= factors[cuda::Slab::column(i)];
        largest = fmaxf(largest, fabsf(s[i]));
      }
      const float inverse = settle_unit(half, cuda::quad_max(largest), change[half]);
#pragma unroll
      for (int i = 0; i < Own::kScores; ++i)
        if (i / 2 % 2 == half) s[i] *= inverse;
    }
    if (__any_sync(0xffffffff, change[0] != 1 || change[1] != 1)) cuda::DecodeRows<2>::rescale(o, change);
  }
  /// The inverse of a row's unit after a step whose largest product is `largest`; `change`: the factor of O.
  __device__ __forceinline__ float settle_unit(int half, float largest, float& change) const {
    const cuda::RowUnit before = row_unit(half), unit = before.after(largest);
    __syncwarp();  // the row's lanes have read its unit
    row_unit(half) = unit;
    change = before.change_to(unit);
    return unit.inverse();
  }
  __device__ __forceinline__ cuda::RowUnit& row_unit(int half) const {
    return shared_.rows.o_unit[warp_][cuda::Slab::row_in_eight() + 8 * half];
  }
  __device__ __forceinline__ void reset_units() const {
    if (ptx::lane() < kSlabRows) shared_.rows.o_unit[warp_][ptx::lane()] = {};
    __syncwarp();
  }
  /// Gives O its units.
  __device__ __forceinline__ void finish_units(Rows& rows) const {
    float unit[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      unit[half] = (p_.v_scale.data ? row_unit(half).value() : 1.f) * cuda::kE4m3Unit;
    cuda::DecodeRows<2>::rescale(rows.o, unit);
  }

  /// The place of one of this thread's two rows in the warp's, from first_row on.
  __device__ __forceinline__ static cuda::PackedPlace place_of(const cuda::UnitPart& work, int first_row, int half) {
    const int32_t packed = first_row + cuda::Slab::row_in_eight() + 8 * half, heads = work.tile.head_count;
    if (packed >= work.count()) return {packed, -1, 0};
    return {packed, packed / heads, packed % heads};
  }

  template <typename Own>
  __device__ __forceinline__ void change_scores(const cuda::UnitPart& work, const Own& own, int32_t first_key,
                                                typename Own::Scores& s) const {
    cuda::change_scores<Product>(p_, s, [&] {
      cuda::apply_alibi(
          p_, work, [&](int half) { return place_of(work, own.first_row(), half); },
          shared_.rows.key_positions[step_ % kSteppedBits] + own.first_key(), first_key + own.first_key(), s);
    });
  }

  /// Finds which of a step's keys each row of the tile sees: a warp for the keys that it has loaded, and as many rows
  /// at a time as it has lanes for.
  __device__ __forceinline__ void find_visible(const cuda::UnitPart& work, int32_t first_key) {
    constexpr int kOwnKeys = Traits::kLoadedKeys;
    const auto lane = static_cast<int32_t>(ptx::lane()), column = kOwnKeys * warp_ + lane % kOwnKeys;
    const SequenceView sequence = p_.sequence_of(work.tile);
    const int64_t key = first_key + column;
    const bool is_there = key < sequence.keys();
    HiddenIntervals hidden;
    int64_t position = key;
    if (is_there && (p_.call.bounds.defined() || sequence.has_positions())) {
      const KeyPlace place = sequence.place(key);
      hidden = sequence.hidden(key, place, work.kv_head);
      if (sequence.has_positions()) position = sequence.key_position(key, place);
    }
    if (p_.needs_positions() && lane < kOwnKeys)
      shared_.rows.key_positions[step_ % kSteppedBits][column] = static_cast<int32_t>(position);
    for (int32_t first = 0; first < work.tile.row_count; first += 32 / kOwnKeys) {
      const int32_t i = first + lane / kOwnKeys;
      const int64_t row = sequence.first_row() + work.tile.first_row + i;
      const bool sees = is_there && i < work.tile.row_count && row >= 0 && sequence.in_blocks(row, key, work.kv_head) &&
                        sequence.in_band(row, key, sequence.row_position(row), position) && !hidden.hides(row);
      const uint32_t bits = __ballot_sync(0xffffffff, sees);
      if (lane % kOwnKeys == 0 && i < work.tile.row_count)
        shared_.rows.visible[step_ % kSteppedBits][i][warp_] = static_cast<typename Traits::KeyBits>(bits >> lane);
    }
  }
  /// The thread's bits of its rows and of the warp's keys.
  template <typename Own>
  __device__ __forceinline__ cuda::SlabBits visible_to(const cuda::UnitPart& work, const Own& own) const {
    constexpr int kOwnKeys = Traits::kLoadedKeys;
    cuda::SlabBits bits{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = place_of(work, own.first_row(), half).row;
#pragma unroll
      for (int n = 0; n < Own::kKeys / 8; ++n) {
        const uint32_t keys =
            row < 0 ? 0 : shared_.rows.visible[step_ % kSteppedBits][row][(own.first_key() + 8 * n) / kOwnKeys];
        bits.row[half] |= (keys >> (8 * n % kOwnKeys + 2 * cuda::Slab::column_pair()) & 3) << 2 * n;
      }
    }
    return bits;
  }

  /// Adds up the results of the warps that share rows, in ascending order of keys: each half of them to the other.
  template <typename Own>
  __device__ __forceinline__ void add_up(const Own& own, Rows& rows) {
#pragma unroll
    for (int half = Own::kKeyWarps / 2; half > 0; half /= 2) {
      join();  // The rows, or the states before, have been read.
      const int from = own.key_warp() - half;
      if (from >= 0 && from < half) put_state(rows, shared_.states[own.slab() * half + from]);
      join();
      if (from < 0) add_state(shared_.states[own.slab() * half + own.key_warp()], rows);
    }
  }
  using WarpState = typename Shared::WarpState;
  static constexpr int kOutputs = Traits::kVDim / 2;
  __device__ __forceinline__ static void put_state(const Rows& rows, WarpState& to) {
    const uint32_t lane = ptx::lane();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) to[i][lane] = rows.o[i];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      to[kOutputs + half][lane] = rows.state.row_max[half];
      to[kOutputs + 2 + half][lane] = rows.state.sum[half];
    }
  }
  __device__ __forceinline__ void add_state(const WarpState& from, Rows& rows) const {
    const uint32_t lane = ptx::lane();
    float own_factor[2], factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float own_max = rows.state.row_max[half], row_max = from[kOutputs + half][lane],
                  largest = fmaxf(own_max, row_max);
      const auto weight = [&](float x) {
        return x == -INFINITY ? 0.f : ptx::exp2_approx((x - largest) * p_.scale_log2);
      };
      own_factor[half] = weight(own_max);
      factor[half] = weight(row_max);
      rows.state.row_max[half] = largest;
      rows.state.sum[half] =
          __fmaf_rn(from[kOutputs + 2 + half][lane], factor[half], rows.state.sum[half] * own_factor[half]);
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i)
      rows.o[i] = __fmaf_rn(from[i][lane], factor[i / 2 % 2], rows.o[i] * own_factor[i / 2 % 2]);
  }

  __device__ __forceinline__ void store(const cuda::UnitPart& work, int first_row, const Rows& rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = rows.state.row_max[half] * p_.scale_log2, sum = cuda::quad_sum(rows.state.sum[half]);
      const cuda::PackedPlace place = place_of(work, first_row, half);
      if (place.row < 0) continue;
      cuda::RowStore<Element, Traits::kVDim, typename Traits::Columns>{p_, work}.store(place, half, rows.o, largest,
                                                                                       sum);
    }
  }
  /// Merges the unit's partial results if this one is the last.
  __device__ __forceinline__ void finish_unit(const cuda::UnitPart& work) {
    join();
    if (threadIdx.x == 0) cuda::count_partial(p_, work, shared_.is_last_part);
    join();
    if (shared_.is_last_part) cuda::merge_unit<Element, Traits::kVDim, kWarps>(p_, work, warp_);
  }

  const cuda::CachedParams& p_;
  Shared& shared_;
  const int warp_;
  KeyLoader<Traits> loader_;
  int key_warps_ = 1;             ///< warps that share the unit's rows
  bool is_half_slab_ = false;     ///< all rows of the unit are lanes' first
  uint32_t item_ = 0;             ///< the next, counted through
  uint32_t step_ = ~uint32_t{0};  ///< the last whose keys were begun with, counted through
};

}  // namespace flashmask::sm80
