// SPDX-License-Identifier: Apache-2.0
#include "run/packing.h"

#include <algorithm>
#include <bit>
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
    begin_ = sequence * packed_.seqlen + used_[index(sequence)];
    used_[index(sequence)] += document.length();
    document_ = &document;
    number_ = static_cast<int32_t>(number);
    add_part(0, document.question, 0, 0, false);
    int64_t at = document.question;
    for (std::size_t n = 0; n < document.answers.size(); ++n) {
      add_part(at, document.answers[n], document.question, static_cast<int32_t>(n) + 1, true);
      at += document.answers[n];
    }
  }

 private:
  /// Tokens [first, first + count) of the document, at positions from `position` on.
  void add_part(int64_t first, int64_t count, int64_t position, int32_t answer, bool learned) {
    for (int64_t t = 0; t < count; ++t) {
      const std::size_t at = index(begin_ + first + t);
      packed_.input_ids[at] = document_->tokens[index(first + t)];
      packed_.position_ids[at] = static_cast<int32_t>(position + t);
      packed_.segment_ids[at] = number_;
      if (!packed_.answer_ids.empty()) packed_.answer_ids[at] = answer;
      if (!learned || t + 1 == count) continue;
      packed_.labels[at] = document_->tokens[index(first + t + 1)];
      packed_.loss_mask[at] = 1;
    }
  }

  Packed& packed_;
  std::vector<int64_t> used_;
  const Document* document_ = nullptr;
  int64_t begin_ = 0;
  int32_t number_ = 0;
};

/// LTS of one sequence: the library's mask of its documents (a question with one answer is just a causal
/// document), then 0 for the padding, which hides those keys from all rows. Rows of the padding see nothing,
/// as every document's LTS ends before them.
void write_mask(std::span<const QuestionGroup> groups, std::span<int32_t> lts) {
  const Mask mask = masks::shared_question(groups);
  std::copy(mask.lts().begin(), mask.lts().end(), lts.begin());
  std::fill(lts.begin() + static_cast<std::ptrdiff_t>(mask.seqlen_k()), lts.end(), 0);
}

template <typename Element>
io::SafetensorsEntry entry(const char* name, const char* dtype, std::vector<int64_t> shape, const std::vector<Element>& values) {
  return {name, dtype, std::move(shape), std::as_bytes(std::span(values))};
}

}  // namespace

Mask Packed::mask(int64_t begin, int64_t end) const {
  const auto at = [&](int64_t sequence) { return startend_row_indices.begin() + static_cast<std::ptrdiff_t>(sequence * seqlen); };
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
    if (length < 0 || length > seqlen) io::fail("a length is {}; it must be between 0 and the sequence length, {}", length, seqlen);
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

  Writer writer(packed);
  std::vector<std::vector<QuestionGroup>> groups(index(packed.sequences));
  for (std::size_t n = 0; n < documents.size(); ++n) {
    writer.add(documents[n], static_cast<int64_t>(n), sequence_of[n]);
    groups[index(sequence_of[n])].push_back({documents[n].question, documents[n].answers});
    packed.tokens += documents[n].length();
  }
  for (std::size_t s = 0; s < groups.size(); ++s) {
    write_mask(groups[s], std::span(packed.startend_row_indices).subspan(s * index(seqlen), index(seqlen)));
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
  entries.push_back(entry("loss_mask", "BOOL", shape, packed.loss_mask));
  const io::SafetensorsMetadata metadata{
      {"format", "flashmask-packed"},
      {"format_version", "1"},
      {"producer", fmt::format("flashmask {}.{}.{}", FLASHMASK_VERSION_MAJOR, FLASHMASK_VERSION_MINOR, FLASHMASK_VERSION_PATCH)},
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
  io::write_safetensors(path, entries, metadata);
}

}  // namespace flashmask::run
