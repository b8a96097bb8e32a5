// SPDX-License-Identifier: Apache-2.0
// Trees, from the record to the file. Visibility follows from the paths: every path from the root to a leaf is a causal
// text of its own, and nothing else may be seen.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "flashmask/builders.h"
#include "io/safetensors.h"
#include "run/packing.h"
#include "run/sequence_rule.h"
#include "support/temporary_folder.h"

namespace flashmask::run {
namespace {

using nlohmann::json;
using test::TemporaryFolder;

constexpr uint16_t B = kBeginToken, E = kEndToken, A = kAnswerToken;
using Tokens = std::vector<uint16_t>;

json leaf(const std::string& text) { return {{"text", text}}; }
json tree(const std::string& text, const std::vector<json>& branches) {
  return {{"text", text}, {"branches", branches}};
}

int64_t draw(std::mt19937_64& engine, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(engine() % static_cast<uint64_t>(high - low + 1));
}

json random_tree(std::mt19937_64& engine, int depth) {
  std::string text(static_cast<std::size_t>(draw(engine, 1, 6)), ' ');
  for (char& c : text) c = static_cast<char>(draw(engine, 'a', 'z'));
  json node = leaf(text);
  if (draw(engine, 0, 3) == 0) node["loss"] = draw(engine, 0, 1) == 1;
  std::vector<json> branches;
  const int64_t most = depth == 0 ? 3 : 3 - depth / 2;
  for (int64_t n = draw(engine, depth == 0 ? 1 : 0, std::max<int64_t>(most, 0)); n > 0; --n)
    branches.push_back(random_tree(engine, depth + 1));
  if (!branches.empty() || draw(engine, 0, 1) == 0) node["branches"] = branches;
  if (depth == 0 && branches.empty()) node["branches"] = {leaf("a")};
  return node;
}

// --- from the record to a document ------------------------------------------------------------------

TEST(Trees, AreLaidOutDepthFirst) {
  const Document document = make_document(Task::kTree, tree("q", {tree("ab", {leaf("c"), leaf("d")}), leaf("e")}));
  EXPECT_EQ(document.tokens, (Tokens{B, 'q', A, 'a', 'b', E, A, 'c', E, A, 'd', E, A, 'e', E}));
  ASSERT_EQ(document.nodes.size(), 5u);
  const int64_t parents[] = {-1, 0, 1, 1, 0}, lengths[] = {2, 4, 3, 3, 3};
  for (std::size_t n = 0; n < 5; ++n) {
    EXPECT_EQ(document.nodes[n].parent, parents[n]) << n;
    EXPECT_EQ(document.nodes[n].length, lengths[n]) << n;
    EXPECT_EQ(document.nodes[n].learned, n > 0) << n;
  }
  EXPECT_EQ(document.question, 0);
  EXPECT_TRUE(document.answers.empty());
}

TEST(Trees, SayWhatIsLearned) {
  const json record = json::parse(
      R"({"text":"q","loss":true,"branches":[{"text":"a","loss":false,"branches":[{"text":"b","branches":[]}]}]})");
  const Document document = make_document(Task::kTree, record);
  ASSERT_EQ(document.nodes.size(), 3u);
  EXPECT_TRUE(document.nodes[0].learned);
  EXPECT_FALSE(document.nodes[1].learned);
  EXPECT_TRUE(document.nodes[2].learned);
}

void expect_refused(const std::string& record, const std::string& reason) {
  try {
    make_document(Task::kTree, json::parse(record));
    ADD_FAILURE() << "accepted: " << record;
  } catch (const io::LineError& error) {
    EXPECT_EQ(std::string(error.what()), reason);
  }
}

TEST(Trees, EveryNodeIsChecked) {
  expect_refused(R"({"branches":[{"text":"a"}]})", "the key \"text\" is missing");
  expect_refused(R"({"text":3,"branches":[{"text":"a"}]})", "\"text\" must be a string, not number");
  expect_refused(R"({"text":"","branches":[{"text":"a"}]})", "\"text\" is empty");
  expect_refused(R"({"text":"q"})", "the key \"branches\" is missing");
  expect_refused(R"({"text":"q","branches":[]})", "\"branches\" has 0 elements; at least 1 is needed");
  expect_refused(R"({"text":"q","branches":"a"})", "\"branches\" must be an array of objects, not string");
  expect_refused(R"({"text":"q","branches":["a"]})",
                 "\"branches\"[0] must be an object with the key \"text\", not string");
  expect_refused(R"({"text":"q","branches":[{"text":"a"},{"text":""}]})", "\"branches\"[1].\"text\" is empty");
  expect_refused(R"({"text":"q","branches":[{"text":"a"},{"text":"b","branches":[{"text":"c"},{"txt":"d"}]}]})",
                 "the key \"branches\"[1].\"branches\"[1].\"text\" is missing");
  expect_refused(R"({"text":"q","branches":[{"text":"a","branches":null}]})",
                 "\"branches\"[0].\"branches\" must be an array of objects, not null");
  expect_refused(R"({"text":"q","branches":[{"text":"a","loss":1}]})",
                 "\"branches\"[0].\"loss\" must be true or false, not number");
}

/// A line that nests `depth` levels below its root.
std::string chain(int64_t depth, const std::string& last) {
  std::string line, end;
  for (int64_t n = 0; n < depth; ++n) {
    line += R"({"text":"a","branches":[)";
    end += "]}";
  }
  return line + last + end + "\n";
}

TEST(Trees, MayBeVeryDeep) {
  const TemporaryFolder folder;
  constexpr int64_t kDepth = 50'000, kSeqlen = 4 * kDepth;
  const std::string path = folder.write("x.jsonl", chain(kDepth, R"({"text":"b"})") + chain(20, R"({"text":""})"));
  const Records records = read_records(path, Task::kTree, kSeqlen);
  ASSERT_EQ(records.documents.size(), 1u);
  EXPECT_EQ(records.documents[0].length(), 2 + 3 * kDepth);
  EXPECT_EQ(separate_sequences(records.documents[0]).count, 1);
  const Packed packed = pack(Task::kTree, records.documents, kSeqlen);
  EXPECT_EQ(packed.position_ids[static_cast<std::size_t>(packed.tokens) - 1], packed.tokens - 1);
  ASSERT_EQ(records.summary.bad_lines.size(), 1u);
  EXPECT_EQ(records.summary.bad_lines[0].line, 2);
  EXPECT_NE(records.summary.bad_lines[0].reason.find("(12 levels).\"branches\"[0]."), std::string::npos);
  EXPECT_NE(records.summary.bad_lines[0].reason.find("\"text\" is empty"), std::string::npos);
}

// --- what sharing saves -----------------------------------------------------------------------------

void expect_separate(Task task, const json& record, int64_t count, int64_t tokens) {
  const SeparateSequences separate = separate_sequences(make_document(task, record));
  EXPECT_EQ(separate.count, count) << record;
  EXPECT_EQ(separate.tokens, tokens) << record;
}

TEST(SeparateSequences, ByHand) {
  expect_separate(Task::kPretrain, {{"text", "abc"}}, 1, 5);
  expect_separate(Task::kSft, {{"prompt", "ab"}, {"response", "c"}}, 1, 6);
  expect_separate(Task::kDpo, {{"prompt", "ab"}, {"chosen", "c"}, {"rejected", "de"}}, 2, (3 + 3) + (3 + 4));
  expect_separate(Task::kRm, {{"prompt", "a"}, {"answers", {"b", "c", "d"}}}, 3, 3 * (2 + 3));
  // Three leaves: q-ab-c, q-ab-d and q-e.
  expect_separate(Task::kTree, tree("q", {tree("ab", {leaf("c"), leaf("d")}), leaf("e")}), 3,
                  (2 + 4 + 3) + (2 + 4 + 3) + (2 + 3));
}

// --- packed -----------------------------------------------------------------------------------------

TEST(PackTrees, ByHand) {
  const std::vector<Document> documents{
      make_document(Task::kTree, tree("q", {tree("x", {leaf("y"), leaf("z")}), leaf("w")}))};
  const Packed packed = pack(Task::kTree, documents, 16);
  constexpr int32_t P = kPadToken;
  EXPECT_EQ(packed.input_ids, (std::vector<int32_t>{B, 'q', A, 'x', E, A, 'y', E, A, 'z', E, A, 'w', E, P, P}));
  EXPECT_EQ(packed.position_ids, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 2, 3, 4, 0, 0}));
  EXPECT_EQ(packed.node_ids, (std::vector<int32_t>{0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, -1, -1}));
  EXPECT_EQ(packed.segment_ids, (std::vector<int32_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1, -1}));
  EXPECT_EQ(packed.labels,
            (std::vector<int64_t>{-100, -100, 'x', E, -100, 'y', E, -100, 'z', E, -100, 'w', E, -100, -100, -100}));
  EXPECT_EQ(packed.startend_row_indices,
            (std::vector<int32_t>{14, 14, 11, 11, 11, 8, 8, 8, 11, 11, 11, 14, 14, 14, 0, 0}));
  EXPECT_TRUE(packed.answer_ids.empty());
  EXPECT_EQ(packed.separate.count, 3);
  EXPECT_EQ(packed.separate.tokens, 8 + 8 + 5);
  EXPECT_DOUBLE_EQ(packed.sharing_ratio(), 21.0 / 14);
}

