// SPDX-License-Identifier: Apache-2.0

// The tiled CPU kernels. One matrix product serves all of them: a panel of `kWidth` columns, held as vectors,
// is multiplied by a matrix whose elements are broadcast. In the forward a panel's columns are query rows, so that
// the softmax runs down the vectors without a horizontal step; in the backward, over key tiles, they are keys, and for
// dq its own columns. K, V, Q and dO are read once per tile into float32 rows padded to an odd number of cache
// lines, which keeps strided walks from falling into the same cache sets.

// The order of these matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/tile_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "backends/cpu/element_mask.h"
#include "backends/cpu/tile_kernels.h"
#include "common/arithmetic.h"
#include "flashmask/float16.h"

HWY_BEFORE_NAMESPACE();
namespace flashmask::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;
using Words = hn::Rebind<uint32_t, Floats>;
using Vec = hn::Vec<Floats>;
constexpr Floats kFloats;
constexpr Words kWords;

/// Lanes of a vector, columns of a panel, and how many broadcast rows a product handles at once: as many
/// accumulators as the registers hold beside the operands.
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(kFloats));
constexpr int64_t kWidth = 2 * kLanes;
constexpr int kBroadcast = HWY_TARGET <= HWY_AVX3 ? 12 : 6;
static_assert(kTileRows % kWidth == 0 && kTileKeys % kWidth == 0 && kMaxWidth % kWidth == 0);

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Row length of a float32 tile: an odd number of cache lines.
constexpr int64_t padded(int64_t n) { return round_up(n, 16) / 16 % 2 == 1 ? round_up(n, 16) : round_up(n, 16) + 16; }

/// Parts of a thread's scratch, handed out in order; of none (null) they are only counted.
class Scratch {
 public:
  explicit Scratch(float* begin) : begin_(begin) {}
  float* take(int64_t count) {
    float* part = begin_ ? begin_ + taken_ : nullptr;
    taken_ += round_up(count, 16);
    return part;
  }
  int64_t taken() const { return taken_; }

 private:
  float* begin_;
  int64_t taken_ = 0;
};

// --- Matrix products --------------------------------------------------------------------------------

/// Where rows of floats lie: row n begins at `at + n * stride`.
struct Rows {
  float* at;
  int64_t stride;
  Rows columns_from(int64_t c) const { return {at + c, stride}; }
};

/// How element (m, k) of the broadcast matrix lies in its rows.
enum class Order { kRows, kColumns };  // row m, column k; row k, column m

template <int kCount, Order kOrder>
HWY_INLINE void multiply_rows(Rows a, Rows panel, int64_t depth, bool accumulate, Rows result) {
  Vec sum0[kCount], sum1[kCount];
  for (int m = 0; m < kCount; ++m) {
    const float* row = result.at + m * result.stride;  // a caller's dq has any alignment
    sum0[m] = accumulate ? hn::LoadU(kFloats, row) : hn::Zero(kFloats);
    sum1[m] = accumulate ? hn::LoadU(kFloats, row + kLanes) : hn::Zero(kFloats);
  }
  const float* HWY_RESTRICT broadcast = a.at;
  const float* HWY_RESTRICT row = panel.at;
  for (int64_t k = 0; k < depth; ++k, row += panel.stride) {
    const Vec b0 = hn::Load(kFloats, row), b1 = hn::Load(kFloats, row + kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kCount; ++m) {
      const Vec x =
          hn::Set(kFloats, kOrder == Order::kRows ? broadcast[m * a.stride + k] : broadcast[k * a.stride + m]);
      sum0[m] = hn::MulAdd(x, b0, sum0[m]);
      sum1[m] = hn::MulAdd(x, b1, sum1[m]);
    }
  }
  for (int m = 0; m < kCount; ++m) {
    hn::StoreU(sum0[m], kFloats, result.at + m * result.stride);
    hn::StoreU(sum1[m], kFloats, result.at + m * result.stride + kLanes);
  }
}

template <int kCount, Order kOrder>
void multiply_rest(int64_t count, Rows a, Rows panel, int64_t depth, bool accumulate, Rows result) {
  if constexpr (kCount > 0) {
    if (count == kCount) {
      multiply_rows<kCount, kOrder>(a, panel, depth, accumulate, result);
    } else {
      multiply_rest<kCount - 1, kOrder>(count, a, panel, depth, accumulate, result);
    }
  }
}

