// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/device/plan_bits.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/backward/params.h"
#include "backends/cuda/sm90/backward/traits.cuh"
#include "backends/cuda/sm90/common/padding.cuh"

namespace flashmask::sm90::bwd {

/// The producer warp: claims work tiles, walks their live tiles, announces them to the other roles, and loads K, V, Q
/// and dout. All 32 lanes run it; lane 0 issues the copies.
template <typename Traits>
class Producer {
 public:
  using Shared = SharedStorage<Traits>;
  using Params = typename Traits::Params;
  __device__ __forceinline__ Producer(const Params& p, Shared& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for (uint32_t n = claim(); n < p_.schedule.work_tiles / kClaimed; n = claim()) run_work_tile(n);
    tile_.flags = Tile::kEnd;
    for (int ending = 0; ending < Traits::kEndings; ++ending) announce();
    if (ptx::is_leader() && p_.executed) atomicAdd(p_.executed, executed_);
  }

 private:
  static constexpr int kOfBlock = Traits::kKeyTilesOfBlock;
  static constexpr int kClaimed = Traits::kPair ? kOfBlock : 1;  ///< work tiles of a claim
  using Blocks = ptx::Blocks<Traits::kOneCopy>;

  /// dO may have fewer stages than all else.
  __device__ __forceinline__ ptx::RingPosition<Traits::kDoutStages> dout_ring() const { return {ring_.count}; }

  __device__ __forceinline__ uint32_t claim()
    requires kInCluster<Traits>
  {
    delay<Role::kProducer>();
    return ptx::cluster_rank() == 0 ? claim_for_pair() : receive_claim();
  }
  __device__ __forceinline__ uint32_t claim() const {
    delay<Role::kProducer>();
    uint32_t n = 0;
    if (ptx::is_leader()) n = atomicAdd(p_.schedule.next, 1u);
    return __shfl_sync(0xffffffff, n, 0);
  }

  /// Claims for both CTAs a block of keys, or a work tile whose rows they share, and sends its number to the second.
  __device__ __forceinline__ uint32_t claim_for_pair() {
    constexpr uint32_t kSecond = 1;
    auto& pair = shared_.pair;
    ptx::wait_cluster(pair.claim_empty, claim_phase_ ^ 1);
    claim_phase_ ^= 1;
    uint32_t n = 0;
    if (ptx::is_leader()) {
      n = atomicAdd(p_.schedule.next, 1u);
      ptx::store_remote(ptx::shared_address_in(&pair.claim, kSecond), n,
                        ptx::shared_address_in(&pair.claim_full, kSecond));
    }
    return __shfl_sync(0xffffffff, n, 0);
  }
  __device__ __forceinline__ uint32_t receive_claim() {
    auto& pair = shared_.pair;
    if (ptx::is_leader()) ptx::arrive_expect(pair.claim_full, sizeof(pair.claim));
    ptx::wait_cluster(pair.claim_full, claim_phase_);
    claim_phase_ ^= 1;
    const uint32_t n = __shfl_sync(0xffffffff, *static_cast<volatile uint32_t*>(&pair.claim), 0);
    if (ptx::is_leader()) ptx::arrive_remote(ptx::shared_address_in(&pair.claim_empty, 0));
    return n;
  }
  /// The place of claim number `n`; a pair's CTA has one of the block's key tiles.
  __device__ __forceinline__ cuda::WorkTilePlace place_of(uint32_t n) const {
    if constexpr (Traits::kPair) {
      cuda::Schedule blocks = p_.schedule;
      blocks.tiles /= kOfBlock;
      cuda::WorkTilePlace place(blocks, p_.head_groups, n);
      place.rank = place.rank * kOfBlock + ptx::cluster_rank();
      return place;
    } else {
      return cuda::WorkTilePlace(p_.schedule, p_.head_groups, n);
    }
  }

