// SPDX-License-Identifier: Apache-2.0

// A split of a sequence under packed rows: few rows over many keys, which are read once, where they lie.

// Included by cached_kernels.cpp, once for each instruction set.
#if defined(FLASHMASK_BACKENDS_CPU_CACHED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLASHMASK_BACKENDS_CPU_CACHED_INL_H_
#undef FLASHMASK_BACKENDS_CPU_CACHED_INL_H_
#else
#define FLASHMASK_BACKENDS_CPU_CACHED_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "backends/cpu/cached_kernels.h"
#include "backends/cpu/few_rows-inl.h"
#include "backends/cpu/score_terms-inl.h"
#include "backends/cpu/stored_keys-inl.h"
#include "cache/visible_keys.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

struct CachedScratch {
  Scratch parts;
  Rows q, keys;  ///< keys: a tile of K, then of V
  float* scores;

  CachedScratch(const CachedProblem& p, float* scratch) : parts(scratch) {
    const int64_t stride = padded(round_up(p.head_dim, kFilled)),
                  widest = padded(round_up(std::max(p.head_dim, p.head_dim_v), kFilled));
    q = {parts.take(PackedRows::kMost * stride), stride};
    keys = {parts.take(kCachedKeys * widest), widest};
    scores = parts.take(PackedRows::kMost * kCachedKeys);
  }
};

template <typename Element>
void load_queries_of(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows, Rows to) {
  for (int64_t n = 0; n < rows.total(); ++n, to.at += to.stride) {
    load_row(cached_row<const Element>(p, p.q, rows.b, sequence.rows(), rows.row(n), rows.head(n)), p.head_dim,
             p.scale(), to.at);
    std::fill(to.at + p.head_dim, to.at + round_up(p.head_dim, kFilled), 0.0f);
    to_pairs(p.cache_dtype, p.head_dim, to.at);
  }
}

void load_queries(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows, Rows to) {
  if (p.dtype == DataType::kFloat32) return load_queries_of<float>(p, sequence, rows, to);
  if (p.dtype == DataType::kBFloat16) return load_queries_of<hwy::bfloat16_t>(p, sequence, rows, to);
  load_queries_of<hwy::float16_t>(p, sequence, rows, to);
}

/// The rows of one head under a tile, in an item's arrays.
struct HeadRows {
  int64_t count;
  const float* q;
  float* scores;
  SoftmaxState state;
};

/// A tile's products with all rows; `keys` has a multiple of kKeysAtOnce.
template <typename Keys>
void multiply_tile(const CachedProblem& p, int64_t q_stride, const HeadRows& rows, const Keys& keys, int64_t count,
                   RowsAhead& ahead) {
  for_rows_of<kRowsAtOnce>(0, rows.count, [&](auto at_once, int64_t n) {
    for (int64_t j = 0; j < count; j += kKeysAtOnce)
      multiply_keys<at_once()>(rows.q + n * q_stride, q_stride, keys, j, round_up(p.head_dim, kWhole),
                               rows.scores + n * kCachedKeys, ahead);
  });
  ahead.finish_pass();
}

template <typename Keys>
void add_tile(const CachedProblem& p, const HeadRows& rows, const Keys& values, int64_t count, const float* factor,
              RowsAhead& ahead) {
  const int64_t stride = rows.state.stride;
  for_rows_of<kRowsAtOnce>(0, rows.count, [&](auto at_once, int64_t n) {
    add_values<at_once()>(rows.scores + n * kCachedKeys, values, round_up(count, kKeysAtOnce),
                          round_up(p.head_dim_v, kWhole), factor + n, rows.state.out + n * stride, stride, ahead);
  });
  ahead.finish_pass();
}

/// True if the products can take a tile's keys where they are stored: few rows read them, of a multiple of kWhole, and
/// all pages are there.
inline bool can_stay_in_place(const StoredKeys& keys, int64_t dim, int64_t rows) {
  return rows <= int64_t{2} * kRowsAtOnce && dim % kWhole == 0 && keys.count % kKeysAtOnce == 0 && keys.all_there;
}