/// Over the kWidth columns of `panel`: row m of result = (accumulate ? itself : 0) + sum over k < depth of a(m, k) *
/// row k of panel. The order of the sum over k is ascending and the same for every row, so a result never depends on
/// the rows beside it.
template <Order kOrder>
void multiply(int64_t count, Rows a, Rows panel, int64_t depth, bool accumulate, Rows result) {
  const int64_t step = kOrder == Order::kRows ? a.stride : 1;
  for (; count >= kBroadcast; count -= kBroadcast) {
    multiply_rows<kBroadcast, kOrder>(a, panel, depth, accumulate, result);
    a.at += kBroadcast * step;
    result.at += kBroadcast * result.stride;
  }
  multiply_rest<kBroadcast - 1, kOrder>(count, a, panel, depth, accumulate, result);
}

// --- Reading and writing tiles ----------------------------------------------------------------------

HWY_INLINE Vec load_floats(const float* from) { return hn::LoadU(kFloats, from); }
template <typename Half>
HWY_INLINE Vec load_floats(const Half* from) {
  return hn::PromoteTo(kFloats, hn::LoadU(hn::Rebind<Half, Floats>(), from));
}

/// factor * a row of n elements, read in whole vectors.
template <typename Element>
HWY_INLINE void load_row(const Element* from, int64_t n, float factor, float* to) {
  const Vec scale = hn::Set(kFloats, factor);
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) hn::Store(hn::Mul(scale, load_floats(from + c)), kFloats, to + c);
  if (c == n) return;
  alignas(64) Element rest[kLanes] = {};
  std::memcpy(rest, from + c, static_cast<std::size_t>(n - c) * sizeof(Element));
  alignas(64) float promoted[kLanes];
  hn::Store(hn::Mul(scale, load_floats(rest)), kFloats, promoted);
  std::copy(promoted, promoted + (n - c), to + c);
}

template <typename Element>
void load_rows_of(const TensorView& t, int64_t b, int64_t row0, int64_t count, int64_t h, float factor, Rows to) {
  const int64_t dim = t.shape[3], step = t.stride[3];
  for (int64_t s = 0; s < count; ++s, to.at += to.stride) {
    const Element* from = row_at<const Element>(t, b, row0 + s, h);
    alignas(64) Element gathered[256];
    if (step != 1 && dim != 1) {
      for (int64_t c = 0; c < dim; ++c) std::memcpy(gathered + c, from + c * step, sizeof(Element));
      from = gathered;
    }
    load_row(from, dim, factor, to.at);
  }
}

/// factor * rows [row0, row0 + count) of head h as float32. The last dimension may have any stride.
void load_rows(const TensorView& t, int64_t b, int64_t row0, int64_t count, int64_t h, float factor, Rows to) {
  if (t.dtype == DataType::kFloat32) return load_rows_of<float>(t, b, row0, count, h, factor, to);
  if (t.dtype == DataType::kBFloat16) return load_rows_of<hwy::bfloat16_t>(t, b, row0, count, h, factor, to);
  load_rows_of<hwy::float16_t>(t, b, row0, count, h, factor, to);
}

/// The tile's rows as panels: panels[p][c][lane] = rows[p * kWidth + lane][c], zero past the last row.
void make_panels(Rows rows, int64_t count, int64_t tile_rows, int64_t dim, float* panels) {
  for (int64_t p = 0; p < tile_rows / kWidth; ++p, panels += dim * kWidth) {
    for (int64_t lane = 0; lane < kWidth; ++lane) {
      const int64_t row = p * kWidth + lane;
      for (int64_t c = 0; c < dim; ++c) panels[c * kWidth + lane] = row < count ? rows.at[row * rows.stride + c] : 0.0f;
    }
  }
}

void store_row(const float* from, int64_t n, const TensorView& t, int64_t b, int64_t s, int64_t h) {
  if (t.dtype == DataType::kFloat32) {
    std::copy(from, from + n, row_at<float>(t, b, s, h));
  } else if (t.dtype == DataType::kBFloat16) {
    uint16_t* to = row_at<uint16_t>(t, b, s, h);
    for (int64_t c = 0; c < n; ++c) to[c] = float_to_bfloat16(from[c]);
  } else {
    uint16_t* to = row_at<uint16_t>(t, b, s, h);
    for (int64_t c = 0; c < n; ++c) to[c] = float_to_float16(from[c]);
  }
}

/// Writes factor[row] * panels back as rows [row0, row0 + count) of head h.
void store_panels(const float* panels, int64_t count, int64_t dim, const float* factor, const TensorView& t, int64_t b,
                  int64_t row0, int64_t h) {
  float row[256];
  for (int64_t s = 0; s < count; ++s) {
    const float* from = panels + s / kWidth * dim * kWidth + s % kWidth;
    for (int64_t c = 0; c < dim; ++c) row[c] = factor[s] * from[c * kWidth];
    store_row(row, dim, t, b, row0 + s, h);
  }
}

