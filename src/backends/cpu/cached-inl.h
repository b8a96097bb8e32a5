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
#include "backends/cpu/rows-inl.h"
#include "backends/cpu/scores-inl.h"
#include "backends/cpu/softmax-inl.h"
#include "cache/visible_keys.h"
#include "common/element.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

constexpr int64_t kCachedKeys = KeyTile::kKeys;
/// Rows whose products with four keys the registers hold.
constexpr int kRowsAtOnce = HWY_TARGET <= HWY_AVX3 ? 4 : 2;
constexpr int kKeysAtOnce = 4;

struct CachedScratch {
  Scratch parts;
  Rows q, keys;  ///< keys: a tile of K, then of V
  float* scores;

  CachedScratch(const CachedProblem& p, float* scratch) : parts(scratch) {
    const int64_t widest = padded(std::max(p.head_dim, p.head_dim_v));
    q = {parts.take(PackedRows::kMost * padded(p.head_dim)), padded(p.head_dim)};
    keys = {parts.take(kCachedKeys * widest), widest};
    scores = parts.take(PackedRows::kMost * kCachedKeys);
  }
};

HWY_INLINE float sum_of(Vec x) { return hn::GetLane(hn::SumOfLanes(kFloats, x)); }

/// factor * a row of n elements, and zeros up to the padded end.
template <typename Element>
HWY_INLINE void load_padded(const Element* from, int64_t n, float factor, float* to) {
  load_row(from, n, factor, to);
  std::fill(to + n, to + round_up(n, 16), 0.0f);
}

/// A tile's rows of k or v of one head in the cache.
struct StoredKeys {
  const char* row[kCachedKeys];  ///< null where there is no page
  int64_t count;

  StoredKeys(const TensorView& t, const KeyTile& tile, int64_t hk) : count(tile.count) {
    const auto size = static_cast<int64_t>(element_size(t.dtype));
    for (int64_t n = 0; n < count; ++n) {
      const KeyPlace& at = tile.at[static_cast<std::size_t>(n)];
      row[n] = at.page < 0 ? nullptr
                           : static_cast<const char*>(t.data) +
                                 size * (at.page * t.stride[0] + at.slot * t.stride[1] + hk * t.stride[2]);
    }
  }
  bool is_there(int64_t n) const { return n < count && row[n]; }
};

/// Rows of k or v that are needed next, asked for while others are worked on: pages are anywhere, and no processor
/// guesses the next. Key by key, all heads of each, as they mostly lie.
class RowsAhead {
 public:
  /// None.
  RowsAhead() = default;
  /// `heads` says by bits which heads are read at all.
  RowsAhead(const TensorView& t, const KeyTile& tile, const PackedRows& rows, uint64_t heads)
      : t_(&t),
        tile_(&tile),
        heads_(heads),
        hk_(rows.hk),
        head_count_(rows.heads),
        element_(static_cast<int64_t>(element_size(t.dtype))),
        bytes_(t.shape[3] * element_),
        head_(rows.heads) {}

  /// Rows for each head's pass over a tile.
  int64_t share() const { return tile_ ? tile_->count : 0; }
  /// Asks for the next `count` rows.
  HWY_INLINE void fetch(int64_t count) {
    constexpr int64_t kLine = 64;
    // Level 1 has too few places for lines under way, and for what comes a tile later.
    constexpr int kToL2 = 2;
    asked_ += count;
    for (; count > 0; --count) {
      if (head_ == head_count_) begin_key();
      if (row_ && heads_ >> head_ & 1) {
        for (int64_t n = 0; n < bytes_; n += kLine) __builtin_prefetch(row_ + n, 0, kToL2);
      }
      row_ += row_ ? t_->stride[2] * element_ : 0;
      ++head_;
    }
  }
  /// Asks for what is left of a head's share.
  void finish_share() {
    fetch(share() - asked_);
    asked_ = 0;
  }
  void fetch_all() {
    for (int64_t head = 0; head < head_count_; ++head) finish_share();
  }

