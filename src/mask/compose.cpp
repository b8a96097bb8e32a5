// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <utility>

#include "common/arithmetic.h"
#include "common/message.h"
#include "flashmask/mask.h"
#include "mask/hidden_columns.h"
#include "mask/host_only.h"
#include "mask/view.h"

namespace flashmask {
namespace {

using rules::Interval;

/// Batch count of two masks taken together: vectors serve one batch entry or all.
int64_t broadcast_batch(int64_t a, int64_t b) {
  if (a != b && a != 1 && b != 1)
    throw_invalid("the masks have ", a, " and ", b, " batch entries; they must be equal, or one of them 1");
  return std::max(a, b);
}

/// Head count of two masks taken together: a head may serve several.
int64_t broadcast_heads(int64_t a, int64_t b) {
  if (std::max(a, b) % std::min(a, b) != 0)
    throw_invalid("the masks have ", a, " and ", b, " heads; one must divide the other");
  return std::max(a, b);
}

/// A block mask being put together: everything is kept until a piece clears it.
struct BlockGrid {
  int64_t batch, heads, rows, keys;
  std::vector<uint8_t> keep;

  BlockGrid(int64_t b, int64_t h, int64_t seqlen_q, int64_t seqlen_k)
      : batch(b),
        heads(h),
        rows(ceil_div(seqlen_q, kBlockMaskSize)),
        keys(ceil_div(seqlen_k, kBlockMaskSize)),
        keep(static_cast<std::size_t>(b * h * rows * keys), 1) {}

  /// Clears the blocks that `mask` clears, shifted so that its block (row0, key0) is at (row_at, key_at).
  void clear(const Mask& mask, int64_t row0, int64_t key0, int64_t row_at, int64_t key_at) {
    if (!mask.has_block_mask()) return;
    const MaskView& view = mask.view();
    const int64_t own_rows = ceil_div(view.seqlen_q, kBlockMaskSize),
                  own_keys = ceil_div(view.seqlen_k, kBlockMaskSize);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        const uint8_t* own =
            block_mask(view, broadcast_index(b, batch, view.batch()), broadcast_index(h, heads, view.heads()));
        uint8_t* out = keep.data() + (b * heads + h) * rows * keys;
        for (int64_t r = row0; r < own_rows && row_at + r - row0 < rows; ++r) {
          for (int64_t c = key0; c < own_keys && key_at + c - key0 < keys; ++c) {
            if (!own[r * own_keys + c]) out[(row_at + r - row0) * keys + key_at + c - key0] = 0;
          }
        }
      }
    }
  }
};

/// Column j of `columns` for batch entry b and head h of a larger batch and head count.
std::span<const Interval> broadcast_column(const HiddenColumns& columns, int64_t batch, int64_t heads, int64_t b,
                                           int64_t h, int64_t j) {
  const int64_t own_b = broadcast_index(b, batch, columns.batch()), own_h = broadcast_index(h, heads, columns.heads());
  return columns[(own_b * columns.heads() + own_h) * columns.seqlen_k() + j];
}

/// The band that hides what either hides, around a's q_offset; or over the positions that both have.
Band intersect_bands(const Mask& a, const Mask& b) {
  const int64_t shift = b.q_offset() - a.q_offset();
  Band band = a.band();
  if (b.band().lo) band.lo = std::max(band.lo.value_or(INT64_MIN), *b.band().lo + shift);
  if (b.band().hi) band.hi = std::min(band.hi.value_or(INT64_MAX), *b.band().hi + shift);
  return band;
}

/// Positions of rows and keys, both [batch, ...]; empty if there are none.
struct Positions {
  int64_t batch = 1;
  std::vector<int32_t> q, k;

  bool operator==(const Positions&) const = default;
  Mask put_on(const Mask& mask) && { return mask.with_positions(std::move(q), std::move(k), batch); }
};