TEST(PackTrees, OneLevelIsAQuestionWithItsAnswers) {
  const std::vector<Document> trees{make_document(Task::kTree, tree("ab", {leaf("c"), leaf("de"), leaf("f")}))};
  const std::vector<Document> questions{make_document(Task::kRm, {{"prompt", "ab"}, {"answers", {"c", "de", "f"}}})};
  const Packed tree = pack(Task::kTree, trees, 20), question = pack(Task::kRm, questions, 20);
  EXPECT_EQ(tree.input_ids, question.input_ids);
  EXPECT_EQ(tree.position_ids, question.position_ids);
  EXPECT_EQ(tree.labels, question.labels);
  EXPECT_EQ(tree.startend_row_indices, question.startend_row_indices);
  EXPECT_EQ(tree.node_ids, question.answer_ids);
  EXPECT_EQ(tree.separate.tokens, question.separate.tokens);
}

/// A node as the record has it, numbered depth first, with the way that leads to it.
struct Step {
  std::string text;
  bool learned;
};
struct Way {
  std::vector<int32_t> nodes;
  std::vector<Step> steps;
};

/// Calls f for every path from the root to a leaf.
void for_each_path(const json& node, const Way& before, int32_t& number, const std::function<void(const Way&)>& f) {
  Way way = before;
  way.nodes.push_back(number++);
  way.steps.push_back({node["text"], node.value("loss", !before.nodes.empty())});
  if (!node.contains("branches") || node["branches"].empty()) return f(way);
  for (const json& branch : node["branches"]) for_each_path(branch, way, number, f);
}

