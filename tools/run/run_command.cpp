// SPDX-License-Identifier: Apache-2.0
#include "run/run_command.h"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "cli/progress.h"
#include "io/fail.h"
#include "io/file.h"
#include "io/jsonl.h"
#include "run/figures.h"
#include "run/report.h"

namespace flashmask::run {
namespace {

/// Length that a sequence would need for the records that were too long.
std::string longest_text(const Records& records) {
  if (records.longest_rejected == 0) return "";
  return fmt::format("\nThe longest record has {0} tokens: --seqlen {0} takes them all.", records.longest_rejected);
}

/// The good records; bad lines end the run, or are reported if they are to be skipped.
Records read_input(const RunOptions& options) {
  std::error_code unknown;  // a pipe has no size
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(options.input, unknown));
  cli::Progress progress("reading", unknown ? 0 : bytes, false);
  Records records =
      read_records(options.input, options.task, options.seqlen, [&](int64_t read) { progress.advance(read); });
  const auto& bad = records.summary.bad_lines;
  const std::string text = io::describe_bad_lines(options.input, bad) + longest_text(records);
  if (!bad.empty() && !options.skip_bad) {
    io::fail("{}\nNothing was written. --skip-bad goes on without them.", text);
  }
  if (records.documents.empty()) {
    if (bad.empty()) io::fail("{} holds no records", options.input);
    io::fail("{}\nNo record is left.", text);
  }
  if (!bad.empty()) fmt::print(stderr, "{}\n", text);
  return records;
}

struct Lengths {
  int64_t longest = 0, total = 0;
};
Lengths lengths_of(const std::vector<Document>& documents) {
  Lengths lengths;
  for (const Document& document : documents) {
    lengths.longest = std::max(lengths.longest, document.length());
    lengths.total += document.length();
  }
  return lengths;
}

void write_outputs(const RunFigures& figures) {
  const RunOptions& options = figures.options;
  if (!options.out.empty())
    write_packed(options.out, figures.packed, std::filesystem::path(options.input).filename().string());
  if (!options.report.empty()) io::write_file_atomically(options.report, report_html(figures));
}

}  // namespace

void run(const RunOptions& options, const cli::Global& global) {
  check_options(options);
  const Records records = read_input(options);
  const Lengths lengths = lengths_of(records.documents);
  check_memory(options, lengths.total);
  const Packed packed = pack(options.task, records.documents, options.seqlen);
  const Projections projections(options.shape, lengths.longest, options.seed);
  RunFigures figures{.options = options, .records = records, .packed = packed};
  figures.masked = run_masked(options, packed, projections);
  figures.dense = compare_with_dense(options, packed, projections, figures.masked);
  if (figures.passed()) write_outputs(figures);

  if (global.json) {
    fmt::print("{}\n", to_json(figures).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else {
    fmt::print("{}", to_text(figures));
    if (figures.passed() && !options.out.empty()) fmt::print("{:<11}{}\n", "written", options.out);
    if (figures.passed() && !options.report.empty()) fmt::print("{:<11}{}\n", "written", options.report);
  }
  if (figures.passed()) return;
  fmt::print(stderr, "flashmask: the check of the results failed; nothing was written\n");
  throw cli::Exit{cli::kFailure};
}

}  // namespace flashmask::run
