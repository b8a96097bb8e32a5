// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "flashmask/mask.h"
#include "run/records.h"

namespace flashmask::run {

/// Label that a trainer ignores: torch's default ignore_index.
inline constexpr int64_t kNoLabel = -100;

/// Most bytes that the vectors of a Packed take for each token: 29, and 10 more for a tree's nodes.
inline constexpr int64_t kPackedBytesPerToken = 39;

/// Place of a tree's node: tokens [begin, end) of its sequence.
struct PackedNode {
  int32_t segment = 0;  ///< the tree's number in the input, as in segment_ids
  int32_t node = 0;     ///< its number in the tree, as in node_ids
  int32_t parent = -1;  ///< number in the tree of the node that it goes on from; -1 for the root
  int32_t sequence = 0;
  int32_t begin = 0, end = 0;
};
/// The members of a PackedNode, in order.
inline constexpr const char* kNodeColumns[] = {"segment", "node", "parent", "sequence", "begin", "end"};

/// Documents packed into sequences of one length. All vectors are [sequences, seqlen].
struct Packed {
  Task task{};
  int64_t seqlen = 0;
  int64_t sequences = 0;
  int64_t documents = 0;
  int64_t tokens = 0;  ///< without padding
  /// All documents, if nothing were shared.
  SeparateSequences separate{};

  std::vector<int32_t> input_ids{};
  /// From 0 in every document; an answer's go on from the question's end, a node's from its parent's. 0 in the
  /// padding.
  std::vector<int32_t> position_ids{};
  /// labels[t] is the token that position t has to predict: the next one of the same answer, response, learned
  /// node or pretraining text; kNoLabel in prompts and questions, at the last token and in the padding.
  std::vector<int64_t> labels{};
  /// 1 where there is a label.
  std::vector<uint8_t> loss_mask{};
  /// LTS, the causal form with one vector: the first row below the diagonal that must not see this key.
  std::vector<int32_t> startend_row_indices{};
  /// The document's number in the input, from 0; -1 in the padding.
  std::vector<int32_t> segment_ids{};
  /// 0 in the question, 1, 2, ... in its answers, -1 in the padding. Empty unless the task shares questions.
  std::vector<int32_t> answer_ids{};
  /// The node's number in its tree, depth first from 0, the root; -1 in the padding. Empty unless they are trees.
  std::vector<int32_t> node_ids{};
  /// All nodes, by segment and number. Empty unless they are trees.
  std::vector<PackedNode> nodes{};

  double padding_share() const {
    const int64_t size = sequences * seqlen;
    return size ? static_cast<double>(size - tokens) / static_cast<double>(size) : 0;
  }
  /// Ratio of the tokens if nothing were shared to the packed tokens.
  double sharing_ratio() const {
    return tokens ? static_cast<double>(separate.tokens) / static_cast<double>(tokens) : 0;
  }
  /// The masks of sequences [begin, end), one batch entry each.
  Mask mask(int64_t begin, int64_t end) const;
};

/// Places items of these lengths by first fit: each into the first sequence that still has room for it, in the
/// order given. O(n log n). Lengths must lie in [0, seqlen].
std::vector<int64_t> first_fit(std::span<const int64_t> lengths, int64_t seqlen);

/// Packs by first fit; within a sequence documents keep their order. The rest of a sequence is padding,
/// whose rows see nothing and whose keys no row sees.
Packed pack(Task task, std::span<const Document> documents, int64_t seqlen);

/// Writes everything as a safetensors file; see docs/run.md for the format. `source` names the input.
void write_packed(const std::string& path, const Packed& packed, const std::string& source);

}  // namespace flashmask::run