// --- Masks and live tiles ---------------------------------------------------------------------------

/// Where the element masks of one (batch entry, query head) come from.
class MaskSource {
 public:
  MaskSource(const Problem& p, int64_t b, int64_t h) : p_(p), m_(p.mask_index(b, h)) {
    if (p.dense.defined()) {
      dense_ = dense_matrix(p, b, h);
    } else {
      columns_ = flashmask::columns(p.mask, m_ / p.mask.heads(), m_ % p.mask.heads());
    }
  }

  /// Flattened: the mask's rules are made of loops over the keys, which are to be compiled for this instruction set.
  HWY_FLATTEN void load(int64_t r, int64_t c, ElementMask& mask) const {
    const int64_t row0 = r * kTileRows, key0 = c * kTileKeys;
    const int64_t keys = std::min(kTileKeys, p_.seqlen_k - key0);
    if (dense_) {
      mask.load(dense_ + row0 * p_.dense.stride[2] + key0, p_.dense.stride[2], std::min(kTileRows, p_.seqlen_q - row0),
                keys);
    } else {
      mask.load(columns_, row0, key0, keys);
    }
  }

  /// Of the row tiles [first, last): begin(key tile) for every key tile, ascending, that one of them executes, each
  /// followed by visit(row tile, key tile, full) for those that do; in dense mode all, as partial ones.
  template <typename Begin, typename Visit>
  void for_each_key_tile(int64_t first, int64_t last, Begin&& begin, Visit&& visit) const {
    if (dense_) return for_each_dense(first, last, begin, visit);
    for (std::size_t w = 0; w < p_.plan.row_live(m_, first).size(); ++w) {
      uint64_t any = 0;
      for (int64_t r = first; r < last; ++r) any |= p_.plan.row_live(m_, r)[w];
      for (; any; any &= any - 1) {
        const int bit = std::countr_zero(any);
        const int64_t c = static_cast<int64_t>(w) * 64 + bit;
        begin(c);
        for (int64_t r = first; r < last; ++r) {
          if (p_.plan.row_live(m_, r)[w] >> bit & 1) visit(r, c, (p_.plan.row_full(m_, r)[w] >> bit & 1) != 0);
        }
      }
    }
  }
  /// The first key tile from c on that row tile r executes, or one past the last key tile.
  int64_t next_key_tile(int64_t r, int64_t c) const {
    const int64_t key_tiles = ceil_div(p_.seqlen_k, kTileKeys);
    if (dense_ || c >= key_tiles) return c;
    const auto live = p_.plan.row_live(m_, r);
    auto w = static_cast<std::size_t>(c / 64);
    uint64_t bits = live[w] & ~uint64_t{0} << c % 64;
    while (!bits && ++w < live.size()) bits = live[w];
    return bits ? static_cast<int64_t>(w) * 64 + std::countr_zero(bits) : key_tiles;
  }
  template <typename F>
  void for_each_row_tile(int64_t c, F&& f) const {
    if (!dense_) return for_each_live(p_.plan.key_live(m_, c), p_.plan.key_full(m_, c), f);
    for (int64_t r = 0; r < ceil_div(p_.seqlen_q, kTileRows); ++r) f(r, false);
  }

 private:
  template <typename Begin, typename Visit>
  void for_each_dense(int64_t first, int64_t last, Begin&& begin, Visit&& visit) const {
    for (int64_t c = 0; c < ceil_div(p_.seqlen_k, kTileKeys); ++c) {
      begin(c);
      for (int64_t r = first; r < last; ++r) visit(r, c, false);
    }
  }

  const Problem& p_;
  int64_t m_;
  const uint8_t* dense_ = nullptr;
  rules::Columns columns_{};
};

/// The two masks of a panel whose lanes are rows row0.. of a tile, for one key.
struct RowLanes {
  hn::Vec<Words> bit0, bit1;
  const uint32_t* keys;

  RowLanes(const ElementMask& mask, int64_t row0) : keys(mask.rows[row0 / 32]) {
    const auto first = static_cast<uint32_t>(row0 % 32);
    const auto one = hn::Set(kWords, 1u);
    bit0 = hn::Shl(one, hn::Iota(kWords, first));
    bit1 = hn::Shl(one, hn::Iota(kWords, first + static_cast<uint32_t>(kLanes)));
  }
  auto mask0(int64_t key) const { return hn::RebindMask(kFloats, hn::TestBit(hn::Set(kWords, keys[key]), bit0)); }
  auto mask1(int64_t key) const { return hn::RebindMask(kFloats, hn::TestBit(hn::Set(kWords, keys[key]), bit1)); }
};

