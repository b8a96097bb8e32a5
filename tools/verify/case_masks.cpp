// SPDX-License-Identifier: Apache-2.0
#include "verify/case_masks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

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

std::string text(const std::vector<int64_t>& values) { return fmt::format("{}", fmt::join(values, ",")); }

/// `count` lengths, zeros among them now and then, that add up to `total`.
std::vector<int64_t> draw_lengths(Random& random, int64_t total, int64_t count) {
  std::vector<int64_t> cuts{0, total};
  for (int64_t n = 1; n < count; ++n) cuts.push_back(random.integer(0, total));
  std::sort(cuts.begin(), cuts.end());
  std::vector<int64_t> lengths;
  for (std::size_t n = 1; n < cuts.size(); ++n) lengths.push_back(cuts[n] - cuts[n - 1]);
  return lengths;
}

/// Draws the parameters of one family at one length. What makes the band comes from `common`, so that the
/// masks of all heads and batch entries have the same band and can be stacked; the rest comes from `own`.
class ParameterDraw {
 public:
  ParameterDraw(int64_t length, uint64_t common_seed, uint64_t own_seed)
      : length_(length), common_(common_seed), own_(own_seed) {}

  FamilyParameters operator()(std::string_view family) {
    if (family == "causal") return {{"q_offset", std::to_string(common_.integer(-length_ / 4, length_ / 4))}};
    if (family == "sliding_window") return {{"left", window_reach(common_)}, {"right", window_reach(common_)}};
    if (family == "causal_document" || family == "document" || family == "causal_blockwise")
      return {{"lengths", lengths()}};
    if (family == "shared_question") return shared_question();
    if (family == "global_sliding_window") return {{"global", up_to(length_ / 4)}, {"window", up_to(length_ / 3)}};
    if (family == "prefix_lm_causal") return {{"prefix", up_to(length_)}};
    if (family == "prefix_lm_document") return prefix_lm_document();
    if (family == "qk_sparse") return qk_sparse();
    if (family == "hash_sparse") return hash_sparse();
    if (family == "random_eviction") return {{"seed", std::to_string(own_.integer(0, INT64_MAX))}};
    if (family == "eviction") return eviction();
    if (family == "prefix_tree") return prefix_tree();
    if (family == "padding") return {{"key_lengths", up_to(length_)}, {"query_lengths", up_to(length_)}};
    if (family == "attention_sink_window")
      return {{"lengths", lengths()}, {"sink", up_to(9)}, {"window", window_of(length_ / 2)}};
    if (family == "block_causal") return {{"lengths", lengths()}, {"blocks", lengths()}, {"window", window_of(4)}};
    if (family == "causal_with_blocks") return causal_with_blocks();
    if (family == "block_diffusion") return block_diffusion();
    if (family == "eagle3_ttt") return eagle3_ttt();
    if (family == "dflash") return dflash();
    return {};
  }

 private:
  std::string up_to(int64_t largest) { return std::to_string(own_.integer(0, largest)); }
  std::string lengths() { return text(draw_lengths(own_, length_, own_.integer(1, 8))); }

  /// Unbounded now and then, otherwise up to half the length.
  std::string window_reach(Random& random) {
    return std::to_string(random.integer(0, 5) == 0 ? -1 : random.integer(0, length_ / 2));
  }

  /// Of 1 to `largest`, or now and then of all.
  std::string window_of(int64_t largest) {
    return std::to_string(own_.integer(0, 5) == 0 ? -1 : own_.integer(1, std::max<int64_t>(largest, 1)));
  }

  /// Of five pieces of a document the second and the fourth are blocks.
  FamilyParameters causal_with_blocks() {
    const std::vector<int64_t> documents = draw_lengths(own_, length_, own_.integer(1, 4));
    std::vector<int64_t> bounds;
    int64_t at = 0;
    for (const int64_t document : documents) {
      const std::vector<int64_t> pieces = draw_lengths(own_, document, 5);
      const int64_t second = at + pieces[0], fourth = second + pieces[1] + pieces[2];
      bounds.insert(bounds.end(), {second, second + pieces[1], fourth, fourth + pieces[3]});
      at += document;
    }
    return {{"lengths", text(documents)}, {"blocks", text(bounds)}, {"window", window_of(length_ / 2)}};
  }

  /// Concatenated copies are of one document, as those of several do not fit.
  FamilyParameters block_diffusion() {
    const bool concatenated = length_ % 2 == 0 && own_.flip();
    const std::vector<int64_t> documents = draw_lengths(own_, length_ / 2, concatenated ? 1 : own_.integer(1, 4));
    return {{"lengths", text(documents)},
            {"blocks", text(draw_lengths(own_, length_ / 2, own_.integer(2, 8)))},
            {"concatenated", concatenated ? "1" : "0"}};
  }

  FamilyParameters eagle3_ttt() {
    const int64_t steps = own_.integer(1, 4);
    return {{"steps", std::to_string(steps)},
            {"lengths", text(draw_lengths(own_, length_ / steps, own_.integer(1, 4)))}};
  }

