// SPDX-License-Identifier: Apache-2.0
#include "flashmask/plan.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "common/arithmetic.h"
#include "common/host_memory.h"
#include "common/message.h"
#include "mask/list_rows.h"
#include "mask/tile_classifier.h"
#include "mask/view.h"
#include "plan/mask_memory.h"
#include "plan/plan_buffer.h"
#include "plan/plan_header.h"
#include "plan/runs.h"

namespace flashmask {
namespace {

using Words = std::span<uint64_t>;

/// Transposes a 64 x 64 bit matrix: bit c of word r goes to bit r of word c. Swaps ever smaller squares
/// across the diagonal.
void transpose64(std::array<uint64_t, 64>& a) {
  uint64_t mask = 0x00000000ffffffffu;
  for (std::size_t width = 32; width > 0; width >>= 1, mask ^= mask << width) {
    for (std::size_t k = 0; k < 64; k = (k + width + 1) & ~width) {
      const uint64_t swap = ((a[k] >> width) ^ a[k + width]) & mask;
      a[k] ^= swap << width;
      a[k + width] ^= swap;
    }
  }
}

/// Indices of `counts`, largest first, equal ones ascending: a counting sort.
void longest_first(std::span<const int32_t> counts, int64_t largest, std::span<int32_t> order) {
  std::vector<int32_t> begin(static_cast<std::size_t>(largest) + 2, 0);
  for (const int32_t count : counts) ++begin[static_cast<std::size_t>(largest - count) + 1];
  for (std::size_t k = 1; k < begin.size(); ++k) begin[k] += begin[k - 1];
  for (std::size_t n = 0; n < counts.size(); ++n)
    order[static_cast<std::size_t>(begin[static_cast<std::size_t>(largest - counts[n])]++)] = static_cast<int32_t>(n);
}

int32_t count_bits(std::span<const uint64_t> words) {
  int32_t count = 0;
  for (const uint64_t word : words) count += std::popcount(word);
  return count;
}

/// The two row granules of every block that `keep` clears are neither live nor full.
void clear_blocks(const uint8_t* keep, int64_t key_blocks, int64_t key_block, int64_t row_granules, Words live,
                  Words full) {
  constexpr int64_t kPerBlock = kBlockMaskSize / kGranuleRows;
  for (int64_t r = 0; r < row_granules; ++r) {
    if (keep[r / kPerBlock * key_blocks + key_block]) continue;
    const uint64_t others = ~(uint64_t{1} << (r % 64));
    live[static_cast<std::size_t>(r / 64)] &= others;
    full[static_cast<std::size_t>(r / 64)] &= others;
  }
}

/// rules::last_visible_row of a column with a list.
template <typename IsLive>
int32_t last_listed_row(const ColumnRows& column, const rules::PositionBand& band, int32_t key, const IsLive& is_live) {
  constexpr auto kGranule = static_cast<int32_t>(kGranuleRows);
  for (int32_t row = column.columns().seqlen_q - 1; row >= 0;) {
    if (!is_live(row / kGranule)) {
      row = row / kGranule * kGranule - 1;
    } else if (column.is_visible(row, key) && (!band.q_pos || rules::in_band(band, band.q_pos[row], band.k_pos[key]))) {
      return row;
    } else {
      --row;
    }
  }
  return -1;
}

/// Extends `extent` by the rows and keys visible in block `c` of keys, whose live granules are `live`.
void extend(VisibleExtent& extent, const ColumnRows& column, const rules::PositionBand& band, int64_t seqlen_k,
            int64_t c, std::span<const uint64_t> live) {
  const auto is_live = [live](int32_t granule) {
    return (live[static_cast<std::size_t>(granule / 64)] >> (granule % 64) & 1) != 0;
  };
  const auto first = static_cast<int32_t>(c * kGranuleKeys);
  const auto end = static_cast<int32_t>(std::min((c + 1) * kGranuleKeys, seqlen_k));
  for (int32_t key = first; key < end; ++key) {
    const int32_t row = column.has_lists()
                            ? last_listed_row(column, band, key, is_live)
                            : rules::last_visible_row<kGranuleRows>(column.columns(), band, key, is_live);
    if (row < 0) continue;
    extent = {std::max(extent.rows, row + 1), std::max(extent.keys, key + 1)};
  }
}

void require_on_host(const PlanView& plan, const char* reader) {
  if (plan.device().kind == Device::Kind::kCpu) return;
  throw_invalid(reader, " reads the plan, which is on CUDA device ", plan.device().index,
                "; build it on the CPU, or copy its buffer there");
}

template <typename T>
T* at(std::span<std::byte> buffer, int64_t offset) {
  return reinterpret_cast<T*>(buffer.data() + offset);
}

/// Offsets of the row tiles of so many granules in a layout.
struct RowTiles {
  int64_t granules, tiles, counts, order;
};

RowTiles row_tiles(const PlanLayout& layout, int64_t granules_per_tile) {
  switch (granules_per_tile) {
    case 2:
      return {2, layout.row_tiles_128, layout.row_tile_counts_128, layout.row_tile_order_128};
    case 3:
      return {3, layout.row_tiles_192, layout.row_tile_counts_192, layout.row_tile_order_192};
    default:
      throw_invalid("granules_per_tile is ", granules_per_tile,
                    "; a plan keeps the order of row tiles of 2 and of 3 granules");
  }
}

/// One of a plan's four matrices of granules: where its first line is, and what a line has.
struct Matrix {
  int64_t offset, lines, words, granules;
};

struct Matrices {
  Matrix live, full;
};

Matrices by_keys(const PlanLayout& layout) {
  const auto at = [&](int64_t offset) {
    return Matrix{offset, layout.key_blocks, layout.words_per_key, layout.row_granules};
  };
  return {at(layout.key_live), at(layout.key_full)};
}

Matrices by_rows(const PlanLayout& layout) {
  const auto at = [&](int64_t offset) {
    return Matrix{offset, layout.row_granules, layout.words_per_row, layout.key_blocks};
  };
  return {at(layout.row_live), at(layout.row_full)};
}

/// Writes a line of mask index `m`, word by word, in the plan's form.
class LineWriter {
 public:
  LineWriter(const PlanLayout& layout, std::span<std::byte> buffer, const Matrix& matrix, int64_t m, int64_t line)
      : granules_(static_cast<int32_t>(matrix.granules)), runs_(nullptr) {
    const int64_t index = m * matrix.lines + line;
    if (layout.in_runs()) {
      runs_ = RunWriter(at<GranuleRun>(buffer, matrix.offset) + index * kLineRuns);
      most_ = at<int32_t>(buffer, layout.most_runs);
    } else {
      words_ = at<uint64_t>(buffer, matrix.offset) + index * matrix.words;
    }
  }
  void add(int64_t word, uint64_t bits) {
    if (words_) {
      words_[word] = bits;
    } else {
      runs_.add(bits, static_cast<int32_t>(word * 64));
    }
  }
  void finish() {
    if (words_) return;
    if (const int32_t runs = runs_.finish(granules_); runs > kLineRuns) *most_ = std::max(*most_, runs);
  }

