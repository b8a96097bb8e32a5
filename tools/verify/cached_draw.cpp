// SPDX-License-Identifier: Apache-2.0
#include "verify/cached_draw.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <span>

#include "numerics/number.h"
#include "numerics/plain.h"
#include "verify/random.h"

namespace flashmask::verify {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kBlock = 128;  ///< rows and keys of a block mask's blocks

std::size_t index(int64_t row, int64_t heads, int64_t head, int64_t dim = 1, int64_t column = 0) {
  return static_cast<std::size_t>((row * heads + head) * dim + column);
}

/// Draws the requests of a case, one after the other.
class Drawing {
 public:
  explicit Drawing(const CachedCase& c) : c_(c), random_(mix(c.seed, kTensorStream)) {
    has_far_scales_ = c.float8 && c.dtype != DataType::kFloat16 && random_.integer(0, 2) == 0;
    for (int64_t n = 0; n < static_cast<int64_t>(std::size(head_scales_)); ++n) head_scales_[n] = draw_scale(n / 2);
  }

  DrawnRequest request(std::size_t b) {
    DrawnRequest r;
    r.keys = c_.keys[b];
    r.rows = c_.rows[b];
    r.q = numbers(r.rows * c_.heads_q * c_.head_dim, c_.dtype);
    r.k = numbers(r.keys * c_.heads_kv * c_.head_dim, c_.cache_dtype());
    r.v = numbers(r.keys * c_.heads_kv * c_.head_dim_v, c_.cache_dtype());
    r.k_scale = scales(c_.k_scale, r.keys, 0);
    r.v_scale = scales(c_.v_scale, r.keys, 1);
    draw_bounds(r);
    draw_positions(r);
    if (c_.tail > 0) draw_tail(r);
    draw_missing(r);
    for (int64_t h = 0; h < c_.heads_q; ++h) r.slopes.push_back(static_cast<float>(std::exp2(-8 * random_.real())));
    if (c_.blocks != CachedBlocks::kNone) draw_blocks(r);
    return r;
  }

  std::vector<double> draw_sink() {
    std::vector<double> sink;
    for (int64_t h = 0; h < c_.heads_q && c_.sink; ++h)
      sink.push_back(numerics::round_to(DataType::kFloat32, static_cast<float>(random_.normal())));
    return sink;
  }

 private:
  std::vector<double> numbers(int64_t count, DataType dtype) {
    std::vector<double> drawn(static_cast<std::size_t>(count));
    for (double& x : drawn) x = numerics::round_to(dtype, static_cast<float>(random_.normal()));
    return drawn;
  }

  /// Factors of keys, or of_v values: mostly near 1. Large ones of keys would leave a row one key, and float16 does not
  /// hold the tokens that are appended times small ones.
  float draw_scale(int64_t of_v) {
    const auto scale = static_cast<float>(0.5 + random_.real());
    if (!has_far_scales_) return scale;
    return std::ldexp(scale, static_cast<int>(random_.integer(-20, of_v == 1 ? 10 : 0)));
  }

  /// Scales of each key and head, of which some are alike.
  std::vector<float> scales(ScaleShape shape, int64_t keys, int64_t of_v) {
    std::vector<float> drawn;
    const int64_t page = c_.has_tables() ? c_.page_size : std::max<int64_t>(keys, 1);
    float shared = head_scales_[2 * of_v];
    for (int64_t j = 0; j < keys; ++j) {
      if (shape == ScaleShape::kToken || (shape == ScaleShape::kPage && j % page == 0)) shared = draw_scale(of_v);
      for (int64_t hk = 0; hk < c_.heads_kv; ++hk) {
        if (shape == ScaleShape::kHead) shared = head_scales_[2 * of_v] + static_cast<float>(hk) / 8;
        if (shape == ScaleShape::kTokenHead) shared = draw_scale(of_v);
        drawn.push_back(shape == ScaleShape::kNone ? 1.0f : shared);
      }
    }
    return drawn;
  }

  /// A row that a key's vectors may name.
  int32_t draw_row(int64_t keys) {
    const int64_t kind = random_.integer(0, 19);
    if (kind < 6) return INT32_MAX;
    if (kind == 6) return INT32_MIN;
    if (kind == 7) return 0;
    return static_cast<int32_t>(random_.integer(-3, keys + 5));
  }

