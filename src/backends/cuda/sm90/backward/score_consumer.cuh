// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/row_bias.cuh"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::bwd {

/// The bits of a shared address that an operand's descriptor takes. In a cluster there are others, the CTA's number.
template <typename Traits>
inline constexpr uint32_t kAddressBits = kInCluster<Traits> ? 0x3ffff : ~0u;

/// Common base of the consumers, one warpgroup each: follows the announced tiles and computes the scores of its 64 keys
/// and Traits::kScoreRows rows, key-major, P = exp2(S scale log2(e)) and dS = P dP. Results leave through an Outgoing.
template <typename Traits, typename Outgoing>
class ScoreConsumer {
 public:
  using Shared = SharedStorage<Traits>;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;

  __device__ __forceinline__ ScoreConsumer(const Params& p, Shared& shared, uint32_t warpgroup)
      : p_(p),
        shared_(shared),
        warpgroup_(warpgroup),
        staging_(p, shared, warpgroup),
        base_((ptx::shared_address(&shared) & kAddressBits<Traits>) >> 4),
        warp_(ptx::uniform(threadIdx.x / 32 % 4)),
        score_ones_(kKeepsOnes && !kTermsLast<Traits> && !kHalves<Traits>
                        ? ptx::keep_in_register(bias_ones<Bias::kScore>())
                        : 0),
        gradient_ones_(kKeepsOnes ? ptx::keep_in_register(bias_ones<Bias::kGradient>()) : 0),
        weights_(p) {}

 protected:
  using Scores = typename Traits::Scores;
  using PackedScores = typename Traits::PackedScores;
  using Score = typename Traits::Score;
  using Weights = typename Traits::Weights;
  using Swizzle = ptx::Swizzle128;
  /// Keeps the ones of BiasStep in registers, if there are enough. Left to itself, ptxas computes them in every tile,
  /// and the tile's first product waits for them.
  static constexpr bool kKeepsOnes = kFoldsDelta<Traits> && !Traits::kTile.dq_from_registers;
  /// A matrix in shared memory as an operand: see ptx::MatrixDescriptor. The variable part is added last, in units of
  /// 16 bytes, so that it takes one instruction on the way to a tile's first product.
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

  /// Bits of phases_: the parity that the next wait is for. One register for all of them.
  enum Phase : uint32_t { kWorkTile, kDq, kMask, kExchange = 30, kDs = 31 };  // and one for each stage after kMask
  __device__ __forceinline__ uint32_t advance_phase(uint32_t which) {
    const uint32_t phase = phases_ >> which & 1;
    phases_ ^= 1u << which;
    return phase;
  }

  /// The parity of dq_empty's phase that ends when the staging tiles are free.
  __device__ __forceinline__ uint32_t dq_phase() const { return ~phases_ >> kDq & 1; }

  /// Waits for the next tile and returns its flags. Every lane reads them for itself, which is faster than passing them
  /// on; the slot is not overwritten before all lanes have arrived at scores_full.
  __device__ __forceinline__ uint32_t next_tile() {
    delay<Role::kConsumer>();
    ptx::wait(shared_.q_full[ring_.stage()], ring_.phase());
    return shared_.tile[ring_.stage()].flags;
  }
  __device__ __forceinline__ ptx::RingPosition<Traits::kDoutStages> dout_ring() const { return {ring_.count}; }

  /// Releases the tile's Q and biases. Every lane arrives itself if it has read biases after arriving at scores_full.
  __device__ __forceinline__ void release_rows() const {
    if constexpr (kMaySumIntegers<Traits>) {
      ptx::arrive(shared_.q_empty[ring_.stage()]);
    } else {
      ptx::arrive_once(shared_.q_empty[ring_.stage()]);
    }
  }

  /// Passes a tile of kNothing, and returns the flags of the next one.
  __device__ __forceinline__ uint32_t pass_nothing() {
    ptx::arrive(shared_.scores_full[ring_.stage()]);
    ptx::wait(shared_.dout_full[dout_ring().stage()], dout_ring().phase());
    ptx::arrive_once(shared_.dout_empty[dout_ring().stage()]);
    release_rows();
    ring_.advance();
    return next_tile();
  }
  /// Releases the end's dO buffer if the end is announced more often than dO has stages: the next announcement waits
  /// for it.
  __device__ __forceinline__ void pass_end() const {
    if constexpr (Traits::kDoutStages < Traits::kEndings) {
      ptx::wait(shared_.dout_full[dout_ring().stage()], dout_ring().phase());
      ptx::arrive_once(shared_.dout_empty[dout_ring().stage()]);
    }
  }

