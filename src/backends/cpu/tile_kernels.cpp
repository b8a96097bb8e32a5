// SPDX-License-Identifier: Apache-2.0

// The tiled CPU kernels. One matrix product serves all of them: a panel of `kWidth` columns, held as vectors,
// is multiplied by a matrix whose elements are broadcast. In the passes over query rows a panel's columns are
// query rows, so that the softmax runs down the vectors without a horizontal step; in the pass over key tiles
// they are keys. K, V, Q and dO are read once per tile into float32 rows padded to an odd number of cache
// lines, which keeps strided walks from falling into the same cache sets.

// The order of these matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/tile_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include <cmath>
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
static_assert(kTileRows % kWidth == 0 && kTileKeys % kWidth == 0 && 32 % kWidth == 0);

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

/// How element (m, k) of the broadcast matrix lies in memory.
enum class Order { kRows, kColumns };  // a[m * stride + k], a[k * stride + m]

template <int kRows, Order kOrder>
HWY_INLINE void multiply_rows(const float* HWY_RESTRICT a, int64_t stride, const float* HWY_RESTRICT panel, int64_t depth, bool accumulate,
                              float* HWY_RESTRICT result) {
  Vec sum0[kRows], sum1[kRows];
  for (int m = 0; m < kRows; ++m) {
    sum0[m] = accumulate ? hn::Load(kFloats, result + m * kWidth) : hn::Zero(kFloats);
    sum1[m] = accumulate ? hn::Load(kFloats, result + m * kWidth + kLanes) : hn::Zero(kFloats);
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vec b0 = hn::Load(kFloats, panel + k * kWidth);
    const Vec b1 = hn::Load(kFloats, panel + k * kWidth + kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Vec x = hn::Set(kFloats, kOrder == Order::kRows ? a[m * stride + k] : a[k * stride + m]);
      sum0[m] = hn::MulAdd(x, b0, sum0[m]);
      sum1[m] = hn::MulAdd(x, b1, sum1[m]);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    hn::Store(sum0[m], kFloats, result + m * kWidth);
    hn::Store(sum1[m], kFloats, result + m * kWidth + kLanes);
  }
}

template <int kRows, Order kOrder>
void multiply_rest(int64_t rows, const float* a, int64_t stride, const float* panel, int64_t depth, bool accumulate, float* result) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      multiply_rows<kRows, kOrder>(a, stride, panel, depth, accumulate, result);
    } else {
      multiply_rest<kRows - 1, kOrder>(rows, a, stride, panel, depth, accumulate, result);
    }
  }
}

/// result[m][kWidth] = (accumulate ? result : 0) + sum over k < depth of a(m, k) * panel[k][kWidth]. The order of
/// the sum over k is ascending and the same for every row, so a result never depends on the rows beside it.
template <Order kOrder>
void multiply(int64_t rows, const float* a, int64_t stride, const float* panel, int64_t depth, bool accumulate, float* result) {
  int64_t m = 0;
  for (; m + kBroadcast <= rows; m += kBroadcast) {
    multiply_rows<kBroadcast, kOrder>(a + (kOrder == Order::kRows ? m * stride : m), stride, panel, depth, accumulate, result + m * kWidth);
  }
  multiply_rest<kBroadcast - 1, kOrder>(rows - m, a + (kOrder == Order::kRows ? m * stride : m), stride, panel, depth, accumulate,
                                        result + m * kWidth);
}

// --- Reading and writing tiles ----------------------------------------------------------------------

HWY_INLINE void load_row(const float* from, int64_t n, float* to) { std::copy(from, from + n, to); }

template <typename Half>
HWY_INLINE void load_half_row(const uint16_t* from, int64_t n, float* to) {
  const hn::Rebind<Half, Floats> halves;
  int64_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    hn::StoreU(hn::PromoteTo(kFloats, hn::LoadU(halves, reinterpret_cast<const Half*>(from + c))), kFloats, to + c);
  }
  if (c == n) return;
  alignas(64) uint16_t rest[kLanes] = {};
  alignas(64) float promoted[kLanes];
  std::copy(from + c, from + n, rest);
  hn::Store(hn::PromoteTo(kFloats, hn::Load(halves, reinterpret_cast<const Half*>(rest))), kFloats, promoted);
  std::copy(promoted, promoted + (n - c), to + c);
}