 private:
  void begin_key() {
    const KeyPlace& at = tile_->at[static_cast<std::size_t>(key_++)];
    row_ = at.page < 0 ? nullptr
                       : static_cast<const char*>(t_->data) +
                             element_ * (at.page * t_->stride[0] + at.slot * t_->stride[1] + hk_ * t_->stride[2]);
    head_ = 0;
  }

  const TensorView* t_ = nullptr;
  const KeyTile* tile_ = nullptr;
  uint64_t heads_ = 0;
  int64_t hk_ = 0, head_count_ = 0, element_ = 0, bytes_ = 0;
  int64_t asked_ = 0;           ///< how much of a head's share
  int64_t key_ = 0, head_ = 0;  ///< the key after the one whose rows come, and the head of the next
  const char* row_ = nullptr;
};

/// The keys of a tile for one head as rows of floats; zeros where there is no page, and up to a multiple of what the
/// products take at once.
template <typename Element>
void load_tile_of(const StoredKeys& keys, int64_t dim, Rows to) {
  for (int64_t n = 0; n < round_up(keys.count, kKeysAtOnce); ++n, to.at += to.stride) {
    if (keys.is_there(n))
      load_padded(reinterpret_cast<const Element*>(keys.row[n]), dim, 1.0f, to.at);
    else
      std::fill(to.at, to.at + round_up(dim, 16), 0.0f);
  }
}

template <typename Element>
void load_queries_of(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows, Rows to) {
  const int64_t group = p.group_size();
  for (int64_t n = 0; n < rows.total(); ++n, to.at += to.stride) {
    const int64_t packed = rows.first + n % rows.count, hk = rows.hk + n / rows.count;
    load_padded(cached_row<const Element>(p, p.q, rows.b, sequence.rows(), packed / group, hk * group + packed % group),
                p.head_dim, static_cast<float>(p.softmax_scale), to.at);
  }
}

void load_queries(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows, Rows to) {
  if (p.dtype == DataType::kFloat32) return load_queries_of<float>(p, sequence, rows, to);
  if (p.dtype == DataType::kBFloat16) return load_queries_of<hwy::bfloat16_t>(p, sequence, rows, to);
  load_queries_of<hwy::float16_t>(p, sequence, rows, to);
}

#if HWY_TARGET == HWY_SCALAR
/// Writes the sums of the lanes of four vectors.
HWY_INLINE void store_sums(const Vec (&x)[4], float* to) {
  for (int n = 0; n < 4; ++n) to[n] = hn::GetLane(x[n]);
}
#else
/// Sums of blocks of 128 bits: lane by lane, four of them.
template <class D>
HWY_INLINE auto sum_blocks(D d, hn::Vec<D> x) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return x;
  } else {
    const hn::Half<D> half;
    return sum_blocks(half, hn::Add(hn::LowerHalf(half, x), hn::UpperHalf(half, x)));
  }
}

/// Writes the sums of the lanes of four vectors.
HWY_INLINE void store_sums(const Vec (&x)[4], float* to) {
  const hn::Repartition<uint64_t, Floats> pairs;
  const auto halves = [](Vec a, Vec b) {
    return hn::Add(hn::InterleaveLower(kFloats, a, b), hn::InterleaveUpper(kFloats, a, b));
  };
  const auto a = hn::BitCast(pairs, halves(x[0], x[1])), b = hn::BitCast(pairs, halves(x[2], x[3]));
  const Vec four = hn::Add(hn::BitCast(kFloats, hn::InterleaveLower(pairs, a, b)),
                           hn::BitCast(kFloats, hn::InterleaveUpper(pairs, a, b)));
  hn::StoreU(sum_blocks(kFloats, four), hn::CappedTag<float, 4>(), to);
}
#endif