/// Positions of rows [row_begin, row_end) and keys [key_begin, key_end), for `batch` entries; 0: for the mask's own.
Positions positions_of(const Mask& mask, int64_t row_begin, int64_t row_end, int64_t key_begin, int64_t key_end,
                       int64_t batch = 0) {
  const MaskView& view = mask.view();
  Positions part{.batch = batch ? batch : std::max(view.q_pos_batch, view.k_pos_batch), .q = {}, .k = {}};
  if (!view.has_positions) return part;
  for (int64_t b = 0; b < part.batch; ++b) {
    const int32_t* q = view.q_pos + broadcast_index(b, part.batch, view.q_pos_batch) * view.seqlen_q;
    const int32_t* k = view.k_pos + broadcast_index(b, part.batch, view.k_pos_batch) * view.seqlen_k;
    part.q.insert(part.q.end(), q + row_begin, q + row_end);
    part.k.insert(part.k.end(), k + key_begin, k + key_end);
  }
  return part;
}

Positions positions_of(const Mask& mask) { return positions_of(mask, 0, mask.seqlen_q(), 0, mask.seqlen_k()); }

void check_range(const char* what, int64_t begin, int64_t end, int64_t seqlen) {
  if (begin < 0 || begin > end || end > seqlen)
    throw_invalid(what, " range [", begin, ", ", end, ") is not within [0, ", seqlen, ")");
}

/// The last block of a piece must not reach into both the rows and the keys of a piece after it; along one of
/// the two is no harm, there nothing sees the other.
void check_block_ends(std::span<const Mask> pieces, int64_t seqlen_q, int64_t seqlen_k) {
  int64_t row = 0, key = 0;
  for (const Mask& piece : pieces) {
    row += piece.seqlen_q();
    key += piece.seqlen_k();
    const bool inside = row < seqlen_q && key < seqlen_k;
    if (piece.has_block_mask() && inside && row % kBlockMaskSize != 0 && key % kBlockMaskSize != 0) {
      throw_unsupported("a piece with a block mask ends at (row ", row, ", key ", key,
                        ") and others follow; one of the two must be a multiple of 128");
    }
  }
}

/// The rows that either mask hides by itself, column by column.
StoredColumns hidden_by_either(const Mask& a, const Mask& b, int64_t batch, int64_t heads) {
  const MaskColumns of_a(a), of_b(b);
  StoredColumns both(a.seqlen_q(), a.seqlen_k(), batch, heads);
  std::vector<Interval> hidden;
  for (int64_t n = 0; n < batch; ++n) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t j = 0; j < a.seqlen_k(); ++j) {
        const auto x = broadcast_column(of_a, batch, heads, n, h, j), y = broadcast_column(of_b, batch, heads, n, h, j);
        hidden.assign(x.begin(), x.end());
        hidden.insert(hidden.end(), y.begin(), y.end());
        both.append(hidden);
      }
    }
  }
  return both;
}

/// The intervals and the band, around a's q_offset, of an intersection.
MaskParts intersect_columns(const Mask& a, const Mask& b, int64_t batch, int64_t heads) {
  const StoredColumns both = hidden_by_either(a, b, batch, heads);
  // The band the two have together comes first: it is what the caller wrote.
  std::vector<Band> candidates{intersect_bands(a, b)};
  for (const Band& band : both.tightest_bands(a.q_offset())) candidates.push_back(band);
  return fit_parts(both, candidates, a.q_offset());
}

/// An intersection whose band is over `kept`'s positions; `other`'s band, too, if both have equal positions.
Mask intersect_positions(const Mask& kept, const Mask& other, int64_t batch, int64_t heads) {
  Positions positions = positions_of(kept);
  const bool same = other.has_positions() && positions == positions_of(other);
  const StoredColumns both =
      hidden_by_either(kept.with_band(Band::none()), same ? other.with_band(Band::none()) : other, batch, heads);
  const std::array candidates{Band::none()};
  const Mask mask{fit_parts(both, candidates, 0)};
  return std::move(positions).put_on(mask).with_band(same ? intersect_bands(kept, other) : kept.band());
}

/// True if all pieces have positions and equal bands.
bool share_band_over_positions(std::span<const Mask> pieces) {
  return !pieces.empty() && std::ranges::all_of(pieces, [&](const Mask& piece) {
    return piece.has_positions() && piece.band() == pieces.front().band();
  });
}

