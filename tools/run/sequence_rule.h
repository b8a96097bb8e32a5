// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "run/packing.h"

namespace flashmask::run {

/// Ancestry of a tree's nodes, derived from the parents alone.
class Lineage {
 public:
  explicit Lineage(const Packed& packed) {
    for (const PackedNode& node : packed.nodes) {
      if (node.node == 0) roots_.push_back(last_.size());
      last_.push_back(node.node);
    }
    for (std::size_t n = last_.size(); n-- > 0;) {
      const PackedNode& node = packed.nodes[n];
      if (node.parent < 0) continue;
      int32_t& last_of_parent = last_[row(node.segment, node.parent)];
      last_of_parent = std::max(last_of_parent, last_[n]);
    }
  }

  /// True if `above` is `node` or on the way from the root to it. Nodes are numbered depth first, so that a node's
  /// descendants follow it up to the last of them.
  bool leads_to(int32_t segment, int32_t above, int32_t node) const {
    return above <= node && node <= last_[row(segment, above)];
  }

 private:
  std::size_t row(int32_t segment, int32_t node) const {
    return roots_[static_cast<std::size_t>(segment)] + static_cast<std::size_t>(node);
  }

  std::vector<std::size_t> roots_;  ///< first node of each tree
  std::vector<int32_t> last_;       ///< the last node below each one, or itself
};

/// Rows and the keys that they see in one packed sequence, derived from the documents, answers and nodes alone: the
/// oracle does not take the mask's word for it.
struct SequenceRule {
  const Packed& packed;
  const Lineage& lineage;
  int64_t sequence;

  bool sees(int64_t row, int64_t key) const {
    const auto i = static_cast<std::size_t>(sequence * packed.seqlen + row),
               j = static_cast<std::size_t>(sequence * packed.seqlen + key);
    if (key > row || packed.segment_ids[i] < 0 || packed.segment_ids[i] != packed.segment_ids[j]) return false;
    if (!packed.node_ids.empty())
      return lineage.leads_to(packed.segment_ids[i], packed.node_ids[j], packed.node_ids[i]);
    return packed.answer_ids.empty() || packed.answer_ids[j] == 0 || packed.answer_ids[j] == packed.answer_ids[i];
  }
  /// The rows that see `key`, ascending.
  std::vector<int64_t> rows(int64_t key) const {
    std::vector<int64_t> seeing;
    for (int64_t i = key; i < packed.seqlen; ++i) {
      if (sees(i, key)) seeing.push_back(i);
    }
    return seeing;
  }
};

}  // namespace flashmask::run