/// A tile's rows as floats in a thread's scratch.
struct LoadedKeys {
  Rows rows;
  HWY_INLINE Vec at(int64_t n, int64_t c) const { return hn::Load(kFloats, rows.at + n * rows.stride + c); }
};
/// A tile's rows where they are stored, all of them whole vectors and there.
template <typename Element>
struct KeysInPlace {
  const StoredKeys& keys;
  HWY_INLINE Vec at(int64_t n, int64_t c) const {
    return load_floats(reinterpret_cast<const Element*>(keys.row[n]) + c);
  }
};

/// Products of kRows rows with kKeys keys from j on. Each is summed up in one order, whatever else is in the tile.
template <int kRows, typename Keys>
HWY_INLINE void multiply_keys(const float* q, int64_t q_stride, const Keys& keys, int64_t j, int64_t depth,
                              float* scores) {
  Vec sum[kRows][kKeysAtOnce];
  for (auto& row : sum) {
    for (Vec& x : row) x = hn::Zero(kFloats);
  }
  for (int64_t c = 0; c < depth; c += kLanes) {
    Vec query[kRows];
    for (int r = 0; r < kRows; ++r) query[r] = hn::Load(kFloats, q + r * q_stride + c);
    for (int n = 0; n < kKeysAtOnce; ++n) {
      const Vec key = keys.at(j + n, c);
      for (int r = 0; r < kRows; ++r) sum[r][n] = hn::MulAdd(query[r], key, sum[r][n]);
    }
  }
  for (int r = 0; r < kRows; ++r) store_sums(sum[r], scores + r * kCachedKeys + j);
}