  __device__ __forceinline__ void run_work_tile(uint32_t n) {
    const cuda::WorkTilePlace place = place_of(n);
    const uint32_t first_head = place.head * p_.query_heads_per_group;
    tile_.query.batch = place.batch;
    row_padding_ = PaddingStart::after(p_.extents.rows(place.batch, p_.seqlen_q), p_.seqlen_q);
    key_padding_ = PaddingStart::after(p_.extents.keys(place.batch, p_.seqlen_k), p_.seqlen_k);
    tile_.head_group = place.head;
    tile_.key_tile = key_tile(place, first_head);
    if constexpr (Traits::kSplit) {
      // Another launch of the call computes it.
      if (tile_.key_tile < p_.keys.rows.first_tile || tile_.key_tile >= p_.keys.rows.end_tile) return;
    }
    tile_.flags = Tile::kFirst;
    for (uint32_t head = first_head; head < first_head + p_.query_heads_per_group; ++head) run_head(head);
    if (tile_.flags & Tile::kFirst) {
      tile_.flags |= Tile::kNothing;
      announce();
      if constexpr (Traits::kPair) wait_for_keys();  // its dk and dv leave through them
    }
  }

  __device__ __forceinline__ int32_t key_tile(const cuda::WorkTilePlace& place, uint32_t head) const {
    if (p_.dense.is_set || place.batch * p_.head_groups + place.head < p_.first_sorted)
      return static_cast<int32_t>(place.rank);
    const int32_t block =
        __ldg(p_.plan.key_order +
              static_cast<int64_t>(cuda::mask_index(p_.plan, place.batch, head)) * (p_.schedule.tiles / kOfBlock) +
              place.rank / kOfBlock);
    return block * kOfBlock + static_cast<int32_t>(place.rank % kOfBlock);
  }

  /// The live tiles of the work tile under one query head.
  __device__ __forceinline__ void run_head(uint32_t head) {
    tile_.query.head = head;
    if constexpr (kHalves<Traits>) {
      for (int32_t first = 0; first < p_.plan.words_per_key; first += 32) run_reloaded_words(first);
    } else {
      const int64_t column =
          static_cast<int64_t>(cuda::mask_index(p_.plan, tile_.query.batch, head)) * (p_.schedule.tiles / kOfBlock) +
          tile_.key_tile / kOfBlock;
      for (int32_t first = 0; first < p_.plan.words_per_key; first += 32) run_words(column, first);
    }
  }

  /// 32 words of the key tile's bits, one for each lane. Under a dense mask all tiles are live, and none is full. Of
  /// two CTAs that share rows one has the even row tiles and the other the odd ones, live or not: no tile waits for a
  /// count of those before it, and a dense mask divides rows alike.
  __device__ __forceinline__ void run_words(int64_t column, int32_t first) {
    const int32_t own = first + static_cast<int32_t>(threadIdx.x % 32);
    TileBits of_lane;
    if (p_.dense.is_set) {
      of_lane.live = low_bits(p_.row_tiles * Traits::kGranules - own * 32);
    } else if (own < p_.plan.words_per_key) {
      of_lane = read_bits(column, own);
    }
    if constexpr (Traits::kSharesRows) of_lane.live &= kEvenTiles << ptx::cluster_rank() * Traits::kGranules;
    uint32_t own_progress = 0, words = __ballot_sync(0xffffffff, of_lane.live != 0);
    if constexpr (kMayBeAlone) own_progress = first_progress(first, words);
    for (; words; words &= words - 1) {
      const int lane = __ffs(words) - 1;
      const uint32_t alone = alone_among(own_progress);
      // A word ahead, so that no tile waits for it.
      if constexpr (kMayBeAlone) own_progress = first_progress(first, words & (words - 1));
      const uint32_t full = __shfl_sync(0xffffffff, of_lane.full, lane);
      load_tiles(first + lane, __shfl_sync(0xffffffff, of_lane.live, lane), full, alone);
    }
  }
  /// run_words when registers are scarce: words are read again instead of being kept in a lane.
  __device__ __forceinline__ void run_reloaded_words(int32_t first) {
    const uint32_t own_live = reload_bits(first + static_cast<int32_t>(ptx::reload_lane())).live;
    for (uint32_t words = __ballot_sync(0xffffffff, own_live != 0); words; words &= words - 1) {
      const int32_t word = first + __ffs(words) - 1;
      const uint32_t alone = alone_among(word_progress(word));
      const TileBits bits = reload_bits(word);
      load_tiles(word, bits.live, bits.full, alone);
    }
  }

