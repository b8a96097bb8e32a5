// SPDX-License-Identifier: Apache-2.0
#include "run/records.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/fail.h"

namespace flashmask::run {
namespace {

using nlohmann::json;

constexpr std::array<std::pair<std::string_view, Task>, 5> kTasks{{{"pretrain", Task::kPretrain},
                                                                   {"sft", Task::kSft},
                                                                   {"dpo", Task::kDpo},
                                                                   {"rm", Task::kRm},
                                                                   {"tree", Task::kTree}}};

template <typename... Arguments>
[[noreturn]] void bad_line(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  throw io::LineError(fmt::format(format, std::forward<Arguments>(arguments)...));
}

const json& required(const json& record, const char* key) {
  const auto found = record.find(key);
  if (found == record.end()) bad_line("the key \"{}\" is missing", key);
  return *found;
}

/// `what()` is the text's name in a message, and is only asked for one.
template <typename Name>
const std::string& text(const json& value, Name&& what) {
  if (!value.is_string()) bad_line("{} must be a string, not {}", what(), value.type_name());
  const auto& string = value.get_ref<const std::string&>();
  if (string.empty()) bad_line("{} is empty", what());
  return string;
}

const std::string& required_text(const json& record, const char* key) {
  return text(required(record, key), [&] { return fmt::format("\"{}\"", key); });
}

std::vector<std::string> answers_of(Task task, const json& record) {
  if (task == Task::kPretrain) return {required_text(record, "text")};
  if (task == Task::kSft) return {required_text(record, "response")};
  if (task == Task::kDpo) return {required_text(record, "chosen"), required_text(record, "rejected")};
  const json& answers = required(record, "answers");
  if (!answers.is_array()) bad_line("\"answers\" must be an array of strings, not {}", answers.type_name());
  if (answers.size() < kFewestAnswers || answers.size() > kMostAnswers) {
    bad_line("\"answers\" has {} element{}; {} to {} are accepted", answers.size(), answers.size() == 1 ? "" : "s",
             kFewestAnswers, kMostAnswers);
  }
  std::vector<std::string> texts;
  for (std::size_t n = 0; n < answers.size(); ++n)
    texts.push_back(text(answers[n], [&] { return fmt::format("\"answers\"[{}]", n); }));
  return texts;
}

void append_bytes(std::vector<uint16_t>& tokens, std::string_view string) {
  for (const char c : string) tokens.push_back(static_cast<unsigned char>(c));
}

/// Levels of a tree that a message spells out; of a deeper one it counts the first ones.
constexpr std::size_t kLongestPath = 8;

/// Reads a tree node by node without recursion: a line may nest as deeply as it likes.
class TreeReader {
 public:
  Document read(const json& record) {
    waiting_.push_back({&record, -1, 0});
    while (!waiting_.empty()) {
      const Place place = waiting_.back();
      waiting_.pop_back();
      places_.push_back(place);
      add_node(place);
    }
    return std::move(document_);
  }

 private:
  /// A node, the number of its parent, and which of the parent's branches it is.
  struct Place {
    const json* node;
    int64_t parent;
    std::size_t branch;
  };

  void add_node(const Place& place) {
    const json& node = *place.node;
    if (!node.is_object()) bad_line("{} must be an object with the key \"text\", not {}", here(), node.type_name());
    const auto found = node.find("text");
    if (found == node.end()) bad_line("the key {} is missing", here("text"));
    const bool is_root = place.parent < 0;
    const int64_t begin = document_.length();
    document_.tokens.push_back(is_root ? kBeginToken : kAnswerToken);
    append_bytes(document_.tokens, text(*found, [&] { return here("text"); }));
    if (!is_root) document_.tokens.push_back(kEndToken);
    document_.nodes.push_back({place.parent, document_.length() - begin, learned(node, !is_root)});
    add_branches(node, is_root);
  }

  bool learned(const json& node, bool otherwise) const {
    const auto found = node.find("loss");
    if (found == node.end()) return otherwise;
    if (!found->is_boolean()) bad_line("{} must be true or false, not {}", here("loss"), found->type_name());
    return found->get<bool>();
  }

  void add_branches(const json& node, bool is_root) {
    const auto found = node.find("branches");
    if (found == node.end()) {
      if (is_root) bad_line("the key \"branches\" is missing");
      return;
    }
    if (!found->is_array()) bad_line("{} must be an array of objects, not {}", here("branches"), found->type_name());
    if (is_root && found->empty()) bad_line("\"branches\" has 0 elements; at least 1 is needed");
    const auto number = static_cast<int64_t>(places_.size()) - 1;
    for (std::size_t n = found->size(); n-- > 0;) waiting_.push_back({&(*found)[n], number, n});
  }

  /// The node in hand, or one of its keys, as in "branches"[1]."branches"[0]."text".
  std::string here(std::string_view key = {}) const {
    std::vector<std::size_t> branches;
    for (Place place = places_.back(); place.parent >= 0; place = places_[static_cast<std::size_t>(place.parent)]) {
      branches.push_back(place.branch);
    }
    std::vector<std::string> parts;
    const std::size_t left_out = branches.size() > kLongestPath ? branches.size() - kLongestPath : 0;
    if (left_out > 0) parts.push_back(fmt::format("({} levels)", left_out));
    for (std::size_t n = branches.size() - left_out; n-- > 0;)
      parts.push_back(fmt::format("\"branches\"[{}]", branches[n]));
    if (!key.empty()) parts.push_back(fmt::format("\"{}\"", key));
    return fmt::format("{}", fmt::join(parts, "."));
  }

  Document document_{};
  std::vector<Place> places_{};   ///< all nodes so far
  std::vector<Place> waiting_{};  ///< nodes to come, the next one last
};

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

SeparateSequences separate_sequences(const Document& document) {
  SeparateSequences separate;
  const auto add = [&](int64_t tokens) {
    ++separate.count;
    separate.tokens += tokens;
  };
  for (const int64_t answer : document.answers) add(document.question + answer);
  std::vector<int64_t> path;  // tokens from the root to each node's end
  std::vector<bool> is_leaf(document.nodes.size(), true);
  for (const TreeNode& node : document.nodes) {
    const bool is_root = node.parent < 0;
    path.push_back(node.length + (is_root ? 0 : path[static_cast<std::size_t>(node.parent)]));
    if (!is_root) is_leaf[static_cast<std::size_t>(node.parent)] = false;
  }
  for (std::size_t n = 0; n < path.size(); ++n) {
    if (is_leaf[n]) add(path[n]);
  }
  return separate;
}

Document make_document(Task task, const json& record) {
  if (task == Task::kTree) return TreeReader().read(record);
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