/// Rows [row0, row0 + count) of head h as float32, `stride` apart. The last dimension may have any stride.
void load_rows(const TensorView& t, int64_t b, int64_t row0, int64_t count, int64_t h, float* to, int64_t stride) {
  const int64_t dim = t.shape[3];
  const bool contiguous = t.stride[3] == 1 || dim == 1;
  for (int64_t s = 0; s < count; ++s, to += stride) {
    if (t.dtype == DataType::kFloat32) {
      const float* from = row_at<const float>(t, b, row0 + s, h);
      if (contiguous) {
        load_row(from, dim, to);
      } else {
        for (int64_t c = 0; c < dim; ++c) to[c] = from[c * t.stride[3]];
      }
      continue;
    }
    const uint16_t* from = row_at<const uint16_t>(t, b, row0 + s, h);
    uint16_t gathered[256];
    if (!contiguous) {
      for (int64_t c = 0; c < dim; ++c) gathered[c] = from[c * t.stride[3]];
      from = gathered;
    }
    if (t.dtype == DataType::kBFloat16) {
      load_half_row<hwy::bfloat16_t>(from, dim, to);
    } else {
      load_half_row<hwy::float16_t>(from, dim, to);
    }
  }
}

/// The tile's rows as panels: panels[p][c][lane] = factor * rows[p * kWidth + lane][c], zero past the last row.
void make_panels(const float* rows, int64_t stride, int64_t count, int64_t tile_rows, int64_t dim, float factor, float* panels) {
  for (int64_t p = 0; p < tile_rows / kWidth; ++p, panels += dim * kWidth) {
    for (int64_t lane = 0; lane < kWidth; ++lane) {
      const int64_t row = p * kWidth + lane;
      for (int64_t c = 0; c < dim; ++c) panels[c * kWidth + lane] = row < count ? factor * rows[row * stride + c] : 0.0f;
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
void store_panels(const float* panels, int64_t count, int64_t dim, const float* factor, const TensorView& t, int64_t b, int64_t row0,
                  int64_t h) {
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
      columns_ = flashmask::columns(p.mask.view(), m_ / p.mask.heads(), m_ % p.mask.heads());
    }
  }

  void load(int64_t r, int64_t c, ElementMask& mask) const {
    const int64_t row0 = r * kTileRows, key0 = c * kTileKeys;
    const int64_t keys = std::min(kTileKeys, p_.seqlen_k - key0);
    if (dense_) {
      mask.load(dense_ + row0 * p_.dense.stride[2] + key0, p_.dense.stride[2], std::min(kTileRows, p_.seqlen_q - row0), keys);
    } else {
      mask.load(columns_, row0, key0, keys);
    }
  }

  /// f(key tile, full) for the tiles to execute in row tile r, ascending: all of them, as partial ones, in dense
  /// mode.
  template <typename F>
  void for_each_key_tile(int64_t r, F&& f) const {
    if (!dense_) return for_each_live(p_.plan.row_live(m_, r), p_.plan.row_full(m_, r), f);
    for (int64_t c = 0; c < ceil_div(p_.seqlen_k, kTileKeys); ++c) f(c, false);
  }
  template <typename F>
  void for_each_row_tile(int64_t c, F&& f) const {
    if (!dense_) return for_each_live(p_.plan.key_live(m_, c), p_.plan.key_full(m_, c), f);
    for (int64_t r = 0; r < ceil_div(p_.seqlen_q, kTileRows); ++r) f(r, false);
  }

 private:
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

/// exp, with NaN kept: Highway's turns it into 0.
HWY_INLINE Vec exp_keeping_nan(Vec x) { return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(kFloats, x)); }

/// Replaces what `lanes` hides of a panel by `value`.
template <typename Lanes>
void hide(const Lanes& lanes, int64_t count, float value, float* panel) {
  const Vec hidden = hn::Set(kFloats, value);
  for (int64_t n = 0; n < count; ++n, panel += kWidth) {
    hn::Store(hn::IfThenElse(lanes.mask0(n), hn::Load(kFloats, panel), hidden), kFloats, panel);
    hn::Store(hn::IfThenElse(lanes.mask1(n), hn::Load(kFloats, panel + kLanes), hidden), kFloats, panel + kLanes);
  }
}

/// One half (a vector of rows) of the online softmax over a panel of scores [keys][kWidth], in place: scores
/// become probabilities relative to the running maximum. Returns the factor for what was summed up before.
HWY_INLINE Vec softmax_half(float* panel, int64_t keys, float* running_max, float* running_sum) {
  Vec largest0 = hn::Load(kFloats, running_max), largest1 = largest0;
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2) {
    largest0 = hn::Max(largest0, hn::Load(kFloats, panel + j * kWidth));
    largest1 = hn::Max(largest1, hn::Load(kFloats, panel + (j + 1) * kWidth));
  }
  if (j < keys) largest0 = hn::Max(largest0, hn::Load(kFloats, panel + j * kWidth));
  const Vec before = hn::Load(kFloats, running_max), largest = hn::Max(largest0, largest1);
  // A row that has seen nothing yet subtracts 0, so that its hidden scores stay -inf.
  const Vec reference = hn::IfThenElseZero(hn::Ne(largest, hn::Set(kFloats, -kInf)), largest);
  Vec sum0 = hn::Zero(kFloats), sum1 = hn::Zero(kFloats);
  const auto to_probability = [&](int64_t key) {
    const Vec p = exp_keeping_nan(hn::Sub(hn::Load(kFloats, panel + key * kWidth), reference));
    hn::Store(p, kFloats, panel + key * kWidth);
    return p;
  };
  for (j = 0; j + 2 <= keys; j += 2) {
    sum0 = hn::Add(sum0, to_probability(j));
    sum1 = hn::Add(sum1, to_probability(j + 1));
  }
  if (j < keys) sum0 = hn::Add(sum0, to_probability(j));
  // Exactly 1 for a row whose maximum stays, whatever its neighbours do.
  const Vec factor = hn::IfThenElse(hn::Eq(before, largest), hn::Set(kFloats, 1.0f), exp_keeping_nan(hn::Sub(before, reference)));
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
  int64_t stride_k, stride_v;
  float *q, *k, *v, *scores, *out, *largest, *sum;
  ElementMask* mask;

  ForwardScratch(const Problem& p, float* scratch) : parts(scratch), stride_k(padded(p.head_dim)), stride_v(padded(p.head_dim_v)) {
    q = parts.take(kTileRows * p.head_dim);
    k = parts.take(kTileKeys * stride_k);
    v = parts.take(kTileKeys * stride_v);
    scores = parts.take(kTileKeys * kWidth);
    out = parts.take(kTileRows * p.head_dim_v);
    largest = parts.take(kTileRows);
    sum = parts.take(kTileRows);
    mask = reinterpret_cast<ElementMask*>(parts.take(sizeof(ElementMask) / sizeof(float)));
  }
};