  /// The even row tiles of a word of the plan's bits.
  static constexpr uint32_t kEvenTiles = ~0u / ((1u << Traits::kGranules) + 1);
  /// True if a tile may be alone, see Tile::kAlone.
  static constexpr bool kMayBeAlone = kOfBlock == 1 && Traits::kDqSum != DqSum::kIntegers;
  /// The Progress of the row tiles in a word of the plan's bits, one for each lane. Store warps change it for tiles
  /// that are not alone; any value read for these will do.
  __device__ __forceinline__ uint32_t word_progress(int32_t word) const {
    if constexpr (kMayBeAlone) {
      constexpr uint32_t kTiles = 32 / Traits::kGranules;
      const uint32_t lane = ptx::reload_lane(), own = static_cast<uint32_t>(word) * kTiles + lane;
      if (!sums_integers<Traits>(p_) && lane < kTiles && own < static_cast<uint32_t>(p_.row_tiles))
        return __ldcg(p_.dq_sums.progress + row_tile_index(own));
    }
    return 0;
  }
  /// word_progress for the first of `words`, a bit for each word from `first` on; 0 if there is none.
  __device__ __forceinline__ uint32_t first_progress(int32_t first, uint32_t words) const {
    return words ? word_progress(first + __ffs(words) - 1) : 0;
  }
  /// A bit for each lane whose row tile is alone.
  __device__ __forceinline__ static uint32_t alone_among(uint32_t own_progress) {
    if constexpr (!kMayBeAlone) return 0;
    return __ballot_sync(0xffffffff, own_progress == Progress::kAlone);
  }
  /// Number in [batch, heads_q, row_tiles] of a row tile of the current head.
  __device__ __forceinline__ uint32_t row_tile_index(uint32_t row_tile) const {
    return (tile_.query.batch * p_.heads_q + tile_.query.head) * p_.row_tiles + row_tile;
  }

  struct TileBits {
    uint32_t live = 0, full = 0;
  };
  __device__ __forceinline__ TileBits reload_bits(int32_t word) const {
    if (p_.dense.is_set) return {low_bits(p_.row_tiles * Traits::kGranules - word * 32), 0};
    if (word >= p_.plan.words_per_key) return {};
    // Opaque, so that quotients are not kept either.
    const uint32_t mask = cuda::mask_index(p_.plan, ptx::opaque(tile_.query.batch), ptx::opaque(tile_.query.head)),
                   block = ptx::opaque(static_cast<uint32_t>(tile_.key_tile)) / kOfBlock;
    const int64_t column = static_cast<int64_t>(mask) * (p_.schedule.tiles / kOfBlock) + block;
    return read_bits(column, word);
  }
  __device__ __forceinline__ TileBits read_bits(int64_t column, int32_t word) const {
    TileBits bits;
    const int32_t words = p_.plan.words_per_key;
    cuda::read_granules(p_.plan, [&](const auto& read) {
      bits = {read(p_.plan.key_live, column, words, word), read(p_.plan.key_full, column, words, word)};
    });
    return bits;
  }

  /// The live tiles of word number `word`.
  __device__ __forceinline__ void load_tiles(int32_t word, uint32_t live, uint32_t full, uint32_t alone) {
    constexpr uint32_t kGranuleBits = (1u << Traits::kGranules) - 1;
    while (live) {
      const int bit = (__ffs(live) - 1) / Traits::kGranules * Traits::kGranules;
      live &= ~(kGranuleBits << bit);
      if (alone >> bit / Traits::kGranules & 1) tile_.flags |= Tile::kAlone;
      load_tile((word * 32 + bit) / Traits::kGranules, (full >> bit & kGranuleBits) != kGranuleBits);
    }
  }
  /// A word whose lowest `count` bits are set: none if that is negative, all from 32 on.
  __device__ __forceinline__ static uint32_t low_bits(int32_t count) {
    return count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0;
  }