/// The two masks of a panel whose lanes are keys key0.. of a tile, for one row.
struct KeyLanes {
  const ElementMask& mask;
  int64_t key0;

  auto lanes(int64_t row, int64_t from) const {
    const auto bit = hn::Set(kWords, 1u << (row % 32));
    return hn::RebindMask(kFloats, hn::TestBit(hn::LoadU(kWords, mask.rows[row / 32] + from), bit));
  }
  auto mask0(int64_t row) const { return lanes(row, key0); }
  auto mask1(int64_t row) const { return lanes(row, key0 + kLanes); }
};

// --- Softmax ----------------------------------------------------------------------------------------

/// exp(x) of x <= 88, 0 below -87, NaN of NaN: 2^n * e^r with |r| <= ln 2 / 2 and e^r a polynomial within 4e-9.
/// Highway's own reaches down to the subnormal numbers, at twice the instructions, and turns NaN into 0.
HWY_INLINE Vec exp_up_to_88(Vec x) {
  // 1.5 * 2^23 rounds to an integer; 127 more, and the low bits are the exponent of 2^n.
  const Vec shift = hn::Set(kFloats, 12582912.0f + 127.0f);
  const Vec shifted = hn::MulAdd(x, hn::Set(kFloats, 1.44269504f), shift);
  const Vec n = hn::Sub(shifted, shift);
  // ln 2 in two parts: n times the first is exact.
  const Vec r =
      hn::NegMulAdd(n, hn::Set(kFloats, -2.12194440e-4f), hn::NegMulAdd(n, hn::Set(kFloats, 0.693359375f), x));
  Vec e = hn::MulAdd(r, hn::Set(kFloats, 0.0013814539f), hn::Set(kFloats, 0.0083687454f));
  e = hn::MulAdd(r, e, hn::Set(kFloats, 0.041668389f));
  e = hn::MulAdd(r, e, hn::Set(kFloats, 0.16666521f));
  e = hn::MulAdd(r, e, hn::Set(kFloats, 0.49999994f));
  const Vec one = hn::Set(kFloats, 1.0f);
  e = hn::MulAdd(r, hn::MulAdd(r, e, one), one);
  const Vec power = hn::BitCast(kFloats, hn::ShiftLeft<23>(hn::BitCast(kWords, shifted)));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(kFloats, -87.0f)), hn::Mul(e, power));
}

/// The same of any x: a caller's lse can be far below the scores.
HWY_INLINE Vec exp_of_any(Vec x) {
  return hn::IfThenElse(hn::Gt(x, hn::Set(kFloats, 88.0f)), hn::Set(kFloats, kInf), exp_up_to_88(x));
}

/// Replaces what `lanes` hides of a panel by `value`.
template <typename Lanes>
void hide(const Lanes& lanes, int64_t count, float value, Rows panel) {
  const Vec hidden = hn::Set(kFloats, value);
  for (int64_t n = 0; n < count; ++n, panel.at += panel.stride) {
    hn::Store(hn::IfThenElse(lanes.mask0(n), hn::Load(kFloats, panel.at), hidden), kFloats, panel.at);
    hn::Store(hn::IfThenElse(lanes.mask1(n), hn::Load(kFloats, panel.at + kLanes), hidden), kFloats, panel.at + kLanes);
  }
}

