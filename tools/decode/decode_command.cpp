// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/json_output.h"
#include "cli/options.h"
#include "decode/decode.h"
#include "flashmask/kv_cache.h"
#include "io/fail.h"
#include "io/file.h"

namespace flashmask::cli {
namespace {

using decode::DecodeFigures;
using decode::DecodeOptions;

Json to_json(const DecodeFigures& f) {
  Json checks = Json::array();
  for (const run::Accuracy& a : f.accuracy)
    checks.push_back({{"tensor", a.tensor}, {"max_error", a.max_error}, {"limit", a.limit}, {"passed", a.passed()}});
  return {{"passed", f.passed()},
          {"backend", f.backend},
          {"kernel", f.kernel},
          {"prompt", f.options.prompt},
          {"parents", f.parents},
          {"pages", f.pages},
          {"page_table", f.table},
          {"seconds",
           {{"append_prompt", f.append_prompt},
            {"prefill", f.prefill},
            {"one_row", f.one_row},
            {"append_drafts", f.append_drafts},
            {"verify", f.verify}}},
          {"bytes",
           {{"read", f.bytes_read},
            {"mask", f.mask_bytes},
            {"dense_mask", f.dense_bytes},
            {"plan", f.plan_bytes},
            {"workspace", f.workspace_bytes}}},
          {"checks", std::move(checks)}};
}

void run_decode(const DecodeOptions& options, const Global& global) {
  if (options.heads % options.kv_heads != 0)
    io::fail("--heads is {} and --kv-heads {}; the number of heads must be a multiple of that of key and value heads",
             options.heads, options.kv_heads);
  if (!options.report.empty()) io::check_writable(options.report);
  const DecodeFigures figures = decode::decode(options);
  if (figures.passed() && !options.report.empty())
    io::write_file_atomically(options.report, decode::report_html(figures));
  if (global.json) {
    print_json(to_json(figures));
  } else {
    fmt::print("{}", decode::to_text(figures));
    if (figures.passed() && !options.report.empty()) fmt::print("{:<11}{}\n", "written", options.report);
  }
  if (!figures.passed()) throw Exit{kFailure};
}

constexpr const char* kDescription =
    "Verify a tree of drafts over a paged KV cache, and check it\n"
    "\n"
    "A prompt is appended to pages in permuted order and attended to, then a random tree of drafts, whose nodes see "
    "the "
    "prompt,\n"
    "their ancestors and themselves. Rows of both calls are compared with sums in float64 that know of neither pages "
    "nor "
    "bits.";

}  // namespace

void add_decode_command(CLI::App& app, const Global& global) {
  const auto options = std::make_shared<DecodeOptions>();
  CLI::App* command = app.add_subcommand("decode", kDescription);
  const auto number = [&](const char* name, int64_t& value, int64_t most, const char* what) {
    command->add_option(name, value, what)->check(between(1, most))->capture_default_str();
  };
  number("--prompt", options->prompt, 1 << 20, "Tokens of the prompt");
  number("--drafts", options->drafts, kMaxTail, "Nodes of the tree");
  number("--page-size", options->page_size, 1 << 16, "Tokens of a page");
  number("--heads", options->heads, 1024, "Query heads");
  number("--kv-heads", options->kv_heads, 1024, "Key and value heads");
  number("--head-dim", options->head_dim, 256, "Head dim");
  const std::map<std::string, DataType> dtypes{
      {"float32", DataType::kFloat32}, {"bfloat16", DataType::kBFloat16}, {"float16", DataType::kFloat16}};
  command->add_option("--dtype", options->dtype, "float32, bfloat16 (the default) or float16")
      ->transform(CLI::CheckedTransformer(dtypes))
      ->type_name("DTYPE");
  command->add_option("--backend", options->backend, "The backend, as listed by 'flashmask info'")
      ->capture_default_str();
  command->add_option("--threads", options->threads, "Threads, 0 for the backend's default")
      ->check(between(0, 4096))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of tensors, pages and tree")
      ->check(any_seed())
      ->capture_default_str();
  command->add_option("--report", options->report, "Write a report with pictures as one HTML file")->type_name("FILE");
  command->callback([options, &global] { run_decode(*options, global); });
}

}  // namespace flashmask::cli
