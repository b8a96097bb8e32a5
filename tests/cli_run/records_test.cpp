// SPDX-License-Identifier: Apache-2.0
#include "run/records.h"

#include <nlohmann/json.hpp>

#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace flashmask::run {
namespace {

using nlohmann::json;
using test::expect_invalid;
using test::TemporaryFolder;

constexpr uint16_t B = kBeginToken, E = kEndToken, A = kAnswerToken;
using Tokens = std::vector<uint16_t>;
using Lengths = std::vector<int64_t>;

TEST(Documents, Pretraining) {
  const Document document = make_document(Task::kPretrain, json{{"text", "h\u00e9"}, {"id", 7}});
  EXPECT_EQ(document.tokens, (Tokens{B, 'h', 0xc3, 0xa9, E}));
  EXPECT_EQ(document.question, 0);
  EXPECT_EQ(document.answers, Lengths{5});
}

TEST(Documents, PromptAndResponse) {
  const Document document = make_document(Task::kSft, json{{"prompt", "ab"}, {"response", "c"}});
  EXPECT_EQ(document.tokens, (Tokens{B, 'a', 'b', A, 'c', E}));
  EXPECT_EQ(document.question, 3);
  EXPECT_EQ(document.answers, Lengths{3});
}

TEST(Documents, ChosenComesBeforeRejected) {
  const Document document = make_document(Task::kDpo, json{{"rejected", "no"}, {"chosen", "y"}, {"prompt", "a"}});
  EXPECT_EQ(document.tokens, (Tokens{B, 'a', A, 'y', E, A, 'n', 'o', E}));
  EXPECT_EQ(document.question, 2);
  EXPECT_EQ(document.answers, (Lengths{3, 4}));
}

TEST(Documents, AnswersKeepTheirOrder) {
  const Document document = make_document(Task::kRm, json{{"prompt", "a"}, {"answers", {"1", "22", "3"}}});
  EXPECT_EQ(document.tokens, (Tokens{B, 'a', A, '1', E, A, '2', '2', E, A, '3', E}));
  EXPECT_EQ(document.answers, (Lengths{3, 4, 3}));
}

TEST(Documents, NoTextMakesASpecialToken) {
  std::string text;
  for (int byte = 0; byte < 128; ++byte) text += static_cast<char>(byte);
  const Document document = make_document(Task::kPretrain, json{{"text", text}});
  for (std::size_t n = 1; n + 1 < document.tokens.size(); ++n) EXPECT_EQ(document.tokens[n], n - 1);
}

void expect_refused(Task task, const json& record, const std::string& reason) {
  try {
    make_document(task, record);
    ADD_FAILURE() << "accepted: " << record;
  } catch (const io::LineError& error) {
    EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << record << ": " << error.what();
  }
}

TEST(Documents, EveryKeyIsChecked) {
  const std::pair<Task, json> good[] = {{Task::kPretrain, {{"text", "a"}}},
                                        {Task::kSft, {{"prompt", "a"}, {"response", "b"}}},
                                        {Task::kDpo, {{"prompt", "a"}, {"chosen", "b"}, {"rejected", "c"}}},
                                        {Task::kRm, {{"prompt", "a"}, {"answers", {"b", "c"}}}}};
  for (const auto& [task, record] : good) {
    EXPECT_NO_THROW(make_document(task, record));
    for (const auto& [key, value] : record.items()) {
      const std::string quoted = "\"" + key + "\"";
      json changed = record;
      changed.erase(key);
      expect_refused(task, changed, "the key " + quoted + " is missing");
      changed[key] = 3;
      expect_refused(task, changed, quoted + " must be ");
      changed[key] = nullptr;
      expect_refused(task, changed, quoted + " must be ");
      if (key == "answers") continue;
      changed[key] = "";
      expect_refused(task, changed, quoted + " is empty");
      changed[key] = {"a"};
      expect_refused(task, changed, quoted + " must be a string, not array");
    }
  }
}

TEST(Documents, AnswersAreChecked) {
  const auto refuse = [](const json& answers, const std::string& reason) {
    expect_refused(Task::kRm, {{"prompt", "a"}, {"answers", answers}}, reason);
  };
  refuse(json::array(), "\"answers\" has 0 elements; 2 to 6 are accepted");
  refuse({"b"}, "\"answers\" has 1 element; 2 to 6 are accepted");
  refuse({"a", "b", "c", "d", "e", "f", "g"}, "\"answers\" has 7 elements; 2 to 6 are accepted");
  refuse({"b", 1}, "\"answers\"[1] must be a string, not number");
  refuse({"b", ""}, "\"answers\"[1] is empty");
  refuse("bc", "must be an array");
}

TEST(Documents, TwoToSixAnswers) {
  json answers = {"b"};
  for (std::size_t n = 2; n <= 6; ++n) {
    answers.push_back("c");
    EXPECT_EQ(make_document(Task::kRm, {{"prompt", "a"}, {"answers", answers}}).answers.size(), n);
  }
}

TEST(Records, LongAndBadLinesAreReported) {
  TemporaryFolder folder;
  const std::string path = folder.write(
      "x.jsonl",
      "{\"text\":\"12345\"}\n{\"text\":\"123456\"}\n\n{\"txt\":\"1\"}\n{\"text\":\"123456789\"}\n{\"text\":\"1\"}\n");
  const Records records = read_records(path, Task::kPretrain, 7);
  ASSERT_EQ(records.documents.size(), 2u);
  EXPECT_EQ(records.documents[0].length(), 7);
  EXPECT_EQ(records.text_bytes, 6);
  EXPECT_EQ(records.longest_rejected, 11);
  const auto& bad = records.summary.bad_lines;
  ASSERT_EQ(bad.size(), 3u);
  EXPECT_EQ(bad[0].line, 2);
  EXPECT_EQ(bad[0].reason, "the record has 8 tokens, more than a sequence of 7 holds");
  EXPECT_EQ(bad[1].line, 4);
  EXPECT_EQ(bad[2].line, 5);
  EXPECT_EQ(read_records(path, Task::kPretrain, 11).longest_rejected, 0);
}

TEST(Tasks, Names) {
  for (const std::string& task : task_names()) EXPECT_EQ(name(task_from_name(task)), task);
  EXPECT_EQ(task_names().size(), 5u);
  expect_invalid({"'ppo'", "pretrain, sft, dpo, rm, tree"}, [] { task_from_name("ppo"); });
}

}  // namespace
}  // namespace flashmask::run