/// One half (a vector of rows) of the online softmax over a panel of scores [keys][kWidth], in place: scores
/// become probabilities relative to the running maximum. Returns the factor for what was summed up before.
HWY_INLINE Vec softmax_half(float* panel, int64_t keys, float* running_max, float* running_sum) {
  const Vec before = hn::Load(kFloats, running_max);
  Vec largest0 = before, largest1 = before, largest2 = before, largest3 = before;
  int64_t j = 0;
  for (; j + 4 <= keys; j += 4) {
    largest0 = hn::Max(largest0, hn::Load(kFloats, panel + j * kWidth));
    largest1 = hn::Max(largest1, hn::Load(kFloats, panel + (j + 1) * kWidth));
    largest2 = hn::Max(largest2, hn::Load(kFloats, panel + (j + 2) * kWidth));
    largest3 = hn::Max(largest3, hn::Load(kFloats, panel + (j + 3) * kWidth));
  }
  for (; j < keys; ++j) largest0 = hn::Max(largest0, hn::Load(kFloats, panel + j * kWidth));
  const Vec largest = hn::Max(hn::Max(largest0, largest1), hn::Max(largest2, largest3));
  // A row that has seen nothing yet subtracts 0, so that its hidden scores stay -inf.
  const Vec reference = hn::IfThenElseZero(hn::Ne(largest, hn::Set(kFloats, -kInf)), largest);
  Vec sum0 = hn::Zero(kFloats), sum1 = hn::Zero(kFloats);
  const auto to_probability = [&](int64_t key) {
    const Vec p = exp_up_to_88(hn::Sub(hn::Load(kFloats, panel + key * kWidth), reference));
    hn::Store(p, kFloats, panel + key * kWidth);
    return p;
  };
  for (j = 0; j + 2 <= keys; j += 2) {
    sum0 = hn::Add(sum0, to_probability(j));
    sum1 = hn::Add(sum1, to_probability(j + 1));
  }
  if (j < keys) sum0 = hn::Add(sum0, to_probability(j));
  // Exactly 1 for a row whose maximum stays, whatever its neighbours do.
  const Vec factor =
      hn::IfThenElse(hn::Eq(before, largest), hn::Set(kFloats, 1.0f), exp_up_to_88(hn::Sub(before, reference)));
  hn::Store(largest, kFloats, running_max);
  hn::Store(hn::MulAdd(hn::Load(kFloats, running_sum), factor, hn::Add(sum0, sum1)), kFloats, running_sum);
  return factor;
}

void rescale(Vec factor0, Vec factor1, int64_t dim, float* panel) {
  const Vec one = hn::Set(kFloats, 1.0f);
  if (hn::AllTrue(kFloats, hn::And(hn::Eq(factor0, one), hn::Eq(factor1, one)))) return;
  for (int64_t c = 0; c < dim; ++c, panel += kWidth) {
    hn::Store(hn::Mul(hn::Load(kFloats, panel), factor0), kFloats, panel);
    hn::Store(hn::Mul(hn::Load(kFloats, panel + kLanes), factor1), kFloats, panel + kLanes);
  }
}

// --- Forward ----------------------------------------------------------------------------------------

struct ForwardScratch {
  Scratch parts;
  Rows k, v;
  float *q, *scores, *out, *largest, *sum;
  ElementMask* mask;

  ForwardScratch(const Problem& p, float* scratch) : parts(scratch) {
    constexpr int64_t kRows = kRowTilesAtOnce * kTileRows;
    k = {parts.take(kTileKeys * padded(p.head_dim)), padded(p.head_dim)};
    v = {parts.take(kTileKeys * padded(p.head_dim_v)), padded(p.head_dim_v)};
    q = parts.take(kRows * p.head_dim);
    scores = parts.take(kTileKeys * kWidth);
    out = parts.take(kRows * p.head_dim_v);
    largest = parts.take(kRows);
    sum = parts.take(kRows);
    mask = reinterpret_cast<ElementMask*>(parts.take(sizeof(ElementMask) / sizeof(float)));
  }
};

/// One panel of rows, whose first is row0 of those at once, against one key tile: FlashMask's algorithm 1, lines 9
/// to 27.
void forward_panel(const Problem& p, const ForwardScratch& s, int64_t row0, int64_t keys, bool full) {
  float* out = s.out + row0 * p.head_dim_v;
  float* largest = s.largest + row0;
  float* sum = s.sum + row0;
  const Rows scores{s.scores, kWidth};
  multiply<Order::kRows>(keys, s.k, {s.q + row0 * p.head_dim, kWidth}, p.head_dim, false, scores);
  if (!full) hide(RowLanes(*s.mask, row0 % kTileRows), keys, -kInf, scores);
  const Vec factor0 = softmax_half(s.scores, keys, largest, sum);
  const Vec factor1 = softmax_half(s.scores + kLanes, keys, largest + kLanes, sum + kLanes);
  rescale(factor0, factor1, p.head_dim_v, out);
  multiply<Order::kColumns>(p.head_dim_v, s.v, scores, keys, true, {out, kWidth});
}

/// lse of the rows, and s.sum becomes what their out is to be multiplied by.
void finish_softmax(const Problem& p, const ForwardScratch& s, int64_t b, int64_t h, int64_t row0, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    const bool empty = s.largest[i] == -kInf;
    static_cast<float*>(p.lse.data)[lse_offset(p.lse, b, h, row0 + i)] =
        empty ? -kInf : s.largest[i] + std::log(s.sum[i]);
    s.sum[i] = empty ? 0.0f : 1.0f / s.sum[i];
  }
}