/// One panel of rows against one key tile: FlashMask's algorithm 1, lines 9 to 27.
void forward_panel(const Problem& p, const ForwardScratch& s, int64_t panel, int64_t keys, bool full) {
  float* out = s.out + panel * p.head_dim_v * kWidth;
  float* largest = s.largest + panel * kWidth;
  float* sum = s.sum + panel * kWidth;
  multiply<Order::kRows>(keys, s.k, s.stride_k, s.q + panel * p.head_dim * kWidth, p.head_dim, false, s.scores);
  if (!full) hide(RowLanes(*s.mask, panel * kWidth), keys, -kInf, s.scores);
  const Vec factor0 = softmax_half(s.scores, keys, largest, sum);
  const Vec factor1 = softmax_half(s.scores + kLanes, keys, largest + kLanes, sum + kLanes);
  rescale(factor0, factor1, p.head_dim_v, out);
  multiply<Order::kColumns>(p.head_dim_v, s.v, s.stride_v, s.scores, keys, true, out);
}

int64_t forward_rows(const Problem& p, int64_t b, int64_t h, int64_t r, float* scratch) {
  const ForwardScratch s(p, scratch);
  const int64_t row0 = r * kTileRows, rows = std::min(kTileRows, p.seqlen_q - row0), panels = ceil_div(rows, kWidth);
  load_rows(p.q, b, row0, rows, h, s.k, s.stride_k);
  make_panels(s.k, s.stride_k, rows, kTileRows, p.head_dim, static_cast<float>(p.softmax_scale), s.q);
  std::fill(s.out, s.out + kTileRows * p.head_dim_v, 0.0f);
  std::fill(s.largest, s.largest + kTileRows, -kInf);
  std::fill(s.sum, s.sum + kTileRows, 0.0f);

  int64_t executed = 0;
  const MaskSource source(p, b, h);
  source.for_each_key_tile(r, [&](int64_t c, bool full) {
    const int64_t key0 = c * kTileKeys, keys = std::min(kTileKeys, p.seqlen_k - key0);
    load_rows(p.k, b, key0, keys, p.kv_head(h), s.k, s.stride_k);
    load_rows(p.v, b, key0, keys, p.kv_head(h), s.v, s.stride_v);
    if (!full) source.load(r, c, *s.mask);
    for (int64_t panel = 0; panel < panels; ++panel) forward_panel(p, s, panel, keys, full);
    ++executed;
  });

  for (int64_t i = 0; i < rows; ++i) {
    const bool empty = s.largest[i] == -kInf;
    static_cast<float*>(p.lse.data)[lse_offset(p.lse, b, h, row0 + i)] = empty ? -kInf : s.largest[i] + std::log(s.sum[i]);
    s.sum[i] = empty ? 0.0f : 1.0f / s.sum[i];
  }
  store_panels(s.out, rows, p.head_dim_v, s.sum, p.out, b, row0, h);
  return executed;
}