/// Compares a packing with the records that it came from, path by path.
class PathCheck {
 public:
  PathCheck(const Packed& packed, const std::vector<json>& records)
      : packed_(packed), visible_(static_cast<std::size_t>(packed.sequences * packed.seqlen * packed.seqlen)) {
    for (std::size_t n = 0; n < records.size(); ++n) {
      int32_t nodes = 0;
      for_each_path(records[n], {}, nodes, [&](const Way& way) { follow(static_cast<int32_t>(n), way); });
      nodes_ += nodes;
    }
  }

  void expect_all_good() const {
    EXPECT_EQ(static_cast<std::size_t>(nodes_), packed_.nodes.size());
    EXPECT_EQ(packed_.separate.count, paths_);
    EXPECT_EQ(packed_.separate.tokens, path_tokens_);
    EXPECT_EQ(to_dense(packed_.mask(0, packed_.sequences)), visible_);
    expect_rule();
    expect_padding();
  }

 private:
  /// Finds the places of a node's tokens by ids alone.
  std::vector<int64_t> places_of(int32_t segment, int32_t node) const {
    std::vector<int64_t> places;
    for (std::size_t t = 0; t < packed_.node_ids.size(); ++t) {
      if (packed_.segment_ids[t] == segment && packed_.node_ids[t] == node) places.push_back(static_cast<int64_t>(t));
    }
    return places;
  }