int64_t forward_rows(const Problem& p, int64_t b, int64_t h, int64_t first, int64_t last, float* scratch) {
  const ForwardScratch s(p, scratch);
  const int64_t row0 = first * kTileRows, tile_rows = (last - first) * kTileRows,
                rows = std::min(tile_rows, p.seqlen_q - row0);
  for (int64_t from = 0; from < rows; from += kTileRows) {
    const int64_t count = std::min(kTileRows, rows - from);
    load_rows(p.q, b, row0 + from, count, h, static_cast<float>(p.softmax_scale), s.k);
    make_panels(s.k, count, kTileRows, p.head_dim, s.q + from * p.head_dim);
  }
  std::fill(s.out, s.out + tile_rows * p.head_dim_v, 0.0f);
  std::fill(s.largest, s.largest + tile_rows, -kInf);
  std::fill(s.sum, s.sum + tile_rows, 0.0f);

  int64_t executed = 0;
  const MaskSource source(p, b, h);
  const auto keys_of = [&](int64_t c) { return std::min(kTileKeys, p.seqlen_k - c * kTileKeys); };
  const auto load_keys = [&](int64_t c) {
    load_rows(p.k, b, c * kTileKeys, keys_of(c), p.kv_head(h), 1.0f, s.k);
    load_rows(p.v, b, c * kTileKeys, keys_of(c), p.kv_head(h), 1.0f, s.v);
  };
  source.for_each_key_tile(first, last, load_keys, [&](int64_t r, int64_t c, bool full) {
    if (!full) source.load(r, c, *s.mask);
    const int64_t begin = (r - first) * kTileRows, end = std::min(begin + kTileRows, rows);
    for (int64_t row = begin; row < end; row += kWidth) forward_panel(p, s, row, keys_of(c), full);
    ++executed;
  });

  finish_softmax(p, s, b, h, row0, rows);
  store_panels(s.out, rows, p.head_dim_v, s.sum, p.out, b, row0, h);
  return executed;
}

// --- Backward ---------------------------------------------------------------------------------------

/// lse of a tile's rows. A row that sees nothing has lse -inf; 0 keeps exp(hidden score - lse) at 0.
void load_lse(const Problem& p, int64_t b, int64_t h, int64_t row0, int64_t rows, float* lse) {
  for (int64_t i = 0; i < rows; ++i) {
    const float x = static_cast<const float*>(p.lse.data)[lse_offset(p.lse, b, h, row0 + i)];
    lse[i] = x == -kInf ? 0.0f : x;
  }
}

struct BackwardScratch {
  Scratch parts;
  Rows k_rows, q, dout, scores, dprobs;
  float *k, *v, *dk, *dv, *lse, *ones;
  ElementMask* mask;

  BackwardScratch(const Problem& p, float* scratch) : parts(scratch) {
    const int64_t stride_k = padded(round_up(p.head_dim, kWidth));
    k_rows = {parts.take(kTileKeys * stride_k), stride_k};
    q = {parts.take(kTileRows * padded(p.head_dim)), padded(p.head_dim)};
    // V passes through here on its way to panels.
    dout = {parts.take(kTileKeys * padded(p.head_dim_v)), padded(p.head_dim_v)};
    scores = {parts.take(kTileRows * padded(kTileKeys)), padded(kTileKeys)};
    dprobs = {parts.take(kTileRows * padded(kTileKeys)), padded(kTileKeys)};
    k = parts.take(kTileKeys * p.head_dim);
    v = parts.take(kTileKeys * p.head_dim_v);
    dk = parts.take(kTileKeys * p.head_dim);
    dv = parts.take(kTileKeys * p.head_dim_v);
    lse = parts.take(kTileRows);
    ones = parts.take(kTileKeys);
    mask = reinterpret_cast<ElementMask*>(parts.take(sizeof(ElementMask) / sizeof(float)));
  }
};

