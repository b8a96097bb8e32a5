// SPDX-License-Identifier: Apache-2.0
#include "run/packing.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "flashmask/builders.h"
#include "flashmask/version.h"
#include "io/fail.h"
#include "io/safetensors.h"

namespace flashmask::run {
namespace {

std::size_t index(int64_t value) { return static_cast<std::size_t>(value); }

/// Free places of a row of sequences, as a tree of maxima; every sequence is free to begin with.
class FreePlaces {
 public:
  FreePlaces(std::size_t sequences, int64_t seqlen)
      : leaves_(std::bit_ceil(std::max<std::size_t>(sequences, 1))), free_(2 * leaves_, seqlen) {}

  /// Takes `length` places of the first sequence that has as many.
  int64_t take(int64_t length) {
    std::size_t node = 1;
    while (node < leaves_) node = 2 * node + (free_[2 * node] < length);
    free_[node] -= length;
    const auto sequence = static_cast<int64_t>(node - leaves_);
    for (node /= 2; node > 0; node /= 2) free_[node] = std::max(free_[2 * node], free_[2 * node + 1]);
    return sequence;
  }

 private:
  std::size_t leaves_;
  std::vector<int64_t> free_;
};

/// Writes documents into the vectors of a Packed, position by position.
class Writer {
 public:
  explicit Writer(Packed& packed) : packed_(packed), used_(index(packed.sequences)) {}

  void add(const Document& document, int64_t number, int64_t sequence) {
    sequence_ = sequence;
    begin_ = used_[index(sequence)];
    used_[index(sequence)] += document.length();
    document_ = &document;
    number_ = static_cast<int32_t>(number);
    if (document.nodes.empty()) {
      add_answers();
    } else {
      add_nodes();
    }
  }

 private:
  /// Tokens [first, first + count) of the document, at positions from `position` on.
  struct Part {
    int64_t first, count, position;
    bool learned;
  };

  void add_answers() {
    const Document& document = *document_;
    int64_t at = document.question;
    add_part({0, at, 0, false}, packed_.answer_ids, 0);
    for (std::size_t n = 0; n < document.answers.size(); ++n) {
      add_part({at, document.answers[n], document.question, true}, packed_.answer_ids, static_cast<int32_t>(n) + 1);
      at += document.answers[n];
    }
  }

  void add_nodes() {
    std::vector<int64_t> path_end;  // the position after each node
    int64_t first = 0;
    for (const TreeNode& node : document_->nodes) {
      const auto number = static_cast<int32_t>(path_end.size());
      const int64_t position = node.parent < 0 ? 0 : path_end[index(node.parent)];
      add_part({first, node.length, position, node.learned}, packed_.node_ids, number);
      const int64_t begin = begin_ + first;
      packed_.nodes.push_back({number_, number, static_cast<int32_t>(node.parent), static_cast<int32_t>(sequence_),
                               static_cast<int32_t>(begin), static_cast<int32_t>(begin + node.length)});
      path_end.push_back(position + node.length);
      first += node.length;
    }
  }

  /// `part_ids`, if the task has them, get the part's number.
  void add_part(const Part& part, std::vector<int32_t>& part_ids, int32_t part_number) {
    for (int64_t t = 0; t < part.count; ++t) {
      const std::size_t at = index(sequence_ * packed_.seqlen + begin_ + part.first + t);
      packed_.input_ids[at] = document_->tokens[index(part.first + t)];
      packed_.position_ids[at] = static_cast<int32_t>(part.position + t);
      packed_.segment_ids[at] = number_;
      if (!part_ids.empty()) part_ids[at] = part_number;
      if (!part.learned || t + 1 == part.count) continue;
      packed_.labels[at] = document_->tokens[index(part.first + t + 1)];
      packed_.loss_mask[at] = 1;
    }
  }

  Packed& packed_;
  std::vector<int64_t> used_;
  const Document* document_ = nullptr;
  int64_t sequence_ = 0, begin_ = 0;
  int32_t number_ = 0;
};

/// The documents of one sequence as the library's builders want them: questions with answers (one with a single
/// answer is just a causal document), or a forest.
class SequenceMask {
 public:
  void add(const Document& document) {
    const auto root = static_cast<int64_t>(parents_.size());
    for (const TreeNode& node : document.nodes) {
      parents_.push_back(node.parent < 0 ? -1 : root + node.parent);
      lengths_.push_back(node.length);
    }
    if (document.nodes.empty()) groups_.push_back({document.question, document.answers});
  }

  Mask build() const {
    return parents_.empty() ? masks::shared_question(groups_) : masks::prefix_tree(parents_, lengths_);
  }