// --- Backward ---------------------------------------------------------------------------------------

/// delta of a tile's rows, out * dout summed in the order and with the operations of the product dP = dO V^T: a row
/// that sees a single key has out = v, so dP - delta is exactly 0 there. `panels` is scratch for out.
void make_delta(const Problem& p, int64_t b, int64_t h, int64_t row0, int64_t rows, const float* out_rows, int64_t stride,
                const float* dout_panels, float* panels, float* delta) {
  make_panels(out_rows, stride, rows, kTileRows, p.head_dim_v, 1.0f, panels);
  for (int64_t lane = 0; lane < kTileRows; lane += kLanes) {
    const int64_t at = lane / kWidth * p.head_dim_v * kWidth + lane % kWidth;
    Vec sum = hn::Zero(kFloats);
    for (int64_t c = 0; c < p.head_dim_v; ++c) {
      sum = hn::MulAdd(hn::Load(kFloats, panels + at + c * kWidth), hn::Load(kFloats, dout_panels + at + c * kWidth), sum);
    }
    hn::Store(sum, kFloats, delta + lane);
  }
  if (!p.dlse.defined()) return;
  for (int64_t i = 0; i < rows; ++i) delta[i] -= static_cast<const float*>(p.dlse.data)[lse_offset(p.dlse, b, h, row0 + i)];
}

/// lse of a tile's rows. A row that sees nothing has lse -inf; 0 keeps exp(hidden score - lse) at 0.
void load_lse(const Problem& p, int64_t b, int64_t h, int64_t row0, int64_t rows, float* lse) {
  for (int64_t i = 0; i < kTileRows; ++i) {
    const float x = i < rows ? static_cast<const float*>(p.lse.data)[lse_offset(p.lse, b, h, row0 + i)] : 0.0f;
    lse[i] = x == -kInf ? 0.0f : x;
  }
}