  /// At least one block, where one fits: no entry at all would leave the anchors to the family.
  FamilyParameters dflash() {
    const int64_t block = own_.integer(1, std::max<int64_t>(length_ / 3, 1)),
                  blocks = own_.integer(1, std::clamp<int64_t>(length_ / block, 1, 9));
    const int64_t context = std::max<int64_t>(length_ - blocks * block, 0);
    std::vector<int64_t> anchors;
    for (int64_t n = 0; n < std::min(blocks, length_ / block); ++n) anchors.push_back(own_.integer(0, context));
    std::sort(anchors.begin(), anchors.end());
    FamilyParameters parameters{{"block", std::to_string(block)},
                                {"lengths", text(draw_lengths(own_, context, own_.integer(1, 4)))}};
    if (!anchors.empty()) parameters["anchors"] = text(anchors);
    return parameters;
  }

  FamilyParameters shared_question() {
    const std::vector<int64_t> groups = draw_lengths(own_, length_, own_.integer(1, 4));
    std::vector<int64_t> counts, answers;
    for (const int64_t group : groups) {
      counts.push_back(own_.integer(0, 5));
      // One piece more than answers: the first is the question.
      const std::vector<int64_t> pieces = draw_lengths(own_, group, counts.back() + 1);
      answers.insert(answers.end(), pieces.begin() + 1, pieces.end());
    }
    return {{"groups", text(groups)}, {"answers", text(counts)}, {"answer_lengths", text(answers)}};
  }

  FamilyParameters prefix_lm_document() {
    const std::vector<int64_t> documents = draw_lengths(own_, length_, own_.integer(1, 8));
    std::vector<int64_t> prefixes;
    for (const int64_t document : documents) prefixes.push_back(own_.integer(0, document));
    return {{"lengths", text(documents)}, {"prefix", text(prefixes)}};
  }

  FamilyParameters qk_sparse() {
    std::vector<int64_t> bounds;
    for (int64_t n = own_.integer(1, 3); n > 0; --n) {
      bounds.push_back(own_.integer(0, length_));
      bounds.push_back(own_.integer(0, length_));
    }
    std::sort(bounds.begin(), bounds.end());
    return {{"spans", text(bounds)}};
  }

  /// Queries are sorted by bucket, so that the mask fits two intervals; keys come in any order.
  FamilyParameters hash_sparse() {
    FamilyParameters parameters{{"causal", common_.flip() ? "1" : "0"}};
    if (length_ == 0) return parameters;
    const int64_t buckets = own_.integer(1, 9);
    std::vector<int64_t> queries, keys;
    for (int64_t i = 0; i < length_; ++i) {
      queries.push_back(own_.integer(0, buckets - 1));
      keys.push_back(own_.integer(0, buckets - 1));
    }
    std::sort(queries.begin(), queries.end());
    if (own_.flip()) std::sort(keys.begin(), keys.end());
    parameters["query_buckets"] = text(queries);
    parameters["key_buckets"] = text(keys);
    return parameters;
  }

  FamilyParameters eviction() {
    if (length_ == 0) return {};
    std::vector<int64_t> evicted_at;
    for (int64_t j = 0; j < length_; ++j) evicted_at.push_back(own_.integer(j, length_));
    return {{"evicted_at", text(evicted_at)}};
  }

  FamilyParameters prefix_tree() {
    const int64_t nodes = own_.integer(1, 12);
    std::vector<int64_t> parents, path;
    for (int64_t n = 0; n < nodes; ++n) {
      // A child of any node of the current path, or another root.
      path.resize(static_cast<std::size_t>(own_.integer(0, static_cast<int64_t>(path.size()))));
      parents.push_back(path.empty() ? -1 : path.back());
      path.push_back(n);
    }
    return {{"parents", text(parents)}, {"lengths", text(draw_lengths(own_, length_, nodes))}};
  }

  const int64_t length_;
  Random common_, own_;
};

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

/// The family at the square length, cropped to the case's lengths.
Mask draw_mask(const Case& c, int64_t mask_batch, int64_t mask_head) {
  if (c.family == kNoMask) return masks::full(c.seqlen_q, c.seqlen_k);
  const int64_t length = square_length(c);
  const FamilyParameters parameters = draw_parameters(c, mask_batch, mask_head);
  const Mask square = c.family == "shared_question"
                          ? shared_question(parameters)
                          : make_family(c.family, length, parameters, draw_seed(c, mask_batch, mask_head));
  return crop(square, length - c.seqlen_q, length, 0, c.seqlen_k);
}

/// Which of the four vectors a mask has.
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
  for (const Mask& draw : draws) {
    if (draw.band() != first.band() || draw.q_offset() != first.q_offset()) {
      throw Error(ErrorCode::kInternal, "two draws of a family have different bands and cannot be stacked");
    }
    if (same_vectors) {
      append_as_it_is(parts, draw);
    } else {
      append_written_out(parts, draw);
    }
  }
  return Mask(std::move(parts));
}

/// The band that hides what either hides.
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
  return ParameterDraw(square_length(c), mix(c.seed, kBandStream), draw_seed(c, mask_batch, mask_head))(c.family);
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