/// kVectors vectors of columns, from c on, of kRows rows' out = factor * out + weights times the values.
template <int kRows, int kVectors, typename Keys>
HWY_INLINE void add_columns(const float* weights, const Keys& values, int64_t count, int64_t c, const float* factor,
                            float* out, int64_t out_stride) {
  Vec sum[kRows][kVectors];
  for (auto& row : sum) {
    for (Vec& x : row) x = hn::Zero(kFloats);
  }
  for (int64_t j = 0; j < count; ++j) {
    Vec v[kVectors];
    for (int n = 0; n < kVectors; ++n) v[n] = values.at(j, c + n * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = hn::Set(kFloats, weights[r * kCachedKeys + j]);
      for (int n = 0; n < kVectors; ++n) sum[r][n] = hn::MulAdd(weight, v[n], sum[r][n]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const Vec scale = hn::Set(kFloats, factor[r]);
    for (int n = 0; n < kVectors; ++n) {
      float* const to = out + r * out_stride + c + n * kLanes;
      hn::Store(hn::MulAdd(hn::Load(kFloats, to), scale, sum[r][n]), kFloats, to);
    }
  }
}

template <int kRows, typename Keys>
HWY_INLINE void add_values(const float* weights, const Keys& values, int64_t count, int64_t dim, const float* factor,
                           float* out, int64_t out_stride, RowsAhead* ahead) {
  constexpr int kVectors = 4;
  int64_t c = 0;
  for (; c + kVectors * kLanes <= dim; c += kVectors * kLanes) {
    if (ahead) ahead->fetch(kVectors * kLanes * ahead->share() / dim);
    add_columns<kRows, kVectors>(weights, values, count, c, factor, out, out_stride);
  }
  for (; c < dim; c += kLanes) add_columns<kRows, 1>(weights, values, count, c, factor, out, out_stride);
  if (ahead) ahead->finish_share();
}

/// Calls f with the number of rows at once, as a constant, and the first of them.
template <int kRows, typename F>
HWY_INLINE void for_rows_of(int64_t first, int64_t count, const F& f) {
  if constexpr (kRows > 0) {
    for (; count >= kRows; first += kRows, count -= kRows) f(std::integral_constant<int, kRows>(), first);
    for_rows_of<kRows - 1>(first, count, f);
  }
}

/// Lanes of the bits from j on.
HWY_INLINE auto lanes_of(uint64_t bits, int64_t j) {
  const auto word = hn::Set(kWords, static_cast<uint32_t>(bits >> j));
  return hn::RebindMask(kFloats, hn::TestBit(word, hn::Shl(hn::Set(kWords, 1u), hn::Iota(kWords, 0u))));
}

/// Terms that turn products into scores, and the mask.
class ScoreTerms {
 public:
  ScoreTerms(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows)
      : p_(p), sequence_(sequence), rows_(rows) {}

  /// Reads what differs by key of a tile for a key head.
  void load(const KeyTile& tile, int64_t hk) {
    hk_ = hk;
    load_scale(p_.cache.k_scale, tile, k_scale_);
    load_scale(p_.cache.v_scale, tile, v_scale_);
    if (!p_.features.alibi_slopes.defined()) return;
    for (int64_t n = 0; n < tile.count; ++n)
      position_[n] = sequence_.key_position(tile.first + n, tile.at[static_cast<std::size_t>(n)]);
    std::fill(position_ + tile.count, position_ + kCachedKeys, 0);
  }

  /// Scores of a packed row, in place; hidden ones are -inf.
  HWY_INLINE void transform(int64_t packed, uint64_t visible, float* scores) const {
    const auto softcap = static_cast<float>(p_.features.softcap);
    alignas(64) float bias[kCachedKeys];
    const bool has_bias = p_.features.alibi_slopes.defined();
    if (has_bias) load_bias(packed, bias);
    const auto hidden = hn::Set(kFloats, -kInf);
    for (int64_t j = 0; j < kCachedKeys; j += kLanes) {
      Vec score = hn::Load(kFloats, scores + j);
      if (p_.cache.k_scale.defined()) score = hn::Mul(score, hn::Load(kFloats, k_scale_ + j));
      if (softcap != 0) score = capped(score, softcap).score;
      if (has_bias) score = hn::Sub(score, hn::Load(kFloats, bias + j));
      hn::Store(hn::IfThenElse(lanes_of(visible, j), score, hidden), kFloats, scores + j);
    }
  }

  /// Weights become those of stored values.
  HWY_INLINE void scale_weights(float* weights) const {
    if (!p_.cache.v_scale.defined()) return;
    for (int64_t j = 0; j < kCachedKeys; j += kLanes)
      hn::Store(hn::Mul(hn::Load(kFloats, weights + j), hn::Load(kFloats, v_scale_ + j)), kFloats, weights + j);
  }

 private:
  void load_scale(const TensorView& scale, const KeyTile& tile, float* to) const {
    if (!scale.defined()) return;
    std::fill(to, to + kCachedKeys, 1.0f);
    for (int64_t n = 0; n < tile.count; ++n) {
      const KeyPlace& at = tile.at[static_cast<std::size_t>(n)];
      if (at.page >= 0)
        to[n] = static_cast<const float*>(
            scale.data)[at.page * scale.stride[0] + at.slot * scale.stride[1] + hk_ * scale.stride[2]];
    }
  }
  void load_bias(int64_t packed, float* bias) const {
    const TensorView& t = p_.features.alibi_slopes;
    const int64_t h = hk_ * p_.group_size() + packed % p_.group_size();
    const float slope =
        static_cast<const float*>(t.data)[(t.rank == 2 ? rows_.b * t.stride[0] : 0) + h * t.stride[t.rank - 1]];
    const int64_t row = sequence_.first_row() + packed / p_.group_size(),
                  position = row < 0 ? 0 : sequence_.row_position(row);
    for (int64_t n = 0; n < kCachedKeys; ++n) bias[n] = slope * static_cast<float>(std::abs(position - position_[n]));
  }

  const CachedProblem& p_;
  const Sequence& sequence_;
  const PackedRows& rows_;
  int64_t hk_ = 0;
  alignas(64) float k_scale_[kCachedKeys] = {};
  alignas(64) float v_scale_[kCachedKeys] = {};
  int64_t position_[kCachedKeys] = {};
};

/// The online softmax of a packed row over a tile: scores become weights. Returns the factor for what was summed up
/// before.
HWY_INLINE float softmax_row(float* scores, float& running_max, float& running_sum) {
  Vec most = hn::Load(kFloats, scores);
  for (int64_t j = kLanes; j < kCachedKeys; j += kLanes) most = hn::Max(most, hn::Load(kFloats, scores + j));
  const float before = running_max, largest = std::max(before, hn::GetLane(hn::MaxOfLanes(kFloats, most)));
  const Vec reference = hn::Set(kFloats, largest == -kInf ? 0.0f : largest);
  Vec sum = hn::Zero(kFloats);
  for (int64_t j = 0; j < kCachedKeys; j += kLanes) {
    const Vec weight = exp_up_to_88(hn::Sub(hn::Load(kFloats, scores + j), reference));
    hn::Store(weight, kFloats, scores + j);
    sum = hn::Add(sum, weight);
  }
  const float factor = before == largest ? 1.0f : std::exp(before - largest);
  running_max = largest;
  running_sum = running_sum * factor + sum_of(sum);
  return factor;
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
    for (int64_t j = 0; j < count; j += kKeysAtOnce) {
      if (n == 0) ahead.fetch(std::min<int64_t>(ahead.share() - j, kKeysAtOnce));
      multiply_keys<at_once()>(rows.q + n * q_stride, q_stride, keys, j, round_up(p.head_dim, 16),
                               rows.scores + n * kCachedKeys);
    }
  });
  ahead.finish_share();
}

