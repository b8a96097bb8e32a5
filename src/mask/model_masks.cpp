// SPDX-License-Identifier: Apache-2.0
#include "flashmask/model_masks.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "common/message.h"
#include "mask/building.h"
#include "mask/rules.h"

namespace flashmask {
using namespace building;

namespace {

/// How far a window of the last `window` keys reaches, -1 being all of them; at most `length`, so that no sum
/// overflows.
int64_t reach_of(int64_t window, int64_t length) {
  if (window < 1 && window != -1) throw_invalid("window is ", window, "; it must be at least 1, or -1 for all");
  return window == -1 ? length : std::min(window, length);
}

/// Keys seen by the rows from `begin` to `end` alone.
void append_seen(MaskParts& parts, int64_t count, int64_t begin, int64_t end) {
  parts.lts.insert(parts.lts.end(), static_cast<std::size_t>(count), row(end));
  parts.ute.insert(parts.ute.end(), static_cast<std::size_t>(count), row(begin));
}

/// A block, or a document's part of one.
struct BlockPart {
  int64_t begin = 0, end = 0, document_end = 0;
};

std::vector<BlockPart> cut_at_documents(const Documents& blocks, const Documents& documents) {
  std::vector<BlockPart> parts;
  int64_t document = 0;
  for (int64_t n = 0; n < blocks.count(); ++n) {
    for (int64_t at = blocks.begin(n); at < blocks.end(n); at = parts.back().end) {
      while (documents.end(document) <= at) ++document;
      parts.push_back({at, std::min(blocks.end(n), documents.end(document)), documents.end(document)});
    }
  }
  return parts;
}

void check_blocks(const Documents& blocks, const Documents& documents) {
  if (blocks.total() != documents.total())
    throw_invalid("the blocks add up to ", blocks.total(), " tokens; it must be the documents' ", documents.total());
}

BlockDiffusion interleaved_diffusion(std::span<const BlockPart> blocks, int64_t total) {
  MaskParts parts{.seqlen_q = 2 * total, .seqlen_k = 2 * total};
  std::vector<int64_t> order;
  for (const BlockPart& block : blocks) {
    // The copies of what comes before take 2 * begin places.
    const int64_t length = block.end - block.begin, noisy = 2 * block.begin, clean = noisy + length;
    append_seen(parts, length, noisy, clean);
    append_seen(parts, length, clean, 2 * block.document_end);
    for (int64_t t = block.begin; t < block.end; ++t) order.push_back(t);
    for (int64_t t = block.begin; t < block.end; ++t) order.push_back(total + t);
  }
  return {Mask(std::move(parts)), std::move(order)};
}

/// The rows that a clean key of `block` is hidden from; it is seen by noisy rows of later blocks and clean rows from
/// its own on.
std::array<rules::Interval, 2> hidden_from_clean(const BlockPart& block, int64_t total) {
  const int64_t later = block.end, until = block.document_end, own = total + block.begin;
  if (later == until) return {{{0, row(own)}, {row(total + until), row(2 * total)}}};
  if (until == total) return {{{0, row(later)}, {row(until), row(own)}}};
  throw Error(
      ErrorCode::kUnrepresentable,
      message(
          "the block-diffusion mask does not fit two row intervals per key column in the order kConcatenated: column ",
          own,
          " needs 3, as its document has more blocks and another document follows; the order kInterleaved fits every "
          "packing"));
}

BlockDiffusion concatenated_diffusion(std::span<const BlockPart> blocks, int64_t total) {
  MaskParts parts{.seqlen_q = 2 * total, .seqlen_k = 2 * total};
  const auto append = [&parts](const BlockPart& block, const std::array<rules::Interval, 2>& hidden) {
    const auto count = static_cast<std::size_t>(block.end - block.begin);
    parts.uts.insert(parts.uts.end(), count, hidden[0].begin);
    parts.ute.insert(parts.ute.end(), count, hidden[0].end);
    parts.lts.insert(parts.lts.end(), count, hidden[1].begin);
    parts.lte.insert(parts.lte.end(), count, hidden[1].end);
  };
  for (const BlockPart& block : blocks) append(block, {{{0, row(block.begin)}, {row(block.end), row(2 * total)}}});
  for (const BlockPart& block : blocks) append(block, hidden_from_clean(block, total));
  std::vector<int64_t> order(static_cast<std::size_t>(2 * total));
  std::iota(order.begin(), order.end(), 0);
  return {Mask(std::move(parts)), std::move(order)};
}

void check_anchors(std::span<const int64_t> anchors, int64_t context) {
  for (std::size_t n = 0; n < anchors.size(); ++n) {
    if (anchors[n] < 0 || anchors[n] > context)
      throw_invalid("anchors[", n, "] is ", anchors[n], "; it must be between 0 and the length of the context, ",
                    context);
    if (n > 0 && anchors[n] < anchors[n - 1]) {
      throw_invalid("anchors[", n, "] is ", anchors[n], ", less than the one before it, ", anchors[n - 1],
                    "; sort the blocks by anchor: only then do those that see a key follow each other, and the mask "
                    "fits two intervals");
    }
  }
}

}  // namespace

namespace masks {

Mask attention_sink_window(const Documents& documents, int64_t sink, int64_t window) {
  check_not_negative("sink", sink);
  const int64_t reach = reach_of(window, documents.total());
  std::vector<int32_t> lts;
  lts.reserve(static_cast<std::size_t>(documents.total()));
  for (int64_t n = 0; n < documents.count(); ++n) {
    const int64_t end = documents.end(n), sinks = std::min(sink, documents.length(n));
    lts.insert(lts.end(), static_cast<std::size_t>(sinks), row(end));
    for (int64_t j = documents.begin(n) + sinks; j < end; ++j) lts.push_back(row(std::min(j + reach, end)));
  }
  return causal_until(std::move(lts));
}

Documents equal_blocks(const Documents& documents, int64_t length) {
  if (length < 1) throw_invalid("length is ", length, "; a block must have at least 1 token");
  std::vector<int64_t> ends{0};
  for (int64_t n = 0; n < documents.count(); ++n) {
    for (int64_t left = documents.length(n); left > 0; left -= length)
      ends.push_back(ends.back() + std::min(left, length));
  }
  return Documents::from_cu_seqlens(ends);
}

Mask block_causal(const Documents& blocks, const Documents& documents, int64_t window) {
  const int64_t seqlen = documents.total(), reach = reach_of(window, blocks.count());
  check_blocks(blocks, documents);
  MaskParts parts{.seqlen_q = seqlen, .seqlen_k = seqlen};
  int64_t document = 0;
  for (int64_t n = 0; n < blocks.count(); ++n) {
    const int64_t until = blocks.begin(std::min(n + reach, blocks.count()));
    for (int64_t j = blocks.begin(n); j < blocks.end(n); ++j) {
      while (documents.end(document) <= j) ++document;
      parts.lts.push_back(row(std::min(until, documents.end(document))));
      parts.ute.push_back(row(std::max(blocks.begin(n), documents.begin(document))));
    }
  }
  return Mask(std::move(parts));
}

Mask causal_with_blocks(const Documents& documents, std::span<const Span> blocks, int64_t window) {
  const int64_t seqlen = documents.total(), reach = reach_of(window, seqlen);
  check_spans("blocks", blocks, seqlen);
  MaskParts parts{.seqlen_q = seqlen, .seqlen_k = seqlen};
  auto block = blocks.begin();
  for (int64_t n = 0; n < documents.count(); ++n) {
    const int64_t end = documents.end(n);
    for (int64_t j = documents.begin(n); j < end; ++j) {
      while (block != blocks.end() && block->end <= j) ++block;
      const Span own = block != blocks.end() && block->begin <= j ? *block : Span{j, j + 1};
      if (own.end > end) {
        throw_invalid("blocks[", block - blocks.begin(), "] is [", own.begin, ", ", own.end, "), and document ", n,
                      " ends at ", end, "; a block must lie in one document");
      }
      parts.lts.push_back(row(std::max(own.end, std::min(j + reach, end))));
      parts.ute.push_back(row(own.begin));
    }
  }
  return Mask(std::move(parts));
}

BlockDiffusion block_diffusion(const Documents& blocks, const Documents& documents, BlockDiffusionOrder order) {
  check_blocks(blocks, documents);
  if (documents.total() > kMaxSeqlen / 2)
    throw_invalid("two copies of ", documents.total(), " tokens are more than ", kMaxSeqlen);
  const std::vector<BlockPart> parts = cut_at_documents(blocks, documents);
  return order == BlockDiffusionOrder::kInterleaved ? interleaved_diffusion(parts, documents.total())
                                                    : concatenated_diffusion(parts, documents.total());
}

Mask eagle3_ttt(const Documents& documents, int64_t steps) {
  const int64_t total = documents.total();
  if (steps < 1) throw_invalid("steps is ", steps, "; it must be at least 1");
  if (total > 0 && steps > kMaxSeqlen / total)
    throw_invalid("steps is ", steps, "; with ", total, " tokens that is more than ", kMaxSeqlen, " keys");
  MaskParts parts{.seqlen_q = total, .seqlen_k = total > 0 ? steps * total : 0};
  for (int64_t n = 0; n < documents.count(); ++n) {
    for (int64_t j = documents.begin(n); j < documents.end(n); ++j) append_seen(parts, 1, j, documents.end(n));
  }
  while (static_cast<int64_t>(parts.lts.size()) < parts.seqlen_k) {
    for (int64_t j = 0; j < total; ++j) append_seen(parts, 1, j, j + 1);
  }
  return Mask(std::move(parts));
}

Mask dflash(const Documents& documents, std::span<const int64_t> anchors, int64_t block) {
  const int64_t context = documents.total(), blocks = static_cast<int64_t>(anchors.size());
  if (block < 1) throw_invalid("block is ", block, "; it must be at least 1");
  check_anchors(anchors, context);
  if (blocks > 0 && block > (kMaxSeqlen - context) / blocks)
    throw_invalid("block is ", block, "; ", blocks, " of them and ", context, " tokens of context are more than ",
                  kMaxSeqlen, " keys");
  const auto anchored_before = [&](int64_t position) {
    return std::lower_bound(anchors.begin(), anchors.end(), position) - anchors.begin();
  };
  MaskParts parts{.seqlen_q = blocks * block, .seqlen_k = context + blocks * block};
  for (int64_t n = 0; n < documents.count(); ++n) {
    const int64_t end = documents.end(n), last = end == context ? blocks : anchored_before(end);
    for (int64_t j = documents.begin(n); j < end; ++j)
      append_seen(parts, 1, anchored_before(j + 1) * block, last * block);
  }
  for (int64_t n = 0; n < blocks; ++n) append_seen(parts, block, n * block, (n + 1) * block);
  return Mask(std::move(parts));
}

}  // namespace masks
}  // namespace flashmask
