// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/family_list.h"
#include "cli/json_output.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "flashmask/attention.h"
#include "flashmask/status.h"
#include "verify/any_case.h"
#include "verify/cached_cases.h"
#include "verify/covering_cases.h"
#include "verify/features.h"
#include "verify/random_cases.h"
#include "verify/run_case.h"
#include "verify/tally.h"

namespace flashmask::cli {
namespace {

/// cpu, or in a build without it the first backend that can run.
std::string default_backend() {
  std::string first;
  for (const BackendInfo& backend : backends()) {
    if (!backend.usable) continue;
    if (backend.name == "cpu") return backend.name;
    if (first.empty()) first = backend.name;
  }
  return first;
}

struct VerifyArguments {
  std::string backend = default_backend();
  std::string families = "all";
  std::string caches = "auto";
  int64_t cases = 200;
  uint64_t seed = 0;
  int threads = 2;
  int jobs = 0;
  bool covering = false;
  std::vector<std::string> dtypes, layouts;
  std::vector<int64_t> head_dims;
  bool list = false;
  std::vector<std::string> lines;  ///< --case
};

using TakeCase = std::function<void(const verify::AnyCase&)>;

/// One random case in so many is over a cache.
constexpr int64_t kOneInCached = 5;

/// Families are those of square masks, so choosing among them leaves out caches, unless these are asked for.
bool has_caches(const VerifyArguments& arguments) {
  return arguments.caches == "auto" ? arguments.families == "all" : arguments.caches != "no";
}

/// The families asked for; "all" has the cases of no family, too.
std::vector<std::string> case_families(const VerifyArguments& arguments) {
  std::vector<std::string> names = family_list(arguments.families);
  if (arguments.families == "all") {
    for (const std::string_view other : {verify::kNoMask, verify::kRandomMatrix}) names.emplace_back(other);
  }
  return names;
}

void each_random_case(const VerifyArguments& arguments, const TakeCase& take) {
  const std::vector<std::string> families = case_families(arguments);
  const std::vector<std::string> refused = verify::refused_features(arguments.backend);
  for (int64_t n = 0; n < arguments.cases; ++n) {
    if (arguments.caches == "only" || (has_caches(arguments) && n % kOneInCached == kOneInCached - 1)) {
      take(verify::random_cached_case(arguments.seed, n, arguments.backend));
    } else {
      take(verify::random_case(arguments.seed, n, families, refused));
    }
  }
}

verify::CoveringValues covering_values(const VerifyArguments& arguments) {
  verify::CoveringValues only;
  for (const std::string& word : arguments.dtypes) only.dtypes.push_back(verify::parse_dtype(word, "--dtypes"));
  for (const std::string& word : arguments.layouts) only.layouts.push_back(verify::parse_layout(word, "--layouts"));
  only.head_dims = arguments.head_dims;
  // Values that a backend never takes would only be counted as skipped.
  if (only == verify::CoveringValues{} && arguments.backend == "cuda") return verify::cuda_values();
  only.features = verify::covering_features(arguments.backend);
  return only;
}

std::vector<verify::Case> covering_cases(const VerifyArguments& arguments) {
  std::vector<verify::Case> cases = verify::covering_cases(covering_values(arguments));
  const std::vector<std::string> families = case_families(arguments);
  std::erase_if(cases, [&](const verify::Case& c) {
    return std::find(families.begin(), families.end(), c.family) == families.end();
  });
  return cases;
}

/// True unless the list is restricted to values that caches do not have.
bool has_covering_caches(const VerifyArguments& arguments) {
  const bool restricted = !arguments.dtypes.empty() || !arguments.layouts.empty() || !arguments.head_dims.empty();
  return has_caches(arguments) && (!restricted || arguments.caches != "auto");
}

/// Makes one case after the other: there may be more than memory holds.
void each_case(const VerifyArguments& arguments, const TakeCase& take) {
  if (arguments.lines.empty() && !arguments.covering) return each_random_case(arguments, take);
  if (arguments.lines.empty()) {
    if (arguments.caches != "only") {
      for (const verify::Case& c : covering_cases(arguments)) take(c);
    }
    if (has_covering_caches(arguments)) {
      for (const verify::CachedCase& c : verify::covering_cached_cases(arguments.backend)) take(c);
    }
  }
  for (const std::string& line : arguments.lines) take(verify::parse_any_case(line));
}

void check_backend(const std::string& name) {
  if (name == "auto") return;
  std::string known = "auto";
  for (const BackendInfo& backend : backends()) {
    if (backend.name == name && backend.usable) return;
    if (backend.name == name)
      throw Error(ErrorCode::kNoDevice, fmt::format("backend '{}' is not usable here: {}", name, backend.detail));
    known += ", " + backend.name;
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("--backend is '{}', which is not known; known: {}", name, known));
}

/// Prints each case as it is made. As JSON the list looks as print_json prints it.
void list_cases(const VerifyArguments& arguments, bool json) {
  const char* before = "";
  if (json) fmt::print("{{\n  \"cases\": [");
  each_case(arguments, [&](const verify::AnyCase& c) {
    const std::string line = verify::describe(c);
    if (json) {
      fmt::print("{}\n    {}", std::exchange(before, ","), Json(line).dump());
    } else {
      fmt::print("{}\n", line);
    }
  });
  if (json) fmt::print("{}]\n}}\n", *before ? "\n  " : "");
}

void print_failure(std::size_t index, const verify::AnyCase& c, const verify::Verdict& verdict,
                   const std::string& backend) {
  std::string text = fmt::format("FAILED case {}\n", index);
  for (const std::string& line : verdict.failures) text += fmt::format("  {}\n", line);
  fmt::print("{}  again: flashmask verify --backend {} --case '{}'\n", text, backend, verify::describe(c));
  std::fflush(stdout);
}

/// Short cases cost something too: the constant is about the cost of an empty one.
int64_t work(const verify::AnyCase& c) { return cost(c) + 100'000; }

/// The number of all cases, and their work, of very many random ones by a sample. Making cases takes little of the time
/// that checking them does.
struct AllCases {
  int64_t count = 0;
  double work = 0;

  explicit AllCases(VerifyArguments arguments) {
    constexpr int64_t kSample = 100'000;
    const bool is_random = arguments.lines.empty() && !arguments.covering;
    const int64_t left_out = is_random ? std::max<int64_t>(arguments.cases - kSample, 0) : 0;
    arguments.cases -= left_out;
    each_case(arguments, [this](const verify::AnyCase& c) {
      ++count;
      work += static_cast<double>(cli::work(c));
    });
    work *= 1 + static_cast<double>(left_out) / static_cast<double>(std::max<int64_t>(count, 1));
    count += left_out;
  }
};

/// Checks cases as they are made, a block of them at a time.
class Checker {
 public:
  Checker(const VerifyArguments& arguments, const AllCases& all, bool json)
      : arguments_(arguments),
        json_(json),
        progress_(fmt::format("verify {} cases", all.count), static_cast<int64_t>(std::min(all.work, 9e18)),
                  /*show_counts=*/false) {}

  void add(const verify::AnyCase& c) {
    block_.push_back(c);
    if (block_.size() == kBlock) check_block();
  }

  verify::Tally finish() && {
    check_block();
    return std::move(tally_);
  }

 private:
  /// More than the covering list has, so that its most expensive cases all come first.
  static constexpr std::size_t kBlock = 4096;

  void check_block() {
    if (block_.empty()) return;
    const verify::RunOptions options{.backend = arguments_.backend, .threads = arguments_.threads};
    verify::run_cases(block_, options, arguments_.jobs, [&](std::size_t index, const verify::Verdict& verdict) {
      const verify::AnyCase& c = block_[index];
      tally_.add(first_ + index, c, verdict);
      if (!verdict.passed() && !json_) {
        progress_.clear();
        print_failure(first_ + index, c, verdict, arguments_.backend);
      }
      progress_.advance(work(c));
    });
    first_ += block_.size();
    block_.clear();
  }

  const VerifyArguments& arguments_;
  const bool json_;
  std::vector<verify::AnyCase> block_;
  std::size_t first_ = 0;  ///< index of the block's first case
  Progress progress_;
  verify::Tally tally_;
};

Json to_json(const verify::Tally& tally, const VerifyArguments& arguments) {
  Json failures = Json::array();
  for (const verify::FailedCase& f : tally.failures)
    failures.push_back({{"index", f.index}, {"case", f.line}, {"failures", f.failures}});
  return {{"backend", arguments.backend},
          {"seed", arguments.seed},
          {"passed", tally.passed},
          {"failed", tally.failed},
          {"largest_errors", tally.largest},
          {"failures", std::move(failures)},
          {"skipped", tally.skipped},
          {"forward_only", tally.forward_only},
          {"refused_features", verify::refused_features(arguments.backend)}};
}

void run_verify(const VerifyArguments& arguments, const Global& global) {
  if (arguments.list) return list_cases(arguments, global.json);
  check_backend(arguments.backend);
  Checker checker(arguments, AllCases(arguments), global.json);
  each_case(arguments, [&](const verify::AnyCase& c) { checker.add(c); });
  const verify::Tally tally = std::move(checker).finish();
  if (global.json) {
    print_json(to_json(tally, arguments));
  } else {
    const std::vector<std::string> refused = verify::refused_features(arguments.backend);
    if (!refused.empty()) fmt::print("features that the backend refuses: {}\n", fmt::join(refused, ", "));
    fmt::print("{}", verify::summary(tally));
  }
  if (!tally.succeeded()) throw Exit{kFailure};
}

constexpr const char* kDescription =
    "Check a backend on random masks, shapes, layouts and dtypes, forward and backward.\n"
    "\n"
    "Every case is compared with the oracle (float64, element by element) under the accuracy rule, and bit for bit "
    "with the same\n"
    "run under the mask given as a dense matrix. Outputs and workspace are filled with NaN beforehand, and the tiles "
    "that were\n"
    "executed are counted. One case in five is a call over a KV cache: its pages lie in any order, with NaN where no "
    "request has a\n"
    "key, and its results must have the same bits in pages of other sizes and layouts and beside no other request. "
    "Ends with\n"
    "'N passed, M failed'; the exit status is 0 if none failed and not all were skipped.\n"
    "\n"
    "On the cuda backend everything is copied to the first device and checked there; cases that it does not take are "
    "counted as\n"
    "skipped, with the reason, and so is a backward. For a list that it takes: --covering --dtypes bfloat16,float16 "
    "--head-dims\n"
    "64,128 --layouts bshd,bhsd,aligned.";

}  // namespace

void add_verify_command(CLI::App& app, const Global& global) {
  const auto arguments = std::make_shared<VerifyArguments>();
  CLI::App* command = app.add_subcommand("verify", kDescription);
  command->add_option("--backend", arguments->backend, "The backend to check, as listed by 'flashmask info'")
      ->capture_default_str();
  command->add_option("--families", arguments->families, "Mask families to draw from, separated by commas, or 'all'")
      ->capture_default_str();
  command
      ->add_option("--caches", arguments->caches,
                   "Calls over KV caches: auto (one case in five, none if --families chooses), yes, no, only")
      ->check(CLI::IsMember({"auto", "yes", "no", "only"}))
      ->capture_default_str();
  command->add_option("--cases", arguments->cases, "How many random cases")
      ->check(between(1, INT64_MAX))
      ->capture_default_str();
  command->add_option("--seed", arguments->seed, "Of the random cases: the same seed gives the same cases")
      ->check(any_seed())
      ->capture_default_str();
  command
      ->add_option("--threads", arguments->threads,
                   "Threads of the run with the mask, 0 for the backend's default; the run with the dense mask takes "
                   "one, so that equal bits also show that threads change nothing")
      ->check(between(0, 4096))
      ->capture_default_str();
  command->add_option("--jobs", arguments->jobs, "Cases checked side by side, 0 for one on each core")
      ->check(between(0, 4096))
      ->capture_default_str();
  CLI::Option* covering = command->add_flag(
      "--covering", arguments->covering,
      "Check the fixed list of over 1,500 cases, in which every two values of different dimensions meet, "
      "instead of random ones (some minutes); with --backend cuda those of what it takes");
  command->add_option("--dtypes", arguments->dtypes, "Of --covering: only these dtypes, separated by commas")
      ->delimiter(',')
      ->needs(covering);
  command->add_option("--head-dims", arguments->head_dims, "Of --covering: only these head dims")
      ->delimiter(',')
      ->check(between(1, 256))
      ->needs(covering);
  command
      ->add_option("--layouts", arguments->layouts, "Of --covering: only these layouts (bshd, bhsd, padded, aligned)")
      ->delimiter(',')
      ->needs(covering);
  CLI::Option* line = command
                          ->add_option("--case", arguments->lines,
                                       "Check this one case, as printed by --list or with a failure; may be repeated")
                          ->type_name("LINE")
                          ->take_all()
                          ->expected(1)
                          ->allow_extra_args(false);
  line->excludes(covering);
  command->add_flag("--list", arguments->list, "Only print the cases, one on a line");
  command->callback([arguments, &global] { run_verify(*arguments, global); });
}

}  // namespace flashmask::cli