template <typename Keys>
void add_tile(const CachedProblem& p, const HeadRows& rows, const Keys& values, int64_t count, const float* factor,
              RowsAhead& ahead) {
  const int64_t stride = rows.state.stride;
  for_rows_of<kRowsAtOnce>(0, rows.count, [&](auto at_once, int64_t n) {
    add_values<at_once()>(rows.scores + n * kCachedKeys, values, count, round_up(p.head_dim_v, 16), factor + n,
                          rows.state.out + n * stride, stride, n == 0 ? &ahead : nullptr);
  });
}

/// True if the products can take a tile's keys where they are stored: few rows read them, in whole vectors, and all
/// pages are there.
inline bool can_stay_in_place(const StoredKeys& keys, int64_t dim, int64_t rows) {
  if (rows > 2 * kRowsAtOnce || dim % 16 != 0 || keys.count % kKeysAtOnce != 0) return false;
  return std::all_of(keys.row, keys.row + keys.count, [](const char* row) { return row != nullptr; });
}

/// Calls f(keys) with a tile's rows of k or v as the products take them.
template <typename F>
void with_keys(const CachedProblem& p, const CachedScratch& s, const StoredKeys& keys, int64_t dim, int64_t rows,
               const F& f) {
  const auto of = [&](auto element) {
    using Element = decltype(element);
    if (can_stay_in_place(keys, dim, rows)) return f(KeysInPlace<Element>{keys});
    load_tile_of<Element>(keys, dim, s.keys);
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
  uint64_t bits[PackedRows::kMost];
  uint64_t heads;  ///< bits: heads under which some row sees a key
};

/// The tiles of a split that some of the rows see, in ascending order. They lie where they do in the sequence, whatever
/// is hidden before them.
class VisibleTiles {
 public:
  VisibleTiles(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows, int64_t begin, int64_t end)
      : sequence_(sequence),
        visible_(p, sequence),
        hk_(rows.hk),
        heads_(differs_by_head(p.mask) ? rows.heads : 1),
        first_row_(sequence.first_row() + rows.first / p.group_size()),
        row_count_((rows.first + rows.count - 1) / p.group_size() - rows.first / p.group_size() + 1) {
    const auto [reach_begin, reach_end] = visible_.reach(first_row_, row_count_);
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
  static bool differs_by_head(const SequenceMaskView& m) {
    return m.bounds.defined() && m.bounds.shape[m.key_layout == KeyLayout::kPages ? 2 : 1] > 1;
  }

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
  void add(const VisibleTiles& tiles, const VisibleTile& tile, const VisibleTile* next) {
    RowsAhead ahead(p_.cache.v, tile.tile, rows_, tile.heads);
    for (int64_t head = 0; head < rows_.heads; ++head) {
      if (tile.heads >> head & 1)
        multiply(tile, tiles.bits(tile, head), head, ahead);
      else
        ahead.finish_share();
    }
    ahead = next ? RowsAhead(p_.cache.k, next->tile, rows_, next->heads) : RowsAhead();
    for (int64_t head = 0; head < rows_.heads; ++head) {
      if (tile.heads >> head & 1)
        add_values_of(tile, head, ahead);
      else
        ahead.finish_share();
    }
  }

 private:
  HeadRows rows_of(int64_t head) const {
    const int64_t first = head * rows_.count;
    return {rows_.count, s_.q.at + first * s_.q.stride, s_.scores + first * kCachedKeys, state_.from(first)};
  }

  void multiply(const VisibleTile& visible, const uint64_t* bits, int64_t head, RowsAhead& ahead) {
    const int64_t group = p_.group_size(), first_of_bits = rows_.first / group;
    const KeyTile& tile = visible.tile;
    const HeadRows own = rows_of(head);
    const StoredKeys k(p_.cache.k, tile, rows_.hk + head);
    with_keys(p_, s_, k, p_.head_dim, own.count,
              [&](const auto& keys) { multiply_tile(p_, s_.q.stride, own, keys, tile.count, ahead); });
    terms_.load(tile, rows_.hk + head);
    for (int64_t n = 0; n < own.count; ++n) {
      float* const scores = own.scores + n * kCachedKeys;
      terms_.transform(rows_.first + n, bits[(rows_.first + n) / group - first_of_bits], scores);
      factor_[head * rows_.count + n] = softmax_row(scores, own.state.largest[n], own.state.sum[n]);
      terms_.scale_weights(scores);
    }
  }
  void add_values_of(const VisibleTile& visible, int64_t head, RowsAhead& ahead) const {
    const KeyTile& tile = visible.tile;
    const StoredKeys v(p_.cache.v, tile, rows_.hk + head);
    const HeadRows own = rows_of(head);
    with_keys(p_, s_, v, p_.head_dim_v, own.count,
              [&](const auto& values) { add_tile(p_, own, values, tile.count, factor_ + head * rows_.count, ahead); });
  }

  const CachedProblem& p_;
  const PackedRows& rows_;
  const SoftmaxState& state_;
  const CachedScratch s_;
  ScoreTerms terms_;
  float factor_[PackedRows::kMost];
};

void cached_split(const CachedProblem& p, const Sequence& sequence, const PackedRows& rows, int64_t begin, int64_t end,
                  const SoftmaxState& state, float* scratch) {
  std::fill(state.out, state.out + rows.total() * state.stride, 0.0f);
  std::fill(state.largest, state.largest + rows.total(), -kInf);
  std::fill(state.sum, state.sum + rows.total(), 0.0f);
  VisibleTiles tiles(p, sequence, rows, begin, end);
  VisibleTile tile[2];
  if (!tiles.next(tile[0])) return;
  RowsAhead(p.cache.k, tile[0].tile, rows, tile[0].heads).fetch_all();
  SplitSoftmax softmax(p, sequence, rows, state, scratch);
  bool more = true;
  for (int at = 0; more; at ^= 1) {
    more = tiles.next(tile[at ^ 1]);
    softmax.add(tiles, tile[at], more ? &tile[at ^ 1] : nullptr);
  }
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

std::size_t cached_scratch_floats(const CachedProblem& p) {
  return static_cast<std::size_t>(CachedScratch(p, nullptr).parts.taken());
}

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggle of FLASHMASK_BACKENDS_CPU_CACHED_INL_H_