  bool has_vectors(int64_t j) const { return c_.in_pages() || j < c_.columns(); }

  void draw_bounds(DrawnRequest& r) {
    for (int64_t h = 0; h < c_.vector_heads() && c_.vectors > 0; ++h) {
      for (int64_t j = 0; j < r.keys; ++j) {
        for (int64_t n = 0; n < c_.vectors; ++n) r.bounds.push_back(draw_row(r.keys));
        if (!has_vectors(j)) hide_from_none(r, h, j);
      }
    }
  }
  void hide_from_none(DrawnRequest& r, int64_t h, int64_t j) const {
    const auto at = r.bounds.begin() + (h * r.keys + j) * c_.vectors;
    for (int64_t n = 0; n < c_.vectors; ++n) at[n] = n % 2 == 0 ? INT32_MAX : 0;
  }

  void draw_positions(DrawnRequest& r) {
    const int64_t spread = random_.flip() ? 2 : 40;
    for (int64_t i = 0; i < r.rows; ++i)
      r.q_pos.push_back(static_cast<int32_t>(r.first_row() + i + random_.integer(-spread, spread)));
    for (int64_t j = 0; j < r.keys; ++j) {
      const bool is_index = c_.positions != CachedPositions::kRowsAndKeys || !has_vectors(j);
      r.k_pos.push_back(static_cast<int32_t>(j + (is_index ? 0 : random_.integer(-spread, spread))));
    }
  }

  /// A tree in most draws: a node sees its ancestors and itself. In the others any bits.
  void draw_tail(DrawnRequest& r) {
    const int64_t t_count = c_.tail, most = std::min(t_count, r.keys);
    r.tail_len = static_cast<int32_t>(random_.integer(0, most));
    if (c_.bad && random_.flip()) r.tail_len = random_.flip() ? INT32_MAX : -5;
    r.tail = c_.tail_lens ? std::clamp<int64_t>(r.tail_len, 0, most) : std::min(most, r.rows);
    const bool is_tree = random_.integer(0, 3) > 0;
    r.bits.resize(static_cast<std::size_t>(t_count * t_count));
    for (int64_t t = 0; t < t_count; ++t) {
      uint8_t* const row = r.bits.data() + t * t_count;
      const int64_t parent = random_.integer(-1, t - 1);
      if (parent >= 0 && is_tree) std::copy_n(r.bits.data() + parent * t_count, t_count, row);
      row[t] = 1;
      for (int64_t u = 0; u < t_count && !is_tree; ++u) row[u] = random_.flip();
      r.depth.push_back(parent < 0 ? 0 : r.depth[static_cast<std::size_t>(parent)] + 1);
    }
  }

  /// Now and then the mask ends before the keys do, or the rows.
  void draw_blocks(DrawnRequest& r) {
    const int64_t most = *std::ranges::max_element(c_.keys), blocks = (most + kBlock - 1) / kBlock,
                  left_out = static_cast<int64_t>(c_.seed % 4 == 0);
    r.key_blocks = std::max<int64_t>(blocks - left_out, 1);
    r.row_blocks = c_.blocks == CachedBlocks::kKeys ? 1 : std::max<int64_t>(blocks - left_out, 2);
    const int64_t heads = c_.blocks_by_head ? c_.heads_kv : 1, percent = random_.integer(20, 80);
    for (int64_t n = 0; n < heads * r.row_blocks * r.key_blocks; ++n)
      r.block_mask.push_back(random_.integer(0, 99) < percent);
  }

  void draw_missing(DrawnRequest& r) {
    r.missing.resize(static_cast<std::size_t>(r.keys));
    if (!c_.bad || !c_.has_tables()) return;
    for (int64_t page = 0; page * c_.page_size < r.keys; ++page) {
      if (random_.integer(0, 3) > 0) continue;
      for (int64_t j = page * c_.page_size; j < std::min(r.keys, (page + 1) * c_.page_size); ++j) lose(r, j);
    }
  }
  void lose(DrawnRequest& r, int64_t j) {
    r.missing[static_cast<std::size_t>(j)] = 1;
    std::fill_n(r.k.begin() + j * c_.heads_kv * c_.head_dim, c_.heads_kv * c_.head_dim, 0.0);
    std::fill_n(r.v.begin() + j * c_.heads_kv * c_.head_dim_v, c_.heads_kv * c_.head_dim_v, 0.0);
    if (!c_.in_pages()) return;
    r.k_pos[static_cast<std::size_t>(j)] = static_cast<int32_t>(j);
    for (int64_t h = 0; h < c_.vector_heads() && c_.vectors > 0; ++h) hide_from_none(r, h, j);
  }