Positions concatenate_positions(std::span<const Mask> pieces) {
  Positions packed;
  for (const Mask& piece : pieces) packed.batch = std::max(packed.batch, positions_of(piece).batch);
  for (int64_t b = 0; b < packed.batch; ++b) {
    for (const Mask& piece : pieces) {
      const int64_t rows = piece.seqlen_q(), keys = piece.seqlen_k();
      const Positions own = positions_of(piece, 0, rows, 0, keys, packed.batch);
      packed.q.insert(packed.q.end(), own.q.begin() + b * rows, own.q.begin() + (b + 1) * rows);
      packed.k.insert(packed.k.end(), own.k.begin() + b * keys, own.k.begin() + (b + 1) * keys);
    }
  }
  return packed;
}

/// The lists of keys [key_begin, key_end), whose rows begin at row_begin.
void crop_lists(const Mask& mask, int64_t row_begin, int64_t key_begin, int64_t key_end, MaskParts& parts) {
  const auto ptr = mask.column_ptr(), intervals = mask.intervals();
  for (int64_t bh = 0; bh < parts.batch * parts.heads; ++bh) {
    for (int64_t j = key_begin; j <= key_end; ++j)
      parts.column_ptr.push_back(ptr[static_cast<std::size_t>(bh * (mask.seqlen_k() + 1) + j)]);
  }
  for (const int32_t row : intervals) parts.intervals.push_back(row - static_cast<int32_t>(row_begin));
}

}  // namespace

Mask intersect(const Mask& a, const Mask& b) {
  if (a.seqlen_q() != b.seqlen_q() || a.seqlen_k() != b.seqlen_k()) {
    throw_invalid("the masks have lengths (", a.seqlen_q(), ", ", a.seqlen_k(), ") and (", b.seqlen_q(), ", ",
                  b.seqlen_k(), "); they must be equal");
  }
  const int64_t batch = broadcast_batch(a.batch(), b.batch()), heads = broadcast_heads(a.heads(), b.heads());
  const bool keeps_a = compares_positions(a.view()) || (a.has_positions() && !compares_positions(b.view()));
  Mask mask = keeps_a             ? intersect_positions(a, b, batch, heads)
              : b.has_positions() ? intersect_positions(b, a, batch, heads)
                                  : Mask(intersect_columns(a, b, batch, heads));
  if (!a.has_block_mask() && !b.has_block_mask()) return mask;
  BlockGrid grid(batch, heads, a.seqlen_q(), a.seqlen_k());
  grid.clear(a, 0, 0, 0, 0);
  grid.clear(b, 0, 0, 0, 0);
  return mask.with_block_mask(std::move(grid.keep), batch, heads);
}

Mask concatenate(std::span<const Mask> pieces) {
  int64_t batch = 1, heads = 1, seqlen_q = 0, seqlen_k = 0;
  bool blocks = false;
  for (const Mask& piece : pieces) {
    batch = broadcast_batch(batch, piece.batch());
    heads = broadcast_heads(heads, piece.heads());
    if (piece.has_block_mask() && (seqlen_q % kBlockMaskSize != 0 || seqlen_k % kBlockMaskSize != 0)) {
      throw_unsupported("a piece with a block mask would begin at (row ", seqlen_q, ", key ", seqlen_k,
                        "); both must be multiples of 128");
    }
    blocks |= piece.has_block_mask();
    seqlen_q += piece.seqlen_q();
    seqlen_k += piece.seqlen_k();
    if (seqlen_q > kMaxSeqlen || seqlen_k > kMaxSeqlen)
      throw_invalid("the pieces add up to more than ", kMaxSeqlen, " rows or keys");
  }
  if (blocks) check_block_ends(pieces, seqlen_q, seqlen_k);
  const bool has_positions = share_band_over_positions(pieces);
  std::vector<MaskColumns> own;
  own.reserve(pieces.size());
  for (const Mask& piece : pieces) own.emplace_back(has_positions ? piece.with_band(Band::none()) : piece);
  StoredColumns packed(seqlen_q, seqlen_k, batch, heads);
  std::vector<Interval> hidden;
  for (int64_t n = 0; n < batch; ++n) {
    for (int64_t h = 0; h < heads; ++h) {
      int32_t row0 = 0;
      for (std::size_t p = 0; p < pieces.size(); ++p) {
        const auto row1 = static_cast<int32_t>(row0 + pieces[p].seqlen_q());
        for (int64_t j = 0; j < pieces[p].seqlen_k(); ++j) {
          hidden.assign({{0, row0}, {row1, static_cast<int32_t>(seqlen_q)}});
          for (const Interval& x : broadcast_column(own[p], batch, heads, n, h, j))
            hidden.push_back({x.begin + row0, x.end + row0});
          packed.append(hidden);
        }
        row0 = row1;
      }
    }
  }
  const int64_t q_offset = seqlen_k - seqlen_q;
  const std::vector<Band> bands = has_positions ? std::vector{Band::none()} : packed.tightest_bands(q_offset);
  MaskParts parts = fit_parts(packed, bands, q_offset);
  if (blocks) {
    BlockGrid grid(batch, heads, seqlen_q, seqlen_k);
    int64_t row_at = 0, key_at = 0;
    for (const Mask& piece : pieces) {
      grid.clear(piece, 0, 0, row_at / kBlockMaskSize, key_at / kBlockMaskSize);
      row_at += piece.seqlen_q();
      key_at += piece.seqlen_k();
    }
    parts.block_batch = batch;
    parts.block_heads = heads;
    parts.block_mask = std::move(grid.keep);
  }
  const Mask mask(std::move(parts));
  return has_positions ? concatenate_positions(pieces).put_on(mask).with_band(pieces.front().band()) : mask;
}