/// Calls f(keys) with a tile's rows of k or v as the products take them.
template <typename F>
void with_keys(const CachedProblem& p, const CachedScratch& s, const StoredKeys& keys, int64_t head, int64_t dim,
               int64_t rows, const F& f) {
  const auto of = [&](auto element) {
    using Element = decltype(element);
    if (can_stay_in_place(keys, dim, rows)) return f(KeysInPlace<Element>{keys, head});
    load_tile_of<Element>(keys, head, dim, s.keys);
    f(LoadedKeys{s.keys});
  };
  switch (p.cache_dtype) {
    case DataType::kFloat8E4M3:
      return of(uint8_t());
    case DataType::kBFloat16:
      return of(hwy::bfloat16_t());
    case DataType::kFloat16:
      return of(hwy::float16_t());
    default:
      return of(float());
  }
}

/// A tile that some row sees under some head, and which keys of it each row does, by head.
struct VisibleTile {
  KeyTile tile;
  StoredKeys k, v;
  uint64_t bits[PackedRows::kMost];
  uint64_t heads;  ///< bits: heads under which some row sees a key
};

/// The tiles of a split that some of the rows see, in ascending order. They lie where they do in the sequence, whatever
/// is hidden before them.
class VisibleTiles {
 public:
  VisibleTiles(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows, int64_t begin, int64_t end)
      : p_(p),
        sequence_(sequence),
        visible_(p, sequence),
        hk_(rows.hk),
        heads_(differs_by_head(p.mask) ? rows.heads : 1),
        first_row_(sequence.first_row() + rows.row(0)),
        row_count_(rows.row_count()) {
    const auto [reach_begin, reach_end] = sequence_.reach(first_row_, row_count_);
    next_ = begin + std::max<int64_t>(reach_begin - begin, 0) / kCachedKeys * kCachedKeys;
    last_ = std::min(end, reach_end);
    end_ = end;
  }

  /// Sets the next one; false if there is none.
  bool next(VisibleTile& tile) {
    for (; next_ < last_; next_ += kCachedKeys) {
      tile.tile = KeyTile(sequence_, next_, end_);
      tile.heads = 0;
      for (int64_t head = 0; head < heads_; ++head) {
        if (visible_.load(tile.tile, hk_ + head, first_row_, row_count_, tile.bits + head * row_count_))
          tile.heads |= heads_ == 1 ? ~uint64_t{0} : uint64_t{1} << head;
      }
      if (!tile.heads) continue;
      tile.k = StoredKeys(p_.cache.k, tile.tile, hk_);
      tile.v = StoredKeys(p_.cache.v, tile.tile, hk_);
      next_ += kCachedKeys;
      return true;
    }
    return false;
  }
  /// The keys that a head's rows see, by row.
  const uint64_t* bits(const VisibleTile& tile, int64_t head) const {
    return tile.bits + (heads_ == 1 ? 0 : head * row_count_);
  }

 private:
  const CachedProblem& p_;
  const Sequence& sequence_;
  const VisibleKeys visible_;
  int64_t hk_, heads_, first_row_, row_count_, next_, last_, end_;
};

/// The softmax of an item's rows over a split's tiles. A tile's K of all heads is worked on while its V is fetched, and
/// its V while the next tile's K is.
class SplitSoftmax {
 public:
  SplitSoftmax(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows, const SoftmaxState& state,
               float* scratch)
      : p_(p), rows_(rows), state_(state), s_(p, scratch), terms_(p, sequence, rows) {
    load_queries(p, sequence, rows, s_.q);
  }

  /// `next`: null after the last.
  template <typename Tiles>
  void add(const Tiles& tiles, const VisibleTile& tile, const VisibleTile* next) {
    RowsAhead ahead(tile.v, rows_.heads, tile.heads);
    for (int64_t head = 0; head < rows_.heads; ++head) {
      if (tile.heads >> head & 1)
        multiply(tile, tiles.bits(tile, head), head, ahead);
      else
        ahead.finish_pass();
    }
    ahead = next ? RowsAhead(next->k, rows_.heads, next->heads) : RowsAhead();
    for (int64_t head = 0; head < rows_.heads; ++head) {
      if (tile.heads >> head & 1)
        add_values_of(tile, head, ahead);
      else
        ahead.finish_pass();
    }
  }