  const CachedCase& c_;
  Random random_;
  float head_scales_[4] = {};
  bool has_far_scales_;
};

template <typename T>
void copy_first(const std::vector<T>& from, std::vector<T>& to, int64_t count) {
  std::copy_n(from.begin(), count, to.begin());
}

/// Copies what the first keys have for rows: vectors and positions.
void copy_columns(const CachedCase& c, const DrawnRequest& from, DrawnRequest& to, int64_t count) {
  copy_first(from.k_pos, to.k_pos, count);
  for (int64_t h = 0; h < c.vector_heads() && c.vectors > 0; ++h)
    std::copy_n(from.bounds.begin() + h * from.keys * c.vectors, count * c.vectors,
                to.bounds.begin() + h * to.keys * c.vectors);
}

/// Copies the first keys, and what lies beside them in pages.
void copy_keys(const CachedCase& c, const DrawnRequest& from, DrawnRequest& to, int64_t count) {
  copy_first(from.k, to.k, count * c.heads_kv * c.head_dim);
  copy_first(from.v, to.v, count * c.heads_kv * c.head_dim_v);
  copy_first(from.k_scale, to.k_scale, count * c.heads_kv);
  copy_first(from.v_scale, to.v_scale, count * c.heads_kv);
  if (c.in_pages()) copy_columns(c, from, to, count);
}

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t n = 0; n < a.size(); ++n) sum += a[n] * b[n];
  return sum;
}

std::span<const double> vector_at(const std::vector<double>& values, int64_t row, int64_t heads, int64_t h,
                                  int64_t dim) {
  return {values.data() + (row * heads + h) * dim, static_cast<std::size_t>(dim)};
}

/// True if row r is in [from, to).
bool in_rows(int64_t r, int64_t from, int64_t to) { return r >= from && r < to; }

bool is_hidden(const CachedCase& c, const DrawnRequest& request, int64_t r, int64_t j, int64_t hk) {
  if (c.vectors == 0) return false;
  constexpr int64_t kEnd = INT64_MAX;  // later than every row
  const auto end = [](int32_t x) { return x == kForGood ? kEnd : x; };
  const int32_t* x = request.bounds.data() + ((c.vectors_by_head ? hk : 0) * request.keys + j) * c.vectors;
  if (c.causal) return in_rows(r, x[0], c.vectors == 1 ? kEnd : end(x[1]));
  if (c.vectors == 2) return in_rows(r, x[0], kEnd) || in_rows(r, 0, end(x[1]));
  return in_rows(r, x[0], end(x[1])) || in_rows(r, x[2], end(x[3]));
}

bool is_in_hidden_block(const CachedCase& c, const DrawnRequest& request, int64_t r, int64_t j, int64_t hk) {
  const int64_t row_block = request.row_blocks == 1 ? 0 : r / kBlock, key_block = j / kBlock;
  if (row_block >= request.row_blocks || key_block >= request.key_blocks) return false;
  const int64_t head = c.blocks_by_head ? hk : 0;
  return !request.block_mask[static_cast<std::size_t>((head * request.row_blocks + row_block) * request.key_blocks +
                                                      key_block)];
}

/// Position of a row or key by its place in the tail.
int64_t tail_position(const CachedCase& c, const DrawnRequest& request, int64_t at) {
  if (!c.tail_depth || c.tail == 0 || at < request.tail_begin()) return at;
  return request.tail_begin() + request.depth[static_cast<std::size_t>(at - request.tail_begin())];
}