  void follow(int32_t segment, const Way& way) {
    std::vector<int64_t> path;
    for (std::size_t n = 0; n < way.nodes.size(); ++n) {
      const std::vector<int64_t> places = places_of(segment, way.nodes[n]);
      expect_tokens(places, way.steps[n], n == 0);
      expect_row(segment, way.nodes[n], n == 0 ? -1 : way.nodes[n - 1], places);
      path.insert(path.end(), places.begin(), places.end());
    }
    for (std::size_t t = 0; t < path.size(); ++t) {
      EXPECT_EQ(packed_.position_ids[static_cast<std::size_t>(path[t])], static_cast<int32_t>(t));
      for (std::size_t s = 0; s <= t; ++s)
        visible_[static_cast<std::size_t>(path[t] * packed_.seqlen + path[s] % packed_.seqlen)] = 1;
    }
    ++paths_;
    path_tokens_ += static_cast<int64_t>(path.size());
  }

  void expect_tokens(const std::vector<int64_t>& places, const Step& step, bool is_root) const {
    std::vector<int32_t> tokens{is_root ? B : A};
    for (const char c : step.text) tokens.push_back(static_cast<unsigned char>(c));
    if (!is_root) tokens.push_back(E);
    ASSERT_EQ(places.size(), tokens.size());
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const auto at = static_cast<std::size_t>(places[t]);
      EXPECT_EQ(packed_.input_ids[at], tokens[t]);
      const bool learned = step.learned && t + 1 < tokens.size();
      EXPECT_EQ(packed_.labels[at], learned ? tokens[t + 1] : kNoLabel);
      EXPECT_EQ(packed_.loss_mask[at], learned ? 1 : 0);
    }
  }

  /// The node's row in the table: its tokens are those, and contiguous.
  void expect_row(int32_t segment, int32_t node, int32_t parent, const std::vector<int64_t>& places) const {
    const auto row = std::find_if(packed_.nodes.begin(), packed_.nodes.end(),
                                  [&](const PackedNode& n) { return n.segment == segment && n.node == node; });
    ASSERT_NE(row, packed_.nodes.end());
    EXPECT_EQ(row->parent, parent);
    const int64_t begin = row->sequence * packed_.seqlen + row->begin;
    ASSERT_EQ(row->end - row->begin, static_cast<int32_t>(places.size()));
    for (std::size_t t = 0; t < places.size(); ++t) EXPECT_EQ(places[t], begin + static_cast<int64_t>(t));
  }

  /// The rule that the command's oracle goes by.
  void expect_rule() const {
    const Lineage lineage(packed_);
    std::size_t wrong = 0, element = 0;
    for (int64_t s = 0; s < packed_.sequences; ++s) {
      const SequenceRule rule{packed_, lineage, s};
      for (int64_t i = 0; i < packed_.seqlen; ++i) {
        for (int64_t j = 0; j < packed_.seqlen; ++j, ++element) wrong += rule.sees(i, j) != (visible_[element] != 0);
      }
    }
    EXPECT_EQ(wrong, 0u);
  }

  void expect_padding() const {
    int64_t tokens = 0;
    for (std::size_t t = 0; t < packed_.input_ids.size(); ++t) {
      const bool padding = packed_.input_ids[t] == kPadToken;
      tokens += !padding;
      EXPECT_EQ(packed_.segment_ids[t] < 0, padding);
      EXPECT_EQ(packed_.node_ids[t] < 0, padding);
      if (padding) {
        EXPECT_EQ(packed_.position_ids[t], 0);
      }
    }
    EXPECT_EQ(packed_.tokens, tokens);
  }

  const Packed& packed_;
  std::vector<uint8_t> visible_;
  int64_t nodes_ = 0, paths_ = 0, path_tokens_ = 0;
};

