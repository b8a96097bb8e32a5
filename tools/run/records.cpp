// SPDX-License-Identifier: Apache-2.0
#include "run/records.h"

#include <algorithm>
#include <array>
#include <utility>

#include "io/fail.h"

namespace flashmask::run {
namespace {

using nlohmann::json;

constexpr std::array<std::pair<std::string_view, Task>, 4> kTasks{
    {{"pretrain", Task::kPretrain}, {"sft", Task::kSft}, {"dpo", Task::kDpo}, {"rm", Task::kRm}}};

template <typename... Arguments>
[[noreturn]] void bad_line(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  throw io::LineError(fmt::format(format, std::forward<Arguments>(arguments)...));
}

const json& required(const json& record, const char* key) {
  const auto found = record.find(key);
  if (found == record.end()) bad_line("the key \"{}\" is missing", key);
  return *found;
}

const std::string& text(const json& value, std::string_view what) {
  if (!value.is_string()) bad_line("{} must be a string, not {}", what, value.type_name());
  const auto& string = value.get_ref<const std::string&>();
  if (string.empty()) bad_line("{} is empty", what);
  return string;
}

const std::string& required_text(const json& record, const char* key) { return text(required(record, key), fmt::format("\"{}\"", key)); }

std::vector<std::string> answers_of(Task task, const json& record) {
  if (task == Task::kPretrain) return {required_text(record, "text")};
  if (task == Task::kSft) return {required_text(record, "response")};
  if (task == Task::kDpo) return {required_text(record, "chosen"), required_text(record, "rejected")};
  const json& answers = required(record, "answers");
  if (!answers.is_array()) bad_line("\"answers\" must be an array of strings, not {}", answers.type_name());
  if (answers.size() < 2) bad_line("\"answers\" has {} element{}; at least 2 are needed", answers.size(), answers.size() == 1 ? "" : "s");
  std::vector<std::string> texts;
  for (std::size_t n = 0; n < answers.size(); ++n) texts.push_back(text(answers[n], fmt::format("\"answers\"[{}]", n)));
  return texts;
}

void append_bytes(std::vector<uint16_t>& tokens, std::string_view string) {
  for (const char c : string) tokens.push_back(static_cast<unsigned char>(c));
}

int64_t bytes_of(const Document& document) {
  return std::count_if(document.tokens.begin(), document.tokens.end(), [](uint16_t token) { return token < 256; });
}

}  // namespace

std::vector<std::string> task_names() {
  std::vector<std::string> names;
  for (const auto& [task_name, task] : kTasks) names.emplace_back(task_name);
  return names;
}

std::string_view name(Task task) {
  return std::find_if(kTasks.begin(), kTasks.end(), [&](const auto& entry) { return entry.second == task; })->first;
}

Task task_from_name(std::string_view task_name) {
  for (const auto& [known, task] : kTasks) {
    if (known == task_name) return task;
  }
  io::fail("there is no task '{}'; accepted: {}", task_name, fmt::join(task_names(), ", "));
}

Document make_document(Task task, const json& record) {
  Document document;
  document.tokens.push_back(kBeginToken);
  if (task != Task::kPretrain) {
    append_bytes(document.tokens, required_text(record, "prompt"));
    document.question = document.length();
  }
  for (const std::string& answer : answers_of(task, record)) {
    const int64_t begin = document.answers.empty() ? document.question : document.length();
    if (task != Task::kPretrain) document.tokens.push_back(kAnswerToken);
    append_bytes(document.tokens, answer);
    document.tokens.push_back(kEndToken);
    document.answers.push_back(document.length() - begin);
  }
  return document;
}

Records read_records(const std::string& path, Task task, int64_t seqlen, const std::function<void(int64_t)>& progress) {
  Records records;
  const auto take = [&](int64_t, const json& record) {
    Document document = make_document(task, record);
    if (document.length() > seqlen) {
      records.longest_rejected = std::max(records.longest_rejected, document.length());
      bad_line("the record has {} tokens, more than a sequence of {} holds", document.length(), seqlen);
    }
    records.text_bytes += bytes_of(document);
    records.documents.push_back(std::move(document));
  };
  records.summary = io::read_jsonl(path, take, progress);
  return records;
}

}  // namespace flashmask::run