 private:
  int32_t granules_;
  uint64_t* words_ = nullptr;
  RunWriter runs_;
  int32_t* most_ = nullptr;
};

void write_line(LineWriter line, std::span<const uint64_t> words) {
  for (std::size_t w = 0; w < words.size(); ++w) line.add(static_cast<int64_t>(w), words[w]);
  line.finish();
}

/// Words of 64 key blocks of 64 row granules: those of `row_word` in the lines of the keys of `key_word`, transposed.
std::array<uint64_t, 64> transposed_square(const PlanView& plan, int64_t m, bool full, int64_t row_word,
                                           int64_t key_word) {
  std::array<uint64_t, 64> square{};
  const int64_t keys = std::min<int64_t>(64, plan.layout().key_blocks - key_word * 64);
  for (int64_t k = 0; k < keys; ++k) {
    const int64_t c = key_word * 64 + k;
    const GranuleLine line = full ? plan.key_full(m, c) : plan.key_live(m, c);
    square[static_cast<std::size_t>(k)] = line[static_cast<std::size_t>(row_word)];
  }
  transpose64(square);
  return square;
}

/// Writes the lines of the 64 row granules of `row_word`, live or full ones, from those of the key blocks.
void write_rows(const PlanView& plan, int64_t m, bool full, int64_t row_word, std::span<std::byte> buffer) {
  const PlanLayout& layout = plan.layout();
  const Matrix matrix = full ? by_rows(layout).full : by_rows(layout).live;
  std::vector<LineWriter> lines;
  const int64_t end = std::min((row_word + 1) * 64, layout.row_granules);
  for (int64_t r = row_word * 64; r < end; ++r) lines.emplace_back(layout, buffer, matrix, m, r);
  for (int64_t w = 0; w < layout.words_per_row; ++w) {
    const std::array<uint64_t, 64> square = transposed_square(plan, m, full, row_word, w);
    for (std::size_t n = 0; n < lines.size(); ++n) lines[n].add(w, square[n]);
  }
  for (LineWriter& line : lines) line.finish();
}

/// Counts the live key blocks of row granules [begin, end), which there may be fewer of: those live in any.
int32_t count_live(const PlanView& plan, int64_t m, int64_t begin, int64_t end) {
  int32_t count = 0;
  for (std::size_t w = 0; w < static_cast<std::size_t>(plan.layout().words_per_row); ++w) {
    uint64_t live = 0;
    for (int64_t r = begin; r < std::min(end, plan.layout().row_granules); ++r) live |= plan.row_live(m, r)[w];
    count += std::popcount(live);
  }
  return count;
}

/// Counts and orders the row tiles of mask index `m`, whose row granules are there.
void order_row_tiles(const PlanView& plan, const RowTiles& tiles, int64_t m, std::span<std::byte> buffer) {
  const std::span<int32_t> counts(at<int32_t>(buffer, tiles.counts) + m * tiles.tiles,
                                  static_cast<std::size_t>(tiles.tiles));
  for (int64_t t = 0; t < tiles.tiles; ++t)
    counts[static_cast<std::size_t>(t)] = count_live(plan, m, t * tiles.granules, (t + 1) * tiles.granules);
  longest_first(counts, plan.layout().key_blocks, {at<int32_t>(buffer, tiles.order) + m * tiles.tiles, counts.size()});
}

/// Writes the lines of the key blocks of mask index `m`, their counts and what its batch entry's extent gains.
void write_key_blocks(const MaskView& mask, const PlanLayout& layout, int64_t m, TileClassifier& classifier,
                      std::span<std::byte> buffer) {
  const int64_t b = m / layout.heads, h = m % layout.heads;
  const ColumnRows column = column_rows(mask, b, h);
  const rules::PositionBand positions = position_band(mask, b);
  classifier.set_positions(positions);
  const uint8_t* keep = block_mask(mask, b, h);
  std::vector<uint64_t> live(static_cast<std::size_t>(layout.words_per_key)), full(live.size());
  int32_t* key_counts = at<int32_t>(buffer, layout.key_counts) + m * layout.key_blocks;
  VisibleExtent& extent = at<VisibleExtent>(buffer, layout.extents())[b];
  const Matrices lines = by_keys(layout);
  for (int64_t c = 0; c < layout.key_blocks; ++c) {
    classifier.classify(column, c * kGranuleKeys, std::min((c + 1) * kGranuleKeys, mask.seqlen_k), live, full);
    if (keep) clear_blocks(keep, layout.key_blocks, c, layout.row_granules, live, full);
    key_counts[c] = count_bits(live);
    if (key_counts[c] > 0) extend(extent, column, positions, mask.seqlen_k, c, live);
    write_line(LineWriter(layout, buffer, lines.live, m, c), live);
    write_line(LineWriter(layout, buffer, lines.full, m, c), full);
  }
  longest_first(
      {key_counts, static_cast<std::size_t>(layout.key_blocks)}, layout.row_granules,
      {at<int32_t>(buffer, layout.key_order) + m * layout.key_blocks, static_cast<std::size_t>(layout.key_blocks)});
}

/// The interval lists of mask batch entry `b` and mask head `h`; the view has some.
rules::IntervalLists interval_lists(const MaskView& view, int64_t b, int64_t h) {
  const int64_t list = broadcast_index(b, view.batch(), view.bounds_batch) * view.bounds_heads +
                       broadcast_index(h, view.heads(), view.bounds_heads);
  return {view.column_ptr + list * (view.seqlen_k + 1), view.intervals, static_cast<int32_t>(view.listed_intervals)};
}

/// The tile of granule (m, r, c).
void write_tile(const MaskView& mask, const PlanLayout& layout, int64_t m, int64_t r, int64_t c, uint64_t* tile) {
  const int64_t b = m / layout.heads, h = m % layout.heads;
  const auto row = static_cast<int32_t>(r * kGranuleRows);
  for (int64_t key = c * kGranuleKeys; key < (c + 1) * kGranuleKeys; ++key) {
    const auto j = static_cast<int32_t>(key);
    if (key >= mask.seqlen_k) {
      *tile++ = 0;
      continue;
    }
    rules::ListedRows rows(columns(mask, b, h), interval_lists(mask, b, h), j, /*ascends=*/true, row);
    *tile++ = rules::rows_in_band(position_band(mask, b), j, row, rows.next(row));
  }
}

/// The parts of a plan with bits, whose other parts are there. Tiles that there is no room for are only counted.
void write_bits(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> buffer) {
  const int64_t masks = layout.batch * layout.heads;
  for (int64_t m = 0; m < masks; ++m) {
    auto* ascending = at<uint32_t>(buffer, layout.ascending_lists) + m * layout.key_blocks * (kGranuleKeys / 32);
    for (int64_t key = 0; key < mask.seqlen_k; ++key) ascending[key / 32] |= uint32_t{1} << key % 32;
  }
  const auto* live = at<uint32_t>(buffer, layout.row_live);
  const auto* full = at<uint32_t>(buffer, layout.row_full);
  auto* before = at<int32_t>(buffer, layout.tiles_before);
  auto* tiles = at<uint64_t>(buffer, layout.tile_bits);
  const int64_t words = 2 * layout.words_per_row;
  int32_t tile = 0;
  for (int64_t word = 0; word < masks * layout.row_granules * words; ++word) {
    before[word] = tile;
    for (uint32_t partial = live[word] & ~full[word]; partial; partial &= partial - 1, ++tile) {
      if (tile >= layout.bit_tiles) continue;
      const int64_t row = word / words, block = word % words * 32 + std::countr_zero(partial);
      write_tile(mask, layout, row / layout.row_granules, row % layout.row_granules, block,
                 tiles + tile * kBitTileWords);
    }
  }
  before[masks * layout.row_granules * words] = tile;
}

}  // namespace

PlanLayout::PlanLayout(int64_t seqlen_q_, int64_t seqlen_k_, int64_t batch_, int64_t heads_, int64_t bit_tiles_,
                       PlanForm form_)
    : seqlen_q(seqlen_q_), seqlen_k(seqlen_k_), batch(batch_), heads(heads_), bit_tiles(bit_tiles_), form(form_) {
  if (in_runs() && has_bits())
    throw_invalid("bit_tiles is ", bit_tiles, "; a plan in runs has none, and bit_tiles must be kNoBits (-1)");
  for (const auto& [argument, value] : {std::pair{"seqlen_q", seqlen_q}, {"seqlen_k", seqlen_k}}) {
    if (value < 0 || value > kMaxSeqlen)
      throw_invalid(argument, " is ", value, "; it must be between 0 and ", kMaxSeqlen);
  }
  if (batch < 1 || heads < 1)
    throw_invalid("a plan's batch and heads are ", batch, " and ", heads, "; both must be at least 1");
  row_granules = ceil_div(seqlen_q, kGranuleRows);
  key_blocks = ceil_div(seqlen_k, kGranuleKeys);
  words_per_row = ceil_div(key_blocks, 64);
  words_per_key = ceil_div(row_granules, 64);
  const auto masks = checked_product(batch, heads);
  // The largest offset is a few times this product, so checking it with room to spare checks them all.
  const auto largest = masks ? checked_product(*masks, row_granules + 64, key_blocks + 64, int64_t{16}) : std::nullopt;
  const auto refuse = [&](const auto&... size) {
    throw_invalid("a plan for seqlen_q ", seqlen_q, ", seqlen_k ", seqlen_k, ", batch ", batch, " and heads ", heads,
                  " has ", size..., " bytes; it must have at most ", kMaxPlanBytes, " (1 TiB): pass shorter lengths");
  };
  if (!largest) refuse("more than 2^63");
  row_tiles_128 = ceil_div(seqlen_q, 2 * kGranuleRows);
  row_tiles_192 = ceil_div(seqlen_q, 3 * kGranuleRows);
  int64_t end = static_cast<int64_t>(sizeof(PlanHeader));
  const auto take = [&end](int64_t count, int64_t size) {
    const int64_t begin = end;
    end = round_up(end + count * size, 8);
    return begin;
  };
  const int64_t of_row = in_runs() ? kLineRuns : words_per_row, of_key = in_runs() ? kLineRuns : words_per_key;
  for (int64_t* granules : {&row_live, &row_full}) *granules = take(*masks * row_granules * of_row, 8);
  for (int64_t* granules : {&key_live, &key_full}) *granules = take(*masks * key_blocks * of_key, 8);
  row_counts = take(*masks * row_granules, 4);
  key_counts = take(*masks * key_blocks, 4);
  key_order = take(*masks * key_blocks, 4);
  row_tile_counts_128 = take(*masks * row_tiles_128, 4);
  row_tile_order_128 = take(*masks * row_tiles_128, 4);
  row_tile_counts_192 = take(*masks * row_tiles_192, 4);
  row_tile_order_192 = take(*masks * row_tiles_192, 4);
  scratch = take(*masks * key_blocks, 8);
  most_runs = take(in_runs() ? 1 : 0, 4);
  visible_extents = take(batch, sizeof(VisibleExtent));
  if (has_bits()) {
    if (bit_tiles > kMaxPlanBytes / kBitTileBytes) refuse("more than ", kMaxPlanBytes);
    ascending_lists = take(*masks * key_blocks, kGranuleKeys / 8);
    tiles_before = take(*masks * row_granules * 2 * words_per_row + 1, 4);
    tile_bits = take(bit_tiles, kBitTileBytes);
  }
  bytes = end;
  if (bytes > kMaxPlanBytes) refuse(bytes);
}

PlanView::PlanView(std::span<const std::byte> buffer) {
  PlanHeader header{};
  if (buffer.size() >= sizeof(header)) std::memcpy(&header, buffer.data(), sizeof(header));
  if (header.magic != PlanHeader::kBitsMagic && header.magic != PlanHeader::kRunsMagic)
    throw_invalid("plan: the buffer does not hold a plan; fill it with build_plan first");
  if (reinterpret_cast<std::uintptr_t>(buffer.data()) % 8 != 0)
    throw_invalid("plan: the buffer must be aligned to 8 bytes");
  const PlanLayout layout(header.seqlen_q, header.seqlen_k, header.batch, header.heads, kNoBits,
                          header.magic == PlanHeader::kRunsMagic ? PlanForm::kRuns : PlanForm::kBits);
  if (static_cast<int64_t>(buffer.size()) < layout.bytes)
    throw_invalid("plan: the buffer has ", buffer.size(), " bytes; its plan needs ", layout.bytes);
  base_ = buffer.data();
  layout_ = layout;
  mask_hash_ = header.mask_hash;
}

uint64_t GranuleLine::runs_word(std::size_t word) const {
  return flashmask::runs_word<uint64_t>(runs_, static_cast<int32_t>(word * 64));
}

PlanView PlanView::on_device(const PlanLayout& layout, std::span<const std::byte> buffer, Device device) {
  if (device.kind == Device::Kind::kCpu)
    throw_invalid("plan: PlanView::on_device is for CUDA devices; on the CPU read the buffer itself");
  if (!buffer.data() || reinterpret_cast<std::uintptr_t>(buffer.data()) % 8 != 0)
    throw_invalid("plan: the buffer must be there and aligned to 8 bytes");
  if (static_cast<int64_t>(buffer.size()) < layout.bytes)
    throw_invalid("plan: the buffer has ", buffer.size(), " bytes; its plan needs ", layout.bytes);
  PlanView view;
  view.base_ = buffer.data();
  view.layout_ = layout;
  view.device_ = device;
  return view;
}

std::span<const int32_t> PlanView::row_tile_counts(int64_t m, int64_t granules_per_tile) const {
  const RowTiles tiles = row_tiles(layout_, granules_per_tile);
  return ints(tiles.counts, m, tiles.tiles);
}

std::span<const int32_t> PlanView::row_tile_order(int64_t m, int64_t granules_per_tile) const {
  const RowTiles tiles = row_tiles(layout_, granules_per_tile);
  return ints(tiles.order, m, tiles.tiles);
}

int64_t PlanView::live_granules() const {
  require_on_host(*this, "live_granules");
  int64_t live = 0;
  for (int64_t m = 0; m < layout_.batch * layout_.heads; ++m) {
    for (const int32_t count : row_counts(m)) live += count;
  }
  return live;
}

void build_plan(const MaskView& mask, std::span<std::byte> buffer) {
  build_plan(mask, plan_layout(mask, Device{}, buffer.size()), buffer);
}

void build_plan(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> buffer) {
  write_plan(mask, layout, buffer);
  check_runs(layout, most_runs(layout, buffer));
}

void write_plan(const MaskView& mask, const PlanLayout& layout, std::span<std::byte> buffer) {
  if (mask.device.kind != Device::Kind::kCpu)
    throw_invalid("the mask's vectors are on a CUDA device; build_plan reads them and needs them in host memory");
  check_plan_buffer("plan buffer", buffer, layout);
  const PlanHeader header = plan_header(layout, mask.content_hash);
  std::memcpy(buffer.data(), &header, sizeof(header));
  // Clears the scratch and the padding between the parts.
  const int64_t end = layout.has_bits() ? layout.tile_bits : layout.bytes;
  std::memset(buffer.data() + layout.row_counts, 0, static_cast<std::size_t>(end - layout.row_counts));

  TileClassifier classifier(mask.seqlen_q, kGranuleRows);
  const PlanView plan(buffer.first(static_cast<std::size_t>(layout.bytes)));
  for (int64_t m = 0; m < layout.batch * layout.heads; ++m) {
    write_key_blocks(mask, layout, m, classifier, buffer);
    for (int64_t word = 0; word < layout.words_per_key; ++word) {
      for (const bool full : {false, true}) write_rows(plan, m, full, word, buffer);
    }
    int32_t* row_counts = at<int32_t>(buffer, layout.row_counts) + m * layout.row_granules;
    for (int64_t r = 0; r < layout.row_granules; ++r) row_counts[r] = count_live(plan, m, r, r + 1);
    for (const RowTiles& tiles : {row_tiles(layout, 2), row_tiles(layout, 3)}) order_row_tiles(plan, tiles, m, buffer);
  }
  if (layout.has_bits()) write_bits(mask, layout, buffer);
}

int32_t most_runs(const PlanLayout& layout, std::span<const std::byte> buffer) {
  int32_t most = 0;
  if (layout.in_runs()) std::memcpy(&most, buffer.data() + layout.most_runs, sizeof(most));
  return most;
}

void check_runs(const PlanLayout& layout, int32_t most_runs) {
  if (most_runs == 0) return;
  throw_invalid("the plan has ", layout.bytes, " bytes, for ", kLineRuns,
                " runs of granules a line; its mask has lines of more: it needs ",
                PlanLayout(layout.seqlen_q, layout.seqlen_k, layout.batch, layout.heads).bytes, ", for bits");
}

std::optional<PlanLayout> runs_layout(const MaskView& mask) {
  if (mask.column_ptr || mask.has_positions) return std::nullopt;
  const PlanLayout bits = plan_layout(mask), runs = plan_layout(mask, kNoBits, PlanForm::kRuns);
  if (bits.row_counts - bits.row_live <= kShortPlanBytes || runs.bytes >= bits.bytes) return std::nullopt;
  return runs;
}

int64_t most_bit_tiles(const MaskView& mask, Device device) {
  if (device.kind == Device::Kind::kCpu || !mask.column_ptr) return kNoBits;
  const PlanLayout layout = plan_layout(mask);
  int64_t blocks_of_row = layout.key_blocks;
  if (!mask.has_positions && mask.diagonal_lo != INT32_MIN && mask.diagonal_hi != INT32_MAX) {
    // A granule's rows see at most so many neighbouring keys.
    const int64_t width = std::max<int64_t>(int64_t{mask.diagonal_hi} - mask.diagonal_lo + kGranuleRows, 0);
    blocks_of_row = std::min(blocks_of_row, width / kGranuleKeys + 2);
  }
  return layout.batch * layout.heads * layout.row_granules * blocks_of_row;
}

PlanLayout plan_layout(const MaskView& mask, Device device, std::size_t bytes) {
  const int64_t most = most_bit_tiles(mask, device);
  if (most == kNoBits) {
    const PlanLayout bits = plan_layout(mask);
    const auto has_room = [bytes](const PlanLayout& layout) { return layout.bytes <= static_cast<int64_t>(bytes); };
    const std::optional<PlanLayout> runs = runs_layout(mask);
    return runs && has_room(*runs) && !has_room(bits) ? *runs : bits;
  }
  const int64_t room = static_cast<int64_t>(bytes) - plan_layout(mask, int64_t{0}).bytes;
  return plan_layout(mask, std::clamp<int64_t>(room / kBitTileBytes, 0, most));
}

void make_full_tiles_partial(std::span<std::byte> buffer, const PlanLayout& layout) {
  const auto clear = [&](int64_t begin, int64_t end) {
    std::memset(buffer.data() + begin, 0, static_cast<std::size_t>(end - begin));
  };
  clear(layout.row_full, layout.key_live);
  clear(layout.key_full, layout.row_counts);
}

Plan::Plan(const MaskView& mask, int64_t max_mask_bytes) {
  const PlanLayout bits = plan_layout(mask);
  check_mask_memory(mask, bits, max_mask_bytes, host_memory_bytes());
  if (const std::optional<PlanLayout> runs = runs_layout(mask); !runs || !write(mask, *runs)) write(mask, bits);
}

Plan::Plan(const MaskView& mask, const PlanLayout& layout) {
  if (layout.has_bits()) throw_invalid("layout has bit tiles, of a plan on a CUDA device; a Plan is in host memory");
  if (!write(mask, layout)) check_runs(layout, most_runs(layout, buffer()));
}

bool Plan::write(const MaskView& mask, const PlanLayout& layout) {
  words_ = zeros<uint64_t>("the plan", layout.bytes / 8);
  write_plan(mask, layout, std::as_writable_bytes(std::span(words_)));
  view_ = PlanView(buffer());
  return most_runs(layout, buffer()) == 0;
}

TiledPlanView::TiledPlanView(const PlanView& plan, TileShape shape) : plan_(plan), shape_(shape) {
  require_on_host(plan, "TiledPlanView");
  if (shape.rows < 1 || shape.rows % kGranuleRows != 0 || shape.keys < 1 || shape.keys % kGranuleKeys != 0) {
    throw_invalid("tile is ", shape.rows, "x", shape.keys, "; a view of a plan needs a multiple of ", kGranuleRows,
                  " rows and of ", kGranuleKeys, " keys");
  }
  row_tiles_ = ceil_div(plan.layout().seqlen_q, shape.rows);
  key_tiles_ = ceil_div(plan.layout().seqlen_k, shape.keys);
}

TileClass TiledPlanView::tile(int64_t m, int64_t row_tile, int64_t key_tile) const {
  const int64_t rows = shape_.rows / kGranuleRows, keys = shape_.keys / kGranuleKeys;
  bool any = false, all = true;
  for (int64_t r = row_tile * rows; r < std::min((row_tile + 1) * rows, plan_.layout().row_granules); ++r) {
    for (int64_t c = key_tile * keys; c < std::min((key_tile + 1) * keys, plan_.layout().key_blocks); ++c) {
      const TileClass granule = plan_.granule(m, r, c);
      any |= granule != TileClass::kEmpty;
      all &= granule == TileClass::kFull;
    }
  }
  return all ? TileClass::kFull : any ? TileClass::kPartial : TileClass::kEmpty;
}

int64_t TiledPlanView::live_in_row(int64_t m, int64_t row_tile) const {
  int64_t live = 0;
  for (int64_t c = 0; c < key_tiles_; ++c) live += tile(m, row_tile, c) != TileClass::kEmpty;
  return live;
}

int64_t TiledPlanView::live_in_column(int64_t m, int64_t key_tile) const {
  int64_t live = 0;
  for (int64_t r = 0; r < row_tiles_; ++r) live += tile(m, r, key_tile) != TileClass::kEmpty;
  return live;
}

int64_t TiledPlanView::live_tiles() const {
  int64_t live = 0;
  for (int64_t m = 0; m < plan_.layout().batch * plan_.layout().heads; ++m) {
    for (int64_t r = 0; r < row_tiles_; ++r) live += live_in_row(m, r);
  }
  return live;
}

std::vector<int32_t> TiledPlanView::row_order(int64_t m) const {
  std::vector<int32_t> counts, order(static_cast<std::size_t>(row_tiles_));
  for (int64_t r = 0; r < row_tiles_; ++r) counts.push_back(static_cast<int32_t>(live_in_row(m, r)));
  longest_first(counts, key_tiles_, order);
  return order;
}

std::vector<int32_t> TiledPlanView::column_order(int64_t m) const {
  std::vector<int32_t> counts, order(static_cast<std::size_t>(key_tiles_));
  for (int64_t c = 0; c < key_tiles_; ++c) counts.push_back(static_cast<int32_t>(live_in_column(m, c)));
  longest_first(counts, row_tiles_, order);
  return order;
}

}  // namespace flashmask