std::vector<Document> documents_of(const std::vector<json>& records) {
  std::vector<Document> documents;
  for (const json& record : records) documents.push_back(make_document(Task::kTree, record));
  return documents;
}

int64_t longest(const std::vector<Document>& documents) {
  int64_t length = 0;
  for (const Document& document : documents) length = std::max(length, document.length());
  return length;
}

TEST(PackTrees, EveryPathIsACausalTextOfItsOwn) {
  std::mt19937_64 engine(11);
  for (int trial = 0; trial < 25; ++trial) {
    SCOPED_TRACE(trial);
    std::vector<json> records;
    for (int64_t n = draw(engine, 1, 8); n > 0; --n) records.push_back(random_tree(engine, 0));
    const std::vector<Document> documents = documents_of(records);
    const Packed packed = pack(Task::kTree, documents, longest(documents) + draw(engine, 0, 80));
    PathCheck(packed, records).expect_all_good();
  }
}

TEST(PackTrees, TheExampleData) {
  std::ifstream stream(std::string(FLASHMASK_EXAMPLE_DATA) + "/tree.jsonl");
  std::vector<json> records;
  for (std::string line; std::getline(stream, line);) records.push_back(json::parse(line));
  ASSERT_GE(records.size(), 30u);
  const Packed packed = pack(Task::kTree, documents_of(records), 1000);
  EXPECT_GT(packed.sharing_ratio(), 1.2);
  PathCheck(packed, records).expect_all_good();
}

// --- the file ---------------------------------------------------------------------------------------

template <typename Element>
std::vector<Element> elements(const io::SafetensorsEntry& entry) {
  const auto* data = reinterpret_cast<const Element*>(entry.data.data());
  return {data, data + entry.data.size() / sizeof(Element)};
}

TEST(WritePackedTrees, HoldsTheNodes) {
  const TemporaryFolder folder;
  std::mt19937_64 engine(12);
  std::vector<json> records;
  for (int n = 0; n < 9; ++n) records.push_back(random_tree(engine, 0));
  const std::vector<Document> documents = documents_of(records);
  const Packed packed = pack(Task::kTree, documents, longest(documents) + 7);
  write_packed(folder / "x", packed, "source.jsonl");
  const io::SafetensorsFile file(folder / "x");
  EXPECT_EQ(file.metadata().at("task"), "tree");
  EXPECT_EQ(file.metadata().at("node_columns"), "segment, node, parent, sequence, begin, end");
  EXPECT_FALSE(file.contains("answer_ids"));
  EXPECT_EQ(elements<int32_t>(file.at("node_ids")), packed.node_ids);
  EXPECT_EQ(file.at("node_ids").shape, (std::vector<int64_t>{packed.sequences, packed.seqlen}));
  const auto count = static_cast<int64_t>(packed.nodes.size());
  EXPECT_EQ(file.at("nodes").shape, (std::vector<int64_t>{count, 6}));
  std::vector<int32_t> rows;
  for (const PackedNode& n : packed.nodes)
    rows.insert(rows.end(), {n.segment, n.node, n.parent, n.sequence, n.begin, n.end});
  EXPECT_EQ(elements<int32_t>(file.at("nodes")), rows);
}

}  // namespace
}  // namespace flashmask::run
