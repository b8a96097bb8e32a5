// SPDX-License-Identifier: Apache-2.0

// A JSONL file of records, read and packed for every task: each line is a document, a bad line or blank, and the packed
// documents' mask follows from their segments and answers.

#include "run/records.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "fuzz/check.h"
#include "fuzz/memory_file.h"
#include "run/packing.h"
#include "run/sequence_rule.h"

namespace flashmask::fuzz {
namespace {

/// Small, so that documents are rejected, share a sequence and begin a new one.
constexpr int64_t kSeqlen = 40;
/// Most sequences whose mask is checked element by element.
constexpr int64_t kMostSequences = 2;

void check_documents(const run::Records& records) {
  const io::JsonlSummary& summary = records.summary;
  const std::size_t found =
      records.documents.size() + summary.bad_lines.size() + static_cast<std::size_t>(summary.blank_lines);
  require(static_cast<int64_t>(found) == summary.lines, "every line is a document, bad or blank");
  for (const run::Document& document : records.documents) {
    int64_t length = std::accumulate(document.answers.begin(), document.answers.end(), document.question);
    for (const run::TreeNode& node : document.nodes) length += node.length;
    require(length == document.length() && length <= kSeqlen, "the parts are the document, and it fits");
  }
  for (const io::BadLine& bad : summary.bad_lines) {
    require(bad.line >= 1 && bad.line <= summary.lines && !bad.reason.empty(), "a bad line has a number and a reason");
  }
}

void check_mask(const run::Packed& packed) {
  const int64_t sequences = std::min(packed.sequences, kMostSequences);
  if (sequences == 0) return;
  const std::vector<uint8_t> visible = to_dense(packed.mask(0, sequences));
  const run::Lineage lineage(packed);
  std::size_t at = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const run::SequenceRule rule{packed, lineage, s};
    for (int64_t i = 0; i < kSeqlen; ++i) {
      for (int64_t j = 0; j < kSeqlen; ++j)
        require((visible[at++] != 0) == rule.sees(i, j), "the packed mask is the documents'");
    }
  }
}

void check(std::string_view contents) {
  const MemoryFile file(contents);
  for (const std::string& task_name : run::task_names()) {
    const run::Task task = run::task_from_name(task_name);
    run::Records records;
    require(succeeds([&] { records = run::read_records(file.path(), task, kSeqlen); }),
            "any file can be read line by line");
    check_documents(records);
    run::Packed packed;
    require(succeeds([&] { packed = run::pack(task, records.documents, kSeqlen); }), "any documents can be packed");
    check_mask(packed);
  }
}

}  // namespace
}  // namespace flashmask::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  flashmask::fuzz::check(flashmask::fuzz::as_text(data, size));
  return 0;
}
