// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "io/jsonl.h"

namespace flashmask::run {

/// Purpose of the records, which decides their keys, the mask and the place of the loss.
enum class Task {
  kPretrain,  ///< {"text"}
  kSft,       ///< {"prompt", "response"}
  kDpo,       ///< {"prompt", "chosen", "rejected"}
  kRm,        ///< {"prompt", "answers": [2 to 6]}
  kTree,      ///< {"text", "branches": [{"text", "branches": [...]}, ...]}
};

/// Bounds on the answers of a record of the task `rm`.
inline constexpr std::size_t kFewestAnswers = 2, kMostAnswers = 6;

std::vector<std::string> task_names();
std::string_view name(Task task);
/// Throws naming an unknown task.
Task task_from_name(std::string_view name);
/// Several answers follow one question, each blind to the others.
inline bool shares_question(Task task) { return task == Task::kDpo || task == Task::kRm; }
/// One text is packed once though several others go on from it.
inline bool shares_prefix(Task task) { return shares_question(task) || task == Task::kTree; }

/// Token ids: the 256 bytes of UTF-8, then these.
inline constexpr int32_t kBeginToken = 256;   ///< first token of every document
inline constexpr int32_t kEndToken = 257;     ///< last token of a text or answer
inline constexpr int32_t kPadToken = 258;     ///< fills a sequence up
inline constexpr int32_t kAnswerToken = 259;  ///< first token of every answer, response or branch
inline constexpr int32_t kVocabulary = 260;

/// A text of a tree; the texts of its branches go on from its end.
struct TreeNode {
  int64_t parent = -1;   ///< number of the node that it goes on from; -1 for the root
  int64_t length = 0;    ///< tokens of its own
  bool learned = false;  ///< its tokens are to be predicted
};

/// One record as tokens: a question, and after it its answers, which are alternatives to each other. A
/// pretraining text is an answer without a question. In a tree every answer can be a question again.
///   pretrain   BEGIN text END
///   sft        BEGIN prompt | ANSWER response END
///   dpo, rm    BEGIN prompt | ANSWER answer END | ANSWER answer END | ...
///   tree       BEGIN text | ANSWER text END | ANSWER text END | ..., depth first
/// Every answer begins with a token of its own, so that its first byte is predicted at a position of its own:
/// the question's last token could predict the first byte of one answer only.
struct Document {
  std::vector<uint16_t> tokens{};
  int64_t question = 0;            ///< tokens of the question
  std::vector<int64_t> answers{};  ///< tokens of each answer
  std::vector<TreeNode> nodes{};   ///< a tree's, depth first; a tree has neither question nor answers

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
};

/// A document's size if it shared nothing: one sequence for each answer with its question before it, or for
/// each leaf of a tree with all that leads to it.
struct SeparateSequences {
  int64_t count = 0, tokens = 0;
};
SeparateSequences separate_sequences(const Document& document);

/// The document of one record. Throws io::LineError if a key is missing, of the wrong type or empty, or if there
/// are too few or too many answers or branches. Keys that the task does not need are left alone.
Document make_document(Task task, const nlohmann::json& record);

/// A JSONL file as documents, one for each good line, in order.
struct Records {
  io::JsonlSummary summary{};
  std::vector<Document> documents{};
  int64_t text_bytes = 0;        ///< total over the good records
  int64_t longest_rejected = 0;  ///< tokens of the longest record that does not fit into `seqlen`; 0: all fit
};

/// Reads them. Bad lines are collected, see io::read_jsonl; a record of more than `seqlen` tokens is one.
Records read_records(const std::string& path, Task task, int64_t seqlen,
                     const std::function<void(int64_t bytes)>& progress = {});

}  // namespace flashmask::run
