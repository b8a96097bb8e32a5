// SPDX-License-Identifier: Apache-2.0
#pragma once

// Plain versions of the library's clever computations, which look at every element of a dense matrix.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "flashmask/mask.h"
#include "flashmask/tiles.h"
#include "flashmask/visible_extent.h"

namespace flashmask::test {

/// One dense matrix [seqlen_q, seqlen_k], 1 = visible.
struct Dense {
  std::span<const uint8_t> visible;
  int64_t seqlen_q, seqlen_k;

  bool at(int64_t i, int64_t j) const { return visible[static_cast<std::size_t>(i * seqlen_k + j)] != 0; }
};

/// Matrix `index` of many that follow each other.
inline Dense matrix(std::span<const uint8_t> all, int64_t index, int64_t seqlen_q, int64_t seqlen_k) {
  const auto size = static_cast<std::size_t>(seqlen_q * seqlen_k);
  return {all.subspan(static_cast<std::size_t>(index) * size, size), seqlen_q, seqlen_k};
}

/// How far the visible elements of batch entry `b` reach, of a mask of `heads` heads.
inline VisibleExtent extent_of(std::span<const uint8_t> all, int64_t b, int64_t heads, int64_t seqlen_q,
                               int64_t seqlen_k) {
  VisibleExtent extent;
  for (int64_t h = 0; h < heads; ++h) {
    const Dense dense = matrix(all, b * heads + h, seqlen_q, seqlen_k);
    for (int64_t i = 0; i < seqlen_q; ++i) {
      for (int64_t j = 0; j < seqlen_k; ++j) {
        if (!dense.at(i, j)) continue;
        extent.rows = std::max(extent.rows, static_cast<int32_t>(i + 1));
        extent.keys = std::max(extent.keys, static_cast<int32_t>(j + 1));
      }
    }
  }
  return extent;
}

inline TileClass class_of(const Dense& dense, TileShape shape, int64_t row_tile, int64_t key_tile) {
  bool any = false, all = true;
  for (int64_t i = row_tile * shape.rows; i < std::min((row_tile + 1) * shape.rows, dense.seqlen_q); ++i) {
    for (int64_t j = key_tile * shape.keys; j < std::min((key_tile + 1) * shape.keys, dense.seqlen_k); ++j) {
      any |= dense.at(i, j);
      all &= dense.at(i, j);
    }
  }
  return all ? TileClass::kFull : any ? TileClass::kPartial : TileClass::kEmpty;
}

inline std::vector<TileClass> classes_of(const Dense& dense, TileShape shape) {
  std::vector<TileClass> classes;
  for (int64_t r = 0; r * shape.rows < dense.seqlen_q; ++r) {
    for (int64_t c = 0; c * shape.keys < dense.seqlen_k; ++c) classes.push_back(class_of(dense, shape, r, c));
  }
  return classes;
}

/// True if the band lets (i, j) through.
inline bool in_band(const Band& band, int64_t q_offset, int64_t i, int64_t j) {
  const int64_t distance = j - i - q_offset;
  return (!band.lo || distance >= *band.lo) && (!band.hi || distance <= *band.hi);
}

/// Runs of hidden rows of a column among the rows that the band lets through.
inline int hidden_runs(const Dense& dense, const Band& band, int64_t q_offset, int64_t j) {
  int runs = 0;
  bool inside = false;  // a run
  for (int64_t i = 0; i < dense.seqlen_q; ++i) {
    const bool hidden = in_band(band, q_offset, i, j) && !dense.at(i, j);
    runs += hidden && !inside;
    inside = hidden;
  }
  return runs;
}

/// The most runs any column of any of the matrices has, and the first column with more than two.
struct Fit {
  Band band;
  int most = 0;
  int64_t matrix = -1, column = -1;
  int needs = 0;
};
inline Fit fit_beside(std::span<const Dense> matrices, const Band& band, int64_t q_offset) {
  Fit fit{.band = band};
  for (std::size_t m = 0; m < matrices.size(); ++m) {
    for (int64_t j = 0; j < matrices[m].seqlen_k; ++j) {
      const int runs = hidden_runs(matrices[m], band, q_offset, j);
      fit.most = std::max(fit.most, runs);
      if (runs > 2 && fit.needs == 0) {
        fit.matrix = static_cast<int64_t>(m);
        fit.column = j;
        fit.needs = runs;
      }
    }
  }
  return fit;
}

/// The fit that from_dense promises: the first of no band, the tightest upper edge, the tightest lower edge and both
/// that needs the fewest intervals.
inline Fit best_fit(std::span<const Dense> matrices, int64_t q_offset) {
  std::optional<int64_t> lo, hi;
  for (const Dense& dense : matrices) {
    for (int64_t i = 0; i < dense.seqlen_q; ++i) {
      for (int64_t j = 0; j < dense.seqlen_k; ++j) {
        if (!dense.at(i, j)) continue;
        lo = std::min(lo.value_or(j - i - q_offset), j - i - q_offset);
        hi = std::max(hi.value_or(j - i - q_offset), j - i - q_offset);
      }
    }
  }
  std::vector<Band> bands{Band::none()};
  if (lo)
    bands.insert(bands.end(),
                 {Band{.lo = std::nullopt, .hi = hi}, Band{.lo = lo, .hi = std::nullopt}, Band{.lo = lo, .hi = hi}});
  Fit best = fit_beside(matrices, bands[0], q_offset);
  for (std::size_t n = 1; n < bands.size(); ++n) {
    const Fit fit = fit_beside(matrices, bands[n], q_offset);
    if (fit.most < best.most) best = fit;
  }
  return best;
}
inline Fit best_fit(const Dense& dense, int64_t q_offset) { return best_fit(std::span(&dense, 1), q_offset); }

/// The smallest vector form of startend_row_indices that says what the matrices say: 1, 2 or 4 vectors, or 0 if
/// none does; `causal` where only the causal one of that size does.
struct SmallestForm {
  int vectors = 0;
  bool must_be_causal = false, must_not_be_causal = false;
};
inline SmallestForm smallest_form(std::span<const Dense> matrices) {
  bool causal_one = true, causal_two = true, full_two = true, full_four = true;
  for (const Dense& dense : matrices) {
    const int64_t offset = dense.seqlen_k - dense.seqlen_q;
    for (int64_t j = 0; j < dense.seqlen_k; ++j) {
      const auto hidden = [&](int64_t i) { return !dense.at(i, j); };
      const auto allowed = [&](int64_t i) { return j <= i + offset; };
      bool outside = true, suffix = true;  // all above the diagonal hidden; hidden rows below it run to the end
      int prefix_end = 0;
      for (int64_t i = 0; i < dense.seqlen_q; ++i) {
        outside &= allowed(i) || hidden(i);
        if (i + 1 < dense.seqlen_q) suffix &= !(allowed(i) && hidden(i) && !hidden(i + 1));
      }
      while (prefix_end < dense.seqlen_q && hidden(prefix_end)) ++prefix_end;
      bool ends = true;  // hidden rows are a head and a tail of the column
      for (int64_t i = prefix_end; i + 1 < dense.seqlen_q; ++i) ends &= !(hidden(i) && !hidden(i + 1));
      causal_one &= outside && suffix;
      causal_two &= outside && hidden_runs(dense, Band::causal(), offset, j) <= 1;
      full_two &= ends;
      full_four &= hidden_runs(dense, Band::none(), offset, j) <= 2;
    }
  }
  if (causal_one) return {1, true, false};
  if (causal_two || full_two) return {2, !full_two, !causal_two};
  return {full_four ? 4 : 0, false, true};
}
inline SmallestForm smallest_form(const Dense& dense) { return smallest_form(std::span(&dense, 1)); }

}  // namespace flashmask::test