  /// Announces something without rows; the stage's buffers take part, so that all of its barriers keep step.
  __device__ __forceinline__ void announce() {
    ptx::wait(shared_.dout_empty[dout_ring().stage()], dout_ring().phase() ^ 1);
    write_tile();
    if (ptx::is_leader()) {
      ptx::arrive(shared_.dout_full[dout_ring().stage()]);
      ptx::arrive(shared_.q_full[ring_.stage()]);
    }
    ring_.advance();
  }
  /// An announcement stays until all roles have released the stage.
  __device__ __forceinline__ void write_tile() {
    delay<Role::kProducer>();
    ptx::wait(shared_.q_empty[ring_.stage()], ring_.phase() ^ 1);
    ptx::wait(shared_.scores_full[ring_.stage()], ring_.phase() ^ 1);
    if (ptx::is_leader()) {
      shared_.tile[ring_.stage()] = tile_;
      ptx::arrive(shared_.tile_full[ring_.stage()]);
    }
  }

  __device__ __forceinline__ void load_tile(int32_t row_tile, bool partial) {
    // Keys past the last are hidden.
    partial |= (tile_.key_tile + 1) * Traits::kKeys > p_.seqlen_k;
    tile_.query.row_tile = row_tile;
    tile_.query.index = row_tile_index(row_tile);
    if (partial) tile_.flags |= Tile::kPartial;
    write_tile();
    const uint32_t stage = ring_.stage();
    const ptx::BoxOrigin at{row_tile * Traits::kRows, 0, static_cast<int32_t>(tile_.query.head),
                            static_cast<int32_t>(tile_.query.batch)};
    const int64_t row = static_cast<int64_t>(tile_.query.index) * Traits::kRows;
    const int32_t padding = row_padding_.in_tile(at.row);
    uint64_t& q_copied = padding < Traits::kRows ? shared_.padded_full : shared_.q_full[stage];
    if (ptx::is_leader()) {
      ptx::arrive_expect(q_copied, Traits::kQBytes + Traits::kBiasBytes);
      Blocks::template load<Traits::kQkColumns / 64, Traits::kRows>(shared_.q[stage], p_.q, q_copied, at);
      ptx::bulk_load(shared_.biases[stage], p_.biases + row, Traits::kBiasBytes, q_copied);
    }
    if (padding < Traits::kRows) {
      wait_for_padded();
      clear_padding<Traits::kRows, Traits::kQkColumns / 64>(shared_.q[stage], padding);
      ptx::arrive_once(shared_.q_full[stage]);
    }
    delay<Role::kProducer>();
    const uint32_t dout_stage = dout_ring().stage();
    ptx::wait(shared_.dout_empty[dout_stage], dout_ring().phase() ^ 1);
    uint64_t& dout_copied = padding < Traits::kRows ? shared_.padded_full : shared_.dout_full[dout_stage];
    const bool has_values = tile_.flags & Tile::kFirst && load_keys(dout_copied);
    if (ptx::is_leader()) {
      ptx::arrive_expect(dout_copied, Traits::kDoutBytes + (has_values ? Traits::kVBytes : 0));
      Blocks::template load<Traits::kVColumns / 64, Traits::kRows>(shared_.dout[dout_stage], p_.dout, dout_copied, at);
    }
    if (padding < Traits::kRows) {
      wait_for_padded();
      clear_padding<Traits::kRows, Traits::kVColumns / 64>(shared_.dout[dout_stage], padding);
      ptx::arrive_once(shared_.dout_full[dout_stage]);
    }
    tile_.flags = 0;
    // A block's key tiles share their tiles, and count as one.
    if (tile_.key_tile % kOfBlock == 0) ++executed_;
    ring_.advance();
  }