  /// The warpgroup's keys and rows of the tile: each has all rows of its own keys, or its own rows of all keys.
  __device__ __forceinline__ uint32_t first_key() const { return Traits::kOwnKeys ? warpgroup_ * 64 : 0; }
  __device__ __forceinline__ uint32_t first_row() const {
    return Traits::kOwnKeys ? 0 : warpgroup_ * Traits::kScoreRows;
  }

  /// The warpgroup's keys of K or V, at `keys`, times its rows, or some of them from `first` on, whose operand is `b`,
  /// with their bias, unless it is added later.
  template <Bias kBias, int kDim, int kValues>
  __device__ __forceinline__ void issue_scores(float (&s)[kValues], uint32_t keys, Operand b,
                                               uint32_t first = 0) const {
    const Operand a = operand(keys + first_key() * Swizzle::kRow);
    uint32_t biases = (base_ << 4) + offsetof(Shared, biases) + ring_.stage() * Traits::kBiasBytes;
    if constexpr (!Traits::kOwnKeys) biases += warpgroup_ * Traits::kScoreRows * sizeof(RowBias);
    biases += first * static_cast<uint32_t>(sizeof(RowBias));
    const auto bias = bias_step<kBias, 2 * kValues>(biases);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      ptx::wgmma_ss<Element, 2 * kValues, ptx::Major::kInner, ptx::Major::kInner>(
          s, a.at(Swizzle::step_along_row(step, Traits::kKeys)), b.at(Swizzle::step_along_row(step, Traits::kRows)),
          step > 0);
    }
    bias.issue(s);
    ptx::wgmma_commit();
  }

  // Scores and dP below are the warpgroup's rows', or some of its rows' from row kFirst on.

  /// Returns the step that adds the rows' biases at `biases`. Scarce registers do not hold the ones for the biases of
  /// two products at a time.
  template <Bias kBias, int kRows>
  __device__ __forceinline__ auto bias_step(uint32_t biases) const {
    if constexpr (kBias == Bias::kScore ? kTermsLast<Traits> : !kFoldsDelta<Traits>) {
      return NoBiasStep();
    } else if constexpr (kHalves<Traits> && kBias == Bias::kScore) {
      return SharedBiasStep<kRows>(biases, (base_ << 4) + static_cast<uint32_t>(offsetof(Shared, halves.ones)));
    } else {
      const uint32_t kept = kBias == Bias::kScore ? score_ones_ : gradient_ones_;
      return BiasStep<kRows>(biases, kKeepsOnes ? kept : bias_ones<kBias>());
    }
  }

  /// Draws which weights of the current tile are dropped.
  __device__ __forceinline__ auto draw_dropped() const {
    if constexpr (Weights::kMayDrop) {
      cuda::DroppedOfKeys<Traits::kScoreRows> dropped{};
      if (!weights_.drops()) return dropped;
      const Tile& tile = shared_.tile[ring_.stage()];
      return weights_.template draw_transposed<Traits::kScoreRows>(
          tile.query.batch, tile.query.head, static_cast<uint32_t>(tile.query.row_tile) * Traits::kRows + first_row(),
          static_cast<uint32_t>(tile.key_tile) * Traits::kKeys + first_key() + warp_ * 16);
    } else {
      return cuda::NoneDropped();
    }
  }

  // With kTermsLast these replace the steps further below, one part of a thread's scores after the other.

  /// True for the library's features, some of which have code of their own.
  static constexpr bool kHasFeatures = std::is_same_v<Score, cuda::FeatureScore<Element>>;
  /// Scores of a part: as many as registers hold with each score's intermediate values.
  static constexpr int kPart = Traits::kOwnKeys && kHasFeatures ? 8 : 16;
  /// Scores per thread whose weights are computed under dP's product. Beside S and dP there are no registers for all of
  /// more than 16, and fewer if an operand of that product is in registers, too.
  static constexpr int kScores = Traits::kScoreRows / 2, kMostEarly = kPart == 16 ? 0 : kFoldsDelta<Traits> ? 16 : 24;
  static constexpr int kEarlyWeights = kScores <= 16 ? kScores : kMostEarly;

  /// How products become scores: as they are, by a softcap alone, or by a softcap, ALiBi or both.
  enum class Transform { kNone, kCap, kAny };
  /// The features of most tiles, as constants: without branches between them, the compiler interleaves the steps of one
  /// part with those of another.
  template <Transform kTransform, bool kDrops, bool kPartial>
  struct KnownFeatures {
    static constexpr bool partial = kPartial;
    template <int kValues, typename MakePlaces>
    __device__ __forceinline__ static void differentiate(const Score& score, float (&s)[kValues],
                                                         float (&slopes)[kValues], const MakePlaces& places) {
      if constexpr (kTransform == Transform::kCap) score.differentiate_cap(s, slopes);
      if constexpr (kTransform == Transform::kAny) score.differentiate(s, slopes, places);
    }
    __device__ __forceinline__ static bool drops(const Weights&) { return kDrops; }
  };
  /// The features of any tile.
  struct AnyFeatures {
    bool partial;
    template <int kValues, typename MakePlaces>
    __device__ __forceinline__ static void differentiate(const Score& score, float (&s)[kValues],
                                                         float (&slopes)[kValues], const MakePlaces& places) {
      if (score.form == cuda::ScoreForm::kOther) score.differentiate(s, slopes, places);
    }
    __device__ __forceinline__ static bool drops(const Weights& weights) {
      if constexpr (Weights::kMayDrop) {
        return weights.drops();
      } else {
        return false;
      }
    }
  };
  /// Calls `run` with the current tile's features and the score policy.
  template <typename Function>
  __device__ __forceinline__ void by_features(bool partial, const Function& run) {
    const QueryTile& query = shared_.tile[ring_.stage()].query;
    const Score score(p_, query.batch, query.head);
    if constexpr (kHasFeatures) {
      const bool transforms = score.form == cuda::ScoreForm::kOther, drops = AnyFeatures::drops(weights_);
      if (score.only_caps() && !drops && !partial) return run(KnownFeatures<Transform::kCap, false, false>(), score);
      if (transforms && !drops && !partial) return run(KnownFeatures<Transform::kAny, false, false>(), score);
      if (transforms && !drops) return run(KnownFeatures<Transform::kAny, false, true>(), score);
      if (!transforms && drops && !partial) return run(KnownFeatures<Transform::kNone, true, false>(), score);
    }
    run(AnyFeatures{partial}, score);
  }

  /// Once S is there, computes the early weights: P as dV takes it, without dropped weights, and in place of S the
  /// factor of dS beside dP, P times the derivative of the score by the product.
  template <int kValues, typename Dropped>
  __device__ __forceinline__ void compute_weights(float (&s)[kValues], bool partial, const Dropped& dropped,
                                                  uint32_t (&p)[kValues / 8][4]) {
    const QueryTile& query = shared_.tile[ring_.stage()].query;
    if (const Score score(p_, query.batch, query.head); score.form == cuda::ScoreForm::kShifted) shift<0>(score, s);
    if constexpr (kEarlyWeights > 0) {
      by_features(partial, [&](const auto& features, const Score& score) __attribute__((always_inline)) {
        compute_weights<0, kEarlyWeights>(features, score, s, dropped, p);
      });
    }
  }
  /// Once dP is there, computes dS, and P of the weights that were not early.
  template <int kValues, typename Dropped>
  __device__ __forceinline__ void compute_score_gradients(float (&s)[kValues], float (&dp)[kValues], bool partial,
                                                          const Dropped& dropped, uint32_t (&p)[kValues / 8][4],
                                                          uint32_t (&ds)[kValues / 8][4]) {
    by_features(partial, [&](const auto& features, const Score& score) __attribute__((always_inline)) {
      compute_score_gradients<0>(features, score, s, dp, dropped, p, ds);
    });
  }
  template <int kFirst, int kValues>
  __device__ __forceinline__ void shift(const Score& score, float (&s)[kValues]) const {
    score.shift(cuda::part_of<kFirst, kPart>(s), [&] { return places_from(2 * kFirst); });
    ptx::pin(cuda::part_of<kFirst, kPart>(s));
    if constexpr (kFirst + kPart < kValues) shift<kFirst + kPart>(score, s);
  }
  template <int kFirst, int kEnd, typename Features, int kValues, typename Dropped>
  __device__ __forceinline__ void compute_weights(const Features& features, const Score& score, float (&s)[kValues],
                                                  const Dropped& dropped, uint32_t (&p)[kValues / 8][4]) {
    compute_part_weights<kFirst>(features, score, cuda::part_of<kFirst, kPart>(s), dropped,
                                 cuda::part_of<kFirst / 8, kPart / 8>(p));
    if constexpr (kFirst + kPart < kEnd) compute_weights<kFirst + kPart, kEnd>(features, score, s, dropped, p);
  }
  template <int kFirst, typename Features, typename Dropped>
  __device__ __forceinline__ void compute_part_weights(const Features& features, const Score& score, float (&s)[kPart],
                                                       const Dropped& dropped, uint32_t (&p)[kPart / 8][4]) {
    // Written out: after a loop over them the compiler leaves the ones of a tile of 128 rows in memory.
    float ones[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    auto& slopes = cuda::part_of<0, kPart>(ones);
    features.differentiate(score, s, slopes, [&] { return places_from(2 * kFirst); });
    add_terms<Bias::kScore>(terms<kFirst>(), s, p_.scale_log2);
    if (features.partial) hide<2 * kFirst>(s);
    exponentiate<0, kPart>(s);
#pragma unroll
    for (int i = 0; i < kPart; ++i) slopes[i] *= s[i];
    leave_out_dropped<kFirst>(features, dropped, s);
    pack(s, p);
#pragma unroll
    for (int i = 0; i < kPart; ++i) s[i] = slopes[i];
  }
  template <int kFirst, typename Features, int kValues, typename Dropped>
  __device__ __forceinline__ void compute_score_gradients(const Features& features, const Score& score,
                                                          float (&s)[kValues], float (&dp)[kValues],
                                                          const Dropped& dropped, uint32_t (&p)[kValues / 8][4],
                                                          uint32_t (&ds)[kValues / 8][4]) {
    if constexpr (kFirst >= kEarlyWeights) compute_weights<kFirst, kFirst + kPart>(features, score, s, dropped, p);
    auto& part = cuda::part_of<kFirst, kPart>(dp);
    leave_out_dropped<kFirst>(features, dropped, part);
    if constexpr (!kFoldsDelta<Traits>) add_terms<Bias::kGradient>(terms<kFirst>(), part, kept_weight_scale());
    multiply_probabilities(cuda::part_of<kFirst, kPart>(s), part, cuda::part_of<kFirst / 8, kPart / 8>(ds));
    if constexpr (kFirst + kPart < kValues)
      compute_score_gradients<kFirst + kPart>(features, score, s, dp, dropped, p, ds);
  }
  /// Places of the thread's scores from row `first` on; scores are key-major.
  __device__ __forceinline__ cuda::Places<cuda::KeySlabSteps> places_from(int first) const {
    const Tile& tile = shared_.tile[ring_.stage()];
    const int lane = static_cast<int>(reload_lane<Traits>());
    return {{tile.query.row_tile * Traits::kRows + static_cast<int>(first_row()) + first + 2 * (lane % 4),
             tile.key_tile * Traits::kKeys + static_cast<int>(first_key() + warp_ * 16) + lane / 4}};
  }
  /// The row terms of the thread's scores from kFirst on.
  template <int kFirst>
  __device__ __forceinline__ const RowBias* terms() const {
    return shared_.biases[ring_.stage()] + first_row() + 2 * (kFirst + reload_lane<Traits>() % 4);
  }
  template <Bias kTerm>
  __device__ __forceinline__ static float read_term(const RowBias& row) {
    if constexpr (kFoldsDelta<Traits>) {
      static_assert(kTerm == Bias::kScore);
      return folded_score_term(row);
    } else {
      return term_of<kTerm>(row);
    }
  }
  /// Multiplies `x` by `factor`, and adds the rows' terms.
  template <Bias kTerm, int kValues>
  __device__ __forceinline__ void add_terms(const RowBias* rows, float (&x)[kValues], float factor) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[i] = __fmaf_rn(x[i], factor, read_term<kTerm>(rows[i / 4 * 8 + i % 2]));
  }
  template <int kFirst, typename Features, typename Dropped, int kValues>
  __device__ __forceinline__ void leave_out_dropped(const Features& features, const Dropped& dropped,
                                                    float (&x)[kValues]) const {
    if constexpr (Weights::kMayDrop) {
      if (features.drops(weights_)) cuda::leave_out<kFirst>(dropped, x);
    }
  }
  __device__ __forceinline__ float kept_weight_scale() const {
    if constexpr (Weights::kMayDrop) {
      return weights_.scale();
    } else {
      return 1;
    }
  }

  /// Multiplies dv by the scale of kept weights.
  template <int kValues>
  __device__ __forceinline__ void scale_kept(float (&dv)[kValues]) const {
    if constexpr (Weights::kMayDrop) {
#pragma unroll
      for (float& value : dv) value *= weights_.scale();
    }
  }

  /// P = exp2(S scale log2(e)), 0 where hidden. The early exponentials stand in both branches, which keeps the compiler
  /// from moving them away from dP's product; it mixes the others with the code after that product.
  template <int kFirst = 0, int kValues>
  __device__ __forceinline__ void compute_probabilities(float (&s)[kValues], bool partial) {
    constexpr int kEarly = Traits::kEarlyScores;
#pragma unroll
    for (float& score : s) score *= p_.scale_log2;
    if (partial) {
      hide<kFirst>(s);
      exponentiate<0, kEarly>(s);
    } else {
      exponentiate<0, kEarly>(s);
    }
    exponentiate<kEarly, kValues>(s);
  }
  template <int kBegin, int kEnd, int kValues>
  __device__ __forceinline__ static void exponentiate(float (&s)[kValues]) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) s[i] = ptx::exp2_approx(s[i]);
  }

  /// Makes the scores of hidden elements -inf: a thread's are of two keys, and of the warpgroup's rows from kFirst on.
  template <int kFirst, int kValues>
  __device__ __forceinline__ void hide(float (&s)[kValues]) {
    delay<Role::kConsumer>();
    if constexpr (kFirst == 0) ptx::wait(shared_.mask_full[ring_.stage()], advance_phase(kMask + ring_.stage()));
    const uint32_t lane = reload_lane<Traits>();
    constexpr int kOfWord = kValues < 16 ? kValues : 16;
    const uint32_t key = first_key() + warp_ * 16 + lane / 4, shift = 8 * (lane % 4) + kFirst % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ColumnBits<Traits::kRows> bits = shared_.mask_bits[ring_.stage()][key + 8 * half];
#pragma unroll
      for (int word = 0; word < kValues / kOfWord; ++word) {
        uint32_t visible;
        if constexpr (Traits::kOwnKeys) {
          visible = bits.word[kFirst / 32 + word] >> shift;
        } else {
          visible = bits.word[warpgroup_] >> shift;
        }
#pragma unroll
        for (int n = 0; n < kOfWord / 2; ++n)
          ptx::hide_unless(visible & 1u << n, s[16 * word + n / 2 * 4 + 2 * half + n % 2]);
      }
    }
  }

  template <int kValues>
  __device__ __forceinline__ static void pack(const float (&s)[kValues], uint32_t (&packed)[kValues / 8][4]) {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) packed[i / 4][i % 4] = ptx::pack<Element>(s[2 * i], s[2 * i + 1]);
  }

  /// dS = P dP.
  template <int kValues>
  __device__ __forceinline__ static void multiply_probabilities(const float (&p)[kValues], const float (&dp)[kValues],
                                                                uint32_t (&ds)[kValues / 8][4]) {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i)
      ds[i / 4][i % 4] = ptx::pack<Element>(p[2 * i] * dp[2 * i], p[2 * i + 1] * dp[2 * i + 1]);
  }

  /// Waits for the other warpgroup. An mbarrier would wake the warps later.
  template <NamedBarrier kFirstBarrier>
  __device__ __forceinline__ void sync_consumers() const {
    static_assert(Traits::kConsumers == 2);
    ptx::named_barrier_arrive(kFirstBarrier + warpgroup_, 256);
    ptx::named_barrier_sync(kFirstBarrier + 1 - warpgroup_, 256);
  }

  /// Puts P or dS in shared memory, query-major, from `to` on.
  template <int kSteps>
  __device__ __forceinline__ void write(const uint32_t (&scores)[kSteps][4], uint32_t to) const {
    const uint32_t row = ptx::lane() % 8 + ptx::lane() / 16 * 8, chunk = warp_ * 2 + ptx::lane() / 8 % 2;
    to += row * Swizzle::kRow;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::stmatrix_x4_transposed(to + step * Swizzle::kStepDownRows + Swizzle::chunk(row, chunk), scores[step][0],
                                  scores[step][1], scores[step][2], scores[step][3]);
    }
  }

  const Params& p_;
  Shared& shared_;
  const uint32_t warpgroup_;
  const Outgoing staging_;
  const uint32_t base_;  ///< shared memory's address, in units of 16 bytes
  const uint32_t warp_;  ///< in the warpgroup
  ptx::RingPosition<Traits::kStages> ring_;
  uint32_t phases_ = 0;
  const uint32_t score_ones_, gradient_ones_;  ///< see bias_ones, where kKeepsOnes
  [[no_unique_address]] const Weights weights_;
};

}  // namespace flashmask::sm90::bwd