struct BackwardRowsScratch {
  Scratch parts;
  int64_t stride_k, stride_v;
  float *q, *dout, *out, *k, *v, *scores, *dprobs, *dq, *lse, *delta, *scale;
  ElementMask* mask;

  BackwardRowsScratch(const Problem& p, float* scratch) : parts(scratch), stride_k(padded(p.head_dim)), stride_v(padded(p.head_dim_v)) {
    q = parts.take(kTileRows * p.head_dim);
    dout = parts.take(kTileRows * p.head_dim_v);
    out = parts.take(kTileRows * p.head_dim_v);
    k = parts.take(kTileKeys * stride_k);
    v = parts.take(kTileKeys * stride_v);
    scores = parts.take(kTileKeys * kWidth);
    dprobs = parts.take(kTileKeys * kWidth);
    dq = parts.take(kTileRows * p.head_dim);
    lse = parts.take(kTileRows);
    delta = parts.take(kTileRows);
    scale = parts.take(kTileRows);
    mask = reinterpret_cast<ElementMask*>(parts.take(sizeof(ElementMask) / sizeof(float)));
  }
};

/// dscores = P * (dP - delta) over a panel whose lanes are rows; written over dprobs.
void dscores_of_rows(const float* lse, const float* delta, int64_t keys, const float* scores, float* dprobs) {
  for (int64_t half = 0; half < kWidth; half += kLanes) {
    const Vec row_lse = hn::LoadU(kFloats, lse + half), row_delta = hn::LoadU(kFloats, delta + half);
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t at = j * kWidth + half;
      const Vec p = exp_keeping_nan(hn::Sub(hn::Load(kFloats, scores + at), row_lse));
      hn::Store(hn::Mul(p, hn::Sub(hn::Load(kFloats, dprobs + at), row_delta)), kFloats, dprobs + at);
    }
  }
}

int64_t backward_rows(const Problem& p, Delta delta, int64_t b, int64_t h, int64_t r, float* scratch) {
  const BackwardRowsScratch s(p, scratch);
  const int64_t row0 = r * kTileRows, rows = std::min(kTileRows, p.seqlen_q - row0), panels = ceil_div(rows, kWidth);
  load_rows(p.q, b, row0, rows, h, s.k, s.stride_k);
  make_panels(s.k, s.stride_k, rows, kTileRows, p.head_dim, static_cast<float>(p.softmax_scale), s.q);
  load_rows(p.dout, b, row0, rows, h, s.v, s.stride_v);
  make_panels(s.v, s.stride_v, rows, kTileRows, p.head_dim_v, 1.0f, s.dout);
  load_rows(p.out, b, row0, rows, h, s.v, s.stride_v);
  make_delta(p, b, h, row0, rows, s.v, s.stride_v, s.dout, s.out, s.delta);
  std::copy(s.delta, s.delta + rows, delta.row(p, b, h) + row0);
  load_lse(p, b, h, row0, rows, s.lse);
  std::fill(s.dq, s.dq + kTileRows * p.head_dim, 0.0f);

  int64_t executed = 0;
  const MaskSource source(p, b, h);
  source.for_each_key_tile(r, [&](int64_t c, bool full) {
    const int64_t key0 = c * kTileKeys, keys = std::min(kTileKeys, p.seqlen_k - key0);
    load_rows(p.k, b, key0, keys, p.kv_head(h), s.k, s.stride_k);
    load_rows(p.v, b, key0, keys, p.kv_head(h), s.v, s.stride_v);
    if (!full) source.load(r, c, *s.mask);
    for (int64_t panel = 0; panel < panels; ++panel) {
      multiply<Order::kRows>(keys, s.k, s.stride_k, s.q + panel * p.head_dim * kWidth, p.head_dim, false, s.scores);
      multiply<Order::kRows>(keys, s.v, s.stride_v, s.dout + panel * p.head_dim_v * kWidth, p.head_dim_v, false, s.dprobs);
      if (!full) hide(RowLanes(*s.mask, panel * kWidth), keys, -kInf, s.scores);
      dscores_of_rows(s.lse + panel * kWidth, s.delta + panel * kWidth, keys, s.scores, s.dprobs);
      // Hidden again: 0 times a non-finite dP must not get through.
      if (!full) hide(RowLanes(*s.mask, panel * kWidth), keys, 0.0f, s.dprobs);
      multiply<Order::kColumns>(p.head_dim, s.k, s.stride_k, s.dprobs, keys, true, s.dq + panel * p.head_dim * kWidth);
    }
    ++executed;
  });
  std::fill(s.scale, s.scale + kTileRows, static_cast<float>(p.softmax_scale));
  store_panels(s.dq, rows, p.head_dim, s.scale, p.dq, b, row0, h);
  return executed;
}