  /// Loads the work tile's K and V once the consumers have released the previous work tile's, whose end they learn of
  /// from this one's first tile. V arrives with that tile's dout, at `dout_copied`, so that S does not wait for it,
  /// unless the tile has padding, which is zeroed: then false.
  __device__ __forceinline__ bool load_keys(uint64_t& dout_copied) {
    const uint32_t kv_head = Traits::kSplit ? tile_.head_group / p_.splits : tile_.head_group;
    const ptx::BoxOrigin at{tile_.key_tile * Traits::kKeys, 0, static_cast<int32_t>(kv_head),
                            static_cast<int32_t>(tile_.query.batch)};
    wait_for_keys();
    const ptx::BoxOrigin others = other_keys(at);
    const int32_t padding = key_padding_.in_tile(at.row), others_padding = key_padding_.in_tile(others.row);
    const bool is_padded = padding < Traits::kKeys || (Traits::kPair && others_padding < Traits::kKeys);
    uint64_t &k_copied = is_padded ? shared_.padded_full : shared_.k_full,
             &v_copied = is_padded ? shared_.padded_full : dout_copied;
    if (ptx::is_leader()) {
      ptx::arrive_expect(k_copied, Traits::kKBytes + kOtherKBytes + (is_padded ? Traits::kVBytes : 0));
      if constexpr (Traits::kPair)
        Blocks::template load<kOtherBlocks, Traits::kKeys>(shared_.other.k, p_.k, k_copied, others);
      Blocks::template load<Traits::kQkColumns / 64, Traits::kKeys>(shared_.k, p_.k, k_copied, at);
      Blocks::template load<Traits::kVColumns / 64, Traits::kKeys>(shared_.v, p_.v, v_copied, at);
    }
    if (is_padded) {
      wait_for_padded();
      clear_padding<Traits::kKeys, Traits::kQkColumns / 64>(shared_.k, padding);
      clear_padding<Traits::kKeys, Traits::kVColumns / 64>(shared_.v, padding);
      if constexpr (Traits::kPair) clear_padding<Traits::kKeys, kOtherBlocks>(shared_.other.k, others_padding);
      ptx::arrive_once(shared_.k_full);
    }
    return !is_padded;
  }
  /// Blocks of 64 columns that a pair's CTA has of the other one's keys, and their origin; see PairShare.
  static constexpr int kOtherBlocks = Traits::kPair ? PairShare<Traits>::kBlocks : 0;
  static constexpr uint32_t kOtherKBytes = kOtherBlocks * ptx::Swizzle128::block(Traits::kKeys);
  __device__ __forceinline__ static ptx::BoxOrigin other_keys(const ptx::BoxOrigin& own) {
    if constexpr (Traits::kPair) {
      const auto rank = static_cast<int32_t>(ptx::cluster_rank());
      return {own.row + (rank == 0 ? Traits::kKeys : -Traits::kKeys), rank * PairShare<Traits>::kFirst, own.head,
              own.batch};
    } else {
      return own;
    }
  }
  /// Waits until the consumers have released the previous work tile's K and V.
  __device__ __forceinline__ void wait_for_keys() {
    delay<Role::kProducer>();
    ptx::wait(shared_.kv_empty, kv_phase_ ^ 1);
    kv_phase_ ^= 1;
  }
  __device__ __forceinline__ void wait_for_padded() {
    ptx::wait(shared_.padded_full, padded_phase_);
    padded_phase_ ^= 1;
  }

  const Params& p_;
  Shared& shared_;
  Tile tile_{};
  ptx::RingPosition<Traits::kStages> ring_;
  uint32_t kv_phase_ = 0, padded_phase_ = 0, claim_phase_ = 0;
  PaddingStart row_padding_, key_padding_;  ///< the work tile's batch entry's
  uint32_t executed_ = 0;
};

}  // namespace flashmask::sm90::bwd
