// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backends/cuda/common/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/sm90/forward/params.h"
#include "backends/cuda/sm90/forward/traits.cuh"

namespace flashmask::sm90 {

/// The live key blocks of one row tile, 32 words of each of its row granules at a time: lane l of the producer
/// warp holds word `first_word + l`.
template <int kGranules>
class TileBits {
 public:
  __device__ __forceinline__ TileBits(const ForwardParams& p, uint32_t mask, int32_t row_tile)
      : plan_(p.plan), rows_(min(kGranules, p.plan.row_granules - row_tile * kGranules)) {
    const int64_t row = static_cast<int64_t>(mask) * p.plan.row_granules + row_tile * kGranules;
    at_ = row * p.plan.words_per_row;
  }

  __device__ __forceinline__ void load(int32_t first_word) {
    const int32_t word = first_word + static_cast<int32_t>(threadIdx.x % 32);
    any_ = 0;
#pragma unroll
    for (int g = 0; g < kGranules; ++g) {
      const bool inside = g < rows_ && word < plan_.words_per_row;
      const int64_t at = at_ + static_cast<int64_t>(g) * plan_.words_per_row + word;
      live_[g] = inside ? __ldg(plan_.row_live + at) : 0;
      full_[g] = inside ? __ldg(plan_.row_full + at) : 0;
      any_ |= live_[g];
    }
  }
  /// Live key blocks among the loaded words.
  __device__ __forceinline__ int32_t count() const { return __reduce_add_sync(0xffffffff, __popc(any_)); }

  /// Calls f(key block, live, full), a bit for each granule, the first of its class in a tile's code, for the live key
  /// blocks among the loaded words, ascending.
  template <typename F>
  __device__ __forceinline__ void for_each(int32_t first_word, F&& f) const {
    for (uint32_t words = __ballot_sync(0xffffffff, any_ != 0); words; words &= words - 1) {
      const int lane = __ffs(words) - 1;
      uint32_t live[kGranules], full[kGranules];
#pragma unroll
      for (int g = 0; g < kGranules; ++g) {
        live[g] = __shfl_sync(0xffffffff, live_[g], lane);
        full[g] = __shfl_sync(0xffffffff, full_[g], lane);
      }
      for (uint32_t bits = __shfl_sync(0xffffffff, any_, lane); bits; bits &= bits - 1) {
        const int bit = __ffs(bits) - 1;
        uint32_t live_here = 0, full_here = 0;
#pragma unroll
        for (int g = 0; g < kGranules; ++g) {
          live_here |= (live[g] >> bit & 1) << (Tile::kBits * g);
          full_here |= (full[g] >> bit & 1) << (Tile::kBits * g);
        }
        f((first_word + lane) * 32 + bit, live_here, full_here);
      }
    }
  }

 private:
  const PlanBits& plan_;
  int32_t rows_;
  int64_t at_;
  uint32_t live_[kGranules], full_[kGranules], any_ = 0;
};

/// The producer warp: walks the items, tells the others what to do, and keeps Q, K and V coming. All 32
/// lanes run it; lane 0 speaks to the copy engine.
template <typename Traits>
class Producer {
 public:
  using Shared = SharedStorage<Traits>;
  __device__ __forceinline__ Producer(const ForwardParams& p, Shared& shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    uint32_t next = blockIdx.x;
    while (next < p_.schedule.items) {
      const uint32_t item = next;
      next = claim_next();
      run_item(item);
      next = __shfl_sync(0xffffffff, next, 0);
    }
    announce({0, 0, 0, Item::kEnd}, 0);
    if (leader() && p_.executed) atomicAdd(p_.executed, executed_);
  }

 private:
  __device__ __forceinline__ static bool leader() { return threadIdx.x % 32 == 0; }

  /// Asked for early, so that the counter's answer is there when this item is done. Valid in lane 0.
  __device__ __forceinline__ uint32_t claim_next() const {
    if (!p_.schedule.next || !leader()) return p_.schedule.items;
    return gridDim.x + atomicAdd(p_.schedule.next, 1u);
  }

