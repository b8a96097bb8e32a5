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

void check_blocks(const Documents& blocks, const Documents& documents) {
  if (blocks.total() != documents.total())
    throw_invalid("the blocks add up to ", blocks.total(), " tokens; it must be the documents' ", documents.total());
}

/// Blocks of given lengths; they go on from one document to the next.
std::vector<int64_t> lengths_of(const Documents& blocks) {
  std::vector<int64_t> lengths;
  for (int64_t n = 0; n < blocks.count(); ++n) lengths.push_back(blocks.length(n));
  return lengths;
}

/// Negative anchors fill up the rows of a batch, which this is not.
void check_anchors(std::span<const int64_t> anchors, int64_t context) {
  for (std::size_t n = 0; n < anchors.size(); ++n) {
    if (anchors[n] < 0)
      throw_invalid("anchors[", n, "] is ", anchors[n], "; it must be between 0 and the length of the context, ",
                    context);
  }
}

/// Throws unless blocks are ascending, disjoint and each in one document.
void check_spans(std::span<const Span> blocks, const Documents& documents) {
  int64_t reached = 0, document = 0;
  for (std::size_t n = 0; n < blocks.size(); ++n) {
    const Span own = blocks[n];
    if (own.begin < reached || own.end < own.begin || own.end > documents.total()) {
      throw_invalid("blocks[", n, "] is [", own.begin, ", ", own.end,
                    "); spans must be ascending, disjoint and within [0, ", documents.total(), ")");
    }
    reached = own.end;
    if (own.begin == own.end) continue;
    while (documents.end(document) <= own.begin) ++document;
    if (own.end > documents.end(document)) {
      throw_invalid("blocks[", n, "] is [", own.begin, ", ", own.end, "), and document ", document, " ends at ",
                    documents.end(document), "; a block must lie in one document");
    }
  }
}

}  // namespace

namespace masks {

Mask attention_sink_window(const Documents& documents, int64_t sink, int64_t window) {
  return build_mask("attention_sink_window", {of(documents), of("sink", sink), of("window", window)});
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
  check_blocks(blocks, documents);
  const std::vector<int64_t> lengths = lengths_of(blocks);
  return build_mask("block_causal", {of(documents), of("blocks", lengths), of("window", window)});
}

Mask causal_with_blocks(const Documents& documents, std::span<const Span> blocks, int64_t window) {
  check_spans(blocks, documents);
  std::vector<int64_t> ids(static_cast<std::size_t>(documents.total()), -1);
  for (std::size_t n = 0; n < blocks.size(); ++n)
    std::fill(ids.begin() + blocks[n].begin, ids.begin() + blocks[n].end, static_cast<int64_t>(n));
  return build_mask("causal_with_blocks", {of(documents), of("block_ids", ids), of("window", window)});
}

BlockDiffusion block_diffusion(const Documents& blocks, const Documents& documents, BlockDiffusionOrder order) {
  check_blocks(blocks, documents);
  if (documents.total() > kMaxSeqlen / 2)
    throw_invalid("two copies of ", documents.total(), " tokens are more than ", kMaxSeqlen);
  const std::vector<int64_t> lengths = lengths_of(blocks);
  std::vector<int64_t> places(static_cast<std::size_t>(2 * documents.total()));
  const Mask mask = build_mask(
      "block_diffusion",
      {of(documents), of("blocks", lengths),
       of("concatenated", static_cast<int64_t>(order == BlockDiffusionOrder::kConcatenated)), of("order_out", places)});
  return {mask, std::move(places)};
}

Mask eagle3_ttt(const Documents& documents, int64_t steps) {
  return build_mask("eagle3_ttt", {of(documents), of("steps", steps)});
}

Mask dflash(const Documents& documents, std::span<const int64_t> anchors, int64_t block) {
  check_anchors(anchors, documents.total());
  return build_mask("dflash", {of(documents), of("anchors", anchors), of("block", block)});
}

OrderedMask dilated_window(int64_t seqlen, int64_t window, int64_t dilation) {
  check_not_negative("seqlen", seqlen);
  std::vector<int64_t> order(static_cast<std::size_t>(std::min(seqlen, kMaxSeqlen)));
  const Mask mask = build_mask(
      "dilated_window", {of("seqlen", seqlen), of("window", window), of("dilation", dilation), of("order_out", order)});
  return {mask, std::move(order)};
}

Mask neighborhood_2d(int64_t height, int64_t width, int64_t kernel_height, int64_t kernel_width, int64_t dilation) {
  return build_mask("neighborhood_2d", {of("height", height), of("width", width), of("kernel_height", kernel_height),
                                        of("kernel_width", kernel_width), of("dilation", dilation)});
}

Mask dilated(int64_t seqlen, int64_t window, int64_t dilation, bool causal) {
  return build_mask("dilated", {of("seqlen", seqlen), of("window", window), of("dilation", dilation),
                                of("causal", static_cast<int64_t>(causal))});
}

Mask bigbird(int64_t seqlen, int64_t block, int64_t global_blocks, int64_t window, int64_t random_blocks,
             uint64_t seed) {
  return build_mask("bigbird",
                    {of("seqlen", seqlen), of("block", block), of("global_blocks", global_blocks), of("window", window),
                     of("random_blocks", random_blocks), of("seed", static_cast<int64_t>(seed))});
}

}  // namespace masks
}  // namespace flashmask
