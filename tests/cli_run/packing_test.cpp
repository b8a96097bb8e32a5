// SPDX-License-Identifier: Apache-2.0
#include "run/packing.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "flashmask/builders.h"
#include "io/safetensors.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace flashmask::run {
namespace {

using nlohmann::json;
using test::expect_invalid;
using test::TemporaryFolder;

/// Every task but trees, which tree_test.cpp tests.
constexpr Task kAllTasks[] = {Task::kPretrain, Task::kSft, Task::kDpo, Task::kRm};

int64_t draw(std::mt19937_64& engine, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(engine() % static_cast<uint64_t>(high - low + 1));
}

std::string random_text(std::mt19937_64& engine, int64_t longest) {
  std::string text;
  for (int64_t n = draw(engine, 1, longest); n > 0; --n) text += static_cast<char>(draw(engine, 1, 127));
  return text;
}

/// The texts of a record, as they were before they became a document.
struct Source {
  std::string prompt;
  std::vector<std::string> answers;
};

json record_of(Task task, const Source& source) {
  if (task == Task::kPretrain) return {{"text", source.answers[0]}};
  if (task == Task::kSft) return {{"prompt", source.prompt}, {"response", source.answers[0]}};
  if (task == Task::kDpo)
    return {{"prompt", source.prompt}, {"chosen", source.answers[0]}, {"rejected", source.answers[1]}};
  return {{"prompt", source.prompt}, {"answers", source.answers}};
}

Source random_source(Task task, std::mt19937_64& engine, int64_t longest) {
  Source source;
  if (task != Task::kPretrain) source.prompt = random_text(engine, longest);
  const int64_t answers = task == Task::kRm ? draw(engine, 2, 6) : task == Task::kDpo ? 2 : 1;
  for (int64_t n = 0; n < answers; ++n) source.answers.push_back(random_text(engine, longest));
  return source;
}

std::vector<Document> documents_of(Task task, const std::vector<Source>& sources) {
  std::vector<Document> documents;
  for (const Source& source : sources) documents.push_back(make_document(task, record_of(task, source)));
  return documents;
}

// --- first fit --------------------------------------------------------------------------------------

/// The definition, word for word.
std::vector<int64_t> first_fit_by_search(const std::vector<int64_t>& lengths, int64_t seqlen) {
  std::vector<int64_t> used, sequences;
  for (const int64_t length : lengths) {
    std::size_t s = 0;
    while (s < used.size() && used[s] + length > seqlen) ++s;
    if (s == used.size()) used.push_back(0);
    used[s] += length;
    sequences.push_back(static_cast<int64_t>(s));
  }
  return sequences;
}

TEST(FirstFit, AsByDefinition) {
  std::mt19937_64 engine(1);
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t seqlen = draw(engine, 1, 60);
    std::vector<int64_t> lengths(static_cast<std::size_t>(draw(engine, 0, 90)));
    for (int64_t& length : lengths) length = draw(engine, 1, seqlen);
    EXPECT_EQ(first_fit(lengths, seqlen), first_fit_by_search(lengths, seqlen));
  }
}

TEST(FirstFit, FillsUpEarlierSequences) {
  EXPECT_EQ(first_fit(std::vector<int64_t>{6, 7, 4, 3, 1}, 10), (std::vector<int64_t>{0, 1, 0, 1, 2}));
}

TEST(FirstFit, RefusesWhatDoesNotFit) {
  expect_invalid({"11", "10"}, [] { first_fit(std::vector<int64_t>{3, 11}, 10); });
  expect_invalid({"-1"}, [] { first_fit(std::vector<int64_t>{-1}, 10); });
}

// --- a sequence by hand -----------------------------------------------------------------------------

TEST(Pack, ASharedQuestionByHand) {
  const std::vector<Document> documents = documents_of(Task::kDpo, {{"q", {"yz", "n"}}});
  const Packed packed = pack(Task::kDpo, documents, 11);
  constexpr int32_t B = kBeginToken, E = kEndToken, A = kAnswerToken, P = kPadToken;
  EXPECT_EQ(packed.sequences, 1);
  EXPECT_EQ(packed.tokens, 9);
  EXPECT_EQ(packed.input_ids, (std::vector<int32_t>{B, 'q', A, 'y', 'z', E, A, 'n', E, P, P}));
  EXPECT_EQ(packed.position_ids, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 2, 3, 4, 0, 0}));
  EXPECT_EQ(packed.labels, (std::vector<int64_t>{-100, -100, 'y', 'z', E, -100, 'n', E, -100, -100, -100}));
  EXPECT_EQ(packed.loss_mask, (std::vector<uint8_t>{0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0}));
  EXPECT_EQ(packed.segment_ids, (std::vector<int32_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, -1, -1}));
  EXPECT_EQ(packed.answer_ids, (std::vector<int32_t>{0, 0, 1, 1, 1, 1, 2, 2, 2, -1, -1}));
  EXPECT_EQ(packed.startend_row_indices, (std::vector<int32_t>{9, 9, 6, 6, 6, 6, 9, 9, 9, 0, 0}));
}