  __device__ __forceinline__ void run_item(uint32_t n) {
    const ItemPlace place(p_.schedule, p_.heads_q, n);
    const auto head = static_cast<int32_t>(place.head), batch = static_cast<int32_t>(place.batch);
    const auto kv_head = static_cast<int32_t>(place.head / p_.query_heads_per_kv_head);
    const auto produce = [&](int32_t key_block, uint32_t live, uint32_t full) {
      load_tile(key_block, classes_of(key_block, live, full), kv_head, batch);
    };
    if (p_.element_mask == ElementMask::kDense) {
      const auto row = static_cast<int32_t>(place.rank) * Traits::kRows;
      announce({row, head, batch, p_.key_blocks}, p_.dense.place.offset(place.batch, place.head));
      constexpr uint32_t kAllLive = Tile::kFirstBits & ((1u << Tile::kBits * Traits::kConsumers) - 1);
      for (int32_t key_block = 0; key_block < p_.key_blocks; ++key_block) produce(key_block, kAllLive, 0);
      return;
    }
    const uint32_t mask =
        place.batch / p_.plan.sharing.batch_entries * p_.plan.mask_heads + place.head / p_.plan.sharing.heads;
    const int32_t row_tile =
        __ldg(p_.plan.row_tile_order + static_cast<int64_t>(mask) * p_.schedule.tiles + place.rank);
    TileBits<Traits::kConsumers> bits(p_, mask, row_tile);
    int32_t tiles = 0;
    for (int32_t word = (p_.plan.words_per_row - 1) & ~31; word >= 0; word -= 32) {
      bits.load(word);
      tiles += bits.count();
    }
    announce({row_tile * Traits::kRows, head, batch, tiles}, p_.mask.place.offset(place.batch, place.head));
    // The words of the first 32 x 32 key blocks are still at hand.
    for (int32_t word = 0; word < p_.plan.words_per_row; word += 32) {
      if (word > 0) bits.load(word);
      bits.for_each(word, produce);
    }
  }

  /// Hands an item to the others, with its rows of Q if they will be read.
  __device__ __forceinline__ void announce(const Item& item, int64_t mask_offset) {
    delay<Role::kProducer>();
    const uint32_t slot = q_ring_.stage();
    ptx::wait(shared_.q_empty[slot], q_ring_.phase() ^ 1);
    if (leader()) {
      shared_.item[slot] = item;
      shared_.mask_offset[slot] = mask_offset;
      if (item.tiles > 0) {
        ptx::arrive_expect(shared_.q_full[slot], Traits::kQueryBytes);
        ptx::tma_load(shared_.q[slot], p_.q, shared_.q_full[slot], {item.row, 0, item.head, item.batch});
        executed_ += item.tiles;
      } else {
        ptx::arrive(shared_.q_full[slot]);
      }
    }
    q_ring_.advance();
  }

  /// Numbers the partial granules of a tile.
  __device__ __forceinline__ uint32_t classes_of(int32_t key_block, uint32_t live, uint32_t full) {
    // Beyond the last key there is nothing to see: the last block is full only if it is whole.
    if ((key_block + 1) * Traits::kKeys > p_.seqlen_k) full = 0;
    const uint32_t partial = live & ~full, classes = full | partial << 2 | (partial * 3 & numbers_);
    numbers_ = (numbers_ + partial) & 3 * Tile::kFirstBits;
    return classes;
  }

  __device__ __forceinline__ void load_tile(int32_t key_block, uint32_t classes, int32_t kv_head, int32_t batch) {
    const uint32_t stage = kv_ring_.stage();
    const ptx::BoxOrigin at{key_block * Traits::kKeys, 0, kv_head, batch};
    delay<Role::kProducer>();
    ptx::wait(shared_.k_empty[stage], kv_ring_.phase() ^ 1);
    if (leader()) {
      shared_.tile[stage] = Tile::make(key_block, classes);
      ptx::arrive_expect(shared_.k_full[stage], Traits::kKeyBytes);
      ptx::tma_load(shared_.k[stage], p_.k, shared_.k_full[stage], at);
    }
    delay<Role::kProducer>();
    ptx::wait(shared_.v_empty[stage], kv_ring_.phase() ^ 1);
    if (leader()) {
      ptx::arrive_expect(shared_.v_full[stage], Traits::kKeyBytes);
      ptx::tma_load(shared_.v[stage], p_.v, shared_.v_full[stage], at);
    }
    kv_ring_.advance();
  }

  const ForwardParams& p_;
  Shared& shared_;
  ptx::RingPosition<2> q_ring_;
  ptx::RingPosition<Traits::kStages> kv_ring_;
  uint32_t executed_ = 0;
  uint32_t numbers_ = 0;  ///< of the warpgroups' next partial granules, modulo 4, where classes have them
};

}  // namespace flashmask::sm90