/// delta is summed in the order and with the operations of the product dP = dO V^T: a row that sees a single key has
/// out = v, so dP - delta is exactly 0 there.
void prepare_backward(const Problem& p, const BackwardRows& shared, int64_t b, int64_t h, int64_t r, float* scratch) {
  const BackwardScratch s(p, scratch);
  const int64_t row0 = r * kTileRows, rows = std::min(kTileRows, p.seqlen_q - row0);
  load_rows(p.out, b, row0, rows, h, 1.0f, s.dout);
  make_panels(s.dout, rows, kTileRows, p.head_dim_v, s.v);
  load_rows(p.dout, b, row0, rows, h, 1.0f, s.dout);
  make_panels(s.dout, rows, kTileRows, p.head_dim_v, s.dv);
  for (int64_t lane = 0; lane < kTileRows; lane += kLanes) {
    const int64_t at = lane / kWidth * p.head_dim_v * kWidth + lane % kWidth;
    Vec sum = hn::Zero(kFloats);
    for (int64_t c = 0; c < p.head_dim_v; ++c) {
      sum = hn::MulAdd(hn::Load(kFloats, s.v + at + c * kWidth), hn::Load(kFloats, s.dv + at + c * kWidth), sum);
    }
    hn::Store(sum, kFloats, s.lse + lane);
  }
  float* delta = shared.delta_of(p, b, h, r);
  for (int64_t i = 0; i < rows; ++i) {
    delta[i] = s.lse[i];
    if (p.dlse.defined()) delta[i] -= static_cast<const float*>(p.dlse.data)[lse_offset(p.dlse, b, h, row0 + i)];
  }
  const int64_t stride = BackwardRows::dq_stride(p), columns = round_up(p.head_dim, kWidth);
  for (int64_t i = 0; i < rows; ++i) std::fill_n(shared.dq_of(p, b, h, r) + i * stride, columns, 0.0f);
  *shared.turn_of(p, b, h, r) = static_cast<int32_t>(MaskSource(p, b, h).next_key_tile(r, 0));
}

/// scores become P = exp(scores - lse), dprobs become P * (dP - delta), over a panel whose lanes are keys.
void probabilities_of_keys(const float* lse, const float* delta, int64_t rows, Rows scores, Rows dprobs) {
  for (int64_t i = 0; i < rows; ++i, scores.at += scores.stride, dprobs.at += dprobs.stride) {
    const Vec row_lse = hn::Set(kFloats, lse[i]), row_delta = hn::Set(kFloats, delta[i]);
    for (int64_t at = 0; at < kWidth; at += kLanes) {
      const Vec p = exp_of_any(hn::Sub(hn::Load(kFloats, scores.at + at), row_lse));
      hn::Store(p, kFloats, scores.at + at);
      hn::Store(hn::Mul(p, hn::Sub(hn::Load(kFloats, dprobs.at + at), row_delta)), kFloats, dprobs.at + at);
    }
  }
}

/// One panel of keys against one row tile: FlashMask's algorithm 2, lines 12 to 28, without dq.
void backward_panel(const Problem& p, const BackwardScratch& s, const float* delta, int64_t key0, int64_t rows,
                    bool full) {
  const Rows scores = s.scores.columns_from(key0), dprobs = s.dprobs.columns_from(key0);
  multiply<Order::kRows>(rows, s.q, {s.k + key0 * p.head_dim, kWidth}, p.head_dim, false, scores);
  multiply<Order::kRows>(rows, s.dout, {s.v + key0 * p.head_dim_v, kWidth}, p.head_dim_v, false, dprobs);
  const KeyLanes lanes{*s.mask, key0};
  if (!full) hide(lanes, rows, -kInf, scores);
  probabilities_of_keys(s.lse, delta, rows, scores, dprobs);
  // Hidden again: 0 times a non-finite dP must not get through.
  if (!full) hide(lanes, rows, 0.0f, dprobs);
  multiply<Order::kColumns>(p.head_dim_v, s.dout, scores, rows, true, {s.dv + key0 * p.head_dim_v, kWidth});
  multiply<Order::kColumns>(p.head_dim, s.q, dprobs, rows, true, {s.dk + key0 * p.head_dim, kWidth});
}

/// dq of a row tile += dS K, when the key tiles before c have added theirs: with any threads the same order, the same
/// bits. A thread does its key tiles in ascending order, so the least unfinished one waits for nobody.
void add_to_dq(const Problem& p, const BackwardScratch& s, Rows dq, std::atomic_ref<int32_t> turn, int64_t rows,
               int64_t keys, int64_t c, int64_t next) {
  for (int32_t now = turn.load(std::memory_order_acquire); now != c; now = turn.load(std::memory_order_acquire))
    turn.wait(now);
  for (int64_t at = 0; at < p.head_dim; at += kWidth) {
    multiply<Order::kRows>(rows, s.dprobs, s.k_rows.columns_from(at), keys, true, dq.columns_from(at));
  }
  turn.store(static_cast<int32_t>(next), std::memory_order_release);
  turn.notify_all();
}

