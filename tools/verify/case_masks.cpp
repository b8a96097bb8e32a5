// SPDX-License-Identifier: Apache-2.0
#include "verify/case_masks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "flashmask/builders.h"
#include "flashmask/status.h"
#include "verify/random.h"

namespace flashmask::verify {
namespace {

std::vector<int64_t> integers(std::string_view list) {
  std::vector<int64_t> values;
  for (std::size_t at = 0; at < list.size();) {
    const std::size_t end = std::min(list.find(',', at), list.size());
    values.push_back(std::stoll(std::string(list.substr(at, end - at))));
    at = end + 1;
  }
  return values;
}

/// The family's own parameters draw the answers' lengths; here they are given.
Mask shared_question(const FamilyParameters& parameters) {
  const std::vector<int64_t> lengths = integers(parameters.at("groups")), counts = integers(parameters.at("answers"));
  const std::vector<int64_t> answers = integers(parameters.at("answer_lengths"));
  std::vector<QuestionGroup> groups;
  auto next = answers.begin();
  for (std::size_t g = 0; g < lengths.size(); ++g) {
    QuestionGroup group{.question = lengths[g], .answers = {next, next + counts[g]}};
    for (const int64_t answer : group.answers) group.question -= answer;
    next += counts[g];
    groups.push_back(std::move(group));
  }
  return masks::shared_question(groups);
}

/// Hidden runs of random lengths. Neighbouring columns mostly share them, so that there are tiles of every class.
Mask random_matrix(const Case& c, uint64_t seed) {
  Random random(seed);
  MaskParts parts{.seqlen_q = c.seqlen_q, .seqlen_k = c.seqlen_k, .column_ptr = {0}};
  const int64_t longest = int64_t{1} << random.integer(0, 8), alike = random.integer(1, 200);
  std::vector<int32_t> column;
  for (int64_t j = 0; j < c.seqlen_k; ++j) {
    if (j % alike == 0 || random.integer(0, 63) == 0) {
      column.clear();
      for (int64_t row = random.integer(0, longest); row < c.seqlen_q; row += random.integer(1, longest)) {
        const int64_t begin = row;
        row += random.integer(1, longest);
        column.insert(column.end(), {static_cast<int32_t>(begin), static_cast<int32_t>(row)});
      }
    }
    parts.intervals.insert(parts.intervals.end(), column.begin(), column.end());
    parts.column_ptr.push_back(static_cast<int32_t>(parts.intervals.size() / 2));
  }
  return Mask(std::move(parts));
}

/// The family at the square length, cropped to the case's lengths.
Mask draw_mask(const Case& c, int64_t mask_batch, int64_t mask_head) {
  if (c.family == kNoMask) return masks::full(c.seqlen_q, c.seqlen_k);
  if (c.family == kRandomMatrix) return random_matrix(c, draw_seed(c, mask_batch, mask_head));
  const int64_t length = square_length(c);
  const FamilyParameters parameters = draw_parameters(c, mask_batch, mask_head);
  const Mask square = c.family == "shared_question"
                          ? shared_question(parameters)
                          : make_family(c.family, length, parameters, draw_seed(c, mask_batch, mask_head));
  return crop(square, length - c.seqlen_q, length, 0, c.seqlen_k);
}

/// True for each of the four vectors that a mask has.
std::array<bool, 4> vectors_of(const Mask& mask) {
  return {!mask.lts().empty(), !mask.lte().empty(), !mask.uts().empty(), !mask.ute().empty()};
}

/// Appends a draw's vector; one that it does not have is written out, or left out as in all other draws.
void append(std::vector<int32_t>& stacked, std::span<const int32_t> own, int64_t seqlen_k,
            std::optional<int32_t> absent) {
  if (!own.empty()) {
    stacked.insert(stacked.end(), own.begin(), own.end());
  } else if (absent) {
    stacked.insert(stacked.end(), static_cast<std::size_t>(seqlen_k), *absent);
  }
}

/// Appends the vectors of a draw whose pattern of vectors differs from another draw's. Of a pair, a missing
/// start is row 0 and a missing end is seqlen_q; without both there is no interval.
void append_written_out(MaskParts& parts, const Mask& draw) {
  const auto [lts, lte, uts, ute] = vectors_of(draw);
  const auto rows = static_cast<int32_t>(parts.seqlen_q);
  append(parts.lts, draw.lts(), parts.seqlen_k, 0);
  append(parts.lte, draw.lte(), parts.seqlen_k, lts || lte ? rows : 0);
  append(parts.uts, draw.uts(), parts.seqlen_k, 0);
  append(parts.ute, draw.ute(), parts.seqlen_k, uts || ute ? rows : 0);
}

void append_as_it_is(MaskParts& parts, const Mask& draw) {
  append(parts.lts, draw.lts(), parts.seqlen_k, std::nullopt);
  append(parts.lte, draw.lte(), parts.seqlen_k, std::nullopt);
  append(parts.uts, draw.uts(), parts.seqlen_k, std::nullopt);
  append(parts.ute, draw.ute(), parts.seqlen_k, std::nullopt);
}

/// Appends a draw's intervals as lists.
void append_lists(MaskParts& parts, const Mask& draw) {
  const auto [lts, lte, uts, ute] = vectors_of(draw);
  const auto rows = static_cast<int32_t>(parts.seqlen_q);
  const auto put = [&](int32_t begin, int32_t end) { parts.intervals.insert(parts.intervals.end(), {begin, end}); };
  const auto end_list = [&] { parts.column_ptr.push_back(static_cast<int32_t>(parts.intervals.size() / 2)); };
  end_list();
  for (std::size_t j = 0; j < static_cast<std::size_t>(parts.seqlen_k); ++j) {
    if (draw.has_interval_lists()) {
      const auto first = static_cast<std::size_t>(draw.column_ptr()[j]),
                 last = static_cast<std::size_t>(draw.column_ptr()[j + 1]);
      for (std::size_t n = first; n < last; ++n) put(draw.intervals()[2 * n], draw.intervals()[2 * n + 1]);
    } else {
      if (lts || lte) put(lts ? draw.lts()[j] : 0, lte ? draw.lte()[j] : rows);
      if (uts || ute) put(uts ? draw.uts()[j] : 0, ute ? draw.ute()[j] : rows);
    }
    end_list();
  }
}

Mask stack(const std::vector<Mask>& draws, int64_t batch, int64_t heads) {
  const Mask& first = draws.front();
  MaskParts parts{.seqlen_q = first.seqlen_q(),
                  .seqlen_k = first.seqlen_k(),
                  .band = first.band(),
                  .q_offset = first.q_offset(),
                  .batch = batch,
                  .heads = heads};
  const bool same_vectors =
      std::all_of(draws.begin(), draws.end(), [&](const Mask& draw) { return vectors_of(draw) == vectors_of(first); });
  const bool have_lists = std::ranges::any_of(draws, &Mask::has_interval_lists);
  for (const Mask& draw : draws) {
    if (draw.band() != first.band() || draw.q_offset() != first.q_offset()) {
      throw Error(ErrorCode::kInternal, "two draws of a family have different bands and cannot be stacked");
    }
    if (have_lists) {
      append_lists(parts, draw);
    } else if (same_vectors) {
      append_as_it_is(parts, draw);
    } else {
      append_written_out(parts, draw);
    }
  }
  return Mask(std::move(parts));
}

/// The band that hides every pair that either hides.
Band intersect_bands(const Band& a, const Band& b) {
  Band band = a;
  if (b.lo) band.lo = a.lo ? std::max(*a.lo, *b.lo) : *b.lo;
  if (b.hi) band.hi = a.hi ? std::min(*a.hi, *b.hi) : *b.hi;
  return band;
}

Mask with_positions(const Mask& mask, DrawnPositions positions) {
  const Mask with = mask.band() == Band::none() ? mask.with_band(Band::causal()) : mask;
  return with.with_positions(std::move(positions.q_pos), std::move(positions.k_pos), positions.batch);
}

int64_t block_count(int64_t seqlen) { return (seqlen + kBlockMaskSize - 1) / kBlockMaskSize; }

}  // namespace

int64_t square_length(const Case& c) { return std::max(c.seqlen_q, c.seqlen_k); }

uint64_t draw_seed(const Case& c, int64_t mask_batch, int64_t mask_head) {
  return mix(mix(mix(c.seed, kMaskStream), static_cast<uint64_t>(mask_batch)), static_cast<uint64_t>(mask_head));
}

FamilyParameters draw_parameters(const Case& c, int64_t mask_batch, int64_t mask_head) {
  return draw_family_parameters(c.family, square_length(c), mix(c.seed, kBandStream),
                                draw_seed(c, mask_batch, mask_head));
}

BlockGrid draw_block_mask(const Case& c) {
  BlockGrid grid;
  if (c.block_mask == BlockMask::kNone) return grid;
  if (c.block_mask == BlockMask::kEach) {
    grid.batch = std::max<int64_t>(c.batch, 1);
    grid.heads = c.heads_q;
  }
  Random random(mix(c.seed, kBlockStream));
  const int64_t blocks = grid.batch * grid.heads * block_count(c.seqlen_q) * block_count(c.seqlen_k);
  for (int64_t n = 0; n < blocks; ++n) grid.keep.push_back(random.real() < 0.7 ? 1 : 0);
  return grid;
}

DrawnPositions draw_positions(const Case& c) {
  DrawnPositions drawn;
  if (!c.has_positions()) return drawn;
  if (c.features.positions == Positions::kEach) drawn.batch = std::max<int64_t>(c.batch, 1);
  Random random(mix(c.seed, kPositionStream));
  const int64_t length = square_length(c);
  const bool in_order = random.integer(0, 3) != 0;
  for (int64_t b = 0; b < drawn.batch; ++b) {
    std::vector<int32_t> square;
    int64_t next = 0;
    for (int64_t n = 0; n < length; ++n) {
      if (random.integer(0, 63) == 0) next = random.integer(0, next);  // the next branch
      square.push_back(static_cast<int32_t>(in_order ? next++ : random.integer(-length, length)));
    }
    drawn.q_pos.insert(drawn.q_pos.end(), square.end() - c.seqlen_q, square.end());
    drawn.k_pos.insert(drawn.k_pos.end(), square.begin(), square.begin() + c.seqlen_k);
  }
  return drawn;
}

Mask make_mask(const Case& c) {
  const int64_t batch = std::max<int64_t>(c.mask_batch_count(), 1), heads = c.mask_head_count();
  std::vector<Mask> draws;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) draws.push_back(draw_mask(c, b, h));
  }
  Mask mask = draws.size() == 1 ? draws.front() : stack(draws, batch, heads);
  if (c.q_offset) mask = mask.with_q_offset(*c.q_offset);
  if (c.window) mask = mask.with_band(intersect_bands(mask.band(), Band::window(c.window->left, c.window->right)));
  if (c.has_positions()) mask = with_positions(mask, draw_positions(c));
  BlockGrid grid = draw_block_mask(c);
  return grid.keep.empty() ? mask : mask.with_block_mask(std::move(grid.keep), grid.batch, grid.heads);
}

DenseMask dense_of(const Mask& mask) { return {mask.batch(), mask.heads(), to_dense(mask)}; }

}  // namespace flashmask::verify