 private:
  std::vector<QuestionGroup> groups_;
  std::vector<int64_t> parents_, lengths_;
};

/// LTS of one sequence: the library's mask of its documents, then 0 for the padding, which hides those keys from
/// all rows. Rows of the padding see nothing, as every document's LTS ends before them.
void write_mask(const Mask& mask, std::span<int32_t> lts) {
  std::copy(mask.lts().begin(), mask.lts().end(), lts.begin());
  std::fill(lts.begin() + static_cast<std::ptrdiff_t>(mask.seqlen_k()), lts.end(), 0);
}

static_assert(sizeof(PackedNode) == std::size(kNodeColumns) * sizeof(int32_t), "the file holds nodes as rows of int32");

template <typename Element>
io::SafetensorsEntry entry(const char* name, const char* dtype, std::vector<int64_t> shape,
                           const std::vector<Element>& values) {
  return {name, dtype, std::move(shape), std::as_bytes(std::span(values))};
}

}  // namespace

Mask Packed::mask(int64_t begin, int64_t end) const {
  const auto at = [&](int64_t sequence) {
    return startend_row_indices.begin() + static_cast<std::ptrdiff_t>(sequence * seqlen);
  };
  return Mask({.seqlen_q = seqlen,
               .seqlen_k = seqlen,
               .band = Band::causal(),
               .batch = end - begin,
               .lts = std::vector<int32_t>(at(begin), at(end))});
}

std::vector<int64_t> first_fit(std::span<const int64_t> lengths, int64_t seqlen) {
  FreePlaces places(lengths.size(), seqlen);
  std::vector<int64_t> sequences;
  sequences.reserve(lengths.size());
  for (const int64_t length : lengths) {
    if (length < 0 || length > seqlen)
      io::fail("a length is {}; it must be between 0 and the sequence length, {}", length, seqlen);
    sequences.push_back(places.take(length));
  }
  return sequences;
}

Packed pack(Task task, std::span<const Document> documents, int64_t seqlen) {
  std::vector<int64_t> lengths;
  for (const Document& document : documents) lengths.push_back(document.length());
  const std::vector<int64_t> sequence_of = first_fit(lengths, seqlen);

  Packed packed{.task = task, .seqlen = seqlen};
  packed.sequences = documents.empty() ? 0 : *std::max_element(sequence_of.begin(), sequence_of.end()) + 1;
  packed.documents = static_cast<int64_t>(documents.size());
  const std::size_t size = index(packed.sequences) * index(seqlen);
  packed.input_ids.assign(size, kPadToken);
  packed.position_ids.assign(size, 0);
  packed.labels.assign(size, kNoLabel);
  packed.loss_mask.assign(size, 0);
  packed.startend_row_indices.resize(size);
  packed.segment_ids.assign(size, -1);
  if (shares_question(task)) packed.answer_ids.assign(size, -1);
  if (task == Task::kTree) packed.node_ids.assign(size, -1);

  Writer writer(packed);
  std::vector<SequenceMask> masks(index(packed.sequences));
  for (std::size_t n = 0; n < documents.size(); ++n) {
    writer.add(documents[n], static_cast<int64_t>(n), sequence_of[n]);
    masks[index(sequence_of[n])].add(documents[n]);
    packed.tokens += documents[n].length();
    const SeparateSequences separate = separate_sequences(documents[n]);
    packed.separate.count += separate.count;
    packed.separate.tokens += separate.tokens;
  }
  for (std::size_t s = 0; s < masks.size(); ++s) {
    write_mask(masks[s].build(), std::span(packed.startend_row_indices).subspan(s * index(seqlen), index(seqlen)));
  }
  return packed;
}

void write_packed(const std::string& path, const Packed& packed, const std::string& source) {
  const std::vector<int64_t> shape{packed.sequences, packed.seqlen};
  // The widest elements first: that keeps every tensor aligned.
  std::vector<io::SafetensorsEntry> entries{
      entry("labels", "I64", shape, packed.labels),
      entry("input_ids", "I32", shape, packed.input_ids),
      entry("position_ids", "I32", shape, packed.position_ids),
      entry("segment_ids", "I32", shape, packed.segment_ids),
      entry("startend_row_indices", "I32", {packed.sequences, 1, packed.seqlen, 1}, packed.startend_row_indices),
  };
  if (!packed.answer_ids.empty()) entries.push_back(entry("answer_ids", "I32", shape, packed.answer_ids));
  if (!packed.node_ids.empty()) {
    entries.push_back(entry("node_ids", "I32", shape, packed.node_ids));
    entries.push_back(
        entry("nodes", "I32", {static_cast<int64_t>(packed.nodes.size()), std::ssize(kNodeColumns)}, packed.nodes));
  }
  entries.push_back(entry("loss_mask", "BOOL", shape, packed.loss_mask));
  io::SafetensorsMetadata metadata{
      {"format", "flashmask-packed"},
      {"format_version", "1"},
      {"producer",
       fmt::format("flashmask {}.{}.{}", FLASHMASK_VERSION_MAJOR, FLASHMASK_VERSION_MINOR, FLASHMASK_VERSION_PATCH)},
      {"task", std::string(name(packed.task))},
      {"source", source},
      {"seqlen", fmt::format("{}", packed.seqlen)},
      {"documents", fmt::format("{}", packed.documents)},
      {"tokens", fmt::format("{}", packed.tokens)},
      {"mask", "startend_row_indices, causal"},
      {"tokenizer", "bytes"},
      {"vocabulary", fmt::format("{}", kVocabulary)},
      {"begin_token", fmt::format("{}", kBeginToken)},
      {"end_token", fmt::format("{}", kEndToken)},
      {"pad_token", fmt::format("{}", kPadToken)},
      {"answer_token", fmt::format("{}", kAnswerToken)},
      {"labels", "shifted: labels[t] is what position t predicts; -100 is ignored"},
  };
  if (!packed.node_ids.empty()) metadata["node_columns"] = fmt::format("{}", fmt::join(kNodeColumns, ", "));
  io::write_safetensors(path, entries, metadata);
}

}  // namespace flashmask::run