struct BackwardKeysScratch {
  Scratch parts;
  int64_t stride_q, stride_v;
  float *k, *v, *q, *dout, *scores, *dprobs, *dk, *dv, *lse, *ones;
  ElementMask* mask;

  BackwardKeysScratch(const Problem& p, float* scratch) : parts(scratch), stride_q(padded(p.head_dim)), stride_v(padded(p.head_dim_v)) {
    k = parts.take(kTileKeys * p.head_dim);
    v = parts.take(kTileKeys * p.head_dim_v);
    q = parts.take(kTileKeys * stride_q);  // as many rows as a key tile has: K and V pass through here too
    dout = parts.take(kTileKeys * stride_v);
    scores = parts.take(kTileRows * kWidth);
    dprobs = parts.take(kTileRows * kWidth);
    dk = parts.take(kTileKeys * p.head_dim);
    dv = parts.take(kTileKeys * p.head_dim_v);
    lse = parts.take(kTileRows);
    ones = parts.take(kTileKeys);
    mask = reinterpret_cast<ElementMask*>(parts.take(sizeof(ElementMask) / sizeof(float)));
  }
};

/// scores become P = exp(scores - lse), dprobs become P * (dP - delta), over a panel whose lanes are keys.
void probabilities_of_keys(const float* lse, const float* delta, int64_t rows, float* scores, float* dprobs) {
  for (int64_t i = 0; i < rows; ++i) {
    const Vec row_lse = hn::Set(kFloats, lse[i]), row_delta = hn::Set(kFloats, delta[i]);
    for (int64_t at = i * kWidth; at < (i + 1) * kWidth; at += kLanes) {
      const Vec p = exp_keeping_nan(hn::Sub(hn::Load(kFloats, scores + at), row_lse));
      hn::Store(p, kFloats, scores + at);
      hn::Store(hn::Mul(p, hn::Sub(hn::Load(kFloats, dprobs + at), row_delta)), kFloats, dprobs + at);
    }
  }
}

/// One panel of keys against one row tile: FlashMask's algorithm 2, lines 12 to 28, without dq.
void backward_keys_panel(const Problem& p, const BackwardKeysScratch& s, const float* delta, int64_t panel, int64_t rows, bool full) {
  multiply<Order::kRows>(rows, s.q, s.stride_q, s.k + panel * p.head_dim * kWidth, p.head_dim, false, s.scores);
  multiply<Order::kRows>(rows, s.dout, s.stride_v, s.v + panel * p.head_dim_v * kWidth, p.head_dim_v, false, s.dprobs);
  const KeyLanes lanes{*s.mask, panel * kWidth};
  if (!full) hide(lanes, rows, -kInf, s.scores);
  probabilities_of_keys(s.lse, delta, rows, s.scores, s.dprobs);
  if (!full) hide(lanes, rows, 0.0f, s.dprobs);
  multiply<Order::kColumns>(p.head_dim_v, s.dout, s.stride_v, s.scores, rows, true, s.dv + panel * p.head_dim_v * kWidth);
  multiply<Order::kColumns>(p.head_dim, s.q, s.stride_q, s.dprobs, rows, true, s.dk + panel * p.head_dim * kWidth);
}