int64_t backward_keys(const Problem& p, const BackwardRows& shared, int64_t b, int64_t hk, int64_t c, float* scratch) {
  const BackwardScratch s(p, scratch);
  const int64_t key0 = c * kTileKeys, keys = std::min(kTileKeys, p.seqlen_k - key0);
  std::fill(s.k_rows.at, s.k_rows.at + kTileKeys * s.k_rows.stride, 0.0f);  // the columns past the last are read
  load_rows(p.k, b, key0, keys, hk, 1.0f, s.k_rows);
  make_panels(s.k_rows, keys, kTileKeys, p.head_dim, s.k);
  load_rows(p.v, b, key0, keys, hk, 1.0f, s.dout);
  make_panels(s.dout, keys, kTileKeys, p.head_dim_v, s.v);
  std::fill(s.dk, s.dk + kTileKeys * p.head_dim, 0.0f);
  std::fill(s.dv, s.dv + kTileKeys * p.head_dim_v, 0.0f);

  int64_t executed = 0;
  for (int64_t h = hk * p.group_size(); h < (hk + 1) * p.group_size(); ++h) {
    const MaskSource source(p, b, h);
    source.for_each_row_tile(c, [&](int64_t r, bool full) {
      const int64_t row0 = r * kTileRows, rows = std::min(kTileRows, p.seqlen_q - row0);
      load_rows(p.q, b, row0, rows, h, static_cast<float>(p.softmax_scale), s.q);
      load_rows(p.dout, b, row0, rows, h, 1.0f, s.dout);
      load_lse(p, b, h, row0, rows, s.lse);
      if (!full) source.load(r, c, *s.mask);
      for (int64_t key = 0; key < keys; key += kWidth)
        backward_panel(p, s, shared.delta_of(p, b, h, r), key, rows, full);
      add_to_dq(p, s, {shared.dq_of(p, b, h, r), BackwardRows::dq_stride(p)},
                std::atomic_ref<int32_t>(*shared.turn_of(p, b, h, r)), rows, keys, c, source.next_key_tile(r, c + 1));
      ++executed;
    });
  }
  std::fill(s.ones, s.ones + kTileKeys, 1.0f);
  store_panels(s.dk, keys, p.head_dim, s.ones, p.dk, b, key0, hk);
  store_panels(s.dv, keys, p.head_dim_v, s.ones, p.dv, b, key0, hk);
  return executed;
}

void store_dq(const Problem& p, const BackwardRows& shared, int64_t b, int64_t h, int64_t r) {
  const int64_t row0 = r * kTileRows, rows = std::min(kTileRows, p.seqlen_q - row0);
  const auto scale = static_cast<float>(p.softmax_scale);
  for (int64_t i = 0; i < rows; ++i) {
    float* row = shared.dq_of(p, b, h, r) + i * BackwardRows::dq_stride(p);
    for (int64_t at = 0; at < p.head_dim; ++at) row[at] *= scale;
    if (!BackwardRows::sums_in_dq(p)) store_row(row, p.head_dim, p.dq, b, row0 + i, h);
  }
}

std::size_t scratch_floats(const Problem& p) {
  return static_cast<std::size_t>(
      (p.is_backward ? BackwardScratch(p, nullptr).parts : ForwardScratch(p, nullptr).parts).taken());
}

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashmask::cpu {

HWY_EXPORT(forward_rows);
HWY_EXPORT(prepare_backward);
HWY_EXPORT(backward_keys);
HWY_EXPORT(store_dq);
HWY_EXPORT(scratch_floats);
HWY_EXPORT(target_name);

std::size_t scratch_bytes(const Problem& p) { return HWY_DYNAMIC_DISPATCH(scratch_floats)(p) * sizeof(float); }
int64_t forward_rows(const Problem& p, int64_t b, int64_t h, int64_t first, int64_t last, float* scratch) {
  return HWY_DYNAMIC_DISPATCH(forward_rows)(p, b, h, first, last, scratch);
}
void prepare_backward(const Problem& p, const BackwardRows& shared, int64_t b, int64_t h, int64_t r, float* scratch) {
  HWY_DYNAMIC_DISPATCH(prepare_backward)(p, shared, b, h, r, scratch);
}
int64_t backward_keys(const Problem& p, const BackwardRows& shared, int64_t b, int64_t hk, int64_t c, float* scratch) {
  return HWY_DYNAMIC_DISPATCH(backward_keys)(p, shared, b, hk, c, scratch);
}
void store_dq(const Problem& p, const BackwardRows& shared, int64_t b, int64_t h, int64_t r) {
  HWY_DYNAMIC_DISPATCH(store_dq)(p, shared, b, h, r);
}
const char* simd_target() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace flashmask::cpu
#endif  // HWY_ONCE
