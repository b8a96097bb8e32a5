// SPDX-License-Identifier: Apache-2.0
#include "run/options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <new>

#include "cli/commands.h"
#include "cli/options.h"
#include "flashmask/attention.h"
#include "io/fail.h"
#include "io/file.h"
#include "run/packing.h"
#include "run/run_command.h"

namespace flashmask::run {
namespace {

constexpr int64_t kMostCount = std::numeric_limits<int64_t>::max() / 2;
constexpr int64_t kMostSequencesPerCall = 8;
constexpr int64_t kBytesPerCall = int64_t{1} << 30;
constexpr int64_t kShortestSeqlen = 3;  // BEGIN, one byte, END

/// Bytes of q, out, dout, dq, k, v, dk and dv for one sequence.
double tensor_bytes(const RunOptions& options) {
  const int64_t elements = 4 * (options.shape.heads + options.shape.kv_heads) * options.shape.head_dim;
  return static_cast<double>(options.seqlen) * static_cast<double>(elements) *
         static_cast<double>(element_size(options.dtype));
}

/// True if two paths name one file, be it there already or not.
bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  if (std::filesystem::equivalent(a, b, error)) return true;
  const auto place = [&](const std::string& path) {
    return std::filesystem::weakly_canonical(std::filesystem::absolute(path, error), error);
  };
  return place(a) == place(b);
}

void check_distinct(const char* option, const std::string& path, const char* other_option, const std::string& other) {
  if (!path.empty() && !other.empty() && same_file(path, other))
    io::fail("{} and {} are the same file, '{}'", option, other_option, path);
}

void check_backend(const RunOptions& options) {
  if (options.backend == "auto") return;
  std::vector<std::string> names{"auto"};
  for (const BackendInfo& info : backends()) {
    names.push_back(info.name);
    if (info.name != options.backend) continue;
    if (!info.usable)
      throw Error(ErrorCode::kNoDevice, fmt::format("--backend is {}, not usable here: {}", info.name, info.detail));
    if (info.name == "cuda" && options.dtype == DataType::kFloat32)
      io::fail("--dtype is float32; with --backend cuda it must be bfloat16 or float16");
    return;
  }
  io::fail("--backend is '{}'; this build has {}", options.backend, fmt::join(names, ", "));
}

/// Declares the options of `flashmask run`, to be parsed into `options`.
void add_options(CLI::App& command, RunOptions& options) {
  const auto set_task = [&options](const std::string& name) { options.task = task_from_name(name); };
  const auto set_dtype = [&options](const std::string& name) {
    options.dtype = name == "bfloat16"  ? DataType::kBFloat16
                    : name == "float16" ? DataType::kFloat16
                                        : DataType::kFloat32;
  };
  const auto not_empty = CLI::Validator(
      [](const std::string& path) { return path.empty() ? std::string("a file name is needed") : std::string(); }, "");
  command.add_option("--input", options.input, "JSONL file, one record per line")
      ->required()
      ->check(not_empty)
      ->type_name("FILE.jsonl");
  command
      .add_option_function<std::string>(
          "--task", set_task,
          "pretrain: {text}; sft: {prompt, response}; dpo: {prompt, chosen, rejected}; rm: {prompt, answers}; "
          "tree: {text, branches: [{text, branches}, ...]}")
      ->required()
      ->check(CLI::IsMember(task_names()));
  command.add_option("--seqlen", options.seqlen, "Tokens of a packed sequence")
      ->check(cli::between(kShortestSeqlen, kMaxSeqlen))
      ->capture_default_str();
  command.add_option("--heads", options.shape.heads, "Query heads")
      ->check(cli::between(1, 1024))
      ->capture_default_str();
  command.add_option("--kv-heads", options.shape.kv_heads, "Key and value heads; must divide --heads")
      ->check(cli::between(1, 1024))
      ->capture_default_str();
  command.add_option("--head-dim", options.shape.head_dim, "Width of a head")
      ->check(cli::between(1, 256))
      ->capture_default_str();
  command
      .add_option_function<std::string>(
          "--dtype", set_dtype,
          "Type of q, k, v and the results; with --backend cuda bfloat16 or float16, and bfloat16 by default")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}))
      ->default_str("float32");
  command
      .add_option("--backend", options.backend,
                  "auto, in host memory, or a backend that `flashmask info` lists; cuda: on the first GPU")
      ->capture_default_str();
  command.add_option("--threads", options.threads, "CPU threads; 0: as many as there are")
      ->check(cli::between(0, 4096))
      ->capture_default_str();
  command.add_option("--seed", options.seed, "Seed of embeddings, projections, output gradient and samples")
      ->check(cli::any_seed())
      ->capture_default_str();
  command
      .add_option("--limit-sequences", options.limit_sequences,
                  "Run attention on the first N sequences only; 0: on all. --out has all in any case")
      ->check(cli::between(0, kMostCount))
      ->type_name("N")
      ->capture_default_str();
  command
      .add_option("--batch-size", options.batch_size,
                  "Sequences per attention call; 0: at most 8, and about 1 GiB of tensors")
      ->check(cli::between(0, kMostCount))
      ->type_name("N")
      ->capture_default_str();
  command
      .add_option("--dense-seconds", options.dense_seconds,
                  "About how long the comparison with dense masks may take: it runs on as many of the first sequences "
                  "as fit, one at least; 0: none")
      ->check(cli::number_between(0.0, 1e9))
      ->type_name("S")
      ->capture_default_str();
  command.add_flag("--skip-bad", options.skip_bad, "Report bad lines and go on without them");
  command.add_option("--out", options.out, "Write the packed sequences as a safetensors file")
      ->check(not_empty)
      ->type_name("FILE");
  command.add_option("--report", options.report, "Write a report with pictures as one HTML file")
      ->check(not_empty)
      ->type_name("FILE");
}

}  // namespace