Mask crop(const Mask& mask, int64_t row_begin, int64_t row_end, int64_t key_begin, int64_t key_end) {
  check_range("row", row_begin, row_end, mask.seqlen_q());
  check_range("key", key_begin, key_end, mask.seqlen_k());
  if (mask.has_block_mask() && (row_begin % kBlockMaskSize != 0 || key_begin % kBlockMaskSize != 0)) {
    throw_unsupported("a mask with a block mask is cropped at (row ", row_begin, ", key ", key_begin,
                      "); both must be multiples of 128");
  }
  const MaskView& view = mask.view();
  require_host(view, "crop");
  const int64_t rows = row_end - row_begin, keys = key_end - key_begin;
  MaskParts parts{.seqlen_q = rows,
                  .seqlen_k = keys,
                  .band = mask.band(),
                  .q_offset = mask.q_offset() + row_begin - key_begin,
                  .batch = view.bounds_batch,
                  .heads = view.bounds_heads};
  const auto cropped = [&](std::span<const int32_t> vector) {
    std::vector<int32_t> out;
    if (vector.empty()) return out;
    out.reserve(static_cast<std::size_t>(view.bounds_batch * view.bounds_heads * keys));
    for (int64_t bh = 0; bh < view.bounds_batch * view.bounds_heads; ++bh) {
      for (int64_t j = key_begin; j < key_end; ++j) {
        out.push_back(rules::clamp_row(vector[static_cast<std::size_t>(bh * view.seqlen_k + j)] - row_begin,
                                       static_cast<int32_t>(rows)));
      }
    }
    return out;
  };
  parts.lts = cropped(mask.lts());
  parts.lte = cropped(mask.lte());
  parts.uts = cropped(mask.uts());
  parts.ute = cropped(mask.ute());
  if (mask.has_interval_lists()) crop_lists(mask, row_begin, key_begin, key_end, parts);
  if (mask.has_block_mask()) {
    BlockGrid grid(view.block_batch, view.block_heads, rows, keys);
    const Mask blocks_only =
        Mask({.seqlen_q = view.seqlen_q, .seqlen_k = view.seqlen_k})
            .with_block_mask({mask.block_mask().begin(), mask.block_mask().end()}, view.block_batch, view.block_heads);
    grid.clear(blocks_only, row_begin / kBlockMaskSize, key_begin / kBlockMaskSize, 0, 0);
    parts.block_batch = grid.batch;
    parts.block_heads = grid.heads;
    parts.block_mask = std::move(grid.keep);
  }
  return positions_of(mask, row_begin, row_end, key_begin, key_end).put_on(Mask(std::move(parts)));
}

}  // namespace flashmask
