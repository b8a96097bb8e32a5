// SPDX-License-Identifier: Apache-2.0
#pragma once

// The hash of a mask's contents, the same on host and device: a sum over all stored values, so that it does
// not depend on which thread adds which value when, and the shapes and the band on top.

#include <cstdint>
#include <span>

#include "flashmask/mask.h"
#include "mask/rules.h"

namespace flashmask::content_hash {

/// Array that stores a value.
enum class Source : uint64_t { kLts, kLte, kUts, kUte, kBlockMask, kQPos, kKPos, kIntervalLists };

/// 2^64 divided by the golden ratio: multiples of it stay far apart.
inline constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

/// A bijection in which every bit of the argument reaches every bit of the result (the finaliser of
/// splitmix64; Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
FLASHMASK_RULE uint64_t scramble(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Hash of the value at `position` of a vector, the block mask or the positions. `position` counts elements in the
/// order [batch, heads, ...] of the array's own shape, whatever its strides.
FLASHMASK_RULE uint64_t element(Source source, int64_t position, uint32_t value) {
  return scramble((static_cast<uint64_t>(position) * 8 + static_cast<uint64_t>(source) + 1) * kGolden + value);
}

/// Hash of everything but the elements: the shapes, the band, which vectors there are.
inline uint64_t frame(const MaskView& view) {
  uint64_t present = 0;
  for (const int32_t* vector : {view.lts, view.lte, view.uts, view.ute})
    present = present * 2 + (vector && view.seqlen_k > 0);
  present = present * 2 + (view.block_mask && view.seqlen_q > 0 && view.seqlen_k > 0);
  uint64_t hash = scramble(present + 1);
  for (const int64_t number : {view.seqlen_q, view.seqlen_k, int64_t{view.diagonal_lo}, int64_t{view.diagonal_hi},
                               view.bounds_batch, view.bounds_heads, view.block_batch, view.block_heads}) {
    hash = scramble(hash * kGolden + static_cast<uint64_t>(number));
  }
  if (view.column_ptr) hash = scramble(hash * kGolden + 1);
  if (!view.q_pos) return hash;
  for (const int64_t number : {view.q_pos_batch, view.k_pos_batch})
    hash = scramble(hash * kGolden + static_cast<uint64_t>(number));
  return hash;
}

/// The hash, given the sum of all elements.
FLASHMASK_RULE uint64_t finish(uint64_t frame, uint64_t elements) { return scramble(frame + elements); }

/// Sum over the elements of an array in host memory, value_at(0) to value_at(count - 1).
template <typename Values>
uint64_t sum(Source source, int64_t count, const Values& value_at) {
  uint64_t elements = 0;
  for (int64_t at = 0; at < count; ++at) elements += element(source, at, static_cast<uint32_t>(value_at(at)));
  return elements;
}

/// Sum over the elements of interval lists, column_ptr first.
uint64_t of_lists(std::span<const int32_t> column_ptr, std::span<const int32_t> intervals);

/// The hash of a mask in host memory. Every nonzero byte of its block mask counts as 1, as in a Mask made from tensors.
uint64_t of(const MaskView& view);

}  // namespace flashmask::content_hash