int64_t backward_keys(const Problem& p, Delta delta, int64_t b, int64_t hk, int64_t c, float* scratch) {
  const BackwardKeysScratch s(p, scratch);
  const int64_t key0 = c * kTileKeys, keys = std::min(kTileKeys, p.seqlen_k - key0), panels = ceil_div(keys, kWidth);
  load_rows(p.k, b, key0, keys, hk, s.q, s.stride_q);
  make_panels(s.q, s.stride_q, keys, kTileKeys, p.head_dim, 1.0f, s.k);
  load_rows(p.v, b, key0, keys, hk, s.dout, s.stride_v);
  make_panels(s.dout, s.stride_v, keys, kTileKeys, p.head_dim_v, 1.0f, s.v);
  std::fill(s.dk, s.dk + kTileKeys * p.head_dim, 0.0f);
  std::fill(s.dv, s.dv + kTileKeys * p.head_dim_v, 0.0f);

  int64_t executed = 0;
  for (int64_t h = hk * p.group_size(); h < (hk + 1) * p.group_size(); ++h) {
    const MaskSource source(p, b, h);
    source.for_each_row_tile(c, [&](int64_t r, bool full) {
      const int64_t row0 = r * kTileRows, rows = std::min(kTileRows, p.seqlen_q - row0);
      load_rows(p.q, b, row0, rows, h, s.q, s.stride_q);
      for (int64_t at = 0; at < rows * s.stride_q; ++at) s.q[at] *= static_cast<float>(p.softmax_scale);
      load_rows(p.dout, b, row0, rows, h, s.dout, s.stride_v);
      load_lse(p, b, h, row0, rows, s.lse);
      if (!full) source.load(r, c, *s.mask);
      for (int64_t panel = 0; panel < panels; ++panel) backward_keys_panel(p, s, delta.row(p, b, h) + row0, panel, rows, full);
      ++executed;
    });
  }
  std::fill(s.ones, s.ones + kTileKeys, 1.0f);
  store_panels(s.dk, keys, p.head_dim, s.ones, p.dk, b, key0, hk);
  store_panels(s.dv, keys, p.head_dim_v, s.ones, p.dv, b, key0, hk);
  return executed;
}

std::size_t scratch_floats(const Problem& p) {
  if (!p.is_backward) return static_cast<std::size_t>(ForwardScratch(p, nullptr).parts.taken());
  return static_cast<std::size_t>(std::max(BackwardRowsScratch(p, nullptr).parts.taken(), BackwardKeysScratch(p, nullptr).parts.taken()));
}

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace flashmask::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashmask::cpu {

HWY_EXPORT(forward_rows);
HWY_EXPORT(backward_rows);
HWY_EXPORT(backward_keys);
HWY_EXPORT(scratch_floats);
HWY_EXPORT(target_name);

std::size_t scratch_bytes(const Problem& p) { return HWY_DYNAMIC_DISPATCH(scratch_floats)(p) * sizeof(float); }
int64_t forward_rows(const Problem& p, int64_t b, int64_t h, int64_t r, float* scratch) {
  return HWY_DYNAMIC_DISPATCH(forward_rows)(p, b, h, r, scratch);
}
int64_t backward_rows(const Problem& p, Delta delta, int64_t b, int64_t h, int64_t r, float* scratch) {
  return HWY_DYNAMIC_DISPATCH(backward_rows)(p, delta, b, h, r, scratch);
}
int64_t backward_keys(const Problem& p, Delta delta, int64_t b, int64_t hk, int64_t c, float* scratch) {
  return HWY_DYNAMIC_DISPATCH(backward_keys)(p, delta, b, hk, c, scratch);
}
const char* simd_target() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace flashmask::cpu
#endif  // HWY_ONCE