 private:
  HeadRows rows_of(int64_t head) const {
    const int64_t first = head * rows_.count;
    return {rows_.count, s_.q.at + first * s_.q.stride, s_.scores + first * kCachedKeys, state_.from(first)};
  }

  void multiply(const VisibleTile& visible, const uint64_t* bits, int64_t head, RowsAhead& ahead) {
    const KeyTile& tile = visible.tile;
    const HeadRows own = rows_of(head);
    with_keys(p_, s_, visible.k, head, p_.head_dim, own.count,
              [&](const auto& keys) { multiply_tile(p_, s_.q.stride, own, keys, tile.count, ahead); });
    terms_.load(tile, rows_.hk + head);
    for (int64_t n = 0; n < own.count; ++n) {
      float* const scores = own.scores + n * kCachedKeys;
      terms_.transform(head * rows_.count + n, bits[rows_.row(n) - rows_.row(0)], scores);
      factor_[head * rows_.count + n] = softmax_row(scores, own.state.largest[n], own.state.sum[n]);
      terms_.scale_weights(scores);
    }
  }
  void add_values_of(const VisibleTile& visible, int64_t head, RowsAhead& ahead) const {
    const HeadRows own = rows_of(head);
    with_keys(p_, s_, visible.v, head, p_.head_dim_v, own.count, [&](const auto& values) {
      add_tile(p_, own, values, visible.tile.count, factor_ + head * rows_.count, ahead);
    });
  }

  const CachedProblem& p_;
  const PackedRows& rows_;
  const SoftmaxState& state_;
  const CachedScratch s_;
  ScoreTerms terms_;
  float factor_[PackedRows::kMost];
};

/// The softmax of the rows over the tiles of a split, from nothing. `tiles`: as VisibleTiles.
template <typename Tiles>
void split_softmax(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows, Tiles& tiles,
                   const SoftmaxState& state, float* scratch) {
  state.clear(rows.total());
  VisibleTile tile[2];
  if (!tiles.next(tile[0])) return;
  RowsAhead(tile[0].k, rows.heads, tile[0].heads).fetch_all();
  SplitSoftmax softmax(p, sequence, rows, state, scratch);
  bool more = true;
  for (int at = 0; more; at ^= 1) {
    more = tiles.next(tile[at ^ 1]);
    softmax.add(tiles, tile[at], more ? &tile[at ^ 1] : nullptr);
  }
  for (int64_t n = 0; n < rows.total(); ++n) from_pairs(p.cache_dtype, p.head_dim_v, state.out + n * state.stride);
}

void cached_split(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows, int64_t begin, int64_t end,
                  const SoftmaxState& state, float* scratch) {
  VisibleTiles tiles(p, sequence, rows, begin, end);
  split_softmax(p, sequence, rows, tiles, state, scratch);
}

void fold_state(const SoftmaxState& to, const SoftmaxState& split, int64_t rows, int64_t head_dim_v) {
  for (int64_t n = 0; n < rows; ++n) {
    if (split.largest[n] == -kInf) continue;
    const float largest = std::max(to.largest[n], split.largest[n]);
    const float before = std::exp(to.largest[n] - largest), after = std::exp(split.largest[n] - largest);
    to.largest[n] = largest;
    to.sum[n] = to.sum[n] * before + split.sum[n] * after;
    const Vec factor = hn::Set(kFloats, before), scale = hn::Set(kFloats, after);
    float* const out = to.out + n * to.stride;
    const float* const add = split.out + n * split.stride;
    for (int64_t c = 0; c < head_dim_v; c += kLanes) {
      const Vec added = hn::Mul(hn::Load(kFloats, add + c), scale);
      hn::Store(hn::MulAdd(hn::Load(kFloats, out + c), factor, added), kFloats, out + c);
    }
  }
}

int64_t cached_scratch_floats(const CachedProblem& p) { return CachedScratch(p, nullptr).parts.taken(); }

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_CACHED_INL_H_