void check_options(const RunOptions& options) {
  if (options.shape.heads % options.shape.kv_heads != 0) {
    io::fail(
        "--heads is {} and --kv-heads {}; the number of heads must be a multiple of the number of key and value heads",
        options.shape.heads, options.shape.kv_heads);
  }
  check_backend(options);
  io::check_readable(options.input);
  check_distinct("--out", options.out, "--report", options.report);
  check_distinct("--out", options.out, "--input", options.input);
  check_distinct("--report", options.report, "--input", options.input);
  if (!options.out.empty()) io::check_writable(options.out);
  if (!options.report.empty()) io::check_writable(options.report);
}

void check_memory(const RunOptions& options, int64_t tokens) {
  const int64_t sequences = std::max<int64_t>(1, tokens / options.seqlen);
  const double packed =
      static_cast<double>(sequences) * static_cast<double>(options.seqlen) * static_cast<double>(kPackedBytesPerToken);
  const double call = static_cast<double>(batch_size_of(options, sequences)) * tensor_bytes(options);
  const double memory = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  if (packed + call <= memory) return;
  io::fail(
      "this needs {:.1f} GiB for {} sequence(s) of {} tokens and {:.1f} GiB for one attention call, and the machine "
      "has {:.1f} GiB: try a smaller --seqlen, --batch-size, --heads or --head-dim",
      packed * 0x1p-30, sequences, options.seqlen, call * 0x1p-30, memory * 0x1p-30);
}

int64_t batch_size_of(const RunOptions& options, int64_t sequences) {
  if (options.batch_size > 0) return std::min(options.batch_size, sequences);
  const double fitting = static_cast<double>(kBytesPerCall) / tensor_bytes(options);
  return std::min(std::clamp<int64_t>(static_cast<int64_t>(fitting), 1, kMostSequencesPerCall), sequences);
}

}  // namespace flashmask::run

namespace flashmask::cli {

void add_run_command(CLI::App& app, const Global& global) {
  CLI::App* command = app.add_subcommand(
      "run", "Pack records, run masked attention on them forward and backward, check it, write a file to train from");
  const auto options = std::make_shared<run::RunOptions>();
  run::add_options(*command, *options);
  command->callback([options, command, &global] {
    if (options->backend == "cuda" && command->count("--dtype") == 0) options->dtype = DataType::kBFloat16;
    constexpr const char* kSmaller = "try a smaller --batch-size, --seqlen, --heads or --head-dim";
    try {
      run::run(*options, global);
    } catch (const std::bad_alloc&) {
      io::fail("there is not enough memory: {}", kSmaller);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kOutOfMemory) throw;
      throw Error(error.code(), fmt::format("{}; {}", error.what(), kSmaller));
    }
  });
}

}  // namespace flashmask::cli