/// Sums up one row of one head.
void sum_row(const CachedDraw& draw, const DrawnRequest& request, int64_t h, int64_t i, RequestResults& results) {
  const CachedCase& c = draw.c;
  const int64_t hk = h / c.group_size(), r = request.first_row() + i;
  uint8_t* const visible = results.visible.data() + (hk * request.rows + i) * request.keys;
  const double sink = draw.sink.empty() ? -kInfinity : draw.sink[static_cast<std::size_t>(h)];
  double largest = sink;
  std::vector<double> scores(static_cast<std::size_t>(request.keys), -kInfinity);
  for (int64_t j = 0; j < request.keys; ++j) {
    visible[j] = draw.sees(request, r, j, hk);
    if (!visible[j]) continue;
    double score =
        c.scale() * request.k_scale[index(j, c.heads_kv, hk)] *
        dot(vector_at(request.q, i, c.heads_q, h, c.head_dim), vector_at(request.k, j, c.heads_kv, hk, c.head_dim));
    score = c.features.capped(score);
    if (c.features.alibi != AlibiKind::kNone)
      score -=
          request.slopes[static_cast<std::size_t>(h)] * std::fabs(static_cast<double>(draw.distance(request, r, j)));
    scores[static_cast<std::size_t>(j)] = score;
    largest = std::max(largest, score);
  }
  double sum = sink == -kInfinity ? 0 : std::exp(sink - largest);
  const std::span<double> out =
      results.out.head(0, h).subspan(index(i, 1, 0, c.head_dim_v), static_cast<std::size_t>(c.head_dim_v));
  std::vector<double> magnitudes(out.size());
  for (int64_t j = 0; j < request.keys; ++j) {
    if (!visible[j]) continue;
    const double weight = std::exp(scores[static_cast<std::size_t>(j)] - largest);
    sum += weight;
    const auto v = vector_at(request.v, j, c.heads_kv, hk, c.head_dim_v);
    for (std::size_t n = 0; n < out.size(); ++n) {
      const double term = weight * request.v_scale[index(j, c.heads_kv, hk)] * v[n];
      out[n] += term;
      magnitudes[n] += std::fabs(term);
    }
  }
  for (double& x : out) x = sum == 0 ? 0 : x / sum;
  double& most = results.sums[static_cast<std::size_t>(h)];
  for (const double x : magnitudes) most = std::max(most, sum == 0 ? 0 : x / sum);
  double& score = results.scores[static_cast<std::size_t>(h)];
  if (std::isfinite(largest)) score = std::max(score, std::fabs(largest));
  results.lse.head(0, h)[static_cast<std::size_t>(i)] = sum == 0 ? -kInfinity : largest + std::log(sum);
}

/// One head of k or v, [keys, dim], with its scales.
std::vector<double> scaled_head(const CachedCase& c, const DrawnRequest& request, const std::vector<double>& values,
                                const std::vector<float>& scales, int64_t hk, int64_t dim) {
  std::vector<double> head;
  for (int64_t j = 0; j < request.keys; ++j) {
    for (const double x : vector_at(values, j, c.heads_kv, hk, dim))
      head.push_back(x * scales[index(j, c.heads_kv, hk)]);
  }
  return head;
}

numerics::PlainScore plain_score(const CachedDraw& draw, const DrawnRequest& request, int64_t h, float scaled,
                                 int64_t row, int64_t key) {
  const float capped = draw.c.features.capped(scaled);
  if (draw.c.features.alibi == AlibiKind::kNone) return {capped, 1};
  const int64_t distance = draw.distance(request, request.first_row() + row, key);
  return {capped - request.slopes[static_cast<std::size_t>(h)] * static_cast<float>(std::abs(distance)), 1};
}

}  // namespace

CachedDraw::CachedDraw(const CachedCase& of) : c(of), columns(of.columns()) {
  Drawing drawing(c);
  for (std::size_t b = 0; b < c.keys.size(); ++b) requests.push_back(drawing.request(b));
  sink = drawing.draw_sink();
  const auto most = std::ranges::max_element(requests, {}, &DrawnRequest::keys);
  for (DrawnRequest& request : requests) {
    if (&request != &requests[0]) copy_keys(c, requests[0], request, std::min(c.shared_keys(), request.keys));
    if (!c.vectors_by_request && !c.in_pages() && &request != &*most) copy_columns(c, *most, request, request.keys);
    if (c.features.alibi == AlibiKind::kShared) request.slopes = requests[0].slopes;
  }
}