TEST(Pack, TwoTextsByHand) {
  const std::vector<Document> documents = documents_of(Task::kPretrain, {{"", {"ab"}}, {"", {"c"}}});
  const Packed packed = pack(Task::kPretrain, documents, 8);
  constexpr int32_t B = kBeginToken, E = kEndToken, P = kPadToken;
  EXPECT_EQ(packed.input_ids, (std::vector<int32_t>{B, 'a', 'b', E, B, 'c', E, P}));
  EXPECT_EQ(packed.position_ids, (std::vector<int32_t>{0, 1, 2, 3, 0, 1, 2, 0}));
  EXPECT_EQ(packed.labels, (std::vector<int64_t>{'a', 'b', E, -100, 'c', E, -100, -100}));
  EXPECT_EQ(packed.loss_mask, (std::vector<uint8_t>{1, 1, 1, 0, 1, 1, 0, 0}));
  EXPECT_EQ(packed.segment_ids, (std::vector<int32_t>{0, 0, 0, 0, 1, 1, 1, -1}));
  EXPECT_EQ(packed.startend_row_indices, (std::vector<int32_t>{4, 4, 4, 4, 7, 7, 7, 0}));
  EXPECT_TRUE(packed.answer_ids.empty());
}

TEST(Pack, OnlyTheResponseIsLearned) {
  const Packed packed = pack(Task::kSft, documents_of(Task::kSft, {{"ab", {"cd"}}}), 7);
  constexpr int32_t B = kBeginToken, E = kEndToken, A = kAnswerToken;
  EXPECT_EQ(packed.input_ids, (std::vector<int32_t>{B, 'a', 'b', A, 'c', 'd', E}));
  EXPECT_EQ(packed.position_ids, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(packed.labels, (std::vector<int64_t>{-100, -100, -100, 'c', 'd', E, -100}));
  EXPECT_EQ(packed.startend_row_indices, (std::vector<int32_t>{7, 7, 7, 7, 7, 7, 7}));
}

// --- what holds for every packing -------------------------------------------------------------------

/// Takes sequences apart again: texts by document, from ids and tokens alone.
std::map<int32_t, Source> unpacked(const Packed& packed) {
  std::map<int32_t, Source> sources;
  for (std::size_t t = 0; t < packed.input_ids.size(); ++t) {
    if (packed.segment_ids[t] < 0) continue;
    Source& source = sources[packed.segment_ids[t]];
    const int32_t token = packed.input_ids[t];
    if (token == kAnswerToken || (token == kBeginToken && packed.task == Task::kPretrain))
      source.answers.emplace_back();
    if (token < 256) (source.answers.empty() ? source.prompt : source.answers.back()) += static_cast<char>(token);
  }
  return sources;
}

void expect_everything_packed_once(const Packed& packed, const std::vector<Source>& sources) {
  const auto found = unpacked(packed);
  ASSERT_EQ(found.size(), sources.size());
  for (std::size_t n = 0; n < sources.size(); ++n) {
    EXPECT_EQ(found.at(static_cast<int32_t>(n)).prompt, sources[n].prompt);
    EXPECT_EQ(found.at(static_cast<int32_t>(n)).answers, sources[n].answers);
  }
}

/// Documents are contiguous and in order, the padding is at the end, and every vector has its size.
void expect_order(const Packed& packed) {
  const auto size = static_cast<std::size_t>(packed.sequences * packed.seqlen);
  for (const std::size_t n : {packed.input_ids.size(), packed.position_ids.size(), packed.labels.size(),
                              packed.loss_mask.size(), packed.segment_ids.size(), packed.startend_row_indices.size()}) {
    EXPECT_EQ(n, size);
  }
  EXPECT_EQ(packed.answer_ids.size(), shares_question(packed.task) ? size : 0);
  EXPECT_EQ(std::count_if(packed.segment_ids.begin(), packed.segment_ids.end(), [](int32_t id) { return id >= 0; }),
            packed.tokens);
  for (int64_t s = 0; s < packed.sequences; ++s) {
    for (int64_t t = 1; t < packed.seqlen; ++t) {
      const auto at = static_cast<std::size_t>(s * packed.seqlen + t);
      const int32_t before = packed.segment_ids[at - 1], here = packed.segment_ids[at];
      EXPECT_TRUE(here == -1 || (before != -1 && before <= here)) << s << " " << t;
      EXPECT_EQ(here == -1, packed.input_ids[at] == kPadToken);
    }
  }
}

/// The rule of the tasks, against every element of the library's mask.
void expect_masks(const Packed& packed) {
  const Mask mask = packed.mask(0, packed.sequences);
  EXPECT_EQ(mask.batch(), packed.sequences);
  EXPECT_EQ(to_startend_row_indices(mask).vectors, 1);
  const std::vector<uint8_t> dense = to_dense(mask);
  std::size_t wrong = 0, element = 0;
  for (int64_t s = 0; s < packed.sequences; ++s) {
    for (int64_t i = 0; i < packed.seqlen; ++i) {
      for (int64_t j = 0; j < packed.seqlen; ++j, ++element) {
        const auto row = static_cast<std::size_t>(s * packed.seqlen + i),
                   key = static_cast<std::size_t>(s * packed.seqlen + j);
        bool sees = j <= i && packed.segment_ids[row] >= 0 && packed.segment_ids[row] == packed.segment_ids[key];
        if (!packed.answer_ids.empty())
          sees = sees && (packed.answer_ids[key] == 0 || packed.answer_ids[key] == packed.answer_ids[row]);
        wrong += dense[element] != sees;
      }
    }
  }
  EXPECT_EQ(wrong, 0u);
}

/// Each answer is laid out as if it followed its question directly: positions count on, and labels are the
/// next tokens of that text.
void expect_positions_and_labels(const Packed& packed) {
  for (int64_t s = 0; s < packed.sequences; ++s) {
    std::map<int32_t, int32_t> question_length;
    std::map<std::pair<int32_t, int32_t>, int32_t> part_length;
    for (int64_t t = 0; t < packed.seqlen; ++t) {
      const auto at = static_cast<std::size_t>(s * packed.seqlen + t);
      const int32_t document = packed.segment_ids[at], token = packed.input_ids[at];
      if (document < 0) {
        EXPECT_EQ(packed.position_ids[at], 0);
        EXPECT_EQ(packed.labels[at], kNoLabel);
        EXPECT_EQ(packed.loss_mask[at], 0);
        continue;
      }
      const int32_t answer = packed.answer_ids.empty() ? 0 : packed.answer_ids[at];
      const int32_t in_part = part_length[{document, answer}]++;
      if (answer == 0) ++question_length[document];
      EXPECT_EQ(packed.position_ids[at], answer == 0 ? in_part : question_length[document] + in_part);
      // Learned: everything after the last BEGIN (pretraining) or from ANSWER on, up to the token before END.
      bool learned = token != kEndToken;
      if (packed.task != Task::kPretrain) {
        auto back = at;
        while (packed.input_ids[back] != kAnswerToken && packed.input_ids[back] != kBeginToken) --back;
        learned = learned && packed.input_ids[back] == kAnswerToken;
      }
      EXPECT_EQ(packed.labels[at], learned ? packed.input_ids[at + 1] : kNoLabel);
      EXPECT_EQ(packed.loss_mask[at], learned ? 1 : 0);
    }
  }
}

void expect_sound(const Packed& packed, const std::vector<Source>& sources) {
  EXPECT_EQ(packed.documents, static_cast<int64_t>(sources.size()));
  expect_everything_packed_once(packed, sources);
  expect_order(packed);
  expect_masks(packed);
  expect_positions_and_labels(packed);
}

TEST(Pack, RandomDocumentsOfEveryTask) {
  std::mt19937_64 engine(2);
  for (const Task task : kAllTasks) {
    for (int trial = 0; trial < 25; ++trial) {
      SCOPED_TRACE(std::string(name(task)) + " " + std::to_string(trial));
      std::vector<Source> sources;
      for (int64_t n = draw(engine, 1, 20); n > 0; --n)
        sources.push_back(random_source(task, engine, draw(engine, 1, 25)));
      expect_sound(pack(task, documents_of(task, sources), draw(engine, 170, 230)), sources);
    }
  }
}

TEST(Pack, DocumentsThatFillASequenceExactly) {
  const std::vector<Source> sources{{"", {"abc"}}, {"", {"d"}}, {"", {"efg"}}};
  const Packed packed = pack(Task::kPretrain, documents_of(Task::kPretrain, sources), 5);
  EXPECT_EQ(packed.sequences, 3);
  EXPECT_EQ(pack(Task::kPretrain, documents_of(Task::kPretrain, {sources[0]}), 5).padding_share(), 0);
}

std::vector<Source> example_sources(Task task) {
  std::ifstream stream(std::string(FLASHMASK_EXAMPLE_DATA) + "/" + std::string(name(task)) + ".jsonl");
  std::vector<Source> sources;
  for (std::string line; std::getline(stream, line);) {
    const json record = json::parse(line);
    Source source;
    if (task != Task::kPretrain) source.prompt = record["prompt"];
    if (task == Task::kPretrain) source.answers = {record["text"]};
    if (task == Task::kSft) source.answers = {record["response"]};
    if (task == Task::kDpo) source.answers = {record["chosen"], record["rejected"]};
    if (task == Task::kRm) source.answers = record["answers"];
    sources.push_back(source);
  }
  return sources;
}

TEST(Pack, TheExampleData) {
  for (const Task task : kAllTasks) {
    SCOPED_TRACE(std::string(name(task)));
    std::vector<Source> sources = example_sources(task);
    ASSERT_GE(sources.size(), 50u);
    sources.resize(50);
    expect_sound(pack(task, documents_of(task, sources), 1600), sources);
  }
}

TEST(Pack, MasksAreThoseOfTheBuilders) {
  std::mt19937_64 engine(3);
  std::vector<Source> sources;
  for (int n = 0; n < 12; ++n) sources.push_back(random_source(Task::kSft, engine, 20));
  const std::vector<Document> documents = documents_of(Task::kSft, sources);
  std::vector<int64_t> lengths;
  for (const Document& document : documents) lengths.push_back(document.length());
  const Documents all = Documents::from_lengths(lengths);
  const Packed packed = pack(Task::kSft, documents, all.total() + 5);
  ASSERT_EQ(packed.sequences, 1);
  EXPECT_EQ(to_dense(crop(packed.mask(0, 1), 0, all.total(), 0, all.total())), to_dense(masks::causal_document(all)));
}

TEST(Pack, MasksOfSomeSequences) {
  std::mt19937_64 engine(4);
  std::vector<Source> sources;
  for (int n = 0; n < 12; ++n) sources.push_back(random_source(Task::kRm, engine, 20));
  const Packed packed = pack(Task::kRm, documents_of(Task::kRm, sources), 200);
  ASSERT_GE(packed.sequences, 3);
  const Mask all = packed.mask(0, packed.sequences), some = packed.mask(1, 3);
  EXPECT_EQ(some.batch(), 2);
  for (int64_t i = 0; i < 200; ++i) {
    for (int64_t j = 0; j < 200; ++j) EXPECT_EQ(some.visible(1, 0, i, j), all.visible(2, 0, i, j));
  }
}

// --- the file ---------------------------------------------------------------------------------------

template <typename Element>
std::vector<Element> elements(const io::SafetensorsEntry& entry) {
  const auto* data = reinterpret_cast<const Element*>(entry.data.data());
  return {data, data + entry.data.size() / sizeof(Element)};
}

TEST(WritePacked, HoldsEverything) {
  TemporaryFolder folder;
  std::mt19937_64 engine(5);
  for (const Task task : kAllTasks) {
    std::vector<Source> sources;
    for (int n = 0; n < 9; ++n) sources.push_back(random_source(task, engine, 20));
    const Packed packed = pack(task, documents_of(task, sources), 211);
    write_packed(folder / "x", packed, "source.jsonl");
    const io::SafetensorsFile file(folder / "x");
    const std::vector<int64_t> shape{packed.sequences, 211};
    EXPECT_EQ(file.at("input_ids").shape, shape);
    EXPECT_EQ(file.at("startend_row_indices").shape, (std::vector<int64_t>{packed.sequences, 1, 211, 1}));
    EXPECT_EQ(elements<int32_t>(file.at("input_ids")), packed.input_ids);
    EXPECT_EQ(elements<int32_t>(file.at("position_ids")), packed.position_ids);
    EXPECT_EQ(elements<int64_t>(file.at("labels")), packed.labels);
    EXPECT_EQ(elements<uint8_t>(file.at("loss_mask")), packed.loss_mask);
    EXPECT_EQ(elements<int32_t>(file.at("segment_ids")), packed.segment_ids);
    EXPECT_EQ(elements<int32_t>(file.at("startend_row_indices")), packed.startend_row_indices);
    EXPECT_EQ(file.contains("answer_ids"), shares_question(task));
    if (shares_question(task)) {
      EXPECT_EQ(elements<int32_t>(file.at("answer_ids")), packed.answer_ids);
    }
    EXPECT_EQ(file.at("labels").dtype, "I64");
    EXPECT_EQ(file.at("loss_mask").dtype, "BOOL");
    EXPECT_EQ(file.metadata().at("task"), name(task));
    EXPECT_EQ(file.metadata().at("source"), "source.jsonl");
    EXPECT_EQ(file.metadata().at("seqlen"), "211");
    EXPECT_EQ(file.metadata().at("documents"), "9");
  }
}

}  // namespace
}  // namespace flashmask::run