CachedDraw CachedDraw::alone(std::size_t b) const {
  CachedDraw one = *this;
  one.c.keys = {c.keys[b]};
  one.c.rows = {c.rows[b]};
  one.requests = {requests[b]};
  return one;
}

CachedDraw CachedDraw::last_row(std::size_t b) const {
  CachedDraw one = alone(b);
  DrawnRequest& request = one.requests[0];
  one.c.rows = {1};
  request.rows = 1;
  request.q.erase(request.q.begin(), request.q.end() - c.heads_q * c.head_dim);
  request.q_pos.erase(request.q_pos.begin(), request.q_pos.end() - 1);
  return one;
}

int64_t CachedDraw::distance(const DrawnRequest& request, int64_t r, int64_t j) const {
  const int64_t row = c.positions == CachedPositions::kNone
                          ? tail_position(c, request, r)
                          : request.q_pos[static_cast<std::size_t>(r - request.first_row())];
  const int64_t key = c.positions == CachedPositions::kRowsAndKeys ? request.k_pos[static_cast<std::size_t>(j)]
                                                                   : tail_position(c, request, j);
  return key - row;
}

bool CachedDraw::sees(const DrawnRequest& request, int64_t r, int64_t j, int64_t hk) const {
  if (r < 0) return false;
  const int64_t ahead = distance(request, r, j), begin = request.tail_begin();
  if (c.window.left >= 0 && -ahead > c.window.left) return false;
  if (r >= begin && j >= begin) {
    if (!request.bits[static_cast<std::size_t>((r - begin) * c.tail + j - begin)]) return false;
  } else if ((c.causal && ahead > 0) || (c.window.right >= 0 && ahead > c.window.right)) {
    return false;
  }
  return !is_hidden(c, request, r, j, hk) && !is_in_hidden_block(c, request, r, j, hk);
}

RequestResults run_cached_oracle(const CachedDraw& draw, const DrawnRequest& request) {
  const CachedCase& c = draw.c;
  RequestResults results{HeadArray(1, c.heads_q, request.rows, c.head_dim_v), HeadArray(1, c.heads_q, request.rows, 1),
                         std::vector<uint8_t>(static_cast<std::size_t>(c.heads_kv * request.rows * request.keys)),
                         std::vector<double>(static_cast<std::size_t>(c.heads_q)),
                         std::vector<double>(static_cast<std::size_t>(c.heads_q))};
  for (int64_t h = 0; h < c.heads_q; ++h) {
    for (int64_t i = 0; i < request.rows; ++i) sum_row(draw, request, h, i, results);
  }
  return results;
}

HeadArray run_cached_plain(const CachedDraw& draw, const DrawnRequest& request, const std::vector<uint8_t>& visible) {
  const CachedCase& c = draw.c;
  const numerics::PlainCall call{c.dtype, request.rows, request.keys, c.head_dim, c.head_dim_v, c.scale()};
  const std::vector<double> zeros(static_cast<std::size_t>(request.rows * c.head_dim_v));
  HeadArray out(1, c.heads_q, request.rows, c.head_dim_v);
  for (int64_t h = 0; h < c.heads_q; ++h) {
    const int64_t hk = h / c.group_size();
    numerics::KeyHead keys(call, scaled_head(c, request, request.k, request.k_scale, hk, c.head_dim),
                           scaled_head(c, request, request.v, request.v_scale, hk, c.head_dim_v));
    std::vector<double> q;
    for (int64_t i = 0; i < request.rows; ++i) {
      const auto row = vector_at(request.q, i, c.heads_q, h, c.head_dim);
      q.insert(q.end(), row.begin(), row.end());
    }
    numerics::QueryHead queries(call, q, zeros, {}, zeros, zeros);
    if (!c.features.scores_are_products()) {
      queries.score = [&](float scaled, int64_t row, int64_t key) {
        return plain_score(draw, request, h, scaled, row, key);
      };
    }
    if (!draw.sink.empty()) queries.sink = static_cast<float>(draw.sink[static_cast<std::size_t>(h)]);
    run_plain_head(call, keys, queries, visible.data() + hk * request.rows * request.keys);
    std::ranges::transform(queries.out, out.head(0, h).begin(),
                           [&](float x) { return numerics::round_to(c.dtype, x); });
  }
  return out;
}

}  // namespace flashmask::verify
